"""The rules of a batch: what no engine may be given is refused where it is made."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.clock import Clock
from pdsim.core.errors import InvalidBatch
from pdsim.transfer import Batch, Region, Transfer
from pdsim.transfer.batch import LazyBatch

SOURCE = Region("prefill0", "kv", 1000, 0, "gpu0")
TARGET = Region("decode0", "pool", 500, 0, "gpu1")


def batch(source_offset, target_offset, size):
    return Batch(SOURCE, TARGET, source_offset, target_offset, size)


class TestMakes:
    def test_int64_arrays_of_lists(self):
        made = batch([0, 10], [20, 0], [5, 7])
        for array in (made.source_offset, made.target_offset, made.size):
            assert array.dtype == np.int64
            assert array.flags.c_contiguous
        assert (len(made), made.nbytes) == (2, 12)

    def test_no_copy_of_int64_arrays(self):
        offset = np.arange(0, 400, 4)
        made = batch(offset, offset, np.full(100, 4))
        assert made.source_offset is offset

    def test_contiguous_arrays_of_views(self):
        made = batch(np.arange(10)[::2], np.arange(10)[::2], np.ones(5, np.int32))
        assert made.source_offset.flags.c_contiguous
        assert made.source_offset.tolist() == [0, 2, 4, 6, 8]

    def test_its_name_for_people(self):
        assert repr(batch([0], [0], [8])) == "<Batch of 1 descriptors, 8 bytes, prefill0/kv -> decode0/pool>"

    def test_room_for_the_last_byte(self):
        assert batch([999], [499], [1]).nbytes == 1

    def test_targets_that_touch(self):
        assert batch([0, 0, 0], [20, 0, 10], [10, 10, 10]).nbytes == 30

    def test_sources_that_overlap(self):
        assert batch([0, 5], [0, 10], [10, 10]).nbytes == 20


class TestRefuses:
    @pytest.mark.parametrize(
        ("source_offset", "target_offset", "size", "message"),
        [
            ([], [], [], "an empty batch"),
            ([0, 1], [0], [1], "2 source offsets, 1 target offsets and 1 sizes"),
            ([0], [0], [0], r"size\[0\]=0: sizes must be positive"),
            ([0, 1], [0, 1], [1, -1], r"size\[1\]=-1: sizes must be positive"),
            (
                [993],
                [0],
                [8],
                r"source descriptor 0 covers \[993, 1001\) of region prefill0/kv, which has 1000 bytes",
            ),
            ([0, 8], [0, 493], [8, 8], r"target descriptor 1 covers \[493, 501\) of region decode0/pool"),
            ([-1], [0], [1], r"source descriptor 0 covers \[-1, 0\)"),
            ([0], [-8], [8], r"target descriptor 0 covers \[-8, 0\)"),
            ([2**63 - 1], [0], [1], "source descriptor 0 covers"),
            ([0], [0], [2**63 - 1], "source descriptor 0 covers"),
            ([0, 0], [0, 9], [10, 10], "targets of descriptors 0 and 1 overlap"),
            ([0, 0, 0], [100, 9, 0], [10, 10, 10], "targets of descriptors 2 and 1 overlap"),
            ([0, 0], [0, 0], [10, 10], "targets of descriptors 0 and 1 overlap"),
            ([0.0], [0], [1], "source_offset must be a one-dimensional array of integers, got float64"),
            ([[0]], [0], [1], "source_offset must be a one-dimensional array"),
            ([0], [0], 1, r"size must be a one-dimensional array of integers, got int64 of \(\)"),
            ([True], [0], [1], "source_offset must be a one-dimensional array of integers, got bool"),
        ],
    )
    def test_a_batch_that_breaks_a_rule(self, source_offset, target_offset, size, message):
        with pytest.raises(InvalidBatch, match=message):
            batch(source_offset, target_offset, size)

    def test_offsets_that_no_int64_holds(self):
        with pytest.raises(InvalidBatch):
            batch(np.array([2**64 - 1], np.uint64), [0], [1])

    @pytest.mark.parametrize("index", [0, (1 << 13) - 1, 1 << 13, (1 << 13) + 1, 3 << 13])
    def test_an_overlap_wherever_it_is_among_many(self, index):
        count = (3 << 13) + 2
        region = Region("a", "memory", 2 * count, 0, "gpu0")
        offset, size = 2 * np.arange(count), np.full(count, 2)
        assert Batch(region, region, offset, offset, size).nbytes == 2 * count
        size[index] = 3
        with pytest.raises(InvalidBatch, match=f"targets of descriptors {index} and {index + 1} overlap"):
            Batch(region, region, np.zeros(count, int), offset, size)

    @given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8))
    def test_exactly_the_overlapping_targets(self, spans):
        taken = [place for offset, size in spans for place in range(offset, offset + size)]
        offset, size = zip(*spans, strict=True)
        if len(set(taken)) < len(taken):
            with pytest.raises(InvalidBatch, match="overlap"):
                batch([0] * len(spans), offset, size)
        else:
            assert batch([0] * len(spans), offset, size).nbytes == len(taken)


class TestOver:
    def test_other_regions_keeps_the_descriptors(self):
        made = batch([0], [8], [16])
        other = Region("decode1", "pool", 500, 0, "gpu2")
        moved = made.over(SOURCE, other)
        assert (moved.target, moved.nbytes, len(moved)) == (other, 16, 1)
        assert moved.target_offset is made.target_offset

    def test_smaller_regions_is_refused(self):
        small = Region("decode1", "pool", 499, 0, "gpu2")
        with pytest.raises(InvalidBatch, match="regions of 1000 and 499 bytes cannot stand for 1000 and 500"):
            batch([0], [8], [16]).over(SOURCE, small)


class TestLazily:
    def test_arrays_are_made_once_for_all_regions(self):
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

    def test_smaller_regions_are_refused(self):
        lazy = LazyBatch(SOURCE, TARGET, 1, 5, lambda: batch([0], [0], [5]))
        with pytest.raises(InvalidBatch, match="cannot stand for"):
            lazy.over(SOURCE, Region("decode1", "pool", 499, 0, "gpu2"))

    def test_arrays_of_other_bytes_are_an_error(self):
        lazy = LazyBatch(SOURCE, TARGET, 1, 6, lambda: batch([0], [0], [5]))
        with pytest.raises(AssertionError, match="stands for"):
            lazy.arrays()


def test_a_transfer_that_fails_unseen_does_not_end_the_run():
    clock = Clock()
    transfer = Transfer(clock, batch([0], [0], [1]), "label")
    transfer.fail(ValueError("nobody looks"))
    clock.run()
    assert not transfer.ok
    assert not transfer.settled.triggered


class TestSettled:
    def test_whoever_asks_later_finds_it_processed(self):
        transfer = Transfer(Clock(), batch([0], [0], [10]))
        transfer.settle()
        assert transfer.settled.processed
        assert transfer.settled.ok

    def test_what_nobody_waits_for_takes_no_turn_of_the_clock(self):
        clock = Clock()
        transfer = Transfer(clock, batch([0], [0], [10]))
        asked = transfer.settled
        transfer.settle()
        assert asked.processed
        assert clock.peek() == float("inf")

    def test_who_waits_goes_on_in_a_turn_of_its_own(self):
        clock, log = Clock(), []
        transfer = Transfer(clock, batch([0], [0], [10]))

        def wait():
            yield transfer.settled
            log.append("settled")

        clock.process(wait())
        clock.step()
        transfer.settle()
        assert not log
        clock.run()
        assert log == ["settled"]
