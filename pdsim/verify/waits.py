# SPDX-License-Identifier: Apache-2.0
"""Whether who has work is awake, and nothing waits for longer than it may: a part of `pdsim.verify.invariants`.

A scheduler that nothing will wake is looked at whenever a message is sent.  If it could have gone on at two instants
and has slept all the while, somebody has forgotten to wake it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from pdsim.kv.messages import ROUTER, PrefillDone, Renew, leader
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.prefill import PrefillRequest
from pdsim.serving.rank_process import Room
from pdsim.serving.router import Router

_ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""


class WaitChecker:
    """Calls *report* with an invariant (I12 or I15) and a text for who sleeps, or waits too long."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._members: dict[str, Any] = {}
        self._looked_at: dict[str, Any] = {}  # those that may sleep, or let somebody wait
        self._landings: dict[str, Any] = {}  # of those, what lands in a staging ring
        self._now = -1.0
        # by rank: what it sleeps on, what it could do, and by when it must be awake
        self._could: dict[str, tuple[Any, str, float]] = {}
        # by identity: rooms, and when each came to its state or its lease began
        self._since: dict[int, tuple[Any, Room, float]] = {}
        self._asked: dict[tuple[str, Any], float] = {}  # by rank and question: when a slot was asked for
        self._pauses: dict[str, list[tuple[float, float]]] = {}  # by rank
        self._renewals: dict[tuple[str, int], float] = {}  # by reader and room: when its lease was renewed, or began

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        self._members[member.rank.name] = member
        self._could.pop(member.rank.name, None)
        clock = member.clock
        clock.pause = partial(self._paused, member, clock.pause)
        if isinstance(member, Router):
            self._looked_at[ROUTER] = member
            return
        renew = member.handlers.get(Renew)
        if renew is not None:
            member.handlers[Renew] = partial(self._renewed, member, renew)
        scheduler: Any = member.scheduler
        if isinstance(scheduler, DecodeScheduler):
            watched: Any = scheduler
            watched._between_steps = partial(self._stepped, member, scheduler._between_steps)
        handoff: Any = getattr(scheduler, "handoff", None)
        if hasattr(handoff, "_sources"):
            handoff.submitted = partial(self._submits, member, handoff.submitted)
        for holder, name, state in (
            (scheduler, "timers", "reserved"),
            (handoff, "_timers", "waiting"),
            (handoff, "_leases", "kept"),
        ):
            timers: Any = getattr(holder, name, None)
            if timers is not None:
                timers._expire = partial(self._expires, member, state, timers._expire)
        tiers: Any = getattr(scheduler, "tiers", None)
        if tiers is not None:
            tiers._written = partial(self._written, member, tiers._written)
            tiers.queue = partial(self._fetches, member, tiers, tiers.queue)
        landing: Any = getattr(getattr(member.mover, "receiver", None), "landing", None)
        if landing is not None:
            landing.ask = partial(self._asks, member, landing.ask)
        if scheduler is not None or landing is not None:
            self._looked_at[member.rank.name], self._landings[member.rank.name] = member, landing

    def _fetches(self, member: Any, tiers: Any, queue: Callable[..., None], room: Room, then: Any) -> None:
        # A prefetch lets its room go on when all is read, at once, or in time, as the policy says.
        clock, cache = member.clock, member.job.cache
        began, fetch = tiers._fetches.get(room.request.room, (0.0, None))
        limit = {"wait_complete": inf, "timeout": began + cache.prefetch_timeout}.get(cache.prefetch, 0.0)
        since, ends = clock.now, [inf]
        if fetch is not None and not fetch.processed:
            fetch.callbacks.insert(0, lambda _: ends.insert(0, clock.now))

        def goes_on(queued: Room) -> None:
            early = not fetch.processed and clock.now < limit - _ROUNDING
            late = clock.now > self._allowed(member, max(since, min(limit, ends[0]))) + _ROUNDING
            if early or late:
                what = f"room {queued.request.room} on {member.rank.name} goes on too {'early' if early else 'late'}"
                self._report("I15", f"{what} for its prefetch")
            then(queued)

        queue(room, then if fetch is None else goes_on)

    def entered(self, member: Any, room: Room) -> None:
        """Take note that *room* has come to the scheduler of *member*."""
        self._since[id(room)] = member, room, member.clock.now

    def changes(self, room: Room, state: str) -> None:
        """Check that *room*, which comes to another *state* now, has not been in its own for too long."""
        known = self._since.pop(id(room), None)
        if known is None:
            return
        member, _, since = known
        limit, now = _limit(member, room), member.clock.now
        if limit and now > self._allowed(member, since + limit) + _ROUNDING:
            what = f"room {room.request.room} is {room.state} on {member.rank.name} for {now - since:g} s"
            self._report("I15", f"{what}, and may be for {limit:g} s")
        if state != "over":
            self._since[id(room)] = member, room, inf if state == "kept" else now

    def answered(self, sender: str, message: PrefillDone) -> None:
        """Take note that the lease of a room begins."""
        self._renewed(self._members[sender], lambda *_: None, sender, Renew(message.instance, (message.room,)))

    def renews(self, sender: str, message: Renew) -> None:
        """Take note that *sender* renews the leases of rooms."""
        now = self._members[sender].clock.now
        self._renewals |= {(sender, room): now for room in message.rooms}

    def look(self, now: float) -> None:
        """Check those who sleep at the instant *now*, and those who wait."""
        if now == self._now:
            return
        self._now = now
        for name, member in self._looked_at.items():
            if member.has_ended or member.clock.halted:
                self._could.pop(name, None)
            elif isinstance(member, Router):
                self._look_once_more(name, member, _chore(member), now)
                for instance, until in member.membership.draining.items():
                    if until < now - _ROUNDING:
                        self._report("I15", f"{instance} still drains, and its time is over")
            else:
                self._look_at(name, member)

    def _look_at(self, name: str, member: Any) -> None:
        scheduler, landing, now = member.scheduler, self._landings[name], self._now
        if scheduler is not None:
            sleep = _sleep(scheduler)
            could = _work(scheduler) if sleep is not None else ""
            self._look_once_more(name, sleep, could, _awake(scheduler, now) if could else now)
            quarantined = scheduler.pages.quarantined
            for number, room in scheduler.rooms.items():
                if (room.state in GIVEN_UP and room.has_pages) != (number in quarantined):
                    self._report("I8", f"room {number} on {name} has failed or is in quarantine, not both")
            engine = member.job.engine
            for number, done in getattr(scheduler.handoff, "_sources", {}).items() if engine.lease else ():
                there = self._members[leader(done.instance)]
                if there.incarnation != done.instance or there.rank.endpoint.ended is not None:
                    continue  # a receiver that has ended hears nothing
                since = self._renewals.get((name, number), inf)
                if now > self._allowed(member, since + engine.heartbeat) + _ROUNDING:
                    what = f"{name} reads room {number}, and has not renewed its lease since {since:g} s"
                    self._report("I12", what)
                    self._renewals[name, number] = inf  # once
        key = next(iter(landing.ring._line), None) if landing is not None else None
        if key is not None:
            end = self._asked.get((name, key), inf) + landing._wait
            if now > self._allowed(member, end) + _ROUNDING:
                self._report("I15", f"a chunk waits for longer than it may for a slot of the ring of {name}: {key}")

    def _look_once_more(self, name: str, sleep: Any, could: str, until: float) -> None:
        before, asleep, end = self._could.pop(name, _NOTHING)
        if could:
            same = before is sleep and asleep == could
            self._could[name] = sleep, could, min(end, until) if same else until
            if same and self._now > end + _ROUNDING:
                self._report("I12", f"{name} sleeps, and {could}")

    def _expires(self, member: Any, state: str, expire: Callable[[int], None], number: int) -> None:
        # One that has failed meanwhile stays so, and of one that has arrived decode looks what it has.
        room = member.scheduler.rooms.get(number)
        if room is not None and not _is_given_up(room) and (room.state == state or state != "reserved"):
            since = self._since[id(room)][2]  # infinite for a lease whose router is lost
            early = member.clock.now < since + _limit(member, room) - _ROUNDING and since < inf
            if early or room.state != state:
                self._report(
                    "I15", f"room {number}, {room.state} on {member.rank.name}, is given up for being {state}"
                )
        expire(number)

    def _stepped(self, member: Any, step: Callable[[float], None], due: float) -> None:
        step(due)
        self._could.pop(member.rank.name, None)  # noted at a message of its own, while it was awake

    def _written(self, member: Any, written: Callable[..., None], *keys: Any) -> None:
        # Its pages are free: whoever lacks pages looks now.
        written(*keys)
        idle = member.scheduler._idle
        if idle is not None and not idle.triggered and (could := _work(member.scheduler)):
            self._report("I12", f"{member.rank.name} sleeps when pages have been written to a tier, and {could}")

    def _paused(self, member: Any, pause: Callable[[float], None], end: float) -> None:
        self._pauses.setdefault(member.rank.name, []).append((member.clock.now, end))
        pause(end)

    def _allowed(self, member: Any, end: float) -> float:
        # What should happen while a rank stands still happens when it goes on.
        pauses = self._pauses.get(member.rank.name, ())
        return max([end, *(last for first, last in pauses if first <= end <= last)])

    def _renewed(self, member: Any, renew: Callable[[str, Any], None], sender: str, message: Renew) -> None:
        renew(sender, message)
        for number in message.rooms if message.incarnation == member.incarnation else ():
            room = member.scheduler.rooms.get(number)
            if room is not None and room.state == "kept":
                self._since[id(room)] = member, room, member.clock.now

    def _submits(self, member: Any, submitted: Callable[[Any], bool], request: Any) -> bool:
        self._renewals[member.rank.name, request.room] = member.clock.now
        return submitted(request)

    def _asks(self, member: Any, ask: Callable[[str, Any], None], sender: str, message: Any) -> None:
        self._asked[member.rank.name, (message.room, message.writer, message.chunk)] = member.clock.now
        ask(sender, message)


def _limit(member: Any, room: Room) -> float:
    # For how long a room may be in its state; 0 is for ever.
    job = member.job
    if not isinstance(room, PrefillRequest):
        return job.waiting_timeout if room.state == "reserved" else 0.0
    if room.state == "kept":
        return float(job.engine.lease)
    return job.bootstrap_timeout if room.state == "waiting" else 0.0


def _sleep(scheduler: Any) -> Any:
    # What tells this sleep from another; None if it is awake.
    if isinstance(scheduler, DecodeScheduler):
        return None if scheduler._retracting else scheduler._due_event or scheduler
    idle = scheduler._idle
    return idle if idle is not None and not idle.triggered else None


def _awake(scheduler: Any, now: float) -> float:
    # By when it must be so.
    return scheduler.batch.boundary(now) if isinstance(scheduler, DecodeScheduler) else now


_NOTHING = None, "", inf

GIVEN_UP = "failed", "revoked"
"""States of rooms that have failed."""


def _is_given_up(room: Any) -> bool:
    return room.state in GIVEN_UP


def _chore(router: Any) -> str:
    # What it has not done.
    registry, draining, requests = router.registry, router.membership.draining, router._rooms
    if draining:
        busy = {name for each in requests.values() for name in (each.prefill, each.decode)}
        for instance in draining:
            if registry.current(instance) not in busy:
                return f"{instance} drains, has no requests, and does not leave"
    for number, request in requests.items():
        if request.finished is not None and (request.prefilled or request.lost):
            return f"room {number} is over, and not closed"
        needed = (request.decode,) if request.prefilled else (request.prefill, request.decode)
        if request.lost:
            needed = tuple(name for name in (request.prefill, request.decode) if leader(name) == request.asked)
        for name in needed:
            if name and not registry.alive(name):
                return f"room {number} waits for {name}, which is over"
    return ""


def _work(scheduler: Any) -> str:
    # What it could do if it were awake, as far as that is certain.
    handoff = scheduler.handoff
    waiting: Any
    if isinstance(scheduler, DecodeScheduler):
        preemption = scheduler.preemption
        for room in (*scheduler.complete, *scheduler._late):
            return f"room {room.request.room} has arrived"
        if scheduler._left:
            return "a user has left"
        if scheduler._waiting and preemption.has_place:
            return f"room {scheduler._waiting[0].request.room} could join"
        waiting = preemption.waiting or scheduler._queue
        if preemption.waiting:
            recomputed = preemption.waiting[0]
            if preemption.has_place and preemption.memory.admits(recomputed.context, len(scheduler.rooms)):
                return f"room {recomputed.request.room} could go on"
        elif waiting:
            request = waiting[scheduler.policy.admit(waiting)]
            if preemption.memory.admits(request.input, len(scheduler.rooms)):
                reach = request.input + request.output
                if fits(scheduler, request, scheduler.pages.output(request), reach):
                    return f"room {request.room} could have pages"
    else:
        waiting = scheduler._queue
        chosen = scheduler.policy.prefill(waiting, scheduler.job.chunk) if waiting else None
        first: Any = None if chosen is None else waiting[chosen[0]]
        if first is not None and (first.has_pages or fits(scheduler, first.request, 0, first.request.input)):
            return f"room {first.request.room} could be computed"
        if getattr(handoff, "_moved", ()):
            return "decode has not heard of what it has read"
    if not waiting or scheduler.blocked.waiting:
        return ""
    for each in scheduler.rooms.values():  # of decode's, the pages of those that are released come back at once
        if (each.has_pages and not _is_given_up(each)) or getattr(each, "released", False):
            return ""
    return "nothing will give pages back to the first that waits"


def fits(scheduler: Any, request: Any, output: int, reach: int) -> bool:
    """Return whether there are pages, rows and a slot for *request* and *output* tokens, if none are shared."""
    pool, state = scheduler.pages.pool, scheduler.pages.state
    if pool.rounded(scheduler.job.page_count(request.input + output)) > pool.free:
        return False
    if state.slots is not None and not state.slots.free:
        return False
    if state.window is not None and state.window.free < state.need(request.input, reach):
        return False
    return bool(scheduler.handoff.has_slot())
