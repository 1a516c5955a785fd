"""Descriptors: a chunk's pages, as the `Batch` that one write takes.

Batches are built over nameless regions and cached, because the ranks of an instance write the same offsets at the same
time: `Batch.over` then puts the real regions in their place.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pdsim.errors import InvalidBatch
from pdsim.kv.layout import AUX_ROWS, KvLayout
from pdsim.kv.mapping import HeadSlice
from pdsim.kv.pages import Pages
from pdsim.transfer import Batch, Region

__all__ = ["Planner", "Runs", "cut", "group", "pair", "planner"]

Int64s = npt.NDArray[np.int64]
Offsets = tuple[Int64s, Int64s, Int64s]  # source, target, size

Runs = tuple[tuple[int, int, int], ...]
"""Source page, target page, count: pages that are neighbours on both sides."""

_AUX_SIZES = np.array(AUX_ROWS, np.int64)


def group(source: npt.ArrayLike, target: npt.ArrayLike) -> Runs:
    """Return the runs of two page lists: a run ends where either side's next page is not its neighbour.

    Raise a `ValueError` if the lists differ in length.
    """
    source_pages, target_pages = np.asarray(source, np.int64), np.asarray(target, np.int64)
    if len(source_pages) != len(target_pages):
        raise ValueError(f"{len(source_pages)} source pages and {len(target_pages)} target pages: need as many of each")
    if not len(source_pages):
        return ()
    breaks = np.flatnonzero((np.diff(source_pages) != 1) | (np.diff(target_pages) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.append(starts, len(source_pages)))
    return tuple(zip(source_pages[starts].tolist(), target_pages[starts].tolist(), counts.tolist(), strict=True))


class Planner:
    """Makes the batches that one kind of rank writes to another kind.

    *heads* is what `pdsim.kv.mapping.head_slice` says: None where both keep the same rows, so that a run of pages is
    one descriptor a plane; otherwise there is one descriptor a token and plane.
    """

    def __init__(self, source: KvLayout, target: KvLayout, heads: HeadSlice | None = None) -> None:
        self._source = _Side(source, heads.source if heads else 0)
        self._target = _Side(target, heads.target if heads else 0)
        self._sliced = heads is not None
        self._row = heads.heads * source.shape.head_bytes if heads else source.row
        # a sliced batch has a descriptor a token and plane, up to tens of megabytes of them
        self.batch = lru_cache(maxsize=8 if heads else 256)(self._batch)

    def _batch(self, runs: Runs, slots: tuple[int, int] | None = None) -> Batch:
        """Return the batch that moves *runs* and, with *slots*, the metadata from one slot to the other.

        The regions are nameless: use `Batch.over`.  Raise `InvalidBatch` if there is nothing to move or if a page or
        slot lies outside its pool.
        """
        self._source.check(runs, 0)
        self._target.check(runs, 1)
        source_offset, target_offset, size = (self._by_token if self._sliced else self._by_run)(runs)
        if slots is not None:
            source_offset = np.concatenate((source_offset, self._source.layout.aux_offsets(slots[0])))
            target_offset = np.concatenate((target_offset, self._target.layout.aux_offsets(slots[1])))
            size = np.concatenate((size, _AUX_SIZES))
        return Batch(self._source.region, self._target.region, source_offset, target_offset, size)

    def _by_run(self, runs: Runs) -> Offsets:
        source, target = self._source, self._target
        item, planes = source.layout.item, len(source.planes)
        if len(runs) == 1:
            ((first, second, count),) = runs
            size = np.full(planes, count * item)
            return source.planes + first * item, target.planes + second * item, size
        columns = np.array(runs, np.int64).reshape(-1, 3) * item
        source_offset = source.planes[:, None] + columns[:, 0]
        target_offset = target.planes[:, None] + columns[:, 1]
        return source_offset.ravel(), target_offset.ravel(), np.tile(columns[:, 2], planes)

    def _by_token(self, runs: Runs) -> Offsets:
        first, second, counts = np.array(runs, np.int64).reshape(-1, 3).T
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        source_offset = self._source.tokens(np.repeat(first, counts) + within)
        target_offset = self._target.tokens(np.repeat(second, counts) + within)
        return source_offset, target_offset, np.full(len(source_offset), self._row)


class _Side:
    """A layout and where its planes start, in a region without a name."""

    def __init__(self, layout: KvLayout, first_head: int) -> None:
        self.layout = layout
        self.planes = np.arange(layout.shape.planes, dtype=np.int64) * layout.plane
        self.region = Region(owner="", name="", size=layout.size, address=0, device="")
        self._first = first_head * layout.shape.head_bytes

    def check(self, runs: Runs, side: int) -> None:
        """Raise an `InvalidBatch` if a page is not in the pool: it would be one of the next plane."""
        for run in runs:
            if run[side] < 0 or run[side] + run[2] > self.layout.pages:
                raise InvalidBatch(
                    f"pages {run[side]} to {run[side] + run[2] - 1} are not all in a pool of {self.layout.pages}"
                )

    def tokens(self, pages: Int64s) -> Int64s:
        """Return where the slice of every token of *pages* starts, plane by plane."""
        layout = self.layout
        rows = np.arange(layout.page_size, dtype=np.int64) * layout.row + self._first
        return np.asarray(self.planes[:, None, None] + (pages[:, None] * layout.item + rows)).ravel()


planner = lru_cache(maxsize=64)(Planner)
"""Return the `Planner` of these arguments, the same for all ranks in one process."""


def pair(source: Pages, target: Pages) -> Runs:
    """Return the runs that move the pages of *source*, in order, to the first as many of *target*.

    The same as `group` of the page lists, in time that grows with the runs and not with the pages.  Raise a
    `ValueError` if *target* has fewer pages.
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
    """Return what of *runs* lies among the *count* pages from the *first*-th on."""
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
