"""`experiment=serve` on the model: every request accounted for, times that add up, ranks and links that fail."""

from dataclasses import replace

import pytest

from experiments.serve import ServeOptions, check_contents, job
from experiments.serve.tables import moved
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.core.units import format_time
from pdsim.kv.policy import Policy
from pdsim.models.llm import Side
from pdsim.results.record import Result
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.requests import Request
from pdsim.serving.settings import Kv, Workload
from tests.experiments.test_serve_paths import HYBRID
from tests.support.configs import LLM
from tests.support.serving import GENERATED, GQA, POOL, configured, rows, serve, values


def kinds(result: Result) -> set[str]:
    return {status.partition(":")[0] for status in result.requests["status"]}


def test_every_request_of_the_embedded_trace_is_served():
    result = serve(configured(workload=Workload(), model=replace(LLM, context=8192), kv=Kv(page_size=64)))
    assert kinds(result) == {"ok"}
    assert values(result)["requests_ok"] == 200
    assert not result.failures


@pytest.mark.parametrize("output", [{}, {"output_mean": 1, "output_cv": 0}])
def test_phases_of_a_request_add_up_to_its_time(output):
    for row in rows(serve(configured(workload=replace(GENERATED, **output)))):
        phases = [row[name] for name in ("queueing", "compute", "handshake", "transfer", "polling")]
        assert sum(phases) == pytest.approx(row["e2e"], rel=1e-12)
        assert min(phases) >= 0
        assert row["e2e"] == pytest.approx(row["ttft"] + (row["output"] - 1) * (row["tpot"] or 0), rel=1e-12)
        assert (row["tpot"] is None) == (row["output"] == 1)


def test_a_transfer_lasts_from_first_write_to_last_completion():
    result = serve(configured(workload=replace(GENERATED, count=2)))
    spans = []
    for room in ("1", "2"):
        own = [record for record in result.transfers if record.label.split("/")[0] == room]
        spans.append(max(record.seen for record in own) - min(record.submitted for record in own))
    assert moved(3, result.outcome)[2].tolist() == pytest.approx([*spans, float("nan")], rel=1e-12, nan_ok=True)
    (line,) = (note for note in result.notes if note.startswith("TTFT: "))
    assert line.endswith(f"; a KV transfer lasts {format_time(sum(spans) / 2)}")


def test_one_seed_gives_one_run_with_contents_and_without():
    first, second = serve(configured(seed=3)), serve(configured(seed=3))
    assert first.requests == second.requests == serve(configured(seed=3, memory="tracked")).requests
    assert (first.transfers, first.summary) == (second.transfers, second.summary)


def test_more_contents_than_a_minute_writes_are_refused():
    config = configured(memory="tracked")
    what = job(config, ServeOptions.of(config))
    tokens = (20 << 30) // what.shape.token_bytes(1)
    few = Request(0.0, 1, 1)
    check_contents(config, what, [few])
    with pytest.raises(ConfigError, match=rf"would write and compare 20 GiB of KV \({tokens + 1} tokens .*; lower"):
        check_contents(config, what, [few, few._replace(input=tokens)])


def test_users_who_leave_are_told_apart_from_failures():
    result = serve(configured(workload=replace(GENERATED, aborts=0.5, patience=0.02)))
    found = values(result)
    aborted = [row for row in rows(result) if row["status"].startswith("Aborted: the user left after")]
    assert 0 < len(aborted) == found["requests_aborted"] < sum(row["patience"] is not None for row in rows(result))
    assert (found["requests_ok"] + found["requests_aborted"], found["requests_failed"]) == (40, 0)
    assert result.failures == []
    assert all(row["e2e"] <= row["patience"] for row in rows(result) if row["e2e"] and row["patience"])


@pytest.mark.parametrize(
    ("sides", "router", "count", "first"),
    [
        ((Side(tp=1, instances=2), Side(tp=1, instances=3)), "round_robin", 40, "0 1 2 0"),
        ((Side(tp=1), Side(tp=1, instances=2)), "least_tokens", 6, "0 0 0 0"),  # each is done before the next comes
        ((Side(tp=2, dp=2), Side(tp=4, dp=4)), "least_tokens", 8, "0d1 0d2 0d3 0d0"),  # the rank of its room
    ],
)
def test_the_router_chooses_the_decode_instance(sides, router, count, first):
    rate = 0.001 if count == 6 else 200.0
    workload = replace(GENERATED, count=count, rate=rate, input_mean=100)
    result = serve(configured(*sides, GQA, {"router": router}, workload=workload))
    assert result.requests["decode"][:4] == [f"decode{name}" for name in first.split()]


FAULTY = {"deadline": 0.5}
TWO = Side(tp=2, instances=2)


def test_without_a_router_the_ranks_end_by_themselves():
    result = serve(configured(options=FAULTY), kill={"router": 0.1})
    assert "PeerLost" in result.outcome.ranks["decode0.0"].error
    assert result.outcome.seconds < 0.1 + 2 * 0.5 + 0.1
    assert values(result)["requests_ok"] == 0


def linked(*words: str) -> Result:
    return serve(compose(["hw=link", "experiment.deadline=2s", *words]))


def test_requests_that_get_nowhere_are_stalled(monkeypatch):
    monkeypatch.setattr(DecodeScheduler, "_submit", lambda *_: None)
    assert kinds(linked()) == {"Stalled"}


# the twelve requests take 340 s; without progress, all would fail after 2.7 s
@pytest.mark.parametrize(("words", "seen"), [(["backend.timeout=10min"], {"ok"}), ([], {"ok", "TransferTimeout"})])
def test_writes_go_on_until_the_engine_gives_up(words, seen):
    assert kinds(linked("hw.link.rate=300kbps", *words)) == seen


@pytest.mark.parametrize("kind", ["kind: stall", "kind: cut", "kind: slow, share: 0.01"])
def test_a_link_changed_to_the_end_has_a_utilisation(kind):
    change = f"hw.link.changes=[{{{kind}, start: 1s, end: 1000s}}]"
    result = linked("hw.link.rate=5Mbps", change, "backend.timeout=3s")
    assert result.outcome.seconds < 1000
    assert 0 < result.outcome.links["link0.up"] < 1
    assert "TransferTimeout" in kinds(result)


def test_changes_of_a_hop_that_overlap_are_refused():
    changes = "hw.link.changes=[{kind: stall, start: 1s, end: 3s}, {kind: cut, start: 2s, end: 4s}]"
    with pytest.raises(ConfigError, match="one of hop 0 begins at 2 s, before the one of 1 s ends at 3 s"):
        linked(changes)


STAGED = Kv(page_size=16, pool=1 << 20, staging=True, staging_ring=4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv": Kv(page_size=16, pool=40_000)}, r"request \d+ needs \d+ pages of 16 tokens on the prefill side"),
        (
            {"prefill": Side(tp=2), "decode": Side(tp=3), "model": replace(LLM, heads=12, kv_heads=12)},
            r"prefill tp=2 and decode tp=3: one must divide the other",
        ),
        ({"prefill": Side(tp=1, pp=4), "model": GQA}, "pp=4 over 2 layers: every stage needs at least one"),
        (
            {"prefill": Side(tp=2), "model": GQA, "kv": STAGED, "policy": Policy(queues=4, staging=True)},
            r"kv\.staging_ring=4 KiB holds no chunk of .*; raise kv\.stag",
        ),
        ({"prefill": Side(tp=8), "model": HYBRID}, r"mamba dimensions \(4,\) over tp=8: tp must divide"),
        ({"model": HYBRID, "kv": replace(POOL, window_share=0.01)}, r"layers on the prefill side, whose ranks"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(changes, message):
    with pytest.raises(ConfigError, match=message):
        serve(configured(**changes))
