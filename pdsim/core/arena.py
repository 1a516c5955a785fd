# SPDX-License-Identifier: Apache-2.0
"""A first-fit allocator of addresses, for simulated and for real memory."""

from __future__ import annotations

from bisect import insort

__all__ = ["Arena"]


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
        """Bytes of all gaps."""
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
