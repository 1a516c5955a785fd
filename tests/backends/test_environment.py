"""Variables of native engines: what is needed, what the user set, and what is only a default."""

import os

import pytest

from backends.base.processes import captured_stderr, prepare
from pdsim.core.errors import ConfigError


@pytest.fixture
def clean(monkeypatch):
    for name in ("PDSIM_TEST_A", "PDSIM_TEST_B"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_what_the_user_set_wins_over_a_default(clean):
    clean.setenv("PDSIM_TEST_A", "mine")
    found = prepare("engine", {"PDSIM_TEST_B": "1"}, {"PDSIM_TEST_A": "default"})
    assert found == {"PDSIM_TEST_A": "mine", "PDSIM_TEST_B": "1"}
    assert os.environ["PDSIM_TEST_B"] == "1"


def test_what_is_needed_is_not_set_against_the_users_will(clean):
    clean.setenv("PDSIM_TEST_A", "0")
    with pytest.raises(ConfigError, match="'engine' needs PDSIM_TEST_A=1, but the environment has PDSIM_TEST_A=0"):
        prepare("engine", {"PDSIM_TEST_A": "1"}, {})


def test_native_output_is_copied_and_still_printed(capfd):
    with captured_stderr() as log:
        os.write(2, b"native\n")
    assert log() == "native\n"
    assert capfd.readouterr().err == "native\n"
