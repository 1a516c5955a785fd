# SPDX-License-Identifier: Apache-2.0
"""Check that everything ends once, and for a reason: a part of `pdsim.verify.invariants`.

It looks at ranks that stop, requests that lost an instance, pages that a fence frees, requests that only pages in
quarantine keep from starting, and the memory of ended ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

from pdsim.kv.messages import (
    ROUTER,
    Dropped,
    Fenced,
    Finished,
    Leave,
    PrefillDone,
    Stop,
    TransferDone,
    epoch_of,
    instance_of,
    leader,
)
from pdsim.serving.decode import DecodeRequest
from pdsim.serving.prefill import PrefillScheduler
from pdsim.serving.router import Router
from pdsim.verify.waits import GIVEN_UP

_ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""

_PROVEN = 1.5
"""Seconds after the end of an instance until the other side has no room of it in quarantine: all have the proof."""

_SETTLED = 0.5
"""Seconds after the end of a rank until nothing of it moves: peers notice it, copies and flows have ended."""


class EndingChecker:
    """Calls *report* with an invariant (I3, I5, I8, I11, I12 or I15) and a text for what ends wrongly."""

    def __init__(self, report: Callable[[str, str], None], hurried: bool = False) -> None:
        self._report = report
        self._hurried = hurried
        self._closed: dict[int, str] = {}  # by room: the status that it came to, also if its user asks again
        self._answered: set[int] = set()  # rooms whose prompt was computed while nothing was lost
        self._before: dict[int, int] = {}  # by request: how often it was sent out before its user asked again
        self._over = inf  # when the router stopped
        self._members: dict[str, Any] = {}
        self._of: dict[int, Any] = {}  # by identity of an endpoint: its program
        self._stops: dict[int, float] = {}  # by program: when the router told it to stop
        self._asked: dict[tuple[int, int], str] = {}  # by program and fence: the incarnation that it is about
        self._answers: dict[tuple[int, int], set[str]] = {}  # and the ranks that have answered
        self._fence: dict[int, int] = {}  # by program: the fence that is answered now
        self._blocked: dict[int, float] = {}  # by program: since when quarantine alone is in the way of its queue
        self._ended: dict[str, float] = {}  # by rank: when its last process ended
        self.generated: set[int] = set()  # rooms whose output had reached the router before they closed

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        self._members[member.rank.name] = self._of[id(member.rank.endpoint)] = member
        self._ended.pop(member.rank.name, None)
        handlers = member.handlers
        if isinstance(member, Router):
            handlers[Finished] = partial(self._finished, member, handlers[Finished])
            handlers[Dropped] = partial(self._dropped, member, handlers[Dropped])
            handlers[TransferDone] = partial(self._failed, member, handlers[TransferDone])
            handlers[PrefillDone] = partial(self._computed, member, handlers[PrefillDone])
            membership: Any = member.membership
            membership.heard = partial(self._hears, membership, membership.heard)
            router: Any = member
            router._close = partial(self._closes, router._close)
            return
        scheduler: Any = member.scheduler
        if scheduler is None:
            return
        for kind in (Stop, Leave):
            handlers[kind] = partial(self._stopped, member, handlers[kind])
        member.end = partial(self._ends, member, member.end)
        scheduler.gives_up = partial(self._gives_up, member, scheduler.gives_up)
        if isinstance(scheduler, PrefillScheduler):
            prefill: Any = scheduler
            prefill._start = partial(self._starts, member, prefill._start)
        fence: Any = getattr(member.mover, "fence", None)
        if fence is not None:
            fence.begin = partial(self._fences, member, fence, fence.begin)
            fence.free = partial(self._frees, member, fence.free)
            handlers[Fenced] = partial(self._fenced, member, handlers[Fenced])

    def ended(self, rank: str, now: float, error: str = "") -> None:
        """Take note that *rank* ended; once the router has stopped, nothing is left to wait for."""
        self._ended[rank] = now
        if rank == ROUTER:
            self._over = inf if error or self._hurried else now
        late = now > self._over + _SETTLED and self._ended.get(leader(rank), 0.0) >= self._over
        if late and self._members[rank].gather is None:  # ranks that gather wait for others
            self._report("I12", f"{rank} runs on for {now - self._over:g} s after the router")

    def check_memory(self, now: float) -> None:
        """Check that no memory is held for ranks that have ended, now that nothing is to come."""
        recent = {
            id(self._members[name].rank.device.memory) for name, at in self._ended.items() if at > now - _SETTLED
        }
        endpoints = self._members[ROUTER].rank.endpoint._fabric.endpoints.values()  # also of who has not begun yet
        devices = [endpoint._device for endpoint in endpoints if endpoint.ended is None]
        owned = {id(buffer) for device in devices for buffer in device._buffers}
        owned |= {id(segment._whole) for device in devices for segment in device.symmetric._segments}
        memories = {id(memory): memory for each in self._of.values() for memory in _memories(each.rank.device)}
        for number, memory in memories.items():
            if number in recent:
                continue
            buffers = sorted(memory._buffers.values(), key=lambda buffer: buffer.address)
            if any(one.address + one.size > other.address for one, other in pairwise(buffers)):
                self._report("I8", f"buffers of {memory.name} overlap: {buffers}")
            held = sum(buffer.size for buffer in buffers if buffer.freed)
            if held:
                self._report("I8", f"{held} bytes of {memory.name} are freed, and held when all is over")
            if memory.used != (used := sum(buffer.size for buffer in buffers)):
                self._report(
                    "I8", f"{memory.name} has {used} bytes in use when all is over, and counts {memory.used}"
                )
            if left := sum(buffer.size for buffer in buffers if not buffer.freed and id(buffer) not in owned):
                self._report("I8", f"{left} bytes of {memory.name} are nobody's when all is over")

    def _hears(self, membership: Any, heard: Callable[[str], None], rank: str) -> None:
        known = rank in membership.last_heard
        heard(rank)
        if not known and rank in membership.last_heard:
            self._report("I12", f"the router waits for {rank}, which it has given up, by a late message of it")

    def _closes(self, close: Callable[..., None], request: Any, status: str) -> None:
        self._closed[request.room] = status
        close(request, status)
        if not request.status:  # its user asks again
            self._before[request.number] = request.tries

    def _computed(self, router: Router, answered: Callable[..., None], sender: str, message: PrefillDone) -> None:
        request = router._rooms.get(message.room)
        if request is not None and not request.lost:  # otherwise decode is not asked to pull it
            self._answered.add(message.room)
        answered(sender, message)

    def _finished(self, router: Router, finished: Callable[..., None], sender: str, message: Finished) -> None:
        if message.room in router._rooms:
            self.generated.add(message.room)
        finished(sender, message)

    def _dropped(self, router: Router, dropped: Callable[..., None], sender: str, message: Dropped) -> None:
        request = router._rooms.get(message.room)
        if request is None:
            dropped(sender, message)
            return
        own, other = request.prefill, request.decode
        if leader(own) != sender:
            own, other = other, own
        left = request.tries - self._before.get(request.number, 0) <= router.job.retries
        # where decode pulls, it was not asked to before the answer
        unmoved = message.untouched or (router.serial and message.room not in self._answered)
        dropped(sender, message)
        if message.room in router._rooms:
            return
        if router.registry.alive(other) and not router.registry.alive(own):
            self._report("I11", f"room {message.room} is over by the word of {sender}, whose instance is lost")
        elif unmoved and left and self._closed.get(message.room, "").startswith("PeerLost: " + instance_of(other)):
            self._report("I11", f"room {message.room} is not sent anew, and {sender} says that nothing moved")

    def _failed(self, router: Router, failed: Callable[..., None], sender: str, message: TransferDone) -> None:
        request = router._rooms.get(message.room)
        other = ""
        if request is not None and request.lost and sender != request.asked:
            other = request.decode if leader(request.decode) == request.asked else request.prefill
        failed(sender, message)
        over = other and message.reason and message.room not in router._rooms
        if over and router.registry.alive(other):
            self._report("I11", f"room {message.room} is over by the word of {sender}, whose instance is lost")

    def _stopped(self, member: Any, stop: Callable[..., None], sender: str, message: Any) -> None:
        if sender == ROUTER:
            self._stops.setdefault(id(member), member.clock.now)
        stop(sender, message)
        if sender == ROUTER and not member.scheduler.rooms and not member.has_ended:
            self._report("I12", f"{member.rank.name} has no rooms and runs on after Stop")

    def _ends(self, member: Any, end: Callable[..., None], *more: Any) -> None:
        until = self._stops.get(id(member), member.clock.now) + member.job.deadline
        if member.scheduler.rooms and not member.has_ended and member.clock.now < until - _ROUNDING:
            self._report("I5", f"{member.rank.name} ends in order, and has rooms {[*member.scheduler.rooms][:5]}")
        elif not member.has_ended and self._lived(member.followers, member.clock.now - _SETTLED):
            for number, room in member.scheduler.rooms.items():
                other = instance_of(room.request.prefill if isinstance(room, DecodeRequest) else room.request.decode)
                over = max(self._ended.get(name, inf) for name in member.job.ranks(other))
                late = over < member.clock.now - _PROVEN and not self._loads(member, number)
                if room.state in GIVEN_UP and late:
                    self._report("I12", f"{member.rank.name} waits for {other}, which is over, with room {number}")
        end(*more)

    def _lived(self, ranks: list[str], until: float) -> bool:
        return all(self._ended.get(name, inf) >= until for name in ranks)

    def _loads(self, member: Any, number: int) -> bool:
        # Whether a rank has a forward of the room that waits for what it reads from a tier, perhaps over a cut link.
        for name in (member.rank.name, *member.followers):
            own = self._members[name]
            tiers: Any = own.worker.tiers if own.prefill else None
            state = own.mover.sender._rooms.get(number) if tiers is not None and tiers.load is not None else None
            if state is not None and state.planned:
                return True
        return number in getattr(
            member.scheduler, "_begun", ()
        )  # the forward itself waits, if pages must leave first

    def _starts(self, member: Any, start: Callable[[Any], Any], room: Any) -> Any:
        started = start(room)
        if started is not None:
            self._blocked.pop(id(member), None)
            if member.scheduler.blocked._until is not None:
                self._report("I15", f"room {room.request.room} starts on {member.rank.name}, whose queue is blocked")
        return started

    def _gives_up(self, member: Any, gives_up: Callable[[int], bool], others: int) -> bool:
        now, over = member.clock.now, gives_up(others)
        if others:
            self._blocked.pop(id(member), None)
            return over
        since = self._blocked.setdefault(id(member), now)
        if over and now < since + member.job.deadline - _ROUNDING:
            self._report("I15", f"{member.rank.name} waits {now - since:g} s for pages in quarantine, and gives up")
        return over

    def _fences(self, member: Any, fence: Any, begin: Callable[..., None], incarnation: str, rooms: Any) -> None:
        key = id(member), fence._number + 1
        self._asked[key], self._answers[key] = incarnation, set()
        begin(incarnation, rooms)

    def _fenced(self, member: Any, fenced: Callable[..., None], sender: str, message: Fenced) -> None:
        self._fence[id(member)] = message.number
        self._answers.setdefault((id(member), message.number), set()).add(sender)
        fenced(sender, message)

    def _frees(self, member: Any, free: Callable[[int], None], room: int) -> None:
        key = id(member), self._fence.get(id(member), 0)
        ranks, lost = {member.rank.name, *member.followers}, self._asked.get(key, "")
        if missing := ranks - self._answers.get(key, set()):
            self._report("I3", f"{member.rank.name} frees room {room}, and {min(missing)} has not proven it quiet")
        for name in sorted(ranks):
            inbound = self._members[name].rank.endpoint.inbound if lost and name not in self._ended else {}
            for peer, ones in inbound.items():
                own = [self._of[id(one)].incarnation for one in ones if id(one) in self._of]
                same = instance_of(peer) == instance_of(lost)
                if same and any(each and epoch_of(each) <= epoch_of(lost) for each in own):
                    self._report("I3", f"{member.rank.name} frees room {room}, and {peer} of {lost} reaches {name}")
        free(room)


def _memories(device: Any) -> list[Any]:
    return [device.memory, *device.symmetric._segments]
