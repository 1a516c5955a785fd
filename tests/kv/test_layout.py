"""Where keys, values and state lie, and which rank writes which of them to whom."""

import re
from dataclasses import replace

import pytest

from pdsim.core.errors import MessageError
from pdsim.kv.layout import (
    AUX_ROWS,
    Grid,
    HostMetadata,
    KvLayout,
    KvShape,
    RankMap,
    StateShape,
    Tensor,
    read_metadata,
    tp_writers,
    window_span,
    write_metadata,
)
from pdsim.kv.plan import metadata_route
from pdsim.kv.policy import Policy

LLAMA_8B = KvShape(layers=32, heads=8, head_bytes=128 * 2)
QWEN3_235B = KvShape(layers=94, heads=4, head_bytes=128 * 2)
QWEN3_32B = KvShape(layers=64, heads=8, head_bytes=128 * 2)
DEEPSEEK_V3 = KvShape(layers=61, heads=1, head_bytes=128 * 2, latent_bytes=576 * 2)
# Qwen3-Next-80B-A3B: q and k of 16 heads of 128 and v of 32 of 128, kernel 4; a float32 state of 32 x 128 x 128
CONV, SSM = Tensor((2048, 2048, 4096), 3 * 2), Tensor((32,), 128 * 128 * 4)
QWEN3_NEXT = KvShape(48, heads=2, head_bytes=512, state=StateShape("mmma", mamba=(CONV, SSM)))
HYBRID = KvShape(6, heads=4, head_bytes=16, state=StateShape("mwa", 8, (Tensor((4, 8), 6), Tensor((4,), 20)), 12))


def layout(shape: KvShape, tp: int = 1, page_size: int = 64, pages: int = 256, slots: int = 4) -> KvLayout:
    return KvLayout(shape, tp, page_size, pages, slots)


def hybrid(tp: int = 1, pp: int = 1, stage: int = 0) -> KvLayout:
    return KvLayout(HYBRID, tp, 4, 10, 3, pp, stage, state_slots=2, window_pages=10)


@pytest.mark.parametrize(
    ("shape", "tp", "nbytes"),
    [
        (LLAMA_8B, 1, 131_072),
        (LLAMA_8B, 2, 65_536),
        (QWEN3_235B, 4, 48_128),
        (QWEN3_32B, 2, 131_072),
        (DEEPSEEK_V3, 1, 70_272),
        (DEEPSEEK_V3, 8, 70_272),
        (QWEN3_NEXT, 1, 24_576),  # only layers with full attention keep tokens
    ],
)
def test_a_token_takes_what_the_reference_says(shape, tp, nbytes):
    assert shape.token_bytes(tp) == nbytes


def test_a_rank_keeps_its_heads_or_one_replica():
    assert [QWEN3_235B.local_heads(tp) for tp in (1, 2, 4, 8, 16)] == [4, 2, 1, 1, 1]
    with pytest.raises(ValueError, match="4 KV heads over tp=3: one must divide the other"):
        QWEN3_235B.local_heads(3)


def test_a_mamba_slot_is_divided_group_by_group():
    assert CONV.nbytes(1) == 8192 * 3 * 2 == 4 * CONV.nbytes(4)
    assert CONV.local(4) == (512, 512, 1024)
    pool = KvLayout(QWEN3_NEXT, 1, 64, 1, 1, state_slots=1)
    assert pool.row_bytes("mamba") == 36 * (8192 * 3 * 2 + (2 << 20))
    with pytest.raises(ValueError, match=r"mamba dimensions \(32,\) over tp=64: tp must divide each of them"):
        SSM.local(64)


@pytest.mark.parametrize(
    ("what", "changes", "words"),
    [
        (HYBRID.state, {"pattern": "mx"}, "pattern='mx' must be of a, w and m, with at least one a"),
        (HYBRID.state, {"window": 0}, "window=0 must be > 0 exactly if pattern='mwa' has a w"),
        (HYBRID.state, {"mamba": ()}, "must name tensors exactly if pattern='mwa' has an m"),
        (HYBRID.state, {"index_bytes": -1}, "index_bytes must be >= 0, got -1"),
        (hybrid(), {"state_slots": 0}, "state_slots must be >= 1 for layers 'mwa', got 0"),
        (hybrid(), {"window_pages": 0}, "window_pages must be >= 1 for layers 'mwa', got 0"),
        (hybrid(), {"stage": 1}, "stage must be >= 0 and < pp=1, got 1"),
        *((layout(LLAMA_8B), {name: 0}, f"{name} must be >= 1, got 0") for name in ("tp", "page_size", "pages")),
    ],
)
def test_what_is_no_model_or_pool_is_refused(what, changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        replace(what, **changes)


LAYOUT = KvLayout(KvShape(layers=2, heads=2, head_bytes=16), tp=1, page_size=4, pages=8, slots=3)
ROWS = tuple(bytes([index + 1]) * size for index, size in enumerate(AUX_ROWS))
ZEROS = tuple(map(bytes, AUX_ROWS))


@pytest.mark.parametrize(
    ("pool", "way", "memory"),
    [("default", "write", "device"), ("nvlink", "control", "host"), ("intra_node_nvlink", "write", "device")],
)
def test_the_pool_decides_the_way_of_metadata(pool, way, memory):
    assert (Policy(pool=pool).metadata_by, Policy(pool=pool).metadata_on) == (way, memory)


def test_rows_that_do_not_pair_are_refused_or_fall_back():
    longer = (*AUX_ROWS, 64)
    assert metadata_route(Policy(), AUX_ROWS, AUX_ROWS) == ("write", "")
    with pytest.raises(MessageError, match=r"10 rows of 1600 B here, 11 of 1664 B there: run one version"):
        metadata_route(Policy(), AUX_ROWS, longer)
    route = metadata_route(Policy(metadata_fallback="control"), AUX_ROWS, longer)
    assert route == ("control", "10 rows of 1600 B here, 11 of 1664 B there")


def test_rows_are_stored_in_their_slot_and_cut():
    memory = HostMetadata(LAYOUT)
    write_metadata(memory, LAYOUT, 1, [row + b"more" for row in ROWS] + [b"another"])
    assert [read_metadata(memory, LAYOUT, slot, contents=True) for slot in range(3)] == [ZEROS, ROWS, ZEROS]
    assert read_metadata(memory, LAYOUT, 1, contents=False) == ZEROS


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (Grid(2), Grid(3), "prefill tp=2 and decode tp=3: one must divide the other"),
        (Grid(1), Grid(1, cp=2), "decode cp=2: decode ranks are not context-parallel"),
        (Grid(1, pp=2), Grid(1, pp=4), "decode pp=4 and prefill pp=2: decode needs the same stages, or one"),
        (Grid(1, pp=8), Grid(1), "pp=8 over 4 layers: every stage needs at least one"),
    ],
)
def test_what_has_no_mapping_is_refused(prefill, decode, words):
    with pytest.raises(ValueError, match=words):
        RankMap(KvShape(4, 6, 8), prefill, decode)
    with pytest.raises(ValueError, match="one must divide the other"):
        tp_writers(4, 6, 0)


def test_ranks_are_numbered_tp_fastest_and_stages_slowest():
    grid = Grid(tp=2, pp=3, cp=2)
    assert [grid.at(rank) for rank in (0, 1, 2, 4, 11)] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0), (1, 2, 1)]
    assert [grid.rank(*grid.at(rank)) for rank in range(grid.size)] == list(range(12))
    with pytest.raises(IndexError, match="rank 12 is not one of 12"):
        grid.at(12)


@pytest.mark.parametrize(
    ("tokens", "window", "page", "span"),
    [(100, 16, 4, (21, 4)), (10, 16, 4, (0, 3)), (100, 30, 64, (1, 1)), (5, 1, 1, (4, 1)), (64, 64, 64, (0, 1))],
)
def test_a_window_touches_whole_pages(tokens, window, page, span):
    assert window_span(tokens, window, page) == span
