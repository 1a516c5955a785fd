"""Bytes, calls and descriptors of a prefill chunk, as the reference counts them for four models.

8192 tokens are n pages of p tokens in G groups of neighbours, L layers: grouped, 2 L G descriptors (L G of latent
rows) in one call or in one for each plane; sliced, 2 L n p; page by page, 2 L n.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from omegaconf import OmegaConf

from pdsim.compute.roofline import kv_shape
from pdsim.config import build
from pdsim.kv.layout import KvLayout, KvShape
from pdsim.kv.mapping import Grid, RankMap
from pdsim.kv.messages import Chunk, RegisterPool
from pdsim.kv.peers import REGION, STAGING, DecodePeer
from pdsim.kv.plan import Runs
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm
from pdsim.transfer import Peer, Region

TOKENS = 8192
MOONCAKE, MORI, NIXL = "mooncake", "mori", "nixl"


def shape(model: str, **changes: object) -> KvShape:
    return kv_shape(
        replace(build(Llm, OmegaConf.to_container(OmegaConf.load(f"conf/model/{model}.yaml"))), **changes)
    )


def policy(backend: str) -> Policy:
    return Policy(**OmegaConf.to_container(OmegaConf.load(f"conf/backend/{backend}.yaml").policy))


class Counted(NamedTuple):
    calls: int
    descriptors: int  # of each call, which are all alike
    nbytes: int  # of all


def count(
    model: KvShape, backend: str, prefill: int, page_size: int, groups: int, decode: int = 0, ring: int = 0
) -> Counted:
    """Return what prefill rank 0 of *prefill* writes to decode rank 0 of *decode*, as many unless said, a chunk."""
    decode = decode or prefill
    pages = TOKENS // page_size
    mine, theirs = (KvLayout(model, tp, page_size, 2 * pages, 4) for tp in (prefill, decode))
    part = RankMap(model, Grid(prefill), Grid(decode)).part(0, 0)
    assert part is not None
    regions = {REGION: Region("decode0.0", REGION, theirs.size, 0, "gpu")}
    if ring:
        regions[STAGING] = Region("decode0.0", STAGING, ring, 0, "gpu")
    register = RegisterPool("prefill0@1", b"", "decode0@1", 0, theirs)
    target = DecodePeer(Peer("decode0.0", regions), 0, mine, register, part, policy(backend))
    each = pages // groups
    runs: Runs = tuple((2 * each * group, each * group, each) for group in range(groups))
    chunk = Chunk(1, "decode0@1", 0, 0, 2 * TOKENS, runs, False, (0, 1), 0.0, 0.0)
    if ring:
        return Counted(1, 1, target.block(runs, ring))
    batches = [target.batch(piece, n) for piece in target.writes(chunk, runs) for n in range(piece.writes)]
    (descriptors,) = {len(batch) for batch in batches}
    return Counted(len(batches), descriptors, sum(batch.nbytes for batch in batches))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("model", "tp", "page_size", "planes", "mebibytes"),
    [
        ("llama-3.1-8b", 1, 64, 2 * 32, 1024),
        ("qwen3-235b-a22b", 4, 64, 2 * 94, 376),
        ("qwen3-32b", 2, 1, 2 * 64, 1024),
    ],
)
def test_keys_and_values_between_equal_ranks(model: str, tp: int, page_size: int, planes: int, mebibytes: int):
    found, pages, nbytes = shape(model), TOKENS // page_size, mebibytes * MIB
    for groups in (1, 8, pages):
        assert count(found, MOONCAKE, tp, page_size, groups) == (1, planes * groups, nbytes)
        assert count(found, MORI, tp, page_size, groups) == (planes, groups, nbytes)
        assert count(found, NIXL, tp, page_size, groups) == (1, planes * pages, nbytes)


@pytest.mark.parametrize(
    ("model", "tp", "page_size", "least", "most", "sliced"),
    [
        ("llama-3.1-8b", 1, 64, 64, 8192, 524_288),
        ("qwen3-235b-a22b", 4, 64, 188, 24_064, 1_540_096),
        ("qwen3-32b", 2, 1, 128, 1_048_576, 1_048_576),
    ],
)
def test_the_figures_of_the_reference(model: str, tp: int, page_size: int, least: int, most: int, sliced: int):
    found, pages = shape(model), TOKENS // page_size
    assert count(found, MOONCAKE, tp, page_size, 1).descriptors == least
    assert count(found, MOONCAKE, tp, page_size, pages).descriptors == most
    more = 2 * tp if found.heads > tp else tp // 2  # decode ranks: any number that is not theirs
    calls, each, _ = count(found, MOONCAKE, tp, page_size, 1, more)
    assert calls * each == sliced


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "page_size", "planes", "heads"),
    [
        ("llama-3.1-8b", 1, 2, 64, 64, 4),
        ("llama-3.1-8b", 2, 1, 64, 64, 4),
        ("qwen3-235b-a22b", 4, 1, 64, 188, 1),
        ("qwen3-32b", 2, 4, 1, 128, 2),
    ],
)
def test_slices_are_a_descriptor_for_each_token_and_plane_of_the_heads_that_both_keep(
    model: str, prefill: int, decode: int, page_size: int, planes: int, heads: int
):
    found, nbytes = shape(model), planes * TOKENS * heads * 128 * 2
    assert count(found, MOONCAKE, prefill, page_size, 1, decode) == (planes, TOKENS, nbytes)
    assert count(found, MORI, prefill, page_size, 1, decode) == (planes, TOKENS, nbytes)
    assert count(found, NIXL, prefill, page_size, 1, decode) == (1, planes * TOKENS, nbytes)
    assert count(found, MOONCAKE, prefill, page_size, 1, decode, ring=1 << 31) == (1, 1, nbytes)  # staged


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (8, 8), (8, 1), (1, 8)])
def test_latent_rows_are_whole_on_every_rank(prefill: int, decode: int):
    found, nbytes = shape("deepseek-v3", dtype_bytes=2), 549 * MIB
    assert nbytes == TOKENS * 70_272
    for groups in (1, 8, 128):
        assert count(found, MOONCAKE, prefill, 64, groups, decode) == (1, 61 * groups, nbytes)
        assert count(found, MORI, prefill, 64, groups, decode) == (61, groups, nbytes)
        assert count(found, NIXL, prefill, 64, groups, decode) == (1, 61 * 128, nbytes)


# --- sparse attention ----------------------------------------------------------------------------------------------


def test_an_index_of_132_bytes_a_token_and_layer_lies_beside_the_latent_rows():
    found = KvLayout(shape("deepseek-v3.2-exp"), 8, 64, 16, 4)
    assert [(table.component, len(table.planes), table.item) for table in found.tables] == [
        ("kv", 61, 64 * 576),
        ("index", 61, 64 * 132),
    ]


@pytest.mark.parametrize(("prefill", "decode"), [(8, 8), (8, 1), (1, 8), (4, 2)])
def test_the_index_of_a_request_goes_once_to_every_decode_rank_with_its_last_chunk(prefill: int, decode: int):
    found = shape("deepseek-v3.2-exp")
    both = RankMap(found, Grid(prefill), Grid(decode))
    layouts = [KvLayout(found, tp, 64, 16, 4) for tp in (prefill, decode)]
    for reader in range(decode):
        parts = [both.part(writer, reader) for writer in both.writers(reader)]
        (part,) = [part for part in parts if part and "index" in part.components]
        register = RegisterPool("prefill0@1", b"", "decode0@1", reader, layouts[1])
        peer = Peer(f"decode0.{reader}", {REGION: Region(f"decode0.{reader}", REGION, layouts[1].size, 0, "gpu")})
        target = DecodePeer(peer, 0, layouts[0], register, part, policy(MOONCAKE))
        runs, last = ((0, 4, 2), (7, 9, 1)), (((0, 4, 5),),)
        chunk = Chunk(1, "decode0@1", 0, 0, 320, runs, True, (0, 1), 0.0, 0.0, last)
        rows, index, metadata = target.writes(chunk, runs)
        assert (len(target.batch(rows)), target.batch(rows).nbytes) == (61 * 2, 61 * 3 * 64 * 576)
        assert (len(target.batch(index)), target.batch(index).nbytes) == (61, 61 * 5 * 64 * 132)
        assert (len(target.batch(metadata)), target.batch(metadata).nbytes) == (10, 1600)
