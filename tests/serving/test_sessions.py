"""Closed loops, whose turns come a think time after the answer, exactly; and tenants with their own limits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdsim.core.errors import ConfigError
from pdsim.models.llm import Side
from pdsim.serving.block_manager import hit_share
from pdsim.serving.requests import Request
from pdsim.serving.settings import Cache, Kv, SchedulerLimits, ServingEngine, Tenant, Workload
from pdsim.serving.workload import draw, load
from tests.support.serving import LLM, ONE, QUIET, configured, rows, simulate, values
from tests.support.serving import serve as run

LENGTHS = {"shared": 600, "input_mean": 300, "output_mean": 12}
SESSIONS = Workload(arrivals="sessions", count=24, users=3, turns=4, think=0.05, ramp=0.3, **LENGTHS)
MODEL = replace(LLM, context=1 << 17)


def serve(workload: Workload, options: dict[str, Any] | None = None, **changes: Any) -> Any:
    settings = {"workload": workload, "hw": QUIET, "model": MODEL, "kv": Kv(page_size=16, pool=1 << 24), **changes}
    return run(configured(options=options or {}, **settings))


@pytest.mark.parametrize("options", [{}, {"deployment": "colocated"}], ids=["disaggregated", "colocated"])
def test_a_turn_comes_a_think_time_after_the_answer(options):
    result = serve(SESSIONS, options)
    requests, table = load(SESSIONS, 0, MODEL.context), rows(result)
    assert values(result)["requests_ok"] == 24
    assert result.notes[0] == "load: unknown, users wait for their answers"
    assert [row["arrival"] for row in table[:3]] == [0.0, pytest.approx(0.1), pytest.approx(0.2)]
    for request, row in zip(requests, table, strict=True):
        if request.after >= 0:
            before = table[request.after]
            assert row["arrival"] == pytest.approx(before["arrival"] + before["e2e"] + request.arrival, abs=1e-9)


def test_a_prompt_begins_with_all_that_was_said():
    for users in (3, 0):
        requests = load(replace(SESSIONS, users=users, rate=5.0), 0, MODEL.context)
        for number, request in enumerate(requests):
            turn = number // 3 % 4 if users else number % 4
            if turn:
                before = requests[number - (3 if users else 1)]
                assert request.after == number - (3 if users else 1)
                assert request.input > before.input + before.output
                assert request.hash_ids[: len(before.hash_ids)] == before.hash_ids
            assert request.hash_ids[0] == 0  # shared by all
            assert request.input >= 600
        assert len({request.hash_ids[1] for request in requests}) == 6  # sessions


def test_sessions_need_a_number_and_begin_anew_beyond_the_context():
    requests = load(replace(SESSIONS, turns=50), 0, 4096)
    assert all(request.input + request.output <= 4096 for request in requests)
    assert len({request.hash_ids[1] for request in requests}) > 3
    with pytest.raises(ConfigError, match=r"set workload\.count=N"):
        load(replace(SESSIONS, count=None), 0, MODEL.context)


def test_a_cache_has_what_the_turns_repeat():
    requests = load(SESSIONS, 0, MODEL.context)
    result = serve(SESSIONS, cache=Cache(prefill=True))
    counted, hit = hit_share(requests), values(result)["prefix_hit_prefill"]
    # answers are not computed by prefill, and a page that is not full is not cached
    lost = 24 * (16 + max(request.output for request in requests)) / sum(request.input for request in requests)
    assert counted - lost <= hit <= counted


def test_a_ramp_brings_as_many_requests_as_its_rate():
    ramped = Workload(arrivals="poisson", count=4000, rate=100.0, ramp=10.0)
    times = np.array([request.arrival for request in load(ramped, 0, MODEL.context)])
    plain = np.array([request.arrival for request in load(replace(ramped, ramp=0.0), 0, MODEL.context)])
    assert times[plain > 5] == pytest.approx(plain[plain > 5] + 5)
    assert times[plain < 5] ** 2 / 20 == pytest.approx(plain[plain < 5])  # the integral of a rate that grows


def test_priority_is_computed_first_and_never_shed():
    requests = [Request(0.0, 256, 2, priority=int(number == 3)) for number in range(4)]
    scheduler = SchedulerLimits(chunk=256, prefill_batch=1, decode_batch=8)
    served = simulate(requests, hw=QUIET, engine=ServingEngine(scheduler="priority"), scheduler=scheduler)
    order = [row["started"] for row in served.rows]
    assert sorted(range(4), key=order.__getitem__) == [0, 3, 1, 2]  # the first had begun
    requests = [Request(0.0, 100, 2, priority=int(number == 4)) for number in range(5)]
    shed = "Shed: 200 tokens outstanding at prefill0"
    assert simulate(requests, hw=QUIET, options={"shed": 200}).statuses == ["ok", "ok", shed, shed, "ok"]


def test_shed_requests_are_counted_apart_and_users_go_on():
    result = serve(replace(SESSIONS, users=12, ramp=0.0, priority=0.3), {"shed": 1500})
    metrics = values(result)
    assert metrics["requests_shed"] > 0
    assert metrics["requests_failed"] == 0
    assert metrics["requests_ok"] + metrics["requests_shed"] == 24
    assert not result.failures
    assert all(row["status"] == "ok" for row in rows(result) if row["priority"])


def test_outputs_that_a_router_does_not_know_are_estimated():
    long, short = Request(0.0, 10, 200), Request(1e-4, 10, 2)
    requests = [long, short, Request(2e-4, 10, 2), Request(3e-4, 10, 2)]
    for known, last in ((True, ["decode1", "decode1"]), (False, ["decode0", "decode1"])):
        served = simulate(requests, hw=QUIET, decode=Side(tp=1, instances=2), options={"output_known": known})
        assert [row["decode"] for row in served.rows] == ["decode0", "decode1", *last]


CHAT = Tenant(name="chat", rate=8.0, ttft=10.0, tpot=1e-9, input_mean=100, output_mean=10, priority=2)
BATCH = Tenant(name="batch", rate=2.0, ttft=10.0, tpot=10.0, input_mean=900, input_cv=0.0, output_mean=20)
BOTH = Workload(arrivals="poisson", count=500, tenants=(CHAT, BATCH))


def test_tenants_have_their_own_rates_and_draws():
    table = draw(BOTH, 0, 100_000).requests
    assert len(table) == 500
    assert (np.diff(table.arrival) >= 0).all()
    assert float(np.mean(table.tenant == 0)) == pytest.approx(0.8, abs=0.05)
    assert set(table.input[table.tenant == 1]) == {900}
    assert float(table.input[table.tenant == 0].mean()) == pytest.approx(100, rel=0.15)
    assert table.priority.tolist() == [2 if which == 0 else 0 for which in table.tenant]
    assert 500 / table.arrival[-1] == pytest.approx(10, rel=0.15)
    alone, both = (draw(replace(BOTH, tenants=each), 3, 100_000).requests for each in ((BATCH,), (CHAT, BATCH)))
    own = both.taken(both.tenant == 1)
    assert own.arrival.tolist() == alone.arrival[: len(own)].tolist()
    assert own.output.tolist() == alone.output[: len(own)].tolist()


def test_every_request_counts_toward_the_limits_of_its_tenant():
    served = run(configured(ONE, ONE, workload=replace(BOTH, count=100)))
    table = rows(served)
    assert {(row["tenant"], row["slo_tpot"]) for row in table} == {("chat", 1e-9), ("batch", 10.0)}
    (shares,) = [each for each in served.tables if each.title == "Tenants"]
    # a chat of one token has no time per token
    short = [row["output"] == 1 for row in table if row["tenant"] == "chat"]
    batch = sum(row["tenant"] == "batch" for row in table)
    assert [row[:3] for row in shares.rows] == [["chat", len(short), sum(short) / len(short)], ["batch", batch, 1.0]]
    assert values(served)["slo_attainment"] == (sum(short) + batch) / 100
