"""Sending while computing: layers as they are computed, and cached pages before; the overlap in closed form."""

from dataclasses import replace
from typing import Any

import pytest

from pdsim.compute.forward import Compute, forward_time
from pdsim.core.errors import ConfigError
from pdsim.kv.policy import Policy
from pdsim.models.llm import Side
from pdsim.serving.settings import Cache, HostCosts, Kv, SchedulerLimits, ServingEngine
from pdsim.serving.steps import PostingHost
from pdsim.serving.workload import Request
from pdsim.transfer.job import Outcome
from tests.serving.test_cache import served
from tests.support.configs import ENGINE
from tests.support.serving import GQA, MLA, QUIET, simulate

DEEP = replace(GQA, layers=8, context=1 << 17)
LAYERS = Kv(page_size=64, pool=1 << 26, layerwise=True)
WHOLE = replace(LAYERS, layerwise=False)
QUEUE = Policy(queues=1)


def several(requests, kv=WHOLE, policy=QUEUE, chunk=8192, **changes):
    settings = {"hw": QUIET, "kv": kv, "policy": policy, "scheduler": SchedulerLimits(chunk=chunk), "model": DEEP}
    served = simulate(requests, **(settings | changes))
    assert set(served.statuses) == {"ok"}
    return served.rows, served.outcome


def run(tokens: int, kv: Kv, *others: Any, **changes: Any) -> tuple[dict[str, Any], Outcome]:
    (row,), outcome = several([Request(0.0, tokens, 2)], kv, *others, **changes)
    return row, outcome


@pytest.mark.parametrize("call", [1e-6, 5e-4], ids=["computing takes longer", "writing takes longer"])
def test_planes_are_written_when_computed_and_in_turn(call):
    """With T of computing, L layers and w a plane, the last is there at the most of T (l + 1) / L + 2 (L - l) w."""
    backend = replace(ENGINE, intra=replace(ENGINE.intra, call=call))
    row, outcome = run(512, LAYERS, backend=backend)
    start = outcome.ranks["router"].value["start"]
    *planes, metadata = outcome.ranks["prefill0.0"].transfers
    assert len(planes) == 16
    step = (row["prefilled"] - row["started"]) / 8
    each = planes[0].completed - planes[0].submitted
    assert each == pytest.approx(call + 1e-6 + 512 * 8 * 16 * 2 / QUIET.interconnect.rate, rel=1e-6)
    end = 0.0
    for number, record in enumerate(planes):
        end = max(end, row["started"] + step * (number // 2 + 1)) + each
        assert record.completed - start == pytest.approx(end, abs=1e-9)
    closed = max(step * (layer + 1) + 2 * (8 - layer) * each for layer in range(8))
    assert end - row["started"] == pytest.approx(closed, abs=1e-9)
    assert row["arrived"] == pytest.approx(end + metadata.completed - metadata.submitted, abs=1e-9)


@pytest.mark.parametrize("model", [DEEP, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("policy", [QUEUE, Policy(), Policy(queues=2, call="plane", notify="message")])
def test_every_byte_arrives_by_layers(model, prefill, decode, policy):
    kv = replace(LAYERS, pool=1 << 20, page_size=16)
    for cp in (1, 2):
        sides = {"prefill": Side(tp=prefill, cp=cp), "decode": Side(tp=decode)}
        both = replace(kv, all_cp_ranks=cp > 1)
        run(100, both, policy, 32, model=replace(model, context=1 << 17), memory="tracked", **sides)  # compared


def test_what_cannot_go_by_layers_is_refused():
    with pytest.raises(ConfigError, match=r"kv\.layerwise has target=model, a pushed handoff and no staging"):
        run(100, replace(LAYERS, staging=True))


@pytest.mark.parametrize("layerwise", [False, True])
def test_cached_pages_are_sent_when_the_rest_begins(layerwise):
    prompts = [(0.0, 4096, 2, list(range(8))), (5.0, 4600, 2, list(range(9)))]
    kv = Kv(page_size=64, pool=1 << 24, layerwise=layerwise)
    found = {}
    for early in (False, True):
        table, _, result = served(prompts, Cache(prefill=True, early=early), kv=kv)
        found[early] = table[1], [record for record in result.transfers if record.label.startswith("2/")]
    (late, one), (soon, two) = found[False], found[True]
    assert late["nbytes"] == soon["nbytes"]
    assert late["ttft"] - late["transfer"] == pytest.approx(soon["ttft"] - soon["transfer"], abs=1e-9)
    assert soon["transfer"] < late["transfer"]
    begin = 5.0 + soon["ttft"] - soon["transfer"] - soon["compute"]  # roughly: the first forward begins after it
    first = min(record.submitted for record in two)
    assert first < min(record.submitted for record in one)
    assert first >= begin
    cached = 64 * 64 * 2 * GQA.layers * GQA.kv_heads * GQA.head_dim * 2
    assert two[0].nbytes == cached


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_chosen_ahead_holds_what_waited_before(ahead):
    """A prompt that comes while a long one runs joins the rest of that one, or comes a step later."""
    alone = run(12_000, WHOLE)[0]["prefilled"]
    requests = [Request(0.0, 12_000, 2), Request(alone / 4, 64, 2)]
    long, short = (row["prefilled"] for row in several(requests, engine=ServingEngine(ahead=ahead))[0])
    assert (long == alone, short > long) == (ahead, ahead)
    assert short >= long


@pytest.mark.parametrize(("came", "late"), [(0.01, 0.0), (0.03, 0.02)], ids=["during the launch", "after it"])
def test_a_prompt_is_launched_behind_a_forward_if_it_waits(came, late):
    """Launches take 20 ms and forwards next to nothing: two follow one another, or the second begins anew."""
    engine = ServingEngine(ahead=True, overlap=True, prefill=HostCosts(launch=0.02 / DEEP.layers))
    requests = [Request(0.0, 64, 2), Request(came, 64, 2)]
    (first, second), outcome = several(requests, engine=engine, compute=Compute(overhead=0.0))
    seen = [record.submitted for record in outcome.ranks["prefill0.0"].transfers]
    assert len(seen) >= 2
    if late:  # the first has been seen to by then
        assert first["started"] < second["noticed"]
    else:  # its end is seen when the second is launched
        assert min(seen) == pytest.approx(first["noticed"] + 0.04, abs=1e-3)


def test_a_host_posts_in_turn_and_slower_in_succession():
    host = PostingHost(HostCosts(send=0.010, send_next=0.006), 0.0, 1, "p")
    assert host.turns(1.0, 0.0, 3) == pytest.approx([1.010, 1.016, 1.022])
    assert (host.due(1.015), host.due(1.03)) == (2, 0)
    assert host.turns(1.011, 0.002, 1) == pytest.approx([1.028])
    assert host.turns(2.0, 0.005, 1) == pytest.approx([2.015])
    assert PostingHost(HostCosts(), 0.0, 1, "p").turns(1.0, 0.0, 3) == []
    host = PostingHost(HostCosts(send=0.010, launch=0.02), 0.0, 1, "p")
    assert [host.take(at, 1.5) for at in (5.0, 5.2, 5.5, 5.6)] == [1.0, 1.5, 1.0, 1.5]
    assert (host.turns(6.0, 0.0, 1), host.launch()) == ([pytest.approx(6.015)], pytest.approx(0.03))


def test_a_stage_begins_a_chunk_after_the_one_before():
    """Of chunks of 256, 256 and 88 tokens the second stage is idle for the first, and alone with the last."""
    side = Side(tp=1, pp=2)
    row, outcome = run(600, WHOLE, chunk=256, prefill=side)
    started = row["started"] + outcome.ranks["router"].value["start"]
    time = forward_time(DEEP, QUIET, Compute(), side)
    first, second, third = (time.prefill([piece]) for piece in ((0, 256), (256, 256), (512, 88)))
    one, two = (sorted({record.submitted for record in outcome.ranks[f"prefill0.{i}"].transfers}) for i in (0, 1))
    assert one[:3] == pytest.approx([started + first, started + first + second, started + first + second + third])
    message = two[0] - started - 2 * first
    assert 0 <= message < 1e-3
    ends = [2 * first]
    for before, own in ((first + second, second), (first + second + third, third)):
        ends.append(max(ends[-1], before) + own)
    assert two[:3] == pytest.approx([started + message + end for end in ends], abs=1e-9)
