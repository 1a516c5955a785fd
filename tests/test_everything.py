"""Nothing that a user could type before is lost: commands, options, choices, keys, recipes, entry points."""

import pytest

from tools import everything
from tools.everything_keys import Keys, known_keys

RECORD = everything.ROOT / "tools" / "everything.txt"


def test_no_name_of_the_record_is_gone(capsys):
    assert everything.compare(RECORD) == 0, capsys.readouterr().out


def test_the_record_is_sorted_and_without_doubles():
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))


def test_a_lost_name_is_told(tmp_path, capsys):
    old = tmp_path / "old.txt"
    old.write_text("key kv.page_size\nkey kv.pages\nverb run\n")
    assert everything.compare(old) == 1
    assert "gone: key kv.pages\n" in capsys.readouterr().out


@pytest.mark.slow
def test_every_key_takes_a_value_other_than_its_own():
    keys = Keys()
    assert {key: said for key in known_keys() if (said := keys.failure(key))} == {}
