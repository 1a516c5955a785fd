"""Where keys and values lie, and the sizes that models of the reference have."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pdsim.kv.layout import AUX_BYTES, AUX_ROWS, KvLayout, KvShape

LLAMA_8B = KvShape(layers=32, heads=8, head_bytes=128 * 2)
QWEN3_235B = KvShape(layers=94, heads=4, head_bytes=128 * 2)
QWEN3_32B = KvShape(layers=64, heads=8, head_bytes=128 * 2)
DEEPSEEK_V3 = KvShape(layers=61, heads=1, head_bytes=128 * 2, latent_bytes=576 * 2)


def layout(shape: KvShape, tp: int = 1, page_size: int = 64, pages: int = 256, slots: int = 4) -> KvLayout:
    return KvLayout(shape, tp, page_size, pages, slots)


@pytest.mark.parametrize(
    ("shape", "tp", "mebibytes"),
    [
        (LLAMA_8B, 1, 1024),
        (LLAMA_8B, 2, 512),
        (QWEN3_235B, 4, 376),
        (QWEN3_32B, 2, 1024),
        (DEEPSEEK_V3, 1, 549),
        (DEEPSEEK_V3, 8, 549),
    ],
)
def test_a_chunk_of_8192_tokens_takes_what_the_reference_says(shape: KvShape, tp: int, mebibytes: int):
    assert 8192 * shape.token_bytes(tp) == mebibytes << 20


@pytest.mark.parametrize(
    ("shape", "tp", "tokens"), [(QWEN3_235B, 4, 1394), (LLAMA_8B, 2, 1024), (QWEN3_32B, 2, 512)]
)
def test_64_mebibytes_hold_as_many_tokens_as_the_reference_says(shape: KvShape, tp: int, tokens: int):
    assert (64 << 20) // shape.token_bytes(tp) == tokens


def test_a_latent_token_and_page_take_what_the_reference_says():
    assert DEEPSEEK_V3.token_bytes(4) == 70_272
    assert layout(DEEPSEEK_V3, tp=4).item == 73_728


def test_a_rank_keeps_its_share_of_the_heads_or_one_replica():
    assert [QWEN3_235B.local_heads(tp) for tp in (1, 2, 4, 8, 16)] == [4, 2, 1, 1, 1]


def test_sizes_that_do_not_divide_one_another_are_refused():
    with pytest.raises(ValueError, match="4 KV heads over tp=3: one must divide the other"):
        QWEN3_235B.local_heads(3)


def test_planes_follow_one_another_and_the_metadata_follows_the_planes():
    found = layout(LLAMA_8B, tp=2, pages=10, slots=3)
    assert found.row == 4 * 256
    assert found.item == 64 * found.row
    assert found.plane == 10 * found.item
    assert found.kv_bytes == 2 * 32 * found.plane
    assert found.size == found.kv_bytes + 3 * AUX_BYTES


def test_metadata_is_1600_bytes_in_ten_buffers():
    assert (AUX_BYTES, len(AUX_ROWS)) == (1600, 10)


def test_rows_of_metadata_tile_the_rest_of_the_region():
    found = layout(LLAMA_8B, slots=3)
    rows = sorted(
        (offset, size)
        for slot in range(3)
        for offset, size in zip(found.aux_offsets(slot).tolist(), AUX_ROWS, strict=True)
    )
    assert rows[0][0] == found.kv_bytes
    assert all(one[0] + one[1] == other[0] for one, other in pairwise(rows))
    assert sum(rows[-1]) == found.size


@pytest.mark.parametrize("name", ["tp", "page_size", "pages", "slots"])
def test_a_pool_without_anything_is_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        layout(LLAMA_8B, **{name: 0}) if name != "tp" else layout(LLAMA_8B, tp=0)
