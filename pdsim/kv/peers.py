# SPDX-License-Identifier: Apache-2.0
"""The decode ranks that a prefill rank writes to, and the path and the writes of a chunk to each of them.

==========  ============================================================================================
grouped     both ranks keep the same rows: runs of neighbouring pages, all planes in one write or one each
sliced      they keep different heads: a descriptor a token and plane
staged      the same, gathered before and scattered after: one descriptor (`pdsim.kv.staging.ring`)
metadata    first-token metadata and state alone, where the other paths do not carry them
==========  ============================================================================================

Unknown here: queues, the state of rooms, time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdsim.core.errors import MessageError
from pdsim.kv.layout import AUX_ROWS, KvLayout
from pdsim.kv.mapping import Grid, RankMap, RankShare
from pdsim.kv.messages import Chunk, RegisterPool
from pdsim.kv.pages import Pages
from pdsim.kv.plan import Runs, planner
from pdsim.kv.policy import Policy
from pdsim.kv.staging.ring import BlockPlan, block_plans
from pdsim.transfer import Batch, Peer, Region
from pdsim.transfer.job import Rank

__all__ = [
    "PATHS",
    "REGION",
    "STAGING",
    "DecodePeer",
    "DecodePeers",
    "Planes",
    "WriteSpec",
    "metadata_route",
    "sources",
    "targets",
]

REGION = "kv"
"""The name under which every rank registers its pool."""

STAGING = "staging"
"""The name under which a decode rank registers its ring."""

PATHS = ("grouped", "sliced", "staged", "metadata")


class WriteSpec(NamedTuple):
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
    """A decode rank that sent *register*, to which a prefill rank writes *part* of its KV.

    *number* tells the targets of a prefill rank apart.  *metadata* is how first-token metadata goes to this rank,
    and *fallback* why that is not the policy's way.  *blocks* is None unless chunks may be staged.
    """

    def __init__(
        self,
        peer: Peer,
        number: int,
        source: KvLayout,
        register: RegisterPool,
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

    def layers(self, chunk: Chunk, rows: Runs) -> list[WriteSpec]:
        """Return the writes of *chunk* plane by plane, in the order of the layers; metadata and state come last."""
        rows = self._grouped(rows) if "kv" in self.part.components else ()
        planes = range(self._planner.planes) if rows else ()
        return [*(WriteSpec(self._path, rows, plane=plane) for plane in planes), *self._with_last(chunk)]

    @property
    def planes_of_a_layer(self) -> int:
        """Planes that are computed together: K and V, or the latent row."""
        return self._tensors

    @property
    def planes(self) -> int:
        """Planes of keys and values that both ranks have."""
        return self._planner.planes

    def writes(self, chunk: Chunk, rows: Runs) -> list[WriteSpec]:
        """Return the writes of *chunk*; *rows* are the runs of its pages that this rank writes."""
        rows = rows if "kv" in self.part.components else ()
        last = self._with_last(chunk)
        if rows and not self._apart:
            whole = last[0] if last else WriteSpec(self._path)
            return [whole._replace(path=self._path, rows=self._grouped(rows))]
        return [*(self._rows(rows) if rows else ()), *last]

    def _with_last(self, chunk: Chunk) -> list[WriteSpec]:
        # State and metadata, which go with the last chunk: metadata in a batch of its own if the policy says so.
        if not chunk.last:
            return []
        slots = chunk.slots if self.part.aux and self.metadata != "control" else None
        state = chunk.state if self._moves_state else ()
        specs = [WriteSpec("metadata", (), slots, state)]
        if self.metadata == "write" and slots is not None:
            specs = [WriteSpec("metadata", (), None, state), WriteSpec("metadata", (), slots)]
        return [spec for spec in specs if spec.slots is not None or spec.state]

    def batch(self, spec: WriteSpec, number: int = 0) -> Batch:
        """Return the descriptors of the *number*-th write of *spec*, over nameless regions."""
        if spec.plane >= 0:
            return self._planner.plane(spec.rows, spec.plane + number)
        return self._planner.batch(spec.rows, spec.slots, spec.state)

    def _rows(self, rows: Runs) -> list[WriteSpec]:
        rows = self._grouped(rows)
        if self._call == "chunk" or self.blocks is not None:
            return [WriteSpec(self._path, rows)]
        planes = self._planner.planes
        calls = [(run,) for run in rows] if self._call == "descriptor" else [rows]
        if self._policy.queues:  # a queue does one thing after the other
            return [WriteSpec(self._path, own, plane=0, writes=planes) for own in calls]
        return [WriteSpec(self._path, own, plane=plane) for own in calls for plane in range(planes)]

    def _grouped(self, rows: Runs) -> Runs:
        if self._policy.grouping == "runs" or self._path == "sliced":
            return rows
        return tuple((source + i, target + i, 1) for source, target, count in rows for i in range(count))


class DecodePeers:
    """The decode ranks that the *index*-th prefill rank of its group's *grid* is connected to.

    *all_cp_ranks* is that of `RankMap`.  Instances come with `expect` and `connect`, and go with `drop`.
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

    def connect(self, message: RegisterPool) -> None:
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

    def expect(self, instance: str) -> None:
        """Expect *instance* to connect, also if this rank has nothing to write there."""
        self._targets.setdefault(instance, [])

    def drop(self, instance: str) -> None:
        """Forget the ranks of *instance*, which is lost; a later chunk for it fails its room."""
        self._targets.pop(instance, None)
        self._sessions.pop(instance, None)

    def _map(self, decode: Grid) -> RankMap:
        return RankMap(self._layout.shape, self._grid, decode, self._all_cp_ranks)


class Planes:
    """The writes of *spec* to *target* from *region*, of a plane each, made when asked for."""

    def __init__(self, target: DecodePeer, spec: WriteSpec, region: Region) -> None:
        self._target = target
        self._spec = spec
        self._region = region

    def __len__(self) -> int:
        """Return the number of planes."""
        return self._spec.writes

    def __getitem__(self, number: int, /) -> Batch:
        """Return the batch of the plane *number*."""
        return self._target.batch(self._spec, number).over(self._region, self._target.region)


def sources(runs: Runs) -> Pages:
    """Return the pages that *runs* come from."""
    return tuple((source, count) for source, _, count in runs)


def targets(runs: Runs) -> Pages:
    """Return the pages that *runs* go to."""
    return tuple((target, count) for _, target, count in runs)


def metadata_route(policy: Policy, mine: Sequence[int], theirs: Sequence[int]) -> tuple[str, str]:
    """Return the path of metadata between ranks whose rows have these sizes, and why it is not the policy's, or "".

    Descriptors pair row by row.  Rows that differ in number or size go over the control channel if
    `Policy.metadata_fallback` allows it; otherwise raise a `MessageError`.
    """
    way = policy.metadata_by
    if way == "control" or tuple(mine) == tuple(theirs):
        return way, ""
    reason = f"{len(mine)} rows of {sum(mine)} B here, {len(theirs)} of {sum(theirs)} B there"
    if not policy.metadata_fallback:
        raise MessageError(
            f"metadata has {reason}: run one version on both sides, or set policy.metadata_fallback=control"
        )
    return "control", reason
