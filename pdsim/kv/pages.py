"""Which pages of a pool are whose."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["PagePool", "Pages", "SlotPool", "after"]

Pages = tuple[tuple[int, int], ...]
"""First page and count of each run, in ascending order."""


def after(pages: Pages, skip: int) -> Pages:
    """Return *pages* without the first *skip* of them."""
    rest = []
    for first, count in pages:
        left = max(0, count - skip)
        if left:
            rest.append((first + count - left, left))
        skip = max(0, skip - count)
    return tuple(rest)


class PagePool:
    """The pages of one instance (all its ranks use the same numbers), handed out in runs as long as can be had.

    Takes the smallest free run that holds a request whole and, if none does, the largest ones; the lowest among equals.
    So one history of calls gives one assignment.  Costs grow with the number of free runs, not of pages.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"pages must be >= 1, got {pages}")
        self.pages = pages
        self.free = pages
        self.peak = 0  # most pages that had an owner at one time
        self._starts = [0]  # of free runs, ascending, never adjacent
        self._counts = [pages]
        self.owners: dict[int, Pages] = {}

    def __len__(self) -> int:
        """Return the number of owners."""
        return len(self.owners)

    @property
    def used(self) -> int:
        """Pages that have an owner."""
        return self.pages - self.free

    def owned(self, owner: int) -> Pages:
        """Return the runs of *owner*.  Raise a `KeyError` if it has none."""
        return self.owners[owner]

    def allocate(self, owner: int, count: int) -> Pages | None:
        """Give *count* pages to *owner* and return their runs, or None if fewer are free.

        Raise a `ValueError` if *count* is not positive or *owner* has pages already.
        """
        if count < 1:
            raise ValueError(f"count must be >= 1, got {count}")
        if owner in self.owners:
            raise ValueError(f"owner {owner} has pages already: release them first")
        if count > self.free:
            return None
        pages = self.owners[owner] = self._take(count)
        return pages

    def extend(self, owner: int, count: int) -> bool:
        """Give *count* more pages to *owner*; return False, and give none, if fewer are free.

        Raise a `ValueError` if *count* is not positive and a `KeyError` if *owner* has no pages.
        """
        if count < 1:
            raise ValueError(f"count must be >= 1, got {count}")
        if owner not in self.owners:
            raise KeyError(f"owner {owner} has no pages to extend")
        if count > self.free:
            return False
        self.owners[owner] = tuple(sorted((*self.owners[owner], *self._take(count))))
        return True

    def count(self, owner: int) -> int:
        """Return how many pages *owner* has.  Raise a `KeyError` if it has none."""
        return sum(count for _, count in self.owners[owner])

    def _take(self, count: int) -> Pages:
        """Take *count* pages out, which are free."""
        self.free -= count
        self.peak = max(self.peak, self.used)
        taken: list[tuple[int, int]] = []
        while count:
            index = self._choose(count)
            part = min(count, self._counts[index])
            taken.append((self._starts[index], part))
            self._cut(index, part)
            count -= part
        return tuple(sorted(taken))

    def release(self, owner: int) -> None:
        """Take the pages of *owner* back.  Raise a `KeyError` if it has none: nothing is freed twice."""
        if owner not in self.owners:
            raise KeyError(f"owner {owner} has no pages to release")
        for start, count in self.owners.pop(owner):
            self._insert(start, count)
            self.free += count

    def _choose(self, count: int) -> int:
        counts = self._counts
        fitting = [size for size in counts if size >= count]
        return counts.index(min(fitting) if fitting else max(counts))

    def _cut(self, index: int, count: int) -> None:
        if count == self._counts[index]:
            del self._starts[index], self._counts[index]
        else:
            self._starts[index] += count
            self._counts[index] -= count

    def _insert(self, start: int, count: int) -> None:
        starts, counts = self._starts, self._counts
        index = bisect_left(starts, start)
        if index < len(starts) and start + count == starts[index]:  # joins its right neighbour
            starts[index] = start
            counts[index] += count
        else:
            starts.insert(index, start)
            counts.insert(index, count)
        if index and starts[index - 1] + counts[index - 1] == start:  # joins its left neighbour
            counts[index - 1] += counts[index]
            del starts[index], counts[index]


class SlotPool:
    """Numbers from 0, each with one owner at a time; the one given back last is handed out first."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self.owners: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of owners."""
        return len(self.owners)

    @property
    def free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    def allocate(self, owner: int) -> int | None:
        """Return a slot for *owner*, or None if all are taken.  Raise a `ValueError` if *owner* has one."""
        if owner in self.owners:
            raise ValueError(f"owner {owner} has slot {self.owners[owner]} already")
        if not self._free:
            return None
        slot = self.owners[owner] = self._free.pop()
        return slot

    def release(self, owner: int) -> None:
        """Take the slot of *owner* back.  Raise a `KeyError` if it has none."""
        if owner not in self.owners:
            raise KeyError(f"owner {owner} has no slot to release")
        self._free.append(self.owners.pop(owner))
