"""Moving the bytes of descriptors between two arrays."""

from __future__ import annotations

import numpy as np
import pytest

from pdsim.transfer.batch import move


@pytest.mark.parametrize("size", [1, 3, 256, 4096, 4097])
@pytest.mark.parametrize("count", [1, 2, 300])
@pytest.mark.parametrize("equal", [True, False])
def test_every_piece_lands_in_its_place_and_nothing_beside_it(size: int, count: int, equal: bool):
    random = np.random.default_rng(1)
    sizes = np.full(count, size) if equal else random.integers(1, size + 1, count)
    starts, ends = (random.permutation(count) * (size + 5) + 3 for _ in range(2))
    source = random.integers(1, 256, count * (size + 5) + 3, np.uint8)
    expected, found = np.zeros_like(source), np.zeros_like(source)
    for start, end, each in zip(starts, ends, sizes, strict=True):
        expected[end : end + each] = source[start : start + each]
    move(source, found, starts, ends, sizes)
    assert np.array_equal(found, expected)


def test_a_piece_may_be_the_whole_of_both_arrays():
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    nothing, all_of_it = np.array([0]), np.array([256])
    move(source, target, nothing, nothing, all_of_it)
    assert np.array_equal(target, source)
