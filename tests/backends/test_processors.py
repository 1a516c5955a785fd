"""Ranks that drive GPUs keep out of each other's way."""

import ctypes
import os

import pytest

from backends.jobs.affinity import EVERY, QuickProcessor, shares
from pdsim.transfer.job import Place, RankSpec


def ranks(*gpus):
    return [RankSpec(f"rank{index}", "a:b", Place(gpu=gpu)) for index, gpu in enumerate(gpus)]


@pytest.fixture
def sixteen(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(100, 116)))


def test_each_rank_has_a_run_of_processors_of_its_own(sixteen):
    assert shares(ranks(0, 1, None)) == {
        "rank0": [100, 101, 102, 103, 104],
        "rank1": [105, 106, 107, 108, 109],
        "rank2": [110, 111, 112, 113, 114],
    }


@pytest.mark.parametrize("gpus", [(None, None), (0, 1, 2, 3, 0)], ids=["none drives a GPU", "too few each"])
def test_ranks_may_roam(sixteen, gpus):
    assert shares(ranks(*gpus)) == {}


@pytest.fixture
def roaming():
    """Leave this thread with the processors that it had."""
    before = os.sched_getaffinity(0)
    yield sorted(before)
    os.sched_setaffinity(0, before)


def current():
    return ctypes.CDLL(None).sched_getcpu()


def test_an_idle_thread_moves_to_a_quick_processor(roaming):
    if len(roaming) < 2:
        pytest.skip("one processor is all there is")
    first, second, *_ = roaming
    where, waits = [], []

    def measure():
        where.append(current())
        return 2.0 if where[-1] == first else 1.0

    quick = QuickProcessor([first, second], measure)
    assert where == [first, second]
    os.sched_setaffinity(0, {first})
    while where[-1] == first or not waits:  # the kernel may take a thread back that may use all
        waits.append(quick.look())
    assert where[2] == first
    assert where[-1] == second
    assert (waits[0], waits[-1]) == (0.0, EVERY)
    assert os.sched_getaffinity(0) == {first, second}


def test_with_all_processors_slower_it_tries_each_once(roaming):
    measured = iter([1.0, 1.1] + [2.0] * 6)
    quick = QuickProcessor((roaming * 2)[:2], lambda: next(measured))
    assert [quick.look() for _ in range(6)] == [0.0, 0.0, EVERY, 0.0, 0.0, EVERY]
