"""Ranks of a suite are forks of one process, and are what they would be if each were a start of Python."""

from __future__ import annotations

import os
import signal

import pytest

from backends.jobs.child_process import spawn
from backends.jobs.launcher import Processes
from backends.jobs.warm_start import WarmStart
from pdsim.core.errors import TransferError
from tests.backends import programs
from tests.support.engines import spec


@pytest.fixture
def warm():
    with WarmStart(["numpy"]) as start:
        yield start


@pytest.fixture
def outcome(mooncake):
    def run(start, *ranks, **options):
        return Processes(mooncake, deadline=60, device_capacity=1 << 24, spawn=start).run(ranks, **options)

    return run


def test_a_rank_has_what_a_start_of_python_would_have(outcome, warm, monkeypatch, tmp_path):
    """Though the process that forks it was started before: what this process has now."""
    look = spec("a", programs.surroundings)
    outcome(warm, look)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDSIM_TESTED", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    forked, fresh = (outcome(start, look).ranks["a"].value for start in (warm, spawn))
    assert forked == fresh
    assert (forked["folder"], forked["environ"]["PDSIM_TESTED"]) == (str(tmp_path), "1")


def test_a_forked_rank_ends_with_its_job(outcome, warm):
    ranks = [spec("a", programs.sleep, seconds=30.0), spec("b", programs.identify)]
    found = outcome(warm, *ranks, kill={"a": 0.1}).ranks
    assert found["a"].error.startswith("killed by signal 9, as was asked for")
    pid, parent = found["b"].value
    assert (found["b"].error, parent) == ("", os.getpid())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_dead_forker_is_reported_and_restarted(outcome, warm):
    nothing = spec("a", programs.sleep, seconds=0.0)
    outcome(warm, nothing)
    os.kill(warm.process.pid, signal.SIGKILL)
    warm.process.wait()
    with pytest.raises(TransferError, match="the process that forks ranks has ended; start the job again"):
        outcome(warm, nothing)
    assert outcome(warm, nothing).ranks["a"].error == ""


def test_the_process_that_forks_ends_with_who_asks(outcome):
    with WarmStart() as warm:
        outcome(warm, spec("a", programs.sleep, seconds=0.0))
    assert warm.process.returncode == 0
