"""Prefix caches: exact times of prompts that begin alike, what is computed, sent and evicted."""

from dataclasses import replace
from typing import Any

import pytest

from pdsim.core.errors import ConfigError
from pdsim.kv.layout import AUX_BYTES
from pdsim.models.llm import Hybrid, Side
from pdsim.results.record import Result
from pdsim.serving.block_manager import DecodePages, page_keys
from pdsim.serving.deployment import Deployment
from pdsim.serving.settings import Cache, Kv, SchedulerLimits, ServingEngine
from pdsim.serving.workload import Request
from tests.support.serving import GQA, MLA, POOL, QUIET, Served, configured, rows, serve, simulate, tabled, values

PREFILL = Cache(prefill=True)
BOTH = Cache(prefill=True, decode=True)
PULL = ServingEngine(name="pull", handoff="pull", recompute=1, memory="grow")
TOKEN = 2 * GQA.layers * GQA.kv_heads * GQA.head_dim * 2
SETTINGS = {"model": replace(GQA, context=1 << 17), "hw": QUIET, "kv": Kv(page_size=64, pool=1 << 24)}
SETTINGS |= {"scheduler": SchedulerLimits(chunk=512, decode_batch=8)}
Prompt = tuple[float, int, int, list[int]]
"""Seconds, tokens in and out, hashes of blocks of 512."""


def served(prompts: list[Prompt], cache: Cache, **changes: Any) -> tuple[list[dict[str, Any]], Deployment, Result]:
    requests = [Request(at, given, wanted, None, tuple(blocks)) for at, given, wanted, blocks in prompts]
    return tabled(requests, **(SETTINGS | {"cache": cache} | changes))


def test_a_page_is_named_by_its_block_and_its_end():
    assert page_keys([7, 8], 1000, 256) == [7 << 32 | 256, 7 << 32 | 512, 8 << 32 | 768]
    assert page_keys([7, 8], 1024, 1024) == [8 << 32 | 1024]
    assert page_keys([7], 2000, 512) == [7 << 32 | 512]  # the trace knows no more
    assert page_keys([], 100, 64) == []


SHARED = [(0.0, 1024, 2, [1, 2]), (5.0, 1300, 2, [1, 2, 3]), (10.0, 1300, 2, [1, 2, 3])]


def test_prefill_computes_what_is_not_cached_in_the_exact_time():
    table, what, result = served(SHARED, PREFILL)
    one, two, three = table
    forward = what.prefill_time.prefill
    assert [row["cached_prefill"] for row in (one, two, three)] == [0, 1024, 1280]  # whole pages, one token at least

    def decode(row: dict[str, Any]) -> float:
        return what.decode_time.step(1) + what.decode_time.context * (row["input"] + 1)

    assert one["compute"] == pytest.approx(forward([(0, 512)]) + forward([(512, 512)]) + decode(one), rel=1e-9)
    assert two["compute"] == pytest.approx(forward([(1024, 276)]) + decode(two), rel=1e-9)
    assert three["compute"] == pytest.approx(forward([(1280, 20)]) + decode(three), rel=1e-9)
    assert values(result)["prefix_hit_prefill"] == pytest.approx((1024 + 1280) / 3624)
    # decode has no cache: all pages are sent
    assert [row["nbytes"] for row in (one, two, three)] == [
        -(-row["input"] // 64) * 64 * TOKEN + AUX_BYTES for row in (one, two, three)
    ]


@pytest.mark.parametrize("engine", [ServingEngine(), PULL], ids=["push", "pull"])
def test_decode_gets_only_the_pages_that_it_lacks(engine):
    table, _, result = served(SHARED, BOTH, engine=engine)
    assert [row["cached_decode"] for row in table] == [0, 1024, 1280]
    metadata = AUX_BYTES if engine.handoff == "push" else 0
    assert [row["nbytes"] - metadata for row in table] == [1024 * TOKEN, 320 * TOKEN, 64 * TOKEN]
    assert values(result)["prefix_hit_decode"] == pytest.approx((1024 + 1280) / 3624)
    whole, *_ = served(SHARED, PREFILL, engine=engine)
    assert table[2]["transfer"] < whole[2]["transfer"]


def test_prompts_of_one_step_or_ahead_are_found_as_computed():
    twins = [(0.0, 512, 1, [9]), (0.0, 200, 1, [1]), (0.0, 200, 1, [1])]  # both wait for the end of the first
    computed, *_ = served(twins, PREFILL)
    scheduled, *_ = served(twins, replace(PREFILL, found="scheduled"))
    assert [row["cached_prefill"] for row in computed] == [0, 0, 0]
    assert [row["cached_prefill"] for row in scheduled] == [0, 0, 192]
    # the second is chosen during the forward of the first one's second chunk: only the first chunk is computed
    table, *_ = served([(0.0, 1024, 1, [1, 2])] * 2, PREFILL, engine=ServingEngine(name="ahead", ahead=True))
    assert [row["cached_prefill"] for row in table] == [0, 512]


def test_requests_evict_what_was_used_least_recently():
    prompts = [(5.0 * n, 512, 1, [block]) for n, block in enumerate([1, 2, 1, 3, 2, 1])]
    small = Kv(page_size=64, pool=20 * 64 * TOKEN)  # two prompts and four pages
    table, *_ = served(prompts, PREFILL, kv=small)
    # the third computes its last page again, so the cached one is the oldest of 16: prompt 3 evicts that and three
    # of 2, which then finds five and evicts three of the seven of 1
    assert [row["cached_prefill"] for row in table] == [0, 0, 448, 0, 320, 256]
    none, *_ = served(prompts, replace(PREFILL, limit=256), kv=small)
    assert [row["cached_prefill"] for row in none] == [0, 0, 0, 0, 0, 0]


def test_a_preempted_request_computes_again_only_what_is_not_cached():
    engine = replace(ServingEngine(), memory="grow", preemption="recompute")
    prompts = [(0.0, 448, 200, [1]), (0.0, 448, 200, [2])]
    kv = Kv(page_size=64, pool=18 * 64 * TOKEN)
    ends = {}
    for name, cache in (("none", Cache()), ("decode", Cache(decode=True))):
        table, _, result = served(prompts, cache, engine=engine, kv=kv)
        assert result.outcome.ranks["decode0.0"].value["preemptions"] > 0
        ends[name] = max(row["e2e"] for row in table)
    assert ends["decode"] <= ends["none"]


def test_without_hashes_and_without_a_cache_nothing_changes():
    plain = configured()
    assert rows(serve(replace(plain, cache=BOTH))) == [
        row | {"cached_prefill": 0, "cached_decode": 0} for row in rows(serve(plain))
    ]
    table, *_ = served(SHARED, Cache())
    assert "cached_prefill" not in table[0]


def test_what_cannot_be_cached_is_refused():
    with pytest.raises(ConfigError, match=r"set kv\.checked=0, or cache=none"):
        serve(configured(cache=PREFILL, memory="tracked"))


SMALL = Kv(page_size=64, pool=20 * 64 * TOKEN)  # two prompts of eight pages, and four pages
PCIE = replace(QUIET, gpu=replace(QUIET.gpu, pcie=1e9))


def test_what_is_computed_goes_to_host_memory_beside_the_kv():
    prompts = [(5.0 * n, 512, 1, [block]) for n, block in enumerate([1, 2, 3])]
    *_, result = served(prompts, replace(PREFILL, host=4096.0), kv=SMALL, hw=PCIE)
    out = {name: share for name, share in result.outcome.links.items() if name.endswith("pcie.out")}
    assert sum(share > 0 for share in out.values()) == 1  # of the prefill GPU, though the KV goes over NVLink


PAGE = 16  # tokens
ROW = 2 * GQA.layers * GQA.kv_heads * GQA.head_dim * 2  # bytes of a token
REQUEST = Request(0.0, 100, 20)  # 7 pages, in chunks of 32 tokens, and an eighth for the output


def serve_held(held: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Served:
    """Serve a request of which each decode instance holds the first *held* pages."""
    with monkeypatch.context() as context:
        context.setattr(DecodePages, "_cached", lambda *_: held)
        changes = {"model": GQA, "scheduler": SchedulerLimits(chunk=32, decode_batch=8)} | changes
        return simulate([REQUEST], **changes, memory="tracked")


def test_index_rows_of_held_pages_are_not_pulled():
    model = replace(MLA, context=1 << 17, hybrid=Hybrid(index_bytes=12))
    table, _, _ = served(SHARED, BOTH, engine=PULL, model=model)
    page = 64 * MLA.layers * (MLA.latent_dim * 2 + 12)
    assert [row["status"] for row in table] == ["ok"] * 3
    assert [row["nbytes"] for row in table] == [16 * page, (21 - 16) * page, (21 - 20) * page]


@pytest.mark.parametrize("held", [0, 1, 2, 3, 6])  # of 7; two are a chunk
def test_bytes_are_those_of_the_pages_that_are_not_there(held, monkeypatch):
    (row,) = serve_held(held, monkeypatch).rows
    assert row["status"] == "ok"  # contents verified
    # as the reference has it: ceil((input - prefix) / page) pages are sent
    assert row["nbytes"] == (7 - held) * PAGE * ROW + AUX_BYTES


SIDES = [{"prefill": Side(tp=prefill), "decode": Side(tp=decode)} for prefill, decode in ((1, 2), (2, 1), (4, 4))]
CASES = [
    *[(sides, 4, ROW) for sides in SIDES],
    ({"model": MLA}, 2, MLA.layers * MLA.latent_dim * 2),
    ({"model": replace(MLA, hybrid=Hybrid(index_bytes=12))}, 2, MLA.layers * (MLA.latent_dim * 2 + 12)),
    ({"model": replace(GQA, hybrid=Hybrid(pattern="aw", window=40))}, 2, ROW // 2),  # the window is sent whole
]


@pytest.mark.parametrize(("changes", "held", "row"), CASES)
def test_ranks_write_the_rest_to_where_it_belongs(changes, held, row, monkeypatch):
    ((whole,), (rest,)) = (serve_held(pages, monkeypatch, **changes).rows for pages in (0, held))
    assert whole["status"] == rest["status"] == "ok"
    assert whole["nbytes"] - rest["nbytes"] == held * PAGE * row


def test_context_parallel_ranks_share_the_positions_of_the_rest(monkeypatch):
    kv = replace(POOL, all_cp_ranks=True)
    _, outcome, (row,) = serve_held(3, monkeypatch, prefill=Side(tp=1, cp=2), kv=kv)
    assert row["status"] == "ok"
    written = [sum(record.nbytes for record in outcome.ranks[f"prefill0.{rank}"].transfers) for rank in range(2)]
    # four pages, two each, and rank 0 has the metadata
    assert written == [2 * PAGE * ROW + AUX_BYTES, 2 * PAGE * ROW]


def test_a_decode_side_with_all_pages_is_refused(monkeypatch):
    assert serve_held(7, monkeypatch).statuses == ["MessageError: 7 pages held of 100 tokens; hold less than all"]
