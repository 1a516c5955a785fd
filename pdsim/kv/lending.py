# SPDX-License-Identifier: Apache-2.0
"""The prefill side of a pulled handoff, on one rank: it computes, and leaves the KV where readers find it.

Who may read and until when is its leader's business; what is read, and by whom, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdsim.kv.contents import EVERY, Contents
from pdsim.kv.layout import KvLayout
from pdsim.kv.mapping import Grid
from pdsim.kv.messages import Chunk, Register, Sent, Settled
from pdsim.kv.paths import REGION, sources
from pdsim.kv.policy import Policy
from pdsim.transfer.job import Rank

__all__ = ["KvLender"]


@dataclass(slots=True)
class _ComputedRoom:
    """A request that this rank computes."""

    planned: int = 0  # chunks whose forward has not ended
    aborted: bool = False


class KvLender:
    """Keeps what a prefill rank, the *index*-th of its group's *grid*, computed, for decode ranks to read.

    *report* is called with `Sent` once all of a room is computed here, and with `Settled` once an aborted room is
    not computed any more.  Where memory has contents, those of rooms up to number *checked* are written into it.

    Life of a room: `expect` when a forward with a chunk of it begins, `send` when that has ended, and with the last
    chunk the room is forgotten here.  `abort` waits for forwards under way.
    """

    def __init__(
        self,
        rank: Rank,
        layout: KvLayout,
        grid: Grid,
        index: int,
        report: Callable[[Sent | Settled], None],
        policy: Policy,
        checked: int = EVERY,
    ) -> None:
        self.layout = layout
        self.fallbacks: dict[str, int] = {}  # none: metadata is not pulled
        self._rank = rank
        self._index = index
        self.report = report
        self._checked = checked
        self._rooms: dict[int, _ComputedRoom] = {}
        buffer = rank.device.allocate(layout.size, policy.memory_pool)
        rank.endpoint.register(buffer, REGION)
        self.contents = Contents(buffer, layout, grid.at(index).tp)

    def __len__(self) -> int:
        """Return the number of rooms that are being computed."""
        return len(self._rooms)

    def progressed(self) -> bool:
        """Return False: nothing is written here."""
        return False

    def register(self, life: str, peer: str) -> Register:
        """Return what the ranks of the decode life *peer* need to know to read from this rank of *life*."""
        return Register(peer, self._rank.endpoint.address(), life, self._index, self.layout)

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Take note of chunks whose forward begins: each will be given to `send`."""
        for chunk in chunks:
            self._rooms.setdefault(chunk.room, _ComputedRoom()).planned += 1

    def send(self, chunk: Chunk) -> None:
        """Take note that the forward of *chunk* has ended; with the last, the room may be read."""
        room = self._rooms[chunk.room]
        room.planned -= 1
        if room.aborted:
            self._settle(chunk.room, room)
            return
        if self._rank.device.holds_bytes and chunk.room <= self._checked:
            self.contents.fill(chunk.room, sources(chunk.runs), chunk.first_page * self.layout.page_size)
            if chunk.last:
                self.contents.fill_state(chunk.room, tuple(map(sources, chunk.state)), chunk.tokens)
        if chunk.last:
            del self._rooms[chunk.room]
            self.report(Sent(chunk.room, 0))

    def poll(self) -> None:
        """Do nothing: there are no writes to look at."""

    def abort(self, room: int) -> None:
        """Give *room* up.  `Settled` follows, at once if none of its forwards is under way."""
        state = self._rooms.get(room) or _ComputedRoom()
        state.aborted = True
        self._settle(room, state)

    def _settle(self, number: int, room: _ComputedRoom) -> None:
        if not room.planned:
            self._rooms.pop(number, None)
            self.report(Settled(number))
