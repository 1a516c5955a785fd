# SPDX-License-Identifier: Apache-2.0
"""Checkers of the protocol's invariants, which watch a modelled job from outside while it runs.

They are `INVARIANTS`.  The model tells `InvariantChecker` of messages and transfers, and shows it every rank's
program object.  These are asked whose a page is when bytes land (`pdsim.verify.ownership`), what has been computed
(`pdsim.verify.computed`), and what is left at the end (`pdsim.verify.leaks`).  I9 takes requests of its own, which
the router of the job has to send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from pdsim.core.errors import MessageError
from pdsim.kv.contents import Contents
from pdsim.kv.messages import (
    ROUTER,
    Arrival,
    Chunk,
    Destination,
    Finished,
    KvMessage,
    Pong,
    PrefillDone,
    ReadRequest,
    Renew,
    Stop,
    Submit,
    TransferDone,
    decode,
    leader,
)
from pdsim.kv.pages import Pages, after
from pdsim.kv.pull import KvReader, KvSource
from pdsim.kv.push import KvSender
from pdsim.kv.receiver import KvReceiver
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.prefill import PrefillWorker
from pdsim.serving.rank_process import Room
from pdsim.serving.router import Router
from pdsim.sim.faults import Observer
from pdsim.transfer import Batch
from pdsim.verify import refuse_compiled
from pdsim.verify.agreement import AgreementChecker
from pdsim.verify.bounds import BoundsChecker
from pdsim.verify.choices import ChoiceChecker
from pdsim.verify.computed import ComputedChecker, window_differs
from pdsim.verify.endings import EndingChecker
from pdsim.verify.fleet import FleetChecker
from pdsim.verify.kept import KeptChecker
from pdsim.verify.leaks import LeakChecker
from pdsim.verify.order import OrderChecker
from pdsim.verify.ownership import OwnershipChecker
from pdsim.verify.reached import Rooms, transition
from pdsim.verify.routing import RoutingChecker
from pdsim.verify.schedules import ScheduleChecker
from pdsim.verify.speech import SpeechChecker
from pdsim.verify.stores import StoreChecker
from pdsim.verify.waits import WaitChecker

INVARIANTS = {
    "I1": "A room ends once on each rank; a failed room never succeeds; only ranks that have it speak of it.",
    "I2": "On every decode rank a room holds exactly what prefill computed, on arrival and when decoding begins and "
    "ends.",
    "I3": "A write, or a read that is used, touches only pages and state rows of its room.",
    "I4": "Writes to a staging slot belong to its room, writer and chunk; slots never overlap.",
    "I5": "Every request ends; each failure, and each end of a rank, follows a fault that reached it.",
    "I6": "First-token metadata is read from, lands in, and is taken from its room's slot.",
    "I7": "Ranks of a group process the same chunks in one order; messages and queues keep theirs.",
    "I8": "Each page, slot and room has one place; at the end none, no memory and no tokens are left.",
    "I9": "At the end every pair of live instances is connected and serves its probe; drains end in time.",
    "I10": "Prefill sends only what finished forwards have computed.",
    "I11": "Requests go where the policy says; anew only after losses, in other rooms, as allowed.",
    "I12": "Who has work is awake: pages out of quarantine, and free staging slots, go to whoever waits.",
    "I13": "Failed rooms post nothing, draining instances get none; rooms of users who left end with the step.",
    "I14": "All output tokens are decoded, stages in order; pages come once, and counts are of what they count.",
    "I15": "Transfers and waits end by their deadline, none sooner; queues, batches and forwards keep their sizes.",
    "I16": "Runs of forwards and isolated transfers end as single ones do.",
}
"""The checked invariants, by name; `docs/faults.md` has the table."""

_ORDERED: dict[type, tuple[str, ...]] = {
    KvSender: ("send",),
    KvReceiver: ("reserve", "forget"),
    KvSource: ("send",),
    KvReader: ("read", "forget"),
}
"""Methods with which a rank takes up a room; the ranks of a group call them in one order (I7)."""


class Violation(NamedTuple):
    """An invariant that did not hold, when and how."""

    invariant: str  # of `INVARIANTS`
    at: float  # seconds after the start
    what: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.invariant} at {self.at:.6f} s: {self.what}"


class InvariantChecker(Observer):
    """Watches one job by wrapping methods of its ranks' programs as they begin; `finish` checks the results.

    *allowed* says whether a rank may end with an error at a time, having begun at another, both in seconds after the
    start.  If the job is *hurried*, ranks are stopped while something is pending.  *held* are the rooms with a
    transfer whose completion was held up, *broken_rooms* those with one that the engine reports as failed.
    """

    def __init__(
        self,
        allowed: Callable[[str, str, float, float], bool] = lambda _, error, *__: not error,
        hurried: bool = False,
    ) -> None:
        refuse_compiled("experiment=faults")
        self.violations: list[Violation] = []
        self.held: set[int] = set()
        self.broken_rooms: set[int] = set()
        self.given_up: set[int] = set()  # rooms that failed, as somebody told the router
        self.reached: Counter[str] = Counter()  # transitions and messages (`pdsim.verify.reached`)
        self._allowed = allowed
        self._hurried = hurried
        self._computed = ComputedChecker(self.report)
        self._owners = OwnershipChecker(self.report, self._computed)
        self._leftovers = LeakChecker(self.report)
        self.bounds = BoundsChecker(self.report, self.reached)
        self._waits = WaitChecker(self.report)
        self._agreement = AgreementChecker(self.report)
        self._kept = KeptChecker(self.report)
        self.order = OrderChecker(self.report)
        self.endings = EndingChecker(self.report, hurried)
        self._schedules = ScheduleChecker(self.report)
        self._stores = StoreChecker(self.report)
        self._choices = ChoiceChecker(self.report)
        self._routing = RoutingChecker(self.report)
        self._fleet = FleetChecker(self.report)
        self.written: dict[int, float] = {}  # rooms: when prefill has said that all of it has moved
        self.nbytes: dict[int, int] = {}  # rooms: what prefill says that it has moved
        self.went_on: dict[int, float] = {}  # rooms: when decode has what it waited for, or gives up
        self._members: dict[str, Any] = {}
        self._queue: Any = None  # of all clocks, which has the time
        self._gone: set[str] = set()
        self._born: dict[str, float] = {}  # by rank: when its last process began
        self._reports: dict[tuple[str, int], str] = {}  # by rank and room: how it ended
        self._speech = SpeechChecker(self.report, self._reports, self.bounds.moved)
        self.submitted: dict[int, Submit] = {}  # by room
        self.finished: dict[int, Finished] = {}
        self._targets: dict[int, Destination | ReadRequest] = {}
        self._pages: dict[int, Pages] = {}  # of rooms that have others than their targets', all of them
        self._preempted: dict[int, int] = {}  # rooms out of the batch: first pages that they found cached since
        self._orders: list[tuple[Any, list[tuple[Any, ...]]]] = []  # of each incarnation of a rank: what it took up
        self._handlers: dict[type[KvMessage], Callable[[str, Any], None]] = {
            Submit: self._on_submit,
            Destination: self._on_target,
            TransferDone: self._on_done,
            Finished: self._on_finished,
            Stop: self._on_stop,
            Arrival: lambda _, message: self.bounds.said(message),
            PrefillDone: self._waits.answered,
            Renew: self._waits.renews,
        }
        self._stopped = False

    def joined(self, member: Any) -> None:
        """Watch what *member*, a rank's program, reports and owns."""
        self._members[member.rank.name] = member
        self._queue = member.clock.queue
        self._gone.discard(member.rank.name)
        self._born[member.rank.name] = member.clock.now
        self._owners.joined(member)
        self._computed.joined(member)
        self._leftovers.joined(member)
        self.bounds.joined(member)
        self._waits.joined(member)
        self._agreement.joined(member)
        self._kept.joined(member)
        self.order.joined(member)
        self._speech.joined(member)
        self.endings.joined(member)
        self._schedules.joined(member)
        self._stores.joined(member)
        self._choices.joined(member)
        self._routing.joined(member)
        self._fleet.joined(member)
        if isinstance(member, Router):
            return
        scheduler: Any = member.scheduler
        if scheduler is not None:
            scheduler.rooms = Rooms(scheduler.rooms)
            scheduler.rooms.entered, scheduler.rooms.changes = partial(self._waits.entered, member), self.changes
        if isinstance(member.scheduler, DecodeScheduler):
            scheduler.poll = partial(self._polled, member, scheduler.poll)
            scheduler.batch.join = partial(self._entered, member, scheduler.batch.join)
            preemption = scheduler.preemption
            preemption.preempt = partial(self._preempt, preemption.preempt)
            preemption._resume = partial(self._resumed, preemption._resume)
        order: list[tuple[Any, ...]] = []
        self._orders.append((member, order))
        part = member.mover.sender if isinstance(member.worker, PrefillWorker) else member.mover.receiver
        part.report = self._watched(member.rank.name, isinstance(part, KvReceiver), part.report)
        for action in _ORDERED[type(part)]:
            self._ordered(order, part, action)

    def changes(self, room: Room, state: str) -> None:
        """Count a transition of *room*, to *state*, and check how long it took."""
        self.reached[transition(room, state)] += 1
        self._waits.changes(room, state)
        self._speech.changes(room, state)
        self.order.changes(room, state, self._now())
        if room.state == "reserved":
            self.went_on[room.request.room] = self._now()

    def sent(self, sender: str, receiver: str, payload: bytes) -> None:
        """Look at a control message, and at who sleeps."""
        now = self._now()
        self.order.sent(sender, receiver, payload, now)
        try:
            message = decode(payload)
        except MessageError:
            return  # a refusal, which ends its receiver: `ended` will tell
        self.reached[type(message).__name__] += 1
        if type(message) is Pong:
            return  # a quarter of all, each soon after a ping
        self._waits.look(now)
        self._agreement.look(now, sender)
        self._speech.said(sender, receiver, message)
        self._routing.said(sender, receiver, message)
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(sender, message)

    def posted(self, batch: Batch, label: str) -> None:
        """Check that what is posted is still wanted."""
        self.bounds.posted(batch, label)
        self._owners.posted(batch, label)

    def held_up(self, label: str) -> None:
        """Take note of the room."""
        self.held.add(int(label.partition("/")[0]))

    def broken(self, label: str) -> None:
        """Take note of the room."""
        self.broken_rooms.add(int(label.partition("/")[0]))

    def read(self, batch: Batch, label: str) -> None:
        """Check that what is read is the room's."""
        self.order.moved("read", batch, label)
        self._owners.read(batch, label)

    def landed(self, batch: Batch, label: str) -> None:
        """Check that what is written is the room's."""
        self.order.moved("landed", batch, label)
        self._owners.landed(batch, label)

    def copied(self, batch: Batch) -> None:
        """Check that what is gathered or scattered is the room's."""
        self._owners.copied(batch)

    def ended(self, rank: str, error: str) -> None:
        """Check that *rank* had a cause to end, if it ended with an *error*."""
        self._gone.add(rank)
        self.endings.ended(rank, self._now(), error)
        self.order.ended(rank)
        if error and not self._allowed(rank, error, self._now(), self._born.get(rank, 0.0)):
            self.report("I5", f"{rank} ended: {error}")

    def finish(
        self,
        statuses: Iterable[str],
        explained: Callable[[int, str], bool] = lambda _, __: False,
        unrecovered: Iterable[str] = (),
        sent_wrongly: Iterable[str] = (),
        miscounted: Iterable[str] = (),
        stuck: Iterable[str] = (),
    ) -> list[Violation]:
        """Return all violations, also of the requests whose *statuses* the router kept.

        *explained* says whether the request of a number may have ended with a status other than ok; *unrecovered*
        tells of pairs that did not serve when they should have (I9), *sent_wrongly* of requests (I11), *miscounted*
        of their bytes (I14), and *stuck* of those that do not go on (I12).
        """
        for number, status in enumerate(statuses):
            if not status:
                self.report("I5", f"request {number} never ended")
            elif status != "ok" and not explained(number, status):
                self.report("I5", f"request {number} ended without a cause: {status}")
        for what in unrecovered:
            self.report("I9", what)
        for what in sent_wrongly:
            self.report("I11", what)
        for what in miscounted:
            self.report("I14", what)
        for what in stuck:
            self.report("I12", what)
        self._routing.finish()
        self._check_order()
        return self.violations

    def _watched(self, rank: str, receives: bool, report: Callable[..., None]) -> Callable[..., None]:
        def watch(message: Any, *more: Any) -> None:
            if isinstance(message, TransferDone):
                self._on_report(rank, receives, message)
            report(message, *more)

        return watch

    def _on_report(self, rank: str, receives: bool, message: TransferDone) -> None:
        # A receiver that finds other bytes than were sent fails the room, as it should; that it happened is the
        # violation (I2, or I6 for metadata).
        end = "failed" if message.reason else "succeeded"
        before = self._reports.setdefault((rank, message.room), end)
        if before != end:
            self.report("I1", f"room {message.room} {before} on {rank} and then {end}")
        if message.reason.startswith("PeerLost") and not message.lost:
            self.report("I5", f"{rank} says that a peer is lost, and not which: {message.reason}")
        if receives and "metadata" in message.reason:
            self.report("I6", f"{rank}: {message.reason}")
        elif "found " in message.reason and (rank, message.room) not in self._owners.unused:
            self.report("I2", f"{rank}: {message.reason}")

    def _on_submit(self, _: str, message: Submit) -> None:
        self._leftovers.begin()
        self.submitted[message.room] = message
        self._computed.submitted(message)
        self.bounds.submitted(message)

    def _on_target(self, _: str, message: Destination) -> None:
        self._targets[message.room] = message

    def _on_done(self, sender: str, message: TransferDone) -> None:
        if message.reason:
            self.given_up.add(message.room)
        elif message.nbytes and sender == leader(sender):  # to be read, nothing has moved when it is computed
            self.written.setdefault(message.room, self._now())
            self.nbytes[message.room] = message.nbytes
        if not message.reason and self._reports.get((sender, message.room)) == "failed":
            self.report("I1", f"room {message.room} failed on {sender}, which says that it is written")

    def _on_finished(self, _: str, message: Finished) -> None:
        self.finished[message.room] = message
        self.bounds.finished(message)
        self.order.finished(message)
        self._schedules.finished(message)
        if message.room not in self._targets:
            self.report("I2", f"room {message.room} finished without a destination")
            return
        self._compare(message.room, "at the end of decoding")

    def _compare(self, room: int, when: str) -> None:
        request, target = self.submitted[room], self._targets[room]
        held = 0 if isinstance(target, ReadRequest) else target.held
        pages, state = target.pages, target.state
        if room in self._preempted:
            return  # its KV is not here again yet
        for name, member in _in_incarnation(self._members, request.decode):
            contents: Contents = member.mover.receiver.pool.contents
            if name in self._gone or not member.rank.device.holds_bytes:
                continue
            if room in self._pages:
                pages, held = self._pages[room], 0
                components = zip(contents.layout.shape.state.components, target.state, strict=False)
                state = tuple(pages if component == "index" else rows for component, rows in components)
            reason = _all_differ(contents, room, pages, request.input, held)
            reason = reason or contents.verify_state(room, state, request.input, held)
            reason = reason or window_differs(contents, room, state, request.input)
            if reason:
                self.report("I2", f"{name} {when}: {reason}")

    def _polled(self, leader: Any, poll: Callable[[], None]) -> None:
        for room in [each.request.room for each in leader.scheduler.complete if not each.reason]:
            target = self._targets.get(room)
            if isinstance(target, ReadRequest):
                pages = sum(count for _, count in target.source)
            elif target is not None:
                pages = leader.job.page_count(target.input) - target.held
            for name, member in _in_incarnation(self._members, leader.incarnation) if target is not None else ():
                if name not in self._gone and member.rank.device.holds_bytes:
                    self._owners.check_bytes(name, room, pages, self.submitted[room].input)
        if isinstance(leader.mover.receiver, KvReceiver):
            self._check_metadata(leader)
        poll()

    def _check_metadata(self, leader: Any) -> None:
        for incoming in leader.scheduler.complete:
            room = incoming.request.room
            slot = leader.scheduler.handoff.slots.owners.get(room)
            if slot is None:
                what = f"{leader.rank.name} reads the metadata of room {room}, which has no slot any more"
                self.report("I6", what)
            elif not incoming.reason:
                for name, member in _in_incarnation(self._members, incoming.request.decode):
                    contents: Contents = member.mover.receiver.pool.contents
                    reason = name not in self._gone and member.rank.device.holds_bytes
                    if reason and (what := contents.verify_aux(room, slot)):
                        self.report("I6", f"{name} when it is read: {what}")

    def _entered(self, leader: Any, join: Callable[[int, int, int], None], number: int, *more: int) -> None:
        if number in self._targets and self.submitted[number].decode == leader.incarnation:
            cached = self._preempted.pop(number, None)
            if cached is not None or leader.job.cache.decode:
                self._pages[number] = leader.scheduler.pages.pool.owners[number]
            if cached is not None:
                self._compute_again(leader, number, cached)
            self._compare(number, "when decoding begins")
        join(number, *more)

    def _preempt(self, preempt: Callable[[int], Any], number: int) -> Any:
        self._preempted[number] = 0
        return preempt(number)

    def _resumed(self, resume: Callable[[Any], None], room: Any) -> None:
        resume(room)
        if room.recomputed:  # so far by what was cached
            self._preempted[room.request.room] = room.recomputed

    def _compute_again(self, leader: Any, number: int, cached: int) -> None:
        # What a modelled step leaves in the new pages, or a copy from host memory; rows of state have stayed.
        for _, member in _in_incarnation(self._members, leader.incarnation):
            if member.rank.device.holds_bytes and member.rank.endpoint.ended is None:
                contents: Contents = member.mover.receiver.pool.contents
                contents.fill_again(number, after(self._pages[number], cached // contents.layout.page_size), cached)

    def _ordered(self, order: list[tuple[Any, ...]], part: Any, action: str) -> None:
        # To forget a room that it never took up changes nothing; a paused leader of an earlier incarnation may ask.
        original: Callable[[Any], None] = getattr(part, action)

        def watch(what: Any) -> None:
            number = what if isinstance(what, int) else what.room
            if action != "forget" or any(number == room for _, room, _ in order):
                order.append((action, number, what.index if isinstance(what, Chunk) else 0))
            if isinstance(what, ReadRequest):
                self._targets[what.room] = what
            original(what)

        setattr(part, action, watch)

    def _check_order(self) -> None:
        # Two ranks are compared up to the end of the shorter list: one of them may have been stopped sooner.
        for number, (member, order) in enumerate(self._orders):
            for other, theirs in self._orders[number + 1 :]:
                if member.incarnation and member.incarnation == other.incarnation:
                    one, two = member.rank.name, other.rank.name
                    pairs = zip(order, theirs, strict=False)  # one may have been stopped sooner
                    for mine, its in ((mine, its) for mine, its in pairs if mine != its):
                        self.report("I7", f"{one} took up {mine} where {two} took up {its}")
                        break

    def _on_stop(self, sender: str, _: Any) -> None:
        if sender != ROUTER or self._stopped or not self.submitted:  # a leader that leaves ends its followers so
            return
        self._stopped = True
        if self._hurried:
            return
        self.endings.check_memory(self._now())
        self.order.check(self._now())
        for name, member in self._members.items():
            if name not in self._gone and not member.has_ended:
                self._leftovers.check(name)

    def report(self, invariant: str, what: str) -> None:
        """Take note of a violation."""
        self.violations.append(Violation(invariant, self._now(), what))

    def _now(self) -> float:
        return self._queue.now if self._queue is not None else 0.0


def _in_incarnation(members: Mapping[str, Any], incarnation: str) -> Iterator[tuple[str, Any]]:
    for name, member in members.items():
        if not isinstance(member, Router) and member.incarnation == incarnation:
            yield name, member


def _all_differ(contents: Any, room: int, pages: Pages, tokens: int, held: int) -> str:
    # What `Contents.verify` says, or that it has not looked at every token.
    rows, seen = contents._rows, list[int]()

    def looks(table: Any, number: int, other: int, piece: range, *more: Any) -> Any:
        seen.extend(piece)
        return rows(table, number, other, piece, *more)

    contents._rows = looks
    reason: str = contents.verify(room, pages, tokens, held)
    del contents._rows
    if not reason and seen != [*range(held * contents.layout.page_size, tokens)]:
        return f"of the {tokens} tokens of room {room} only {len(seen)} are compared"
    return reason
