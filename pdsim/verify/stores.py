# SPDX-License-Identifier: Apache-2.0
"""What tiers below GPU memory keep, find and move: accounts of their own, a part of `pdsim.verify.invariants`.

Each store is followed page by page: it has at most as many as its tier may, those that were used last.  A request
finds all that is there, in whole objects; and what is moved for it is what was found, where it was found.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from pdsim.serving.router import Router

Report = Callable[[str, str], None]


class StoreChecker:
    """Calls *report* with an invariant (I8, I10 or I14) and a text for what is kept, found or moved wrongly."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._stores: dict[int, _Store] = {}  # by identity: instances may share one

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        if isinstance(member, Router) or not member.prefill or member.scheduler is None:
            return
        cache, instances, tiers = member.job.cache, len(member.job.prefills), member.scheduler.tiers
        if tiers is None:
            if cache.prefill and max(cache.host, cache.ssd, cache.remote) >= member.job.page_size:
                self._report("I14", f"{member.rank.name} has no tiers, and is to have some: {cache}")
            return
        for tier, store in tiers._tiers.stores.items():
            pages = int(getattr(cache, tier) // member.job.page_size)
            most = pages * (instances if cache.shared and tier != "remote" else 1)
            if id(store) not in self._stores:
                self._stores[id(store)] = _Store(self._report, tier, store, most)
        _Moves(self._report, member, tiers)


class _Store:
    """One tier, which has the order in which its pages were used last."""

    def __init__(self, report: Report, tier: str, store: Any, most: int) -> None:
        self._report, self._tier, self._store, self._most = report, tier, store, most
        self._used = OrderedDict[int, int](store._kept)
        store.put = partial(self._puts, store.put)
        store.touch = partial(self._touches, store.touch)

    def _puts(self, put: Callable[[Sequence[int], int], None], keys: Sequence[int], node: int) -> None:
        put(keys, node)
        for key in reversed(keys):  # of a prompt the beginning is used last
            self._used[key] = self._used.pop(key, node)
        while len(self._used) > self._most:
            self._used.popitem(last=False)
        self._check("keeps")

    def _touches(self, touch: Callable[[Sequence[int]], None], keys: Sequence[int]) -> None:
        touch(keys)
        for key in reversed(keys):
            if key in self._used:
                self._used[key] = self._used.pop(key)
        self._check("has used")

    def _check(self, verb: str) -> None:
        kept, used = [*self._store._kept.items()], [*self._used.items()]
        if kept != used:
            what = f"{kept}, not the last {self._most}: {used}"
            self._report("I8", f"{self._tier} {verb} pages {what}"[:400])
            self._used = OrderedDict(kept)


class _Moves:
    """Watches what the scheduler of *member* finds in tiers, and has moved."""

    def __init__(self, report: Report, member: Any, tiers: Any) -> None:
        self._report, self._member, self._tiers = report, member, tiers
        self._due: tuple[Any, ...] | None = None  # reads and writes of the message that follows
        self._found: list[Any] = []  # where pages are that requests have found since the last forward
        self._read: list[Any] = []  # and those that are read before one
        pool = self._pool = member.scheduler.pages.pool
        pool.reuse = partial(self._reuses, pool.reuse)
        pages = member.scheduler.pages
        pages.store, pages.outgoing = partial(self._stores, pages.store), partial(self._leaves, pages.outgoing)
        tiers.load = partial(self._loads, tiers.load)
        tiers._prefetch = partial(self._prefetches, tiers._prefetch)
        tiers._move = partial(self._plans, tiers._move)
        mover = member.worker.tiers
        mover.move = partial(self._moves, mover.move)

    def _reuses(self, reuse: Callable[..., Any], room: int, count: int, keys: Sequence[int]) -> Any:
        cache, stores = self._member.job.cache, self._tiers._tiers.stores
        direct = [stores[tier] for tier in stores if tier == "host" or cache.prefetch == "none"]
        here = [key in self._pool._cached for key in keys]
        hits = here.index(False) if False in here else len(keys)
        found = hits
        while found < len(keys) and any(keys[found] in store._kept for store in direct):
            found += 1
        objects = max(1, cache.chunk // self._member.job.page_size)
        found = max(hits, found - found % objects)
        found = hits + [*here[hits:found], True].index(True)  # one that is here after others has its own page
        given = reuse(room, count, keys)
        if given is not None and given[1] != found:
            what = f"{given[1]} cached pages, {hits} are here and {found - hits} follow in tiers"
            self._report("I14", f"room {room} on {self._member.rank.name} finds {what}")
        if given is not None:
            self._found += [origin for _, origin in self._pool.loaded]
        return given

    def _lacking(self, key: int) -> bool:
        return any(key not in store._kept for store in self._tiers._tiers.stores.values())

    def _stores(self, store: Callable[[int, Sequence[int]], None], room: int, keys: Sequence[int]) -> None:
        pool, cache = self._pool, self._member.job.cache
        begin, chunk = pool._stored.get(room, 0), max(1, cache.chunk // self._member.job.page_size)
        store(room, keys)
        for key in keys[begin - begin % chunk : len(keys) - len(keys) % chunk] if cache.write == "through" else ():
            here = key in pool._cached and pool._cached[key].here
            if here and key not in pool._writing and self._lacking(key):
                what = (
                    f"room {room} is computed on {self._member.rank.name}, and does not go to a tier that lacks it"
                )
                self._report("I12", f"a page of {what}")

    def _leaves(self, leaves: Callable[[], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        before = [*self._pool.outgoing]
        out = leaves()
        if any(self._lacking(one[0]) != (one in out) for one in before):
            what = f"pages {out} of {before} to tiers, and not just those that one lacks"
            self._report("I14", f"{self._member.rank.name} moves {what}")
        return out

    def _loads(self, load: Callable[[Any], Any], rooms: Iterable[int]) -> Any:
        found, self._found, self._read = self._found, [], []
        event = load(rooms)
        if Counter(found) != Counter(self._read):
            what = f"loads {self._read} before a forward whose requests have found {found}"
            self._report("I10", f"{self._member.rank.name} {what}")
        return event

    def _prefetches(self, prefetch: Callable[..., Any], room: Any, missing: Sequence[Any]) -> Any:
        stores, here = self._tiers._tiers.stores, {*takewhile(self._pool._cached.__contains__, room.keys)}
        for key, (tier, node) in missing:
            if tier == "host" or stores[tier]._kept.get(key) != node or key in here:
                what = f"prefetches a page from {tier} of node {node}, which has it not, or is not to be asked"
                self._report("I10", f"room {room.request.room} on {self._member.rank.name} {what}")
        return prefetch(room, missing)

    def _plans(
        self, move: Callable[..., Any], out: Sequence[Any], back: Iterable[Any], prefetch: bool = False
    ) -> Any:
        back, tiers, own = [*back], self._tiers._tiers, self._member.traffic.node
        self._read = self._read if prefetch else back
        reads = Counter((tier, -1 if node == own else node) for tier, node in back)
        lacking = {tier: sum(key not in store._kept for key, _ in out) for tier, store in tiers.stores.items()}
        writes = Counter({(tier, -1): count for tier, count in lacking.items() if count and tier != "host"})
        self._due = self._sizes(reads), self._sizes(writes), lacking.get("host", len(out)) * self._tiers._page_bytes
        return move(out, back, prefetch)

    def _sizes(self, pages: Counter[Any]) -> dict[Any, tuple[int, int]]:
        chunk = max(1, self._member.job.cache.chunk // self._member.job.page_size)
        return {where: (count * self._tiers._page_bytes, -(-count // chunk)) for where, count in pages.items()}

    def _moves(self, move: Callable[[Any], Any], message: Any) -> Any:
        due, self._due = self._due, None
        reads, writes = (
            {(each.tier, each.node): (each.nbytes, each.objects) for each in part}
            for part in (message.reads, message.writes)
        )
        if due is not None and due != (reads, writes, message.nbytes):
            what = f"reads {reads}, writes {writes} and {message.nbytes} bytes, not {due}"
            self._report("I14", f"{self._member.rank.name} {what}")
        return move(message)
