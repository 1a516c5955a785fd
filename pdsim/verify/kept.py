# SPDX-License-Identifier: Apache-2.0
"""What pools give out and caches give up, in which order: a part of `pdsim.verify.invariants`.

Free queues and prefix caches are each compared with a plain list that follows their description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pdsim.kv.pages import FreeQueue, PrefixPagePool
from pdsim.serving.router import Router


class KeptChecker:
    """Calls *report* with an invariant (I7, I12 or I14) and a text for a page that comes or goes out of turn."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report

    def joined(self, member: Any) -> None:
        """Watch the pool of *member*, a rank's program."""
        if isinstance(member, Router) or member.scheduler is None:
            return
        pool, name = member.scheduler.pages.pool, member.rank.name
        if isinstance(pool, FreeQueue):
            _Queue(self._report, name, pool)
        elif isinstance(pool, PrefixPagePool):
            _Cache(self._report, name, pool)


class _Queue:
    """Watches whether a `FreeQueue` gives out what was freed longest ago, or last."""

    def __init__(self, report: Callable[[str, str], None], name: str, pool: Any) -> None:
        self._report, self._name, self._pool = report, name, pool
        self._free = [*range(pool.pages)]
        self._take, self._release = pool.take, pool.release
        pool.take, pool.release = self._taken, self._released

    def _taken(self, owner: int, count: int) -> Any:
        pages = self._take(owner, count)
        own, self._free = self._free[:count], self._free[count:]
        if (given := _numbers(pages)) != own:
            self._report("I7", f"{self._name} gives room {owner} pages {given}, it was the turn of {own}")
        return pages

    def _released(self, owner: int) -> None:
        pages, block = _numbers(self._pool.owners[owner]), self._pool.block
        back = [page for first in range(len(pages) - block, -1, -block) for page in pages[first : first + block]]
        self._release(owner)
        self._free = [*back, *self._free] if self._pool._last_first else [*self._free, *back]


class _Cache:
    """Watches in which order a `PrefixPagePool` evicts pages, and which of them it writes to tiers."""

    def __init__(self, report: Callable[[str, str], None], name: str, pool: Any) -> None:
        self._report, self._name, self._pool = report, name, pool
        self._idle: dict[int, None] = {}  # keys in the order of their last use
        self._here: set[int] = set()  # keys of pages whose contents are in their place
        self._release, self._written, self._evict = pool.release, pool.written, pool._evict
        pool.release, pool.written, pool._evict = self._released, self._came, self._evicts
        pool.reuse = partial(self._reuses, pool.reuse)
        if pool.tiers is not None:
            pool.store = partial(self._stores, pool.store)

    def _let_go(self, keys: Sequence[int | None]) -> None:
        # Of a prompt the end is the next to go.
        for key in reversed(keys):
            if key is not None and self._pool._cached[key].users == 1:
                self._idle.pop(key, None)
                self._idle[key] = None

    def _released(self, owner: int) -> None:
        self._let_go(self._pool._keys.get(owner, []))
        self._release(owner)

    def _came(self, keys: Sequence[int]) -> None:
        own = [key for key in keys if key in self._pool._writing]
        self._here.update(own)
        self._let_go(own)
        self._written(keys)

    def _evicts(self) -> None:
        pool = self._pool
        self._idle = {key: None for key in self._idle if key in pool._idle}
        if (idle := [*pool._idle]) != [*self._idle]:
            self._report("I7", f"{self._name} evicts pages in the order {idle}, they were used in {[*self._idle]}")
            self._idle = dict.fromkeys(idle)
        first = idle[0]
        self._evict()
        gone = [key for key in idle if key not in pool._cached]
        if first not in gone or (len(gone) > 1 and not pool._radix):
            self._report("I7", f"{self._name} evicts {gone} where it is the turn of {first}")
        self._here.difference_update(gone)

    def _stores(self, store: Callable[..., None], owner: int, keys: Sequence[int]) -> None:
        begin = self._pool._stored.get(owner, 0)
        store(owner, keys)
        own = self._pool._keys.get(owner, [])[begin : len(keys)]  # those before may still be computed by others
        self._here.update(key for key in own if key is not None)
        if self._pool._write == "through":
            self._check_written(keys, begin)

    def _reuses(self, reuse: Callable[..., Any], owner: int, count: int, keys: Sequence[int]) -> Any:
        here = next((number for number, key in enumerate(keys) if key not in self._pool._cached), len(keys))
        given = reuse(owner, count, keys)
        if given is not None and given[1] - len(self._pool.loaded) != here:
            self._report("I14", f"{self._name} reuses {given[1]} pages for room {owner}, {here} of them are here")
        if given is not None and given[1] and self._pool.tiers is not None and self._pool._write == "selective":
            self._check_written(keys[: given[1]], 0)
        return given

    def _check_written(self, keys: Sequence[int], begin: int) -> None:
        # What a tier lacks of whole objects is on its way.
        pool, each = self._pool, self._pool.tiers.chunk
        for key in keys[begin // each * each : len(keys) // each * each]:
            lacking = [tier for tier, store in pool.tiers.stores.items() if store.find(key) is None]
            if lacking and key in self._here and key in pool._cached and key not in pool._writing:
                self._report(
                    "I12", f"{self._name} does not write page {pool._cached[key].page}, which {lacking} lack"
                )


def _numbers(pages: Any) -> list[int]:
    return [page for first, count in pages for page in range(first, first + count)]
