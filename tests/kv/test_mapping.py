"""Who writes which heads to whom: every mapping up to 16 heads and 16 ranks a side, exhaustively."""

from __future__ import annotations

from collections import Counter

import pytest

from pdsim.kv.layout import KvShape
from pdsim.kv.mapping import Grid, RankMap, dp_rank, owned_heads, share, tp_writers
from pdsim.kv.state import StateShape, Tensor, stage_layers, window_span

SIZES = (1, 2, 4, 8, 16)
ALL = [(heads, prefill, decode) for heads in SIZES for prefill in SIZES for decode in SIZES]


def gqa(heads: int) -> KvShape:
    return KvShape(layers=1, heads=heads, head_bytes=8)


MLA = KvShape(layers=1, heads=1, head_bytes=8, latent_bytes=8)


def tp_map(shape: KvShape, prefill: int, decode: int) -> RankMap:
    return RankMap(shape, Grid(prefill), Grid(decode))


@pytest.mark.parametrize(("heads", "prefill", "decode"), ALL)
def test_readers_and_writers_are_one_relation_seen_from_both_sides(heads, prefill, decode):
    for shape in (gqa(heads), MLA):
        both = tp_map(shape, prefill, decode)
        forth = {(p, d) for p in range(prefill) for d in both.readers(p)}
        back = {(p, d) for d in range(decode) for p in both.writers(d)}
        assert forth == back


@pytest.mark.parametrize(("heads", "tp"), [(heads, tp) for heads in SIZES for tp in SIZES])
def test_ranks_own_every_head_as_often_as_there_are_replicas(heads, tp):
    counts = Counter(head for rank in range(tp) for head in owned_heads(gqa(heads), tp, rank))
    assert counts == dict.fromkeys(range(heads), max(1, tp // heads))


def test_sizes_that_do_not_divide_one_another_are_refused():
    with pytest.raises(ValueError, match="prefill tp=2 and decode tp=3: one must divide the other"):
        tp_map(gqa(6), 2, 3)
    with pytest.raises(ValueError, match="one must divide the other"):
        tp_writers(4, 6, 0)


# --- stages, context parallelism, data parallelism -----------------------------------------------------------------


def test_ranks_are_numbered_with_tensor_parallelism_fastest_and_stages_slowest():
    grid = Grid(tp=2, pp=3, cp=2)
    assert [grid.at(rank) for rank in (0, 1, 2, 4, 11)] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0), (1, 2, 1)]
    assert [grid.rank(*grid.at(rank)) for rank in range(grid.size)] == list(range(12))
    with pytest.raises(IndexError, match="rank 12 is not one of 12"):
        grid.at(12)


@pytest.mark.parametrize(("layers", "pp", "counts"), [(8, 4, [2, 2, 2, 2]), (7, 4, [1, 2, 2, 2]), (61, 2, [30, 31])])
def test_the_last_stages_have_the_layers_that_are_left_over(layers, pp, counts):
    stages = [stage_layers(layers, pp, stage) for stage in range(pp)]
    assert list(map(len, stages)) == counts
    assert [layer for stage in stages for layer in stage] == list(range(layers))


def test_a_stage_without_layers_is_refused():
    with pytest.raises(ValueError, match="pp=5 over 4 layers: every stage needs at least one"):
        stage_layers(4, 5, 0)


@pytest.mark.parametrize("pages", [1, 3, 8, 11])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_context_parallel_ranks_share_the_positions_of_a_request(pages, cp):
    shares = [share(pages, cp, rank) for rank in range(cp)]
    assert [position for part in shares for position in part] == list(range(pages))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_context_parallel_rank_writes_everything_unless_all_do():
    shape, prefill = gqa(4), Grid(tp=2, cp=3)
    assert RankMap(shape, prefill, Grid(2)).writers(1) == (1,)
    assert RankMap(shape, prefill, Grid(2), all_cp_ranks=True).writers(1) == (1, 3, 5)


def test_context_parallel_ranks_beyond_the_pages_write_nothing():
    both = RankMap(gqa(1), Grid(tp=1, cp=4), Grid(1), all_cp_ranks=True)
    assert [both.expected(0, pages) for pages in (1, 2, 4, 9)] == [1, 2, 4, 4]


def test_a_decode_rank_hears_of_every_stage_it_needs():
    shape = KvShape(layers=5, heads=2, head_bytes=8)
    assert RankMap(shape, Grid(2, pp=2), Grid(1)).writers(0) == (0, 1, 2, 3)
    assert RankMap(shape, Grid(2, pp=2), Grid(2, pp=2)).writers(3) == (3,)


def test_ranks_that_repeat_a_latent_row_write_mamba_dimensions_only():
    state = StateShape("am", mamba=(Tensor((4,), 8),))
    both = RankMap(KvShape(2, 1, 8, latent_bytes=8, state=state), Grid(2), Grid(1))
    parts = [both.part(writer, 0) for writer in both.writers(0)]
    assert [part.components for part in parts if part] == [("kv", "mamba"), ("mamba",)]
    assert [part.aux for part in parts if part] == [True, False]


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (Grid(1), Grid(1, cp=2), "decode cp=2: decode ranks are not context-parallel"),
        (Grid(1, pp=2), Grid(1, pp=4), "decode pp=4 and prefill pp=2: decode needs the same stages, or one"),
        (Grid(1, pp=8), Grid(1), "pp=8 over 4 layers"),
    ],
)
def test_what_has_no_mapping_is_refused(prefill, decode, words):
    with pytest.raises(ValueError, match=words):
        RankMap(KvShape(4, 2, 8), prefill, decode)


def test_a_room_has_the_derived_or_the_requested_dp_rank():
    assert [dp_rank(room, 3) for room in range(4)] == [0, 1, 2, 0]
    assert dp_rank(5, 3, explicit=1) == 1
    with pytest.raises(ValueError, match="dp_rank must be >= 0 and < dp=3, got 3"):
        dp_rank(5, 3, explicit=3)


@pytest.mark.parametrize(
    ("tokens", "window", "page", "span"),
    [(100, 16, 4, (21, 4)), (10, 16, 4, (0, 3)), (100, 30, 64, (1, 1)), (5, 1, 1, (4, 1)), (64, 64, 64, (0, 1))],
)
def test_a_window_touches_pages_from_the_one_that_it_begins_in(tokens, window, page, span):
    assert window_span(tokens, window, page) == span
