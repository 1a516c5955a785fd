# SPDX-License-Identifier: Apache-2.0
"""A pulled handoff: prefill computes and keeps the KV (`KvSource`), decode reads it (`KvReader`).

A decode rank posts one read for each prefill rank that has some of a request.  Its descriptors are runs of
neighbouring pages on both sides, one for each layer and plane.  Leaders decide who may read, and until when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from simpy.events import Event

from pdsim.core.errors import MessageError, PeerLost
from pdsim.kv.contents import KvPool
from pdsim.kv.layout import REGION, RankMap, RankShare
from pdsim.kv.messages import Chunk, RankQuiesced, ReadRequest, RegisterPool, TransferDone
from pdsim.kv.pages import Pages, after, before, pair, total
from pdsim.kv.plan import Peers, Planner, planner
from pdsim.kv.push import when_settled
from pdsim.transfer import Batch, Notification, Peer, Transfer


@dataclass(slots=True)
class _ComputedRoom:
    """A request that this rank computes."""

    planned: int = 0  # chunks whose forward has not ended
    aborted: bool = False


class KvSource:
    """Keeps the KV that a prefill rank computed into its *pool*, for decode ranks to read.

    `expect` begins a forward and `send` ends it; the last chunk ends the room here.  *report* is called with
    `TransferDone` once all of a room is computed here, and with `RankQuiesced` once an aborted room is not computed
    any more.
    """

    def __init__(self, pool: KvPool, report: Callable[[TransferDone | RankQuiesced], None]) -> None:
        self.pool = pool
        self.layout = pool.layout
        self.fallbacks: dict[str, int] = {}  # none: metadata is not pulled
        self.report = report
        self._rooms: dict[int, _ComputedRoom] = {}

    def __len__(self) -> int:
        """Return the number of rooms that are being computed."""
        return len(self._rooms)

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Count *chunks*, whose forward begins: each will be given to `send`."""
        for chunk in chunks:
            self._rooms.setdefault(chunk.room, _ComputedRoom()).planned += 1

    def send(self, chunk: Chunk) -> None:
        """Count *chunk*, whose forward has ended; after the last one the room may be read."""
        room = self._rooms[chunk.room]
        room.planned -= 1
        if room.aborted:
            self._settle(chunk.room, room)
            return
        self.pool.fill(chunk, metadata=False)
        if chunk.last:
            del self._rooms[chunk.room]
            self.report(TransferDone(chunk.room, 0))

    def abort(self, room: int) -> None:
        """Abort *room*.  `RankQuiesced` follows, at once if none of its forwards is under way."""
        state = self._rooms.get(room) or _ComputedRoom()
        state.aborted = True
        self._settle(room, state)

    def _settle(self, number: int, room: _ComputedRoom) -> None:
        if not room.planned:
            self._rooms.pop(number, None)
            self.report(RankQuiesced(number))


class _Source(NamedTuple):
    """A prefill rank that this rank reads from."""

    peer: Peer
    planner: Planner
    components: tuple[str, ...]
    path: str


@dataclass(slots=True)
class _ReadRoom:
    """A request that this rank reads."""

    request: ReadRequest
    missing: int = 0  # reads that have not completed
    moving: int = 0  # of them and of those that failed, how many have not settled
    nbytes: int = 0
    failed: bool = False
    forgotten: bool = False


class KvReader:
    """Reads what a decode rank needs in its *pool* from the prefill ranks of *rank_map*.

    *report* is called with `TransferDone` once for each room, when all of it is read and as it should be, or a read
    has failed; *quiet* once for each room to `forget`, when nothing of it moves any more.  A room that was read
    completely needs no `forget`.  `posted` is when all reads of this rank are posted, on its clock.
    """

    def __init__(
        self,
        pool: KvPool,
        rank_map: RankMap,
        report: Callable[[TransferDone], None],
        quiet: Callable[[RankQuiesced], None],
    ) -> None:
        self.pool = pool
        self.layout = pool.layout
        self.report = report
        self.posted = 0.0
        self.ignored = 0
        self._rank = pool.rank
        self._map = rank_map
        self._quiet = quiet
        self._rooms: dict[int, _ReadRoom] = {}
        self._under_way = 0  # reads that have neither succeeded nor failed; the engine ends each by its deadline
        self._succeeded = False  # whether one has since `progressed` was called
        self.peers: Peers[_Source] = Peers(pool.rank, pool.layout, rank_map.writers(pool.index), self._connected)

    def __len__(self) -> int:
        """Return the number of rooms that are being read, or not forgotten after a failure."""
        return len(self._rooms)

    def progressed(self) -> bool:
        """Return whether a read is under way or prepared, or has succeeded since the last call."""
        succeeded, self._succeeded = self._succeeded, False
        return succeeded or self._under_way + self.peers.preparing > 0

    def read(self, message: ReadRequest) -> None:
        """Read a room into its pages.  `TransferDone` follows."""
        room = self._rooms[message.room] = _ReadRoom(message)
        self._begin(room)

    def _begin(self, room: _ReadRoom) -> None:
        message = room.request
        if not self.peers.connected(message.prefill):
            self.peers.wait(message.prefill, message.room, lambda: self._begin(room))
            return
        state = tuple(map(pair, message.source_state, message.state))
        count = total(message.source)
        for index, source in self.peers.of(message.prefill).items():
            share = self._map.share(index, count) if "kv" in source.components else range(0)
            here, there = message.pages, message.source
            if len(share) < count:
                here, there = (before(after(side, share.start), len(share)) for side in (here, there))
            own = state if source.components != ("kv",) else ()
            if here or own:
                self._post(room, source, source.planner.between(there, here, own))
        if not room.missing:
            self._complete(room)

    def notice(self, notification: Notification) -> None:
        """Raise a `MessageError`: nobody writes here."""
        raise MessageError(f"{notification.sender} notified {self._rank.name} of a write, which pulls what it needs")

    def forget(self, number: int) -> None:
        """Abort room *number*: `RankQuiesced` follows once nothing of it moves into this rank's pages any more."""
        self.peers.give_up(number)
        room = self._rooms.get(number)
        if room is not None:
            room.failed = True
        if room is None or not room.moving:
            self._rooms.pop(number, None)
            self._quiet(RankQuiesced(number))
        else:
            room.forgotten = True

    def _connected(self, peer: Peer, register: RegisterPool, part: RankShare) -> _Source:
        path = "grouped" if part.heads is None else "sliced"
        return _Source(peer, planner(register.layout, self.layout, part), part.components, path)

    def _post(self, room: _ReadRoom, source: _Source, batch: Batch) -> None:
        batch = batch.over(source.peer.regions[REGION], self.pool.region)
        transfer = self._rank.endpoint.read(source.peer, batch, label=f"{room.request.room}/0/{source.path}")
        self.posted = max(self.posted, transfer.posted)
        room.missing += 1
        room.moving += 1
        self._under_way += 1
        transfer.callbacks.append(partial(self._ended, room))

    def _ended(self, room: _ReadRoom, event: Event) -> None:
        assert isinstance(event, Transfer)
        room.missing -= 1
        self._under_way -= 1
        if event.ok:
            self._succeeded = True
            room.nbytes += event.batch.nbytes
            self._settled(room)
            if not room.missing and not room.failed:
                self._complete(room)
            return
        when_settled(event, lambda: self._settled(room))
        error: Any = event.value
        self._fail(room, error, room.request.prefill if isinstance(error, PeerLost) else "")

    def _settled(self, room: _ReadRoom) -> None:
        room.moving -= 1
        if room.forgotten and not room.moving:
            self._rooms.pop(room.request.room, None)
            self._quiet(RankQuiesced(room.request.room))

    def _fail(self, room: _ReadRoom, error: Exception, lost: str) -> None:
        if not room.failed:
            room.failed = True
            self.report(TransferDone(room.request.room, room.nbytes, f"{type(error).__name__}: {error}", lost))

    def _complete(self, room: _ReadRoom) -> None:
        request = room.request
        if self.pool.checks(request.room):
            pages = first(request.pages, request.source)
            held = -(-request.input // self.layout.page_size) - total(request.source)
            if reason := self.pool.verify(request.room, request.input, pages, request.state, held):
                self._fail(room, MessageError(reason), "")
                return
        del self._rooms[request.room]
        self.report(TransferDone(request.room, room.nbytes))


def first(pages: Pages, others: Pages) -> Pages:
    """Return the first of *pages*, as many as *others* has.

    >>> first(((4, 3), (10, 2)), ((0, 4),))
    ((4, 3), (10, 1))
    """
    return before(pages, total(others))
