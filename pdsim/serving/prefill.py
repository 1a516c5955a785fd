"""The prefill engine: continuous batching with chunked prefill, and the handoff of each chunk as it is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simpy.events import Event

from pdsim.errors import PdsimError, PeerLost
from pdsim.kv.messages import (
    Abort,
    Chunk,
    Destination,
    Failed,
    Forward,
    Gone,
    Grant,
    Message,
    Prefilled,
    Ready,
    Register,
    Released,
    Sent,
    Settled,
    Submit,
)
from pdsim.kv.pages import PagePool, SlotPool
from pdsim.kv.plan import Runs, cut, pair
from pdsim.kv.sender import KvSender
from pdsim.serving.job import ROUTER, Job, leader, rank_name
from pdsim.serving.member import Handler, Member
from pdsim.transfer import Program, Rank

__all__ = ["program"]


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a prefill instance until the router stops it."""
    member = Leader if index == 0 else Worker
    return (yield from member(rank, Job.from_plain(job), instance, index).run())


class Worker(Member):
    """A rank that computes what its leader says, and writes what it computed."""

    def __init__(self, rank: Rank, job: Job, instance: str, index: int) -> None:
        super().__init__(rank, job)
        self.instance = instance
        self.sender = KvSender(
            rank,
            job.prefill_layout(index),
            job.prefill,
            index,
            self.conclude,
            job.all_cp_ranks,
            job.handoff,
            job.staging,
        )
        self._missing = set(job.decodes)  # instances not connected yet
        self.handlers |= {
            Register: self._register,
            Gone: self._gone,
            Forward: self._forward,
            Grant: self.sender.grant,
            Abort: self._abort,
        }

    def run(self) -> Program:
        """As `Member.run`; a rank that no decode rank needs is ready at once."""
        for instance in self.job.decodes:
            self._found(instance)
        return (yield from super().run())

    def ready(self) -> None:
        """Tell the leader that all decode ranks are connected."""
        self.send(leader(self.instance), Ready())

    def conclude(self, message: Sent | Settled) -> None:
        """Tell the leader how a room ended here."""
        self.send(leader(self.instance), message)

    def compute(self, message: Forward) -> Event:
        """Occupy the device with a forward, then write its chunks.  The event succeeds when the forward ends."""
        self.sender.expect(message.chunks)
        forward = self.rank.device.compute(message.seconds)
        assert forward.callbacks is not None
        forward.callbacks.append(lambda _: self.guard(self._write, message))
        return forward

    def _write(self, message: Forward) -> None:
        for chunk in message.chunks:
            self.sender.send(chunk)
        self.sender.poll()

    def _register(self, _: str, message: Register) -> None:
        try:
            self.sender.connect(message)
        except PeerLost as error:
            self.send(ROUTER, Gone(message.instance, f"PeerLost: {error}"))
            return
        self._found(message.instance)

    def _gone(self, _: str, message: Gone) -> None:
        self._found(message.instance, gone=True)

    def _found(self, instance: str, gone: bool = False) -> None:
        """Be ready once every instance is connected, or known to be gone."""
        if instance in self._missing and (gone or self.sender.connected(instance, self.job.decode)):
            self._missing.remove(instance)
            if not self._missing:
                self.ready()

    def _forward(self, _: str, message: Forward) -> None:
        self.compute(message)

    def _abort(self, _: str, message: Abort) -> None:
        self.sender.abort(message.room)


@dataclass(slots=True)
class _Room:
    """A request at the prefill leader."""

    request: Submit
    destination: Destination | None = None
    noticed: float = 0.0
    started: float = 0.0
    runs: Runs = ()  # of the whole request, once it has pages
    state: tuple[Runs, ...] = ()  # of each component
    done: int = 0  # tokens that a forward has covered or covers now
    chunks: int = 0
    source_slot: int = -1
    failed: bool = False
    over: int = 0  # ranks that have sent all, or settled
    nbytes: int = 0


class Leader(Worker):
    """The rank that also schedules.

    A request waits for its `Destination` without being in the way of others, then in order of those; each iteration
    takes up to `chunk` tokens, at most one request of which is left incomplete and goes first in the next.  A request
    takes pages for its whole input when its first forward begins, and keeps them until all ranks have written it.
    """

    def __init__(self, rank: Rank, job: Job, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.followers = [rank_name(instance, other) for other in range(1, job.prefill.size)]
        self.pages = PagePool(job.prefill_pages)
        self.slots = SlotPool(job.slots)
        self.state = job.state_pool(self.sender.layout)
        self._rooms: dict[int, _Room] = {}
        self._early: dict[int, Destination] = {}  # came before their `Submit`
        self._queue: deque[_Room] = deque()
        self._idle: Event | None = None
        self._not_ready = job.prefill.size
        handlers: dict[type[Message], Handler] = {
            Ready: lambda _, __: self.ready(),
            Submit: self._submit,
            Destination: self._destination,
            Sent: lambda _, message: self.conclude(message),
            Settled: lambda _, message: self.conclude(message),
            Abort: self._abort,
        }
        self.handlers |= handlers

    def run(self) -> Program:
        """As `Worker.run`, and schedule."""
        self.clock.process(self._schedule())
        return (yield from super().run())

    def report(self) -> dict[str, int]:
        """Return how many pages there are, were used at most, and are held to the end: in quarantine."""
        return {"pages": self.pages.pages, "peak_pages": self.pages.peak, "quarantined_pages": self.pages.used}

    def ready(self) -> None:
        """Tell the router, once all ranks of the instance are ready."""
        self._not_ready -= 1
        if not self._not_ready:
            self.send(ROUTER, Ready())

    def conclude(self, message: Sent | Settled) -> None:
        """Count a rank's part of a room as over; with the last, give its pages back."""
        room = self._rooms.get(message.room)
        if room is None:
            return
        if isinstance(message, Sent):
            if message.reason:
                self._fail(room, message.reason, message.lost)
            elif not room.failed:
                room.nbytes += message.nbytes
                room.over += 1
                if room.over == self.job.prefill.size:
                    self._forget(room)
                    self.send(ROUTER, Prefilled(message.room, room.nbytes))
        else:
            room.over += 1
            if room.over == self.job.prefill.size:
                self._forget(room)
                self.send(leader(room.request.decode), Released(message.room))

    # --- requests that come and go ---

    def _submit(self, _: str, request: Submit) -> None:
        self._rooms[request.room] = _Room(request)
        destination = self._early.pop(request.room, None)
        if destination is not None:
            self._destination("", destination)

    def _destination(self, _: str, message: Destination) -> None:
        room = self._rooms.get(message.room)
        if room is None:
            self._early[message.room] = message
            return
        room.destination = message
        room.noticed = self.clock.now
        self._queue.append(room)
        self._wake()

    def _abort(self, sender: str, message: Abort) -> None:
        self._early.pop(message.room, None)
        room = self._rooms.get(message.room)
        if room is not None:
            self._give_up(room)
        elif sender != ROUTER:  # a decode leader that waits for `Released`
            self.send(sender, Released(message.room))

    def _fail(self, room: _Room, reason: str, lost: str = "") -> None:
        if not room.failed:
            self.send(ROUTER, Failed(room.request.room, reason, lost))
            self._give_up(room)

    def _give_up(self, room: _Room) -> None:
        """Stop working on *room*; `Settled` from every rank ends it."""
        if room.failed:
            return
        room.failed = True
        room.over = 0
        self.send(self.followers, Abort(room.request.room))
        self.sender.abort(room.request.room)
        self._wake()

    def _forget(self, room: _Room) -> None:
        number = room.request.room
        del self._rooms[number]
        if room.source_slot >= 0:
            self.pages.release(number)
            self.slots.release(number)
            self.state.release(number)
            self._wake()

    # --- the scheduler ---

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()

    def _schedule(self) -> Program:
        while not self.ended.triggered:
            try:
                forward = self._next()
            except PdsimError as error:
                self.fail(error)
                return
            if forward is None:
                self._idle = Event(self.clock)
                yield self._idle
                continue
            self.send(self.followers, forward)
            yield self.compute(forward)

    def _next(self) -> Forward | None:
        """Return the next iteration, or None if there is nothing that can run now."""
        budget = self.job.chunk
        pieces: list[tuple[int, int]] = []
        chunks: list[Chunk] = []
        while self._queue and budget and len(chunks) < self.job.prefill_batch:
            room = self._queue[0]
            if room.failed:
                self._queue.popleft()
                continue
            if room.source_slot < 0 and not self._begin(room):
                if any(other.source_slot >= 0 and not other.failed for other in self._rooms.values()):
                    break  # until one of them gives its pages back
                self._fail(room, f"OutOfMemory: {self.pages.used} of {self.pages.pages} pages are in quarantine")
                continue
            tokens = min(budget, room.request.input - room.done)
            pieces.append((room.done, tokens))
            chunks.append(self._chunk(room, tokens))
            budget -= tokens
            if room.done == room.request.input:
                self._queue.popleft()
        return Forward(self.job.prefill_time.prefill(pieces), tuple(chunks)) if chunks else None

    def _begin(self, room: _Room) -> bool:
        """Give *room* its pages and its slot; return whether there were any."""
        request, destination = room.request, room.destination
        assert destination is not None
        if not self.slots.free:
            return False
        pages = self.pages.allocate(request.room, self.job.page_count(request.input))
        if pages is None:
            return False
        state = self.state.allocate(request.room, request.input, request.input, pages)
        if state is None:
            self.pages.release(request.room)
            return False
        slot = self.slots.allocate(request.room)
        assert slot is not None
        room.source_slot = slot
        room.runs = pair(pages, destination.pages)
        room.state = tuple(map(pair, state, destination.state))
        room.started = self.clock.now
        return True

    def _chunk(self, room: _Room, tokens: int) -> Chunk:
        """Return the next *tokens* tokens of *room*; a page that they leave incomplete goes with the next chunk."""
        request, destination = room.request, room.destination
        assert destination is not None
        first = room.done // self.job.page_size
        room.done += tokens
        last = room.done == request.input
        end = self.job.page_count(room.done) if last else room.done // self.job.page_size
        chunk = Chunk(
            request.room,
            request.decode,
            room.chunks,
            first,
            request.input,
            cut(room.runs, first, end - first),
            last,
            (room.source_slot, destination.slot),
            room.noticed,
            room.started,
            room.state if last else (),
        )
        room.chunks += 1
        return chunk
