"""The decode engine: pages first, then continuous batching, in events that are few because steps are in closed form."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simpy.events import Event

from pdsim.kv.consensus import Consensus
from pdsim.kv.messages import (
    Abort,
    Arrival,
    Arrived,
    Destination,
    Dropped,
    Failed,
    Fence,
    Fenced,
    Finished,
    Message,
    Quiet,
    Released,
    Reserve,
    Stop,
    Submit,
)
from pdsim.kv.pages import PagePool, Pages, SlotPool
from pdsim.kv.rooms import Blocked, Timers
from pdsim.kv.status import Status
from pdsim.serving.job import ROUTER, Job, index_of, leader, rank_name
from pdsim.serving.member import Handler
from pdsim.serving.reader import Worker
from pdsim.serving.steps import Stretch
from pdsim.transfer import Program, Rank

__all__ = ["program"]


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a decode instance until the router stops it."""
    member = Leader if index == 0 else Worker
    return (yield from member(rank, Job.from_plain(job), instance, index).run())


@dataclass(slots=True)
class _Room:
    """A request that has pages at the decode leader."""

    request: Submit
    reserved: float
    consensus: Consensus
    reason: str = ""  # why what arrived cannot be used
    stamps: Arrival | None = None
    arrived: float = 0.0
    polled: float = 0.0
    joined: float = 0.0
    left: bool = False  # nobody wants its tokens any more
    released: bool = False  # nothing of it is written any more
    quiet: int = 0  # ranks that have forgotten it

    @property
    def failed(self) -> bool:
        """Whether its pages are in quarantine, until it is proven that nothing of it moves."""
        return self.consensus.status is Status.FAILED


class Leader(Worker):
    """The rank that also schedules.

    Everything is looked at between steps and only there: requests that came, KV that arrived, requests that are done.
    So what happens within a step waits for its end, as in a real scheduler, and a step without news needs no event.

    A request is admitted, in order of arrival, when there are pages for its input and all of its output: nothing that
    runs can ever run out of pages, so nothing is evicted and no two requests can wait for each other.

    The pages of a room that fails before it is complete are in quarantine until its prefill leader says that nothing
    of it moves or, if that instance is gone, until every rank here has proof of it.
    """

    def __init__(self, rank: Rank, job: Job, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.followers = [rank_name(instance, other) for other in range(1, job.decode.size)]
        self.pages = PagePool(job.decode_pages)
        self.slots = SlotPool(job.slots)
        self.state = job.state_pool(self.receiver.layout)
        self._bases = [0.0] + [job.decode_time.step(batch) for batch in range(1, job.decode_batch + 1)]
        self._cost = job.decode_time.context
        self._queue: deque[Submit] = deque()  # no pages yet
        self._rooms: dict[int, _Room] = {}
        self._complete: list[_Room] = []  # arrived, not noticed
        self._waiting: deque[_Room] = deque()  # noticed, no place in the batch
        self._running: list[tuple[int, int]] = []  # a heap of (step after which it is done, room)
        self._left = False  # somebody has left
        self._context = 0  # tokens that the next step reads
        self._step = 0  # steps since the start
        self._stretch: Stretch | None = None  # since the last boundary that was an event
        self._due = math.inf  # the next such boundary, and its event
        self._due_event: Event | None = None
        self._fences: dict[int, tuple[list[int], set[int]]] = {}  # rooms, and ranks without proof
        self._fence_number = 0
        self._timers = Timers(rank.clock, job.waiting_timeout, self._expire)
        self._blocked = Blocked(rank.clock, job.deadline, self._wake)
        self._stopping = False
        handlers: dict[type[Message], Handler] = {
            Submit: self._submit,
            Arrived: lambda sender, message: self._count(index_of(sender), message, None),
            Abort: self._abort,
            Released: self._released,
            Quiet: lambda _, message: self.quiet(message),
            Fenced: lambda sender, message: self._fenced(index_of(sender), message),
        }
        self.handlers |= handlers

    def report(self) -> dict[str, int]:
        """Return the account of pages (those in use and in quarantine and free are all), and of what came too late."""
        held = sum(self._page_count(room) for room in self._rooms.values() if room.failed)
        return super().report() | {
            "pages": self.pages.pages,
            "peak_pages": self.pages.peak,
            "free_pages": self.pages.free,
            "used_pages": self.pages.used - held,
            "quarantined_pages": held,
            "open_rooms": len(self._rooms) + len(self._queue) + len(self.receiver) + len(self._timers),
            "ignored": self.ignored + self.receiver.ignored,
        }

    def arrived(self, message: Arrived, arrival: Arrival) -> None:
        """Count this rank's part of a room."""
        self._count(self.index, message, arrival)

    def quiet(self, message: Quiet) -> None:
        """Count a rank that has forgotten a room; with the last, give its pages back."""
        room = self._rooms.get(message.room)
        if room is None:
            self.ignore()
            return
        room.quiet += 1
        if room.quiet == self.job.decode.size:
            self._drop(message.room)
            self._wake()

    def fenced(self, message: Fenced) -> None:
        """Count this rank's proof."""
        self._fenced(self.index, message)

    def peer_gone(self, life: str) -> None:
        """Fail the rooms that *life* was to write, and wait for the proof that it writes no more."""
        rooms = [number for number, room in self._rooms.items() if room.request.prefill == life]
        rooms = [number for number in rooms if self._rooms[number].consensus.status is not Status.SUCCESS]
        for number in rooms:
            self._rooms[number].consensus.fail()
            self._timers.drop(number)
        self._begin_fence(life, rooms)

    def stop(self, sender: str, message: Stop) -> None:
        """End once no room is left; those that failed have `Job.deadline` seconds for the proof."""
        self._stopping = True
        lives = dict.fromkeys(room.request.prefill for room in self._rooms.values() if room.failed)
        for life in lives:  # its leader may end before it answers
            self._begin_fence(life, [n for n, room in self._rooms.items() if room.request.prefill == life])
        super().stop(sender, message)
        self._end_if_drained()

    def end(self, *_: Any) -> None:
        """As `Member.end`, and the followers too."""
        self.send(self.followers, Stop())
        super().end()

    def _end_if_drained(self) -> None:
        if self._stopping and not self._rooms:
            self.end()

    # --- what comes in ---

    def _submit(self, _: str, request: Submit) -> None:
        if request.decode != self.life:
            self.ignore()
            return
        self._queue.append(request)
        if len(self._queue) == 1:
            self._wake()

    def _count(self, rank: int, message: Arrived, arrival: Arrival | None) -> None:
        room = self._rooms.get(message.room)
        if room is None or room.consensus.over:
            self.ignore()
            return
        room.reason = room.reason or message.reason
        room.stamps = arrival or room.stamps
        if room.consensus.succeed(rank):
            room.arrived = self.clock.now
            self._timers.drop(message.room)
            self._complete.append(room)
            self._wake()

    def _abort(self, _: str, message: Abort) -> None:
        """Give a room up; one that is complete leaves at the end of the step, others have pages in quarantine."""
        room = self._rooms.get(message.room)
        queued = len(self._queue)
        if room is None:
            self._queue = deque(request for request in self._queue if request.room != message.room)
        elif room.consensus.status is Status.SUCCESS:
            room.left = self._left = True
            self._wake()
        else:
            self._fail(room)
        self.send(ROUTER, Dropped(message.room, len(self._queue) < queued))

    def _expire(self, number: int) -> None:
        """Fail a room that has waited too long."""
        reason = f"TransferTimeout: not all of it has arrived within {self.job.waiting_timeout:g} s"
        self.send(ROUTER, Failed(number, reason))
        self._fail(self._rooms[number])

    def _fail(self, room: _Room) -> None:
        if room.consensus.fail():
            number = room.request.room
            self._timers.drop(number)
            self.send(leader(room.request.prefill), Abort(number, room.request.prefill))
            self._wake()  # if all that is left is in quarantine, the next in the queue must not wait for ever

    def _released(self, _: str, message: Released) -> None:
        room = self._rooms.get(message.room)
        if room is None or room.consensus.status is Status.SUCCESS:
            self.ignore()
            return
        room.consensus.fail()
        self._release(message.room)

    def _release(self, number: int) -> None:
        """Have a failed room forgotten, of which nothing is written any more; `quiet` follows."""
        room = self._rooms.get(number)
        if room is not None and room.failed and not room.released:
            room.released = True
            self._timers.drop(number)
            self.send(self.followers, Abort(number))
            self.receiver.forget(number)

    def _drop(self, number: int) -> None:
        """Give the pages of a room back that never became complete."""
        del self._rooms[number]
        self.pages.release(number)
        self.slots.release(number)
        self.state.release(number)
        self._end_if_drained()

    def _begin_fence(self, life: str, rooms: list[int]) -> None:
        """Have *rooms* released once every rank has proof that nothing of *life* moves here."""
        self._fence_number += 1
        self._fences[self._fence_number] = rooms, set(range(self.job.decode.size))
        fence = Fence(self._fence_number, life)
        self.send(self.followers, fence)
        self._fence("", fence)
        self._wake()

    def _fenced(self, rank: int, message: Fenced) -> None:
        rooms, missing = self._fences[message.number]
        missing.discard(rank)
        if not missing:
            del self._fences[message.number]
            for number in rooms:
                self._release(number)

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
        if self._left:
            self._leave()
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

    def _leave(self) -> None:
        """Take those out of the batch whose tokens nobody wants any more; all of it is here, so nothing moves."""
        self._left = False
        for entry in [entry for entry in self._running if self._rooms[entry[1]].left]:
            self._running.remove(entry)
            end, number = entry
            request = self._rooms[number].request
            self._context -= request.input + request.output - (end - self._step)
            self._free(number)
        heapq.heapify(self._running)
        for room in [room for room in self._waiting if room.left]:
            self._waiting.remove(room)
            self._free(room.request.room)

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
                if not all(room.failed for room in self._rooms.values()):
                    self._blocked.clear()
                    return
                if not self._blocked.too_long():
                    return
                self._queue.popleft()
                reason = f"OutOfMemory: {self.pages.used} of {self.pages.pages} pages are in quarantine"
                self.send(ROUTER, Failed(request.room, reason))
                continue
            self._queue.popleft()
            self._blocked.clear()
            pages, state = rows
            slot = self.slots.allocate(request.room)
            assert slot is not None
            self._rooms[request.room] = _Room(request, self.clock.now, Consensus(self.job.decode.size))
            self._timers.add(request.room)
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

    def _page_count(self, room: _Room) -> int:
        return sum(count for _, count in self.pages.owned(room.request.room))

    def _free(self, number: int) -> None:
        """Give the pages of a room back that is complete, and so at rest."""
        del self._rooms[number]
        self.pages.release(number)
        self.state.release(number)
        self._end_if_drained()

    def _reject(self, room: _Room) -> None:
        self._free(room.request.room)
        self.send(ROUTER, Failed(room.request.room, room.reason))

    def _done(self, room: _Room) -> None:
        number, stamps = room.request.room, room.stamps
        assert stamps is not None
        self._free(number)
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
