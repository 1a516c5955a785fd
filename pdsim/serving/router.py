# SPDX-License-Identifier: Apache-2.0
"""The router: sends each request to a prefill and a decode instance, and keeps its account until it is over.

A request is an object only while it is under way: before and after it is a row of a table, so that a run of millions
has as many objects as requests are served at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import numpy as np
from msgspec.structs import replace
from mypy_extensions import mypyc_attr

from pdsim.kv.messages import (
    ROUTER,
    Abort,
    Dropped,
    Finished,
    Ping,
    Pong,
    PrefillDone,
    RequestHints,
    RoomLocations,
    Stop,
    Submit,
    TransferDone,
    instance_of,
    leader,
)
from pdsim.serving.deployment import Deployment
from pdsim.serving.fleet import Autoscaler
from pdsim.serving.membership import Membership
from pdsim.serving.policies import handoff_of
from pdsim.serving.rank_process import RankProcess
from pdsim.serving.requests import RequestLog, RequestTable
from pdsim.serving.settings import HostCosts
from pdsim.serving.steps import SchedulerHost
from pdsim.transfer import Program
from pdsim.transfer.job import Rank

_FINAL = "ok", "Aborted", "Shed"
"""Beginnings of statuses after which no user sends a request again."""

_ROUTER_LOST = "RouterLost: the router failed"


@dataclass(slots=True)
class RoutedRequest:
    """A request under way, at the router; *status* is set once, when it is over.

    Each try has a *room* and two incarnations.  *lost* and *asked* are set between the loss of an instance and the
    answer of the other.
    """

    arrival: float
    input: int
    output: int
    patience: float | None = None  # of its user
    blocks: tuple[int, ...] = ()  # hashes of its prompt's, where prefixes are cached
    priority: int = 0
    number: int = 0  # its place in the list
    room: int = 0  # a new one each time that it is sent out
    tries: int = 0
    prefill: str = ""  # incarnation
    decode: str = ""
    nbytes: int = 0
    answered: bool = False  # prefill has computed it, and decode is asked to pull it
    prefilled: bool = False
    expected: int = 0  # tokens of its output that are counted
    outstanding: tuple[int, int, int] = (0, 0, 0)  # tokens counted at prefill, at decode, and on the way there
    asked_again: int = 0  # by its user, after a failure
    before: int = 0  # tries until then
    lost: str = ""  # why it cannot go on; its other instance is asked whether it can be sent again
    asked: str = ""  # the leader of that instance
    status: str = ""  # "" while it is under way
    finished: Finished | None = None

    def submission(self) -> Submit:
        """Return the message that sends this request to its two instances."""
        hints = RequestHints(self.blocks, self.priority) if self.blocks or self.priority else None
        return Submit(self.room, self.input, self.output, self.prefill, self.decode, hints)

    def put(self, log: RequestLog) -> None:
        """Set its row of *log*, if it has one."""
        if self.number < len(log):
            prefill, decode = instance_of(self.prefill), instance_of(self.decode)
            log.put(self.number, prefill, decode, self.nbytes, self.status, self.finished)


class Arrivals:
    """Calls *arrive* with each request of *table* when it arrives, and *idle* whenever no further one is scheduled.

    In closed loops a user thinks after an answer: the arrival of a request with `Request.after` is its think time,
    in seconds after that end (`follow`), that of any other seconds after `begin`.  One event is scheduled at a time;
    requests without ``after`` must be in order of arrival.  Nothing arrives once *process* has ended.  Without
    *hashed* nobody sees which blocks prompts share.
    """

    def __init__(
        self,
        process: RankProcess,
        table: RequestTable,
        hashed: bool,
        arrive: Callable[[RoutedRequest], None],
        idle: Callable[[], None],
    ) -> None:
        self.start = 0.0  # when the first could have arrived, in seconds on the clock
        self._process = process
        self._table = table
        self._hashed = hashed
        self._arrive = arrive
        self._idle = idle
        self._next = 0  # the request that arrives next
        self._waiting: dict[int, list[int]] = {}  # by the number of the one whose end they come after
        self._open: Sequence[int] = range(len(table))  # those that wait for no other
        self.times: list[float] | None = None
        """Seconds after `start` at which each has arrived, where users wait; until then its think time."""
        if table.after is not None and (table.after >= 0).any():
            for number, earlier in enumerate(table.after.tolist()):
                if earlier >= 0:
                    self._waiting.setdefault(earlier, []).append(number)
            self._open = np.flatnonzero(table.after < 0).tolist()
            self.times = table.arrival.tolist()
        self._later = len(table) - len(self._open)  # requests whose users wait for an answer, or think

    @property
    def over(self) -> bool:
        """Whether no further request can arrive: all that come by themselves have, and nobody waits or thinks."""
        return self._next == len(self._open) and not self._later

    def begin(self, start: float) -> None:
        """Let requests arrive, whose times count from *start*, which is now."""
        self.start = start
        self._advance(None)

    def follow(self, request: RoutedRequest) -> None:
        """Let the requests arrive that come after *request*, which is over, each after its think time."""
        clock = self._process.clock
        for number in self._waiting.pop(request.number, ()):
            follower = self.request(number)
            ended = request.finished.finished if request.finished is not None else clock.now
            arrival = max(clock.now, ended + follower.arrival)
            assert self.times is not None
            follower.arrival = self.times[number] = arrival - self.start
            clock.call_at(arrival, lambda request: self._process.guard(self._arrive_later, request), follower)

    def again(self, request: RoutedRequest, seconds: float) -> None:
        """Let *request* arrive once more, so many *seconds* from now."""
        self._later += 1
        at = self._process.clock.now + seconds
        self._process.clock.call_at(at, lambda request: self._process.guard(self._arrive_later, request), request)

    def request(self, number: int) -> RoutedRequest:
        """Return request *number*, a new object each time."""
        table = self._table
        patience = nan if table.patience is None else float(table.patience[number])
        return RoutedRequest(
            float(table.arrival[number]),
            int(table.input[number]),
            int(table.output[number]),
            None if isnan(patience) else patience,
            table.blocks(number) if self._hashed else (),
            0 if table.priority is None else int(table.priority[number]),
            number,
        )

    def _advance(self, due: RoutedRequest | None) -> None:
        clock = self._process.clock
        while self._next < len(self._open) and not self._process.has_ended:
            request = due or self.request(self._open[self._next])
            arrival = self.start + request.arrival
            if arrival > clock.now:
                clock.call_at(arrival, self._advance, request)
                return
            self._next, due = self._next + 1, None
            self._arrive(request)
        self._idle()

    def _arrive_later(self, request: RoutedRequest) -> None:
        self._later -= 1
        self._arrive(request)


def program(
    rank: Rank,
    *,
    job: Mapping[str, Any],
    requests: Sequence[Sequence[Any]],
    leaves: Sequence[Sequence[float]] = (),
    outages: Sequence[Sequence[float]] = (),
    drains: Sequence[tuple[str, float, float]] = (),
) -> Program:
    """Serve *requests*, a `RequestTable` or its rows, and return what became of each.

    *job* is `Deployment.plain`.  *leaves* are users who leave whatever their request says: its number, and how many
    seconds after its arrival.  *outages* are when the router itself fails and works again, in seconds from the start
    of the job.  *drains* are instances that leave: when they begin to drain, and for how many seconds they may.
    The value has ``start``, when the first could have arrived; ``rows``, a `RequestLog`; how many
    messages were ``ignored``; ``open_rooms``; ``sent_again``, how often a request was by the router and by its user;
    ``changes``, those of `Membership`; ``scaled``, of `Fleet`; and with *after* the ``arrivals`` as they turned out.
    """
    return (yield from Router(rank, Deployment.from_plain(job), requests, leaves, outages, drains).run())


@mypyc_attr(allow_interpreted_subclasses=True)
class Router(RankProcess):
    """The rank that requests arrive at.

    `Arrivals` says when they arrive, `Membership` which instances there are, and how busy.  A lost instance gets no
    more requests.  A request that depends on it fails, unless the leader of its other instance says that none of its
    bytes can have moved: then it is sent again, in another room, at most `Deployment.retries` times.

    The router pings every rank three times in `Deployment.deadline`.  If no request progresses for as long as a loss
    can take to be noticed and twice the time that the longest request can take, all open requests fail.  A rank that
    is busy, or still owes an answer, counts as progress.

    ::

               PrefillDone (pull)  TransferDone    Finished
        arrives ──► sent ──► answered ──► prefilled ──► closed "ok"
                     │ ▲
                loss │ │ Dropped, untouched
                     ▼ │
                    lost ──► closed "PeerLost: ..."

    A request closes early when its user leaves, an instance reports a failure or is lost; the router then sends
    `Abort` to both instances.  Its user may send it again (`Deployment.asks`): it is computed from the beginning.
    """

    def __init__(
        self,
        rank: Rank,
        job: Deployment,
        requests: Sequence[Sequence[Any]],
        leaves: Sequence[Sequence[float]] = (),
        outages: Sequence[Sequence[float]] = (),
        drains: Sequence[tuple[str, float, float]] = (),
    ) -> None:
        super().__init__(rank, job)
        table = RequestTable.of(requests)
        if leaves:
            patience = np.full(len(table), nan) if table.patience is None else table.patience.copy()
            for which, seconds in leaves:
                patience[int(which)] = seconds
            table = table.but(patience=patience)
        self.count = len(table)
        self.membership = Membership(self, job, self.begin, self.instance_lost)
        self.registry = self.membership.registry
        self.log = RequestLog(self.count, rank.recorder.spill)
        self.arrivals = Arrivals(self, table, job.hashed, self._arrive, self._stop_if_done)
        self.generated = 0, 0  # requests that have all their tokens, and how many those were
        self.serial = handoff_of(job.engine).serial
        self.host = SchedulerHost(HostCosts(arrive=job.engine.proxy), job.engine.variation, job.seed, ROUTER)
        self.start = 0.0
        # a rank that dies just after it answered is lost a deadline and up to one ping later
        most = int(table.input.max(initial=1)), int(table.output.max(initial=1))
        self._patience = job.deadline * 4 / 3 + 2 * job.longest(*most)
        self._moved = 0.0  # when a request or a write last progressed
        rank.counts(lambda: self.generated[0], self.count)
        self._rooms: dict[int, RoutedRequest] = {}  # those that are under way
        scaled = job.autoscale.policy != "none"
        self.autoscaler = Autoscaler(self, self.registry, self._rooms) if scaled else None
        self._born = self.clock.now
        self._outages = outages  # of the router itself
        self._sent_again = [0, 0]  # how often by the router, and by users
        for at, _ in outages:
            self.clock.call_at(at, lambda _: self._fail_all(_ROUTER_LOST), None)
        for instance, at, seconds in drains:
            how = instance, seconds, self._rooms
            self.clock.call_at(at, lambda how: self.guard(self.membership.drain, *how), how)
        self.handlers |= {
            Pong: self._pong,
            RoomLocations: self._located,
            PrefillDone: self._answered,
            Finished: self._finished,
            TransferDone: self._transferred,
            Dropped: self._dropped,
        }

    def report(self) -> dict[str, Any]:
        """Return the start, the rows, how many messages came too late, and how many rooms are open."""
        value: dict[str, Any] = {
            "start": self.start,
            "rows": self.log,
            "ignored": self.ignored,
            "open_rooms": len(self._rooms),
            "sent_again": self._sent_again,
            "changes": self.membership.changes,
            "scaled": self.autoscaler.fleet.changes if self.autoscaler else [],
        }
        return value if self.arrivals.times is None else value | {"arrivals": self.arrivals.times}

    def watch(self) -> Program:
        """Ping every rank three times a deadline, lose instances that are silent, and fail requests that stall."""
        while True:
            asked = self.clock.now
            self.send(self.membership.last_heard, Ping())
            yield self.clock.timeout(self.job.deadline / 3)
            self.guard(self.membership.lose_silent)
            self.guard(self.begin)
            if self.membership.owes(asked):
                self._moved = self.clock.now
            if self.clock.now - self._moved > self._patience:
                self._fail_all(f"Stalled: no request and no write got anywhere for {self._patience:g} s")

    def refuse(self, sender: str, reason: str) -> None:
        """As `RankProcess.refuse`; the instance of *sender* is lost."""
        super().refuse(sender, reason)
        self.membership.lose_refused(sender, reason)

    def _handle(self, sender: str, payload: bytes) -> None:
        self.membership.heard(sender)
        super()._handle(sender, payload)

    def _pong(self, _: str, message: Pong) -> None:
        if message.busy:
            self._moved = self.clock.now

    # --- requests ---

    def begin(self) -> None:
        """Let requests arrive, once all instances are formed or lost, or the deadline has passed."""
        if not self.start and (not self.registry.awaited or self.clock.now - self._born > self.job.deadline):
            self.start = self.log.start = self.clock.now
            if self.autoscaler is not None:
                self.autoscaler.begin()
            self.arrivals.begin(self.start)

    def _arrive(self, request: RoutedRequest) -> None:
        if request.status:  # its user left before sending it again
            self._stop_if_done()
            return
        if request.patience is not None and not request.asked_again:
            self.clock.call_at(self.start + request.arrival + request.patience, self._leave, request)
        self._submit(request)

    def _submit(self, request: RoutedRequest) -> None:
        # It fails at once if no pair is left, and is shed if the chosen prefill instance has `Deployment.shed`
        # tokens outstanding or more, unless it has a priority.
        request.room = 1 + request.number + request.tries * self.count
        self._rooms[request.room] = request
        if any(at <= self.clock.now < until for at, until in self._outages):
            self._close(request, _ROUTER_LOST)
            return
        replica = request.number % self.job.routers
        pair = self.registry.choose(request.room, request.input, request.blocks, replica, self.clock.now)
        if pair is None:
            self._close(request, f"PeerLost: no {self.registry.missing()} instance is left")
            return
        waiting = self.registry.prefills.load[instance_of(pair[0])]
        if self.job.shed and waiting >= self.job.shed and not request.priority:
            self._close(request, f"Shed: {waiting} tokens outstanding at {instance_of(pair[0])}")
            return
        self._send_out(request, *pair)

    def _send_out(self, request: RoutedRequest, prefill: str, decode: str) -> None:
        request.prefill, request.decode = prefill, decode
        request.tries += 1
        done, tokens = self.generated
        request.expected = request.output if self.job.output_known else tokens // done if done else 0
        self._count(request)
        self._moved = self.clock.now
        self.membership.introduce(prefill, decode)
        self._pass_on(request, self._send_on)

    def _pass_on(self, request: RoutedRequest, send: Callable[[RoutedRequest], None]) -> None:
        seconds, room = self.host.arrive(request.input, self.clock.now), request.room

        def passed(_: Any) -> None:
            self._moved = self.clock.now  # what waits behind it has come nearer
            if self._rooms.get(room) is request and not request.lost:
                send(request)

        if seconds:
            self.clock.call_at(self.clock.now + seconds, passed, None)
        else:
            send(request)

    def _send_on(self, request: RoutedRequest) -> None:
        message = request.submission()
        # where the engine chooses the prefill instance, decode asks which: a router does not know
        if not self.serial:
            self.send(leader(request.decode), replace(message, prefill="") if self.job.query_dp else message)
        self.send(leader(request.prefill), message)

    def _located(self, _: str, message: RoomLocations) -> None:
        for room, incarnation in message.instances.items():
            if room in self._rooms:
                self.membership.directory.set(room, incarnation)
            else:
                self.ignore()

    def _answered(self, _: str, message: PrefillDone) -> None:
        request = self._find(message.room)
        if request is None or request.lost or request.answered:
            return
        self._moved = self.clock.now
        request.answered = True
        self._count(request)
        pull = replace(request.submission(), source=message)
        self._pass_on(request, lambda request: self.send(leader(request.decode), pull))

    def _transferred(self, sender: str, message: TransferDone) -> None:
        if message.reason:
            self._failed(sender, message)
            return
        request = self._find(message.room)
        if request is None:
            return
        request.nbytes = message.nbytes
        self._moved = self.clock.now
        request.prefilled = True
        self._count(request)
        if self.autoscaler is not None:
            self.autoscaler.rest()
        if request.finished is not None:
            self._close(request, "ok")

    def _finished(self, _: str, message: Finished) -> None:
        request = self._find(message.room)
        if request is not None:
            request.finished = message
            self._moved = self.clock.now
            if request.prefilled or request.lost:  # else its account of bytes is on the way
                self._close(request, "ok")

    def _failed(self, sender: str, message: TransferDone) -> None:
        request = self._find(message.room)
        if request is not None and (not request.lost or sender == request.asked):  # else the one asked decides
            self._fail(request, message.reason, but=sender)
        if message.lost:
            self.membership.lose_incarnation(message.lost, f"PeerLost: {message.lost} is gone")

    def _dropped(self, sender: str, message: Dropped) -> None:
        request = self._rooms.get(message.room)
        if request is None or sender != request.asked:
            return
        untouched = message.untouched or (self.serial and not request.answered)  # decode was not asked to pull it
        if not untouched or request.tries - request.before > self.job.retries:
            self._close(request, request.lost)
            return
        self._sent_again[0] += 1
        self._forget(request)
        self._submit(request)

    def _forget(self, request: RoutedRequest) -> None:
        # End its room; it can be sent out again.
        self._count(request, over=True)
        del self._rooms[request.room]
        self.membership.directory.pop(request.room)
        request.lost = request.asked = ""
        request.answered = request.prefilled = False  # both may be set, of no bytes
        if self.membership.draining:
            self.membership.leave(self._rooms)

    def _fail_all(self, reason: str) -> None:
        for request in tuple(self._rooms.values()):
            self.guard(self._fail, request, reason)

    def _leave(self, request: RoutedRequest) -> None:
        if request.status or request.finished is not None or self.has_ended:
            return
        if request.room not in self._rooms:  # it waits to be sent again
            self._rooms[request.room] = request
            self._close(request, f"Aborted: the user left after {request.patience:g} s")
        else:
            self._fail(request, f"Aborted: the user left after {request.patience:g} s")

    def _find(self, room: int) -> RoutedRequest | None:
        request = self._rooms.get(room)
        if request is None:
            self.ignore()
        return request

    def _fail(self, request: RoutedRequest, reason: str, but: str = "") -> None:
        # The leader *but* has aborted it already.
        if request.finished is not None:
            self._close(request, "ok")
            return
        self._abort(request, but)
        self._close(request, reason)

    def _abort(self, request: RoutedRequest, but: str = "") -> None:
        for incarnation in (request.decode, request.prefill):
            if incarnation and leader(incarnation) != but:
                self.send(leader(incarnation), Abort(request.room))

    def _close(self, request: RoutedRequest, status: str) -> None:
        if request.asked_again < self.job.asks and not status.startswith(_FINAL):
            request.asked_again += 1
            self._sent_again[1] += 1
            self._forget(request)
            request.nbytes, request.before = 0, request.tries
            self.arrivals.again(request, self.job.asks_after)
            return
        request.status = status
        if status == "ok":
            self.generated = self.generated[0] + 1, self.generated[1] + request.output
        self._moved = self.clock.now
        request.put(self.log)
        del self._rooms[request.room]
        self.membership.directory.pop(request.room)
        self._count(request, over=True)
        if self.autoscaler is not None:
            self.autoscaler.rest()
        if self.membership.draining:
            self.membership.leave(self._rooms)
        self.arrivals.follow(request)
        self._stop_if_done()

    def _count(self, request: RoutedRequest, over: bool = False) -> None:
        # The load that policies balance: prefill has a prompt until it has answered, decode has prompt and expected
        # output until the request is over, and the prompt is on the way there until prefill has written it.
        moves = 0 if over or request.prefilled else request.input
        waits = 0 if request.answered else moves
        tokens = waits, 0 if over else request.input + request.expected, moves
        before, request.outstanding = request.outstanding, tokens
        replica, now = request.number % self.job.routers, self.clock.now
        self.registry.add(request.prefill, waits - before[0], replica, now)
        self.registry.add(request.decode, tokens[1] - before[1], replica, now)
        if moves != before[2]:
            self.registry.send(request.decode, moves - before[2])

    def _stop_if_done(self) -> None:
        if not self._rooms and self.arrivals.over and not self.has_ended:
            for instance in self.membership.instances:
                self.send(self.job.ranks(instance), Stop())
            self.end()

    # --- instances ---

    def instance_lost(self, incarnation: str, reason: str, formed: bool) -> None:
        """Fail, or recover, every request that still needs *incarnation* or its answer."""
        self._moved = self.clock.now  # what depended on it goes on from here, and is given its time
        for request in tuple(self._rooms.values()) if formed else ():
            needs_prefill = request.prefill == incarnation and (request.lost or not request.prefilled)
            if request.decode == incarnation or needs_prefill:
                self._recover(request, incarnation, reason)

    def _recover(self, request: RoutedRequest, incarnation: str, reason: str) -> None:
        other = request.prefill if request.decode == incarnation else request.decode
        if request.lost or request.prefilled or request.finished is not None or not self.registry.alive(other):
            self._fail(request, request.lost or reason)
            return
        request.lost, request.asked = reason, leader(other)
        self._moved = self.clock.now
        self._abort(request)
