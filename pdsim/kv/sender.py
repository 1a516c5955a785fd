# SPDX-License-Identifier: Apache-2.0
"""The prefill side of a handoff, on one rank: what is written when, and what became of it.

A forward's end makes a chunk; a chunk is planned into writes, one for each decode rank that needs a part of it,
or one a plane; each write goes through the queue of its room, straight to its pages or by a slot of a staging
ring.  What is known of a room until it is over is `SenderRooms`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from msgspec.structs import replace
from simpy.events import Event

from pdsim.core.errors import PeerLost, TransferError, TransferTimeout
from pdsim.kv.contents import EVERY, Contents
from pdsim.kv.layout import HostMetadata, KvLayout, read_metadata
from pdsim.kv.mapping import Grid, share
from pdsim.kv.messages import (
    Arrival,
    Ask,
    Chunk,
    Grant,
    KvMessage,
    Metadata,
    Sent,
    Settled,
    encode,
)
from pdsim.kv.paths import REGION, DecodePeer, Planes, StagedPiece, sources, targets
from pdsim.kv.peers import DecodePeers
from pdsim.kv.plan import Runs, cut
from pdsim.kv.policy import Policy, Staging
from pdsim.kv.queues import Queues
from pdsim.kv.rooms import Status, advance
from pdsim.kv.sender_rooms import ChunkTransfer, SenderRoom, SenderRooms
from pdsim.kv.staging.ring import GatherBuffers
from pdsim.transfer import Batch, Program, Transfer, WriteSequence
from pdsim.transfer.batch import one_piece
from pdsim.transfer.job import Rank

__all__ = ["KvSender"]

_new: Any = tuple.__new__  # of a named tuple, in half the time

INLINE = Policy()
"""Everything is posted at once."""


class KvSender(SenderRooms):
    """Writes what a prefill rank, the *index*-th of its group's *grid*, computed to the decode ranks that need it.

    A chunk is handed to its queue as soon as its forward has ended, while the next is computed; chunks may overtake
    each other.  Each write carries an `Arrival`, the last one with the number of writes, so that the receiver knows
    when it has all; *policy* may have it sent once, after the last write, instead.

    With *staging*, chunks for ranks that keep other heads are staged: slots are asked for when the forward begins,
    and a chunk stands aside until it is answered.  A target that refuses once is not asked again for that room.

    Where memory has contents, those of rooms up to number *checked* are written into it first.

    *report* is called with `Sent` once a room is over on this rank, for better or worse, and with `Settled` once
    nothing of a failed room moves any more and its leader has aborted it.  Until then its pages, on both sides, must
    not be given to anyone else.

    Life of a room here: `expect` (a forward with a chunk begins; slots are asked for), `send` (the forward has
    ended; writes are queued), writes end, and with the last one the room is over.  A failed write fails the room on
    this rank; its leader then calls `abort`.
    """

    def __init__(
        self,
        rank: Rank,
        layout: KvLayout,
        grid: Grid,
        index: int,
        report: Callable[[Sent | Settled], None],
        all_cp_ranks: bool = False,
        policy: Policy = INLINE,
        staging: Staging | None = None,
        checked: int = EVERY,
    ) -> None:
        super().__init__(rank, index, policy, report)
        self.layout = layout
        self._checked = checked
        self.links = DecodePeers(rank, layout, grid, index, all_cp_ranks, policy)
        self.fallbacks: dict[str, int] = {}  # why metadata did not go the way of the policy, and how often
        self._grid = grid
        self._place = grid.at(index)
        self._all_cp_ranks = all_cp_ranks
        self._queues: Queues[ChunkTransfer] = Queues(rank.clock, policy.queues, self._deliver, self._broken)
        self._buffer = rank.device.allocate(layout.size, policy.memory_pool)
        self._region = rank.endpoint.register(self._buffer, REGION)
        self._limit = staging.buffer if staging else 0
        self._gathers = GatherBuffers(rank, policy.queues, staging.buffer) if staging else None
        self._rows = HostMetadata(layout) if policy.metadata_on == "host" else self._buffer
        self.contents = Contents(self._buffer, layout, self._place.tp, self._rows)
        self._under_way = 0  # writes that have neither succeeded nor failed; the engine ends each by its deadline
        self._succeeded = False  # whether one has since `progressed` was called

    def progressed(self) -> bool:
        """Return whether a write is under way, or has succeeded since the last call.

        It answers the router's pings: an instance whose writes go on is slow, not stalled.
        """
        succeeded, self._succeeded = self._succeeded, False
        return succeeded or self._under_way > 0

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Take note of chunks whose forward begins: each will be given to `send`, and then `poll` be called."""
        self._computing += 1
        for chunk in chunks:
            state = self._rooms.get(chunk.room)
            if state is None:
                state = self._rooms[chunk.room] = SenderRoom(chunk.room)
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
        deliveries: list[ChunkTransfer] = []
        for target in self.links.targets(chunk.decode):
            deliveries += self._plan(state, chunk, target, rows, arrival, finished, seconds > 0)
        for delivery in deliveries:  # all of them are counted before the first is posted
            state.unfinished += 1 if delivery.piece is None else delivery.piece.writes
        for delivery in deliveries:
            if seconds:
                clock.call_at(clock.now + seconds * delivery.computed, self._put, delivery)
            elif state.asks and delivery.waits:
                state.parked[delivery.key] = delivery
            else:
                self._put(delivery)
        if not deliveries and not state.unfinished and not seconds:
            self._conclude(state)

    def grant(self, sender: str, message: Grant) -> None:
        """Take note of a decode rank's answer to `Ask`, and let what waited for it go.

        A position of -1 is a no: the chunk goes unstaged, and no more slots are asked of that
        rank for this room.  An answer about a room that is over is ignored.
        """
        state = self._rooms.get(message.room)
        if state is None:
            return
        key = message.chunk, sender
        state.asks[key] = message.position
        if message.position < 0:
            state.refused.add(sender)
        delivery = state.parked.pop(key, None)
        if delivery is not None:  # a process calls this, and workers are woken by callbacks only
            self._rank.clock.call_at(self._rank.clock.now, self._put, delivery)

    # --- what is to be written ---

    def _fill(self, chunk: Chunk) -> None:
        """Write into this rank's memory what the forward of *chunk* would have left there."""
        self.contents.fill(chunk.room, sources(chunk.runs), chunk.first_page * self.layout.page_size)
        if chunk.last:
            self.contents.fill_aux(chunk.room, chunk.slots[0])
            self.contents.fill_state(chunk.room, tuple(map(sources, chunk.state)), chunk.tokens, chunk.held)

    def _arrival(self, chunk: Chunk, count: int, seconds: float = 0.0) -> Arrival:
        """Return the notification of *chunk*; *count* is 0 until the number of the room's writes is known."""
        pages, now = self._pages(chunk), self._rank.clock.now + seconds
        return Arrival(chunk.room, self._index, count, pages, chunk.noticed, chunk.started, now, to=chunk.decode)

    def _pages(self, chunk: Chunk) -> int:
        """Return how many pages of the request of *chunk* are written in all."""
        return -(-chunk.tokens // self.layout.page_size) - chunk.held

    def _share(self, chunk: Chunk) -> tuple[Runs, bool]:
        """Return what of the runs of *chunk* this rank writes, and whether it writes no more of its room.

        Where all context-parallel ranks write, each of them has an equal part of the request's pages (`share`),
        so a chunk may be all, some or none of a rank's; otherwise one of them writes everything.
        """
        if not self._all_cp_ranks:
            return chunk.runs, chunk.last
        mine, start = share(self._pages(chunk), self._grid.cp, self._place.cp), chunk.first_page - chunk.held
        first = max(mine.start, start)
        end = min(mine.stop, start + sum(count for _, _, count in chunk.runs))
        if end <= first:
            return (), False
        return cut(chunk.runs, first - start, end - first), end == mine.stop

    def _ask(self, state: SenderRoom, chunk: Chunk) -> None:
        """Ask for the slots of *chunk*, where it can be staged.

        It is asked when the forward begins, so that the answer is here at its end.
        """
        rows, _ = self._share(chunk)
        for target in self.links.targets(chunk.decode):
            size = target.block(rows, self._limit)
            if size and target.peer.name not in state.refused:
                state.asks[chunk.index, target.peer.name] = None
                self._tell(target, Ask(chunk.room, self._index, chunk.index, size, targets(rows), chunk.decode))

    def _plan(
        self,
        state: SenderRoom,
        chunk: Chunk,
        target: DecodePeer,
        rows: Runs,
        arrival: Arrival,
        finished: bool,
        by_layer: bool,
    ) -> list[ChunkTransfer]:
        """Return the writes of *chunk* to *target*, the last ones with the number of all."""
        found = target.layers(chunk, rows) if by_layer else target.pieces(chunk, rows)
        pieces: list[StagedPiece | None] = [*found]
        if chunk.last and target.part.aux and target.metadata == "control":
            pieces.append(None)
            if target.fallback:
                self.fallbacks[target.fallback] = self.fallbacks.get(target.fallback, 0) + 1
        if not pieces:
            return []
        name = target.peer.name
        total = state.writes.get(name, 0)
        for piece in pieces:
            total += piece.writes if piece else 1
        state.writes[name] = total
        if chunk.last if target.part.with_last else finished:
            arrival = replace(arrival, count=total)
        return [_new(ChunkTransfer, (state, chunk, target, piece, arrival)) for piece in pieces]

    def _put(self, delivery: ChunkTransfer) -> None:
        """Queue *delivery*, by its room or by the instance that it goes to, as the policy shards."""
        chunk = delivery.chunk
        self._queues.put(chunk.room if self._policy.shard == "room" else self.links.session(chunk.decode), delivery)

    def _tell(self, target: DecodePeer, message: KvMessage) -> None:
        self._rank.channel.send(target.peer.name, encode(message))

    # --- what a queue does ---

    def _deliver(self, delivery: ChunkTransfer, queue: int) -> Program | Event | None:
        """Begin *delivery*; return what its queue waits for.

        That is the transfer, the sequence of writes or, of what takes several steps, a program; None if there is
        nothing to wait for, as for a message or a room that has failed meanwhile.  `_written` sees to a transfer
        that fails.
        """
        state, target, piece = delivery.state, delivery.target, delivery.piece
        if state.status is Status.FAILED:
            return None
        if piece is None:
            self._control(delivery)
            return None
        position = state.asks.get(delivery.key) if state.asks and piece.rows else None
        if position is not None and position >= 0:
            return self._stage(delivery, piece, queue, position)
        if piece.writes > 1:
            return self._planes(delivery, piece)
        batch = target.batch(piece).over(self._region, target.region)
        return self._write(delivery, batch, piece.path)

    def _planes(self, delivery: ChunkTransfer, piece: StagedPiece) -> WriteSequence:
        """Write plane after plane."""
        state, target = delivery.state, delivery.target
        notify, label = self._attached(delivery, piece.path)
        progress = partial(self._wrote, delivery)
        planes = Planes(target, piece, self._region)
        sequence = self._rank.endpoint.write_sequence(target.peer, planes, notify, label=label, progress=progress)
        state.moving += 1
        self._under_way += 1
        state.sequences.append(sequence)
        if sequence.callbacks is None:
            self._sequence_over(delivery, sequence)
        else:
            sequence.callbacks.append(partial(self._sequence_over, delivery))
        return sequence

    def _wrote(self, delivery: ChunkTransfer, writes: int, nbytes: int) -> None:
        """Count *writes* of a sequence that are complete."""
        state = delivery.state
        self._succeeded = True
        state.nbytes += nbytes
        state.unfinished -= writes
        if not state.unfinished:
            self._conclude(state)

    def _sequence_over(self, delivery: ChunkTransfer, event: Event) -> None:
        """Count a sequence that has ended; a write of it that failed fails the room."""
        assert isinstance(event, WriteSequence)
        state = delivery.state
        state.sequences.remove(event)
        self._under_way -= 1
        if not event.ok:
            self._hold(state, event.failed)
            error = event.value
            assert isinstance(error, Exception)
            self._broken(delivery, error)
            return
        state.moving -= 1
        if state.status is Status.FAILED:
            self._settle(state)

    def _stage(self, delivery: ChunkTransfer, piece: StagedPiece, queue: int, position: int) -> Program:
        """Gather the block, write it into its slot, and keep the buffer until nothing moves in it."""
        state, target = delivery.state, delivery.target
        assert self._gathers is not None
        assert target.blocks is not None
        assert target.ring is not None
        block = self._gathers.take(queue)
        yield from self._gather(state, target.blocks.gather(self._region, sources(piece.rows), block, 0))
        if state.status is Status.FAILED:
            self._settle(state)
            return
        size = target.blocks.nbytes(sum(count for _, _, count in piece.rows))
        batch = one_piece(block, target.ring, 0, position % target.ring.size, size)
        transfer = self._write(delivery, batch, "staged")
        self._gathers.lend(queue, transfer)
        try:
            yield transfer
        except TransferError:
            return

    def _gather(self, state: SenderRoom, batch: Batch) -> Program:
        state.moving += 1  # the pages are read
        try:
            yield self._rank.device.copy(batch)
        finally:
            state.moving -= 1

    def _write(self, delivery: ChunkTransfer, batch: Batch, path: str) -> Transfer:
        """Start one write of *delivery* and follow it to its end."""
        notify, label = self._attached(delivery, path)
        transfer = self._rank.endpoint.write(delivery.target.peer, batch, notify, label=label)
        self._follow(delivery, transfer)
        return transfer

    def _attached(self, delivery: ChunkTransfer, path: str) -> tuple[bytes, str]:
        """Return the notification and the label of a write of *delivery*."""
        chunk, arrival = delivery.chunk, delivery.arrival
        if path == "staged":
            arrival = replace(arrival, chunk=chunk.index)
        return encode(arrival) if self._policy.notify == "write" else b"", f"{chunk.room}/{chunk.index}/{path}"

    def _follow(self, delivery: ChunkTransfer, transfer: Transfer) -> None:
        delivery.state.moving += 1
        self._under_way += 1
        transfer.callbacks.append(partial(self._written, delivery))

    def _control(self, delivery: ChunkTransfer) -> None:
        """Send the metadata of *delivery* as a message."""
        contents = self._rank.device.holds_bytes
        rows = read_metadata(self._rows, self.layout, delivery.chunk.slots[0], contents)
        state, name = delivery.state, delivery.target.peer.name
        state.nbytes += sum(map(len, rows))
        state.controls[name] = state.controls.get(name, 0) + 1
        arrival = delivery.arrival if self._policy.notify == "write" else replace(delivery.arrival, count=0)
        self._tell(delivery.target, Metadata(arrival, rows))
        self._over(state)

    # --- what became of it ---

    def _written(self, delivery: ChunkTransfer, event: Event) -> None:
        """Count a write that has ended; one that failed fails its room, unless a message can take its place."""
        assert isinstance(event, Transfer)
        state = delivery.state
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
        if delivery.spare and certain and state.status is not Status.FAILED:
            self._retry(delivery, event, error)
            return
        self._broken(delivery, error)

    def _retry(self, delivery: ChunkTransfer, event: Transfer, error: Exception) -> None:
        """Send metadata as a message whose write failed, once no byte of that can arrive any more."""
        reason = f"{type(error).__name__} over the data path"
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        if event.settled.triggered:
            self._queues.put(0, delivery._replace(piece=None))
        else:
            event.settled.callbacks.append(lambda _: self._queues.put(0, delivery._replace(piece=None)))
