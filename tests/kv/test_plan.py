"""Writes and descriptors: how many the reference counts, and that they move every byte to where it belongs."""

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from omegaconf import OmegaConf

from pdsim.compute.roofline import kv_shape
from pdsim.config import build
from pdsim.core.errors import InvalidBatch
from pdsim.kv.layout import REGION, STAGING, Grid, HeadSlice, KvLayout, KvShape, RankMap, RankShare
from pdsim.kv.messages import Chunk, RegisterPool
from pdsim.kv.pages import Pages, Runs, pair
from pdsim.kv.plan import BlockPlan, DecodePeer, Planner, block_plans, planner
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm
from pdsim.transfer import Batch, Peer, Region
from tests.kv.test_layout import LLAMA_8B, hybrid, layout

WHOLE: Runs = ((0, 0, 128),)


def region(size: int = 1 << 20, name: str = REGION) -> Region:
    return Region("decode0.0", name, size, 0, "gpu")


def counted(batch: Batch) -> tuple[int, int]:
    """Return descriptors and bytes, which a lazy batch knows before its arrays."""
    assert (len(batch), batch.nbytes) == (len(batch.size), int(batch.size.sum()))
    return len(batch), batch.nbytes


def test_ranks_of_one_kind_share_their_batches():
    first = planner(layout(LLAMA_8B), layout(LLAMA_8B, pages=99))
    assert planner(layout(LLAMA_8B), layout(LLAMA_8B, pages=99)) is first
    assert first.batch(((0, 0, 4),)) is first.batch(((0, 0, 4),))


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (((250, 0, 10),), "are not all in a pool of 256"),
        (((0, 250, 10),), "are not all in a pool of 256"),
        (((-1, 0, 1),), "are not all in a pool of 256"),
        (((0, 0, 0),), "are not all in a pool of 256"),
        (((0, 0, 2), (2, 1, 2)), "targets of descriptors"),
        ((), "nothing to transfer"),
    ],
)
def test_runs_that_make_no_batch_are_refused(runs, words):
    pool = layout(LLAMA_8B, pages=256)
    with pytest.raises(InvalidBatch, match=words):
        Planner(pool, pool).batch(runs)


@pytest.mark.parametrize("heads", [None, HeadSlice(0, 1, 1)])
def test_two_lists_of_pages_make_the_batch_of_their_pairs(heads):
    plan, draw = Planner(layout(LLAMA_8B), layout(LLAMA_8B), RankShare(("kv",), heads)), random.Random(3)
    for _ in range(50):
        source, target = (_drawn_pages(draw) for _ in range(2))
        batch, long = plan.between(source, target), plan.batch(pair(source, target))
        assert counted(batch) == counted(long)
        for column in ("source_offset", "target_offset", "size"):
            assert np.array_equal(getattr(batch, column), getattr(long, column))


def _drawn_pages(draw: random.Random) -> Pages:
    # twelve pages, in runs of one to three
    firsts, runs = draw.sample(range(0, 96, 3), 12), []
    while firsts:
        size = min(draw.choice((1, 1, 2, 3)), len(firsts))
        runs.append((firsts[0], size))
        del firsts[:size]
    return tuple(runs)


@pytest.mark.parametrize(
    ("source", "target", "error"),
    [
        (((0, 2),), ((0, 1),), ValueError),
        (((0, 2),), ((-1, 2),), InvalidBatch),
        (((255, 2),), ((0, 2),), InvalidBatch),
        (((0, 4),), ((0, 2), (1, 2)), InvalidBatch),
        ((), (), InvalidBatch),
    ],
)
def test_lists_of_pages_are_refused_as_their_pairs_are(source, target, error):
    pool = layout(LLAMA_8B, pages=256)
    with pytest.raises(error):
        Planner(pool, pool).between(source, target)


@pytest.mark.parametrize("heads", [None, HeadSlice(0, 1, 1)])
def test_the_planes_of_a_batch_are_its_parts_in_turn(heads):
    plan, runs = Planner(layout(LLAMA_8B), layout(LLAMA_8B), RankShare(("kv",), heads)), ((0, 4, 2), (5, 0, 3))
    whole, planes = plan.batch(runs), [plan.plane(runs, plane) for plane in range(plan.planes)]
    assert {counted(plane) for plane in planes} == {(len(whole) // 64, counted(whole)[1] // 64)}
    for column in ("source_offset", "target_offset", "size"):
        assert np.array_equal(np.concatenate([getattr(plane, column) for plane in planes]), getattr(whole, column))


def test_pages_kept_by_heads_are_a_descriptor_each():
    pools = [replace(KvLayout(LLAMA_8B, tp, 16, 8, 1), by_heads=True) for tp in (1, 2)]
    part = RankMap(LLAMA_8B, Grid(1), Grid(2)).part(0, 1)
    batch = Planner(*pools, part).batch(((2, 0, 3),))
    assert len(batch) == 3 * 64
    assert batch.source_offset[:2].tolist() == [2 * pools[0].item + pools[1].item, 3 * pools[0].item + pools[1].item]
    assert set(batch.size.tolist()) == {pools[1].item}
    with pytest.raises(ValueError, match="one side keeps pages by heads"):
        Planner(pools[0], replace(pools[1], by_heads=False), part)


STATE = RankShare(("mamba", "window", "index"), None, aux=False)
RUNS: tuple[Runs, ...] = (((1, 0, 1),), ((3, 5, 2), (9, 0, 1)), ((0, 0, 4),))  # mamba, window, index


def test_alike_ranks_move_a_slot_in_few_descriptors():
    mamba, window, index = 2 * 2, 2 * 2 * 2, 2  # layers x tensors, layers x K and V x runs, layers
    slot, page, row = 2 * (12 * 6 + 4 * 20), 2 * 2 * 4 * 4 * 16, 2 * 4 * 12
    batch = Planner(hybrid(), hybrid(), STATE).batch((), state=RUNS)
    assert counted(batch) == (mamba + window + index, slot + 3 * page + 4 * row)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 1), (2, 4)])
def test_unlike_ranks_move_each_group_and_token(prefill, decode):
    part = RankMap(hybrid().shape, Grid(prefill), Grid(decode)).part(0, 0)
    batch = Planner(hybrid(prefill), hybrid(decode), part._replace(aux=False)).batch((), state=RUNS)
    # groups of both tensors; planes x pages x tokens; runs
    assert len(batch) == 2 * (2 + 1) + 2 * 2 * 3 * 4 + 2


def test_a_slot_outside_the_pool_is_refused():
    with pytest.raises(InvalidBatch, match="slots 2 to 2 are not all in a pool of 2"):
        Planner(hybrid(), hybrid(), STATE).batch((), state=(((2, 0, 1),), *RUNS[1:]))


SOURCE_PAGES, TARGET_PAGES = ((5, 2), (1, 1)), ((0, 1), (4, 2))


def moved(batch: Batch, source: np.ndarray, target: np.ndarray) -> None:
    for start, to, size in zip(batch.source_offset, batch.target_offset, batch.size, strict=True):
        target[to : to + size] = source[start : start + size]


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("heads", [2, 4])
def test_staging_moves_the_same_bytes_as_slicing(prefill, decode, heads):
    shape = KvShape(layers=2, heads=heads, head_bytes=8)
    source, target = KvLayout(shape, prefill, 2, 8, 1), KvLayout(shape, decode, 2, 6, 1)
    ranks = RankMap(shape, Grid(prefill), Grid(decode))
    pool = np.random.default_rng(1).integers(0, 256, source.size, np.uint8)
    for reader in range(decode):
        for writer in ranks.writers(reader):
            part = ranks.part(writer, reader)
            sliced, staged = np.zeros(target.size, np.uint8), np.zeros(target.size, np.uint8)
            moved(Planner(source, target, part).batch(((5, 0, 1), (6, 4, 1), (1, 5, 1))), pool, sliced)
            gather, scatter = block_plans(source, target, part.heads)
            size = gather.nbytes(3)
            block, ring = np.zeros(size, np.uint8), np.zeros(size + 7, np.uint8)
            moved(gather.gather(region(source.size), SOURCE_PAGES, region(size)), pool, block)
            ring[7:] = block
            moved(scatter.scatter(region(ring.size), 7, region(target.size), TARGET_PAGES), ring, staged)
            assert (staged == sliced).all()
            assert staged.any()


def blocks(prefill: int, decode: int) -> tuple[BlockPlan, BlockPlan]:
    shape = KvShape(layers=2, heads=4, head_bytes=8)
    return block_plans(KvLayout(shape, prefill, 2, 8, 1), KvLayout(shape, decode, 2, 6, 1), HeadSlice(0, 0, 2))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
def test_a_side_with_all_heads_moves_runs_the_other_tokens(prefill, decode):
    gather, scatter = blocks(prefill, decode)
    gathered = gather.gather(region(), SOURCE_PAGES, region())
    scattered = scatter.scatter(region(), 16, region(), TARGET_PAGES)
    assert counted(gathered) == (4 * 2 if prefill == 2 else 4 * 6, gather.nbytes(3))
    assert counted(scattered) == (4 * 2 if decode == 2 else 4 * 6, gather.nbytes(3))


@pytest.mark.parametrize("pages", [((7, 2),), ((-1, 1),), ((0, 0),)])
def test_pages_outside_the_pool_are_not_gathered(pages):
    with pytest.raises(InvalidBatch, match="not all in a pool of 8"):
        blocks(2, 1)[0].gather(region(), pages, region())


# 8192 tokens are n pages of p tokens in G groups of neighbours, L layers: grouped, 2 L G descriptors (L G of latent
# rows) in one call or in one for each plane; sliced, 2 L n p; page by page, 2 L n.

TOKENS = 8192
MIB = 1 << 20


def shape(model: str, **changes: object) -> KvShape:
    llm = build(Llm, OmegaConf.to_container(OmegaConf.load(f"conf/model/{model}.yaml")))
    return kv_shape(replace(llm, **changes))


def peer(model: KvShape, backend: str, layouts: list[KvLayout], part: RankShare | None, ring: int = 0) -> DecodePeer:
    regions = {REGION: region(layouts[1].size)} | ({STAGING: region(ring, STAGING)} if ring else {})
    register = RegisterPool("prefill0@1", b"", "decode0@1", 0, layouts[1])
    policy = Policy(**OmegaConf.to_container(OmegaConf.load(f"conf/backend/{backend}.yaml").policy))
    return DecodePeer(Peer("decode0.0", regions), 0, region(layouts[0].size), layouts[0], register, part, policy)


class Counted(NamedTuple):
    calls: int
    descriptors: int  # of each call, which are all alike
    nbytes: int  # of all


def count(model, backend, prefill, page_size, groups, decode=0, ring=0):
    """Return what prefill rank 0 of *prefill* writes to decode rank 0 of *decode*, as many unless said, a chunk."""
    decode = decode or prefill
    pages = TOKENS // page_size
    layouts = [KvLayout(model, tp, page_size, 2 * pages, 4) for tp in (prefill, decode)]
    target = peer(model, backend, layouts, RankMap(model, Grid(prefill), Grid(decode)).part(0, 0), ring)
    each = pages // groups
    runs: Runs = tuple((2 * each * group, each * group, each) for group in range(groups))
    if ring:
        return Counted(1, 1, target.block(runs, ring))
    chunk = Chunk(1, "decode0@1", 0, 0, 2 * TOKENS, runs, False, (0, 1), 0.0, 0.0)
    batches = [write[number] for write in target.writes(chunk, runs) for number in range(len(write))]
    (descriptors,) = {len(batch) for batch in batches}
    return Counted(len(batches), descriptors, sum(batch.nbytes for batch in batches))


@pytest.mark.parametrize(
    ("model", "tp", "decode", "page_size", "planes", "nbytes"),
    [
        ("llama-3.1-8b", 1, 1, 64, 2 * 32, 1024 * MIB),
        ("qwen3-235b-a22b", 4, 4, 64, 2 * 94, 376 * MIB),
        ("qwen3-32b", 2, 2, 1, 2 * 64, 1024 * MIB),
        *(("deepseek-v3", tp, decode, 64, 61, 549 * MIB) for tp, decode in ((1, 1), (8, 8), (8, 1), (1, 8))),
    ],
)
def test_whole_rows_are_grouped(model, tp, decode, page_size, planes, nbytes):
    found, pages = shape(model, dtype_bytes=2), TOKENS // page_size
    for groups in (1, 8, pages):
        assert count(found, "mooncake", tp, page_size, groups, decode) == (1, planes * groups, nbytes)
        assert count(found, "mori", tp, page_size, groups, decode) == (planes, groups, nbytes)
        assert count(found, "nixl", tp, page_size, groups, decode) == (1, planes * pages, nbytes)


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "page_size", "planes", "heads"),
    [
        ("llama-3.1-8b", 1, 2, 64, 64, 4),
        ("llama-3.1-8b", 2, 1, 64, 64, 4),
        ("qwen3-235b-a22b", 4, 1, 64, 188, 1),
        ("qwen3-32b", 2, 4, 1, 128, 2),
    ],
)
def test_slices_are_a_descriptor_for_each_token_and_plane(model, prefill, decode, page_size, planes, heads):
    found, nbytes = shape(model), planes * TOKENS * heads * 128 * 2
    assert count(found, "mooncake", prefill, page_size, 1, decode) == (planes, TOKENS, nbytes)
    assert count(found, "mori", prefill, page_size, 1, decode) == (planes, TOKENS, nbytes)
    assert count(found, "nixl", prefill, page_size, 1, decode) == (1, planes * TOKENS, nbytes)
    assert count(found, "mooncake", prefill, page_size, 1, decode, ring=1 << 31) == (1, 1, nbytes)  # staged


@pytest.mark.parametrize(("prefill", "decode"), [(8, 8), (8, 1), (1, 8), (4, 2)])
def test_an_index_goes_once_to_every_decode_rank(prefill, decode):
    found = shape("deepseek-v3.2-exp")
    layouts = [KvLayout(found, tp, 64, 16, 4) for tp in (prefill, decode)]
    tables = [(table.component, len(table.planes), table.item) for table in layouts[0].tables]
    assert tables == [("kv", 61, 64 * 576), ("index", 61, 64 * 132)]
    ranks = RankMap(found, Grid(prefill), Grid(decode))
    runs, last = ((0, 4, 2), (7, 9, 1)), (((0, 4, 5),),)
    chunk = Chunk(1, "decode0@1", 0, 0, 320, runs, True, (0, 1), 0.0, 0.0, last)
    for reader in range(decode):
        parts = [ranks.part(writer, reader) for writer in ranks.writers(reader)]
        (part,) = [part for part in parts if part and "index" in part.components]
        writes = peer(found, "mooncake", layouts, part).writes(chunk, runs)
        both = [("grouped", 61 * 2, 61 * 3 * 64 * 576), ("metadata", 61, 61 * 5 * 64 * 132)]
        assert [(write.path, *counted(write[0])) for write in writes] == [*both, ("metadata", 10, 1600)]
