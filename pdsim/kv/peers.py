# SPDX-License-Identifier: Apache-2.0
"""The decode ranks that a prefill rank writes to, instance by instance."""

from __future__ import annotations

from collections.abc import Sequence

from pdsim.kv.layout import KvLayout
from pdsim.kv.mapping import Grid, RankMap
from pdsim.kv.messages import MessageError, Register
from pdsim.kv.paths import DecodePeer
from pdsim.kv.policy import Policy
from pdsim.transfer.job import Rank

__all__ = ["DecodePeers"]


class DecodePeers:
    """The decode ranks that the *index*-th prefill rank of its group's *grid* is connected to.

    *all_cp_ranks* is that of `RankMap`.  Instances come with `meet` and `connect`, and go with `drop`.
    """

    def __init__(
        self, rank: Rank, layout: KvLayout, grid: Grid, index: int, all_cp_ranks: bool, policy: Policy
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._grid = grid
        self._index = index
        self._all_cp_ranks = all_cp_ranks
        self._policy = policy
        self._targets: dict[str, list[DecodePeer]] = {}
        self._sessions: dict[str, int] = {}  # sum of the numbers of an instance's targets

    def __contains__(self, instance: str) -> bool:
        """Return whether rooms may go to *instance*."""
        return instance in self._targets

    def targets(self, instance: str) -> Sequence[DecodePeer]:
        """Return the ranks of *instance* that this rank writes to; none if it is gone."""
        return self._targets.get(instance, ())

    def session(self, instance: str) -> int:
        """Return a number that tells the ranks of *instance* that this rank writes to from those of others."""
        return self._sessions.get(instance, 0)

    def connected(self, instance: str, decode: Grid) -> bool:
        """Return whether this rank can write to all ranks of *instance*, a group of *decode*, that it has to."""
        return len(self.targets(instance)) == len(self._map(decode).readers(self._index))

    def connect(self, message: Register) -> None:
        """Connect to the decode rank that sent *message*.

        Raise a `MessageError` with both values if its pool is of another kind, and what `Endpoint.connect` raises.
        """
        layout = message.layout
        if layout.shape != self._layout.shape:
            raise MessageError(
                f"{message.instance} keeps {layout.shape}, this rank {self._layout.shape}: serve one model"
            )
        if layout.page_size != self._layout.page_size:
            raise MessageError(
                f"{message.instance} has kv.page_size={layout.page_size}, this rank {self._layout.page_size}: "
                "pages must be equal on both sides"
            )
        part = self._map(Grid(layout.tp, layout.pp)).part(self._index, message.index)
        if part is None:
            raise MessageError(f"rank {message.index} of {message.instance} needs nothing of rank {self._index}")
        peer = self._rank.endpoint.connect(message.address)
        number = sum(map(len, self._targets.values()))
        target = DecodePeer(peer, number, self._layout, message, part, self._policy)
        self._targets.setdefault(message.instance, []).append(target)
        self._sessions[message.instance] = self.session(message.instance) + number

    def meet(self, instance: str) -> None:
        """Take note that rooms may go to *instance*, also if this rank has nothing to write there."""
        self._targets.setdefault(instance, [])

    def drop(self, instance: str) -> None:
        """Forget the ranks of *instance*, which is gone; a chunk that is still to go there fails its room."""
        self._targets.pop(instance, None)
        self._sessions.pop(instance, None)

    def _map(self, decode: Grid) -> RankMap:
        return RankMap(self._layout.shape, self._grid, decode, self._all_cp_ranks)
