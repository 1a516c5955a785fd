# SPDX-License-Identifier: Apache-2.0
"""A pushed handoff on a prefill rank: the end of a forward makes a chunk, and the chunk is written to decode ranks.

A chunk is planned into writes, one for each decode rank that needs a part of it, or one a plane.  Each goes through
the queue of its room, straight to its pages or by a slot of a staging ring (`pdsim.kv.receiver`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from msgspec.structs import replace
from simpy.events import Event

from pdsim.core.errors import PeerLost, TransferError, TransferTimeout
from pdsim.kv.contents import KvPool
from pdsim.kv.layout import RankMap, RankShare, read_metadata
from pdsim.kv.messages import (
    Arrival,
    Chunk,
    RankQuiesced,
    RegisterPool,
    StagingRelease,
    StagingReply,
    StagingRequest,
    Status,
    TransferDone,
    advance,
    encode,
)
from pdsim.kv.pages import Runs, cut, sources, targets
from pdsim.kv.plan import DecodePeer, Peers, Write, in_layers
from pdsim.kv.policy import Staging
from pdsim.transfer import Batch, Buffer, Peer, Program, Region, Transfer, Writes, WriteSequence
from pdsim.transfer.batch import single_descriptor
from pdsim.transfer.job import Rank

T = TypeVar("T")


class Queues(Generic[T]):
    """*count* queues with a blocking worker each; with 0, an item is worked on at once and waits for nothing.

    *work* is called with an item and the number of its queue; the worker waits for the event or the program that it
    returns, if any.  *failed* is called with an item whose *work* or program raised, and the exception; the worker
    goes on.  Nothing removes an item, so *work* must check whether it still matters.  Workers are callbacks, not
    processes: an item costs no event of its own.
    """

    def __init__(
        self, count: int, work: Callable[[T, int], Program | Event | None], failed: Callable[[T, Exception], None]
    ) -> None:
        self._work = work
        self._failed = failed
        self._items: list[deque[T]] = [deque() for _ in range(count)]
        self._busy = [False] * count  # whether the worker of each waits
        self._go_on = [partial(self._over, number) for number in range(count)]

    def put(self, key: int, item: T) -> None:
        """Append *item* to queue ``key % count``.  An idle worker begins at once: only a callback may call this."""
        if not self._items:
            try:
                self._work(item, 0)
            except Exception as error:
                self._failed(item, error)
            return
        number = key % len(self._items)
        self._items[number].append(item)
        if not self._busy[number]:
            self._serve(number)

    def _serve(self, number: int) -> None:
        # Work until there is something to wait for.
        items = self._items[number]
        self._busy[number] = True
        while items:
            item = items.popleft()
            try:
                waits: Any = self._work(item, number)
            except Exception as error:
                self._failed(item, error)
                continue
            if waits is None:
                continue
            if isinstance(waits, Event):
                if waits.callbacks is not None:
                    waits.callbacks.append(self._go_on[number])
                    return
            elif self._waits(number, item, waits, None):
                return
        self._busy[number] = False

    def _over(self, number: int, event: Event) -> None:
        if not event.ok:
            event.defused = True  # whoever posted it has heard of that
        self._serve(number)

    def _waits(self, number: int, item: T, program: Program, event: Any) -> bool:
        # Go on with *program* after *event*, until it waits for one that is not over; return whether it does.
        try:
            while event is None or event.callbacks is None:
                if event is None:
                    event = next(program)
                elif event.ok:
                    event = program.send(event.value)
                else:
                    event.defused = True
                    event = program.throw(event.value)
        except StopIteration:
            return False
        except Exception as error:
            self._failed(item, error)
            return False
        event.callbacks.append(partial(self._resume, number, item, program))
        return True

    def _resume(self, number: int, item: T, program: Program, event: Event) -> None:
        if not self._waits(number, item, program, event):
            self._serve(number)


class GatherBuffers:
    """The buffers of *rank* in which *count* queues gather, one of *size* bytes each.

    A buffer is filled again once its last write has settled.  Should one fail and stay in quarantine, its queue gets
    a fresh buffer, and the old one is given back if the write ever settles.
    """

    def __init__(self, rank: Rank, count: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._made = 0
        self._buffers = [self._make() for _ in range(count)]
        self._writes: list[Transfer | None] = [None] * count

    def take(self, queue: int) -> Region:
        """Return the buffer of *queue*, in which nothing moves.  Raise `OutOfMemory` if there is none left."""
        write = self._writes[queue]
        if write is not None and not write.settled.triggered:
            old, self._buffers[queue] = self._buffers[queue], self._make()
            write.settled.callbacks.append(lambda _: self._discard(*old))
        self._writes[queue] = None
        return self._buffers[queue][1]

    def lend(self, queue: int, write: Transfer) -> None:
        """Keep the buffer of *queue* as it is until *write* has settled."""
        self._writes[queue] = write

    def _make(self) -> tuple[Buffer, Region]:
        buffer = self._rank.device.allocate(self._size)
        self._made += 1
        return buffer, self._rank.endpoint.register(buffer, f"gather{self._made}")

    def _discard(self, buffer: Buffer, region: Region) -> None:
        self._rank.endpoint.deregister(region)
        self._rank.device.free(buffer)


# --- rooms ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class RoomTransferState:
    """The handoff of a room on one prefill rank.

    It is over when *last* is known and *unfinished* is 0; a failed one is quiesced if *planned* and *moving* are 0.
    """

    room: int
    status: Status = Status.WAITING
    writes: dict[str, int] = field(default_factory=dict)  # to each target, so far
    nbytes: int = 0
    planned: int = 0  # chunks whose forward has not ended
    moving: int = 0  # copies and writes that have not completed, or failed and not settled
    unfinished: int = 0  # writes that have not completed, those included that have not been posted
    last: Arrival | None = None  # of the last chunk, once its forward has ended
    aborted: bool = False  # the leader plans no more chunks
    asks: dict[tuple[int, str], int | None] = field(default_factory=dict)  # chunk and target: the slot's position
    parked: dict[tuple[int, str], Write] = field(default_factory=dict)  # writes that wait for that answer
    refused: set[str] = field(default_factory=set)  # targets that had no slot for a chunk of this room
    sequences: list[tuple[WriteSequence, int]] = field(default_factory=list)  # under way, and which part it has
    controls: dict[str, int] = field(default_factory=dict)  # messages with metadata to each target


class KvSender:
    """Writes the KV that a prefill rank computed into its *pool* to the decode ranks of *rank_map*.

    A chunk is queued as soon as its forward has ended, while the next is computed; chunks may overtake each other.
    Each write carries an `Arrival`, the last one with the number of writes, so that the receiver knows when all are
    there; by *policy* one message after the last write takes their place.  With *staging*, chunks for ranks that
    keep other heads are staged: slots are asked for when the forward begins, and a chunk waits for the answer.

    `expect` begins a forward and `send` ends it; the end of the last write ends the room.  *report* is called with
    `TransferDone` once a room is over on this rank, and with `RankQuiesced` once nothing of a failed room moves any
    more and its leader has called `abort`.  Until then its pages, on both sides, must not be reused.

    `posted` is when the scheduler's thread has posted all that it posts itself, on its clock, and `fallbacks` counts
    why metadata did not go the way of the policy.
    """

    def __init__(
        self,
        pool: KvPool,
        rank_map: RankMap,
        report: Callable[[TransferDone | RankQuiesced], None],
        staging: Staging | None = None,
    ) -> None:
        rank, policy = pool.rank, pool.policy
        self.pool = pool
        self.layout = pool.layout
        self.report = report
        self.posted = 0.0
        self.fallbacks = Counter[str]()
        self._rank = rank
        self._index = pool.index
        self._map = rank_map
        self._policy = policy
        self._rooms: dict[int, RoomTransferState] = {}
        self._computing = 0  # forwards that have begun and whose results have not been polled
        self._unpolled: list[RoomTransferState] = []
        self._under_way = 0  # writes that have neither succeeded nor failed; the engine ends each by its deadline
        self._succeeded = False  # whether one has since `progressed` was called

        def refused(write: Write, error: Exception) -> None:
            for one in (write, *write.beside):
                self._broken(one, error)

        handed_over = policy.queues and policy.handover and rank.clock.virtual  # a real thread waits by itself
        self._queues: Queues[Write] = Queues(
            policy.queues, self._handed_over if handed_over else self._begin, refused
        )
        self._limit = staging.buffer if staging else 0
        self._gathers = GatherBuffers(rank, policy.queues, staging.buffer) if staging else None
        self.peers: Peers[DecodePeer] = Peers(rank, pool.layout, rank_map.readers(pool.index), self._connected)

    def __len__(self) -> int:
        """Return the number of rooms that are not over."""
        return len(self._rooms)

    def progressed(self) -> bool:
        """Return whether a write is under way or prepared, or has succeeded since the last call.

        It answers the router's pings: an instance whose writes go on is slow, not stalled.
        """
        succeeded, self._succeeded = self._succeeded, False
        return succeeded or self._under_way + self.peers.preparing > 0

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Count *chunks*, whose forward begins: each will be given to `send`, and then `poll` be called."""
        self._computing += 1
        for chunk in chunks:
            state = self._rooms.get(chunk.room)
            if state is None:
                state = self._rooms[chunk.room] = RoomTransferState(chunk.room)
            state.planned += 1
            if self._gathers is not None:
                self._ask(state, chunk)

    def send(self, chunk: Chunk) -> None:
        """Write the pages of *chunk*, whose forward has just ended, unless its room has failed meanwhile.

        Only a callback may call it.
        """
        state = self._rooms[chunk.room]
        state.planned -= 1
        if state.status is Status.FAILED:
            self._settle(state)
            return
        if self._rank.device.holds_bytes:
            self.pool.fill(chunk, metadata=True)
        self._move([chunk], self._rank.clock.now, 0.0)

    def send_in_turn(self, chunk: Chunk, pages: int, times: Sequence[float]) -> bool:
        """Write the next *pages* of *chunk* at each of *times*, the first now; return whether that is possible.

        It is where they are one sequence, which `retime` gives other times.  `computed` must be called at the end.
        Only a callback may call it.
        """
        state, targets = self._rooms[chunk.room], self.peers.of(chunk.decode)
        if state.status is Status.FAILED:
            return True
        if not self.peers.connected(chunk.decode) or len(targets) != 1 or self._map.all_cp_ranks:
            return False
        write = next(iter(targets.values())).in_turn(chunk, pages, times)
        if write is None or not self._policy.queues or self._policy.handover:
            return False
        name = write.target.peer.name
        state.status = advance(state.status, Status.TRANSFERRING)
        state.writes[name] = state.writes.get(name, 0) + write.count
        state.unfinished += write.count
        write.room, write.arrival = state, self._arrival(chunk, times[0])
        self._put(write)
        return True

    def retime(self, room: int, times: Sequence[float]) -> None:
        """Give the writes of *room* that are sent in turn other *times*: those that have been posted keep theirs."""
        for sequence, _ in self._rooms[room].sequences:
            sequence.retime(times)

    def send_layers(self, chunks: Sequence[Chunk], begun: float, seconds: float) -> None:
        """Write each plane of *chunks* when its layer is computed, by a forward of *seconds* from *begun* on.

        Layers take equal shares of that.  `computed` must be called at the end.  Only a callback may call it.
        """
        if self._rank.device.holds_bytes:
            for chunk in chunks:
                self.pool.fill(chunk, metadata=True)
        self._move(chunks, begun, seconds)

    def _move(self, chunks: Sequence[Chunk], begun: float, seconds: float) -> None:
        clock, writes = self._rank.clock, list[Write]()
        for chunk in chunks:
            state = self._rooms.get(chunk.room)
            if state is None or state.status is Status.FAILED:
                continue
            if not self.peers.connected(chunk.decode):
                self.peers.wait(chunk.decode, chunk.room, partial(self._move, [chunk], begun, seconds))
                continue
            state.status = advance(state.status, Status.TRANSFERRING)
            planned = self._plan(state, chunk, begun + seconds, seconds > 0)
            for write in planned:  # all of them are counted before the first is posted
                state.unfinished += write.count
            if not state.unfinished:
                self._conclude(state)
            writes += planned
        if seconds:
            one_by_one = self._policy.queues > 0 and not self._policy.handover
            for at, write in in_layers(writes, begun, seconds, clock.now, one_by_one):
                clock.call_at(at, self._put, write)
            return
        for write in writes:
            state = write.room
            if write.rows and state.asks.get(write.key, -1) is None:
                state.parked[write.key] = write
            else:
                self._put(write)

    def grant(self, sender: str, message: StagingReply) -> None:
        """Record a decode rank's answer to `StagingRequest`, and queue the write that waits for it.

        A position of -1 refuses: the chunk goes unstaged, and that rank is not asked again for this room.
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
        state = self._rooms[chunk.room]
        state.planned -= 1
        if state.status is Status.FAILED:
            self._settle(state)
        elif not state.unfinished:
            self._conclude(state)

    def poll(self) -> None:
        """Conclude the rooms whose writes have ended, as a scheduler does after a forward and what it then posts."""
        self._computing -= 1
        self._look(None)

    def abort(self, room: int) -> None:
        """Abort *room*: nothing more of it is written.  `RankQuiesced` follows, at once if it is unknown."""
        self.peers.give_up(room)
        state = self._rooms.get(room) or RoomTransferState(room)
        state.aborted = True
        self._fail(state)
        self._settle(state)

    def _look(self, _: None) -> None:
        if self.posted > self._rank.clock.now:
            self._rank.clock.call_at(self.posted, self._look, None)
            return
        unpolled, self._unpolled = self._unpolled, []
        for state in unpolled:
            self._conclude(state, looked=True)

    # --- planning ---

    def _connected(self, peer: Peer, register: RegisterPool, part: RankShare) -> DecodePeer:
        return DecodePeer(peer, len(self.peers), self.pool.region, self.layout, register, part, self._policy)

    def _arrival(self, chunk: Chunk, ended: float) -> Arrival:
        pages = self._pages(chunk)
        return Arrival(chunk.decode, chunk.room, self._index, 0, pages, chunk.noticed, chunk.started, ended)

    def _pages(self, chunk: Chunk) -> int:
        return -(-chunk.tokens // self.layout.page_size) - chunk.held

    def _share(self, chunk: Chunk) -> tuple[Runs, bool]:
        # Where all context-parallel ranks write, each of them has an equal part of the request's pages, so a chunk
        # may be all, some or none of a rank's; otherwise one of them writes everything.
        if not self._map.all_cp_ranks:
            return chunk.runs, chunk.last
        mine, start = self._map.share(self._index, self._pages(chunk)), chunk.first_page - chunk.held
        first = max(mine.start, start)
        end = min(mine.stop, start + sum(count for _, _, count in chunk.runs))
        if end <= first:
            return (), False
        return cut(chunk.runs, first - start, end - first), end == mine.stop

    def _ask(self, state: RoomTransferState, chunk: Chunk) -> None:
        # It is asked when the forward begins, so that the answer is here at its end.
        if state.status is Status.FAILED:
            return
        if not self.peers.connected(chunk.decode):
            self.peers.wait(chunk.decode, chunk.room, lambda: self._ask(state, chunk))
            return
        rows, _ = self._share(chunk)
        for target in self.peers.of(chunk.decode).values():
            size = target.block(rows, self._limit)
            if size and target.peer.name not in state.refused:
                state.asks[chunk.index, target.peer.name] = None
                what = chunk.room, self._index, chunk.index, size, targets(rows)
                request = StagingRequest(chunk.decode, *what, target.prefill)
                self._rank.channel.send(target.peer.name, encode(request))

    def _plan(self, state: RoomTransferState, chunk: Chunk, ended: float, by_layer: bool) -> list[Write]:
        # Each target's last write says how many writes there were.
        arrival = self._arrival(chunk, ended)
        if chunk.last:
            state.last = arrival
        rows, finished = self._share(chunk)
        planned: list[Write] = []
        for target in self.peers.of(chunk.decode).values():
            writes, name = target.writes(chunk, rows, by_layer), target.peer.name
            if not writes:
                continue
            if writes[-1].path == "control" and target.fallback:
                self.fallbacks[target.fallback] += 1
            total = state.writes[name] = state.writes.get(name, 0) + sum([write.count for write in writes])
            over = chunk.last if target.with_last else finished
            own = replace(arrival, count=total) if over else arrival
            for write in writes:
                write.room, write.arrival = state, own
            planned += writes
        return planned

    def _put(self, write: Write) -> None:
        chunk = write.chunk
        key = chunk.room
        if self._policy.shard == "session":  # the ranks of one instance tell it from others
            key = sum([target.number for target in self.peers.of(chunk.decode).values()])
        self._queues.put(key, write)

    # --- writing ---

    def _handed_over(self, write: Write, queue: int) -> Program:
        yield self._rank.clock.timeout(self._policy.handover)
        rest = self._begin(write, queue)
        try:
            if not isinstance(rest, Event):
                yield from rest or ()
            elif rest.callbacks is not None:
                yield rest
        except TransferError:
            return

    def _begin(self, write: Write, queue: int) -> Program | Event | None:
        # None if there is nothing to wait for: a message, or a room that has failed meanwhile.  `_written` sees to a
        # transfer that fails.
        state = write.room
        if write.count > 1 or write.beside:
            return self._sequence([write, *write.beside])
        if state.status is Status.FAILED:
            return None
        if write.path == "control":
            self._control(write)
            return None
        position = state.asks.get(write.key) if write.rows else None
        if position is not None and position >= 0:
            return self._stage(write, queue, position)
        return self._write(write, write[0], write.path)

    def _sequence(self, writes: list[Write]) -> WriteSequence | None:
        times = writes[0].times
        writes = [write for write in writes if write.room.status is not Status.FAILED]
        if not writes:
            return None
        parts = [
            Writes(one, *self._attached(one, one.path), partial(self._wrote, one), _labels(one)) for one in writes
        ]
        peer, endpoint = writes[0].target.peer, self._rank.endpoint
        if self._policy.notice:  # each notification holds decode up as it comes, so none may stand for others
            sequence = WriteSequence(self._rank.clock, endpoint, peer, parts, times).start()
        else:
            sequence = endpoint.write_sequence(peer, parts, times)
        self._under_way += 1
        for part, write in enumerate(writes):
            write.room.moving += 1
            write.room.sequences.append((sequence, part))
        if sequence.callbacks is None:
            self._sequence_over(writes, sequence)
        else:
            sequence.callbacks.append(partial(self._sequence_over, writes))
        return sequence

    def _wrote(self, write: Write, writes: int, nbytes: int) -> None:
        state = write.room
        self._succeeded = True
        state.nbytes += nbytes
        write.done += writes
        state.unfinished -= writes
        if not state.unfinished:
            self._conclude(state)

    def _sequence_over(self, writes: list[Write], event: Event) -> None:
        assert isinstance(event, WriteSequence)
        self._under_way -= 1
        for part, write in enumerate(writes):
            state = write.room
            state.sequences.remove((event, part))
            if not event.ok and write.done < write.count:  # else its own writes had all succeeded
                self._hold(state, event.failed)
                self._broken(write, event.value)
                continue
            state.moving -= 1
            if state.status is Status.FAILED:
                self._settle(state)

    def _stage(self, write: Write, queue: int, position: int) -> Program:
        state, target = write.room, write.target
        assert self._gathers is not None
        assert target.blocks is not None
        assert target.ring is not None
        block = self._gathers.take(queue)
        yield from self._gather(state, target.blocks.gather(self.pool.region, sources(write.rows), block))
        if state.status is Status.FAILED:
            self._settle(state)
            return
        size = target.blocks.nbytes(sum(count for _, _, count in write.rows))
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

    def _write(self, write: Write, batch: Batch, path: str) -> Transfer:
        notify, label = self._attached(write, path)
        transfer = self._rank.endpoint.write(write.target.peer, batch, notify, label=label)
        if not self._policy.queues:
            self.posted = max(self.posted, transfer.posted)
        write.room.moving += 1
        self._under_way += 1
        transfer.callbacks.append(partial(self._written, write))
        return transfer

    def _attached(self, write: Write, path: str) -> tuple[bytes, str]:
        chunk, arrival = write.chunk, write.arrival
        if path == "staged":
            arrival = replace(arrival, chunk=chunk.index)
        return encode(arrival) if self._policy.notify == "write" else b"", f"{chunk.room}/{chunk.index}/{path}"

    def _control(self, write: Write) -> None:
        rows = read_metadata(self.pool.rows, self.layout, write.chunk.slots[0], self._rank.device.holds_bytes)
        state, name = write.room, write.target.peer.name
        state.nbytes += sum(map(len, rows))
        state.controls[name] = state.controls.get(name, 0) + 1
        arrival = write.arrival if self._policy.notify == "write" else replace(write.arrival, count=0)
        self._rank.channel.send(name, encode(replace(arrival, rows=rows)))
        self._over(state)

    # --- the end of writes and rooms ---

    def _written(self, write: Write, event: Event) -> None:
        assert isinstance(event, Transfer)
        state = write.room
        self._under_way -= 1
        if event.ok:
            self._succeeded = True
            state.moving -= 1
            state.nbytes += event.batch.nbytes
            self._over(state)
            return
        self._hold(state, event)
        error = event.value
        # what timed out may have arrived, notification and all, and must not be counted twice
        certain = not isinstance(error, PeerLost | TransferTimeout)
        spare = not write.rows and not write.state  # a message can take the place of metadata alone
        if self._policy.metadata_fallback and spare and certain and state.status is not Status.FAILED:
            self.fallbacks[f"{type(error).__name__} over the data path"] += 1
            write.path = "control"
            when_settled(event, lambda: self._queues.put(0, write))
        else:
            self._broken(write, error)

    def _hold(self, state: RoomTransferState, failed: Transfer | None) -> None:
        def settled() -> None:
            state.moving -= 1
            self._settle(state)

        if failed is None:
            state.moving -= 1
        else:
            when_settled(failed, settled)

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

    def _broken(self, write: Write, error: Any) -> None:
        state = write.room
        if state.status is not Status.FAILED:
            self._fail(state)
            state.parked.clear()
            lost = write.chunk.decode if isinstance(error, PeerLost) else ""
            self.report(TransferDone(state.room, state.nbytes, f"{type(error).__name__}: {error}", lost))
        self._settle(state)

    def _fail(self, state: RoomTransferState) -> None:
        state.status = advance(state.status, Status.FAILED)
        for sequence, part in state.sequences:
            sequence.stop(part)

    def _settle(self, state: RoomTransferState) -> None:
        if state.aborted and not state.planned and not state.moving:
            state.aborted = False  # once
            self._rooms.pop(state.room, None)
            for name in dict.fromkeys(name for _, name in state.asks):
                self._rank.channel.send(name, encode(StagingRelease(state.room, self._index)))
            self.report(RankQuiesced(state.room))


def _labels(write: Write) -> list[str]:
    # of its batches, where each is of another chunk
    room, first, path = write.chunk.room, write.chunk.index, write.path
    return [f"{room}/{first + number}/{path}" for number in range(write.count)] if write.pages else []


def when_settled(transfer: Transfer, then: Callable[[], None]) -> None:
    """Call *then* once nothing of *transfer*, which has failed, moves any more: now, or when it has settled."""
    if transfer.settled.triggered:
        then()
    else:
        transfer.settled.callbacks.append(lambda _: then())
