"""Descriptors: how many the reference counts, and that they move every byte to where it belongs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.errors import InvalidBatch
from pdsim.kv.layout import AUX_BYTES, KvLayout, KvShape
from pdsim.kv.mapping import Grid, HeadSlice, RankMap, RankShare, owned_heads
from pdsim.kv.plan import Planner, Runs, cut, group, pair, planner
from pdsim.transfer.batch import LazyBatch
from tests.kv.test_layout import DEEPSEEK_V3, LLAMA_8B, layout

WHOLE: Runs = ((0, 0, 128),)


@pytest.mark.parametrize(("pp", "stage", "count"), [(2, 0, 30), (2, 1, 31), (4, 3, 16)])
def test_a_stage_writes_its_own_layers(pp: int, stage: int, count: int):
    batch = Planner(replace(layout(DEEPSEEK_V3), pp=pp, stage=stage), layout(DEEPSEEK_V3)).batch(WHOLE)
    assert (len(batch), batch.nbytes) == (count, 8192 * count * 1152)


def test_metadata_adds_ten_descriptors_and_1600_bytes():
    pool = layout(LLAMA_8B)
    bare, more = Planner(pool, pool).batch(WHOLE), Planner(pool, pool).batch(WHOLE, (1, 2))
    assert len(more) - len(bare) == 10
    assert more.nbytes - bare.nbytes == AUX_BYTES


def test_ranks_of_one_kind_share_their_batches():
    first = planner(layout(LLAMA_8B), layout(LLAMA_8B, pages=99))
    assert planner(layout(LLAMA_8B), layout(LLAMA_8B, pages=99)) is first
    assert first.batch(((0, 0, 4),)) is first.batch(((0, 0, 4),))


@pytest.mark.parametrize("runs", [((250, 0, 10),), ((0, 250, 10),), ((-1, 0, 1),)])
def test_pages_outside_the_pool_are_refused(runs: Runs):
    pool = layout(LLAMA_8B, pages=256)
    with pytest.raises(InvalidBatch, match="are not all in a pool of 256"):
        Planner(pool, pool).batch(runs)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Planner, Runs, tuple[int, int] | None]:
    shape, tp = draw(st.sampled_from([(LLAMA_8B, 1), (LLAMA_8B, 4), (DEEPSEEK_V3, 1)]))
    heads = None if shape.latent_bytes else draw(st.sampled_from([None, HeadSlice(0, 1, 1)]))
    runs, first, second = [], 0, 0
    for _ in range(draw(st.integers(1, 4))):
        first, second, count = (
            first + draw(st.integers(0, 2)),
            second + draw(st.integers(0, 2)),
            draw(st.integers(1, 3)),
        )
        runs.append((first, second, count))
        first, second = first + count, second + count
    pool = layout(shape, tp, pages=32)
    slots = draw(st.sampled_from([None, (0, 1)]))
    return Planner(pool, pool, RankShare(("kv",), heads)), tuple(draw(st.permutations(runs))), slots


@pytest.mark.slow
@given(plans())
def test_a_lazy_batch_counts_what_its_arrays_have(plan: tuple[Planner, Runs, tuple[int, int] | None]):
    made, runs, slots = plan
    batch = made.batch(runs, slots)
    assert isinstance(batch, LazyBatch)
    assert (len(batch), batch.nbytes) == (len(batch.size), int(batch.size.sum()))
    whole, planes = made.batch(runs), [made.plane(runs, plane) for plane in range(made.planes)]
    assert [plane.nbytes for plane in planes] == [whole.nbytes // made.planes] * made.planes
    for column in ("source_offset", "target_offset", "size"):
        assert np.array_equal(np.concatenate([getattr(plane, column) for plane in planes]), getattr(whole, column))


@pytest.mark.parametrize("runs", [((0, 0, 0),), ((0, 0, 2), (2, 1, 2))])
def test_runs_that_make_no_batch_are_refused_at_once(runs: Runs):
    pool = layout(LLAMA_8B)
    with pytest.raises(InvalidBatch, match=r"sizes must be positive|targets of descriptors"):
        Planner(pool, pool).batch(runs)


def test_nothing_to_move_is_refused():
    pool = layout(LLAMA_8B)
    with pytest.raises(InvalidBatch, match="nothing to transfer"):
        Planner(pool, pool).batch(())


# --- contents ------------------------------------------------------------------------------------------------------


def contents(pool: KvLayout, rank: int, pages: list[int]) -> np.ndarray:
    """Return a pool whose *pages* hold, in every head and plane, a number that names position, token and head."""
    memory = np.zeros(pool.size, np.uint8).view(np.int64)
    heads = owned_heads(pool.shape, pool.tp, rank)
    for plane in range(pool.shape.planes):
        for position, page in enumerate(pages):
            for token in range(pool.page_size):
                for index, head in enumerate(heads):
                    row = index * pool.page_size + token if pool.by_heads else token * len(heads) + index
                    at = plane * pool.plane + page * pool.item + row * pool.shape.head_bytes
                    memory[at // 8] = 1 + head + 100 * (token + 100 * (position + 100 * plane))
    return memory.view(np.uint8)


@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("prefill", "decode"), [(p, d) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8)])
def test_all_writers_together_write_what_the_decode_rank_holds(
    heads: int, prefill: int, decode: int, by_heads: bool
):
    shape = KvShape(layers=2, heads=heads, head_bytes=8)
    source, target = (
        replace(KvLayout(shape, tp, 2, pages, 1), by_heads=by_heads) for tp, pages in ((prefill, 8), (decode, 6))
    )
    source_pages, target_pages = [5, 6, 1], [0, 4, 5]
    runs = group(source_pages, target_pages)
    for rank in range(decode):
        memory = np.zeros(target.size, np.uint8)
        both = RankMap(shape, Grid(prefill), Grid(decode))
        for writer in both.writers(rank):
            batch = Planner(source, target, both.part(writer, rank)).batch(runs)
            sent = contents(source, writer, source_pages)
            for start, to, size in zip(batch.source_offset, batch.target_offset, batch.size, strict=True):
                memory[to : to + size] = sent[start : start + size]
        assert (memory == contents(target, rank, target_pages)).all()


def test_pages_kept_by_heads_are_a_descriptor_each():
    pools = [replace(KvLayout(LLAMA_8B, tp, 16, 8, 1), by_heads=True) for tp in (1, 2)]
    plan = Planner(*pools, RankMap(LLAMA_8B, Grid(1), Grid(2)).part(0, 1))
    batch = plan.batch(group([2, 3, 4], [0, 1, 2]))
    assert len(batch) == 3 * 64
    assert batch.source_offset[:2].tolist() == [2 * pools[0].item + pools[1].item, 3 * pools[0].item + pools[1].item]
    assert set(batch.size.tolist()) == {pools[1].item}
    with pytest.raises(ValueError, match="one side keeps pages by heads"):
        Planner(pools[0], replace(pools[1], by_heads=False), RankMap(LLAMA_8B, Grid(1), Grid(2)).part(0, 1))


# --- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_ends_where_either_side_does():
    assert group([1, 2, 3, 7, 8], [4, 5, 9, 10, 11]) == ((1, 4, 2), (3, 9, 1), (7, 10, 2))
    assert group([], []) == ()


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 source pages and 1 target pages"):
        group([1, 2], [3])


pages = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def allocated(counts: list[int], gap: int) -> tuple[tuple[int, int], ...]:
    found, start = [], 0
    for count in counts:
        found.append((start, count))
        start += count + gap
    return tuple(found)


def listed(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [page for start, count in runs for page in range(start, start + count)]


@given(pages, pages, st.data())
def test_pairing_and_cutting_runs_is_grouping_the_page_lists(
    first: list[int], second: list[int], data: st.DataObject
):
    source, target = allocated(first, 1), allocated([*second, 30], 2)
    runs = pair(source, target)
    ours, theirs = listed(source), listed(target)[: sum(first)]
    assert runs == group(ours, theirs)
    start = data.draw(st.integers(0, len(ours)))
    count = data.draw(st.integers(0, len(ours) - start))
    assert cut(runs, start, count) == group(ours[start : start + count], theirs[start : start + count])


def test_too_few_target_pages_are_refused():
    with pytest.raises(ValueError, match="fewer pages"):
        pair(((0, 5),), ((0, 4),))
