"""The prefill side of a handoff, on one rank: what is written when, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace
from simpy.events import Event

from pdsim.errors import PeerLost, TransferError, TransferTimeout
from pdsim.kv import metadata
from pdsim.kv.contents import Contents
from pdsim.kv.layout import KvLayout
from pdsim.kv.mapping import Grid, RankMap, share
from pdsim.kv.messages import (
    Arrival,
    Ask,
    Chunk,
    Grant,
    Message,
    MessageError,
    Metadata,
    Register,
    Return,
    Sent,
    Settled,
    encode,
)
from pdsim.kv.paths import REGION, Piece, Target, sources, targets
from pdsim.kv.plan import Runs, cut
from pdsim.kv.policy import Policy, Staging
from pdsim.kv.queues import Queues
from pdsim.kv.staging import GatherBuffers
from pdsim.kv.status import Status, advance
from pdsim.transfer import Batch, Program, Rank, Transfer

__all__ = ["KvSender"]

INLINE = Policy()
"""Everything is posted at once."""


@dataclass(slots=True)
class _Room:
    """A request's handoff as this rank sees it."""

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
    parked: dict[tuple[int, str], _Delivery] = field(default_factory=dict)  # what waits for an answer to that
    refused: set[str] = field(default_factory=set)  # targets that had no slot for a chunk of this room
    controls: dict[str, int] = field(default_factory=dict)  # messages with metadata to each target


class _Delivery(NamedTuple):
    """A write to be made.  Without a *piece*, metadata over the control channel."""

    state: _Room
    chunk: Chunk
    target: Target
    piece: Piece | None
    arrival: Arrival

    @property
    def key(self) -> tuple[int, str]:
        """Chunk and target."""
        return self.chunk.index, self.target.peer.name

    @property
    def spare(self) -> bool:
        """Whether a message can take its place: it moves metadata only."""
        return self.piece is not None and not (self.piece.rows or self.piece.state)


class KvSender:
    """Writes what a prefill rank, the *index*-th of its group's *grid*, computed to the decode ranks that need it.

    A chunk is handed to its queue as soon as its forward has ended, while the next is computed; chunks may overtake
    each other.  Each write carries an `Arrival`, the last one with the number of writes, so that the receiver knows
    when it has all; *policy* may have it sent once, after the last write, instead.

    With *staging*, chunks for ranks that keep other heads are staged: slots are asked for when the forward begins, and
    a chunk stands aside until it is answered.  A target that refuses once is not asked again for that room.

    *report* is called with `Sent` once a room is over on this rank, for better or worse, and with `Settled` once
    nothing of a failed room moves any more and its leader has aborted it.  Until then its pages, on both sides, must
    not be given to anyone else.
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
    ) -> None:
        self.layout = layout
        self.fallbacks: dict[str, int] = {}  # why metadata did not go the way of the policy, and how often
        self._rank = rank
        self._grid = grid
        self._index = index
        self._place = grid.at(index)
        self._report = report
        self._all_cp_ranks = all_cp_ranks
        self._policy = policy
        self._targets: dict[str, list[Target]] = {}
        self._sessions: dict[str, int] = {}  # sum of the numbers of an instance's targets
        self._rooms: dict[int, _Room] = {}
        self._queues: Queues[_Delivery] = Queues(rank.clock, policy.queues, self._deliver, self._broken)
        self._computing = False
        self._unpolled: list[_Room] = []
        self._buffer = rank.device.allocate(layout.size, policy.memory_pool)
        self._region = rank.endpoint.register(self._buffer, REGION)
        self._limit = staging.buffer if staging else 0
        self._gathers = GatherBuffers(rank, policy.queues, staging.buffer) if staging else None
        self._rows = metadata.HostRows(layout) if policy.metadata_on == "host" else self._buffer
        self._contents = Contents(self._buffer, layout, self._place.tp, self._rows)

    def __len__(self) -> int:
        """Return the number of rooms that are not over."""
        return len(self._rooms)

    def connected(self, instance: str, decode: Grid) -> bool:
        """Return whether this rank can write to all ranks of *instance*, a group of *decode*, that it has to."""
        return len(self._targets.get(instance, ())) == len(self._map(decode).readers(self._index))

    def connect(self, message: Register) -> None:
        """Connect to the decode rank that sent *message*.

        Raise a `MessageError` with both values if its pool is of another kind, and what `Endpoint.connect` raises.
        """
        layout = message.layout
        if layout.shape != self.layout.shape:
            raise MessageError(
                f"{message.instance} keeps {layout.shape}, this rank {self.layout.shape}: serve one model"
            )
        if layout.page_size != self.layout.page_size:
            raise MessageError(
                f"{message.instance} has kv.page_size={layout.page_size}, this rank {self.layout.page_size}: "
                "pages must be equal on both sides"
            )
        part = self._map(Grid(layout.tp, layout.pp)).part(self._index, message.index)
        if part is None:
            raise MessageError(f"rank {message.index} of {message.instance} needs nothing of rank {self._index}")
        peer = self._rank.endpoint.connect(message.address)
        number, exact = sum(map(len, self._targets.values())), self._rank.device.holds_bytes
        target = Target(peer, number, self.layout, message, part, self._policy, exact)
        self._targets.setdefault(message.instance, []).append(target)
        self._sessions[message.instance] = self._sessions.get(message.instance, 0) + number

    def meet(self, instance: str) -> None:
        """Take note that rooms may go to *instance*, also if this rank has nothing to write there."""
        self._targets.setdefault(instance, [])

    def drop(self, instance: str) -> None:
        """Forget the ranks of *instance*, which is gone; a chunk that is still to go there fails its room."""
        self._targets.pop(instance, None)
        self._sessions.pop(instance, None)

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Take note of chunks whose forward begins: each will be given to `send`, and then `poll` be called."""
        self._computing = True
        for chunk in chunks:
            state = self._rooms.get(chunk.room)
            if state is None:
                state = self._rooms[chunk.room] = _Room(chunk.room)
            state.planned += 1
            if self._gathers is not None and state.status is not Status.FAILED:
                self._ask(state, chunk)

    def send(self, chunk: Chunk) -> None:
        """Write the pages of *chunk*, whose forward has just ended, unless its room has failed meanwhile."""
        state = self._rooms[chunk.room]
        state.planned -= 1
        if state.status is Status.FAILED:
            self._settle(state)
            return
        if chunk.decode not in self._targets:
            self._break(state, chunk.decode, PeerLost(f"{chunk.decode} is gone"))
            return
        state.status = advance(state.status, Status.TRANSFERRING)
        if self._rank.device.holds_bytes:
            self._fill(chunk)
        arrival = self._arrival(chunk, 0)
        if chunk.last:
            state.last = arrival
        rows, finished = self._share(chunk)
        for target in self._targets.get(chunk.decode, ()):
            self._plan(state, chunk, target, rows, arrival, finished)
        if not state.unfinished:
            self._conclude(state)

    def poll(self) -> None:
        """Look at what has become of the writes, as a scheduler does between two forwards."""
        self._computing = False
        unpolled, self._unpolled = self._unpolled, []
        for state in unpolled:
            self._conclude(state)

    def grant(self, sender: str, message: Grant) -> None:
        """Take note of a decode rank's answer to `Ask`, and let what waited for it go."""
        state = self._rooms.get(message.room)
        if state is None:
            return
        key = message.chunk, sender
        state.asks[key] = message.position
        if message.position < 0:
            state.refused.add(sender)
        delivery = state.parked.pop(key, None)
        if delivery is not None:
            self._put(delivery)

    def abort(self, room: int) -> None:
        """Give *room* up: nothing more of it is written.  `Settled` follows, at once if nothing of it is known."""
        state = self._rooms.get(room) or _Room(room)
        state.aborted = True
        state.status = advance(state.status, Status.FAILED)
        self._settle(state)

    def _map(self, decode: Grid) -> RankMap:
        return RankMap(self.layout.shape, self._grid, decode, self._all_cp_ranks)

    # --- what is to be written ---

    def _fill(self, chunk: Chunk) -> None:
        self._contents.fill(chunk.room, sources(chunk.runs), chunk.first_page * self.layout.page_size)
        if chunk.last:
            self._contents.fill_aux(chunk.room, chunk.slots[0])
            self._contents.fill_state(chunk.room, tuple(map(sources, chunk.state)), chunk.tokens)

    def _arrival(self, chunk: Chunk, count: int) -> Arrival:
        pages = -(-chunk.tokens // self.layout.page_size)
        return Arrival(chunk.room, self._index, count, pages, chunk.noticed, chunk.started, self._rank.clock.now)

    def _share(self, chunk: Chunk) -> tuple[Runs, bool]:
        """Return what of the runs of *chunk* this rank writes, and whether it writes no more of its room."""
        if not self._all_cp_ranks:
            return chunk.runs, chunk.last
        mine = share(-(-chunk.tokens // self.layout.page_size), self._grid.cp, self._place.cp)
        first = max(mine.start, chunk.first_page)
        end = min(mine.stop, chunk.first_page + sum(count for _, _, count in chunk.runs))
        if end <= first:
            return (), False
        return cut(chunk.runs, first - chunk.first_page, end - first), end == mine.stop

    def _ask(self, state: _Room, chunk: Chunk) -> None:
        """Ask for the slots of *chunk*, where it can be staged."""
        rows, _ = self._share(chunk)
        for target in self._targets.get(chunk.decode, ()):
            size = target.block(rows, self._limit)
            if size and target.peer.name not in state.refused:
                state.asks[chunk.index, target.peer.name] = None
                self._tell(target, Ask(chunk.room, self._index, chunk.index, size, targets(rows)))

    def _plan(self, state: _Room, chunk: Chunk, target: Target, rows: Runs, arrival: Arrival, finished: bool) -> None:
        """Hand the writes of *chunk* to *target* over, all of them counted before the first is posted."""
        pieces: list[Piece | None] = [*target.pieces(chunk, rows)]
        if chunk.last and target.part.aux and target.metadata == "control":
            pieces.append(None)
            if target.fallback:
                self._note(target.fallback)
        if not pieces:
            return
        name = target.peer.name
        total = state.writes[name] = state.writes.get(name, 0) + len(pieces)
        if chunk.last if target.part.with_last else finished:
            arrival = replace(arrival, count=total)
        state.unfinished += len(pieces)
        for piece in pieces:
            delivery = _Delivery(state, chunk, target, piece, arrival)
            if state.asks and piece is not None and piece.rows and state.asks.get(delivery.key, -1) is None:
                state.parked[delivery.key] = delivery
            else:
                self._put(delivery)

    def _put(self, delivery: _Delivery) -> None:
        chunk = delivery.chunk
        self._queues.put(chunk.room if self._policy.shard == "room" else self._sessions.get(chunk.decode, 0), delivery)

    def _tell(self, target: Target, message: Message) -> None:
        self._rank.channel.send(target.peer.name, encode(message))

    # --- what a queue does ---

    def _deliver(self, delivery: _Delivery, queue: int) -> Program:
        state, target, piece = delivery.state, delivery.target, delivery.piece
        if state.status is Status.FAILED:
            return
        if piece is None:
            self._control(delivery)
            return
        position = state.asks.get(delivery.key) if state.asks and piece.rows else None
        if position is not None and position >= 0:
            yield from self._stage(delivery, piece, queue, position)
            return
        batch = target.batch(piece).over(self._region, target.region)
        transfer = self._write(delivery, batch, piece.path)
        try:
            yield transfer
        except TransferError:
            return  # `_written` has seen to it

    def _stage(self, delivery: _Delivery, piece: Piece, queue: int, position: int) -> Program:
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
        batch = Batch(block, target.ring, [0], [position % target.ring.size], [size])
        transfer = self._write(delivery, batch, "staged")
        self._gathers.lend(queue, transfer)
        try:
            yield transfer
        except TransferError:
            return

    def _gather(self, state: _Room, batch: Batch) -> Program:
        state.moving += 1  # the pages are read
        try:
            yield self._rank.device.copy(batch)
        finally:
            state.moving -= 1

    def _write(self, delivery: _Delivery, batch: Batch, path: str) -> Transfer:
        state, chunk, arrival = delivery.state, delivery.chunk, delivery.arrival
        if path == "staged":
            arrival = replace(arrival, chunk=chunk.index)
        notify = encode(arrival) if self._policy.notify == "write" else b""
        label = f"{chunk.room}/{chunk.index}/{path}"
        transfer = self._rank.endpoint.write(delivery.target.peer, batch, notify, label=label)
        state.moving += 1
        transfer.callbacks.append(partial(self._written, delivery))
        return transfer

    def _control(self, delivery: _Delivery) -> None:
        """Send the metadata of *delivery* as a message."""
        contents = self._rank.device.holds_bytes
        rows = metadata.load(self._rows, self.layout, delivery.chunk.slots[0], contents)
        state, name = delivery.state, delivery.target.peer.name
        state.nbytes += sum(map(len, rows))
        state.controls[name] = state.controls.get(name, 0) + 1
        arrival = delivery.arrival if self._policy.notify == "write" else replace(delivery.arrival, count=0)
        self._tell(delivery.target, Metadata(arrival, rows))
        self._over(state)

    # --- what became of it ---

    def _written(self, delivery: _Delivery, event: Event) -> None:
        assert isinstance(event, Transfer)
        state = delivery.state
        if event.ok:
            state.moving -= 1
            state.nbytes += event.batch.nbytes
            self._over(state)
            return
        if event.settled.triggered:
            state.moving -= 1
        else:
            event.settled.callbacks.append(partial(self._settled, state))
        error = event.value
        assert isinstance(error, Exception)
        # what timed out may have arrived, notification and all, and must not be counted twice
        certain = not isinstance(error, PeerLost | TransferTimeout)
        if delivery.spare and certain and state.status is not Status.FAILED:
            self._retry(delivery, event, error)
            return
        self._broken(delivery, error)

    def _retry(self, delivery: _Delivery, event: Transfer, error: Exception) -> None:
        """Send metadata as a message whose write failed, once no byte of that can arrive any more."""
        self._note(f"{type(error).__name__} over the data path")
        if event.settled.triggered:
            self._queues.put(0, delivery._replace(piece=None))
        else:
            event.settled.callbacks.append(lambda _: self._queues.put(0, delivery._replace(piece=None)))

    def _note(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def _settled(self, state: _Room, _: Event) -> None:
        state.moving -= 1
        self._settle(state)

    def _over(self, state: _Room) -> None:
        """Count one write as done."""
        state.unfinished -= 1
        if state.status is Status.FAILED:
            self._settle(state)
        elif not state.unfinished:
            self._conclude(state)

    def _conclude(self, state: _Room) -> None:
        """End the room if its last chunk is written; called when no write of it is under way."""
        if state.last is None or state.status is Status.FAILED:
            return
        if self._policy.notify == "poll" and self._computing:
            self._unpolled.append(state)
            return
        state.status = advance(state.status, Status.SUCCESS)
        del self._rooms[state.room]
        if self._policy.notify != "write":
            self._notify(state, state.last)
        self._report(Sent(state.room, state.nbytes))

    def _notify(self, state: _Room, last: Arrival) -> None:
        """Tell the decode ranks, each of them once, that everything is there."""
        for name in state.writes:
            arrival = replace(last, count=1 + state.controls.get(name, 0))
            self._rank.channel.send(name, encode(arrival))

    def _broken(self, delivery: _Delivery, error: Exception) -> None:
        """Fail the room of *delivery*, because of *error*."""
        self._break(delivery.state, delivery.chunk.decode, error)

    def _break(self, state: _Room, decode: str, error: Exception) -> None:
        if state.status is not Status.FAILED:
            state.status = advance(state.status, Status.FAILED)
            state.parked.clear()
            lost = decode if isinstance(error, PeerLost) else ""
            self._report(Sent(state.room, state.nbytes, f"{type(error).__name__}: {error}", lost))
        self._settle(state)

    def _settle(self, state: _Room) -> None:
        """Report that a failed room is at rest, once it is and the leader knows of the failure."""
        if state.aborted and not state.planned and not state.moving:
            state.aborted = False  # once
            self._rooms.pop(state.room, None)
            for name in dict.fromkeys(name for _, name in state.asks):
                self._rank.channel.send(name, encode(Return(state.room, self._index)))
            self._report(Settled(state.room))
