"""Descriptors: a chunk's pages, as the `Batch` that one write takes.

Batches are built over nameless regions and cached, because the ranks of an instance write the same offsets at the same
time: `Batch.over` then puts the real regions in their place.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pdsim.kv.layout import AUX_ROWS, KvLayout
from pdsim.kv.mapping import HeadSlice
from pdsim.kv.pages import Pages
from pdsim.transfer import Batch, Region

__all__ = ["Runs", "cut", "descriptors", "group", "grouped", "pair", "sliced"]

Int64s = npt.NDArray[np.int64]
Offsets = tuple[Int64s, Int64s, Int64s]  # source, target, size

Runs = tuple[tuple[int, int, int], ...]
"""Source page, target page, count: pages that are neighbours on both sides."""


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


def grouped(source: KvLayout, target: KvLayout, runs: Runs) -> Offsets:
    """Return one descriptor a run and plane: ranks that keep the same heads, or latent rows."""
    columns = np.array(runs, np.int64).reshape(-1, 3)
    planes = np.arange(source.shape.planes, dtype=np.int64)[:, None]
    source_offset = planes * source.plane + columns[:, 0] * source.item
    target_offset = planes * target.plane + columns[:, 1] * target.item
    size = np.broadcast_to(columns[:, 2] * source.item, source_offset.shape)
    return source_offset.ravel(), target_offset.ravel(), size.ravel()


def sliced(source: KvLayout, target: KvLayout, runs: Runs, heads: HeadSlice) -> Offsets:
    """Return one descriptor a token and plane: ranks that keep different heads."""
    columns = np.array(runs, np.int64).reshape(-1, 3)
    within = np.arange(columns[:, 2].sum()) - np.repeat(np.cumsum(columns[:, 2]) - columns[:, 2], columns[:, 2])
    source_page = np.repeat(columns[:, 0], columns[:, 2]) + within
    target_page = np.repeat(columns[:, 1], columns[:, 2]) + within
    planes = np.arange(source.shape.planes, dtype=np.int64)[:, None, None]
    tokens = np.arange(source.page_size, dtype=np.int64)
    head_bytes = source.shape.head_bytes

    def offsets(layout: KvLayout, pages: Int64s, first_head: int) -> Int64s:
        rows = planes * layout.plane + pages[:, None] * layout.item + tokens * layout.row
        return np.asarray(rows + first_head * head_bytes).ravel()

    source_offset = offsets(source, source_page, heads.source)
    size = np.full(len(source_offset), heads.heads * head_bytes, np.int64)
    return source_offset, offsets(target, target_page, heads.target), size


def _build(
    source: KvLayout, target: KvLayout, runs: Runs, heads: HeadSlice | None, slots: tuple[int, int] | None
) -> Batch:
    parts = []
    if runs:
        parts.append(grouped(source, target, runs) if heads is None else sliced(source, target, runs, heads))
    if slots is not None:
        rows = np.array(AUX_ROWS, np.int64)
        parts.append((source.aux_offsets(slots[0]), target.aux_offsets(slots[1]), rows))
    offsets = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Batch(_nameless(source), _nameless(target), *offsets)


@lru_cache(maxsize=64)
def _nameless(layout: KvLayout) -> Region:
    return Region(owner="", name="", size=layout.size, address=0, device="")


_few = lru_cache(maxsize=256)(_build)  # 2 * layers * runs descriptors each
_many = lru_cache(maxsize=8)(_build)  # one a token and plane: up to tens of megabytes each


def descriptors(
    source: KvLayout,
    target: KvLayout,
    runs: Runs,
    heads: HeadSlice | None = None,
    slots: tuple[int, int] | None = None,
) -> Batch:
    """Return the batch that moves *runs* and, with *slots*, the first-token metadata from one slot to the other.

    The regions are nameless: use `Batch.over`.  Raise `InvalidBatch` if there is nothing to move or if a page or slot
    lies outside its pool.
    """
    return (_few if heads is None else _many)(source, target, runs, heads, slots)


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
