"""The padded all-gather: whatever the lengths, every row of the batch comes from one place, and no padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.kv.allgather import zigzag

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any)


@given(LENGTHS, st.integers(1, 9))
def test_a_zigzag_of_any_batch_comes_out_in_its_order(lengths, cp):
    split = zigzag(lengths, cp)
    source, whole = np.full(cp * split.longest, -1), np.full(sum(lengths), -2)
    for index, rank in enumerate(split.pieces):  # what stands in every row after the gather; -1 is padding
        held = [first + n for first, count in rank for n in range(count)]
        source[index * split.longest : index * split.longest + len(held)] = held
    for at, to, count in zip(*split.order(), strict=True):
        assert (whole[to : to + count] == -2).all(), "written twice"
        whole[to : to + count] = source[at : at + count]
    assert list(whole) == list(range(split.total))


@given(LENGTHS, st.integers(1, 9))
def test_a_rank_has_a_block_from_either_end(lengths, cp):
    split, start = zigzag(lengths, cp), 0
    for length in lengths:
        base, more = divmod(length, 2 * cp)
        edges = np.cumsum([0] + [base + (n < more) for n in range(2 * cp)]) + start
        for index, rank in enumerate(split.pieces):
            mine = [(int(edges[n]), int(edges[n + 1] - edges[n])) for n in (index, 2 * cp - 1 - index)]
            assert [piece for piece in rank if start <= piece[0] < start + length] == [p for p in mine if p[1]]
        start += length


@pytest.mark.parametrize(("lengths", "cp"), [([], 2), ([0, 0], 2), ([3, -1], 2), ([3], 0)])
def test_nothing_to_gather_and_what_cannot_be_is_refused(lengths, cp):
    with pytest.raises(ValueError, match=r"lengths|cp"):
        zigzag(lengths, cp)
