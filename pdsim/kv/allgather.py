# SPDX-License-Identifier: Apache-2.0
"""The padded all-gather of context-parallel prefill: unequal pieces of any batch, gathered and put in order.

A group gathers equal sizes.  So the rows of ranks with fewer are padded to the longest rank's, gathered, and then
split, trimmed and put into the order of the batch, in one copy.  The longest follows from the split of every
sequence: ``ceil(total / cp)`` is too small for two of nine tokens over four ranks (six rows, not five).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from pdsim.core.errors import InvalidBatch, OutOfMemory
from pdsim.transfer import Batch, Buffer, Program, Region
from pdsim.transfer.group import SYMMETRIC, Group
from pdsim.transfer.job import Rank

Int64s = npt.NDArray[np.int64]

MEMORIES = ("plain", "symmetric", "both")
"""What gathers use: plain memory, symmetric memory for the output (as SGLang), or for input and output."""


@dataclass(frozen=True)
class Split:
    """Which rows of a batch each rank has: for each rank, in its own order, ``(first row, rows)``; none are empty.

    Rows are tokens of all sequences of the batch, one after the other; each is in exactly one piece.

    >>> split = zigzag([9], cp=2)  # blocks of 3, 2, 2 and 2 tokens: rank 0 has the first and the last
    >>> split.pieces, split.lengths, split.longest
    ((((0, 3), (7, 2)), ((3, 2), (5, 2))), (5, 4), 5)
    """

    pieces: tuple[tuple[tuple[int, int], ...], ...]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(sum(rows for _, rows in rank) for rank in self.pieces)

    @cached_property
    def longest(self) -> int:
        """Rows of the rank that has most, to which all are padded."""
        return max(self.lengths)

    @cached_property
    def total(self) -> int:
        """Rows of the batch."""
        return sum(self.lengths)

    def order(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return where rows stand after the gather, where in the batch, and how many: int64 of shape (piece,).

        Rows of rank *r* begin at ``r * longest`` after the gather.

        >>> [column.tolist() for column in zigzag([3], cp=2).order()]
        [[0, 2, 3], [0, 1, 2], [1, 1, 1]]
        """
        ordering = []
        for index, rank in enumerate(self.pieces):
            at = index * self.longest
            for first, count in rank:
                ordering.append((at, first, count))
                at += count
        gathered, ordered, rows = (np.array(column, np.int64) for column in zip(*ordering, strict=True))
        return gathered, ordered, rows


def zigzag(lengths: Sequence[int], cp: int) -> Split:
    """Return the split of sequences of *lengths* tokens over *cp* ranks that balances causal attention.

    Each sequence is cut into ``2 * cp`` blocks; the first ``length % (2 * cp)`` have one token more.  Rank
    *r* has blocks *r* and ``2 * cp - 1 - r``.  (SGLang does not split sequences below ``2 * cp`` tokens; here some
    ranks then have none of it.)  Raise a `ValueError` if there is no token at all.
    """
    if cp < 1:
        raise ValueError(f"cp={cp} must be >= 1")
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"lengths[{index}]={length} must be >= 0")
    if not sum(lengths):
        raise ValueError(f"lengths={tuple(lengths)}: there is nothing to gather")
    ranks: list[list[tuple[int, int]]] = [[] for _ in range(cp)]
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        base, more = divmod(length, 2 * cp)
        blocks = [(start + n * base + min(n, more), base + (n < more)) for n in range(2 * cp)]
        for index, rank in enumerate(ranks):
            rank += [blocks[number] for number in (index, 2 * cp - 1 - index) if blocks[number][1]]
    return Split(tuple(map(tuple, ranks)))


def pools(memory: str) -> tuple[str, str]:
    """Return the pools of what a rank gives and of what it gets, for one of `MEMORIES` (or "default" for plain)."""
    return SYMMETRIC if memory == "both" else "default", SYMMETRIC if memory in MEMORIES[1:] else "default"


def allocate(rank: Rank, group: Group, size: int, pool: str) -> Program:
    """Return *size* bytes of *pool*; a symmetric pool without room is made to grow by them first.

    All ranks of *group* must do so with equal sizes in one order.  Raise `OutOfMemory` where it may not grow.
    """
    try:
        return rank.device.allocate(size, pool)
    except OutOfMemory:
        if pool != SYMMETRIC:
            raise
    yield group.reserve(size)
    return rank.device.allocate(size, pool)


class PaddedAllGather:
    """Gathers *tensors* of *row* bytes a token over *group*, in buffers of *memory* for at most *rows* of a rank.

    *memory* is one of `MEMORIES`.  Where contents matter (*keep*) each tensor has bytes of its own, otherwise all
    share the buffers of one.  `open` it once, `gather` as often as wanted, and `close` it.
    """

    def __init__(
        self,
        rank: Rank,
        group: Group,
        row: int,
        rows: int,
        memory: str = "plain",
        tensors: int = 1,
        keep: bool = True,
    ) -> None:
        if row <= 0 or rows <= 0:
            raise ValueError(f"row={row} bytes and rows={rows} must be > 0")
        self._rank = rank
        self._group = group
        self._row = row
        self._rows = rows
        self._pools = pools(memory)
        self._tensors = tensors
        self._kept = tensors if keep else 1
        self._padded: Buffer | None = None
        self._gathered: Buffer | None = None

    def open(self) -> Program:
        """Allocate the buffers; the errors of `allocate`."""
        size, (given, got) = self._row * self._rows * self._kept, self._pools
        self._padded = yield from allocate(self._rank, self._group, size, given)
        self._gathered = yield from allocate(self._rank, self._group, size * len(self._group.names), got)

    def close(self) -> None:
        """Free the buffers."""
        for buffer in (self._padded, self._gathered):
            if buffer is not None:
                self._rank.device.free(buffer)
        self._padded = self._gathered = None

    def gather(self, split: Split, source: Buffer, target: Region, label: str = "") -> Program:
        """Bring the rows of all ranks, which have them as *split* says, to *target*, in the order of the batch.

        This rank's rows stand in *source*, tensor after tensor, as in *target*, which has room for all tensors.
        Returns the record of the all-gather.  Raise `InvalidBatch` if *split* does not fit the group or the
        buffers.  All ranks of the group must call it in the same order.
        """
        ranks, index = len(self._group.names), self._group.index
        if len(split.pieces) != ranks or split.longest > self._rows:
            raise InvalidBatch(
                f"a split of {len(split.pieces)} ranks and at most {split.longest} rows does not suit a group of "
                f"{ranks} and buffers for {self._rows}; open one that does"
            )
        assert self._padded is not None
        assert self._gathered is not None
        row, kept = self._row, self._kept == self._tensors
        mine, size = split.lengths[index] * row, split.longest * row
        numbers = np.arange(self._tensors, dtype=np.int64)
        places = numbers if kept else numbers * 0  # in buffers that tensors may share
        given = source
        if mine < size or self._pools[0] == SYMMETRIC:
            given = self._padded
            if mine:  # what stands in the padding makes no difference: it is trimmed
                # without contents only the time counts, and pieces of a copy must not overlap
                padded = (self._local(given), numbers * size) if kept else (target, numbers * mine)
                sizes = np.full(self._tensors, mine, np.int64)
                yield self._rank.device.copy(Batch(self._local(source), padded[0], places * mine, padded[1], sizes))
        record = yield self._group.all_gather(given, self._gathered, size, times=self._tensors, label=label)
        gathered, ordered, rows = (column * row for column in split.order())
        yield self._rank.device.copy(
            Batch(
                self._local(self._gathered),
                target,
                (places[:, None] * ranks * size + gathered).ravel(),
                (numbers[:, None] * split.total * row + ordered).ravel(),
                np.tile(rows, self._tensors),
            )
        )
        return record

    def _local(self, buffer: Buffer) -> Region:
        return Region.local(self._rank.name, self._rank.device.name, buffer)
