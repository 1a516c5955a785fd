"""The router: sends each request to a prefill and a decode instance, and keeps account of all of them to the end.

It is also where ranks enrol (`pdsim.kv.bootstrap`) and where it is decided that an instance is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from simpy.events import Event

from pdsim.job import Rank
from pdsim.kv.bootstrap import RoomDirectory
from pdsim.kv.messages import (
    Abort,
    Busy,
    Details,
    Dropped,
    Enroll,
    Failed,
    Finished,
    Gone,
    KvMessage,
    Lent,
    Locate,
    Located,
    MessageError,
    Ping,
    Pong,
    Prefilled,
    PullRequest,
    Ready,
    Stop,
    Streamed,
    Submit,
    Took,
)
from pdsim.serving.deployment import ROUTER, Deployment, instance_of, leader
from pdsim.serving.instances import InstanceRegistry, own_place
from pdsim.serving.rank_process import Handler, RankProcess
from pdsim.serving.request_log import RequestLog
from pdsim.serving.routed_requests import ComingRequests, RoutedRequest
from pdsim.serving.scheduler_host import SchedulerHost
from pdsim.serving.seams import handoff_of
from pdsim.serving.settings import HostCosts
from pdsim.transfer import Program

__all__ = ["program"]


def program(
    rank: Rank,
    *,
    job: Mapping[str, Any],
    requests: Sequence[Sequence[float]],
    leaves: Sequence[Sequence[float]] = (),
    blocks: Sequence[Sequence[int]] = (),
    after: Sequence[int] = (),
    priorities: Sequence[int] = (),
) -> Program:
    """Serve *requests* (arrival in seconds, input tokens, output tokens) and return what became of each.

    *leaves* are users who give up: the number of a request, and how many seconds after its arrival.  *blocks* are
    the hashes of each prompt's blocks, where prefixes are cached.  *after* is, of each, the number of the request
    whose end its user waits for, -1 for none; its arrival is then counted from there.  The value has ``start``, when
    the first could have arrived, and ``rows``: prefill, decode, bytes, status, and the times of `Finished` or None.
    """
    return (yield from Router(rank, Deployment.from_plain(job), requests, leaves, blocks, after, priorities).run())


class Router(RankProcess):
    """The rank that requests arrive at.

    It pings every rank three times in `Deployment.deadline` seconds.  An instance with a rank that has been silent
    for all of them, that a peer's engine reports lost, or that enrols again, is lost: it gets no more requests and
    its other ranks end.  A request that depends on it fails, unless the leader of its other instance says that none
    of its bytes can have moved: then it is sent out anew, in another room, at most `Deployment.retries` times.

    Should everybody answer, none with `Busy`, and yet no request get anywhere, for as long as a loss can take to be
    noticed and twice as long as the longest request can take, all that are open fail. A rank that owes the answer to
    a ping is waited for: it is heard, or lost, within a deadline.
    """

    def __init__(
        self,
        rank: Rank,
        job: Deployment,
        requests: Sequence[Sequence[float]],
        leaves: Sequence[Sequence[float]] = (),
        blocks: Sequence[Sequence[int]] = (),
        after: Sequence[int] = (),
        priorities: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, job)
        self.requests: Sequence[RoutedRequest] = ComingRequests(requests, leaves, blocks, priorities)
        self.log = RequestLog(len(requests), rank.journal)
        self._waiting: dict[int, list[int]] = {}  # by the number of the one whose end they come after
        self._open: list[int] | None = None  # those that wait for no other
        if after:
            for number, earlier in enumerate(after):
                if earlier >= 0:
                    self._waiting.setdefault(earlier, []).append(number)
            self._open = [number for number, earlier in enumerate(after) if earlier < 0]
        self._later = sum(map(len, self._waiting.values()))  # requests whose users wait for an answer, or think
        self._arrivals = [float(row[0]) for row in requests] if after else []
        self.registry = InstanceRegistry(job)
        self.directory = RoomDirectory(rank.clock)
        self.serial = handoff_of(job.engine).serial
        self.host = SchedulerHost(HostCosts(arrive=job.engine.proxy), job.engine.variation, job.seed, ROUTER)
        self.instances = (*job.prefills, *job.decodes)
        self.last_heard = {name: self.clock.now for instance in self.instances for name in job.ranks(instance)}
        self.start = 0.0
        self._next = 0  # the request that arrives next
        given = max((int(row[1]) for row in requests), default=1)
        wanted = max((int(row[2]) for row in requests), default=1)
        # a rank that dies just after it answered is found silent a deadline and up to one ping later
        self._patience = job.deadline * 4 / 3 + 2 * job.longest(given, wanted)
        self._moved = 0.0  # when a request last got somewhere, or a write of one
        self._generated = 0, 0  # requests that have all their tokens, and how many those were
        rank.counts(lambda: self._generated[0], len(self.requests))
        self._rooms: dict[int, RoutedRequest] = {}  # those that are under way
        self._born = self.clock.now
        handlers: dict[type[KvMessage], Handler] = {
            Enroll: self._enroll,
            Ready: self._ready,
            Pong: lambda _, __: None,
            Busy: self._busy,
            Took: self._took,
            Locate: self._locate,
            Prefilled: self._prefilled,
            Lent: self._lent,
            Finished: self._finished,
            Streamed: self._finished,
            Failed: self._failed,
            Dropped: self._dropped,
            Gone: lambda _, message: self._lose_life(message.instance, message.reason),
        }
        self.handlers |= handlers

    def report(self) -> dict[str, Any]:
        """Return the start, the rows, and how many messages came too late."""
        for request in self._rooms.values():
            self._note(request)
        found = {"start": self.start, "rows": self.log, "ignored": self.ignored, "open_rooms": len(self._rooms)}
        return found if self._open is None else found | {"arrivals": self._arrivals}

    def watch(self) -> Program:
        """Ping every rank three times a deadline; give up instances that do not answer, and stalled requests."""
        while not self.ended.triggered:
            asked = self.clock.now
            self.send(self.last_heard, Ping())
            yield self.clock.timeout(self.job.deadline / 3)
            silent = [name for name, at in self.last_heard.items() if self.clock.now - at > self.job.deadline]
            for instance in dict.fromkeys(map(instance_of, silent)):
                self.guard(self._lose, instance, f"PeerLost: nothing from {instance} for {self.job.deadline} s")
            self.guard(self._begin)
            if self._owed(asked):
                self._moved = self.clock.now
            if self.clock.now - self._moved > self._patience:
                for request in tuple(self._rooms.values()):
                    reason = f"Stalled: no request and no write got anywhere for {self._patience:g} s"
                    self.guard(self._fail, request, reason)

    def _owed(self, asked: float) -> bool:
        """Return whether a rank has not been heard since *asked*: it will be, or is lost, within a deadline."""
        return any(at <= asked for at in self.last_heard.values())

    def _busy(self, _: str, __: Busy) -> None:
        self._moved = self.clock.now

    def _handle(self, sender: str, payload: bytes) -> None:
        if sender in self.last_heard:
            self.last_heard[sender] = self.clock.now
        super()._handle(sender, payload)

    # --- requests ---

    def _begin(self) -> None:
        """Let requests arrive from now on, once all instances are connected or lost, or the deadline has passed."""
        if not self.start and (self.registry.connected or self.clock.now - self._born > self.job.deadline):
            self.start = self.log.start = self.clock.now
            self._arrive(None)

    def _arrive(self, _: Event | None) -> None:
        while self._next < self._count() and not self.ended.triggered:
            request = self.requests[self._next if self._open is None else self._open[self._next]]
            arrival = self.start + request.arrival
            if arrival > self.clock.now:
                event = self.clock.at(arrival)
                assert event.callbacks is not None
                event.callbacks.append(self._arrive)
                return
            self._next += 1
            self._come(request)
        self._stop_if_done()

    def _count(self) -> int:
        """Return how many requests arrive by themselves."""
        return len(self.requests) if self._open is None else len(self._open)

    def _come(self, request: RoutedRequest) -> None:
        """Have *request* arrive now."""
        if request.patience is not None:
            self.clock.call_at(self.start + request.arrival + request.patience, self._leave, request)
        self._submit(request)

    def _go_on(self, request: RoutedRequest) -> None:
        """Let the requests arrive that come after *request*, each after its think time."""
        for number in self._waiting.pop(request.number, ()):
            follower = self.requests[number]
            ended = request.finished.finished if request.finished is not None else self.clock.now
            arrival = max(self.clock.now, ended + follower.arrival)
            follower.arrival = self._arrivals[number] = arrival - self.start
            self.clock.call_at(arrival, lambda request: self.guard(self._come_later, request), follower)

    def _come_later(self, request: RoutedRequest) -> None:
        self._later -= 1
        self._come(request)

    def _submit(self, request: RoutedRequest) -> None:
        request.room = 1 + request.number + request.tries * len(self.requests)
        self._rooms[request.room] = request
        pair = self.registry.choose(request.room, request.input, request.blocks)
        if pair is None:
            self._close(request, f"PeerLost: no {self.registry.missing()} instance is left")
            return
        if (waiting := self._too_many(request, pair[0])) is not None:
            self._close(request, f"Shed: {waiting} tokens outstanding at {instance_of(pair[0])}")
            return
        self._send_out(request, *pair)

    def _too_many(self, request: RoutedRequest, prefill: str) -> int | None:
        """Return the tokens outstanding at *prefill*, if they are so many that *request* is refused."""
        waiting = self.registry.prefills.load[instance_of(prefill)]
        full = self.job.shed and waiting >= self.job.shed and not request.priority
        return waiting if full else None

    def _send_out(self, request: RoutedRequest, prefill: str, decode: str) -> None:
        """Have these two lives serve *request*."""
        request.prefill, request.decode = prefill, decode
        request.tries += 1
        request.counted = True
        request.expected = self._expected(request)
        self.registry.add(request.prefill, request.input)
        self.registry.add(request.decode, request.input + request.expected)
        self.registry.send(request.decode, request.input)
        self._moved = self.clock.now
        self._pass_on(request, self._send_on)

    def _pass_on(self, request: RoutedRequest, send: Callable[[RoutedRequest], None]) -> None:
        """Call *send* with *request* once the router has worked on it, unless that has ended meanwhile."""
        seconds, room = self.host.arrive(request.input), request.room

        def passed(_: Any) -> None:
            if self._rooms.get(room) is request and not request.lost:
                send(request)

        if seconds:
            self.clock.call_at(self.clock.now + seconds, passed, None)
        else:
            send(request)

    def _send_on(self, request: RoutedRequest) -> None:
        message = self._submission(request)
        if request.blocks or request.priority:
            details = Details(request.room, request.blocks, request.priority)
            self.send([leader(life) for life in (request.prefill, request.decode)], details)
        # where decode has to ask, it is told as little as a router knows that leaves the choice to the engine
        if not self.serial:
            self.send(leader(request.decode), replace(message, prefill="") if self.job.query_dp else message)
        self.send(leader(request.prefill), message)

    def _took(self, _: str, message: Took) -> None:
        if message.room in self._rooms:
            self.directory.took(message.room, message.life)
        else:
            self.ignore()

    def _locate(self, sender: str, message: Locate) -> None:
        self.send(sender, Located(self.directory.locate(message.rooms), message.life))

    def _submission(self, request: RoutedRequest) -> Submit:
        return Submit(request.room, request.input, request.output, request.prefill, request.decode)

    def _lent(self, _: str, message: Lent) -> None:
        """Have decode pull what prefill has computed."""
        request = self._find(message.room)
        if request is None or request.lost or request.answered:
            return
        request.answered = True
        self._moved = self.clock.now
        self.registry.add(request.prefill, -request.input)
        pull = PullRequest(self._submission(request), message)
        self._pass_on(request, lambda request: self.send(leader(request.decode), pull))

    def _prefilled(self, _: str, message: Prefilled) -> None:
        request = self._find(message.room)
        if request is None:
            return
        request.nbytes = message.nbytes
        self._moved = self.clock.now
        if not request.prefilled:
            request.prefilled = True
            if request.counted:
                self.registry.send(request.decode, -request.input)
            if not request.answered:
                self.registry.add(request.prefill, -request.input)
        if request.finished is not None:
            self._close(request, "ok")

    def _finished(self, _: str, message: Finished) -> None:
        request = self._find(message.room)
        if request is not None:
            request.finished = message
            self._moved = self.clock.now
            if request.prefilled or request.lost:  # else its account of bytes is on the way
                self._close(request, "ok")

    def _failed(self, sender: str, message: Failed) -> None:
        request = self._find(message.room)
        if request is not None:
            self._fail(request, message.reason, but=sender)
        if message.lost:
            self._lose_life(message.lost, f"PeerLost: {message.lost} is gone")

    def _dropped(self, sender: str, message: Dropped) -> None:
        request = self._rooms.get(message.room)
        if request is None or sender != request.asked:
            return
        if not message.untouched or request.tries > self.job.retries:
            self._close(request, request.lost)
            return
        self._uncount(request)
        self._forget(request.room)
        request.lost = request.asked = ""
        request.answered = False
        self._submit(request)

    def _leave(self, request: RoutedRequest) -> None:
        if not request.status and request.finished is None and not self.ended.triggered:
            self._fail(request, f"Aborted: the user left after {request.patience:g} s")

    def _find(self, room: int) -> RoutedRequest | None:
        """Return the request in *room*; None, and count it, if that is over."""
        request = self._rooms.get(room)
        if request is None:
            self.ignore()
        return request

    def _fail(self, request: RoutedRequest, reason: str, but: str = "") -> None:
        """End *request* with *reason*, and have it given up, except by the leader *but*, which has done so.

        One that has all its tokens has not failed: only the account of its bytes will not come any more.
        """
        if request.finished is not None:
            self._close(request, "ok")
            return
        self._abort(request, but)
        self._close(request, reason)

    def _abort(self, request: RoutedRequest, but: str = "") -> None:
        for life in (request.decode, request.prefill):
            if life and leader(life) != but:
                self.send(leader(life), Abort(request.room))

    def _close(self, request: RoutedRequest, status: str) -> None:
        """End *request* with *status*, for good."""
        request.status = status
        if status == "ok":
            self._generated = self._generated[0] + 1, self._generated[1] + request.output
        self._moved = self.clock.now
        self._note(request)
        self._forget(request.room)
        self._uncount(request)
        self._go_on(request)
        self._stop_if_done()

    def _note(self, request: RoutedRequest) -> None:
        """Keep what became of *request*, if it is one of those to serve."""
        if request.number < len(self.log):
            prefill, decode = instance_of(request.prefill), instance_of(request.decode)
            self.log.put(request.number, prefill, decode, request.nbytes, request.status, request.finished)

    def _forget(self, room: int) -> None:
        del self._rooms[room]
        self.directory.forget(room)

    def _uncount(self, request: RoutedRequest) -> None:
        if request.counted:
            request.counted = False
            if not request.prefilled:
                self.registry.send(request.decode, -request.input)
            if not (request.prefilled or request.answered):
                self.registry.add(request.prefill, -request.input)
            self.registry.add(request.decode, -request.input - request.expected)

    def _expected(self, request: RoutedRequest) -> int:
        """Return how many tokens *request* will generate, as far as a router knows: others did so many on average."""
        if self.job.output_known:
            return request.output
        count, tokens = self._generated
        return tokens // count if count else 0

    def _stop_if_done(self) -> None:
        if not self._rooms and self._next == self._count() and not self._later and not self.ended.triggered:
            for instance in self.instances:
                self.send(self.job.ranks(instance), Stop())
            self.end()

    # --- instances ---

    def refuse(self, sender: str, reason: str) -> None:
        """As `RankProcess.refuse`; an instance with a rank that is refused is lost."""
        super().refuse(sender, reason)
        if (instance := instance_of(sender)) in self.instances:
            self._lose(instance, f"MessageError: {reason}")

    def _enroll(self, sender: str, message: Enroll) -> None:
        message = own_place(sender, message)
        try:
            self.registry.bootstrap.check(message)
        except MessageError as error:
            self.refuse(sender, str(error))
            return
        if self.registry.bootstrap.replaces(message):
            self._lose(message.instance, f"PeerLost: {sender} was started again")
        self.last_heard[sender] = self.clock.now
        for name, meet in self.registry.enroll(message):
            self.send(name, meet)

    def _ready(self, _: str, message: Ready) -> None:
        if self.registry.link(message.life, message.peer):
            self._begin()
        else:
            self.ignore()

    def _lose_life(self, life: str, reason: str) -> None:
        """Give *life* up, unless it is over: its instance may have been started again since."""
        if self.registry.alive(life):
            self._lose(instance_of(life), reason)
        else:
            self.ignore()

    def _lose(self, instance: str, reason: str) -> None:
        """Give *instance* up, and with it every request that still needs it, or its answer (`_recover`)."""
        self._moved = self.clock.now  # what depended on it goes on from here, and is given its time
        life, formed = self.registry.life(instance), instance in self.registry.side(instance).load
        until = self.registry.lose(instance)
        for name in self.job.ranks(instance):
            self.last_heard.pop(name, None)
        self.send(self.job.ranks(instance), Gone(life, reason, until))
        if formed:
            # before the others hear of it: they are asked about rooms that they forget then
            for request in tuple(self._rooms.values()):
                if request.decode == life or (request.prefill == life and (request.lost or not request.prefilled)):
                    self._recover(request, life, reason)
            for other in (self.registry.prefills if instance in self.job.decodes else self.registry.decodes).load:
                self.send(self.job.ranks(other), Gone(life, reason))
        self._begin()

    def _recover(self, request: RoutedRequest, life: str, reason: str) -> None:
        """Ask the other instance of *request*, which has lost *life*, whether it can start anew."""
        other = request.prefill if request.decode == life else request.decode
        if request.lost or request.prefilled or request.finished is not None or not self.registry.alive(other):
            self._fail(request, request.lost or reason)
            return
        request.lost, request.asked = reason, leader(other)
        self._moved = self.clock.now
        self._abort(request)
