"""Addresses and batches: what no engine may be given is refused where it is made; transfers settle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.clock import Clock
from pdsim.core.errors import InvalidBatch
from pdsim.transfer import Batch, Region, Transfer
from pdsim.transfer.batch import Arena, LazyBatch, move

SOURCE = Region("prefill0", "kv", 1000, 0, "gpu0")
TARGET = Region("decode0", "pool", 500, 0, "gpu1")


def batch(source_offset, target_offset, size):
    return Batch(SOURCE, TARGET, source_offset, target_offset, size)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60), st.randoms(use_true_random=False))
def test_the_first_gap_is_taken_and_gaps_join_again(steps, chance):
    arena, taken = Arena(100, base=7), []
    for size, back in steps:
        if back and taken:
            arena.give(*taken.pop(chance.randrange(len(taken))))
        bytes_used = {each for start, length in taken for each in range(start, start + length)}
        fits = [at for at in range(7, 108 - size) if bytes_used.isdisjoint(range(at, at + size))]
        address = arena.take(size)
        assert address == (fits[0] if fits else None)
        if address is not None:
            taken.append((address, size))
        assert arena.free == 100 - sum(length for _, length in taken)
    for each in taken:
        arena.give(*each)
    assert (arena.free, arena.largest_gap, arena.take(100)) == (100, 100, 7)


def test_a_batch_has_contiguous_int64_arrays_without_needless_copies():
    offset = np.arange(0, 400, 4)
    assert batch(offset, offset, np.full(100, 4)).source_offset is offset
    made = batch(np.arange(10)[::2], [20, 0, 40, 60, 80], np.ones(5, np.int32))
    for array in (made.source_offset, made.target_offset, made.size):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    assert (len(made), made.nbytes, made.source_offset.tolist()) == (5, 5, [0, 2, 4, 6, 8])
    assert repr(made) == "<Batch of 5 descriptors, 5 bytes, prefill0/kv -> decode0/pool>"


@pytest.mark.parametrize(
    ("source_offset", "target_offset", "size", "nbytes"),
    [([999], [499], [1], 1), ([0, 0, 0], [20, 0, 10], [10, 10, 10], 30), ([0, 5], [0, 10], [10, 10], 20)],
    ids=["the last byte", "targets that touch", "sources that overlap"],
)
def test_a_batch_may_have(source_offset, target_offset, size, nbytes):
    assert batch(source_offset, target_offset, size).nbytes == nbytes


@pytest.mark.parametrize(
    ("source_offset", "target_offset", "size", "message"),
    [
        ([], [], [], "an empty batch"),
        ([0, 1], [0], [1], "2 source offsets, 1 target offsets and 1 sizes"),
        ([0], [0], [0], r"size\[0\]=0: sizes must be positive"),
        ([0, 1], [0, 1], [1, -1], r"size\[1\]=-1: sizes must be positive"),
        ([993], [0], [8], r"source descriptor 0 covers \[993, 1001\) of region prefill0/kv, which has 1000 bytes"),
        ([0, 8], [0, 493], [8, 8], r"target descriptor 1 covers \[493, 501\) of region decode0/pool"),
        ([-1], [0], [1], r"source descriptor 0 covers \[-1, 0\)"),
        ([0], [-8], [8], r"target descriptor 0 covers \[-8, 0\)"),
        ([2**63 - 1], [0], [1], "source descriptor 0 covers"),
        ([0], [0], [2**63 - 1], "source descriptor 0 covers"),
        ([0, 0], [0, 9], [10, 10], "targets of descriptors 0 and 1 overlap"),
        ([0, 0, 0], [100, 9, 0], [10, 10, 10], "targets of descriptors 2 and 1 overlap"),
        ([0, 0], [0, 0], [10, 10], "targets of descriptors 0 and 1 overlap"),
        (np.array([2**64 - 1], np.uint64), [0], [1], "source descriptor 0 covers"),
        ([0.0], [0], [1], "source_offset must be a one-dimensional array of integers, got float64"),
        ([[0]], [0], [1], "source_offset must be a one-dimensional array"),
        ([0], [0], 1, r"size must be a one-dimensional array of integers, got int64 of \(\)"),
        ([True], [0], [1], "source_offset must be a one-dimensional array of integers, got bool"),
    ],
)
def test_a_batch_that_breaks_a_rule_is_refused(source_offset, target_offset, size, message):
    with pytest.raises(InvalidBatch, match=message):
        batch(source_offset, target_offset, size)


@pytest.mark.parametrize("index", [0, (1 << 13) - 1, 1 << 13, (1 << 13) + 1, 3 << 13])
def test_an_overlap_is_refused_wherever_it_is(index):
    count = (3 << 13) + 2
    region = Region("a", "memory", 2 * count, 0, "gpu0")
    offset, size = 2 * np.arange(count), np.full(count, 2)
    assert Batch(region, region, offset, offset, size).nbytes == 2 * count
    size[index] = 3
    with pytest.raises(InvalidBatch, match=f"targets of descriptors {index} and {index + 1} overlap"):
        Batch(region, region, np.zeros(count, int), offset, size)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8))
def test_exactly_overlapping_targets_are_refused(spans):
    taken = [place for offset, size in spans for place in range(offset, offset + size)]
    offset, size = zip(*spans, strict=True)
    if len(set(taken)) < len(taken):
        with pytest.raises(InvalidBatch, match="overlap"):
            batch([0] * len(spans), offset, size)
    else:
        assert batch([0] * len(spans), offset, size).nbytes == len(taken)


def test_lazy_batches_stand_for_their_descriptors_over_other_regions():
    made = []

    def make():
        made.append(batch([0, 10], [20, 0], [5, 7]))
        return made[-1]

    lazy = LazyBatch(SOURCE, TARGET, 2, 12, make)
    other = lazy.over(SOURCE, Region("decode1", "pool", 600, 0, "gpu2"))
    assert (len(other), other.nbytes, made) == (2, 12, [])
    assert other.size.tolist() == lazy.size.tolist() == [5, 7]
    assert other.target_offset is lazy.target_offset
    assert len(made) == 1
    for one in (lazy, made[0]):
        with pytest.raises(InvalidBatch, match="regions of 1000 and 499 bytes cannot stand for 1000 and 500"):
            one.over(SOURCE, Region("decode1", "pool", 499, 0, "gpu2"))
    with pytest.raises(AssertionError, match="stands for"):
        LazyBatch(SOURCE, TARGET, 1, 6, lambda: batch([0], [0], [5])).arrays()


@pytest.mark.parametrize("size", [1, 3, 256, 4096, 4097])
@pytest.mark.parametrize("count", [1, 2, 300])
@pytest.mark.parametrize("equal", [True, False])
def test_every_piece_lands_in_its_place_alone(size, count, equal):
    random = np.random.default_rng(1)
    sizes = np.full(count, size) if equal else random.integers(1, size + 1, count)
    starts, ends = (random.permutation(count) * (size + 5) + 3 for _ in range(2))
    source = random.integers(1, 256, count * (size + 5) + 3, np.uint8)
    expected, found = np.zeros_like(source), np.zeros_like(source)
    for start, end, each in zip(starts, ends, sizes, strict=True):
        expected[end : end + each] = source[start : start + each]
    move(source, found, starts, ends, sizes)
    assert np.array_equal(found, expected)


def test_settling_takes_a_turn_only_if_somebody_waits():
    clock, log = Clock(), []
    unseen = Transfer(clock, batch([0], [0], [1]))
    unseen.fail(ValueError("nobody looks"))  # which does not end the run
    unseen.settle()
    assert unseen.settled.processed
    transfer = Transfer(clock, batch([0], [0], [10]))

    def wait():
        yield transfer.settled
        log.append("settled")

    clock.process(wait())
    clock.run()
    transfer.settle()
    assert not log
    clock.run()
    assert log == ["settled"]
