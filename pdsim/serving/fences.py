# SPDX-License-Identifier: Apache-2.0
"""Proof that nothing of another instance moves in this one's memory any more, rank by rank and for all of them.

A life of an instance that is gone may have posted transfers that still land.  Its pages here stay in quarantine
until every rank has the proof of its endpoint (`pdsim.transfer.Endpoint.quiesced`) about every rank that reaches
into it. Both sides of a handoff need it: decode where prefill pushes, prefill where decode pulls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdsim.kv.messages import Fence, Fenced, KvMessage
from pdsim.serving.deployment import epoch_of, instance_of, rank_name
from pdsim.serving.rank_process import EngineProcess
from pdsim.transfer import Program

__all__ = ["FenceCount", "PeerFence"]


class PeerFence:
    """What one rank knows of the instances whose *peers*, ranks by index, move bytes in its memory.

    *fenced* is called with the answer to each `Fence`, once it is proven; *parted*, if given, with the name of each
    rank of an instance of which new proof has come.  There is no proof about a life while it lives.

    *process* is the rank; this registers its handler for `Fence` there.  Proof is per instance and epoch: once there
    is one about epoch *n*, there is one about all earlier ones.
    """

    def __init__(
        self,
        process: EngineProcess,
        peers: Sequence[int],
        fenced: Callable[[Fenced], None],
        parted: Callable[[str], None] | None = None,
    ) -> None:
        self._process = process
        self._peers = peers
        self._fenced = fenced
        self._parted = parted
        self._proven: dict[str, int] = {}  # by instance: up to which epoch nothing of it moves here
        process.handlers |= {Fence: lambda _, message: self.prove(message)}

    def introduce(self, peer: str, message: Callable[[], KvMessage]) -> None:
        """Send *message* to the ranks of *peer*, a life, once nothing of an earlier life of it moves here."""
        self._process.clock.process(self._introduce(peer, message))

    def prove(self, fence: Fence) -> None:
        """Answer *fence* once nothing of the life that it names moves here."""
        self._process.clock.process(self._prove(fence))

    def _introduce(self, peer: str, message: Callable[[], KvMessage]) -> Program:
        yield from self._wait(instance_of(peer), epoch_of(peer) - 1)
        if not self._process.has_ended:
            self._process.send([rank_name(instance_of(peer), index) for index in self._peers], message())

    def _prove(self, fence: Fence) -> Program:
        yield from self._wait(instance_of(fence.life), epoch_of(fence.life))
        if not self._process.has_ended:
            self._fenced(Fenced(fence.number))

    def _wait(self, instance: str, epoch: int) -> Program:
        """Wait for the proof that nothing of *instance* up to *epoch* moves here."""
        for index in self._peers:
            if self._proven.get(instance, 0) >= epoch:
                return
            yield self._process.rank.endpoint.quiesced(rank_name(instance, index))
        if self._proven.get(instance, 0) < epoch:
            self._proven[instance] = epoch
            if self._parted is not None:
                for index in self._peers:
                    self._parted(rank_name(instance, index))


class FenceCount:
    """What a leader waits for: the rooms of each fence, and how many of its instance's *ranks* lack the proof.

    Numbers follow *first*, so that an answer to an earlier life of the leader is none to this one.

    Life of a fence: `begin` gives its question, which the leader sends; `count` takes the answers; with the last one
    the rooms are returned, and the fence is gone.
    """

    def __init__(self, first: int, ranks: int) -> None:
        self._number = first
        self._ranks = ranks
        self._open: dict[int, tuple[list[int], set[int]]] = {}  # rooms, and ranks without proof

    def begin(self, life: str, rooms: list[int]) -> Fence:
        """Return the question to every rank about *life*, whose proof *rooms* wait for."""
        self._number += 1
        self._open[self._number] = rooms, set(range(self._ranks))
        return Fence(self._number, life)

    def count(self, rank: int, message: Fenced) -> list[int] | None:
        """Count the proof of *rank*; return the rooms that waited for it alone, None if no fence has that number."""
        fence = self._open.get(message.number)
        if fence is None:
            return None
        rooms, missing = fence
        missing.discard(rank)
        if missing:
            return []
        del self._open[message.number]
        return rooms
