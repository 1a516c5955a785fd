# SPDX-License-Identifier: Apache-2.0
"""Find leaks at the end of a job, for `pdsim.verify.invariants`.

Every dict, list, set and deque that a rank's program and the protocol's objects in it hold is counted when the first
request is submitted (of a rank that is started again: when it starts) and when the router stops the ranks.  There is
no list of them, so a container that is added to the protocol is counted too.

Nothing may be left of a room.  Nothing may have grown but tables of peers, which connect for their first room.
They may name only existing ranks and instances, each once for all its incarnations, and keep no more entries for
each than an instance has ranks.  No more memory may be allocated, registered or held by transfers than at the start,
and no tokens may be outstanding at an instance, by the router's account.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from pdsim.kv.messages import ROUTER, rank_name
from pdsim.kv.pages import PrefixPagePool, SlotPool
from pdsim.serving.prefill import PrefillWorker
from pdsim.serving.router import Router

_NOT_STATE = frozenset(
    {"rank", "job", "clock", "handlers", "layout", "requests", "log", "fallbacks", "_over"}
    | {"host", "posts", "_variation", "hits", "tier_hits", "tier_pages", "changes"}
    | {"load_seconds", "prefetch_seconds", "loaded"}
)
"""Attributes that are not counted: not the protocol's own, statistics, drawn ahead, or remembered for longer than a
scenario lasts (`pdsim.kv.rooms.OVER`)."""

_POOLS = frozenset(
    {
        "_starts",
        "_counts",
        "_by_size",
        "_free",
        "_freed",
        "unused",
        "_cached",
        "_idle",
        "_nodes",
        "_kept",
        "outgoing",
    }
)
"""Lists of what is free, also of pages that keep a prefix; how much that is says what is owned.  Evicted pages are
written to tiers before the next forward, if there is one; others that are to be written are in ``_writing``, too."""

_LEFT_OUT = _NOT_STATE | _POOLS

_NUMBERED = frozenset({"_fences"})
"""Tables whose keys are numbers of something else than rooms."""

_CONTAINERS = (dict, list, set, deque)


class LeakChecker:
    """Calls *report* for what ranks still hold at the end."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._members: dict[str, Any] = {}
        self._before: dict[str, dict[str, int]] = {}  # by rank and path
        self._amounts: dict[str, dict[str, int]] = {}  # by rank
        self._began = False

    def joined(self, member: Any) -> None:
        """Count what *member* has, if it was started again."""
        name = member.rank.name
        self._members[name] = member
        if self._began:
            self._before[name] = _census(member)
            self._amounts[name] = _amounts(member)

    def begin(self) -> None:
        """Count what all have, before the first request."""
        if not self._began:
            self._began = True
            self._before = {name: _census(member) for name, member in self._members.items()}
            self._amounts = {name: _amounts(member) for name, member in self._members.items()}

    def check(self, name: str) -> None:
        """Check what rank *name* has left, now that all requests are over."""
        member, before = self._members[name], self._before[name]
        for path, container in _containers(member):
            grown = len(container) - before.get(path, 0)
            rooms = [] if path.rpartition(".")[2] in _NUMBERED else _room_numbers(container)
            if grown > 0 and rooms:
                self._report("I8", f"{name}{path} still has rooms {rooms[:5]} when all is over")
            elif grown > 0 and not self._is_of_peers(container):
                self._report("I8", f"{name}{path} still has {grown} entries when all is over")
        start = self._amounts.get(name, {})
        for what, amount in _amounts(member).items():
            if (grown := amount - start.get(what, 0)) > 0:
                self._report("I8", f"{name} has {grown} {what} more than at the start when all is over")
        if member.working() and member.working():  # the first may tell of what has ended
            self._report("I8", f"{name} says that it works when all is over")
        endpoint = member.rank.endpoint
        failed = sum(posted.transfer.triggered for posted in endpoint.moving.values())
        if endpoint.moving and not failed:
            self._report("I8", f"{name} has {len(endpoint.moving)} transfers under way when all is over")
        if failed != endpoint.quarantined:
            self._report("I8", f"{name} counts {endpoint.quarantined} transfers in quarantine, there are {failed}")
        for peer, connection in getattr(member.rank.endpoint, "_connections", {}).items():
            if left := connection.send_queue.outstanding:
                self._report("I8", f"{name}: {left} descriptors are outstanding to {peer} when all is over")
        if isinstance(member, Router):
            registry = member.registry
            for side in (registry.prefills.load, registry.decodes.load, registry._under_way):
                for instance, tokens in side.items():
                    if tokens:
                        self._report("I8", f"{name}: {tokens} tokens are outstanding at {instance} when all is over")
            if (resting := registry.resting - member.membership.draining.keys()) and member.autoscaler is None:
                self._report("I8", f"{name}: {sorted(resting)} get no requests, and do not drain")
            return
        known: Any = getattr(self._members.get(ROUTER), "registry", None)
        if known is not None and known.alive(member.incarnation):
            for peer in [peer for peer in member.peers if not known.alive(peer)]:
                self._report("I8", f"{name} still knows {peer}, which is over, when all is over")
        if isinstance(member.worker, PrefillWorker):
            grid = member.job.prefill
            first = self._members[rank_name(member.instance, grid.rank(*grid.at(member.index)[:2]))]
            own, its = (one.rank.device.symmetric.reserved for one in (member, first))
            if first.incarnation == member.incarnation and own != its:
                self._report(
                    "I8", f"{name} has reserved {own} bytes of symmetric memory, and {first.rank.name} {its}"
                )
        for what, count in _gauges(member):
            if count:
                self._report("I8", f"{name}{what} is {count} when all is over")
        for what, pool in _pools(member):
            if isinstance(pool, PrefixPagePool) and pool._limit and len(pool._idle) > pool._limit:
                self._report("I8", f"{name}: {len(pool._idle)} cached pages without a user, {pool._limit} may stay")
            if not _is_whole(pool):
                owned = (
                    sum(count for pages in pool.owners.values() for _, count in pages)
                    if what == "pages"
                    else len(pool)
                )
                self._report("I8", f"{name}: {pool.free} {what} free and {owned} owned")

    def _is_of_peers(self, container: Any) -> bool:
        named = [entry if isinstance(entry, tuple) else (entry,) for entry in container]
        if not all(isinstance(name, str) for names in named for name in names):
            return False
        peers = [tuple(name.partition("@")[0] for name in names) for names in named]
        known = {part for name in self._members for part in (name, name.partition(".")[0])}
        if len(set(peers)) < len(peers) or not all(name in known for names in peers for name in names):
            return False
        each = container.values() if isinstance(container, dict) else ()
        if any(isinstance(entry, list) and any(isinstance(one, tuple) for one in entry) for entry in each):
            return False  # rooms that wait for a peer
        return all(len(entry) <= self._largest() for entry in each if isinstance(entry, _CONTAINERS))

    def _largest(self) -> int:
        return max(Counter(name.partition(".")[0] for name in self._members).values())


def _gauges(member: Any) -> Iterator[tuple[str, int]]:
    # What counts is under way, and bytes of a ring beyond those of its slots.
    handoff: Any = getattr(member.scheduler, "handoff", None)
    yield ".scheduler.handoff._answering", getattr(handoff, "_answering", 0)
    yield ".scheduler.handoff._destinations", len(getattr(handoff, "_destinations", ()))
    for path in ("sender", "receiver"):
        part = getattr(member.mover, path, None)
        for name in ("_under_way", "_computing"):
            yield f".mover.{path}.{name}", getattr(part, name, 0)
        yield f".mover.{path}.peers.preparing", getattr(getattr(part, "peers", None), "preparing", 0)
        landing = getattr(part, "landing", None)
        if landing is not None:
            ring = landing.ring
            yield f".mover.{path}.landing.ring.used", ring.used - sum(slot.size for slot in ring.slots.values())


def _pools(member: Any) -> Iterator[tuple[str, Any]]:
    if member.scheduler is not None:
        pages, handoff = member.scheduler.pages, member.scheduler.handoff
        state = (("rows of state", pages.state.slots), ("window pages", pages.state.window))
        named = (("pages", pages.pool), *state, ("slots", getattr(handoff, "slots", None)))
        yield from ((what, pool) for what, pool in named if pool is not None)


def _is_whole(pool: Any) -> bool:
    if not isinstance(pool, SlotPool):
        whole: bool = pool.is_whole()
        return whole
    numbers = sorted((*pool._free, *pool.owners.values()))
    return numbers == list(range(len(numbers)))


def _amounts(member: Any) -> dict[str, int]:
    device, buffers = member.rank.device, member.rank.device.memory._buffers.values()
    return {
        "regions of memory": len(member.rank.endpoint.regions),
        "bytes of memory": sum(buffer.size for buffer in device._buffers),
        "holds of memory": sum(buffer._held for buffer in buffers),
        "bytes that are freed, and held,": sum(buffer.size for buffer in buffers if buffer.freed),
    }


def _census(member: Any) -> dict[str, int]:
    return {path: len(container) for path, container in _containers(member)}


def _containers(root: Any) -> Iterator[tuple[str, Any]]:
    # Objects are followed through attributes, slots and lists, each once.  What is not the protocol's own is left
    # out: the clock, the device, the endpoint.
    todo, seen = [("", root)], {id(root)}
    while todo:
        path, holder = todo.pop()
        for name, value in _attributes(holder):
            if name in _LEFT_OUT or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, _CONTAINERS):
                yield f"{path}.{name}", value
                if isinstance(value, list):  # such as queues
                    todo += [(f"{path}.{name}[{n}]", entry) for n, entry in enumerate(value) if _is_ours(entry)]
            elif _is_ours(value):
                todo.append((f"{path}.{name}", value))


def _is_ours(value: Any) -> bool:
    return _is_of_protocol(value.__class__)


@cache
def _is_of_protocol(kind: type) -> bool:
    return kind.__module__.startswith(("pdsim.kv", "pdsim.serving"))


@cache
def _slots(kind: type) -> list[str]:
    return [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    attributes = dict(getattr(holder, "__dict__", {}))
    attributes |= {name: getattr(holder, name) for name in _slots(holder.__class__) if hasattr(holder, name)}
    return list(attributes.items())


def _room_numbers(container: Iterable[Any]) -> list[int]:
    entries: list[Any] = list(container)
    return [room for room in map(_room_number, entries) if room is not None]


def _room_number(entry: Any) -> int | None:
    # It may be the number itself, begin with it, or have it as an attribute, perhaps of its request or chunk.
    if isinstance(entry, tuple) and entry:
        entry = entry[0]
    for name in ("request", "chunk"):
        entry = getattr(entry, name, entry)
    entry = getattr(entry, "room", entry)
    return entry if isinstance(entry, int) else None
