"""The decode engine: pages first, then continuous batching, in events that are few because steps are in closed form."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from simpy.events import Event

from pdsim.job import Rank
from pdsim.kv.consensus import Consensus
from pdsim.kv.messages import (
    Abort,
    Destination,
    Dropped,
    Failed,
    Finished,
    Locate,
    Located,
    Reserve,
    Submit,
)
from pdsim.kv.rooms import Blocked
from pdsim.kv.status import Status
from pdsim.serving.decode.block_manager import BlockManager, DecodeRequest
from pdsim.serving.decode.room_lookup import PATIENCE, RoomLookup
from pdsim.serving.decode.steps import RunningBatch
from pdsim.serving.decode.worker import DecodeWorker
from pdsim.serving.deployment import ROUTER, Deployment, leader
from pdsim.transfer import Program

__all__ = ["program"]


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a decode instance until the router stops it."""
    member = DecodeScheduler if index == 0 else DecodeWorker
    return (yield from member(rank, Deployment.from_plain(job), instance, index).run())


class DecodeScheduler(BlockManager):
    """The rank that also schedules.

    Everything is looked at between steps and only there: requests that came, KV that arrived, requests that are done.
    So what happens within a step waits for its end, as in a real scheduler, and a step without news needs no event.

    A request is admitted, in order of arrival, when there are pages for its input and all of its output: nothing that
    runs can ever run out of pages, so nothing is evicted and no two requests can wait for each other.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self._queue: deque[Submit] = deque()  # no pages yet
        self._waiting: deque[DecodeRequest] = deque()  # noticed, no place in the batch
        self._batch = RunningBatch(job.decode_time, job.decode_batch)
        self._left = False  # somebody has left
        self._due = math.inf  # the next boundary between steps that is looked at, and its event
        self._due_event: Event | None = None
        self._blocked = Blocked(rank.clock, job.deadline, self._wake)
        self._lookup = RoomLookup(rank.clock, self._ask_where, self._enqueue, self._unknown)
        self.handlers |= {
            Submit: self._submit,
            Located: self._located,
            Abort: self._abort,
        }

    def report(self) -> dict[str, int]:
        """As `BlockManager.report`, with the requests that wait for pages."""
        found = super().report()
        return found | {"open_rooms": found["open_rooms"] + len(self._queue) + len(self._lookup)}

    # --- what comes in ---

    def _submit(self, _: str, request: Submit) -> None:
        if request.decode != self.life:
            self.ignore()
            return
        if request.prefill:
            self._enqueue(request)
        else:
            self._lookup.add(request)

    def _enqueue(self, request: Submit) -> None:
        self._queue.append(request)
        if len(self._queue) == 1:
            self._wake()

    def _ask_where(self, rooms: tuple[int, ...]) -> None:
        self.send(ROUTER, Locate(rooms, self.life))

    def _located(self, _: str, message: Located) -> None:
        if message.to == self.life:
            self._lookup.answer(message.lives)
        else:
            self.ignore()

    def _unknown(self, request: Submit) -> None:
        """Fail a request that no prefill instance says to have."""
        reason = f"TransferTimeout: no prefill instance has said within {PATIENCE:g} s that it has it"
        self.send(ROUTER, Failed(request.room, reason))

    def _abort(self, _: str, message: Abort) -> None:
        """Give a room up; one that is complete leaves at the end of the step, others have pages in quarantine."""
        room = self._rooms.get(message.room)
        queued = len(self._queue) + len(self._lookup)
        if room is None:
            self._lookup.drop(message.room)
            self._queue = deque(request for request in self._queue if request.room != message.room)
        elif room.consensus.status is Status.SUCCESS:
            room.left = self._left = True
            self._wake()
        else:
            self._fail(room)
        self.send(ROUTER, Dropped(message.room, len(self._queue) + len(self._lookup) < queued))

    # --- the scheduler ---

    def _wake(self) -> None:
        """See to what has come at the end of the current step, or at once if there is none."""
        self._set(self._batch.boundary(self.clock.now))

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
        self._batch.advance(due)
        for number in self._batch.finished():
            self._done(self._rooms[number])
        self._poll()
        if self._left:
            self._leave()
        self._join()
        self._admit()
        self._set(self._batch.begin(self.clock.now))

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
        for number in self._batch.leave(lambda number: self._rooms[number].left):
            self._free(number)
        for room in [room for room in self._waiting if room.left]:
            self._waiting.remove(room)
            self._free(room.request.room)

    def _join(self) -> None:
        while self._waiting and len(self._batch) < self._batch.limit:
            room = self._waiting.popleft()
            room.joined = self.clock.now
            request = room.request
            if request.output == 1:
                self._done(room)
            else:
                self._batch.join(request.room, request.input, request.output)

    def _admit(self) -> None:
        while self._queue and self.slots.free:
            request = self._queue[0]
            held = self.held(request)
            rows = self._allocate(request, held)
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
            self._rooms[request.room] = DecodeRequest(request, self.clock.now, Consensus(self.job.decode.size))
            self._timers.add(request.room)
            if self.rank.device.holds_bytes:
                reserve = Reserve(self.life, request.room, request.input, pages, slot, state, held)
                self.send(self.followers, reserve)
                self.receiver.reserve(reserve)
            self.send(leader(request.prefill), Destination(request.prefill, request.room, pages, slot, state, held))

    def _reject(self, room: DecodeRequest) -> None:
        self._free(room.request.room)
        self.send(ROUTER, Failed(room.request.room, room.reason))

    def _done(self, room: DecodeRequest) -> None:
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
