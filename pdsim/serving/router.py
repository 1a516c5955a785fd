"""The router: sends each request to a prefill and a decode instance, and keeps account of all of them to the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simpy.events import Event

from pdsim.kv.mapping import dp_rank
from pdsim.kv.messages import Abort, Failed, Finished, Gone, Message, Ping, Pong, Prefilled, Ready, Stop, Submit
from pdsim.serving.job import Job, instance_of, leader
from pdsim.serving.member import Handler, Member
from pdsim.transfer import Program, Rank

__all__ = ["POLICIES", "program"]

POLICIES = ("least_tokens", "round_robin")
"""The instance with the fewest tokens outstanding, the first among equals; or one after the other."""


def program(rank: Rank, *, job: Mapping[str, Any], requests: Sequence[Sequence[float]]) -> Program:
    """Serve *requests* (arrival in seconds, input tokens, output tokens) and return what became of each.

    The value has ``start``, the time at which the first could have arrived, and for each request in order a row in
    ``rows``: prefill instance, decode instance, bytes, status, and the times of `Finished` or None.
    """
    return (yield from Router(rank, Job.from_plain(job), requests).run())


@dataclass(slots=True)
class _Request:
    """What the router knows of a request; its room is its place in the list plus one."""

    arrival: float
    input: int
    output: int
    prefill: str = ""
    decode: str = ""
    nbytes: int = 0
    prefilled: bool = False
    status: str = ""  # "" while it is under way
    finished: Finished | None = None


class _Side:
    """The instances of one side, and the tokens outstanding at each."""

    def __init__(self, instances: Sequence[str], dp: int, policy: str) -> None:
        self.load = dict.fromkeys(instances, 0)
        self._dp = dp
        self._group = {instance: number % dp for number, instance in enumerate(instances)}
        self._policy = policy
        self._turn = 0

    def choose(self, room: int) -> str | None:
        """Return the instance that is to have *room*, one of those of its `dp_rank`, or None if none is left."""
        group = dp_rank(room, self._dp)
        able = self.load if self._dp == 1 else [name for name in self.load if self._group[name] == group]
        if not able:
            return None
        if self._policy == "least_tokens":
            return min(able, key=self.load.__getitem__)
        self._turn += 1
        return list(able)[(self._turn - 1) % len(able)]

    def add(self, instance: str, tokens: int) -> None:
        """Count *tokens* more, or fewer, at *instance*, unless it is gone."""
        if instance in self.load:
            self.load[instance] += tokens


class Router(Member):
    """The rank that requests arrive at.

    It pings every rank; an instance with a rank that has been silent for `Job.deadline` seconds, or that a peer's
    engine reports lost, gets no more requests, and those that depend on it fail.  Should everybody answer and yet no
    request get anywhere, for that long and twice as long as the longest request can take, all that are open fail.
    """

    def __init__(self, rank: Rank, job: Job, requests: Sequence[Sequence[float]]) -> None:
        super().__init__(rank, job)
        self.requests = [_Request(arrival, int(given), int(wanted)) for arrival, given, wanted in requests]
        self.prefills = _Side(job.prefills, job.prefill_dp, job.policy)
        self.decodes = _Side(job.decodes, job.decode_dp, job.policy)
        instances = (*job.prefills, *job.decodes)
        self.last_heard = {name: self.clock.now for instance in instances for name in job.ranks(instance)}
        self.not_ready = set(instances)
        self.start = 0.0
        self._next = 0  # the request that arrives next
        given = max((request.input for request in self.requests), default=1)
        wanted = max((request.output for request in self.requests), default=1)
        self._patience = job.deadline + 2 * job.longest(given, wanted)
        self._moved = 0.0  # when a request last got somewhere
        self._open = len(self.requests)
        handlers: dict[type[Message], Handler] = {
            Ready: self._ready,
            Pong: lambda _, __: None,
            Prefilled: self._prefilled,
            Finished: self._finished,
            Failed: self._failed,
            Gone: lambda _, message: self._lose(message.instance, message.reason),
        }
        self.handlers |= handlers

    def report(self) -> dict[str, Any]:
        """Return the start and the rows."""
        return {"start": self.start, "rows": [_row(request) for request in self.requests]}

    def watch(self) -> Program:
        """Ping every rank three times a deadline, and give up instances that do not answer."""
        while not self.ended.triggered:
            self.send(self.last_heard, Ping())
            yield self.clock.timeout(self.job.deadline / 3)
            silent = [name for name, at in self.last_heard.items() if self.clock.now - at > self.job.deadline]
            for instance in dict.fromkeys(map(instance_of, silent)):
                self.guard(self._lose, instance, f"PeerLost: nothing from {instance} for {self.job.deadline} s")
            if self.clock.now - self._moved > self._patience:
                self.guard(self._give_up)

    def _give_up(self) -> None:
        for room, request in enumerate(self.requests[: self._next], start=1):
            if not request.status:
                self._close(request, f"Stalled: no request got anywhere for {self._patience:g} s")
                self._abort(room, request)

    def _handle(self, sender: str, payload: bytes) -> None:
        if sender in self.last_heard:
            self.last_heard[sender] = self.clock.now
        super()._handle(sender, payload)

    # --- requests ---

    def _ready(self, sender: str, _: Ready) -> None:
        self.not_ready.discard(instance_of(sender))
        self._begin()

    def _begin(self) -> None:
        """Let requests arrive from now on, once every instance is ready or lost."""
        if not self.not_ready and not self.start:
            self.start = self.clock.now
            self._arrive(None)

    def _arrive(self, _: Event | None) -> None:
        while self._next < len(self.requests):
            arrival = self.start + self.requests[self._next].arrival
            if arrival > self.clock.now:
                event = self.clock.at(arrival)
                assert event.callbacks is not None
                event.callbacks.append(self._arrive)
                return
            self._next += 1
            self._submit(self._next, self.requests[self._next - 1])
        self._stop_if_done()

    def _submit(self, room: int, request: _Request) -> None:
        prefill, decode = self.prefills.choose(room), self.decodes.choose(room)
        if prefill is None or decode is None:
            self._close(request, f"PeerLost: no {'decode' if prefill else 'prefill'} instance is left")
            return
        request.prefill, request.decode = prefill, decode
        self.prefills.add(prefill, request.input)
        self.decodes.add(decode, request.input + request.output)
        self._moved = self.clock.now
        message = Submit(room, request.input, request.output, prefill, decode)
        self.send(leader(decode), message)
        self.send(leader(prefill), message)

    def _prefilled(self, _: str, message: Prefilled) -> None:
        request = self.requests[message.room - 1]
        request.nbytes = message.nbytes
        self._moved = self.clock.now
        if not request.prefilled:
            request.prefilled = True
            self.prefills.add(request.prefill, -request.input)

    def _finished(self, _: str, message: Finished) -> None:
        request = self.requests[message.room - 1]
        if not request.status:
            request.finished = message
            self._close(request, "ok")

    def _failed(self, sender: str, message: Failed) -> None:
        request = self.requests[message.room - 1]
        if not request.status:
            self._close(request, message.reason)
            self._abort(message.room, request, but=sender)
        if message.lost:
            self._lose(message.lost, f"PeerLost: {message.lost} is gone")

    def _abort(self, room: int, request: _Request, but: str = "") -> None:
        for instance in (request.decode, request.prefill):
            if leader(instance) != but:
                self.send(leader(instance), Abort(room))

    def _close(self, request: _Request, status: str) -> None:
        """End *request* with *status*, for good."""
        request.status = status
        self._moved = self.clock.now
        self._open -= 1
        if request.prefill:
            if not request.prefilled:
                self.prefills.add(request.prefill, -request.input)
            self.decodes.add(request.decode, -request.input - request.output)
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        if not self._open and not self.ended.triggered:
            for instance in (*self.job.prefills, *self.job.decodes):
                self.send(self.job.ranks(instance), Stop())
            self.ended.succeed()

    # --- instances ---

    def _lose(self, instance: str, reason: str) -> None:
        """Give *instance* up, and with it every request that still needs it."""
        side = self.prefills if instance in self.prefills.load else self.decodes
        if side.load.pop(instance, None) is None:
            return
        for name in self.job.ranks(instance):
            del self.last_heard[name]
        for room, request in enumerate(self.requests[: self._next], start=1):
            needed = request.decode == instance or (request.prefill == instance and not request.prefilled)
            if needed and not request.status:
                self._close(request, reason)
                self._abort(room, request)
        if side is self.decodes:
            for prefill in self.prefills.load:
                self.send(self.job.ranks(prefill), Gone(instance, reason))
        self.not_ready.discard(instance)
        self._begin()


def _row(request: _Request) -> list[Any]:
    finished = request.finished
    times: list[float | None] = [None] * 8
    if finished is not None:
        times = [
            finished.reserved,
            finished.noticed,
            finished.started,
            finished.prefilled,
            finished.arrived,
            finished.polled,
            finished.joined,
            finished.finished,
        ]
    return [request.prefill, request.decode, request.nbytes, request.status, *times]
