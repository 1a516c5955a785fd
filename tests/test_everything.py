"""Nothing that a user could type before is lost: commands, options, choices, keys, recipes, entry points."""

import pytest

from tools import everything
from tools.everything import Keys, known_keys

RECORD = everything.ROOT / "tools" / "everything.txt"


def test_no_name_of_the_record_is_gone(capsys):
    assert everything.compare(RECORD) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_every_key_takes_a_value_other_than_its_own():
    keys = Keys()
    assert {key: said for key in known_keys() if (said := keys.failure(key))} == {}
