# SPDX-License-Identifier: Apache-2.0
"""Which way a chunk goes from one prefill rank to one decode rank, and in which writes.

==========  ============================================================================================
grouped     both ranks keep the same rows: runs of neighbouring pages, all planes in one write or one each
sliced      they keep different heads: a descriptor a token and plane
staged      the same, gathered before and scattered after: one descriptor (`pdsim.kv.staging.ring`)
metadata    first-token metadata and state alone, where the other paths do not take them along
==========  ============================================================================================

Unknown here: queues, rooms' fates, time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdsim.kv.layout import AUX_ROWS, KvLayout
from pdsim.kv.mapping import RankShare
from pdsim.kv.messages import Chunk, Register
from pdsim.kv.pages import Pages
from pdsim.kv.plan import Runs, planner
from pdsim.kv.policy import Policy
from pdsim.kv.staging.ring import BlockPlan, block_plans
from pdsim.transfer import Batch, Peer, Region

__all__ = ["PATHS", "REGION", "STAGING", "DecodePeer", "Planes", "StagedPiece", "sources", "targets"]

REGION = "kv"
"""The name under which every rank registers its pool."""

STAGING = "staging"
"""The name under which a decode rank registers its ring."""

PATHS = ("grouped", "sliced", "staged", "metadata")


class StagedPiece(NamedTuple):
    """What one write moves.

    *rows* are runs of pages, *slots* the two sides' slots of metadata, *state* runs of each component of the state.
    """

    path: str
    rows: Runs = ()
    slots: tuple[int, int] | None = None
    state: tuple[Runs, ...] = ()
    plane: int = -1  # the first one of *rows* that it moves, counted among those that both ranks have; -1 is all
    writes: int = 1  # one after the other, each of the next plane


class DecodePeer:
    """A decode rank that sent *register*, as a prefill rank sees it that writes *part* to it.

    *number* tells this rank's targets apart.

    Made when a decode rank registers, and kept until its instance is dropped.  *metadata* is the way that
    first-token metadata goes to this rank, and *fallback* why that is not the policy's.  *blocks* is None unless
    chunks may be staged.
    """

    def __init__(
        self,
        peer: Peer,
        number: int,
        source: KvLayout,
        register: Register,
        part: RankShare,
        policy: Policy,
    ) -> None:
        self.peer = peer
        self.number = number
        self.part = part
        self.region = peer.regions[REGION]
        self.ring = peer.regions.get(STAGING)
        self.metadata, self.fallback = metadata_route(policy, AUX_ROWS, register.metadata_rows)
        self._policy = policy
        self._tensors = source.shape.tensors
        self._path = "grouped" if part.heads is None else "sliced"
        self._planner = planner(source, register.layout, part)
        self._moves_state = any(component != "kv" for component in part.components)
        self.blocks: BlockPlan | None = None
        if part.heads is not None and self.ring is not None:
            self.blocks = block_plans(source, register.layout, part.heads)[0]
        self._call = policy.call if part.heads is None else policy.slices or policy.call
        self._apart = self.metadata == "write" or self.blocks is not None or self._call != "chunk"

    def block(self, rows: Runs, limit: int) -> int:
        """Return the bytes of the block of *rows*; 0 if it cannot be staged or exceeds *limit* or the ring."""
        if not rows or self.blocks is None or self.ring is None or "kv" not in self.part.components:
            return 0
        size = self.blocks.nbytes(sum(count for _, _, count in rows))
        return size if size <= min(limit, self.ring.size) else 0

    def layers(self, chunk: Chunk, rows: Runs) -> list[StagedPiece]:
        """Return the writes of *chunk* as `pieces` does, but plane by plane, in the order of the layers.

        What is sent once is a write of its own, the last.
        """
        rows = self._grouped(rows) if "kv" in self.part.components else ()
        planes = range(self._planner.planes) if rows else ()
        found = [StagedPiece(self._path, rows, plane=plane) for plane in planes]
        slots = chunk.slots if chunk.last and self.part.aux and self.metadata != "control" else None
        state = chunk.state if chunk.last and self._moves_state else ()
        if slots is not None or state:
            found.append(StagedPiece("metadata", (), slots, state))
        return found

    @property
    def planes_of_a_layer(self) -> int:
        """Planes that are computed together: K and V, or the latent row."""
        return self._tensors

    @property
    def planes(self) -> int:
        """Planes of keys and values that both ranks have."""
        return self._planner.planes

    def pieces(self, chunk: Chunk, rows: Runs) -> list[StagedPiece]:
        """Return the writes of *chunk*, of whose pages *rows* are this rank's to write.

        How many there are depends on nothing that is not known before the first is posted.
        """
        rows = rows if "kv" in self.part.components else ()
        slots = chunk.slots if chunk.last and self.part.aux and self.metadata != "control" else None
        state = chunk.state if chunk.last and self._moves_state else ()
        if rows and not self._apart:
            return [StagedPiece(self._path, self._grouped(rows), slots, state)]
        found = self._rows(rows) if rows else []
        if slots is not None or state:
            found.append(StagedPiece("metadata", (), slots, state))
        return found

    def batch(self, piece: StagedPiece, number: int = 0) -> Batch:
        """Return the descriptors of the *number*-th write of *piece*, over nameless regions."""
        if piece.plane >= 0:
            return self._planner.plane(piece.rows, piece.plane + number)
        return self._planner.batch(piece.rows, piece.slots, piece.state)

    def _rows(self, rows: Runs) -> list[StagedPiece]:
        """Return the writes that move *rows*, as the policy has them.

        They go together, by plane, or by descriptor and plane.
        """
        rows = self._grouped(rows)
        if self._call == "chunk" or self.blocks is not None:
            return [StagedPiece(self._path, rows)]
        planes = self._planner.planes
        calls = [(run,) for run in rows] if self._call == "descriptor" else [rows]
        if self._policy.queues:  # a queue does one thing after the other
            return [StagedPiece(self._path, own, plane=0, writes=planes) for own in calls]
        return [StagedPiece(self._path, own, plane=plane) for own in calls for plane in range(planes)]

    def _grouped(self, rows: Runs) -> Runs:
        """Return *rows* as the backend groups them: a slice is a descriptor a token whichever way."""
        if self._policy.grouping == "runs" or self._path == "sliced":
            return rows
        return tuple((source + i, target + i, 1) for source, target, count in rows for i in range(count))


class Planes:
    """The writes of *piece* to *target* from *region*, of a plane each, made when asked for."""

    def __init__(self, target: DecodePeer, piece: StagedPiece, region: Region) -> None:
        self._target = target
        self._piece = piece
        self._region = region

    def __len__(self) -> int:
        """Return the number of planes."""
        return self._piece.writes

    def __getitem__(self, number: int, /) -> Batch:
        """Return the batch of the plane *number*."""
        return self._target.batch(self._piece, number).over(self._region, self._target.region)


def sources(runs: Runs) -> Pages:
    """Return the pages that *runs* come from."""
    return tuple((source, count) for source, _, count in runs)


def targets(runs: Runs) -> Pages:
    """Return the pages that *runs* go to."""
    return tuple((target, count) for _, target, count in runs)


def metadata_route(policy: Policy, mine: Sequence[int], theirs: Sequence[int]) -> tuple[str, str]:
    """Return the way of metadata between ranks whose rows have these sizes, and why it is not the policy's, or "".

    Descriptors pair row by row, so rows that are not the same in number and size go over the control channel.
    """
    way = policy.metadata_by
    if way == "control" or tuple(mine) == tuple(theirs):
        return way, ""
    return "control", f"{len(mine)} rows of {sum(mine)} B here, {len(theirs)} of {sum(theirs)} B there"
