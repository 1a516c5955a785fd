# SPDX-License-Identifier: Apache-2.0
"""Which pages and slots of an instance are whose, and which pages keep prefixes of prompts.

Owners are rooms; all ranks of an instance use the same numbers.  Unknown here: tokens, engines, time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter

import numpy as np
from mypy_extensions import mypyc_attr

from pdsim.kv.layout import StateShape, window_span
from pdsim.kv.tiers import Origin, Tiers
from pdsim.transfer.batch import Int64s

Pages = tuple[tuple[int, int], ...]
"""First page and count of each run, in the order of their tokens."""

Runs = tuple[tuple[int, int, int], ...]
"""Source page, target page, count: pages that are neighbours on both sides."""


@mypyc_attr(native_class=False)
class ManyRuns(tuple[tuple[int, int], ...]):
    """`Pages` of many runs, which know *columns*: their first pages, and the count of each."""

    columns: tuple[Int64s, Int64s]


ORDERS = ("best_fit", "queue", "stack")
"""How free pages are given out: see `page_pool`."""


def page_pool(order: str, pages: int, block: int = 1) -> PagePool:
    """Return a pool of so many *pages*, all free, that gives them out in *order*, aligned *block*s at a time.

    ``"best_fit"`` keeps runs long (`PagePool`; SGLang sorts its free slots to the same end), ``"queue"`` gives out
    what was freed longest ago (as vLLM does), ``"stack"`` what was freed last (as vLLM 0.26 does): `FreeQueue`.
    """
    if order == "best_fit":
        return PagePool(pages, block)
    return FreeQueue(pages, last_first=order == "stack", block=block)


def total(pages: Pages) -> int:
    """Return how many *pages* there are."""
    return int(pages.columns[1].sum()) if isinstance(pages, ManyRuns) else sum(map(itemgetter(1), pages))


def after(pages: Pages, skip: int) -> Pages:
    """Return *pages* without the first *skip* of them.

    >>> after(((4, 3), (10, 2)), skip=4)
    ((11, 1),)
    """
    if not skip:
        return pages
    rest = []
    for first, count in pages:
        left = max(0, count - skip)
        if left:
            rest.append((first + count - left, left))
        skip = max(0, skip - count)
    return tuple(rest)


def before(pages: Pages, end: int) -> Pages:
    """Return the first *end* of *pages*; all if there are fewer.

    >>> before(((4, 3), (10, 2)), end=4)
    ((4, 3), (10, 1))
    """
    if end >= total(pages):
        return pages
    runs = []
    for start, count in pages:
        if end:
            runs.append((start, min(count, end)))
            end -= runs[-1][1]
    return tuple(runs)


@lru_cache(maxsize=4)  # the ranks of an instance ask one after the other
def pair(source: Pages, target: Pages) -> Runs:
    """Return the runs that move the pages of *source*, in order, to the first as many of *target*.

    Raise a `ValueError` if *target* has fewer pages.

    >>> pair(((4, 3), (9, 1)), ((0, 2), (3, 5)))
    ((4, 0, 2), (6, 3, 1), (9, 4, 1))
    """
    if source is target:  # as of a prompt whose KV stays where it is
        return tuple([(first, first, count) for first, count in source])
    runs: list[tuple[int, int, int]] = []
    targets = iter(target)
    start = left = 0
    for first, count in source:
        while count:
            if not left:
                start, left = next(targets, (0, 0))
                if not left:
                    raise ValueError(f"{target} has fewer pages than {source}")
            if count < left:
                runs.append((first, start, count))
                start += count
                left -= count
                break
            runs.append((first, start, left))
            first += left
            count -= left
            left = 0
    return tuple(runs)


def cut(runs: Runs, first: int, count: int) -> Runs:
    """Return what of *runs* are the *count* pages from the *first*-th on, counted over all runs, which have them.

    >>> cut(((10, 20, 4), (30, 40, 4)), first=3, count=3)
    ((13, 23, 1), (30, 40, 2))
    """
    if count < 1:
        return ()
    ends = list(accumulate(map(itemgetter(2), runs)))
    end = first + count
    if not ends or (first <= 0 and ends[-1] <= end):
        return runs
    begin, last = bisect_right(ends, first), bisect_left(ends, end)
    parts = list(runs[begin : last + 1])
    source, target, size = parts[-1]  # the end first: it may be of the same run
    parts[-1] = source, target, size - (ends[last] - end)
    if (skip := first - (ends[begin - 1] if begin else 0)) > 0:
        source, target, size = parts[0]
        parts[0] = source + skip, target + skip, size - skip
    return tuple(parts)


def sources(runs: Runs) -> Pages:
    """Return the pages that *runs* come from."""
    return tuple([(source, count) for source, _, count in runs])


def targets(runs: Runs) -> Pages:
    """Return the pages that *runs* go to."""
    return tuple([(target, count) for _, target, count in runs])


class PagePool:
    """The pages of one instance, handed out in runs as long as can be had.

    Takes the smallest free run that holds a request whole or, if none does, the largest ones; the lowest among
    equals.  Costs grow with the number of free runs, not of pages.  *unused* counts pages that nobody has, *peak* is
    the most that had an owner at one time, *owners* has the runs of each.  Free runs are ascending and never touch.
    An owner gets whole *block*s of pages, so more than it asks for.

    >>> pool = PagePool(10)
    >>> pool.allocate(1, 4), pool.allocate(2, 4), pool.release(1), pool.allocate(3, 5)
    (((0, 4),), ((4, 4),), None, ((0, 4), (8, 1)))
    """

    def __init__(self, pages: int, block: int = 1) -> None:
        if pages < 1 or pages % block:
            raise ValueError(f"pages must be >= 1 and whole blocks of {block}, got {pages}")
        self.block = block
        self.pages = pages
        self.unused = pages
        self.peak = 0
        self._starts = [0]  # of free runs
        self._counts = [pages]
        self._by_size = [(pages, 0)]  # the same: counts and starts
        self.owners: dict[int, Pages] = {}
        self._sizes: dict[int, int] = {}  # how many pages each has

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

    def allocate(self, owner: int, count: int) -> Pages | None:
        """Give *count* pages to *owner* and return their runs, or None if fewer are free.

        Raise a `ValueError` if *count* is not positive or *owner* has pages already.
        """
        if count < 1:
            raise ValueError(f"count must be >= 1, got {count}")
        if owner in self.owners:
            raise ValueError(f"owner {owner} has pages already: release them first")
        count = self.rounded(count)
        if count > self.free:
            return None
        pages = self.owners[owner] = self.take(owner, count)
        self._sizes[owner] = count
        return pages

    def extend(self, owner: int, count: int) -> None:
        """Give *count* more pages to *owner*, which are free.  Raise a `KeyError` if it has no pages."""
        count = self.rounded(count)
        assert count <= self.free, f"owner {owner} lacks {count} pages, {self.free} are free"
        self.owners[owner] = self.joined(self.owners[owner], self.take(owner, count))
        self._sizes[owner] += count

    def rounded(self, count: int) -> int:
        """Return how many pages an owner gets that asks for *count*."""
        return -(-count // self.block) * self.block

    def joined(self, pages: Pages, more: Pages) -> Pages:
        """Return the runs of an owner of *pages* that got *more*: here in ascending order."""
        return tuple(sorted((*pages, *more)))

    def count(self, owner: int) -> int:
        """Return how many pages *owner* has.  Raise a `KeyError` if it has none."""
        return self._sizes[owner]

    def take(self, owner: int, count: int) -> Pages:  # noqa: ARG002 a `FreeQueue` needs the owner
        """Return *count* pages for *owner*, of those that are free; the caller adds them to `owners`."""
        self._count_taken(count)
        taken: list[tuple[int, int]] = []
        counts, by_size = self._counts, self._by_size
        while count:
            place = bisect_left(by_size, (count, -1))  # the smallest that fits, else the largest
            if place == len(by_size):
                place = bisect_left(by_size, (by_size[-1][0], -1))
            size, start = by_size.pop(place)
            part, index = min(count, size), bisect_left(self._starts, start)
            taken.append((start, part))
            if part == size:
                del self._starts[index], counts[index]
            else:
                self._starts[index] += part
                counts[index] -= part
                insort(by_size, (size - part, start + part))
            count -= part
        return tuple(sorted(taken)) if len(taken) > 1 else tuple(taken)

    def release(self, owner: int) -> None:
        """Take the pages of *owner* back.  Raise a `KeyError` if it has none: nothing is freed twice."""
        for start, count in self._taken_back(owner):
            self.put_back(start, count)

    def is_whole(self) -> bool:
        """Return whether pages with an owner and pages without one are all pages, however many owners one has."""
        lent = {page for runs in self.owners.values() for page in _numbers(runs)}
        return len(lent) + self.free == self.pages and sum(self._counts) == self.unused

    def put_back(self, start: int, count: int) -> None:
        """Count a run of pages, which nobody owns any more, as unused."""
        self.unused += count
        starts, counts = self._starts, self._counts
        index = bisect_left(starts, start)
        if index < len(starts) and start + count == starts[index]:  # joins its right neighbour
            count += self._remove(index)
        if index and starts[index - 1] + counts[index - 1] == start:  # joins its left neighbour
            index -= 1
            start = starts[index]
            count += self._remove(index)
        starts.insert(index, start)
        counts.insert(index, count)
        insort(self._by_size, (count, start))

    def _remove(self, index: int) -> int:
        count = self._counts.pop(index)
        del self._by_size[bisect_left(self._by_size, (count, self._starts.pop(index)))]
        return count

    def _count_taken(self, count: int) -> None:
        self.unused -= count
        self.peak = max(self.peak, self.used)

    def _taken_back(self, owner: int) -> Pages:
        del self._sizes[owner]
        return self.owners.pop(owner)


class FreeQueue(PagePool):
    """The pages of one instance, given out in the order in which they were freed, those of an owner last one first.

    So does vLLM's block pool (`v1/core/block_pool.py`; `kv_cache_manager.free` gives the blocks of a request back in
    reverse): ascending neighbours at first, later descending ones, which no descriptor covers together, then a
    mixture.  With *last_first*, what was freed last is given out first.

    >>> pool = FreeQueue(4)
    >>> pool.allocate(1, 4), pool.release(1), pool.allocate(2, 2)
    (((0, 4),), None, ((3, 1), (2, 1)))
    """

    def __init__(self, pages: int, last_first: bool = False, block: int = 1) -> None:
        super().__init__(pages, block)
        self._last_first = last_first
        # first pages of blocks: those from `_head` to `_tail` are free, in their order
        self._order = np.arange(0, (1 if last_first else 2) * pages, block)
        self._head, self._tail = 0, pages // block
        self._blocks: dict[int, array[int]] = {}  # the same of each owner

    def joined(self, pages: Pages, more: Pages) -> Pages:
        """Return *pages* and *more*, which come last."""
        (first, count), (start, size) = pages[-1], more[0]
        if first + count == start:
            return (*pages[:-1], (first, count + size), *more[1:])
        return (*pages, *more)

    def take(self, owner: int, count: int) -> Pages:
        """Return the first pages of the queue."""
        self._count_taken(count)
        block, first = self.block, self._head
        self._head += count // block
        taken = self._order[first : self._head]
        self._blocks.setdefault(owner, array("q")).frombytes(taken.tobytes())
        if count == block:  # as of a request that grows
            return ((int(taken[0]), block),)
        return _runs(taken if block == 1 else np.add.outer(taken, np.arange(block)).ravel())

    def release(self, owner: int) -> None:
        """Take the pages of *owner* back: its last page is the first of them to be given out again."""
        self.unused += self.count(owner)
        self._taken_back(owner)
        blocks = np.frombuffer(self._blocks.pop(owner), np.int64)[::-1]
        if self._last_first:
            self._head -= len(blocks)
            self._order[self._head : self._head + len(blocks)] = blocks
            return
        if self._tail + len(blocks) > len(self._order):
            free = self._order[self._head : self._tail]
            self._order[: len(free)] = free
            self._head, self._tail = 0, len(free)
        self._order[self._tail : self._tail + len(blocks)] = blocks
        self._tail += len(blocks)

    def is_whole(self) -> bool:
        """Return whether every page is free or owned, once."""
        lent = [page for runs in self.owners.values() for page in _numbers(runs)]
        free = [first + n for first in self._order[self._head : self._tail].tolist() for n in range(self.block)]
        return sorted([*free, *lent]) == list(range(self.pages))


class SlotPool:
    """Numbers from 0 (rows of metadata, mamba states) with one owner each; the last given back goes first."""

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
        self._free.append(self.owners.pop(owner))


class StatePool:
    """The mamba slots and window pages of one instance, of models that have such layers.

    A request takes one slot, and window pages for the most that its window can touch while it grows, so nothing that
    runs can run out.
    """

    def __init__(self, shape: StateShape, page_size: int, slots: int, window_pages: int) -> None:
        self._shape = shape
        self._components = shape.components
        self._page_size = page_size
        self.slots = SlotPool(slots) if shape.mamba else None
        self.window = PagePool(window_pages) if shape.window else None

    def __len__(self) -> int:
        """Return the number of owners."""
        return max((len(pool) for pool in (self.slots, self.window) if pool is not None), default=0)

    def need(self, tokens: int, reach: int) -> int:
        """Return the window pages that a request of *tokens* needs which grows to *reach* tokens."""
        if reach <= tokens:
            return window_span(tokens, self._shape.window, self._page_size)[1]
        # as it moves on, it may begin anywhere within its first page
        return min(-(-self._shape.window // self._page_size) + 1, -(-reach // self._page_size))

    def allocate(self, owner: int, tokens: int, reach: int, pages: Pages) -> tuple[Pages, ...] | None:
        """Return the rows of each component that *owner* gets, or None if there are too few.

        *tokens* are those of the handoff and *reach* those that it grows to; index rows lie in its *pages*.
        """
        if not self._components:
            return ()
        rows: dict[str, Pages] = {"index": pages}
        if self.window is not None:
            window = self.window.allocate(owner, self.need(tokens, reach))
            if window is None:
                return None
            rows["window"] = window
        if self.slots is not None:
            slot = self.slots.allocate(owner)
            if slot is None:
                if self.window is not None:
                    self.window.release(owner)
                return None
            rows["mamba"] = ((slot, 1),)
        return tuple(rows[name] for name in self._components)

    def release(self, owner: int) -> None:
        """Take the rows of *owner* back.  Raise a `KeyError` if it has none."""
        for pool in (self.slots, self.window):
            if pool is not None:
                pool.release(owner)


@dataclass(slots=True)
class _CachedPage:
    """A page whose contents are known by a hash."""

    page: int
    node: int  # the pages that were computed together with it
    users: int  # requests that have it
    here: bool = False  # computed, or come from a tier; known to tiers only


class PrefixPagePool(PagePool):
    """A `PagePool` whose pages may have several users, and whose free pages keep prefixes of prompts until needed.

    A page is known by the hash of its tokens and all before them.  Pages without a user are evicted in order of
    their last use, the end of a prompt before its beginning: with *eviction* ``"block"`` one page at a time (vLLM);
    with ``"radix"`` all pages that were computed together and that no prompt has branched off from since (the leaves
    of SGLang's radix tree).

    `free` counts the pages without a user, cached or not; *limit*, if not 0, is the most of them that stay cached.

    With *tiers*, pages are kept below GPU memory, too.  *write* says when they are written there: ``"through"`` by
    `store`, ``"selective"`` when they are found again, ``"back"`` when they are evicted.  `outgoing` has the
    key and the page of each that is to be written; but for ``"back"`` it stays until `written` is called.  `loaded`
    has the key and the origin of each page of the last `reuse` that tiers have.

    >>> pool = PrefixPagePool(4)
    >>> pool.reuse(1, 3, keys=[])
    (((0, 3),), 0)
    >>> pool.commit(1, [70, 71]); pool.release(1)  # two pages of it are known by their contents
    >>> pool.match([70, 71, 72]), pool.reuse(2, 4, keys=[70, 71])
    (2, (((0, 2), (2, 2)), 2))
    """

    def __init__(
        self, pages: int, eviction: str = "block", limit: int = 0, tiers: Tiers | None = None, write: str = "through"
    ) -> None:
        super().__init__(pages)
        self.loaded: list[tuple[int, Origin]] = []
        self.evicted = 0  # pages
        self.tiers = tiers
        self.outgoing: list[tuple[int, int]] = []
        self._writing: set[int] = set()  # keys in it, and those that are being written or read
        self._stored: dict[int, int] = {}  # how many of each owner's first pages tiers have, or get
        self._write = write
        self._radix = eviction == "radix"
        self._limit = limit
        self._cached: dict[int, _CachedPage] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # keys without a user, the next to be evicted first
        # of each owner's first pages; None: another page has that content
        self._keys: dict[int, list[int | None]] = {}
        self._nodes: dict[int, list[int]] = {}  # keys in order, where eviction goes by nodes
        self._node = 0

    @property
    def free(self) -> int:
        """Pages that a request can have: unused ones, and cached ones without a user."""
        return self.unused + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages whose contents are known, with users or without."""
        return len(self._cached)

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of *keys*, from the first on, are here; a lookup does not count as a use."""
        return _leading(keys, self._cached)

    def in_use(self, keys: Sequence[int]) -> int:
        """Return how many of *keys*, which are here, have users: another one takes no free page."""
        return sum(key not in self._idle for key in keys)

    def reuse(self, owner: int, count: int, keys: Sequence[int]) -> tuple[Pages, int] | None:
        """Give *owner* *count* pages, first the cached ones of *keys*.

        Return them in the order of its tokens, and how many are cached ones; None, and nothing has changed, if there
        are too few.  Raise as `allocate` does, and unless *count* exceeds the number of *keys* that are here.
        """
        hits, self.loaded = self.match(keys), []
        origins = self.tiers.find(keys, hits) if self.tiers is not None else []
        # a page that is here after one that is not has a place of its own
        back = next(
            (number for number, key in enumerate(keys[hits : hits + len(origins)]) if key in self._cached),
            len(origins),
        )
        origins = origins[:back]
        if not hits + back:
            pages = self.allocate(owner, count)
            return None if pages is None else (pages, 0)
        if owner in self.owners:
            raise ValueError(f"owner {owner} has pages already: release them first")
        if not hits + back < count:
            raise ValueError(f"{hits + back} cached pages of {count}: at least one must be computed")
        every, keys = keys[: hits + back], keys[:hits]
        if count - hits > self.free - (hits - self.in_use(keys)):
            return None
        for key in keys:
            self._idle.pop(key, None)
            self._cached[key].users += 1
        if self._radix:  # in each node, for between them may be pages that another prompt computed
            for last in {self._cached[key].node: key for key in keys}.values():
                self._split(last)
        self._keys[owner] = list(keys)
        self.owners[owner] = (*_runs([self._cached[key].page for key in keys]), *self.take(owner, count - hits))
        self._sizes[owner] = count
        self.commit(owner, every)  # what comes back is known again
        self.loaded = list(zip(every[hits:], origins, strict=True))
        for key in every[hits:]:  # nobody else has its page, and nothing reads it, before it is here: `written`
            self._writing.add(key)
            self._cached[key].users += 1
        if self.tiers is not None:
            self.tiers.touch(every)
            self._stored[owner] = len(every)
            if self._write == "selective":
                self._send(every, 0)
        return self.owners[owner], hits + back

    def commit(self, owner: int, keys: Sequence[int]) -> None:
        """Make the first pages of *owner* known by *keys*, one each: their tokens are computed.

        A page with the content of another stays its owner's alone.
        """
        mine = self._keys.setdefault(owner, [])
        begin = len(mine)
        if len(keys) <= begin:
            return
        self._node += 1
        for key, page in zip(keys[begin:], _numbers(after(self.owners[owner], begin)), strict=False):
            if key in self._cached:
                mine.append(None)
                continue
            mine.append(key)
            self._cached[key] = _CachedPage(page, self._node, 1)
            if self._radix:
                self._nodes.setdefault(self._node, []).append(key)

    def store(self, owner: int, keys: Sequence[int]) -> None:
        """Have the first pages of *owner*, which are computed and known by *keys*, written to the tiers."""
        assert self.tiers is not None
        begin, self._stored[owner] = self._stored.get(owner, 0), len(keys)
        self.tiers.touch(keys[begin:])
        for key in self._keys.get(owner, [])[begin : len(keys)]:
            if key is not None:
                self._cached[key].here = True
        if self._write == "through":
            self._send(keys, begin)

    def written(self, keys: Sequence[int]) -> None:
        """Let the pages of *keys* go, which have been written or have come: until now they were in use."""
        for key in reversed(keys):  # the end of the prompt is evicted first
            if key in self._writing:
                self._writing.remove(key)
                self._cached[key].here = True
                self._leave(key)
        self._keep_to_limit()

    def is_whole(self) -> bool:
        """As `PagePool.is_whole`; what is being written has an owner, too."""
        lent = {page for runs in self.owners.values() for page in _numbers(runs)}
        lent |= {cached.page for cached in self._cached.values() if cached.users}
        return len(lent) + self.free == self.pages and sum(self._counts) == self.unused

    def joined(self, pages: Pages, more: Pages) -> Pages:
        """Return *pages* and *more*, which come last."""
        return (*pages, *more)

    def release(self, owner: int) -> None:
        """Take the pages of *owner* back; those that are known by a hash can be used again."""
        pages = self._taken_back(owner)
        self._stored.pop(owner, None)
        keys = self._keys.pop(owner, [])
        private = [page for key, page in zip(keys, _numbers(pages), strict=False) if key is None]
        for first, count in (*_runs(private), *after(pages, len(keys))):
            self.put_back(first, count)
        for key in reversed(keys):  # the end of the prompt is evicted first
            if key is not None:
                self._leave(key)
        self._keep_to_limit()

    def take(self, owner: int, count: int) -> Pages:
        """Return pages as `PagePool.take` does, cached ones without a user if there are too few others."""
        while self.unused < count:
            self._evict()
        return super().take(owner, count)

    def _leave(self, key: int) -> None:
        cached = self._cached[key]
        cached.users -= 1
        if not cached.users:
            self._idle[key] = None

    def _keep_to_limit(self) -> None:
        while self._limit and len(self._idle) > self._limit:
            self._evict()

    def _send(self, keys: Sequence[int], begin: int) -> None:
        # Those of whole objects that a tier lacks; their pages stay until they are written.
        assert self.tiers is not None
        chunk = self.tiers.chunk
        for key in keys[begin - begin % chunk : len(keys) - len(keys) % chunk]:
            if key in self._cached and self._cached[key].here and key not in self._writing and self.tiers.lack(key):
                self._writing.add(key)
                self._idle.pop(key, None)
                self._cached[key].users += 1
                self.outgoing.append((key, self._cached[key].page))

    def _evict(self) -> None:
        key = next(iter(self._idle))
        node = self._cached[key].node
        keys = self._nodes.pop(node) if self._radix else [key]
        if busy := [other for other in keys if other in self._writing]:
            self._nodes[node] = busy
        for gone in reversed(keys):
            if gone in self._writing:
                continue
            self._idle.pop(gone)
            page = self._cached.pop(gone).page
            if self._write == "back" and self.tiers is not None and self.tiers.lack(gone):
                self.outgoing.append((gone, page))
            self.put_back(page, 1)
            self.evicted += 1

    def _split(self, key: int) -> None:
        node = self._cached[key].node
        keys = self._nodes[node]
        rest = keys[keys.index(key) + 1 :]
        if rest:
            self._node += 1
            del keys[len(keys) - len(rest) :]
            self._nodes[self._node] = rest
            for other in rest:
                self._cached[other].node = self._node


def _leading(keys: Sequence[int], known: Container[int]) -> int:
    return next((number for number, key in enumerate(keys) if key not in known), len(keys))


def _numbers(runs: Pages) -> list[int]:
    return [page for first, count in runs for page in range(first, first + count)]


def _runs(numbers: Int64s | list[int]) -> Pages:
    pages = np.asarray(numbers, np.int64)
    if not len(pages):
        return ()
    (breaks,) = (pages[1:] - pages[:-1] != 1).nonzero()
    bounds = np.concatenate(([0], breaks + 1, [len(pages)]))
    firsts, counts = pages[bounds[:-1]], bounds[1:] - bounds[:-1]
    runs = ManyRuns(zip(firsts.tolist(), counts.tolist(), strict=True))
    runs.columns = firsts, counts
    return runs
