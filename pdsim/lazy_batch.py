# SPDX-License-Identifier: Apache-2.0
"""A batch that is counted and checked before its arrays exist, for memory without contents."""

from __future__ import annotations

from collections.abc import Callable

from pdsim.descriptors import Int64s
from pdsim.transfer import Batch, Region

__all__ = ["LazyBatch", "one_piece"]


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
    def source_offset(self) -> Int64s:  # type: ignore[override]  # there a slot
        """Where each descriptor begins in the source."""
        return self.arrays().source_offset

    @property
    def target_offset(self) -> Int64s:  # type: ignore[override]
        """Where each descriptor begins in the target."""
        return self.arrays().target_offset

    @property
    def size(self) -> Int64s:  # type: ignore[override]
        """The bytes of each descriptor."""
        return self.arrays().size

    def over(self, source: Region, target: Region) -> Batch:
        """As `Batch.over`."""
        self._check_over(source, target)
        return LazyBatch(source, target, self._count, self.nbytes, self.arrays, self.pieces)


def one_piece(source: Region, target: Region, source_offset: int, target_offset: int, size: int) -> Batch:
    """Return the batch of one descriptor, checked as any other, without arrays until somebody reads them."""

    def make() -> Batch:
        return Batch(source, target, [source_offset], [target_offset], [size])

    inside = 0 <= source_offset <= source.size - size and 0 <= target_offset <= target.size - size
    return LazyBatch(source, target, 1, size, make) if inside and size > 0 else make()
