# SPDX-License-Identifier: Apache-2.0
"""The work of a forward's operators: arithmetic, bytes, and tiles that wait for each other.

A kernel divides its result into tiles.  One multiprocessor computes a tile along the whole depth of the sum:
the inner width of a product, the keys of attention.  So an operator with few tiles leaves multiprocessors idle, one
with a tile more than there are takes a turn more, and neither its arithmetic nor its bytes say so.  `Work` has all
three; `pdsim.compute.kernels.Roof` turns it into seconds.

Forwards and fits count by the same functions.  *processors* is the number of the GPU's multiprocessors; with 0,
unknown, all tiles run side by side.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple


class Work(NamedTuple):
    """The *flops* of an operator, its bytes in memory, and the tiles of the multiprocessor that is done last.

    These are *turns* tiles one after the other, whose *depth* is that of all of them together, in elements.
    """

    flops: float
    nbytes: float
    turns: float = 0.0
    depth: float = 0.0


def turns(tiles: float, processors: int) -> float:
    """Return how many of so many *tiles* are computed one after the other."""
    return math.ceil(tiles / processors) if processors else 1.0


def product(rows: float, n: int, k: int, size: int, tile: int, columns: int, processors: int) -> Work:
    """Return the work of *rows* by *k* times *k* by *n*, of elements of *size* bytes; results have two.

    Rows are computed in whole tiles of *tile*, 0 for none, and so many *columns*; without *columns* nothing is said
    of turns.
    """
    nbytes = size * (rows * k + n * k) + 2.0 * rows * n
    parts = tiles_of(rows, tile)
    flops = 2.0 * (parts * tile if parts else rows) * n * k
    if not columns:
        return Work(flops, nbytes)
    after = turns(parts * math.ceil(n / columns), processors)
    return Work(flops, nbytes, after, after * k)


def tiles_of(rows: float, tile: int, even: bool = True) -> float:
    """Return how many tiles of *tile* rows hold *rows* in the mean; 0 of no *tile*.

    Unless they are *even*, rows are as many in the mean, drawn independently of each other: then nearly every second
    one that would fill its tiles exactly needs one more.
    """
    if even:
        return math.ceil(rows / tile) if tile else 0
    if not tile or not rows:
        return 0
    spread = math.sqrt(2.0 * rows)
    first = max(1, math.floor((rows - 3.0 * spread) / tile))  # tiles that all have
    last = math.ceil((rows + 3.0 * spread) / tile)
    return first + math.fsum(0.5 * math.erfc((each * tile + 0.5 - rows) / spread) for each in range(first, last))


def grouped(
    routed: float,
    hit: float,
    hidden: int,
    width: int,
    size: int,
    tile: int,
    columns: int,
    processors: int,
    even: bool = True,
) -> Work:
    """Return the work of both products of experts: *routed* rows on the *hit* ones, *even* or drawn (`tiles_of`).

    Weights have *size* bytes an element, activations two.  The first product makes two times *width* elements of
    *hidden*, the second *hidden* of *width*.  Rows of each expert are computed in whole tiles of *tile*; without
    *columns* nothing is said of turns.
    """
    nbytes = size * 3.0 * hit * hidden * width + 2.0 * routed * (2 * hidden + 4 * width)
    parts = tiles_of(routed / hit, tile, even) if hit else 0
    flops = 6.0 * (hit * parts * tile if parts else routed) * hidden * width
    if not columns:
        return Work(flops, nbytes)
    first = turns(hit * parts * math.ceil(2 * width / columns), processors)
    second = turns(hit * parts * math.ceil(hidden / columns), processors)
    return Work(flops, nbytes, first + second, first * hidden + second * width)


def causal_attention(
    pieces: Iterable[tuple[int, int]], heads: int, width: int, token_bytes: float, tile: int, processors: int
) -> Work:
    """Return the work of causal attention of *pieces*, each of so many tokens before and so many new ones.

    *width* is that of a key and a value together, *token_bytes* what all keys and values of a token take.  A tile
    has *tile* new tokens of a head.  Each meets all tokens before; of the new ones the last tile meets all and the
    first only its own, so where tiles wait, the longest begins last at worst: turns of the mean, and one of the
    longest.  *tile* 0 says nothing of turns.
    """
    pairs = tokens = tiles = mean = before = longest = 0.0
    for earlier, new in pieces:
        pairs += new * earlier + new * (new + 1) // 2
        tokens += earlier + new
        if tile:
            rows = math.ceil(new / tile)
            tiles += heads * rows
            mean += heads * rows * (rows + 1) / 2 * tile
            before += heads * rows * earlier
            longest = max(longest, rows * tile)
    flops, nbytes = 2.0 * pairs * width * heads, tokens * token_bytes
    if not tiles:
        return Work(flops, nbytes)
    depth = longest
    if processors and tiles > processors:
        depth = mean / processors + longest * (1.0 - 1.0 / processors)
    after = turns(tiles, processors)
    return Work(flops, nbytes, after, (depth + after * before / tiles) * width)


WIDE = 128
"""Rows an expert, in the mean of all that a layer has, beyond which PyTorch takes tiles of 256 columns, not 128.

Its ``dispatch_bf16_grouped_kernel_on_tile_size`` says so (aten/src/ATen/native/cuda/GroupMM.cu).
"""
SORTED = 128
"""Rows that a warp sorts alone; more take kernels more."""
SPLIT = 1.6
"""Tiles a multiprocessor below which decode attention splits sequences: four fifths of two, as FlashAttention 2."""


def whole_sequences(sequences: float, kv_heads: int, processors: int) -> bool:
    """Return whether decode attention has a tile for each of *sequences* and KV heads, instead of several."""
    return processors > 0 and sequences * kv_heads >= SPLIT * processors


def decode_rows(sequences: float, kv_heads: int, tile: int, processors: int) -> float:
    """Return how many rows decode attention computes for a token of context, of one of so many *sequences*.

    Whole sequences have tiles of *tile* rows, mostly empty, and wait for each other's turns; split
    ones have tiles of half as many.
    """
    if not whole_sequences(sequences, kv_heads, processors):
        return kv_heads * (tile // 2)
    return turns(sequences * kv_heads, processors) * processors / sequences * tile
