"""The allocator of addresses: first fit, and gaps that join."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdsim.transfer.batch import Arena


def test_the_first_gap_with_room_is_taken():
    arena = Arena(100, base=1000)
    assert [arena.take(size) for size in (30, 10, 30, 40, 30)] == [1000, 1030, 1040, None, 1070]
    arena.give(1000, 30)
    arena.give(1040, 30)
    assert (arena.free, arena.largest_gap) == (60, 30)
    assert [arena.take(size) for size in (31, 20, 20, 10)] == [None, 1000, 1040, 1020]


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60), st.randoms(use_true_random=False))
def test_ranges_do_not_overlap_and_gaps_join_again(steps, chance):
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
