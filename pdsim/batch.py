# SPDX-License-Identifier: Apache-2.0
"""What one transfer moves: descriptors over two regions, as arrays, or counted and checked before those exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdsim.descriptors import Int64s, check_disjoint, check_inside, int64s
from pdsim.errors import InvalidBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.region import Region

__all__ = ["Batch", "LazyBatch", "one_piece"]


class Batch:
    """Descriptors: for each *i*, ``size[i]`` bytes from ``source_offset[i]`` to ``target_offset[i]``.

    Three int64 arrays of equal length over two regions; 100,000 descriptors are normal.  Bytes flow from *source* to
    *target* whoever posts: for a read, *source* is the peer's.

    Raise `InvalidBatch` if the batch is empty or the lengths differ, if a size is not positive, if a descriptor
    reaches outside its region, or if two targets overlap (engines keep no order among descriptors, so the outcome
    would be chance; sources may overlap).

    *pieces* is how many descriptors it stands for; by default as many as it has.  `Device.copy` on memory without
    contents is given few that stand for many; nothing else looks at it.  `InvalidBatch` if it is less than there
    are.
    """

    __slots__ = ("_size", "_source_offset", "_target_offset", "nbytes", "pieces", "source", "target")

    def __init__(
        self,
        source: Region,
        target: Region,
        source_offset: npt.ArrayLike,
        target_offset: npt.ArrayLike,
        size: npt.ArrayLike,
        pieces: int | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self._source_offset = int64s(source_offset, "source_offset")
        self._target_offset = int64s(target_offset, "target_offset")
        self._size = lengths = int64s(size, "size")
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
        check_inside(source, self._source_offset, lengths, "source")
        check_inside(target, self._target_offset, lengths, "target")
        check_disjoint(self._target_offset, lengths)
        self.nbytes = int(lengths.sum())
        self.pieces = count if pieces is None else pieces
        if self.pieces < count:
            raise InvalidBatch(f"pieces={pieces} must be >= {count}, the number of descriptors that stand for them")

    @property
    def source_offset(self) -> Int64s:
        """Where each descriptor begins in the source."""
        return self._source_offset

    @property
    def target_offset(self) -> Int64s:
        """Where each descriptor begins in the target."""
        return self._target_offset

    @property
    def size(self) -> Int64s:
        """The bytes of each descriptor."""
        return self._size

    def __len__(self) -> int:
        """Return the number of descriptors."""
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
        return LazyBatch(source, target, len(self), self.nbytes, self.arrays, self.pieces)


class LazyBatch(Batch):
    """A batch whose arrays are made by *make* when somebody first reads one of them.

    The simulator on memory without contents needs no more than the number of descriptors and the bytes.  Whoever
    makes one has checked what `Batch` checks; *make* returns a batch of *count* descriptors and *nbytes* over
    regions at least as large.  It is called at most once, for all batches that `over` derives from this one.
    *pieces* is as of `Batch`.
    """

    __slots__ = ("_count", "_made", "_make")

    def __init__(
        self,
        source: Region,
        target: Region,
        count: int,
        nbytes: int,
        make: Callable[[], Batch],
        pieces: int | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self.nbytes = nbytes
        self._count = count
        self.pieces = count if pieces is None else pieces
        self._make = make
        self._made: Batch | None = None

    def __len__(self) -> int:
        return self._count

    def arrays(self) -> Batch:
        """Return the batch with arrays that this one stands for.

        Raise an `AssertionError` if *make* returns another number of descriptors or bytes than was promised.
        """
        made = self._made
        if made is None:
            made = self._made = self._make()
            if len(made) != self._count or made.nbytes != self.nbytes:
                raise AssertionError(f"{self!r} stands for {made!r}")
        return made

    @property
    def source_offset(self) -> Int64s:
        """Where each descriptor begins in the source."""
        return self.arrays().source_offset

    @property
    def target_offset(self) -> Int64s:
        """Where each descriptor begins in the target."""
        return self.arrays().target_offset

    @property
    def size(self) -> Int64s:
        """The bytes of each descriptor."""
        return self.arrays().size


def one_piece(source: Region, target: Region, source_offset: int, target_offset: int, size: int) -> Batch:
    """Return the batch of one descriptor, checked as any other, without arrays until somebody reads them."""

    def make() -> Batch:
        return Batch(source, target, [source_offset], [target_offset], [size])

    inside = 0 <= source_offset <= source.size - size and 0 <= target_offset <= target.size - size
    return LazyBatch(source, target, 1, size, make) if inside and size > 0 else make()
