# SPDX-License-Identifier: Apache-2.0
"""Memory of a device: its addresses, the names of regions among ranks, the descriptors of a transfer over two."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from pdsim.core.errors import InvalidBatch

if TYPE_CHECKING:
    from collections.abc import Callable


Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Arena:
    """Addresses of a piece of memory of *size* bytes that begins at *base*.

    Invariant: gaps are ascending, do not overlap and do not touch, and their bytes and those taken add up to *size*.

    >>> arena = Arena(100)
    >>> arena.take(60), arena.take(60), arena.take(40)
    (0, None, 60)
    >>> arena.give(0, 60); arena.give(60, 40); arena.take(100)
    0
    """

    def __init__(self, size: int, base: int = 0) -> None:
        self.size = size
        self._gaps = [(base, size)]  # address and size, ascending, never touching

    @property
    def free(self) -> int:
        """Bytes of all gaps together."""
        return sum(size for _, size in self._gaps)

    @property
    def largest_gap(self) -> int:
        """The most bytes that the next `take` can get."""
        return max((size for _, size in self._gaps), default=0)

    def take(self, size: int) -> int | None:
        """Return the first address with room for *size* bytes, or None."""
        for index, (address, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[index : index + 1] = [(address + size, room - size)] if room > size else []
                return address
        return None

    def give(self, address: int, size: int) -> None:
        """Undo a `take`."""
        insort(self._gaps, (address, size))
        merged: list[tuple[int, int]] = []
        for start, room in self._gaps:
            if merged and sum(merged[-1]) == start:
                start, room = merged[-1][0], merged.pop()[1] + room
            merged.append((start, room))
        self._gaps = merged


class Buffer(Protocol):
    """Memory that a `Device` allocated, valid until `Device.free`; regions over it must be deregistered first."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def pool(self) -> str:
        """The pool it came from."""

    @property
    def address(self) -> int:
        """Where it starts, in the address space of its device."""

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of *size* bytes at *offset*.

        Raise an `IndexError` outside the buffer and a `TypeError` if the device keeps no contents.
        """

    def write(self, offset: int, data: bytes) -> None:
        """Store *data* at *offset*; the errors of `read`."""


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory as either side names it.

    Plain data that may be sent, in `Endpoint.address`; `Peer.regions` has those of a peer.
    """

    owner: str  # the rank that registered it
    name: str  # unique among the regions of its owner
    size: int
    address: int  # in the owner's address space
    device: str  # the owner's name for the device it lies on

    @classmethod
    def local(cls, owner: str, device: str, buffer: Buffer) -> Region:
        """Return a name for *buffer*, of *device*, that only `Device.copy` understands; no engine knows of it."""
        return cls(owner, f"local:{buffer.address:#x}", buffer.size, buffer.address, device)


def _int64s(values: npt.ArrayLike, name: str) -> Int64s:
    # Floats are refused, even whole ones; an empty array may have any type.
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidBatch(f"{name} must be a one-dimensional array of integers, got {array.dtype} of {array.shape}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_inside(region: Region, offset: Int64s, size: Int64s, side: str) -> None:
    if offset.min() >= 0 and offset.max() <= region.size - int(size.max()):  # sufficient, and makes no arrays
        return
    # offset > region.size - size rather than offset + size > region.size: the sum may overflow
    outside = (offset < 0) | (offset > region.size - size)
    if outside.any():
        index = int(np.argmax(outside))
        raise InvalidBatch(
            f"{side} descriptor {index} covers [{offset[index]}, {int(offset[index]) + int(size[index])}) of region "
            f"{region.owner}/{region.name}, which has {region.size} bytes"
        )


_PART = 1 << 13
"""Descriptors compared at a time: few enough for the arrays to stay in the processor's cache."""


def _ascending(offset: Int64s, size: Int64s) -> bool:
    for first in range(0, len(offset) - 1, _PART):
        step = np.diff(offset[first : first + _PART + 1])
        if (step < size[first : first + len(step)]).any():
            return False
    return True


def _check_disjoint(offset: Int64s, size: Int64s) -> None:
    if _ascending(offset, size):  # as batches mostly are: no need to sort
        return
    order = np.argsort(offset, kind="stable")
    overlap = np.diff(offset[order]) < size[order][:-1]
    if overlap.any():
        first = int(np.argmax(overlap))
        one, other = int(order[first]), int(order[first + 1])
        raise InvalidBatch(
            f"targets of descriptors {one} and {other} overlap: engines keep no order among descriptors"
        )


_SMALL = 4096
"""Bytes of a piece up to which a loop over pieces takes longer than its bytes do."""
_CACHED = 1 << 18
"""Bytes moved at a time: they are read and written while they are in the cache."""


def move(source: Bytes, target: Bytes, source_offset: Int64s, target_offset: Int64s, size: Int64s) -> None:
    """Copy the descriptors of a valid `Batch` between two arrays of bytes that do not overlap.

    Small pieces of equal sizes, as the heads of tokens are, go many at a time: a tenth to a third of a loop's time.
    """
    each = int(size[0])
    if each > _SMALL or len(size) == 1 or int(size.min()) != int(size.max()):
        rows = zip(source_offset.tolist(), target_offset.tolist(), size.tolist(), strict=True)
        for start, to, count in rows:
            target[to : to + count] = source[start : start + count]
        return
    ours, theirs = sliding_window_view(source, each), sliding_window_view(target, each, writeable=True)
    step = max(1, _CACHED // each)
    for first in range(0, len(size), step):
        theirs[target_offset[first : first + step]] = ours[source_offset[first : first + step]]


class Batch:
    """Descriptors: for each *i*, ``size[i]`` bytes from ``source_offset[i]`` to ``target_offset[i]``.

    Three int64 arrays of equal length over two regions; 100,000 descriptors are normal.  Bytes flow from *source* to
    *target* whoever posts: for a read, *source* is the peer's.

    Raise `InvalidBatch` if the batch is empty or the lengths differ, if a size is not positive, if a descriptor
    reaches outside its region, or if two targets overlap; sources may.
    """

    __slots__ = ("_size", "_source_offset", "_target_offset", "nbytes", "source", "target")

    def __init__(
        self,
        source: Region,
        target: Region,
        source_offset: npt.ArrayLike,
        target_offset: npt.ArrayLike,
        size: npt.ArrayLike,
    ) -> None:
        self.source = source
        self.target = target
        self._source_offset = _int64s(source_offset, "source_offset")
        self._target_offset = _int64s(target_offset, "target_offset")
        self._size = lengths = _int64s(size, "size")
        count = len(lengths)
        if not len(self._source_offset) == len(self._target_offset) == count:
            raise InvalidBatch(
                f"{len(self._source_offset)} source offsets, {len(self._target_offset)} target offsets and "
                f"{count} sizes: a batch needs as many of each"
            )
        if not count:
            raise InvalidBatch("an empty batch: there is nothing to transfer")
        if lengths.min() <= 0:
            index = int(np.argmin(lengths))
            raise InvalidBatch(f"size[{index}]={lengths[index]}: sizes must be positive")
        _check_inside(source, self._source_offset, lengths, "source")
        _check_inside(target, self._target_offset, lengths, "target")
        _check_disjoint(self._target_offset, lengths)
        self.nbytes = int(lengths.sum())

    @property
    def source_offset(self) -> Int64s:
        """Where each descriptor begins in the source."""
        return self.arrays()._source_offset

    @property
    def target_offset(self) -> Int64s:
        """Where each descriptor begins in the target."""
        return self.arrays()._target_offset

    @property
    def size(self) -> Int64s:
        """The bytes of each descriptor."""
        return self.arrays()._size

    def __len__(self) -> int:
        return len(self._size)

    def __repr__(self) -> str:
        return (
            f"<Batch of {len(self)} descriptors, {self.nbytes} bytes, {self.source.owner}/{self.source.name} -> "
            f"{self.target.owner}/{self.target.name}>"
        )

    def arrays(self) -> Batch:
        """Return the batch that has the arrays."""
        return self

    def over(self, source: Region, target: Region) -> Batch:
        """Return the same descriptors over other regions, without checking again what cannot have changed.

        Raise `InvalidBatch` if either region is smaller than the one it replaces.
        """
        if source.size < self.source.size or target.size < self.target.size:
            raise InvalidBatch(
                f"regions of {source.size} and {target.size} bytes cannot stand for {self.source.size} and "
                f"{self.target.size}"
            )
        return LazyBatch(source, target, len(self), self.nbytes, self.arrays)


class LazyBatch(Batch):
    """A valid batch whose arrays *make* makes when somebody first reads one of them.

    The simulator on memory without contents needs no more than the number of descriptors and the bytes.  *make* is
    called at most once, for all batches that `over` derives from this one, and returns a batch of *count*
    descriptors and *nbytes* over regions at least as large; else an `AssertionError` is raised.
    """

    __slots__ = ("_count", "_made", "_make")

    def __init__(
        self,
        source: Region,
        target: Region,
        count: int,
        nbytes: int,
        make: Callable[[], Batch],
    ) -> None:
        self.source = source
        self.target = target
        self.nbytes = nbytes
        self._count = count
        self._make = make
        self._made: Batch | None = None

    def __len__(self) -> int:
        return self._count

    def arrays(self) -> Batch:
        """Return the batch with arrays that this one stands for."""
        made = self._made
        if made is None:
            made = self._made = self._make().arrays()
            if len(made) != self._count or made.nbytes != self.nbytes:
                raise AssertionError(f"{self!r} stands for {made!r}")
        return made


def single_descriptor(source: Region, target: Region, source_offset: int, target_offset: int, size: int) -> Batch:
    """Return the batch of one descriptor, checked as any other, without arrays until somebody reads them."""

    def make() -> Batch:
        return Batch(source, target, [source_offset], [target_offset], [size])

    inside = 0 <= source_offset <= source.size - size and 0 <= target_offset <= target.size - size
    return LazyBatch(source, target, 1, size, make) if inside and size > 0 else make()
