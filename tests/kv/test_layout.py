"""Where keys, values and state lie, which rank writes which of them to whom, and the padded all-gather."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.errors import ConfigError, MessageError
from pdsim.kv.allgather import zigzag
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
from pdsim.kv.policy import Policy, described

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


def test_a_rank_keeps_its_share_of_heads_and_state():
    assert [QWEN3_235B.local_heads(tp) for tp in (1, 2, 4, 8, 16)] == [4, 2, 1, 1, 1]
    with pytest.raises(ValueError, match="4 KV heads over tp=3: one must divide the other"):
        QWEN3_235B.local_heads(3)
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


LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any)


@given(LENGTHS, st.integers(1, 9))
def test_a_zigzag_of_any_batch_comes_out_in_its_order(lengths, cp):
    split = zigzag(lengths, cp)
    source, whole = np.full(cp * split.longest, -1), np.full(sum(lengths), -2)
    for index, rank in enumerate(split.pieces):  # what stands in every row after the gather; -1 is padding
        held = [first + n for first, count in rank for n in range(count)]
        source[index * split.longest : index * split.longest + len(held)] = held
    for at, to, count in zip(*split.order(), strict=True):
        assert (whole[to : to + count] == -2).all(), "written twice"
        whole[to : to + count] = source[at : at + count]
    assert list(whole) == list(range(split.total))


@given(LENGTHS, st.integers(1, 9))
def test_a_rank_has_a_block_from_either_end(lengths, cp):
    split, start = zigzag(lengths, cp), 0
    for length in lengths:
        base, more = divmod(length, 2 * cp)
        edges = np.cumsum([0] + [base + (n < more) for n in range(2 * cp)]) + start
        for index, rank in enumerate(split.pieces):
            mine = [(int(edges[n]), int(edges[n + 1] - edges[n])) for n in (index, 2 * cp - 1 - index)]
            assert [piece for piece in rank if start <= piece[0] < start + length] == [p for p in mine if p[1]]
        start += length


@pytest.mark.parametrize(("lengths", "cp"), [([], 2), ([0, 0], 2), ([3, -1], 2), ([3], 0)])
def test_nothing_to_gather_and_what_cannot_be_is_refused(lengths, cp):
    with pytest.raises(ValueError, match=r"lengths|cp"):
        zigzag(lengths, cp)


POOL = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"


@pytest.mark.parametrize(
    ("engine", "variables", "keys"),
    [
        ("mooncake", {POOL: "INTRA_NODE_NVLINK"}, ["backend.policy.pool=intra_node_nvlink"]),
        ("mooncake", {"SGLANG_MOONCAKE_SEND_AUX_TCP": "true"}, ["backend.policy.metadata=control"]),
        ("mori", {"SGLANG_MOONCAKE_SEND_AUX_TCP": "1"}, []),
        ("mori", {"SGLANG_MORI_SEND_AUX_RDMA": "1"}, ["backend.policy.metadata=write"]),
        ("nixl", {"SGLANG_DISAGG_STAGING_BUFFER": "0"}, []),
        (
            "nixl",
            {"SGLANG_DISAGG_STAGING_BUFFER": "1", "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "512"},
            ["kv.staging=true", "kv.staging_ring=512MiB"],
        ),
    ],
)
def test_variables_of_sglang_are_keys(engine, variables, keys):
    assert list(described(variables, engine)) == keys


@pytest.mark.parametrize(("name", "text"), [(POOL, "BAREX"), ("SGLANG_DISAGGREGATION_QUEUE_SIZE", "few")])
def test_a_variable_that_no_key_has_is_refused(name, text):
    with pytest.raises(ConfigError, match=f"{name}={text} .*; unset it, or set backend.policy"):
        list(described({name: text}, "mooncake"))
