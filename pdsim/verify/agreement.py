# SPDX-License-Identifier: Apache-2.0
"""Whether what the parts of a rank hold agrees with each other: a part of `pdsim.verify.invariants`.

Whenever a message is sent, the program of one rank is checked, each rank in its turn.  A state that is wrong for a
while is found even if it does no harm in this scenario.  The rules name no defect: each room is in one place, each
page has one owner, each count equals what it counts, and a room that is complete goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Set
from functools import lru_cache, partial
from itertools import chain, pairwise
from math import isinf
from typing import Any

from pdsim.kv.messages import Status, epoch_of, instance_of, rank_name
from pdsim.kv.pages import FreeQueue, PrefixPagePool
from pdsim.kv.pull import KvReader, KvSource
from pdsim.kv.push import KvSender
from pdsim.kv.receiver import KvReceiver
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.router import Router

Wrong = Iterator[tuple[str, str]]
"""Invariants, and texts for what violates them."""


class AgreementChecker:
    """Calls *report* with an invariant (I3, I8, I12, I14 or I15) and a text for what does not agree."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._members: dict[str, Any] = {}
        self._of: dict[int, Any] = {}  # by identity of an endpoint: its program
        self._names: list[str] = []
        self._turn = 0
        self._now = -1.0
        self._suspects: dict[str, set[tuple[str, str]]] = {}  # by rank: what was wrong at the instant before
        self._told: set[tuple[str, str]] = set()
        self._proven: dict[int, dict[str, int]] = {}  # by fence: epochs that are proven to be gone

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        self._members[member.rank.name] = self._of[id(member.rank.endpoint)] = member
        self._names = list(self._members)
        if isinstance(member, Router):
            registry: Any = member.registry
            registry.register = partial(self._registers, registry, registry.register)

    def look(self, now: float, sender: str) -> None:
        """Look at one rank at the instant *now*, unless it is the *sender*, which is about to change.

        What is wrong must be so at two instants: within one, an event may not have told all its listeners yet.
        """
        if now == self._now or not self._names:
            return
        self._now = now
        self._turn = (self._turn + 1) % len(self._names)
        suspects, self._suspects = self._suspects, {}
        for name in dict.fromkeys((*suspects, self._names[self._turn])):
            member = self._members[name]
            if name == sender:
                self._suspects |= {name: suspects[name]} if name in suspects else {}
            elif not (member.has_ended or member.clock.halted) and (wrong := {*self._wrong(member)} - self._told):
                again = wrong & suspects.get(name, set())
                self._told |= again  # it may stay so
                for invariant, what in sorted(again):
                    self._report(invariant, f"{name}: {what}")
                self._suspects[name] = wrong

    def _registers(self, registry: Any, register: Callable[[Any], bool], message: Any) -> bool:
        formed, known = register(message), registry._instances[message.instance]
        if known.places.get(message.index, known.until + 1) <= known.until:
            rank = rank_name(message.instance, message.index)
            self._report("I11", f"{rank} has a place, and its process was told to end")
        return formed

    def _wrong(self, member: Any) -> Wrong:
        if isinstance(member, Router):
            yield from _accounts(member)
            return
        leader: Any = self._members.get(f"{member.instance}.0")
        gone = leader is None or leader.has_ended or leader.clock.halted or not member.incarnation
        rooms = None if gone or leader.incarnation != member.incarnation else leader.scheduler.rooms
        yield from _movers(member, rooms)
        fence = getattr(member.mover, "fence", None)
        if fence is not None:
            yield from self._reached(member, fence)
        if member.scheduler is not None:
            yield from _scheduler(member.scheduler)

    def _reached(self, member: Any, fence: Any) -> Wrong:
        # Who has been proven to be gone cannot connect any more, and its end was noticed before.
        key = id(fence)
        if any(fence._proven.get(name, 0) < epoch for name, epoch in self._proven.get(key, {}).items()):
            yield "I3", f"it takes back that {self._proven[key]} are proven to be gone: {fence._proven}"
        self._proven[key] = dict(fence._proven)
        for peer, ones in member.rank.endpoint.inbound.items():
            proven = fence._proven.get(instance_of(peer), 0)
            own = [self._of[id(one)].incarnation for one in ones if id(one) in self._of]
            if any(each and epoch_of(each) <= proven for each in own):
                yield "I3", f"{peer} of {own} reaches it, though it is proven that nothing of epoch {proven} does"


def _accounts(router: Any) -> Wrong:
    registry, membership, requests = router.registry, router.membership, router._rooms
    for room, request in requests.items():
        moves = 0 if request.prefilled else request.input
        counted = (0 if request.answered else moves), request.input + request.expected, moves
        if request.room != room or request.status:
            yield "I14", f"room {room} is under way, as room {request.room} with status {request.status!r}"
        if bool(request.lost) != bool(request.asked):
            yield "I14", f"room {room} is lost ({request.lost}), and {request.asked!r} is asked"
        if request.prefill and request.outstanding != counted:
            yield "I14", f"room {room} counts for {request.outstanding} tokens, it has {counted}"
    sides = (registry.prefills, 0, "prefill"), (registry.decodes, 1, "decode")
    for side, place, name in sides:
        formed = {instance for instance in side.names if registry.formed(instance)}
        if side.load.keys() != formed:
            yield "I14", f"{sorted(side.load)} get requests, {sorted(formed)} are formed"
        if formed and formed <= registry.resting and router.autoscaler is None:  # which hears of no loss
            yield "I13", f"{sorted(formed)} drain, and no other {name} instance serves"
        for instance, tokens in side.load.items():
            current = registry.current(instance)
            own = sum(each.outstanding[place] for each in requests.values() if getattr(each, name) == current)
            if tokens != own:
                yield "I14", f"{tokens} tokens are outstanding at {current}, its requests have {own}"
    for instance, known in registry._instances.items():
        heard = {rank for rank in router.job.ranks(instance) if rank in membership.last_heard}
        places = {rank_name(instance, index) for index in known.places}
        if known.introduced and not known.formed:
            yield "I14", f"{instance} is not formed, and counts as introduced"
        if instance not in registry.awaited and heard != places:
            yield "I12", f"it is asked whether {sorted(heard)} live, and {sorted(places)} have registered"
    for instance, tokens in registry._under_way.items():
        own = sum(each.outstanding[2] for each in requests.values() if instance_of(each.decode) == instance)
        if tokens != own:
            yield "I14", f"{tokens} tokens are on the way to {instance}, its requests have {own}"
    for prefill, decode in registry._introduced:
        if not (registry.alive(prefill) and registry.alive(decode)):
            yield "I8", f"{prefill} and {decode} count as introduced, and one of them is over"
    for side, place, name in sides:
        for replica, view in enumerate(side._views):
            own = Counter[str]()
            for each in requests.values():
                if each.number % router.job.routers == replica and registry.alive(getattr(each, name)):
                    own[instance_of(getattr(each, name))] += each.outstanding[place]
            # with exchanges it knows of those of others, too
            other = not side._sync and any(tokens != own[instance] for instance, tokens in view.items())
            if other or view.keys() - side.load.keys():
                yield "I14", f"replica {replica} knows of {view} tokens, its requests have {own}"
    if over := membership.directory._values.keys() - requests.keys():
        yield "I8", f"it is remembered where rooms {sorted(over)} went, which are over"
    if membership.draining.keys() - registry.resting:
        yield "I13", f"{sorted(membership.draining)} drain, and of those get requests all but {registry.resting}"


# --- schedulers ----------------------------------------------------------------------------------------------------


def _scheduler(scheduler: Any) -> Wrong:
    rooms, pages = scheduler.rooms, scheduler.pages
    decodes = isinstance(scheduler, DecodeScheduler)
    with_pages = {number for number, room in rooms.items() if room.has_pages}
    yield from _same("pages", pages.pool.owners, with_pages)
    yield from _pool(pages.pool)
    for pool in (pages.state.slots, pages.state.window) if pages.state is not None else ():
        if pool is not None:
            yield from _same("rows of state", pool.owners, rooms if decodes else with_pages)
    for number, room in rooms.items():
        if number in with_pages and not (room.failed or pages.state is None):
            yield from _sized(scheduler, room.request, decodes)
    if pages.quarantined - rooms.keys():
        yield "I8", f"rooms {sorted(pages.quarantined - rooms.keys())} are in quarantine, and over"
    if mixed := [number for number, room in rooms.items() if room.request.room != number]:
        yield "I14", f"room {mixed[0]} is kept as another"
    yield from (_decodes if decodes else _prefills)(scheduler, with_pages)


def _sized(scheduler: Any, request: Any, decodes: bool) -> Wrong:
    # A room has pages for its prompt or, at decode, for its output, too; a window for wherever it comes to lie.
    pages, size, reach = scheduler.pages, scheduler.job.page_size, request.input + decodes * request.output
    held = pages.held(request) if decodes and pages.held != pages._cached else 0  # pages of a cache beside the pool
    least = pages.pool.rounded(-(-request.input // size) - held)
    most = pages.pool.rounded(-(-reach // size))
    if not least <= (count := pages.pool.count(request.room)) <= most:
        yield "I8", f"room {request.room} has {count} pages, for {request.input} to {reach} tokens of {size}"
    if pages.state.window is not None:
        need = _touched(request.input, reach, pages.state._shape.window, size)
        if not need <= (count := pages.state.window.count(request.room)) <= need + decodes:
            yield "I8", f"room {request.room} has {count} window pages, and its window touches {need}"


@lru_cache(4096)
def _touched(first: int, last: int, window: int, size: int) -> int:
    # The most pages of that *size* that the last *window* of *first* to *last* tokens lie in.
    ends = range(first, min(last, first + window + size) + 1)  # then all begins anew
    return max((end - 1) // size - max(0, end - window) // size + 1 for end in ends)


def _prefills(scheduler: Any, with_pages: set[int]) -> Wrong:
    rooms, handoff, queue = scheduler.rooms, scheduler.handoff, Counter(r.request.room for r in scheduler._queue)
    for number, count in queue.items():
        room = rooms.get(number)
        if count > 1 or room is None or room.state not in ("queued", "running"):
            yield "I14", f"room {number} is {count} times in the queue, {room and room.state}"
    for number, room in rooms.items():
        if room.state == "running" and room.done < room.total and number not in queue:
            yield "I12", f"room {number} has {room.done} of {room.total} tokens, and is not in the queue"
    if hasattr(handoff, "slots"):
        yield from _same("slots", handoff.slots.owners, with_pages)
        failed = {number for number, room in rooms.items() if room.failed}  # until they are over
        yield from _timed(handoff._timers, {n for n, room in rooms.items() if room.state == "waiting"}, failed)
        early = {number for number in handoff._destinations._values if number in handoff._destinations}
        if unused := early & (rooms.keys() | {number for number in early if number in handoff._over}):
            yield "I8", f"destinations of rooms {sorted(unused)} are kept, which are here or over"
    else:
        kept = {number for number, room in rooms.items() if room.state in ("kept", "revoked")}
        yield from _same("kept rooms", handoff._kept, kept)
        if late := handoff._leases._limits.keys() - {n for n in kept if rooms[n].state == "kept"}:
            yield "I15", f"the leases of rooms {sorted(late)} run, which are not kept"
    asleep = scheduler._idle is not None and not scheduler._idle.triggered
    if scheduler.blocked._until is not None and asleep and not queue:
        yield "I15", "a queue that is empty counts as blocked"


def _decodes(scheduler: Any, with_pages: set[int]) -> Wrong:  # noqa: ARG001
    rooms, handoff, preemption = scheduler.rooms, scheduler.handoff, scheduler.preemption
    unseen = getattr(handoff, "_unseen", {})
    places = {
        "arrived": [*(room.request.room for room in scheduler.complete), *unseen],
        "ready": [room.request.room for room in chain(scheduler._waiting, scheduler._late)],
        "running": [number for number, _ in scheduler.batch.contexts()],
        "preempted": [room.request.room for room in chain(preemption.waiting, preemption.recomputing)],
    }
    where = Counter((state, number) for state, numbers in places.items() for number in numbers)
    own = Counter((room.state, number) for number, room in rooms.items() if room.state in places)
    if where != own:
        yield "I12", f"rooms are {sorted(own - where)}, and kept as {sorted(where - own)}"
    if lost := [number for number, room in unseen.items() if room.request.prefill not in scheduler.engine.peers]:
        yield "I12", f"rooms {sorted(lost)} are read, and wait for the word of an instance that is over"
    waiting = {n for n, room in rooms.items() if room.state == "reserved"} | unseen.keys()
    yield from _timed(scheduler.timers, waiting)
    queued = Counter(request.room for request in scheduler._queue)
    if (queued and max(queued.values()) > 1) or queued.keys() & rooms.keys():
        yield "I14", f"rooms {sorted(queued)} wait for pages, and {sorted(rooms)} have some"
    if not (queued or preemption.waiting) and scheduler.blocked._until is not None and isinf(scheduler._due):
        yield "I15", "a queue that is empty counts as blocked"
    named = rooms.keys() | queued.keys() | scheduler._coming.keys()
    if over := scheduler.pages._keys.keys() - named:
        yield "I8", f"hashes of rooms {sorted(over)} are kept, which are over"
    if hasattr(handoff, "slots"):
        yield from _same("slots", handoff.slots.owners, [n for n, r in rooms.items() if r.state in _WITH_SLOT])
    else:
        if handoff._sources and scheduler.job.engine.lease and not handoff._beats:
            yield "I12", f"rooms {sorted(handoff._sources)} are read, and no heartbeat is due"
        for what in ("_sources", "_asked", "_nbytes"):
            if over := getattr(handoff, what).keys() - named:
                yield "I8", f"{what} has rooms {sorted(over)}, which are over"


_WITH_SLOT = "reserved", "arrived", "failed"
"""States of a room at decode whose metadata has not been read."""


def _same(what: str, owners: Any, rooms: Any) -> Wrong:
    if owners.keys() != {*rooms}:
        more, less = owners.keys() - {*rooms}, {*rooms} - owners.keys()
        yield "I8", f"{what} are owned by rooms {sorted(more)}, which should have none, not by {sorted(less)}"


def _timed(timers: Any, rooms: Set[int], others: Set[int] = frozenset()) -> Wrong:
    if timers._seconds and timers._limits.keys() - others != rooms - others:
        yield "I15", f"the time of rooms {sorted(timers._limits)} runs, and should of {sorted(rooms)}"


def _pool(pool: Any) -> Wrong:
    owned = [page for runs in pool.owners.values() for start, count in runs for page in range(start, start + count)]
    shared = isinstance(pool, PrefixPagePool)
    if not pool.is_whole():
        yield "I8", f"{pool.free} pages are free and {len(owned)} owned, of {pool.pages}"
    if not shared and len(owned) != len({*owned}):
        yield "I3", "a page has two owners"
    for owner, runs in pool.owners.items():
        if pool.count(owner) != sum(count for _, count in runs):
            yield "I8", f"room {owner} has {sum(count for _, count in runs)} pages, and counts {pool.count(owner)}"
    if isinstance(pool, FreeQueue):
        if pool.unused != pool.pages - len(owned):
            yield "I8", f"{pool.pages - len(owned)} pages are free, and {pool.unused} are counted"
        return
    runs = list(zip(pool._starts, pool._counts, strict=False))
    free = {page for start, count in runs for page in range(start, start + count)}
    ascends = all(start + count < after for (start, count), (after, _) in pairwise(runs))
    if not ascends or pool._by_size != sorted((count, start) for start, count in runs):
        yield "I8", f"free pages are {runs}, by size {pool._by_size}"
    known = {page.page for page in pool._cached.values()} if shared else set()
    if free & {*owned, *known}:
        yield "I3", f"page {min(free & {*owned, *known})} is free, and is used"
    if shared:
        yield from _prefixes(pool)


def _prefixes(pool: Any) -> Wrong:
    users = Counter(key for keys in pool._keys.values() for key in keys if key is not None)
    users.update(pool._writing)
    for key, cached in pool._cached.items():
        if cached.users != users[key] or (key in pool._idle) != (not cached.users):
            idle = "idle" if key in pool._idle else "not idle"
            yield "I8", f"cached page {cached.page} has {users[key]} users, counts {cached.users} and is {idle}"
    if pool._limit and len(pool._idle) > pool._limit:
        yield "I8", f"{len(pool._idle)} cached pages are nobody's, {pool._limit} may be"
    if users.keys() - pool._cached.keys() or pool._idle.keys() - pool._cached.keys():
        yield "I8", "pages are used or idle that are not known"
    if len({cached.page for cached in pool._cached.values()}) != len(pool._cached):
        yield "I3", "one page has the contents of two"
    for owner, keys in pool._keys.items():
        pages = [page for start, count in pool.owners[owner] for page in range(start, start + count)]
        for key, page in zip(keys, pages, strict=False):
            if key is not None and key in pool._cached and pool._cached[key].page != page:
                yield "I3", f"page {page} of room {owner} is known as {pool._cached[key].page}"
    if pool._radix:
        nodes = Counter((node, key) for node, keys in pool._nodes.items() for key in keys)
        if nodes != Counter((cached.node, key) for key, cached in pool._cached.items()):
            yield "I8", "the nodes of known pages are not theirs"


# --- movers --------------------------------------------------------------------------------------------------------


def _movers(member: Any, rooms: Any) -> Wrong:
    part: Any = member.mover.receiver if member.worker is None else member.mover.sender
    if rooms is not None and (over := part._rooms.keys() - rooms.keys()):
        yield "I8", f"rooms {sorted(over)} are kept, which the leader has not"
    peers = getattr(part, "peers", None)
    if peers is not None:
        waiting = {room for entries in peers._waiting.values() for room, _ in entries}
        if over := waiting - part._rooms.keys():
            yield "I8", f"rooms {sorted(over)} wait for peers, and are over"
        if strange := peers._lists.keys() - peers._peers.keys():
            yield "I8", f"lists of descriptors are due for {sorted(strange)}, which are over"
    moving = Counter(int(one.transfer.label.partition("/")[0]) for one in member.rank.endpoint.moving.values())
    if isinstance(part, KvSender):
        yield from _sender(part, moving, exact=not (part._gathers or member.job.layerwise))
    elif isinstance(part, KvSource):
        for number, own in part._rooms.items():
            if own.planned < 0 or (own.aborted and not own.planned):
                yield "I12", f"room {number} is aborted, {own.planned} chunks are computed, and it is not quiet"
    elif isinstance(part, KvReader):
        if part._under_way != sum(room.missing for room in part._rooms.values()):
            yield "I14", f"{part._under_way} reads are under way, rooms miss others"
        for number, room in part._rooms.items():
            if room.moving != moving[number] or room.missing > room.moving:
                counts = f"{room.moving} count, {room.missing} miss, after {room.nbytes} bytes"
                yield "I14", f"room {number}: {moving[number]} reads move, {counts}"
            if room.forgotten and not room.moving:
                yield "I12", f"nothing of room {number} moves, and it is not quiet"
    elif isinstance(part, KvReceiver):
        yield from _receiver(part)


def _sender(sender: Any, moving: Counter[int], exact: bool) -> Wrong:
    # *exact* unless gathers count, too, or the failed write of a sequence is that of all its rooms.
    busy = sender._policy.notify == "poll"
    for number, state in sender._rooms.items():
        counts = state.moving, state.planned, state.unfinished
        if min(counts) < 0:
            yield "I14", f"room {number} counts {counts} of what moves, is computed and is unfinished"
        failed = state.status is Status.FAILED
        if failed and state.aborted and not (state.planned or state.moving):
            yield "I12", f"nothing of room {number} moves, and it is not quiet"
        if not failed and state.last is not None and not (state.planned or state.unfinished or busy):
            yield "I12", f"all of room {number} is written, and it is not over"
        if exact and not state.sequences and state.moving != moving[number]:
            more = f"after {state.nbytes} bytes, {counts}"  # not the same text by chance
            yield "I14", f"room {number}: {moving[number]} writes move, {state.moving} are counted {more}"


def _receiver(receiver: Any) -> Wrong:
    for number, room in receiver._rooms.items():
        if room.last is None or (receiver._rank.device.holds_bytes and room.reserve is None):
            continue
        writers = receiver._expected[min(room.last.pages, len(receiver._expected) - 1)]
        if len(room.counts) >= writers and room.received >= sum(room.counts.values()):
            yield "I12", f"all of room {number} is here, and it is not over"
    if receiver.landing is not None:
        ring, questions = receiver.landing.ring, receiver.landing._questions
        if {*ring.slots, *ring._line} != {*questions}:
            yield "I8", f"slots and line of the ring are {[*ring.slots, *ring._line]}, questions {[*questions]}"
        if ring.used != sum(slot.size for slot in ring.slots.values()):
            yield "I8", f"{ring.used} bytes of the ring are used, slots have others"
