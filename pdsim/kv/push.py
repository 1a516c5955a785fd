# SPDX-License-Identifier: Apache-2.0
"""A pushed handoff on a prefill rank: the end of a forward makes a chunk, and the chunk is written to decode ranks.

A chunk is planned into writes, one for each decode rank that needs a part of it, or one a plane.  Each goes through
the queue of its room, straight to its pages or by a slot of a staging ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec.structs import replace
from simpy.events import Event

from pdsim.core.clock import Clock
from pdsim.core.errors import PeerLost, TransferError, TransferTimeout
from pdsim.kv.contents import EVERY, Contents
from pdsim.kv.layout import HostMetadata, KvLayout, read_metadata
from pdsim.kv.mapping import Grid, share
from pdsim.kv.messages import (
    Arrival,
    Chunk,
    RankQuiesced,
    StagingRelease,
    StagingReply,
    StagingRequest,
    TransferDone,
    encode,
)
from pdsim.kv.peers import REGION, DecodePeer, DecodePeers, Planes, WriteSpec, sources, targets
from pdsim.kv.plan import Runs, cut
from pdsim.kv.policy import Policy, Staging
from pdsim.kv.rooms import Status, advance
from pdsim.kv.staging.ring import GatherBuffers
from pdsim.transfer import Batch, Program, Transfer, WriteSequence
from pdsim.transfer.batch import single_descriptor
from pdsim.transfer.job import Rank

__all__ = ["ChunkWrite", "KvSender", "Queues", "RoomTransferState"]

INLINE = Policy()
"""Everything is posted at once."""


T = TypeVar("T")


class _Queue(Generic[T]):
    """Items in order, and the one that the worker is at."""

    __slots__ = ("busy", "item", "items", "number", "program")

    def __init__(self, number: int) -> None:
        self.number = number
        self.items: deque[T] = deque()
        self.busy = False
        self.item: T  # that is worked on, if busy
        self.program: Program | None = None  # which does that, if it takes more than one event


class Queues(Generic[T]):
    """*count* queues with a blocking worker each; with 0, an item is worked on at once and waits for nothing.

    *work* is called with an item and the number of its queue.  The worker waits for the event or the program that it
    returns, if any, and takes the next item.  *failed* is called with an item whose *work* or program raised, and
    the exception; the worker goes on.  Nothing removes an item, so *work* must check whether it still matters.

    Workers are callbacks and not processes: an item costs no event of its own.
    """

    def __init__(
        self,
        clock: Clock,
        count: int,
        work: Callable[[T, int], Program | Event | None],
        failed: Callable[[T, Exception], None],
    ) -> None:
        if count < 0:
            raise ValueError(f"count must be >= 0, got {count}")
        self._clock = clock
        self._work = work
        self._failed = failed
        self._queues: list[_Queue[T]] = [_Queue(number) for number in range(count)]

    def put(self, key: int, item: T) -> None:
        """Append *item* to queue ``key % count``.  An idle worker begins at once: only a callback may call this."""
        if not self._queues:
            try:
                self._work(item, 0)
            except Exception as error:
                self._failed(item, error)
            return
        queue = self._queues[key % len(self._queues)]
        queue.items.append(item)
        if not queue.busy:
            queue.busy = True
            self._next(queue)

    def _next(self, queue: _Queue[T]) -> None:
        while queue.items:
            queue.item = item = queue.items.popleft()
            try:
                waits: Any = self._work(item, queue.number)  # an event has no callbacks once it is over
            except Exception as error:
                self._failed(item, error)
                continue
            if waits is not None and not isinstance(waits, Event):
                queue.program = waits
                waits = self._advance(queue, waits, None)
            if waits is not None and waits.callbacks is not None:
                waits.callbacks.append(lambda event: self._resume(queue, event))
                return
        queue.busy = False

    def _resume(self, queue: _Queue[T], event: Event) -> None:
        if queue.program is not None:
            waits = self._advance(queue, queue.program, event)
            if waits is not None:
                assert waits.callbacks is not None
                waits.callbacks.append(lambda event: self._resume(queue, event))
                return
        self._next(queue)

    def _advance(self, queue: _Queue[T], program: Program, event: Any) -> Any:
        value: Any = None
        ok = True
        while True:
            if event is not None:
                value, ok = event.value, bool(event.ok)
                if not ok:
                    event.defused = True
            try:
                event = program.send(value) if ok else program.throw(value)
            except StopIteration:
                break
            except Exception as error:
                self._failed(queue.item, error)
                break
            if event.callbacks is not None:
                return event
        queue.program = None
        return None


class RoomTransferState:
    """The handoff of a room on one prefill rank.

    It is over when *last* is known and *unfinished* is 0; a failed one is quiesced if *planned* and *moving* are 0.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.status = Status.WAITING
        self.writes: dict[str, int] = {}  # to each target, so far
        self.nbytes = 0
        self.planned = 0  # chunks whose forward has not ended
        self.moving = 0  # copies and writes that have not completed, or failed and not settled
        self.unfinished = 0  # writes that have not completed, those included that have not been posted
        self.last: Arrival | None = None  # of the last chunk, once its forward has ended
        self.aborted = False  # the leader plans no more chunks
        self.asks: dict[tuple[int, str], int | None] = {}  # chunk and target: the slot's position
        self.parked: dict[tuple[int, str], ChunkWrite] = {}  # writes that wait for that answer
        self.refused: set[str] = set()  # targets that had no slot for a chunk of this room
        self.sequences: list[WriteSequence] = []  # under way
        self.controls: dict[str, int] = {}  # messages with metadata to each target


class ChunkWrite(NamedTuple):
    """A write of a chunk to one target; without a *spec*, metadata over the control channel.

    It is queued when the forward has ended, or later when its staging slot is granted.
    """

    state: RoomTransferState
    chunk: Chunk
    target: DecodePeer
    spec: WriteSpec | None
    arrival: Arrival

    @property
    def writes(self) -> int:
        """How many writes, or messages, it takes."""
        return 1 if self.spec is None else self.spec.writes

    @property
    def key(self) -> tuple[int, str]:
        """Chunk and target."""
        return self.chunk.index, self.target.peer.name

    @property
    def waits(self) -> bool:
        """Whether it goes into a slot that was asked for, and there is no answer yet."""
        return self.spec is not None and bool(self.spec.rows) and self.state.asks.get(self.key, -1) is None

    @property
    def computed(self) -> float:
        """The share of its forward after which it can be written: K and V of a layer at the layer's end."""
        if self.spec is None or self.spec.plane < 0:
            return 1.0
        each = self.target.planes_of_a_layer
        return (self.spec.plane // each + 1) * each / self.target.planes

    @property
    def spare(self) -> bool:
        """Whether a message can take its place: it moves metadata only."""
        return self.spec is not None and not (self.spec.rows or self.spec.state)


class KvSender:
    """Writes the KV that a prefill rank, the *index*-th of its group's *grid*, computed to decode ranks.

    A chunk is queued as soon as its forward has ended, while the next is computed; chunks may overtake each other.
    Each write carries an `Arrival`, the last one with the number of writes, so that the receiver knows when all are
    there; by *policy* one message after the last write takes their place.

    With *staging*, chunks for ranks that keep other heads are staged: slots are asked for when the forward begins,
    and a chunk waits for the answer.  A target that refuses once is not asked again for that room.  Where memory has
    contents, those of rooms up to number *checked* are written into it first.

    *report* is called with `TransferDone` once a room is over on this rank, and with `RankQuiesced` once
    nothing of a failed room moves any more and its leader has aborted it.  Until then its pages, on both
    sides, must
    not be reused.

    States of a room: `expect` (a forward with a chunk begins; slots are asked for), `send` (the forward has ended;
    writes are queued), writes end, and the last one ends the room.  A failed write fails the room on this rank; its
    leader then calls `abort`.
    """

    def __init__(
        self,
        rank: Rank,
        layout: KvLayout,
        grid: Grid,
        index: int,
        report: Callable[[TransferDone | RankQuiesced], None],
        all_cp_ranks: bool = False,
        policy: Policy = INLINE,
        staging: Staging | None = None,
        checked: int = EVERY,
    ) -> None:
        self.layout = layout
        self.report = report
        self._rank = rank
        self._index = index
        self._policy = policy
        self._rooms: dict[int, RoomTransferState] = {}
        self._computing = 0  # forwards that have begun and whose results have not been polled
        self.posted = 0.0
        """When the scheduler's thread has posted all that it posts itself; on its clock, in seconds."""
        self._unpolled: list[RoomTransferState] = []
        self._checked = checked
        self.links = DecodePeers(rank, layout, grid, index, all_cp_ranks, policy)
        self.fallbacks: dict[str, int] = {}  # why metadata did not go the way of the policy, and how often
        self._grid = grid
        self._place = grid.at(index)
        self._all_cp_ranks = all_cp_ranks
        self._queues: Queues[ChunkWrite] = Queues(rank.clock, policy.queues, self._start, self._broken)
        self._buffer = rank.device.allocate(layout.size, policy.memory_pool)
        self._region = rank.endpoint.register(self._buffer, REGION)
        self._limit = staging.buffer if staging else 0
        self._gathers = GatherBuffers(rank, policy.queues, staging.buffer) if staging else None
        self._rows = HostMetadata(layout) if policy.metadata_on == "host" else self._buffer
        self.contents = Contents(self._buffer, layout, self._place.tp, self._rows)
        self._under_way = 0  # writes that have neither succeeded nor failed; the engine ends each by its deadline
        self._succeeded = False  # whether one has since `progressed` was called

    def __len__(self) -> int:
        """Return the number of rooms that are not over."""
        return len(self._rooms)

    def progressed(self) -> bool:
        """Return whether a write is under way, or has succeeded since the last call.

        It answers the router's pings: an instance whose writes go on is slow, not stalled.
        """
        succeeded, self._succeeded = self._succeeded, False
        return succeeded or self._under_way > 0

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Count *chunks*, whose forward begins: each will be given to `send`, and then `poll` be called."""
        self._computing += 1
        for chunk in chunks:
            state = self._rooms.get(chunk.room)
            if state is None:
                state = self._rooms[chunk.room] = RoomTransferState(chunk.room)
            state.planned += 1
            if self._gathers is not None and state.status is not Status.FAILED:
                self._ask(state, chunk)

    def send(self, chunk: Chunk, seconds: float = 0.0) -> None:
        """Write the pages of *chunk*, whose forward has just ended, unless its room has failed meanwhile.

        With *seconds*, its forward has just begun and takes so long: each plane is written when its layer is
        computed, at an equal share of that, and `computed` must be called at the end.  Only a callback may call it:
        workers that are idle begin at once.
        """
        state, clock = self._rooms[chunk.room], self._rank.clock
        if not seconds:
            state.planned -= 1
        if state.status is Status.FAILED:
            self._settle(state)
            return
        if chunk.decode not in self.links:
            self._break(state, chunk.decode, PeerLost(f"{chunk.decode} is gone"))
            return
        state.status = advance(state.status, Status.TRANSFERRING)
        if self._rank.device.holds_bytes and chunk.room <= self._checked:
            self._fill(chunk)
        arrival = self._arrival(chunk, 0, seconds)
        if chunk.last:
            state.last = arrival
        rows, finished = self._share(chunk)
        writes: list[ChunkWrite] = []
        for target in self.links.targets(chunk.decode):
            writes += self._plan(state, chunk, target, rows, arrival, finished, seconds > 0)
        for write in writes:  # all of them are counted before the first is posted
            state.unfinished += write.writes
        for write in writes:
            if seconds:
                clock.call_at(clock.now + seconds * write.computed, self._put, write)
            elif state.asks and write.waits:
                state.parked[write.key] = write
            else:
                self._put(write)
        if not writes and not state.unfinished and not seconds:
            self._conclude(state)

    def grant(self, sender: str, message: StagingReply) -> None:
        """Record a decode rank's answer to `StagingRequest`, and queue the write that waits for it.

        A position of -1 refuses: the chunk goes unstaged, and that rank is not asked again for this room.  An answer
        about a room that is over is ignored.
        """
        state = self._rooms.get(message.room)
        if state is None:
            return
        key = message.chunk, sender
        state.asks[key] = message.position
        if message.position < 0:
            state.refused.add(sender)
        write = state.parked.pop(key, None)
        if write is not None:  # a process calls this, and workers are woken by callbacks only
            self._rank.clock.call_at(self._rank.clock.now, self._put, write)

    def computed(self, chunk: Chunk) -> None:
        """Count *chunk*, whose forward has ended and whose planes are written as they are computed."""
        state = self._rooms.get(chunk.room)
        if state is None:
            return
        state.planned -= 1
        if state.status is Status.FAILED:
            self._settle(state)
        elif not state.unfinished:
            self._conclude(state)

    def poll(self) -> None:
        """Conclude the rooms whose writes have ended, as a scheduler does after a forward and what it then posts."""
        self._computing -= 1
        self._look(None)

    def _look(self, _: None) -> None:
        if self.posted > self._rank.clock.now:
            self._rank.clock.call_at(self.posted, self._look, None)
            return
        unpolled, self._unpolled = self._unpolled, []
        for state in unpolled:
            self._conclude(state, looked=True)

    def abort(self, room: int) -> None:
        """Abort *room*: nothing more of it is written.  `RankQuiesced` follows, at once if it is unknown."""
        state = self._rooms.get(room) or RoomTransferState(room)
        state.aborted = True
        self._fail(state)
        self._settle(state)

    # --- planning ---

    def _fill(self, chunk: Chunk) -> None:
        self.contents.fill(chunk.room, sources(chunk.runs), chunk.first_page * self.layout.page_size)
        if chunk.last:
            self.contents.fill_aux(chunk.room, chunk.slots[0])
            self.contents.fill_state(chunk.room, tuple(map(sources, chunk.state)), chunk.tokens, chunk.held)

    def _arrival(self, chunk: Chunk, count: int, seconds: float = 0.0) -> Arrival:
        pages, now = self._pages(chunk), self._rank.clock.now + seconds
        return Arrival(chunk.decode, chunk.room, self._index, count, pages, chunk.noticed, chunk.started, now)

    def _pages(self, chunk: Chunk) -> int:
        return -(-chunk.tokens // self.layout.page_size) - chunk.held

    def _share(self, chunk: Chunk) -> tuple[Runs, bool]:
        # Where all context-parallel ranks write, each of them has an equal part of the request's pages (`share`),
        # so a chunk may be all, some or none of a rank's; otherwise one of them writes everything.
        if not self._all_cp_ranks:
            return chunk.runs, chunk.last
        mine, start = share(self._pages(chunk), self._grid.cp, self._place.cp), chunk.first_page - chunk.held
        first = max(mine.start, start)
        end = min(mine.stop, start + sum(count for _, _, count in chunk.runs))
        if end <= first:
            return (), False
        return cut(chunk.runs, first - start, end - first), end == mine.stop

    def _ask(self, state: RoomTransferState, chunk: Chunk) -> None:
        # It is asked when the forward begins, so that the answer is here at its end.
        rows, _ = self._share(chunk)
        for target in self.links.targets(chunk.decode):
            size = target.block(rows, self._limit)
            if size and target.peer.name not in state.refused:
                state.asks[chunk.index, target.peer.name] = None
                request = StagingRequest(chunk.decode, chunk.room, self._index, chunk.index, size, targets(rows))
                self._rank.channel.send(target.peer.name, encode(request))

    def _plan(
        self,
        state: RoomTransferState,
        chunk: Chunk,
        target: DecodePeer,
        rows: Runs,
        arrival: Arrival,
        finished: bool,
        by_layer: bool,
    ) -> list[ChunkWrite]:
        specs: list[WriteSpec | None] = [*(target.layers if by_layer else target.writes)(chunk, rows)]
        if chunk.last and target.part.aux and target.metadata == "control":
            specs.append(None)
            if target.fallback:
                self.fallbacks[target.fallback] = self.fallbacks.get(target.fallback, 0) + 1
        if not specs:
            return []
        name = target.peer.name
        total = state.writes.get(name, 0)
        for spec in specs:
            total += spec.writes if spec else 1
        state.writes[name] = total
        if chunk.last if target.part.with_last else finished:
            arrival = replace(arrival, count=total)
        return [ChunkWrite(state, chunk, target, spec, arrival) for spec in specs]

    def _put(self, write: ChunkWrite) -> None:
        chunk = write.chunk
        self._queues.put(chunk.room if self._policy.shard == "room" else self.links.session(chunk.decode), write)

    # --- writing ---

    def _start(self, write: ChunkWrite, queue: int) -> Program | Event | None:
        return self._handed_over(write, queue) if self._policy.handover else self._begin(write, queue)

    def _handed_over(self, write: ChunkWrite, queue: int) -> Program:
        yield self._rank.clock.timeout(self._policy.handover)
        rest = self._begin(write, queue)
        try:
            if not isinstance(rest, Event):
                yield from rest or ()
            elif rest.callbacks is not None:
                yield rest
        except TransferError:
            return

    def _begin(self, write: ChunkWrite, queue: int) -> Program | Event | None:
        # That is the transfer, the sequence of writes or, of what takes several steps, a program; None if there is
        # nothing to wait for, as for a message or a room that has failed meanwhile.  `_written` sees to a transfer
        # that fails.
        state, target, spec = write.state, write.target, write.spec
        if state.status is Status.FAILED:
            return None
        if spec is None:
            self._control(write)
            return None
        position = state.asks.get(write.key) if state.asks and spec.rows else None
        if position is not None and position >= 0:
            return self._stage(write, spec, queue, position)
        if spec.writes > 1:
            return self._planes(write, spec)
        batch = target.batch(spec).over(self._region, target.region)
        return self._write(write, batch, spec.path)

    def _planes(self, write: ChunkWrite, spec: WriteSpec) -> WriteSequence:
        state, target = write.state, write.target
        notify, label = self._attached(write, spec.path)
        progress = partial(self._wrote, write)
        planes = Planes(target, spec, self._region)
        sequence = self._rank.endpoint.write_sequence(target.peer, planes, notify, label=label, progress=progress)
        state.moving += 1
        self._under_way += 1
        state.sequences.append(sequence)
        if sequence.callbacks is None:
            self._sequence_over(write, sequence)
        else:
            sequence.callbacks.append(partial(self._sequence_over, write))
        return sequence

    def _wrote(self, write: ChunkWrite, writes: int, nbytes: int) -> None:
        state = write.state
        self._succeeded = True
        state.nbytes += nbytes
        state.unfinished -= writes
        if not state.unfinished:
            self._conclude(state)

    def _sequence_over(self, write: ChunkWrite, event: Event) -> None:
        assert isinstance(event, WriteSequence)
        state = write.state
        state.sequences.remove(event)
        self._under_way -= 1
        if not event.ok:
            self._hold(state, event.failed)
            error = event.value
            assert isinstance(error, Exception)
            self._broken(write, error)
            return
        state.moving -= 1
        if state.status is Status.FAILED:
            self._settle(state)

    def _stage(self, write: ChunkWrite, spec: WriteSpec, queue: int, position: int) -> Program:
        state, target = write.state, write.target
        assert self._gathers is not None
        assert target.blocks is not None
        assert target.ring is not None
        block = self._gathers.take(queue)
        yield from self._gather(state, target.blocks.gather(self._region, sources(spec.rows), block, 0))
        if state.status is Status.FAILED:
            self._settle(state)
            return
        size = target.blocks.nbytes(sum(count for _, _, count in spec.rows))
        batch = single_descriptor(block, target.ring, 0, position % target.ring.size, size)
        transfer = self._write(write, batch, "staged")
        self._gathers.lend(queue, transfer)
        try:
            yield transfer
        except TransferError:
            return

    def _gather(self, state: RoomTransferState, batch: Batch) -> Program:
        state.moving += 1  # the pages are read
        try:
            yield self._rank.device.copy(batch)
        finally:
            state.moving -= 1

    def _write(self, write: ChunkWrite, batch: Batch, path: str) -> Transfer:
        notify, label = self._attached(write, path)
        transfer = self._rank.endpoint.write(write.target.peer, batch, notify, label=label)
        if not self._policy.queues:
            self.posted = max(self.posted, transfer.posted)
        write.state.moving += 1
        self._under_way += 1
        transfer.callbacks.append(partial(self._written, write))
        return transfer

    def _attached(self, write: ChunkWrite, path: str) -> tuple[bytes, str]:
        chunk, arrival = write.chunk, write.arrival
        if path == "staged":
            arrival = replace(arrival, chunk=chunk.index)
        return encode(arrival) if self._policy.notify == "write" else b"", f"{chunk.room}/{chunk.index}/{path}"

    def _control(self, write: ChunkWrite) -> None:
        contents = self._rank.device.holds_bytes
        rows = read_metadata(self._rows, self.layout, write.chunk.slots[0], contents)
        state, name = write.state, write.target.peer.name
        state.nbytes += sum(map(len, rows))
        state.controls[name] = state.controls.get(name, 0) + 1
        arrival = write.arrival if self._policy.notify == "write" else replace(write.arrival, count=0)
        self._rank.channel.send(name, encode(replace(arrival, rows=rows)))
        self._over(state)

    # --- the end of writes and rooms ---

    def _written(self, write: ChunkWrite, event: Event) -> None:
        assert isinstance(event, Transfer)
        state = write.state
        self._under_way -= 1
        if event.ok:
            self._succeeded = True
            state.moving -= 1
            state.nbytes += event.batch.nbytes
            self._over(state)
            return
        self._hold(state, event)
        error = event.value
        assert isinstance(error, Exception)
        # what timed out may have arrived, notification and all, and must not be counted twice
        certain = not isinstance(error, PeerLost | TransferTimeout)
        if self._policy.metadata_fallback and write.spare and certain and state.status is not Status.FAILED:
            self._retry(write, event, error)
            return
        self._broken(write, error)

    def _hold(self, state: RoomTransferState, failed: Transfer | None) -> None:
        if failed is None or failed.settled.triggered:
            state.moving -= 1
        else:
            failed.settled.callbacks.append(partial(self._settled, state))

    def _retry(self, write: ChunkWrite, event: Transfer, error: Exception) -> None:
        reason = f"{type(error).__name__} over the data path"
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        if event.settled.triggered:
            self._queues.put(0, write._replace(spec=None))
        else:
            event.settled.callbacks.append(lambda _: self._queues.put(0, write._replace(spec=None)))

    def _fail(self, state: RoomTransferState) -> None:
        state.status = advance(state.status, Status.FAILED)
        for sequence in state.sequences:
            sequence.stop()

    def _over(self, state: RoomTransferState) -> None:
        state.unfinished -= 1
        if state.status is Status.FAILED:
            self._settle(state)
        elif not state.unfinished:
            self._conclude(state)

    def _conclude(self, state: RoomTransferState, *, looked: bool = False) -> None:
        # With ``notify="poll"`` that waits until the scheduler has *looked*, while forwards are under way.
        if state.last is None or state.planned or state.status is Status.FAILED:
            return
        busy = self._computing or self.posted > self._rank.clock.now
        if self._policy.notify == "poll" and busy and not looked:
            self._unpolled.append(state)
            return
        state.status = advance(state.status, Status.SUCCESS)
        del self._rooms[state.room]
        if self._policy.notify != "write":
            self._notify(state, state.last)
        self.report(TransferDone(state.room, state.nbytes))

    def _notify(self, state: RoomTransferState, last: Arrival) -> None:
        for name in state.writes:
            arrival = replace(last, count=1 + state.controls.get(name, 0))
            self._rank.channel.send(name, encode(arrival))

    def _settled(self, state: RoomTransferState, _: Event) -> None:
        state.moving -= 1
        self._settle(state)

    def _broken(self, write: ChunkWrite, error: Exception) -> None:
        self._break(write.state, write.chunk.decode, error)

    def _break(self, state: RoomTransferState, decode: str, error: Exception) -> None:
        if state.status is not Status.FAILED:
            self._fail(state)
            state.parked.clear()
            lost = decode if isinstance(error, PeerLost) else ""
            self.report(TransferDone(state.room, state.nbytes, f"{type(error).__name__}: {error}", lost))
        self._settle(state)

    def _settle(self, state: RoomTransferState) -> None:
        if state.aborted and not state.planned and not state.moving:
            state.aborted = False  # once
            self._rooms.pop(state.room, None)
            for name in dict.fromkeys(name for _, name in state.asks):
                self._rank.channel.send(name, encode(StagingRelease(state.room, self._index)))
            self.report(RankQuiesced(state.room))
