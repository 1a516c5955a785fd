# SPDX-License-Identifier: Apache-2.0
"""Which pages of a pool are whose."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["ORDERS", "FreeQueue", "FreeStack", "PagePool", "Pages", "SlotPool", "after", "page_pool"]

Pages = tuple[tuple[int, int], ...]
"""First page and count of each run, in the order of their tokens."""

ORDERS = ("best_fit", "queue", "stack")
"""How free pages are given out: see `page_pool`."""


def page_pool(order: str, pages: int) -> PagePool:
    """Return a pool of so many *pages*, all free, that gives them out in *order*.

    ``"best_fit"`` keeps runs long (`PagePool`; SGLang sorts its free slots to the same end), ``"queue"`` gives out
    what was freed longest ago (`FreeQueue`, as vLLM does), ``"stack"`` what was freed last (`FreeStack`, as vLLM
    0.26 does).  Raise a `ValueError` if there is no such order.
    """
    if order not in ORDERS:
        raise ValueError(f"pages must be given out in one of {', '.join(ORDERS)}, got {order!r}")
    kinds: dict[str, Callable[[int], PagePool]] = {"best_fit": PagePool, "queue": FreeQueue, "stack": FreeStack}
    return kinds[order](pages)


def after(pages: Pages, skip: int) -> Pages:
    """Return *pages* without the first *skip* of them.

    >>> after(((4, 3), (10, 2)), skip=4)
    ((11, 1),)
    """
    rest = []
    for first, count in pages:
        left = max(0, count - skip)
        if left:
            rest.append((first + count - left, left))
        skip = max(0, skip - count)
    return tuple(rest)


class PagePool:
    """The pages of one instance (all its ranks use the same numbers), handed out in runs as long as can be had.

    Takes the smallest free run that holds a request whole and, if none does, the largest ones; the lowest among
    equals. So one history of calls gives one assignment.  Costs grow with the number of free runs, not of pages.

    Owners are rooms.  Invariant: free runs are ascending and never touch.

    >>> pool = PagePool(10)
    >>> pool.allocate(1, 4), pool.allocate(2, 4), pool.release(1), pool.allocate(3, 5)
    (((0, 4),), ((4, 4),), None, ((0, 4), (8, 1)))
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"pages must be >= 1, got {pages}")
        self.pages = pages
        self.unused = pages  # pages that nobody has
        self.peak = 0  # most pages that had an owner at one time
        self._starts = [0]  # of free runs, ascending, never adjacent
        self._counts = [pages]
        self.owners: dict[int, Pages] = {}

    def __len__(self) -> int:
        """Return the number of owners."""
        return len(self.owners)

    @property
    def free(self) -> int:
        """Pages that can be given to an owner."""
        return self.unused

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
        pages = self.owners[owner] = self.take(count)
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
        self.owners[owner] = self.joined(self.owners[owner], self.take(count))
        return True

    def joined(self, pages: Pages, more: Pages) -> Pages:
        """Return the runs of an owner of *pages* that got *more*: here in ascending order."""
        return tuple(sorted((*pages, *more)))

    def count(self, owner: int) -> int:
        """Return how many pages *owner* has.  Raise a `KeyError` if it has none."""
        runs = self.owners[owner]
        return runs[0][1] if len(runs) == 1 else sum([count for _, count in runs])

    def take(self, count: int) -> Pages:
        """Return *count* pages, which are free and nobody's from then on: the caller says whose they are."""
        self.unused -= count
        used = self.used
        if used > self.peak:
            self.peak = used
        taken: list[tuple[int, int]] = []
        while count:
            index = self._choose(count)
            part = min(count, self._counts[index])
            taken.append((self._starts[index], part))
            self._cut(index, part)
            count -= part
        return tuple(sorted(taken)) if len(taken) > 1 else tuple(taken)

    def release(self, owner: int) -> None:
        """Take the pages of *owner* back.  Raise a `KeyError` if it has none: nothing is freed twice."""
        if owner not in self.owners:
            raise KeyError(f"owner {owner} has no pages to release")
        for start, count in self.owners.pop(owner):
            self.put_back(start, count)

    def is_whole(self) -> bool:
        """Return whether pages with an owner and pages without one are all pages, however many owners one has."""
        lent = {
            page for runs in self.owners.values() for start, count in runs for page in range(start, start + count)
        }
        return len(lent) + self.free == self.pages and sum(self._counts) == self.unused

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

    def put_back(self, start: int, count: int) -> None:
        """Count a run of pages, which nobody owns any more, as unused."""
        self.unused += count
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


class FreeQueue(PagePool):
    """The pages of one instance, given out in the order in which they were freed, those of an owner last one first.

    So does vLLM's block pool (`v1/core/block_pool.py`, a linked list of free blocks; `kv_cache_manager.free` gives
    the blocks of a request back in reverse, for its last ones to be evicted first).  A new pool gives out ascending
    neighbours.  Once every page has been used, requests get descending ones, which no descriptor covers together,
    then ascending ones again, and later a mixture.

    >>> pool = FreeQueue(4)
    >>> pool.allocate(1, 4)
    ((0, 4),)
    >>> pool.release(1)
    >>> pool.allocate(2, 2)
    ((3, 1), (2, 1))
    """

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self._queue = deque(range(pages))

    def joined(self, pages: Pages, more: Pages) -> Pages:
        """As `PagePool.joined`: new pages come last."""
        return _merged((*pages, *more))

    def take(self, count: int) -> Pages:
        """As `PagePool.take`: the pages that were freed longest ago."""
        self.unused -= count
        self.peak = max(self.peak, self.used)
        return _merged([(self._queue.popleft(), 1) for _ in range(count)])

    def release(self, owner: int) -> None:
        """As `PagePool.release`: the last page of *owner* is the first of its pages to be given out again."""
        self._queue.extend(reversed(self._back(owner)))

    def is_whole(self) -> bool:
        """As `PagePool.is_whole`."""
        return sorted([*self._queue, *_pages(run for runs in self.owners.values() for run in runs)]) == list(
            range(self.pages)
        )

    def _back(self, owner: int) -> list[int]:
        if owner not in self.owners:
            raise KeyError(f"owner {owner} has no pages to release")
        pages = _pages(self.owners.pop(owner))
        self.unused += len(pages)
        return pages


class FreeStack(FreeQueue):
    """As `FreeQueue`, but what was freed last is given out first, the last page of an owner before the others.

    So does vLLM 0.26 with blocks that no prefix cache keeps (`prepend_n` in its block pool).  A request alone gets
    ascending neighbours, the next one the same pages descending, then ascending again.

    >>> pool = FreeStack(4)
    >>> pool.allocate(1, 2)
    ((0, 2),)
    >>> pool.release(1)
    >>> pool.allocate(2, 3)
    ((1, 1), (0, 1), (2, 1))
    """

    def release(self, owner: int) -> None:
        """As `PagePool.release`: the last page of *owner* is the first of all to be given out again."""
        self._queue.extendleft(self._back(owner))


def _pages(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [page for first, count in runs for page in range(first, first + count)]


def _merged(runs: Iterable[tuple[int, int]]) -> Pages:
    merged: list[tuple[int, int]] = []
    for first, count in runs:
        if merged and first == sum(merged[-1]):
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return tuple(merged)


class SlotPool:
    """Numbers from 0, each with one owner at a time; the one given back last is handed out first.

    Owners are rooms; a slot of a pool is a row of metadata, or one mamba state.
    """

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
