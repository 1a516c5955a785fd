# SPDX-License-Identifier: Apache-2.0
"""The symmetric pool of a real rank: memory that a group reserved, handed out first fit.

Equal calls on all ranks give equal offsets, as symmetric memory must have.  A buffer lies within one segment.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from functools import partial
from typing import Any

from pdsim.core.errors import OutOfMemory
from pdsim.core.units import format_size

__all__ = ["Arena", "Cut", "ReservedPool"]

Cut = Callable[[int, int, Callable[[], None]], Any]
"""``cut(offset, size, give_back)`` returns a buffer of a part of a segment, which calls *give_back* at its end."""


class Arena:
    """Offsets of a piece of memory of *size* bytes.

    Invariant: gaps are ascending, do not overlap and do not touch, and their bytes and those taken add up to *size*.

    >>> arena = Arena(100)
    >>> arena.take(60), arena.take(60), arena.take(40)
    (0, None, 60)
    >>> arena.give(0, 60); arena.give(60, 40); arena.take(100)
    0
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._gaps = [(0, size)]  # offset and size, ascending, never touching

    @property
    def free(self) -> int:
        """Bytes of all gaps."""
        return sum(size for _, size in self._gaps)

    def take(self, size: int) -> int | None:
        """Return the first offset with room for *size* bytes, or None."""
        for index, (offset, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[index : index + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Undo a `take`."""
        insort(self._gaps, (offset, size))
        merged: list[tuple[int, int]] = []
        for start, room in self._gaps:
            if merged and sum(merged[-1]) == start:
                start, room = merged[-1][0], merged.pop()[1] + room
            merged.append((start, room))
        self._gaps = merged


class ReservedPool:
    """Segments, each with what the device needs to make a buffer of a part of it.

    *owner* is the one group whose gathers may use the pool.  Segments are added by `Group.reserve` and stay until
    the process ends.
    """

    def __init__(self, device: str) -> None:
        self.owner: object = None  # the group that reserved it
        self.reserved = 0
        self._device = device
        self._segments: list[tuple[Arena, Cut]] = []

    def add(self, size: int, cut: Cut) -> None:
        """Add a segment of *size* bytes, whose buffers *cut* makes."""
        self._segments.append((Arena(size), cut))
        self.reserved += size

    def allocate(self, size: int) -> Any:
        """Return a buffer of *size* bytes.  Raise `OutOfMemory` if no segment has that much in one piece."""
        for arena, cut in self._segments:
            offset = arena.take(size)
            if offset is not None:
                return cut(offset, size, partial(arena.give, offset, size))
        used = self.reserved - sum(arena.free for arena, _ in self._segments)
        raise OutOfMemory(
            f"{format_size(size)} do not fit into the symmetric pool of {self._device}: {format_size(used)} of "
            f"{format_size(self.reserved)} are in use; have all ranks reserve more with Group.reserve"
        )
