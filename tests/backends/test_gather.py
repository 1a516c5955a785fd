"""Pieces of a batch as tiles; the kernel is tested where a GPU is."""

from typing import Any

import numpy as np
import pytest

from backends.cuda.gather import LEAST, TILES, tiles
from pdsim.transfer import Batch, Region

CASES: dict[str, dict[str, Any]] = {
    "pages": {"count": 200, "unit": 4096},
    "16 bytes": {"count": 300, "unit": 16},
    "odd": {"count": 300, "unit": 1},
    "odd among even": {"count": 100, "unit": 16, "odd": 7},
    "one": {"count": 1, "unit": 1 << 20},
    "one odd": {"count": 1, "unit": (1 << 20) + 3},
}


def batch(count: int, unit: int, odd: int = 0) -> Batch:
    """Return *count* pieces of one to eight *units* at shuffled places; the size of every *odd*-th is one less."""
    random = np.random.default_rng(5)
    slot = 8 * unit + (16 if odd else 0)
    size = random.integers(1, 9, count) * unit
    if odd:
        size[::odd] -= 1
    source, target = random.permutation(count) * slot, random.permutation(count) * slot
    regions = [Region("a", name, count * slot, 0, "cpu") for name in ("source", "target")]
    return Batch(*regions, source, target, size)


def expected(pieces: Batch, columns: Any = None) -> tuple[Any, Any]:
    """Return random contents of the source, and the target of zeros after *columns*, or *pieces*, were copied."""
    contents = np.random.default_rng(6).integers(0, 256, pieces.source.size, dtype=np.uint8)
    image = np.zeros(pieces.target.size, np.uint8)
    columns = columns or (pieces.source_offset, pieces.target_offset, pieces.size)
    for start, end, length in zip(*columns, strict=True):
        image[end : end + length] = contents[start : start + length]
    return contents, image


@pytest.mark.parametrize("case", CASES)
def test_tiles_move_the_same_bytes(case):
    pieces = batch(**CASES[case])
    assert np.array_equal(expected(pieces, tiles(pieces))[1], expected(pieces)[1])


def test_large_pieces_are_divided_evenly_and_small_ones_are_not():
    assert [len(column) for column in tiles(batch(300, 16))] == [300] * 3
    _, _, size = tiles(batch(1, 1 << 28))
    assert TILES / 2 <= len(size) <= TILES
    assert set(size[:-1].tolist()) == {size[0]}
    assert size[0] & (size[0] - 1) == 0
    assert size[0] >= LEAST
