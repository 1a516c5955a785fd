"""What all tests rest on."""

import gc
import os
import signal
import sys
import threading

import pytest
from hypothesis import HealthCheck, settings

# A shell without job control starts background jobs with Ctrl-C ignored, and what they start inherits that; tests of
# Ctrl-C need it to work, however the suite was started.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Images of containers often forbid to keep compiled modules; each of the many processes would compile all of pdsim.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def pdsim_says(capfd):
    """Return a function that runs a command line and returns exit status, standard output and standard error."""

    def say(*words):
        from pdsim.cli.main import main  # few tests need it

        capfd.readouterr()
        status = main([str(word) for word in words])
        out, err = capfd.readouterr()
        return status, out, err

    return say


@pytest.fixture
def pdsim_prints(pdsim_says):
    """Return a function that runs a command line, which ends well, and returns what it prints."""

    def prints(*words):
        status, out, err = pdsim_says(*words)
        assert status == 0, err
        return out

    return prints


@pytest.fixture
def pdsim_refuses(pdsim_says):
    """Return a function that runs a command line, which is refused, and returns the lines that say why."""

    def refuses(*words):
        status, _, err = pdsim_says(*words)
        assert status == 2
        return err.rstrip("\n")

    return refuses


@pytest.fixture
def in_an_empty_folder(tmp_path, monkeypatch):
    """Run the test in a folder of its own, with errors told as users see them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PDSIM_DEBUG", raising=False)


def pytest_collection_finish() -> None:
    """Keep thousands of collected tests out of every garbage collection from now on."""
    gc.collect()
    gc.freeze()
