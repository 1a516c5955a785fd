# SPDX-License-Identifier: Apache-2.0
"""The router: sends each request to a prefill and a decode instance, and keeps account of all of them to the end.

It is also where ranks enrol and where it is decided that an instance is lost (`pdsim.serving.bootstrap_server`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from pdsim.core.native_class import mypyc_attr
from pdsim.kv.messages import (
    Abort,
    Busy,
    Details,
    Dropped,
    Failed,
    Finished,
    KvMessage,
    Lent,
    Prefilled,
    PullRequest,
    Stop,
    Streamed,
    Took,
)
from pdsim.serving.arrivals import Arrivals
from pdsim.serving.bootstrap_server import BootstrapServer
from pdsim.serving.deployment import ROUTER, Deployment, instance_of, leader
from pdsim.serving.outstanding import OutstandingTokens
from pdsim.serving.rank_process import Handler
from pdsim.serving.request_log import RequestLog
from pdsim.serving.routed_requests import ComingRequests, RoutedRequest
from pdsim.serving.scheduler_host import SchedulerHost
from pdsim.serving.seams import handoff_of
from pdsim.serving.settings import HostCosts
from pdsim.transfer import Program
from pdsim.transfer.job import Rank

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

    *job* is `Deployment.plain`.  *leaves* are users who give up: the number of a request, and how many seconds
    after its arrival.  *blocks* are the hashes of each prompt's blocks, where prefixes are cached.  *after* is,
    of each, the number of the request whose end its user waits for, -1 for none; its arrival is then counted from
    there.  *priorities* are for schedulers that look at them.

    The value has ``start``, when the first could have arrived; ``rows``, a `RequestLog` of prefill, decode,
    bytes, status, and the times of `Finished` or None; how many messages were ``ignored``, and ``open_rooms``,
    which is 0 unless the job was stopped; and with *after* the ``arrivals`` as they turned out.
    """
    return (yield from Router(rank, Deployment.from_plain(job), requests, leaves, blocks, after, priorities).run())


@mypyc_attr(allow_interpreted_subclasses=True)
class Router(BootstrapServer):
    """The rank that requests arrive at.

    When they do is `Arrivals`', which instances there are `InstanceRegistry`'s, how busy each is
    `OutstandingTokens`'.  An instance that is lost gets no more requests.  A request that depends on it fails,
    unless the leader of its other instance says that none of its bytes can have moved: then it is sent out anew,
    in another room, at most `Deployment.retries` times.

    If everybody answers, none with `Busy`, and no request progresses for as long as a loss can take to be noticed
    and twice as long as the longest request can take, all open requests fail.  A rank that owes the answer to a ping
    is waited for: it is heard, or lost, within a deadline.

    Life of a request: arrives; sent out, in a room of its own; answered (where decode pulls); prefilled;
    finished; closed, with its status, once both of the last have come.  A user who leaves, a failure that an
    instance reports and a loss close it early, and both instances are told to give it up.

    A subclass may have requests arrive otherwise, by its own *arrivals_type*.
    """

    arrivals_type: ClassVar[type[Arrivals]] = Arrivals

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
        coming = ComingRequests(requests, leaves, blocks, priorities)
        self.requests: Sequence[RoutedRequest] = coming
        self.log = RequestLog(len(requests), rank.journal)
        self.arrivals = self.arrivals_type(self, self.requests, after, self._come, self._stop_if_done)
        self.tokens = OutstandingTokens(self.registry, job.output_known)
        self.serial = handoff_of(job.engine).serial
        self.host = SchedulerHost(HostCosts(arrive=job.engine.proxy), job.engine.variation, job.seed, ROUTER)
        self.start = 0.0
        # a rank that dies just after it answered is found silent a deadline and up to one ping later
        self._patience = job.deadline * 4 / 3 + 2 * job.longest(*coming.most())
        self._moved = 0.0  # when a request last got somewhere, or a write of one
        rank.counts(lambda: self.tokens.generated[0], len(self.requests))
        self._rooms: dict[int, RoutedRequest] = {}  # those that are under way
        self._born = self.clock.now
        handlers: dict[type[KvMessage], Handler] = {
            Busy: self._busy,
            Took: self._took,
            Prefilled: self._prefilled,
            Lent: self._lent,
            Finished: self._finished,
            Streamed: self._finished,
            Failed: self._failed,
            Dropped: self._dropped,
        }
        self.handlers |= handlers

    def report(self) -> dict[str, Any]:
        """Return the start, the rows, and how many messages came too late."""
        for request in self._rooms.values():
            self._note(request)
        found: dict[str, Any] = {
            "start": self.start,
            "rows": self.log,
            "ignored": self.ignored,
            "open_rooms": len(self._rooms),
        }
        return found if self.arrivals.times is None else found | {"arrivals": self.arrivals.times}

    def look(self, asked: float) -> None:
        """Let requests come if all that are missing are lost, and fail the open ones if none has progressed."""
        self.guard(self.begin)
        if self._owed(asked):
            self._moved = self.clock.now
        if self.clock.now - self._moved > self._patience:
            for request in tuple(self._rooms.values()):
                reason = f"Stalled: no request and no write got anywhere for {self._patience:g} s"
                self.guard(self._fail, request, reason)

    def _busy(self, _: str, __: Busy) -> None:
        self._moved = self.clock.now

    # --- requests ---

    def begin(self) -> None:
        """Let requests arrive from now on, once all instances are connected or lost, or the deadline has passed."""
        if not self.start and (self.registry.connected or self.clock.now - self._born > self.job.deadline):
            self.start = self.log.start = self.clock.now
            self.arrivals.begin(self.start)

    def _come(self, request: RoutedRequest) -> None:
        """Have *request* arrive now, and its user leave when its patience ends."""
        if request.patience is not None:
            self.clock.call_at(self.start + request.arrival + request.patience, self._leave, request)
        self._submit(request)

    def _submit(self, request: RoutedRequest) -> None:
        """Choose a pair of instances for *request* and send it there, in a room of its own for each try.

        It fails at once if no pair is left, and is shed if the chosen prefill instance has `Deployment.shed`
        tokens outstanding or more, unless it has a priority.
        """
        request.room = 1 + request.number + request.tries * len(self.requests)
        self._rooms[request.room] = request
        pair = self.registry.choose(request.room, request.input, request.blocks)
        if pair is None:
            self._close(request, f"PeerLost: no {self.registry.missing()} instance is left")
            return
        waiting = self.registry.prefills.load[instance_of(pair[0])]
        if self.job.shed and waiting >= self.job.shed and not request.priority:
            self._close(request, f"Shed: {waiting} tokens outstanding at {instance_of(pair[0])}")
            return
        self._send_out(request, *pair)

    def _send_out(self, request: RoutedRequest, prefill: str, decode: str) -> None:
        """Have these two lives serve *request*."""
        request.prefill, request.decode = prefill, decode
        request.tries += 1
        self.tokens.count(request)
        self._moved = self.clock.now
        self._pass_on(request, self._send_on)

    def _pass_on(self, request: RoutedRequest, send: Callable[[RoutedRequest], None]) -> None:
        """Call *send* with *request* once the router has worked on it, unless that has ended meanwhile."""
        seconds, room = self.host.arrive(request.input, self.clock.now), request.room

        def passed(_: Any) -> None:
            if self._rooms.get(room) is request and not request.lost:
                send(request)

        if seconds:
            self.clock.call_at(self.clock.now + seconds, passed, None)
        else:
            send(request)

    def _send_on(self, request: RoutedRequest) -> None:
        """Send *request* to the leaders of both its instances, or to prefill alone where decode comes after it."""
        message = request.submission()
        if request.blocks or request.priority:
            details = Details(request.room, request.blocks, request.priority)
            self.send([leader(life) for life in (request.prefill, request.decode)], details)
        # where decode has to ask, it is told as little as a router knows that leaves the choice to the engine
        if not self.serial:
            self.send(leader(request.decode), replace(message, prefill="") if self.job.query_dp else message)
        self.send(leader(request.prefill), message)

    def _took(self, _: str, message: Took) -> None:
        """Let decode find a room at *life* of a prefill instance, which has chosen it by itself."""
        if message.room in self._rooms:
            self.directory.took(message.room, message.life)
        else:
            self.ignore()

    def _lent(self, _: str, message: Lent) -> None:
        """Have decode pull what prefill has computed."""
        request = self._find(message.room)
        if request is None or request.lost or request.answered:
            return
        self._moved = self.clock.now
        self.tokens.answered(request)
        pull = PullRequest(request.submission(), message)
        self._pass_on(request, lambda request: self.send(leader(request.decode), pull))

    def _prefilled(self, _: str, message: Prefilled) -> None:
        """Take note that all KV of a request is written, or collected: its bytes are known."""
        request = self._find(message.room)
        if request is None:
            return
        request.nbytes = message.nbytes
        self._moved = self.clock.now
        self.tokens.prefilled(request)
        if request.finished is not None:
            self._close(request, "ok")

    def _finished(self, _: str, message: Finished) -> None:
        """Take note that a request has all its tokens; it is closed now, or when its bytes are known."""
        request = self._find(message.room)
        if request is not None:
            request.finished = message
            self._moved = self.clock.now
            if request.prefilled or request.lost:  # else its account of bytes is on the way
                self._close(request, "ok")

    def _failed(self, sender: str, message: Failed) -> None:
        """Fail the request that an instance cannot serve, and lose the life that it says is gone."""
        request = self._find(message.room)
        if request is not None:
            self._fail(request, message.reason, but=sender)
        if message.lost:
            self.lose_life(message.lost, f"PeerLost: {message.lost} is gone")

    def _dropped(self, sender: str, message: Dropped) -> None:
        """Hear whether a request that lost one instance can start anew, from the leader of the other."""
        request = self._rooms.get(message.room)
        if request is None or sender != request.asked:
            return
        if not message.untouched or request.tries > self.job.retries:
            self._close(request, request.lost)
            return
        self.tokens.uncount(request)
        del self._rooms[request.room]
        self.directory.forget(request.room)
        request.lost = request.asked = ""
        request.answered = request.prefilled = False  # pages that nobody has read are collected, and told of, too
        self._submit(request)

    def _leave(self, request: RoutedRequest) -> None:
        """Have the user of *request* leave, unless it has its answer."""
        if not request.status and request.finished is None and not self.has_ended:
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
        """Have both instances of *request* give it up, but for the leader *but*, which has done so."""
        for life in (request.decode, request.prefill):
            if life and leader(life) != but:
                self.send(leader(life), Abort(request.room))

    def _close(self, request: RoutedRequest, status: str) -> None:
        """End *request* with *status*, for good."""
        request.status = status
        if status == "ok":
            self.tokens.done(request)
        self._moved = self.clock.now
        self._note(request)
        del self._rooms[request.room]
        self.directory.forget(request.room)
        self.tokens.uncount(request)
        self.arrivals.follow(request)
        self._stop_if_done()

    def _note(self, request: RoutedRequest) -> None:
        """Keep what became of *request*, if it is one of those to serve."""
        if request.number < len(self.log):
            prefill, decode = instance_of(request.prefill), instance_of(request.decode)
            self.log.put(request.number, prefill, decode, request.nbytes, request.status, request.finished)

    def _stop_if_done(self) -> None:
        """Stop all ranks, and end, once no request is under way and none can arrive."""
        if not self._rooms and self.arrivals.over and not self.has_ended:
            for instance in self.instances:
                self.send(self.job.ranks(instance), Stop())
            self.end()

    # --- instances ---

    def give_up(self, life: str, reason: str, formed: bool) -> None:
        """End every request that still needs *life*, or its answer, or have it start anew (`_recover`)."""
        self._moved = self.clock.now  # what depended on it goes on from here, and is given its time
        for request in tuple(self._rooms.values()) if formed else ():
            if request.decode == life or (request.prefill == life and (request.lost or not request.prefilled)):
                self._recover(request, life, reason)

    def _recover(self, request: RoutedRequest, life: str, reason: str) -> None:
        """Ask the other instance of *request*, which has lost *life*, whether it can start anew."""
        other = request.prefill if request.decode == life else request.decode
        if request.lost or request.prefilled or request.finished is not None or not self.registry.alive(other):
            self._fail(request, request.lost or reason)
            return
        request.lost, request.asked = reason, leader(other)
        self._moved = self.clock.now
        self._abort(request)
