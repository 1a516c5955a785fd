"""The decode engine: pages first, then continuous batching, in events that are few because steps are in closed form."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simpy.events import Event

from pdsim.kv.messages import (
    Abort,
    Arrival,
    Arrived,
    Ask,
    Destination,
    Failed,
    Finished,
    Message,
    Metadata,
    Quiet,
    Ready,
    Released,
    Reserve,
    Return,
    Submit,
)
from pdsim.kv.pages import PagePool, Pages, SlotPool
from pdsim.kv.receiver import KvReceiver
from pdsim.serving.job import ROUTER, Job, leader, rank_name
from pdsim.serving.member import Handler, Member
from pdsim.serving.steps import Stretch
from pdsim.transfer import Program, Rank

__all__ = ["program"]


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a decode instance until the router stops it."""
    member = Leader if index == 0 else Worker
    return (yield from member(rank, Job.from_plain(job), instance, index).run())


class Worker(Member):
    """A rank that receives its part of each request's KV and tells its leader."""

    def __init__(self, rank: Rank, job: Job, instance: str, index: int) -> None:
        super().__init__(rank, job)
        self.instance = instance
        self.receiver = KvReceiver(
            rank,
            job.decode_layout(index),
            instance,
            index,
            job.rank_map,
            self.arrived,
            self.quiet,
            job.handoff,
            job.staging,
        )
        self.handlers |= {
            Reserve: self._reserve,
            Abort: self._forget,
            Arrival: lambda _, message: self.receiver.arrive(message),
            Metadata: lambda _, message: self.receiver.store(message),
        }
        if self.receiver.landing is not None:
            landing = self.receiver.landing
            self.handlers |= {Ask: landing.ask, Return: lambda _, message: landing.give_back(message)}

    def run(self) -> Program:
        """As `Member.run`, with the pool made known to all ranks that will write to it."""
        registration = self.receiver.register()
        for prefill in self.job.prefills:
            self.send([rank_name(prefill, writer) for writer in self.receiver.writers], registration)
        self.ready()
        self.clock.process(self._notice())
        return (yield from super().run())

    def ready(self) -> None:
        """Tell the leader that the prefill ranks have been written to."""
        self.send(leader(self.instance), Ready())

    def arrived(self, message: Arrived, _: Arrival) -> None:
        """Tell the leader that a room is complete here."""
        self.send(leader(self.instance), message)

    def quiet(self, message: Quiet) -> None:
        """Tell the leader that nothing of a forgotten room is copied here any more."""
        self.send(leader(self.instance), message)

    def _notice(self) -> Program:
        notifications, notice = self.rank.endpoint.notifications, self.receiver.notice
        try:
            while not self.ended.triggered:
                notice((yield notifications.get()))
        except Exception as error:
            self.fail(error)

    def _reserve(self, _: str, message: Reserve) -> None:
        self.receiver.reserve(message)

    def _forget(self, _: str, message: Abort) -> None:
        self.receiver.forget(message.room)


@dataclass(slots=True)
class _Room:
    """A request that has pages at the decode leader."""

    request: Submit
    reserved: float
    ranks: int = 0  # whose part has arrived
    reason: str = ""  # why what arrived cannot be used
    stamps: Arrival | None = None
    arrived: float = 0.0
    polled: float = 0.0
    joined: float = 0.0
    aborted: bool = False
    released: bool = False  # nothing of it is written any more
    quiet: int = 0  # ranks that have forgotten it


class Leader(Worker):
    """The rank that also schedules.

    Everything is looked at between steps and only there: requests that came, KV that arrived, requests that are done.
    So what happens within a step waits for its end, as in a real scheduler, and a step without news needs no event.

    A request is admitted, in order of arrival, when there are pages for its input and all of its output: nothing that
    runs can ever run out of pages, so nothing is evicted and no two requests can wait for each other.
    """

    def __init__(self, rank: Rank, job: Job, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.followers = [rank_name(instance, other) for other in range(1, job.decode.size)]
        self.pages = PagePool(job.decode_pages)
        self.slots = SlotPool(job.slots)
        self.state = job.state_pool(self.receiver.layout)
        self._bases = [0.0] + [job.decode_time.step(batch) for batch in range(1, job.decode_batch + 1)]
        self._cost = job.decode_time.context
        self._not_ready = job.decode.size
        self._queue: deque[Submit] = deque()  # no pages yet
        self._rooms: dict[int, _Room] = {}
        self._complete: list[_Room] = []  # arrived, not noticed
        self._waiting: deque[_Room] = deque()  # noticed, no place in the batch
        self._running: list[tuple[int, int]] = []  # a heap of (step after which it is done, room)
        self._context = 0  # tokens that the next step reads
        self._step = 0  # steps since the start
        self._stretch: Stretch | None = None  # since the last boundary that was an event
        self._due = math.inf  # the next such boundary, and its event
        self._due_event: Event | None = None
        handlers: dict[type[Message], Handler] = {
            Ready: lambda _, __: self.ready(),
            Submit: self._submit,
            Arrived: lambda _, message: self._count(message, None),
            Abort: self._abort,
            Released: self._released,
            Quiet: lambda _, message: self.quiet(message),
        }
        self.handlers |= handlers

    def report(self) -> dict[str, int]:
        """Return how many pages there are, were used at most, and are held to the end: in quarantine."""
        return {"pages": self.pages.pages, "peak_pages": self.pages.peak, "quarantined_pages": self.pages.used}

    def ready(self) -> None:
        """Tell the router, once all ranks of the instance are ready."""
        self._not_ready -= 1
        if not self._not_ready:
            self.send(ROUTER, Ready())

    def arrived(self, message: Arrived, arrival: Arrival) -> None:
        """Count this rank's part of a room."""
        self._count(message, arrival)

    def quiet(self, message: Quiet) -> None:
        """Count a rank that has forgotten a room; with the last, give its pages back."""
        room = self._rooms.get(message.room)
        if room is None:
            return
        room.quiet += 1
        if room.quiet == self.job.decode.size:
            self._drop(message.room)
            self._wake()

    # --- what comes in ---

    def _submit(self, _: str, request: Submit) -> None:
        self._queue.append(request)
        if len(self._queue) == 1:
            self._wake()

    def _count(self, message: Arrived, arrival: Arrival | None) -> None:
        room = self._rooms.get(message.room)
        if room is None or room.released:
            return
        room.ranks += 1
        room.reason = room.reason or message.reason
        room.stamps = arrival or room.stamps
        if room.ranks == self.job.decode.size:
            room.arrived = self.clock.now
            self._complete.append(room)
            self._wake()

    def _abort(self, _: str, message: Abort) -> None:
        """Give a room up, unless it is complete; its pages stay until the prefill side says that they are at rest."""
        room = self._rooms.get(message.room)
        if room is None:
            self._queue = deque(request for request in self._queue if request.room != message.room)
        elif room.ranks < self.job.decode.size and not room.aborted:
            room.aborted = True
            self.send(leader(room.request.prefill), Abort(message.room))
            self._wake()  # if all that is left is in quarantine, nobody waits for pages any more

    def _released(self, _: str, message: Released) -> None:
        room = self._rooms.get(message.room)
        if room is not None and room.ranks < self.job.decode.size and not room.released:
            room.released = True
            self.send(self.followers, Abort(message.room))
            self.receiver.forget(message.room)

    def _drop(self, number: int) -> None:
        """Give the pages of a room back that never became complete."""
        del self._rooms[number]
        self.pages.release(number)
        self.slots.release(number)
        self.state.release(number)

    # --- the scheduler ---

    def _wake(self) -> None:
        """See to what has come at the end of the current step, or at once if there is none."""
        if self._stretch is None:
            self._set(self.clock.now)
        else:
            self._set(self._stretch.end(self._stretch.steps_until(self.clock.now)))

    def _set(self, time: float) -> None:
        """Make *time* the next boundary, unless an earlier one is set."""
        if self._due <= time:
            return
        self._due = time
        event = self._due_event = self.clock.at(time)
        assert event.callbacks is not None
        event.callbacks.append(self._boundary)

    def _boundary(self, event: Event) -> None:
        if event is self._due_event and not self.ended.triggered:
            due, self._due = self._due, math.inf
            self.guard(self._between_steps, due)

    def _between_steps(self, due: float) -> None:
        self._advance(due)
        self._finish()
        self._poll()
        self._join()
        self._admit()
        batch = len(self._running)
        if not batch:
            self._stretch = None
            return
        self._stretch = Stretch(self.clock.now, self._bases[batch], self._cost, batch, self._context)
        self._set(self._stretch.end(self._running[0][0] - self._step))

    def _advance(self, due: float) -> None:
        """Count the steps since the last boundary that was an event.  A wall clock may be late: *due* tells which."""
        if self._stretch is not None:
            steps = self._stretch.steps_until(due)
            self._step += steps
            self._context += steps * len(self._running)

    def _finish(self) -> None:
        while self._running and self._running[0][0] <= self._step:
            _, number = heapq.heappop(self._running)
            room = self._rooms[number]
            self._context -= room.request.input + room.request.output
            self._done(room)

    def _poll(self) -> None:
        """Notice what has arrived: the first tokens are out, with the metadata."""
        for room in self._complete:
            room.polled = self.clock.now
            self.slots.release(room.request.room)
            if room.reason:
                self._reject(room)
            else:
                self._waiting.append(room)
        self._complete.clear()

    def _join(self) -> None:
        while self._waiting and len(self._running) < self.job.decode_batch:
            room = self._waiting.popleft()
            room.joined = self.clock.now
            request = room.request
            if request.output == 1:
                self._done(room)
            else:
                heapq.heappush(self._running, (self._step + request.output - 1, request.room))
                self._context += request.input + 1

    def _admit(self) -> None:
        while self._queue and self.slots.free:
            request = self._queue[0]
            rows = self._allocate(request)
            if rows is None:
                if all(room.aborted for room in self._rooms.values()):  # nobody will ever give pages back
                    self._queue.popleft()
                    reason = f"OutOfMemory: {self.pages.used} of {self.pages.pages} pages are in quarantine"
                    self.send(ROUTER, Failed(request.room, reason))
                    continue
                return
            self._queue.popleft()
            pages, state = rows
            slot = self.slots.allocate(request.room)
            assert slot is not None
            self._rooms[request.room] = _Room(request, self.clock.now)
            if self.rank.device.holds_bytes:
                reserve = Reserve(request.room, request.input, pages, slot, state)
                self.send(self.followers, reserve)
                self.receiver.reserve(reserve)
            self.send(leader(request.prefill), Destination(request.room, pages, slot, state))

    def _allocate(self, request: Submit) -> tuple[Pages, tuple[Pages, ...]] | None:
        """Return the pages and the rows of state that *request* gets, for its input and all of its output."""
        tokens = request.input + request.output
        pages = self.pages.allocate(request.room, self.job.page_count(tokens))
        if pages is None:
            return None
        state = self.state.allocate(request.room, request.input, tokens, pages)
        if state is None:
            self.pages.release(request.room)
            return None
        return pages, state

    def _reject(self, room: _Room) -> None:
        del self._rooms[room.request.room]
        self.pages.release(room.request.room)
        self.state.release(room.request.room)
        self.send(ROUTER, Failed(room.request.room, room.reason))

    def _done(self, room: _Room) -> None:
        number, stamps = room.request.room, room.stamps
        assert stamps is not None
        del self._rooms[number]
        self.pages.release(number)
        self.state.release(number)
        message = Finished(
            number,
            room.reserved,
            stamps.noticed,
            stamps.started,
            stamps.ended,
            room.arrived,
            room.polled,
            room.joined,
            self.clock.now,
        )
        self.send(ROUTER, message)
