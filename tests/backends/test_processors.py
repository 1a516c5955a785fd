"""Ranks that drive GPUs keep out of each other's way."""

import ctypes
import os
import platform
import threading

import pytest

from backends.jobs.affinity import EVERY, QuickProcessor, keep_for, shares
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


def attributes():
    """Return nice value and slice, in ns, of this thread, as sched_getattr says; a slice of 0 before Linux 6.12."""
    found = ctypes.create_string_buffer(56)
    assert not ctypes.CDLL(None).syscall({"x86_64": 315, "aarch64": 275}[platform.machine()], 0, found, 56, 0)
    return int.from_bytes(found[16:20], "little", signed=True), int.from_bytes(found[24:32], "little")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the system call's number is not known")
def test_a_thread_that_keeps_its_processor_for_longer_hands_that_on_and_stays_as_nice_as_it_was():
    found = []

    def inner():
        found.append(attributes())

    def outer():
        os.setpriority(os.PRIO_PROCESS, 0, 3)  # of this thread
        found.append(attributes())
        keep_for(10e-3)
        found.append(attributes())
        child = threading.Thread(target=inner)
        child.start()
        child.join()

    before = attributes()
    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    if not found[0][1]:
        pytest.skip("this kernel has no slices of threads")
    assert found[1:] == [(3, 10_000_000), (3, 10_000_000)]
    assert attributes() == before


@pytest.fixture
def roaming():
    """Leave this thread with the processors that it had."""
    before = os.sched_getaffinity(0)
    yield sorted(before)
    os.sched_setaffinity(0, before)


def current():
    return ctypes.CDLL(None).sched_getcpu()


def test_an_idle_thread_goes_on_until_it_is_on_a_quick_processor_and_may_still_use_all(roaming):
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


def test_where_all_are_slower_than_they_were_it_tries_each_once_and_rests(roaming):
    measured = iter([1.0, 1.1] + [2.0] * 6)
    quick = QuickProcessor((roaming * 2)[:2], lambda: next(measured))
    assert [quick.look() for _ in range(6)] == [0.0, 0.0, EVERY, 0.0, 0.0, EVERY]
