# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank keeps of the handoffs that it has part in, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace
from simpy.events import Event

from pdsim.core.errors import PeerLost
from pdsim.kv.messages import Arrival, Chunk, Return, Sent, Settled, encode
from pdsim.kv.paths import DecodePeer, StagedPiece
from pdsim.kv.policy import Policy
from pdsim.kv.rooms import Status, advance
from pdsim.transfer import Transfer, WriteSequence
from pdsim.transfer.job import Rank

__all__ = ["ChunkTransfer", "SenderRoom", "SenderRooms"]


class SenderRoom:
    """A request's handoff as one prefill rank sees it.

    It is over when *last* is known and *unfinished* is 0; a failed one is at rest when *planned* and *moving* are 0.
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
        self.parked: dict[tuple[int, str], ChunkTransfer] = {}  # what waits for an answer to that
        self.refused: set[str] = set()  # targets that had no slot for a chunk of this room
        self.sequences: list[WriteSequence] = []  # that are under way
        self.controls: dict[str, int] = {}  # messages with metadata to each target


class ChunkTransfer(NamedTuple):
    """A write to be made.  Without a *piece*, metadata over the control channel.

    Made when a forward has ended, put into a queue then or when its slot is granted, and never changed.
    """

    state: SenderRoom
    chunk: Chunk
    target: DecodePeer
    piece: StagedPiece | None
    arrival: Arrival

    @property
    def writes(self) -> int:
        """How many writes, or messages, it takes."""
        return 1 if self.piece is None else self.piece.writes

    @property
    def key(self) -> tuple[int, str]:
        """Chunk and target."""
        return self.chunk.index, self.target.peer.name

    @property
    def waits(self) -> bool:
        """Whether it goes into a slot that was asked for, and there is no answer yet."""
        return self.piece is not None and bool(self.piece.rows) and self.state.asks.get(self.key, -1) is None

    @property
    def computed(self) -> float:
        """The share of its forward after which it can be written: K and V of a layer at the layer's end."""
        if self.piece is None or self.piece.plane < 0:
            return 1.0
        each = self.target.planes_of_a_layer
        return (self.piece.plane // each + 1) * each / self.target.planes

    @property
    def spare(self) -> bool:
        """Whether a message can take its place: it moves metadata only."""
        return self.piece is not None and not (self.piece.rows or self.piece.state)


class SenderRooms:
    """The rooms that the *index*-th prefill rank of its group has part in, until they are over.

    *report* is called with `Sent` once a room is over on this rank, for better or worse, and with `Settled` once
    nothing of a failed room moves any more and its leader has aborted it.

    `pdsim.kv.sender.KvSender` adds what is written; this class knows only when a room is over.
    """

    def __init__(self, rank: Rank, index: int, policy: Policy, report: Callable[[Sent | Settled], None]) -> None:
        self._rank = rank
        self._index = index
        self._policy = policy
        self.report = report
        self._rooms: dict[int, SenderRoom] = {}
        self._computing = 0  # forwards that have begun and whose results have not been looked at
        self._unpolled: list[SenderRoom] = []

    def __len__(self) -> int:
        """Return the number of rooms that are not over."""
        return len(self._rooms)

    def computed(self, chunk: Chunk) -> None:
        """Take note that the forward of *chunk* has ended, whose planes are written as they are computed."""
        state = self._rooms.get(chunk.room)
        if state is None:
            return
        state.planned -= 1
        if state.status is Status.FAILED:
            self._settle(state)
        elif not state.unfinished:
            self._conclude(state)

    def poll(self) -> None:
        """Look at what has become of the writes, as a scheduler does after a forward; the next may be under way."""
        self._computing -= 1
        unpolled, self._unpolled = self._unpolled, []
        for state in unpolled:
            self._conclude(state, looked=True)

    def abort(self, room: int) -> None:
        """Give *room* up: nothing more of it is written.  `Settled` follows, at once if nothing of it is known."""
        state = self._rooms.get(room) or SenderRoom(room)
        state.aborted = True
        self._fail(state)
        self._settle(state)

    def _fail(self, state: SenderRoom) -> None:
        """Let the writes that are under way be the last ones."""
        state.status = advance(state.status, Status.FAILED)
        for sequence in state.sequences:
            sequence.stop()

    def _over(self, state: SenderRoom) -> None:
        """Count one write as done."""
        state.unfinished -= 1
        if state.status is Status.FAILED:
            self._settle(state)
        elif not state.unfinished:
            self._conclude(state)

    def _conclude(self, state: SenderRoom, *, looked: bool = False) -> None:
        """End the room if its last chunk is written; called when no write of it is under way.

        With ``notify="poll"`` that waits until the scheduler has *looked*, while forwards are under way.
        """
        if state.last is None or state.planned or state.status is Status.FAILED:
            return
        if self._policy.notify == "poll" and self._computing and not looked:
            self._unpolled.append(state)
            return
        state.status = advance(state.status, Status.SUCCESS)
        del self._rooms[state.room]
        if self._policy.notify != "write":
            self._notify(state, state.last)
        self.report(Sent(state.room, state.nbytes))

    def _notify(self, state: SenderRoom, last: Arrival) -> None:
        """Tell the decode ranks, each of them once, that everything is there."""
        for name in state.writes:
            arrival = replace(last, count=1 + state.controls.get(name, 0))
            self._rank.channel.send(name, encode(arrival))

    def _hold(self, state: SenderRoom, failed: Transfer | None) -> None:
        """Keep the room from its end until nothing of a write that *failed* moves any more."""
        if failed is None or failed.settled.triggered:
            state.moving -= 1
        else:
            failed.settled.callbacks.append(partial(self._settled, state))

    def _settled(self, state: SenderRoom, _: Event) -> None:
        state.moving -= 1
        self._settle(state)

    def _broken(self, delivery: ChunkTransfer, error: Exception) -> None:
        """Fail the room of *delivery*, because of *error*."""
        self._break(delivery.state, delivery.chunk.decode, error)

    def _break(self, state: SenderRoom, decode: str, error: Exception) -> None:
        if state.status is not Status.FAILED:
            self._fail(state)
            state.parked.clear()
            lost = decode if isinstance(error, PeerLost) else ""
            self.report(Sent(state.room, state.nbytes, f"{type(error).__name__}: {error}", lost))
        self._settle(state)

    def _settle(self, state: SenderRoom) -> None:
        """Report that a failed room is at rest, once it is and the leader knows of the failure."""
        if state.aborted and not state.planned and not state.moving:
            state.aborted = False  # once
            self._rooms.pop(state.room, None)
            for name in dict.fromkeys(name for _, name in state.asks):
                self._rank.channel.send(name, encode(Return(state.room, self._index)))
            self.report(Settled(state.room))
