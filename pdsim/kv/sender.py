"""The prefill side of a handoff, on one rank: writes of chunks, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from simpy.events import Event

from pdsim.errors import PeerLost, TransferError
from pdsim.kv.contents import Contents
from pdsim.kv.layout import KvLayout
from pdsim.kv.mapping import Grid, Part, RankMap, share
from pdsim.kv.messages import Arrival, Chunk, MessageError, Register, Sent, Settled, encode
from pdsim.kv.pages import Pages
from pdsim.kv.plan import Planner, Runs, cut, planner
from pdsim.kv.status import Status, advance
from pdsim.transfer import Peer, Rank, Region, Transfer

__all__ = ["REGION", "KvSender"]

REGION = "kv"
"""The name under which every rank registers its pool."""


class _Target(NamedTuple):
    """A decode rank that this rank writes to."""

    peer: Peer
    region: Region
    planner: Planner
    part: Part


@dataclass(slots=True)
class _Room:
    """A request's handoff as this rank sees it."""

    room: int
    status: Status = Status.WAITING
    writes: dict[str, int] = field(default_factory=dict)  # to each target, so far
    nbytes: int = 0
    planned: int = 0  # chunks whose forward has not ended
    moving: int = 0  # writes that have not completed, or failed and not settled
    unfinished: int = 0  # writes that have not completed
    last: bool = False  # the last chunk has been posted
    aborted: bool = False  # the leader plans no more chunks


class KvSender:
    """Writes what a prefill rank, the *index*-th of its group's *grid*, computed to the decode ranks that need it.

    A chunk is written as soon as its forward has ended, while the next is computed; chunks may overtake each other.
    Each write carries an `Arrival`, the last one with the number of writes, so that the receiver knows when it has all.

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
    ) -> None:
        self.layout = layout
        self._rank = rank
        self._grid = grid
        self._index = index
        self._place = grid.at(index)
        self._report = report
        self._all_cp_ranks = all_cp_ranks
        self._targets: dict[str, list[_Target]] = {}
        self._rooms: dict[int, _Room] = {}
        self._buffer = rank.device.allocate(layout.size)
        self._region = rank.endpoint.register(self._buffer, REGION)
        self._contents = Contents(self._buffer, layout, self._place.tp)

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
        target = _Target(peer, peer.regions[REGION], planner(self.layout, layout, part), part)
        self._targets.setdefault(message.instance, []).append(target)

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Take note of chunks whose forward begins: each will be given to `send`."""
        for chunk in chunks:
            state = self._rooms.get(chunk.room)
            if state is None:
                state = self._rooms[chunk.room] = _Room(chunk.room)
            state.planned += 1

    def send(self, chunk: Chunk) -> None:
        """Write the pages of *chunk*, whose forward has just ended, unless its room has failed meanwhile."""
        state = self._rooms[chunk.room]
        state.planned -= 1
        if state.status is Status.FAILED:
            self._settle(state)
            return
        state.status = advance(state.status, Status.TRANSFERRING)
        state.last = chunk.last
        if self._rank.device.holds_bytes:
            self._fill(chunk)
        if chunk.runs:
            self._write(state, chunk)
        if not state.unfinished and state.status is not Status.FAILED:
            self._conclude(state)

    def abort(self, room: int) -> None:
        """Give *room* up: nothing more of it is written.  `Settled` follows, at once if nothing of it is known."""
        state = self._rooms.get(room) or _Room(room)
        state.aborted = True
        state.status = advance(state.status, Status.FAILED)
        self._settle(state)

    def _map(self, decode: Grid) -> RankMap:
        return RankMap(self.layout.shape, self._grid, decode, self._all_cp_ranks)

    def _fill(self, chunk: Chunk) -> None:
        self._contents.fill(chunk.room, _sources(chunk.runs), chunk.first_page * self.layout.page_size)
        if chunk.last:
            self._contents.fill_aux(chunk.room, chunk.slots[0])
            self._contents.fill_state(chunk.room, tuple(map(_sources, chunk.state)), chunk.tokens)

    def _write(self, state: _Room, chunk: Chunk) -> None:
        pages = -(-chunk.tokens // self.layout.page_size)
        runs, finished = self._share(chunk, pages)
        for target in self._targets.get(chunk.decode, ()):
            part = target.part
            rows = runs if "kv" in part.components else ()
            if not rows and not (chunk.last and part.with_last):
                continue
            count = state.writes[target.peer.name] = state.writes.get(target.peer.name, 0) + 1
            if not (chunk.last if part.with_last else finished):
                count = 0
            slots = chunk.slots if chunk.last and part.aux else None
            batch = target.planner.batch(rows, slots, chunk.state).over(self._region, target.region)
            arrival = Arrival(chunk.room, self._index, count, pages, chunk.noticed, chunk.started, self._rank.clock.now)
            try:
                transfer = self._rank.endpoint.write(
                    target.peer, batch, encode(arrival), label=f"{chunk.room}/{chunk.index}"
                )
            except TransferError as error:
                self._fail(state, chunk.decode, error)
                return
            state.moving += 1
            state.unfinished += 1
            transfer.callbacks.append(partial(self._written, state, chunk.decode))

    def _share(self, chunk: Chunk, pages: int) -> tuple[Runs, bool]:
        """Return what of *chunk*, of a request of *pages*, this rank writes, and whether it writes no more after it."""
        if not self._all_cp_ranks:
            return chunk.runs, chunk.last
        mine = share(pages, self._grid.cp, self._place.cp)
        first = max(mine.start, chunk.first_page)
        end = min(mine.stop, chunk.first_page + sum(count for _, _, count in chunk.runs))
        if end <= first:
            return (), False
        return cut(chunk.runs, first - chunk.first_page, end - first), end == mine.stop

    def _written(self, state: _Room, decode: str, event: Event) -> None:
        assert isinstance(event, Transfer)
        state.unfinished -= 1
        if event.ok:
            state.nbytes += event.batch.nbytes
            state.moving -= 1
        elif event.settled.triggered:
            state.moving -= 1
        else:
            event.settled.callbacks.append(partial(self._settled, state))
        if not event.ok:
            assert isinstance(event.value, Exception)
            self._fail(state, decode, event.value)
        if state.status is Status.FAILED:
            self._settle(state)
        elif not state.unfinished:
            self._conclude(state)

    def _settled(self, state: _Room, _: Event) -> None:
        state.moving -= 1
        self._settle(state)

    def _conclude(self, state: _Room) -> None:
        """End the room if its last chunk was posted; called when no write of it is under way."""
        if state.last:
            state.status = advance(state.status, Status.SUCCESS)
            del self._rooms[state.room]
            self._report(Sent(state.room, state.nbytes))

    def _fail(self, state: _Room, decode: str, error: Exception) -> None:
        if state.status is Status.FAILED:
            return
        state.status = advance(state.status, Status.FAILED)
        lost = decode if isinstance(error, PeerLost) else ""
        self._report(Sent(state.room, state.nbytes, f"{type(error).__name__}: {error}", lost))

    def _settle(self, state: _Room) -> None:
        """Report that a failed room is at rest, once it is and the leader knows of the failure."""
        if state.aborted and not state.planned and not state.moving:
            state.aborted = False  # once
            self._rooms.pop(state.room, None)
            self._report(Settled(state.room))


def _sources(runs: Runs) -> Pages:
    """Return the pages that *runs* come from."""
    return tuple((source, count) for source, _, count in runs)
