"""What hybrid models keep of a request: its size, where it lies, who owns which rows, and what moving it costs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pdsim.core.errors import InvalidBatch
from pdsim.kv.layout import KvLayout, KvShape
from pdsim.kv.mapping import Grid, RankMap, RankShare
from pdsim.kv.pages import Pages
from pdsim.kv.plan import Planner, Runs
from pdsim.kv.state import StatePool, StateShape, Tensor

# Qwen3-Next-80B-A3B: q and k of 16 heads of 128 and v of 32 of 128, kernel 4; a float32 state of 32 x 128 x 128
CONV, SSM = Tensor((2048, 2048, 4096), 3 * 2), Tensor((32,), 128 * 128 * 4)
QWEN3_NEXT = KvShape(48, heads=2, head_bytes=512, state=StateShape("mmma", mamba=(CONV, SSM)))
HYBRID = KvShape(6, heads=4, head_bytes=16, state=StateShape("mwa", 8, (Tensor((4, 8), 6), Tensor((4,), 20)), 12))
RUNS: tuple[Runs, ...] = (((1, 0, 1),), ((3, 5, 2), (9, 0, 1)), ((0, 0, 4),))  # mamba, window, index
STATE = RankShare(("mamba", "window", "index"), None, aux=False)


def layout(tp: int = 1, pp: int = 1, stage: int = 0, page_size: int = 4) -> KvLayout:
    return KvLayout(HYBRID, tp, page_size, 10, 3, pp, stage, state_slots=2, window_pages=10)


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_a_slot_has_the_size_that_the_model_gives_it():
    assert CONV.nbytes(1) == 8192 * 3 * 2
    assert SSM.nbytes(1) == 2 << 20
    pool = KvLayout(QWEN3_NEXT, 1, 64, 1, 1, state_slots=1)
    assert pool.row_bytes("mamba") == 36 * (8192 * 3 * 2 + (2 << 20))
    assert QWEN3_NEXT.token_bytes(1) == 12 * 2 * 2 * 512  # only layers with full attention keep tokens


def test_ranks_divide_each_group_of_dimensions_by_itself():
    assert CONV.local(4) == (512, 512, 1024)
    assert 4 * CONV.nbytes(4) == CONV.nbytes(1)


def test_dimensions_that_ranks_cannot_divide_are_refused():
    with pytest.raises(ValueError, match=r"mamba dimensions \(32,\) over tp=64: tp must divide each of them"):
        SSM.local(64)


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_tables_tile_the_region_behind_keys_values_and_metadata(pp: int):
    for stage in range(pp):
        found = layout(pp=pp, stage=stage)
        ends = [found.kv_bytes + found.slots * 1600] + [table.end for table in found.tables[1:]]
        assert [table.start for table in found.tables[1:]] == ends[:-1]
        assert found.size == ends[-1]


def test_stages_have_the_planes_of_their_layers_between_them():
    whole = layout()
    for number, table in enumerate(whole.tables):
        stages = [layout(pp=4, stage=stage).tables[number].planes for stage in range(4)]
        assert tuple(plane for planes in stages for plane in planes) == table.planes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pattern": "mx"}, "pattern='mx' must be of a, w and m, with at least one a"),
        ({"window": 0}, "window=0 must be > 0 exactly if pattern='mwa' has a w"),
        ({"mamba": ()}, "must name tensors exactly if pattern='mwa' has an m"),
        ({"index_bytes": -1}, "index_bytes must be >= 0, got -1"),
    ],
)
def test_what_is_no_model_is_refused(changes: dict[str, object], words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        replace(HYBRID.state, **changes)


@pytest.mark.parametrize("name", ["state_slots", "window_pages"])
def test_a_pool_without_room_for_state_is_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} must be >= 1 for layers 'mwa', got 0"):
        replace(layout(), **{name: 0})


# --- what moving it costs ------------------------------------------------------------------------------------------


def test_alike_ranks_move_a_slot_in_few_descriptors():
    batch = Planner(layout(), layout(), STATE).batch((), state=RUNS)
    mamba, window, index = 2 * 2, 2 * 2 * 2, 2  # layers x tensors, layers x K and V x runs, layers
    assert len(batch) == mamba + window + index
    slot, page, row = 2 * (12 * 6 + 4 * 20), 2 * 2 * 4 * 4 * 16, 2 * 4 * 12
    assert batch.nbytes == slot + 3 * page + 4 * row


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 1), (2, 4)])
def test_unlike_ranks_move_a_descriptor_a_group_and_token(prefill: int, decode: int):
    part = RankMap(HYBRID, Grid(prefill), Grid(decode)).part(0, 0)
    assert part is not None
    batch = Planner(layout(prefill), layout(decode), part._replace(aux=False)).batch((), state=RUNS)
    mamba, window, index = 2 * (2 + 1), 2 * 2 * 3 * 4, 2  # groups of both tensors; planes x pages x tokens; runs
    assert len(batch) == mamba + window + index


def test_a_mamba_slice_takes_its_share_of_every_group():
    part = RankMap(HYBRID, Grid(2), Grid(1)).part(1, 0)
    assert part is not None
    batch = Planner(layout(2), layout(1), part._replace(components=("mamba",))).batch((), state=RUNS)
    conv = layout(1).tables[1].start
    # dimensions 0 to 3 and 4 to 11, of 6 bytes: the second rank has 2, 3 and 8 to 11
    moved = [(to - conv, size) for to, size in zip(batch.target_offset, batch.size, strict=True)]
    assert moved[:2] == [(12, 12), (48, 24)]


def test_a_slot_outside_the_pool_is_refused():
    with pytest.raises(InvalidBatch, match="slots 2 to 2 are not all in a pool of 2"):
        Planner(layout(), layout(), STATE).batch((), state=(((2, 0, 1),), *RUNS[1:]))


# --- whose rows ----------------------------------------------------------------------------------------------------

PAGES: Pages = ((4, 3),)


def pool(window_pages: int = 6, slots: int = 2) -> StatePool:
    return StatePool(HYBRID.state, 4, slots, window_pages)


def test_a_request_gets_a_slot_window_pages_and_index_rows():
    assert pool().allocate(1, 10, 10, PAGES) == (((0, 1),), ((0, 3),), PAGES)


def test_a_moving_window_needs_one_page_more_than_its_tokens():
    assert [pool().need(tokens, tokens) for tokens in (3, 8, 9, 16, 17)] == [1, 2, 3, 2, 3]
    assert [pool().need(3, reach) for reach in (4, 8, 100)] == [1, 2, 3]


@pytest.mark.parametrize(("short", "count"), [({"slots": 1}, 1), ({"window_pages": 5}, 1), ({}, 2)])
def test_a_request_gets_all_or_nothing(short: dict[str, int], count: int):
    state = pool(**short)
    got = [state.allocate(owner, 10, 10, PAGES) for owner in (1, 2)]
    assert sum(rows is not None for rows in got) == len(state) == count
    state.release(1)
    assert state.allocate(3, 10, 10, PAGES) is not None


def test_a_model_without_state_has_no_rows_and_no_owners():
    state = StatePool(StateShape(), 4, 0, 0)
    assert state.allocate(1, 10, 10, PAGES) == ()
    assert len(state) == 0
    state.release(1)
