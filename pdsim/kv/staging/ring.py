# SPDX-License-Identifier: Apache-2.0
"""The staged path: heads that two ranks do not keep alike are gathered, written in one piece, and scattered.

A chunk is one *block* between one writer and one reader::

    [plane][token][head][dim]   of the planes and heads that both have, in the order of the chunk's pages

The writer asks the reader for a slot of its ring before the forward begins; once it has the slot and the forward has
ended it gathers the block into a buffer of its own, writes it with one descriptor, and the reader scatters it into
pages and frees the slot.

**Safety.**  A slot is granted when its bytes are free, not before, so a writer that has it may write: there is no
watermark that could be stale.  It is freed by the reader after the scatter, or by the writer's `Return` once nothing
of the room moves; a write that failed and never settled keeps it, and the ring allocates around it.  Which way a
chunk goes between two ranks is decided once, by the answer to its question: no chunk is both staged and sliced.

**Liveness.**  Slots are granted first come, first served.  A chunk that holds a slot needs nothing but its forward,
which has begun, and its place in a queue of chunks that need no slot any more (those that wait for one stand aside),
each of which ends or fails within the engine's deadline.  So every slot is freed unless it is in quarantine.  The
first in line fits at the latest when the ring is empty, for what exceeds the ring was refused at once; what waits
longer than `Staging.wait`, because of quarantine or load, is refused and goes in slices.  So every question is
answered, and no two chunks wait for each other.

Unknown here: time, rooms, and what a refusal leads to.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pdsim.core.errors import InvalidBatch, OutOfMemory
from pdsim.kv.layout import KvLayout
from pdsim.kv.mapping import HeadSlice
from pdsim.kv.pages import Pages
from pdsim.transfer import Batch, Buffer, Region, Transfer
from pdsim.transfer.batch import LazyBatch
from pdsim.transfer.job import Rank

__all__ = ["BlockPlan", "GatherBuffers", "Ring", "Slot", "block_plans"]

Int64s = npt.NDArray[np.int64]
K = TypeVar("K", bound=Hashable)


# --- the ring ------------------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """*size* bytes of a ring from *position* on; positions only grow, ``position % ring.size`` is the offset."""

    position: int
    size: int


class Ring(Generic[K]):
    """*size* bytes, handed out going round: the next slot begins where the last one ended, or at the next gap.

    Every slot and every question has a *key*, of which each is used for one at a time.  `request` and `advance` give
    out slots; whoever calls `release` or `withdraw` calls `advance` afterwards.

    >>> ring = Ring(100)
    >>> ring.request("a", 60), ring.request("b", 60), ring.request("c", 10)  # b waits, and c behind it
    (Slot(position=0, size=60), None, None)
    >>> ring.release("a")
    >>> list(ring.advance())
    [('b', Slot(position=100, size=60)), ('c', Slot(position=160, size=10))]
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}")
        self.size = size
        self.head = 0  # position where the next slot may begin
        self.used = 0  # bytes in slots
        self.peak = 0  # most bytes that were in slots at one time
        self.slots: dict[K, Slot] = {}
        self._line: dict[K, int] = {}  # in order of arrival

    def __len__(self) -> int:
        """Return the number of slots and questions."""
        return len(self.slots) + len(self._line)

    def __contains__(self, key: K) -> bool:
        """Return whether *key* has a slot."""
        return key in self.slots

    def __getitem__(self, key: K) -> Slot:
        """Return the slot of *key*.  Raise a `KeyError` if it has none."""
        return self.slots[key]

    def request(self, key: K, size: int) -> Slot | None:
        """Return a slot of *size* bytes for *key*, or None: then it stands in line until `advance` yields it.

        Raise `OutOfMemory` if the ring could never hold it, a `ValueError` if *size* is not positive or *key* is
        taken.
        """
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}")
        if key in self.slots or key in self._line:
            raise ValueError(f"{key} has a slot already, or waits for one")
        if size > self.size:
            raise OutOfMemory(f"a slot of {size} bytes exceeds the ring of {self.size}; raise kv.staging_ring")
        slot = None if self._line else self._give(key, size)
        if slot is None:
            self._line[key] = size
        return slot

    def advance(self) -> Iterator[tuple[K, Slot]]:
        """Give slots to the first in line for as long as they fit, and yield each."""
        while self._line:
            key, size = next(iter(self._line.items()))
            slot = self._give(key, size)
            if slot is None:
                return
            del self._line[key]
            yield key, slot

    def release(self, key: K) -> None:
        """Free the slot of *key*.  Raise a `KeyError` if it has none: nothing is freed twice."""
        if key not in self.slots:
            raise KeyError(f"{key} has no slot to release")
        self.used -= self.slots.pop(key).size

    def withdraw(self, key: K) -> bool:
        """Take *key* out of the line; return whether it stood there."""
        return self._line.pop(key, None) is not None

    def _give(self, key: K, size: int) -> Slot | None:
        position = self._place(size)
        if position is None:
            return None
        slot = self.slots[key] = Slot(position, size)
        self.head = position + size
        self.used += size
        self.peak = max(self.peak, self.used)
        return slot

    def _place(self, size: int) -> int | None:
        turns = self.head // self.size
        if not self.slots:  # whatever lies between here and the end of the round is nobody's
            here = self.head % self.size + size <= self.size
            return self.head if here else (turns + 1) * self.size
        taken = sorted((slot.position % self.size, slot.size) for slot in self.slots.values())
        first, start = self.head % self.size, turns * self.size
        for low, turn in ((first, start), (0, start + self.size)):
            offset = self._gap(taken, low, size)
            if offset is not None:
                return turn + offset
        return None

    def _gap(self, taken: list[tuple[int, int]], low: int, size: int) -> int | None:
        for offset, length in taken:
            if offset + length <= low:
                continue
            if low + size <= offset:
                return low
            low = offset + length
        return low if low + size <= self.size else None


# --- blocks --------------------------------------------------------------------------------------------------------


class BlockPlan:
    """The part of a rank's pool that makes up the blocks between it and one other rank.

    These are *heads* heads from the *first* of its own on, of the *planes* (numbers in the whole model) that both
    have.  A token is a descriptor in each plane or, if the block has all heads of this rank, a run of pages is.

    One for each side of a pair; `block_plans` makes both.  The order of bytes in a block is the same for both.
    """

    def __init__(self, layout: KvLayout, planes: tuple[int, ...], first: int, heads: int) -> None:
        table = layout.tables[0]
        self._starts = table.offsets[[table.planes.index(plane) for plane in planes]]
        self._layout = layout
        self._skip = first * layout.shape.head_bytes
        self._row = heads * layout.shape.head_bytes
        self._size = layout.size
        self._runs = self._row == layout.row

    def nbytes(self, pages: int) -> int:
        """Return the bytes of a block of so many *pages*."""
        return len(self._starts) * pages * self._layout.page_size * self._row

    def gather(self, pool: Region, pages: Pages, block: Region, offset: int) -> Batch:
        """Return the batch that copies *pages* into the block at *offset* of region *block*."""

        def arrays() -> Batch:
            lies, within, size = self._pieces(pages)
            return Batch(pool, block, lies, within + offset if offset else within, size)

        counted = self._count(pool, pages, block, offset)
        return arrays() if counted is None else LazyBatch(pool, block, *counted, arrays)

    def scatter(self, block: Region, offset: int, pool: Region, pages: Pages) -> Batch:
        """Return the batch that copies the block at *offset* of region *block* into *pages*."""

        def arrays() -> Batch:
            lies, within, size = self._pieces(pages)
            return Batch(block, pool, within + offset if offset else within, lies, size)

        counted = self._count(pool, pages, block, offset)
        return arrays() if counted is None else LazyBatch(block, pool, *counted, arrays)

    def _count(self, pool: Region, pages: Pages, block: Region, offset: int) -> tuple[int, int] | None:
        end = total = 0
        for page, count in sorted(pages) if len(pages) > 1 else pages:
            if page < end or count < 1:
                return None
            end = page + count
            total += count
        nbytes = self.nbytes(total)
        inside = end <= self._layout.pages and pool.size >= self._size and 0 <= offset <= block.size - nbytes
        if not nbytes or not inside:
            return None
        return len(self._starts) * len(pages) if self._runs else nbytes // self._row, nbytes

    def _pieces(self, pages: Pages) -> tuple[Int64s, Int64s, Int64s]:
        # Raise `InvalidBatch` if a page is outside the pool.
        layout = self._layout
        for page, count in pages:
            if page < 0 or count < 1 or page + count > layout.pages:
                raise InvalidBatch(f"pages {page} to {page + count - 1} are not all in a pool of {layout.pages}")
        if self._runs:
            first, counts = np.array(pages, np.int64).reshape(-1, 2).T
            size = np.tile(counts * layout.page_size * self._row, len(self._starts))
            return np.add.outer(self._starts, first * layout.item).ravel(), np.cumsum(size) - size, size
        tokens = [np.arange(page * layout.page_size, (page + count) * layout.page_size) for page, count in pages]
        rows = np.concatenate(tokens) * layout.row + self._skip
        return np.add.outer(self._starts, rows).ravel(), *_even(len(self._starts) * len(rows), self._row)


@lru_cache(maxsize=8)
def _even(count: int, size: int) -> tuple[Int64s, Int64s]:
    arrays = np.arange(count, dtype=np.int64) * size, np.full(count, size, np.int64)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def block_plans(source: KvLayout, target: KvLayout, heads: HeadSlice) -> tuple[BlockPlan, BlockPlan]:
    """Return how the writer gathers and how the reader scatters the blocks between two kinds of rank."""
    theirs = set(target.tables[0].planes)
    planes = tuple(plane for plane in source.tables[0].planes if plane in theirs)
    return (
        BlockPlan(source, planes, heads.source, heads.heads),
        BlockPlan(target, planes, heads.target, heads.heads),
    )


class GatherBuffers:
    """The buffers of *rank* in which *count* queues gather, one of *size* bytes each.

    A buffer is filled again once its last write has settled, not before.  Should a write fail and stay in
    quarantine, its queue gets a fresh buffer, and the old one is given back if the write ever settles.
    """

    def __init__(self, rank: Rank, count: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._made = 0
        self._buffers = [self._make() for _ in range(count)]
        self._writes: list[Transfer | None] = [None] * count

    def take(self, queue: int) -> Region:
        """Return the buffer of *queue*, in which nothing moves.  Raise `OutOfMemory` if there is none left."""
        write = self._writes[queue]
        if write is not None and not write.settled.triggered:
            old, self._buffers[queue] = self._buffers[queue], self._make()
            write.settled.callbacks.append(lambda _: self._discard(*old))
        self._writes[queue] = None
        return self._buffers[queue][1]

    def lend(self, queue: int, write: Transfer) -> None:
        """Keep the buffer of *queue* as it is until *write* has settled."""
        self._writes[queue] = write

    def _make(self) -> tuple[Buffer, Region]:
        buffer = self._rank.device.allocate(self._size)
        self._made += 1
        return buffer, self._rank.endpoint.register(buffer, f"gather{self._made}")

    def _discard(self, buffer: Buffer, region: Region) -> None:
        self._rank.endpoint.deregister(region)
        self._rank.device.free(buffer)
