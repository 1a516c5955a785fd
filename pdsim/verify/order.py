# SPDX-License-Identifier: Apache-2.0
"""What comes in order, on time and within its limits: a part of `pdsim.verify.invariants`.

Messages of one process to another are handled once, in order; requests begin in the order of their queue, where that
is the policy; batches and forwards keep their sizes; the times that a request reports are those of its transitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

from pdsim.kv.messages import Finished
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.prefill import PrefillRequest
from pdsim.serving.rank_process import Room
from pdsim.serving.router import Router
from pdsim.transfer import Batch, TransferRecord

_ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""

_LATE = 1.0
"""Seconds after which a message has been handled by a rank that lives, once nothing is held up any more."""

_STAMPS = {"arrived": "arrived", "ready": "polled", "running": "joined"}
"""By state of a room at decode: the time of `Finished` at which it comes to that first."""


class OrderChecker:
    """Calls *report* with an invariant and a text when a message is out of order, late or too large."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._members: dict[str, Any] = {}
        self._born: dict[str, float] = {}
        self._ended = Counter[str]()  # by rank: processes that have
        # by sender, its process and receiver: when messages were sent that are on their way, by the id of each:
        # equal ones are not the same object
        self._sent: dict[tuple[str, int, str], dict[int, tuple[float, bytes]]] = {}
        self._from: dict[tuple[str, str], list[dict[int, tuple[float, bytes]]]] = {}  # of a sender and a receiver
        self._queued: dict[tuple[int, int], int] = {}  # by program and room: its number in the queue
        self._times: dict[int, dict[str, float]] = {}  # by room at decode
        self._began: dict[int, PrefillRequest] = {}  # by room, at prefill
        self._bytes: dict[str, Counter[tuple[str, str, str]]] = {"read": Counter(), "landed": Counter()}

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        self._members[member.rank.name] = member
        self._born[member.rank.name] = member.clock.now
        member._on_message = partial(self._comes, member, member._on_message)
        if isinstance(member, Router) or member.scheduler is None:
            return
        scheduler: Any = member.scheduler
        in_order = member.job.engine.scheduler == "fcfs"
        if isinstance(scheduler, DecodeScheduler):
            watched: Any = scheduler
            watched.batch.join = partial(self._entered, member, scheduler.batch.join)
            if in_order:
                watched.queue = partial(self._queues, member, scheduler.queue)
                watched.handoff.start = partial(self._admits, member, scheduler.handoff.start)
        else:
            scheduler.iteration_seconds = partial(self._planned, member, scheduler.iteration_seconds)
            if in_order:
                scheduler._enqueue = partial(self._queues, member, scheduler._enqueue)
                scheduler._start = partial(self._starts, member, scheduler._start)

    def ended(self, rank: str) -> None:
        """Take note that *rank* ended: what it sends next, its next process sends."""
        self._ended[rank] += 1

    def sent(self, sender: str, receiver: str, payload: bytes, now: float) -> None:
        """Take note of a message."""
        key = sender, self._ended[sender], receiver
        sent = self._sent.get(key)
        if sent is None:
            sent = self._sent[key] = {}
            self._from.setdefault((sender, receiver), []).append(sent)
        sent[id(payload)] = now, payload

    def changes(self, room: Room, state: str, now: float) -> None:
        """Take note of when *room* comes to *state*."""
        if isinstance(room, PrefillRequest):
            self._began[room.request.room] = room
        else:
            self._times.setdefault(room.request.room, {}).setdefault(state, now)

    def finished(self, message: Finished) -> None:
        """Check that the times of *message* are those at which its room changed."""
        times, began = self._times.get(message.room, {}), self._began.get(message.room)
        for name in ("noticed", "started") if began is not None else ():
            if getattr(message, name) != getattr(began, name):
                said = f"{name} at {getattr(message, name):g} s"
                self._report("I14", f"room {message.room} is {said}, and was so at {getattr(began, name):g} s")
        for state, name in _STAMPS.items():
            if state in times and abs(times[state] - getattr(message, name)) > _ROUNDING:
                said = f"{name} at {getattr(message, name):g} s"
                self._report("I14", f"room {message.room} is {said}, and was {state} at {times[state]:g} s")

    def moved(self, verb: str, batch: Batch, label: str) -> None:
        """Count bytes that are *read* or have *landed*, of transfers of ranks that live."""
        ends = batch.source.owner, batch.target.owner
        moving = [one for name in ends for one in self._members[name].rank.endpoint.moving.values()]
        if all(one.transfer.label != label for one in moving):
            self._report("I3", f"{label} from {ends[0]} to {ends[1]} is {verb}, and neither has it under way")
        self._bytes[verb][label, batch.source.owner, batch.target.owner] += batch.nbytes

    def transferred(self, records: Iterable[TransferRecord]) -> None:
        """Check that what succeeded has been read and has landed."""
        good = Counter[tuple[str, str, str]]()
        for record in records:
            times = record.submitted, record.prepared, record.posted, record.completed, record.seen
            if any(one > other + _ROUNDING for one, other in pairwise(times)):
                self._report("I14", f"{record.label!r} from {record.source} to {record.target}: stages at {times}")
            if record.operation in ("write", "read") and record.status == "ok":
                good[record.label, record.source, record.target] += record.nbytes
        for key, nbytes in good.items():
            for verb, came in self._bytes.items():
                if came[key] < nbytes:
                    self._report("I14", f"{nbytes} bytes of {key} succeeded, {came[key]} were {verb}")

    def check(self, now: float) -> None:
        """Check that nothing is left that was sent to ranks that live, now that all is over."""
        for (sender, process, receiver), left in self._sent.items():
            member = self._members.get(receiver)
            if member is None or member.has_ended or member.clock.halted or self._ended[sender] != process:
                continue
            if late := [at for at, _ in left.values() if self._born[receiver] < at < now - _LATE]:
                self._report("I12", f"{receiver} never handled what {sender} sent at {late[0]:g} s")

    def _comes(self, member: Any, handle: Callable[[Any], None], message: Any) -> None:
        receiver, (sender, payload) = member.rank.name, message
        place = id(payload)
        sent = next((sent for sent in self._from.get((sender, receiver), ()) if place in sent), None)
        if sent is None:
            self._report("I1", f"{receiver} handles what {sender} has not sent, or twice: {payload[:40]!r}")
        else:
            while (first := next(iter(sent))) != place:
                if (at := sent.pop(first)[0]) > self._born[receiver]:
                    what = f"{receiver} handles a message of {sender} before one that was sent at {at:g} s"
                    self._report("I7", what)
            del sent[place]
        handle(message)

    def _entered(self, member: Any, join: Callable[..., None], *how: Any) -> None:
        join(*how)
        scheduler = member.scheduler
        many = len(scheduler.batch) + len(scheduler.preemption.recomputing)
        if many > member.job.decode_batch:
            self._report(
                "I15", f"{many} requests are in the batch of {member.rank.name}, of {member.job.decode_batch}"
            )

    def _planned(self, member: Any, seconds: Callable[..., float], pieces: list[tuple[int, int]]) -> float:
        tokens, job = sum(new for _, new in pieces), member.job
        if tokens > job.chunk or len(pieces) > job.prefill_batch or any(new <= 0 for _, new in pieces):
            self._report("I15", f"a forward of {member.rank.name} has {pieces}: {job.chunk} tokens may be in one")
        return seconds(pieces)

    def _queues(self, member: Any, queue: Callable[[Any], None], entry: Any) -> None:
        room = entry.room if hasattr(entry, "room") else entry.request.room
        self._queued.setdefault((id(member), room), len(self._queued))
        queue(entry)

    def _admits(self, member: Any, start: Callable[..., None], room: Any, *how: Any) -> None:
        rooms = [request.room for request in member.scheduler._queue]
        self._in_turn(member, room.request.room, rooms)
        start(room, *how)

    def _starts(self, member: Any, start: Callable[[Any], Any], room: Any) -> Any:
        started = start(room)
        if started is room:
            rooms = [each.request.room for each in member.scheduler._queue if not each.has_pages]
            self._in_turn(member, room.request.room, rooms)
        return started

    def _in_turn(self, member: Any, room: int, others: Iterable[int]) -> None:
        own = self._queued.get((id(member), room), -1)
        if before := [other for other in others if self._queued.get((id(member), other), own) < own]:
            self._report("I7", f"{member.rank.name} starts room {room} before room {before[0]}, which came first")
