# SPDX-License-Identifier: Apache-2.0
"""Descriptors: a chunk's pages, as the `Batch` that one write takes.

Batches are built over nameless regions and cached, because the ranks of a group write the same offsets at the same
time: `Batch.over` then puts the real regions in their place.  Their arrays are made when somebody reads them.
"""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from pdsim.core.errors import InvalidBatch
from pdsim.kv.layout import AUX_ROWS, KvLayout, PageTable
from pdsim.kv.mapping import WHOLE, HeadSlice, RankShare
from pdsim.kv.pages import Pages
from pdsim.transfer import Batch, Region
from pdsim.transfer.batch import LazyBatch

__all__ = ["Planner", "Runs", "cut", "group", "pair", "planner"]

Int64s = npt.NDArray[np.int64]
Offsets = tuple[Int64s, Int64s, Int64s]  # source, target, size

Runs = tuple[tuple[int, int, int], ...]
"""Source page, target page, count: pages that are neighbours on both sides."""

_AUX_SIZES = np.array(AUX_ROWS, np.int64)
_NOTHING: Offsets = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


def group(source: npt.ArrayLike, target: npt.ArrayLike) -> Runs:
    """Return the runs of two page lists: a run ends where either side's next page is not its neighbour.

    Raise a `ValueError` if the lists differ in length.

    >>> group([4, 5, 6, 9], [0, 1, 3, 4])
    ((4, 0, 2), (6, 3, 1), (9, 4, 1))
    """
    source_pages, target_pages = np.asarray(source, np.int64), np.asarray(target, np.int64)
    if len(source_pages) != len(target_pages):
        raise ValueError(
            f"{len(source_pages)} source pages and {len(target_pages)} target pages: need as many of each"
        )
    if not len(source_pages):
        return ()
    breaks = np.flatnonzero((np.diff(source_pages) != 1) | (np.diff(target_pages) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.append(starts, len(source_pages)))
    return tuple(zip(source_pages[starts].tolist(), target_pages[starts].tolist(), counts.tolist(), strict=True))


class Planner:
    """Makes the batches that one kind of rank writes to another kind: *part* of the layers that both have.

    Rows that both keep alike are moved whole, a run of pages in one descriptor a plane.  Of others each token (heads
    of keys and values; each page, if it is kept by heads) or each group of dimensions (mamba) is a descriptor.

    Batches are lazy: what is counted and checked follows from the runs of pages, and no array is made until somebody
    reads one.  Descriptors of state are few, and made at once.

    The arrays of a batch have shape (descriptor,), plane by plane, then metadata, then state.  Batches are cached,
    so they must not be changed.
    """

    def __init__(self, source: KvLayout, target: KvLayout, part: RankShare = WHOLE) -> None:
        self._layouts = source, target
        self._aux = part.aux
        sections = [
            _Section(mine, other, _pieces(source, target, mine, part))
            for mine, other in zip(source.tables, target.tables, strict=True)
            if mine.component in part.components
        ]
        self._kv = [section for section in sections if section.component == "kv" and section]
        self._state = [
            [section for section in sections if section.component == component and section]
            for component in source.shape.state.components
        ]
        self.planes = sum(map(len, self._kv))
        """The planes of keys and values that both ranks have."""
        self._source, self._target = _nameless(source), _nameless(target)
        # with arrays, a sliced batch has a descriptor a token and plane, up to tens of megabytes of them
        self.batch = lru_cache(maxsize=256 if part.heads is None else 8)(self._batch)
        self.plane = lru_cache(maxsize=8)(self._plane)  # asked for by each rank that writes the same heads

    def _batch(self, runs: Runs, slots: tuple[int, int] | None = None, state: tuple[Runs, ...] = ()) -> Batch:
        # *state* are the runs of each component of the state, in the order of `StateShape.components`.  What is not
        # of this planner's part is left out.  The regions are nameless: use `Batch.over`.  Raise `InvalidBatch` if
        # there is nothing to move or if a page or slot lies outside its pool.
        counted = None if any(state) else self._count(runs, slots)
        if counted is None:
            return self._arrays(runs, slots, state)
        return LazyBatch(self._source, self._target, *counted, lambda: self._arrays(runs, slots, ()))

    def _plane(self, runs: Runs, plane: int) -> Batch:
        whole, planes = self.batch(runs), self.planes
        each = len(whole) // planes
        part = slice(plane * each, (plane + 1) * each)  # planes follow one another

        def arrays() -> Batch:
            columns = whole.source_offset[part], whole.target_offset[part], whole.size[part]
            return Batch(whole.source, whole.target, *columns)

        return LazyBatch(whole.source, whole.target, each, whole.nbytes // planes, arrays)

    def _count(self, runs: Runs, slots: tuple[int, int] | None) -> tuple[int, int] | None:
        end = -1
        for _, second, count in sorted(runs, key=itemgetter(1)) if len(runs) > 1 else runs:
            if count <= 0 or second < end:
                return None
            end = second + count
        descriptors = nbytes = 0
        for section in self._kv:
            if not section.holds(runs):
                return None
            count, size = section.count(runs)
            descriptors += count
            nbytes += size
        if slots is not None and self._aux:
            if not all(0 <= slot < layout.slots for layout, slot in zip(self._layouts, slots, strict=True)):
                return None
            descriptors += len(AUX_ROWS)
            nbytes += sum(AUX_ROWS)
        return (descriptors, nbytes) if descriptors else None

    def _arrays(self, runs: Runs, slots: tuple[int, int] | None, state: tuple[Runs, ...]) -> Batch:
        parts = [section.offsets(runs) for section in self._kv] if runs else []
        if slots is not None and self._aux:
            source, target = self._layouts
            parts.append((source.aux_offsets(slots[0]), target.aux_offsets(slots[1]), _AUX_SIZES))
        if state:
            for sections, rows in zip(self._state, state, strict=True):
                parts += [section.offsets(rows) for section in sections]
        source_offset, target_offset, size = parts[0] if parts else _NOTHING
        if len(parts) > 1:
            source_offset, target_offset, size = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Batch(self._source, self._target, source_offset, target_offset, size)


def _nameless(layout: KvLayout) -> Region:
    return Region(owner="", name="", size=layout.size, address=0, device="")


class _Section:
    """The planes of a table that both sides have, and how their rows are moved: whole or in *pieces* of a row."""

    def __init__(self, source: PageTable, target: PageTable, pieces: Offsets | None) -> None:
        common = [plane for plane in source.planes if plane in set(target.planes)]
        self.component = source.component
        self._rows = source.rows, target.rows
        self._items = source.item, target.item
        self._source = source.offsets[[source.planes.index(plane) for plane in common]]
        self._target = target.offsets[[target.planes.index(plane) for plane in common]]
        self._pieces = pieces
        self._each = (1, self._items[0]) if pieces is None else (len(pieces[2]), int(pieces[2].sum()))

    def __len__(self) -> int:
        return len(self._source)

    def holds(self, runs: Runs) -> bool:
        first, second = self._rows
        for a, b, count in runs:  # noqa: SIM110 a generator takes longer than the loop
            if not (0 <= a <= first - count and 0 <= b <= second - count):
                return False
        return True

    def count(self, runs: Runs) -> tuple[int, int]:
        rows = sum([count for _, _, count in runs])
        pieces, nbytes = self._each  # of a row
        return len(self) * (len(runs) if self._pieces is None else rows * pieces), len(self) * rows * nbytes

    def offsets(self, runs: Runs) -> Offsets:
        # Raise an `InvalidBatch` if a row is not in its pool: it would be one of the next plane.
        for side, rows in enumerate(self._rows):
            for run in runs:
                if run[side] < 0 or run[side] + run[2] > rows:
                    raise InvalidBatch(
                        f"{'slots' if self.component == 'mamba' else 'pages'} "
                        f"{run[side]} to {run[side] + run[2] - 1} are not all in a pool of {rows}"
                    )
        return self._whole(runs) if self._pieces is None else self._sliced(runs, *self._pieces)

    def _whole(self, runs: Runs) -> Offsets:
        item, planes = self._items[0], len(self._source)
        if len(runs) == 1:
            ((first, second, count),) = runs
            return self._source + first * item, self._target + second * item, np.full(planes, count * item)
        columns = np.array(runs, np.int64).reshape(-1, 3) * item
        source_offset = self._source[:, None] + columns[:, 0]
        target_offset = self._target[:, None] + columns[:, 1]
        return source_offset.ravel(), target_offset.ravel(), np.tile(columns[:, 2], planes)

    def _sliced(self, runs: Runs, source: Int64s, target: Int64s, size: Int64s) -> Offsets:
        # *source*, *target* and *size* are the pieces of one row: offsets in it, and bytes.
        first, second, counts = np.array(runs, np.int64).reshape(-1, 3).T
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        ours = (np.repeat(first, counts) + within)[:, None] * self._items[0] + source
        theirs = (np.repeat(second, counts) + within)[:, None] * self._items[1] + target
        source_offset = np.asarray(self._source[:, None, None] + ours).ravel()
        target_offset = np.asarray(self._target[:, None, None] + theirs).ravel()
        return source_offset, target_offset, np.tile(size, len(source_offset) // len(size))


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
    if source.by_heads:
        head = source.page_size * source.shape.head_bytes
        columns = ((number * head,) for number in (heads.source, heads.target, heads.heads))
        first, second, size = (np.array(column, np.int64) for column in columns)
        return first, second, size
    tokens, each = np.arange(source.page_size, dtype=np.int64), source.shape.head_bytes
    size = np.full(source.page_size, heads.heads * each)
    return tokens * source.row + heads.source * each, tokens * target.row + heads.target * each, size


def _dims(ours: tuple[int, ...], theirs: tuple[int, ...], shard: int, dim_bytes: int) -> Offsets:
    mine, others = np.array(ours, np.int64), np.array(theirs, np.int64)
    size = np.minimum(mine, others)
    source, target = np.cumsum(mine) - mine, np.cumsum(others) - others
    source += np.where(mine > others, shard * size, 0)
    target += np.where(mine < others, shard * size, 0)
    return source * dim_bytes, target * dim_bytes, size * dim_bytes


planner = lru_cache(maxsize=64)(Planner)
"""Return the `Planner` of these arguments, the same for all ranks in one process."""


def pair(source: Pages, target: Pages) -> Runs:
    """Return the runs that move the pages of *source*, in order, to the first as many of *target*.

    The same as `group` of the page lists, in time that grows with the runs and not with the pages.  Raise a
    `ValueError` if *target* has fewer pages.

    >>> pair(((4, 3), (9, 1)), ((0, 2), (3, 5)))
    ((4, 0, 2), (6, 3, 1), (9, 4, 1))
    """
    runs: list[tuple[int, int, int]] = []
    targets = iter(target)
    start, left = 0, 0
    for first, count in source:
        while count:
            if not left:
                start, left = next(targets, (0, 0))
                if not left:
                    raise ValueError(f"{target} has fewer pages than {source}")
            part = min(count, left)
            runs.append((first, start, part))
            first, count, start, left = first + part, count - part, start + part, left - part
    return tuple(runs)


def cut(runs: Runs, first: int, count: int) -> Runs:
    """Return what of *runs* lies among the *count* pages from the *first*-th on.

    Runs are ``(source page, target page, pages)``, and pages are counted over all of them:

    >>> cut(((10, 20, 4), (30, 40, 4)), first=3, count=3)
    ((13, 23, 1), (30, 40, 2))
    """
    parts: list[tuple[int, int, int]] = []
    position, end = 0, first + count
    for source, target, size in runs:
        skip = max(0, first - position)
        part = min(size, end - position) - skip
        if part > 0:
            parts.append((source + skip, target + skip, part))
        position += size
        if position >= end:
            break
    return tuple(parts)
