# SPDX-License-Identifier: Apache-2.0
"""A pool of pages that keeps the prefixes of prompts: pages nobody uses any more serve the next prompt like them.

A page is known by the hash of its tokens and all before them, so pages of one prefix are found one after the other
and a lookup ends at the first that is missing.  Pages without a user wait in order of their last use, the end of a
prompt before its beginning, and are evicted in that order when a request needs room.

==========  ==========================================================================================
``block``   one page at a time goes, as of vLLM's free queue of blocks
``radix``   with the oldest page its whole node goes: all pages that were computed together and that no
            prompt has branched off from since, as of the leaves of SGLang's radix tree
==========  ==========================================================================================

Unknown here: tokens, engines, time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdsim.kv.pages import PagePool, Pages

__all__ = ["PrefixPagePool"]


@dataclass(slots=True)
class _CachedPage:
    """A page whose contents are known by a hash."""

    page: int
    node: int  # the pages that were computed together with it
    users: int  # requests that have it


class PrefixPagePool(PagePool):
    """A `PagePool` whose pages may have several users, and whose free pages keep their contents until needed.

    `free` counts the pages without a user, cached or not; *limit*, if not 0, is the most of them that stay cached.
    *eviction* is ``"block"`` or ``"radix"``.  With *host*, so many pages that were known last are in host memory,
    too: `commit` says how many go there, and `loaded` how many come back.

    Invariant: a page is unused, cached without a user, or owned by one or more requests; and a page that is cached
    is never evicted while it has a user.

    >>> pool = PrefixPagePool(4)
    >>> pool.reuse(1, 3, keys=[])
    (((0, 3),), 0)
    >>> pool.commit(1, [70, 71]); pool.release(1)  # two pages of it are known by their contents
    0
    >>> pool.match([70, 71, 72]), pool.reuse(2, 4, keys=[70, 71])
    (2, (((0, 2), (2, 2)), 2))
    """

    def __init__(self, pages: int, eviction: str = "block", limit: int = 0, host: int = 0) -> None:
        super().__init__(pages)
        self.loaded = 0  # of the pages that the last `reuse` found, those that come back from host memory
        self._host_pages = host
        self._host: OrderedDict[int, None] = OrderedDict()  # keys in host memory, the next to go first
        self.evicted = 0  # pages
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
        """Return how many of *keys*, from the first on, are here.

        A lookup changes nothing: it does not count as a use.
        """
        for number, key in enumerate(keys):
            if key not in self._cached:
                return number
        return len(keys)

    def in_use(self, keys: Sequence[int]) -> int:
        """Return how many of *keys*, which are here, have users: another one takes no free page."""
        return sum(key not in self._idle for key in keys)

    def reuse(self, owner: int, count: int, keys: Sequence[int]) -> tuple[Pages, int] | None:
        """Give *owner* as many pages as `allocate` does, the first of which are cached ones of *keys*.

        Return them in the order of its tokens, and how many are cached ones; None, and nothing has changed, if there
        are too few.  Raise a `ValueError` as `allocate` does, and unless *count* exceeds the number of *keys* found.
        """
        hits, self.loaded = self.match(keys), 0
        back = next((n for n, key in enumerate(keys[hits:]) if key not in self._host), len(keys) - hits)
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
        if self._radix and keys:
            self._split(keys[-1])
        self._keys[owner] = list(keys)
        self.owners[owner] = (*_runs(self._cached[key].page for key in keys), *self.take(count - hits))
        self.commit(owner, every)  # what comes back is known again
        self.loaded = back
        return self.owners[owner], hits + back

    def commit(self, owner: int, keys: Sequence[int]) -> int:
        """Make the first pages of *owner* known by *keys*, one each: their tokens are computed.

        A page with the content of another stays its owner's alone.  Return how many are to be moved to host memory.
        """
        mine = self._keys.setdefault(owner, [])
        begin = len(mine)
        if len(keys) <= begin:
            return 0
        self._node += 1
        for key, page in zip(keys[begin:], _pages(self.owners[owner], begin), strict=False):
            if key in self._cached:
                mine.append(None)
                continue
            mine.append(key)
            self._cached[key] = _CachedPage(page, self._node, 1)
            if self._radix:
                self._nodes.setdefault(self._node, []).append(key)
        return self._store(keys[begin:])

    def _store(self, keys: Sequence[int]) -> int:
        if not self._host_pages:
            return 0
        new = sum(key not in self._host for key in keys)
        for key in reversed(keys):
            self._host[key] = None
            self._host.move_to_end(key)
        while len(self._host) > self._host_pages:
            self._host.popitem(last=False)
        return new

    def joined(self, pages: Pages, more: Pages) -> Pages:
        """As `PagePool.joined`: new pages come after those that there are."""
        return (*pages, *more)

    def release(self, owner: int) -> None:
        """Take the pages of *owner* back, those that are known by a hash to be found again.

        The beginning of a prompt is the last of its pages to be evicted, because more prompts share it.
        """
        if owner not in self.owners:
            raise KeyError(f"owner {owner} has no pages to release")
        pages = self.owners.pop(owner)
        keys = self._keys.pop(owner, [])
        private = [page for key, page in zip(keys, _pages(pages, 0), strict=False) if key is None]
        for first, count in (*_runs(private), *_from(pages, len(keys))):
            self.put_back(first, count)
        for key in reversed(keys):  # the end of the prompt is evicted first
            if key is not None:
                cached = self._cached[key]
                cached.users -= 1
                if not cached.users:
                    self._idle[key] = None
        while self._limit and len(self._idle) > self._limit:
            self._evict()

    def take(self, count: int) -> Pages:
        """As `PagePool.take`, of cached pages without a user if there are too few others."""
        while self.unused < count:
            self._evict()
        return super().take(count)

    def _evict(self) -> None:
        key = next(iter(self._idle))
        node = self._cached[key].node
        for gone in reversed(self._nodes.pop(node)) if self._radix else (key,):
            self._idle.pop(gone)
            self.put_back(self._cached.pop(gone).page, 1)
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


def _pages(runs: Pages, skip: int) -> Iterator[int]:
    return (page for first, count in _from(runs, skip) for page in range(first, first + count))


def _from(runs: Pages, skip: int) -> Iterator[tuple[int, int]]:
    for first, count in runs:
        if skip < count:
            yield first + skip, count - skip
        skip = max(0, skip - count)


def _runs(pages: Iterator[int] | Sequence[int]) -> Pages:
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((page, 1))
    return tuple(runs)
