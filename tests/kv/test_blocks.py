"""Blocks: gathered by one rank and scattered by another, every byte of heads that both have lands in place."""

from __future__ import annotations

import numpy as np
import pytest

from pdsim.core.errors import InvalidBatch
from pdsim.kv.layout import KvLayout, KvShape
from pdsim.kv.mapping import Grid, HeadSlice, RankMap
from pdsim.kv.plan import Planner
from pdsim.kv.staging.ring import block_plans
from pdsim.transfer import Region

SOURCE_PAGES, TARGET_PAGES = ((5, 2), (1, 1)), ((0, 1), (4, 2))
RUNS = ((5, 0, 1), (6, 4, 1), (1, 5, 1))


def region(size: int) -> Region:
    return Region("rank", "memory", size, 0, "device")


def moved(batch, source: np.ndarray, target: np.ndarray) -> None:
    for start, to, size in zip(batch.source_offset, batch.target_offset, batch.size, strict=True):
        target[to : to + size] = source[start : start + size]


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("heads", [2, 4])
def test_staging_moves_the_same_bytes_as_slicing(prefill: int, decode: int, heads: int):
    shape = KvShape(layers=2, heads=heads, head_bytes=8)
    source, target = KvLayout(shape, prefill, 2, 8, 1), KvLayout(shape, decode, 2, 6, 1)
    ranks = RankMap(shape, Grid(prefill), Grid(decode))
    pool = np.random.default_rng(1).integers(0, 256, source.size, np.uint8)
    for reader in range(decode):
        for writer in ranks.writers(reader):
            part = ranks.part(writer, reader)
            assert part is not None
            assert part.heads is not None
            sliced, staged = np.zeros(target.size, np.uint8), np.zeros(target.size, np.uint8)
            moved(Planner(source, target, part).batch(RUNS), pool, sliced)
            gather, scatter = block_plans(source, target, part.heads)
            block = np.zeros(gather.nbytes(3) + 7, np.uint8)  # at offset 7 on the other side
            sent = gather.gather(region(source.size), SOURCE_PAGES, region(block.size), 7)
            assert sent.nbytes == gather.nbytes(3) == scatter.nbytes(3)
            moved(sent, pool, block)
            moved(scatter.scatter(region(block.size), 7, region(target.size), TARGET_PAGES), block, staged)
            assert (staged == sliced).all()
            assert staged.any()


@pytest.mark.parametrize("copy", ["gather", "scatter"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
def test_a_copy_knows_its_size_before_its_arrays(prefill: int, decode: int, copy: str):
    shape = KvShape(layers=2, heads=4, head_bytes=8)
    layouts = KvLayout(shape, prefill, 2, 8, 1), KvLayout(shape, decode, 2, 6, 1)
    gather, scatter = block_plans(*layouts, HeadSlice(0, 0, 2))
    pool, block = region(1 << 20), region(1 << 20)
    arguments = (pool, SOURCE_PAGES, block, 16) if copy == "gather" else (block, 16, pool, TARGET_PAGES)
    batch = getattr(gather if copy == "gather" else scatter, copy)(*arguments)
    own = prefill if copy == "gather" else decode
    assert len(batch) == (4 * 2 if own == 2 else 4 * 6)
    assert (len(batch), batch.nbytes) == (len(batch.size), batch.size.sum())


def test_a_side_of_which_the_block_has_all_heads_moves_runs_of_pages_and_the_other_tokens():
    shape = KvShape(layers=2, heads=4, head_bytes=8)
    layouts = KvLayout(shape, 2, 2, 8, 1), KvLayout(shape, 1, 2, 6, 1)
    gather, scatter = block_plans(*layouts, HeadSlice(0, 2, 2))
    assert len(gather.gather(region(1 << 20), SOURCE_PAGES, region(1 << 20), 0)) == 4 * 2
    assert len(scatter.scatter(region(1 << 20), 0, region(1 << 20), TARGET_PAGES)) == 4 * 6


@pytest.mark.parametrize("pages", [((7, 2),), ((-1, 1),), ((0, 0),)])
def test_pages_outside_the_pool_are_refused(pages):
    layouts = KvLayout(KvShape(2, 4, 8), 2, 2, 8, 1), KvLayout(KvShape(2, 4, 8), 1, 2, 6, 1)
    plan = block_plans(*layouts, HeadSlice(0, 0, 2))[0]
    with pytest.raises(InvalidBatch, match="not all in a pool of 8"):
        plan.gather(region(1 << 20), pages, region(1 << 20), 0)
