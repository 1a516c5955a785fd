# SPDX-License-Identifier: Apache-2.0
"""The writes of a chunk to the decode ranks that need it, and their descriptors.

Batches are built over nameless regions and cached, because the ranks of a group write the same offsets at the same
time: `Batch.over` then puts the real regions in their place.  Arrays are made when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np

from pdsim.core.errors import InvalidBatch, MessageError
from pdsim.kv.layout import AUX_ROWS, AUX_SIZES, REGION, STAGING, WHOLE, HeadSlice, KvLayout, PageTable, RankShare
from pdsim.kv.messages import Arrival, Chunk, RegisterPool
from pdsim.kv.pages import ManyRuns, Pages, Runs, cut, pair
from pdsim.kv.policy import Policy
from pdsim.transfer import Batch, Peer, Region
from pdsim.transfer.batch import Int64s, LazyBatch
from pdsim.transfer.job import Rank

PATHS = ("grouped", "sliced", "staged", "metadata")
"""How a chunk goes to a rank.

- grouped: both ranks keep the same rows: runs of neighbouring pages, all planes in one write or one each
- sliced: they keep different heads: a descriptor a token and plane
- staged: the same, gathered before and scattered after: one descriptor (`BlockPlan`)
- metadata: first-token metadata and state alone, where the other paths do not carry them
"""

Offsets = tuple[Int64s, Int64s, Int64s]  # source, target, size


# --- what is written -----------------------------------------------------------------------------------------------


class Planner:
    """Makes the batches that one kind of rank writes to another kind: *part* of the layers that both have.

    Of rows that both keep alike a run of pages is a descriptor a plane; of others each token (each page, if it is
    kept by heads) or each group of mamba dimensions is one.  They go plane by plane, then metadata, then state.
    Batches are cached, so they must not be changed.  `planes` counts those of keys and values that both ranks have.
    """

    def __init__(self, source: KvLayout, target: KvLayout, part: RankShare = WHOLE) -> None:
        self._layouts = source, target
        self._aux = part.aux
        sections = [
            _Section(mine, other, _pieces(source, target, mine, part))
            for mine, other in zip(source.tables, target.tables, strict=True)
            if mine.component in part.components
        ]
        self._kv = [section for section in sections if section.component == "kv" and section.planes]
        self._state = [
            [section for section in sections if section.component == component and section.planes]
            for component in source.shape.state.components
        ]
        self.planes = sum([section.planes for section in self._kv])
        self._source, self._target = (
            Region(owner="", name="", size=layout.size, address=0, device="") for layout in self._layouts
        )
        # with arrays, a sliced batch has a descriptor a token and plane, up to tens of megabytes of them
        self.batch = lru_cache(maxsize=256 if part.heads is None else 8)(self._batch)
        self.plane = lru_cache(maxsize=8)(self._plane)  # asked for by each rank that writes the same heads

    def _batch(self, runs: Runs, slots: tuple[int, int] | None = None, state: tuple[Runs, ...] = ()) -> Batch:
        # *state* are the runs of each of `StateShape.components`; descriptors of it are few, and made at once.
        # Raise `InvalidBatch` if there is nothing to move or if a page or slot lies outside its pool.
        counted = None if any(state) else self._count(runs, slots)
        if counted is None:
            return self._arrays(runs, slots, state)
        return LazyBatch(self._source, self._target, *counted, lambda: self._arrays(runs, slots, ()))

    def between(self, source: Pages, target: Pages, state: tuple[Runs, ...] = ()) -> Batch:
        """Return the batch of ``pair(source, target)`` and *state*; the pairs are made on first use.

        Raise `InvalidBatch` as `batch` does, and a `ValueError` as `pair` does.
        """
        counted = None if any(state) else self._count_between(source, target)
        if counted is None:
            return self._arrays(pair(source, target), None, state)
        return LazyBatch(self._source, self._target, *counted, lambda: self._arrays(pair(source, target), None, ()))

    def _plane(self, runs: Runs, plane: int) -> Batch:
        whole, planes = self.batch(runs), self.planes
        each = len(whole) // planes
        part = slice(plane * each, (plane + 1) * each)  # planes follow one another

        def arrays() -> Batch:
            columns = whole.source_offset[part], whole.target_offset[part], whole.size[part]
            return Batch(whole.source, whole.target, *columns)

        return LazyBatch(whole.source, whole.target, each, whole.nbytes // planes, arrays)

    def _count(self, runs: Runs, slots: tuple[int, int] | None) -> tuple[int, int] | None:
        # Descriptors and bytes; None if arrays have to say what is wrong.
        descriptors = nbytes = 0
        if runs:
            furthest = end = rows = 0
            for source, target, count in sorted(runs, key=itemgetter(1)) if len(runs) > 1 else runs:
                if source < 0 or target < end or count < 1:  # none begins before the one before it ends
                    return None
                furthest, end, rows = max(furthest, source + count), target + count, rows + count
            moved = self._planes_of((furthest, end), len(runs), rows)
            if moved is None:
                return None
            descriptors, nbytes = moved
        if slots is not None and self._aux:
            if not all(0 <= slot < layout.slots for layout, slot in zip(self._layouts, slots, strict=True)):
                return None
            descriptors += len(AUX_ROWS)
            nbytes += sum(AUX_ROWS)
        return (descriptors, nbytes) if descriptors else None

    def _count_between(self, source: Pages, target: Pages) -> tuple[int, int] | None:
        if not source or not target:
            return None
        (sources, counts), (targets, others) = _columns(source), _columns(target)
        ends = np.concatenate((counts.cumsum(), others.cumsum()))  # a pair ends where a run of either side does
        if ends[len(counts) - 1] != ends[-1] or counts.min() < 1:
            return None
        ends.sort()
        order = targets.argsort()
        starts, stops = targets[order], (targets + others)[order]
        if sources.min() < 0 or starts[0] < 0 or others.min() < 1 or (stops[:-1] > starts[1:]).any():
            return None
        runs = 1 + int(np.count_nonzero(ends[1:] != ends[:-1]))
        return self._planes_of((int((sources + counts).max()), int(stops[-1])), runs, int(ends[-1]))

    def _planes_of(self, ends: tuple[int, int], runs: int, rows: int) -> tuple[int, int] | None:
        # Descriptors and bytes of so many *runs* and *rows* on all planes; None if they *end* outside a pool.
        descriptors = nbytes = 0
        for section in self._kv:
            if not section.holds(*ends):
                return None
            count, size = section.count(runs, rows)
            descriptors += count
            nbytes += size
        return descriptors, nbytes

    def _arrays(self, runs: Runs, slots: tuple[int, int] | None, state: tuple[Runs, ...]) -> Batch:
        parts = [section.offsets(runs) for section in self._kv] if runs else []
        if slots is not None and self._aux:
            source, target = self._layouts
            parts.append((source.aux_offsets(slots[0]), target.aux_offsets(slots[1]), AUX_SIZES))
        if state:
            for sections, rows in zip(self._state, state, strict=True):
                parts += [section.offsets(rows) for section in sections]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return Batch(self._source, self._target, *(columns or [np.empty(0, np.int64)] * 3))


def _columns(pages: Pages) -> tuple[Int64s, Int64s]:
    if isinstance(pages, ManyRuns):
        return pages.columns
    rows = np.fromiter(chain.from_iterable(pages), np.int64, 2 * len(pages))
    return rows[::2], rows[1::2]


planner = lru_cache(maxsize=64)(Planner)
"""Return the `Planner` of these arguments, the same for all ranks in one process."""


class _Section:
    """The planes of a table that both sides have, and how their rows are moved: whole or in *pieces* of a row."""

    def __init__(self, source: PageTable, target: PageTable, pieces: Offsets | None) -> None:
        common = [plane for plane in source.planes if plane in set(target.planes)]
        self.component = source.component
        self.planes = len(common)
        self._rows = source.rows, target.rows
        self._items = source.item, target.item
        self._starts = [table.offsets[[table.planes.index(plane) for plane in common]] for table in (source, target)]
        self._pieces = pieces
        self._each = (1, source.item) if pieces is None else (len(pieces[2]), int(pieces[2].sum()))

    def holds(self, source: int, target: int) -> bool:
        return source <= self._rows[0] and target <= self._rows[1]

    def count(self, runs: int, rows: int) -> tuple[int, int]:
        pieces, nbytes = self._each  # of a row
        return self.planes * (runs if self._pieces is None else rows * pieces), self.planes * rows * nbytes

    def offsets(self, runs: Runs) -> Offsets:
        sides = []
        for side in (0, 1):
            pages = tuple((run[side], run[2]) for run in runs)
            _check_inside(self.component, pages, self._rows[side])
            pieces = None if self._pieces is None else self._pieces[side]
            sides.append(_spread(self._starts[side], self._items[side], pages, pieces))
        source, target = sides
        if self._pieces is None:
            sizes = np.array([run[2] for run in runs], np.int64) * self._items[0]
            return source, target, np.tile(sizes, self.planes)
        return source, target, np.tile(self._pieces[2], len(source) // len(self._pieces[2]))


def _check_inside(component: str, pages: Pages, rows: int) -> None:
    # A row outside its pool would be one of the next plane.
    for first, count in pages:
        if first < 0 or count < 1 or first + count > rows:
            name = "slots" if component == "mamba" else "pages"
            raise InvalidBatch(f"{name} {first} to {first + count - 1} are not all in a pool of {rows}")


def _spread(starts: Int64s, item: int, pages: Pages, pieces: Int64s | None) -> Int64s:
    # Where *pages* lie, plane by plane: each run, or each of the *pieces* (offsets in a page) of each page.
    first, counts = np.array(pages, np.int64).reshape(-1, 2).T
    if pieces is None:
        whole: Int64s = np.add.outer(starts, first * item)
        return whole.ravel()
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = (np.repeat(first, counts) + within) * item
    parts: Int64s = np.add.outer(starts, np.add.outer(rows, pieces))
    return parts.ravel()


def _pieces(source: KvLayout, target: KvLayout, table: PageTable, part: RankShare) -> Offsets | None:
    if table.tensor is not None:
        ours, theirs = table.tensor.local(source.tp), table.tensor.local(target.tp)
        return None if source.tp == target.tp else _dims(ours, theirs, part.shard, table.tensor.dim_bytes)
    if part.heads is None or table.component == "index":
        return None
    return _heads(source, target, part.heads)


def _heads(source: KvLayout, target: KvLayout, heads: HeadSlice) -> Offsets:
    # Raise a `ValueError` if only one side has heads first.
    if source.by_heads != target.by_heads:
        raise ValueError("one side keeps pages by heads, the other by tokens; give both the same engine.page_order")
    each = source.shape.head_bytes
    if source.by_heads:
        first, second, size = (np.array([number * source.page_size * each], np.int64) for number in heads)
        return first, second, size
    tokens = np.arange(source.page_size, dtype=np.int64)
    size = np.full(source.page_size, heads.heads * each)
    return tokens * source.row + heads.source * each, tokens * target.row + heads.target * each, size


def _dims(ours: tuple[int, ...], theirs: tuple[int, ...], shard: int, dim_bytes: int) -> Offsets:
    mine, others = np.array(ours, np.int64), np.array(theirs, np.int64)
    size = np.minimum(mine, others)
    source, target = np.cumsum(mine) - mine, np.cumsum(others) - others
    source += np.where(mine > others, shard * size, 0)
    target += np.where(mine < others, shard * size, 0)
    return source * dim_bytes, target * dim_bytes, size * dim_bytes


# --- what is staged ------------------------------------------------------------------------------------------------


class BlockPlan:
    """The part of a rank's pool that makes up the blocks between it and one other rank (`block_plans`).

    ::

        [plane][token][head][dim]   of the planes and heads that both have, in the order of the chunk's pages

    These are *heads* heads from the *first* of its own on, of *planes*.  A token is a descriptor in each plane or,
    if the block has all heads of this rank, a run of pages is.
    """

    def __init__(self, layout: KvLayout, planes: tuple[int, ...], first: int, heads: int) -> None:
        table, each = layout.tables[0], layout.shape.head_bytes
        self._starts = table.offsets[[table.planes.index(plane) for plane in planes]]
        self._layout = layout
        self._row = heads * each
        whole = self._row == layout.row
        self._pieces = None if whole else np.arange(layout.page_size, dtype=np.int64) * layout.row + first * each

    def nbytes(self, pages: int) -> int:
        """Return the bytes of a block of so many *pages*."""
        return len(self._starts) * pages * self._layout.page_size * self._row

    def gather(self, pool: Region, pages: Pages, block: Region) -> Batch:
        """Return the batch that copies *pages* into the block at the start of region *block*."""
        return self._batch(pool, pages, block, 0, gathers=True)

    def scatter(self, block: Region, offset: int, pool: Region, pages: Pages) -> Batch:
        """Return the batch that copies the block at *offset* of region *block* into *pages*."""
        return self._batch(pool, pages, block, offset, gathers=False)

    def _batch(self, pool: Region, pages: Pages, block: Region, offset: int, gathers: bool) -> Batch:
        def arrays() -> Batch:
            lies, within, size = self._arrays(pages)
            within += offset
            return Batch(pool, block, lies, within, size) if gathers else Batch(block, pool, within, lies, size)

        counted = self._count(pool, pages, block, offset)
        source, target = (pool, block) if gathers else (block, pool)
        return arrays() if counted is None else LazyBatch(source, target, *counted, arrays)

    def _count(self, pool: Region, pages: Pages, block: Region, offset: int) -> tuple[int, int] | None:
        end = total = 0
        for page, count in sorted(pages) if len(pages) > 1 else pages:
            if page < end or count < 1:
                return None
            end = page + count
            total += count
        nbytes = self.nbytes(total)
        inside = end <= self._layout.pages and pool.size >= self._layout.size and 0 <= offset <= block.size - nbytes
        if not nbytes or not inside:
            return None
        return len(self._starts) * len(pages) if self._pieces is None else nbytes // self._row, nbytes

    def _arrays(self, pages: Pages) -> Offsets:
        layout = self._layout
        _check_inside("kv", pages, layout.pages)
        lies = _spread(self._starts, layout.item, pages, self._pieces)
        sizes = [count * layout.item for _, count in pages] if self._pieces is None else [self._row]
        size = np.tile(np.array(sizes, np.int64), len(lies) // max(1, len(sizes)))
        return lies, np.cumsum(size) - size, size


def block_plans(source: KvLayout, target: KvLayout, heads: HeadSlice) -> tuple[BlockPlan, BlockPlan]:
    """Return how the writer gathers and how the reader scatters the blocks between two kinds of rank."""
    theirs = set(target.tables[0].planes)
    planes = tuple(plane for plane in source.tables[0].planes if plane in theirs)
    first, second = heads.source, heads.target
    return BlockPlan(source, planes, first, heads.heads), BlockPlan(target, planes, second, heads.heads)


# --- writes and those that they go to ------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Write:
    """A write of *chunk* to *target*: the sequence of the batches that it takes, made when asked for.

    It moves *rows* (runs of pages), the metadata of the two sides' *slots*, and *state* (runs of each component).
    With *path* ``"control"`` it is a message with metadata.
    """

    target: DecodePeer
    chunk: Chunk
    path: str
    rows: Runs = ()
    slots: tuple[int, int] | None = None
    state: tuple[Runs, ...] = ()
    plane: int = -1  # the first one of *rows* that it moves, counted among those that both ranks have; -1 is all
    count: int = 1  # batches, one after the other, each of the next plane or the next *pages*
    times: Sequence[float] = ()  # when each is computed, if they are posted meanwhile
    pages: int = 0  # of a batch, where each is of the next forward; 0: of one forward
    beside: Sequence[Write] = ()  # of other chunks to the same target, which take turns with this one
    done: int = 0  # batches that have completed
    room: Any = field(init=False)  # its `pdsim.kv.push.RoomTransferState`
    arrival: Arrival = field(init=False)

    def __len__(self) -> int:
        """Return the number of batches."""
        return self.count

    def __getitem__(self, number: int, /) -> Batch:
        """Return the descriptors of the batch *number*."""
        target = self.target
        if self.plane >= 0:
            batch = target.planner.plane(self.rows, self.plane + number)
        elif self.pages:
            batch = target.planner.batch(cut(self.rows, number * self.pages, self.pages))
        else:
            batch = target.planner.batch(self.rows, self.slots, self.state)
        return batch.over(target.source, target.region)

    @property
    def key(self) -> tuple[int, str]:
        """Chunk and target."""
        return self.chunk.index, self.target.peer.name

    def computed(self) -> list[float]:
        """Return the share of its forward after which each can be posted: K and V of a layer at the layer's end."""
        if self.plane < 0:
            return [1.0]
        return _computed(self.plane, self.count, self.target.tensors, self.target.planner.planes)

    def split(self) -> list[Write]:
        """Return a write of each plane."""
        planes = range(self.plane, self.plane + self.count)
        writes = [Write(self.target, self.chunk, self.path, self.rows, plane=plane) for plane in planes]
        for write in writes:
            write.room, write.arrival = self.room, self.arrival
        return writes


@lru_cache(maxsize=64)
def _computed(first: int, count: int, each: int, planes: int) -> list[float]:
    return [(plane // each + 1) * each / planes for plane in range(first, first + count)]


@lru_cache(maxsize=8)
def _times(which: tuple[int, int, int, int], begun: float, seconds: float, now: float) -> list[float]:
    # of the ranks of an instance, which begin at the same time
    return [at if (at := begun + seconds * share) > now else now for share in _computed(*which)]


def in_layers(
    writes: Sequence[Write], begun: float, seconds: float, now: float, one_by_one: bool
) -> Iterator[tuple[float, Write]]:
    """Yield *writes* of a forward that took *seconds* from *begun* on, and when each can be queued.

    Planes that all go to one target, *one_by_one*, are one sequence; others are a write each.
    """
    layers = [write for write in writes if write.plane >= 0]
    if one_by_one and len({write.target for write in layers}) == 1:
        lead, *beside = layers
        which = lead.plane, lead.count, lead.target.tensors, lead.target.planner.planes
        lead.times, lead.beside = _times(which, begun, seconds, now), beside
        writes = [write for write in writes if write not in beside]
    else:
        writes = [one for write in writes for one in (write.split() if write.plane >= 0 else (write,))]
    for write in writes:
        yield max(now, begun + seconds * write.computed()[0]), write


class DecodePeer:
    """A decode rank that sent *register*, to which a prefill rank writes *part* of its KV, from region *source*.

    *number* tells the targets of a prefill rank apart; its incarnation is `prefill`.  `metadata` is how first-token
    metadata goes to this rank, and `fallback` why that is not the policy's way.  `blocks` is None unless chunks may
    be staged.
    """

    def __init__(
        self,
        peer: Peer,
        number: int,
        source: Region,
        layout: KvLayout,
        register: RegisterPool,
        part: RankShare,
        policy: Policy,
    ) -> None:
        self.peer = peer
        self.number = number
        self.prefill = register.incarnation
        self.part = part
        self.with_last = part.with_last
        self.source = source
        self.region = peer.regions[REGION]
        self.ring = peer.regions.get(STAGING)
        self.metadata, self.fallback = metadata_route(policy, AUX_ROWS, register.metadata_rows)
        self.tensors = layout.shape.tensors  # planes of a layer, which are computed together
        self.planner = planner(layout, register.layout, part)
        self._policy = policy
        self._path = "grouped" if part.heads is None else "sliced"
        self._call = policy.call if part.heads is None else policy.slices or policy.call
        self.blocks: BlockPlan | None = None
        if part.heads is not None and self.ring is not None:
            self.blocks = block_plans(layout, register.layout, part.heads)[0]

    def block(self, rows: Runs, limit: int) -> int:
        """Return the bytes of the block of *rows*; 0 if it cannot be staged or exceeds *limit* or the ring."""
        if not rows or self.blocks is None or self.ring is None or "kv" not in self.part.components:
            return 0
        size = self.blocks.nbytes(sum(count for _, _, count in rows))
        return size if size <= min(limit, self.ring.size) else 0

    def writes(self, chunk: Chunk, rows: Runs, by_layer: bool = False) -> list[Write]:
        """Return the writes of *chunk*, whose pages *rows* this rank writes; metadata and state come last.

        *by_layer* makes one write of all planes, in the order of the layers.
        """
        if "kv" not in self.part.components:
            rows = ()
        rows = self._runs(rows)
        last = self._with_last(chunk) if chunk.last else []
        apart = by_layer or self.metadata == "write" or self.blocks is not None or self._call != "chunk"
        if rows and not apart and last and last[0].path == "metadata":
            last[0].path, last[0].rows = self._path, rows
            return last
        return [*(self._moves(chunk, rows, by_layer) if rows else ()), *last]

    def in_turn(self, chunk: Chunk, pages: int, times: Sequence[float]) -> Write | None:
        """Return one write of all *pages* of *chunk* in turn, each at its time; None where it takes several."""
        if "kv" not in self.part.components or self._call != "chunk" or self.blocks is not None:
            return None
        return Write(self, chunk, self._path, self._runs(chunk.runs), count=len(times), times=times, pages=pages)

    def _runs(self, rows: Runs) -> Runs:
        if self._policy.grouping == "runs" or self._path != "grouped":
            return rows
        return tuple((source + n, target + n, 1) for source, target, count in rows for n in range(count))

    def _moves(self, chunk: Chunk, rows: Runs, by_layer: bool) -> list[Write]:
        write = partial(Write, self, chunk, self._path)
        planes = self.planner.planes
        if by_layer:
            return [write(rows, plane=0, count=planes)]
        if self._call == "chunk" or self.blocks is not None:
            return [write(rows)]
        calls = [(run,) for run in rows] if self._call == "descriptor" else [rows]
        if self._policy.queues and not self._policy.handover:  # a queue does one thing after the other
            return [write(own, plane=0, count=planes) for own in calls]
        return [write(own, plane=plane) for own in calls for plane in range(planes)]

    def _with_last(self, chunk: Chunk) -> list[Write]:
        slots = chunk.slots if self.part.aux and self.metadata != "control" else None
        state = chunk.state if any(component != "kv" for component in self.part.components) else ()
        parts = [(None, state), (slots, ())] if self.metadata == "write" else [(slots, state)]
        writes = [Write(self, chunk, "metadata", (), *part) for part in parts if any(part)]
        if self.part.aux and self.metadata == "control":
            writes.append(Write(self, chunk, "control"))
        return writes


def metadata_route(policy: Policy, mine: Sequence[int], theirs: Sequence[int]) -> tuple[str, str]:
    """Return the path of metadata between ranks whose rows have these sizes, and why it is not the policy's, or "".

    Rows that differ in number or size cannot be paired by descriptors; they go over the control channel if
    `Policy.metadata_fallback` allows it, otherwise raise a `MessageError`.
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


Connected = TypeVar("Connected")


class Peers(Generic[Connected]):
    """The ranks of the other side that a rank writes to or reads from, by the incarnation of their instance.

    They are those of *parts*: by index, what this rank exchanges with each.  *made* is called for each rank that is
    connected, and what it returns is kept.  An instance registers with the first room that needs it, so what is to
    move may be there before (`wait`).

    With *prepare*, seconds for each page and plane of a peer's pool, what moves first waits for the descriptor lists
    of the instance, which are made from then on.
    """

    def __init__(
        self,
        rank: Rank,
        layout: KvLayout,
        parts: Mapping[int, RankShare],
        made: Callable[[Peer, RegisterPool, RankShare], Connected],
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._parts = parts
        self._made = made
        self._peers: dict[str, dict[int, Connected]] = {}  # by incarnation, then rank index
        self._waiting: dict[str, list[tuple[int, Callable[[], None]]]] = {}  # by incarnation, in order; with rooms
        self.prepare = 0.0
        self._lists: dict[str, int] = {}  # by incarnation: descriptors that are not prepared
        self.preparing = 0  # incarnations whose lists are being made

    def __contains__(self, incarnation: str) -> bool:
        """Return whether rooms of *incarnation* may be moved."""
        return incarnation in self._peers

    def __len__(self) -> int:
        """Return the number of connected ranks."""
        return sum(map(len, self._peers.values()))

    def of(self, incarnation: str) -> Mapping[int, Connected]:
        """Return the connected ranks of *incarnation* by index; none if it is gone."""
        return self._peers.get(incarnation, {})

    def expect(self, incarnation: str) -> None:
        """Expect the ranks of *incarnation*, also if there are none to connect to."""
        self._peers.setdefault(incarnation, {})
        self._go_on(incarnation)

    def drop(self, incarnation: str) -> None:
        """Forget the ranks of *incarnation*, which is over, and what waits for them: its rooms are aborted."""
        self._peers.pop(incarnation, None)
        self._lists.pop(incarnation, None)
        self._waiting.pop(incarnation, None)

    def wait(self, incarnation: str, room: int, then: Callable[[], None]) -> None:
        """Call *then*, from a callback and in the order of these calls, once all ranks are connected.

        It is never called if *incarnation* is dropped, or *room* given up, before.
        """
        self._waiting.setdefault(incarnation, []).append((room, then))
        if self._lists.get(incarnation):
            self._go_on(incarnation)

    def give_up(self, room: int) -> None:
        """Forget what waits for *room*; what comes of one after its incarnation was dropped would wait for ever."""
        for incarnation, waiting in list(self._waiting.items()):
            waiting[:] = [entry for entry in waiting if entry[0] != room]
            if not waiting:
                del self._waiting[incarnation]

    def connected(self, incarnation: str) -> bool:
        """Return whether all ranks of *incarnation* that are needed are connected, and nothing waits for that."""
        return self._has_all(incarnation) and not (incarnation in self._waiting or self._lists.get(incarnation))

    def _has_all(self, incarnation: str) -> bool:
        return incarnation in self._peers and len(self._peers[incarnation]) == len(self._parts)

    def _go_on(self, incarnation: str) -> None:
        if self._has_all(incarnation) and incarnation in self._waiting:
            seconds = self.prepare * self._lists.pop(incarnation, 0)
            self.preparing += 1
            self._rank.clock.call_at(self._rank.clock.now + seconds, self._call_waiting, incarnation)

    def _call_waiting(self, incarnation: str) -> None:
        self.preparing -= 1
        for _, then in self._waiting.pop(incarnation, ()):
            then()

    def connect(self, message: RegisterPool) -> None:
        """Connect to the rank that sent *message*.

        Raise a `MessageError` with both values if its pool is of another kind, and what `Endpoint.connect` raises.
        """
        mine, theirs = self._layout, message.layout
        if theirs.shape != mine.shape:
            raise MessageError(f"{message.instance} keeps {theirs.shape}, this rank {mine.shape}: serve one model")
        if theirs.page_size != mine.page_size:
            raise MessageError(
                f"{message.instance} has kv.page_size={theirs.page_size}, this rank {mine.page_size}: "
                "pages must be equal on both sides"
            )
        part = self._parts.get(message.index)
        if part is None:
            raise MessageError(f"rank {message.index} of {message.instance} shares nothing with {self._rank.name}")
        peer = self._rank.endpoint.connect(message.address)
        if self.prepare:
            table = theirs.tables[0]
            self._lists[message.instance] = self._lists.get(message.instance, 0) + table.rows * len(table.planes)
        self._peers.setdefault(message.instance, {})[message.index] = self._made(peer, message, part)
        self._go_on(message.instance)
