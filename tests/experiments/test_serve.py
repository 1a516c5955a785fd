"""`experiment=serve` on the model: every request accounted for, times that add up, bytes intact, ranks that die."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.serve import ServeOptions
from pdsim.core.errors import ConfigError
from pdsim.hardware.machine import Interconnect
from pdsim.models.parallel import Side
from pdsim.results.record import Result
from pdsim.serving.settings import Kv, Workload
from tests.support.configs import EIGHT, ENGINE, LLM
from tests.support.serving import GENERATED, GQA, configured, rows, serve, values


def quarantined(result: Result) -> int:
    assert result.outcome is not None
    leaders = [rank for name, rank in result.outcome.ranks.items() if name.endswith(".0") and rank.value]
    return sum(rank.value["quarantined_pages"] for rank in leaders)


# --- accounts ------------------------------------------------------------------------------------------------------


def test_every_request_of_the_embedded_trace_is_served():
    result = serve(configured(workload=Workload(), model=replace(LLM, context=8192), kv=Kv(page_size=64)))
    assert set(result.requests["status"]) == {"ok"}
    assert values(result)["requests_ok"] == 200
    assert not result.failures


def test_the_phases_of_a_request_add_up_to_its_whole_time():
    for row in rows(serve(configured())):
        phases = sum(row[name] for name in ("queueing", "compute", "handshake", "transfer", "polling"))
        assert phases == pytest.approx(row["e2e"], rel=1e-12)
        assert all(row[name] >= 0 for name in ("queueing", "compute", "handshake", "transfer", "polling"))
        assert row["e2e"] == pytest.approx(row["ttft"] + (row["output"] - 1) * (row["tpot"] or 0), rel=1e-12)


def test_one_request_alone_takes_what_the_formulas_say():
    config = configured(workload=replace(GENERATED, count=1))
    result = serve(config)
    (row,) = rows(result)
    from experiments.serve import job

    what = job(config, ServeOptions())
    given, wanted = row["input"], row["output"]
    pieces = [(done, min(256, given - done)) for done in range(0, given, 256)]
    prefill = sum(what.prefill_time.prefill([piece]) for piece in pieces)
    contexts = range(given + 1, given + wanted)
    decode = sum(what.decode_time.step(1) + what.decode_time.context * context for context in contexts)
    assert row["compute"] == pytest.approx(prefill + decode, rel=1e-12)
    pages, token = -(-given // 16), 2 * 2 * 2 * 16 * 2
    assert row["nbytes"] == pages * 16 * token + 1600
    assert row["polling"] == 0  # nothing else runs, so the scheduler looks at once


def test_requests_of_one_token_end_with_the_first():
    result = serve(configured(workload=replace(GENERATED, output_mean=1, output_cv=0)))
    for row in rows(result):
        assert row["status"] == "ok"
        assert row["tpot"] is None
        assert row["e2e"] == row["ttft"]


def test_two_runs_with_one_seed_are_identical():
    first, second = serve(configured(seed=3)), serve(configured(seed=3))
    assert first.requests == second.requests
    assert first.transfers == second.transfers
    assert first.summary == second.summary


def test_users_who_leave_are_told_apart_from_failures():
    leaving = replace(GENERATED, aborts=0.5, patience=0.02)
    result = serve(configured(workload=leaving))
    found = values(result)
    aborted = [row for row in rows(result) if row["status"].startswith("Aborted: the user left after")]
    assert 0 < len(aborted) == found["requests_aborted"] < sum(row["patience"] is not None for row in rows(result))
    assert found["requests_ok"] + found["requests_aborted"] == 40
    assert found["requests_failed"] == 0
    assert result.failures == []
    assert all(row["e2e"] <= row["patience"] for row in rows(result) if row["e2e"] and row["patience"])


# --- instances and policies ----------------------------------------------------------------------------------------


def test_round_robin_gives_every_instance_its_turn():
    sides = {"prefill": Side(tp=1, instances=2), "decode": Side(tp=1, instances=4)}
    result = serve(configured(**sides, options={"router": "round_robin"}))
    assert result.requests["decode"][:5] == ["decode0", "decode1", "decode2", "decode3", "decode0"]
    assert result.requests["prefill"].count("prefill0") == 20


def test_least_tokens_prefers_the_idle_instance():
    slow = replace(GENERATED, rate=0.001, count=6)  # each is done before the next comes
    result = serve(configured(decode=Side(tp=1, instances=2), workload=slow))
    assert set(result.requests["decode"]) == {"decode0"}
    busy = serve(configured(decode=Side(tp=1, instances=2)))
    assert set(busy.requests["decode"]) == {"decode0", "decode1"}


# --- bytes ---------------------------------------------------------------------------------------------------------


def test_tracking_contents_does_not_change_times():
    assert serve(configured(memory="tracked")).requests == serve(configured()).requests


# --- faults --------------------------------------------------------------------------------------------------------

FAULTY = {"deadline": 0.5}
TWO = Side(tp=2, instances=2)


@pytest.mark.parametrize("rank", ["decode0.0", "decode0.1", "prefill0.0", "prefill0.1"])
@pytest.mark.parametrize("at", [0.0, 0.0501, 0.1503])
def test_a_rank_that_dies_fails_its_requests_and_nobody_hangs(rank: str, at: float):
    config = configured(TWO, TWO, GQA, options=FAULTY, memory="tracked")
    result = serve(config, kill={rank: at})
    instance = rank[:-2]
    status = result.requests["status"]
    assert {line.partition(":")[0] for line in status} <= {"ok", "PeerLost", "OutOfMemory"}
    assert any(line.startswith("PeerLost") for line in status) == (at > 0)  # lost at the start, it gets no request
    side = "prefill" if instance.startswith("prefill") else "decode"
    for row in rows(result):
        if row[side] != instance:
            assert row["status"] == "ok" or (side == "prefill" and "in quarantine" in row["status"])
    assert f"Killed: {rank}" in " ".join(result.failures)


def test_the_last_instance_of_a_side_takes_all_that_are_left_with_it():
    result = serve(configured(options=FAULTY), kill={"decode0.0": 0.1})
    assert set(result.requests["status"]) > {"ok"}
    assert "PeerLost: no decode instance is left" in result.requests["status"]


def test_without_a_router_the_ranks_end_by_themselves():
    result = serve(configured(options=FAULTY), kill={"router": 0.1})
    assert result.outcome is not None
    assert "PeerLost" in result.outcome.ranks["decode0.0"].error
    assert result.outcome.seconds < 0.1 + 2 * 0.5 + 0.1
    assert values(result)["requests_ok"] == 0


def test_a_transfer_that_times_out_fails_its_request_and_frees_its_pages_once_it_has_settled():
    stuck = replace(EIGHT, interconnect=Interconnect(kind="switch", rate=1e6))
    engine = replace(ENGINE, timeout=0.02)
    result = serve(
        configured(hw=stuck, backend=engine, options=FAULTY, workload=replace(GENERATED, count=4, rate=1.0))
    )
    assert all(status.startswith("TransferTimeout") for status in result.requests["status"])
    assert values(result)["requests_failed"] == 4


# --- what cannot be ------------------------------------------------------------------------------------------------


def test_a_request_larger_than_the_pool_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match=r"request \d+ needs \d+ pages of 16 tokens on the prefill side"):
        serve(configured(kv=Kv(page_size=16, pool=40_000)))


def test_sizes_that_do_not_divide_one_another_are_refused():
    model = replace(LLM, heads=12, kv_heads=12)
    with pytest.raises(ConfigError, match=r"prefill tp=2 and decode tp=3: one must divide the other"):
        serve(configured(Side(tp=2), Side(tp=3), model))
