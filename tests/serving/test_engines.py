"""Serving engines as data: exact times of single requests, queues, preemption and retraction, on the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from experiments.serve import ServeOptions, job, specs
from pdsim.config import Config
from pdsim.kv.policy import Policy
from pdsim.serving.deployment import Deployment
from pdsim.serving.settings import HostCosts, SchedulerLimits, ServingEngine
from pdsim.serving.workload import Request
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome
from tests.support.composed import composed
from tests.support.configs import EIGHT
from tests.support.serving import configured

QUIET = replace(EIGHT, host=replace(EIGHT.host, tcp_latency=0.0, tcp_rate=1e30))
"""Control messages take no time."""

VLLM = ServingEngine(
    name="vllm",
    handoff="pull",
    recompute=1,
    memory="grow",
    proxy=0.001,
    lease=30.0,
    prefill=HostCosts(arrive=0.002, admit=0.0003, step=0.0004, launch=0.025, answer=0.0005),
    decode=HostCosts(arrive=0.003, arrive_token=1e-6, admit=0.0006, step=0.0007, idle=0.004, answer=0.0008),
)
SGLANG = ServingEngine(
    name="sglang",
    scheduler="least_generated",
    memory="grow",
    reserved_tokens=32,
    preemption="retract",
    overlap=True,
    pipeline=1,
    prefill=HostCosts(arrive=0.002, admit=0.0003, step=0.0004, launch=0.025),
    decode=HostCosts(arrive=0.003, admit=0.0006, admit_token=1e-5, step=0.0007, idle=0.004, answer=0.0008),
)
NAMES = ["reserved", "noticed", "started", "prefilled", "arrived", "polled", "joined", "finished", "first", "asked"]


def run(
    engine: ServingEngine, requests: list[Request], **changes: Any
) -> tuple[Config, list[dict[str, Any]], Outcome]:
    """Serve *requests* and return the times of each, from the time at which the first could arrive."""
    config = replace(configured(**({"hw": QUIET} | changes)), engine=engine)
    outcome = Model(config.hw, config.backend).run(specs(config, job(config, ServeOptions()), requests))
    value = outcome.ranks["router"].value
    assert [row[3] for row in value["rows"]] == ["ok"] * len(requests)
    rows = [dict(zip(NAMES, row[4:], strict=False)) for row in value["rows"]]
    return config, [{name: at and at - value["start"] for name, at in row.items()} for row in rows], outcome


LAYERS = 2


def look(time: float, idle: float, start: float = 0.0) -> float:
    """Return when a scheduler that looks every *idle* seconds since *start* looks next."""
    return start + math.ceil((time - start) / idle) * idle


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-9)


# --- one request ---------------------------------------------------------------------------------------------------


def test_a_pulled_request_takes_the_sum_of_its_terms():
    config, (row), outcome = run(VLLM, [Request(0.0, 100, 3)])
    (row,) = row
    what, start = job(config, ServeOptions()), outcome.ranks["router"].value["start"]
    (read,) = outcome.ranks["decode0.0"].transfers
    assert read.operation == "read"
    assert row["started"] == close(0.001 + 0.002)  # proxy, then prefill's server
    assert row["prefilled"] == close(
        row["started"] + LAYERS * 0.025 + 0.0004 + 0.0003
    )  # a forward is shorter than its launch
    assert row["asked"] == close(row["prefilled"] + 0.0005 + 0.001 + 0.003 + 100 * 1e-6)  # answer, proxy, server
    # an idle decode scheduler looks every 4 ms, counted from the start of the job
    assert row["reserved"] == close(look(row["asked"] + start, 0.004) - start)
    assert row["arrived"] == close(row["reserved"] + read.seen - read.submitted)
    assert row["polled"] == row["joined"] == close(look(row["arrived"] + start, 0.004) - start)
    step = what.decode_time.step(1) + 0.0007
    first = row["polled"] + 0.0006 + step + 100 * what.decode_time.context  # the last token of the prompt, again
    assert row["first"] == close(first + 0.0008)
    assert row["finished"] == close(first + 2 * step + (101 + 102) * what.decode_time.context + 0.0008)


def test_a_pushed_request_takes_the_sum_of_its_terms():
    config, (row), outcome = run(SGLANG, [Request(0.0, 100, 3)], policy=Policy(metadata="batch"))
    (row,) = row
    what, start = job(config, ServeOptions()), outcome.ranks["router"].value["start"]
    (write,) = outcome.ranks["prefill0.0"].transfers
    assert row["reserved"] == close(look(0.003 + start, 0.004) - start)  # decode's server, then its next look
    assert row["started"] == close(max(row["reserved"], 0.002))
    assert row["prefilled"] == close(row["started"] + LAYERS * 0.025 + 0.0003)  # the step overlaps the forward
    assert row["arrived"] == close(row["prefilled"] + write.completed - write.submitted)
    assert row["polled"] == close(look(row["arrived"] + start, 0.004) - start)
    ready = row["polled"] + 0.0006 + 100 * 1e-5
    assert row["first"] == close(ready + 0.0008)  # with the metadata: nothing is computed again
    step = max(what.decode_time.step(1), 0.0007)
    assert row["finished"] == close(ready + 2 * step + (101 + 102) * what.decode_time.context + 0.0008)


def test_what_arrives_within_a_step_is_seen_at_its_end():
    engine = replace(VLLM, decode=replace(VLLM.decode, idle=0.0))
    config, (one, two), _ = run(engine, [Request(0.0, 100, 400), Request(0.001, 100, 2)])
    decode = job(config, ServeOptions()).decode_time
    # the steps of the first, alone: step k ends after k bases and the contexts 100, 101, ...
    steps, end = 0, one["joined"] + 0.0006
    while end < two["arrived"] - 1e-12:
        end += decode.step(1) + 0.0007 + decode.context * (100 + steps)
        steps += 1
    assert two["polled"] == close(end)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_request_joins_after_the_depth_of_the_pipeline(depth: int):
    engine = replace(SGLANG, decode=replace(SGLANG.decode, idle=0.0), pipeline=depth)
    config, (one, two), _ = run(engine, [Request(0.0, 100, 400), Request(0.001, 100, 20)])
    decode = job(config, ServeOptions()).decode_time
    end, context = one["joined"] + 0.0006 + 100 * 1e-5, 101
    while end < two["polled"] - 1e-12:
        end, context = end + max(decode.step(1), 0.0007) + decode.context * context, context + 1
    end += 0.0006 + 100 * 1e-5 if depth else 0.0  # the host prepares it for so long
    for _ in range(depth):
        end, context = end + max(decode.step(1), 0.0007) + decode.context * context, context + 1
    assert two["joined"] == close(end)


def test_posting_a_read_holds_the_tokens_of_those_that_run():
    costs = replace(VLLM.decode, idle=0.0, admit=0.0)
    backend = configured().backend
    assert backend.intra is not None
    backend = replace(backend, intra=replace(backend.intra, call=0.050))
    for holds in (False, True):
        engine = replace(VLLM, decode=costs, posting_holds=holds, overlap=True)
        config, (one, two), outcome = run(engine, [Request(0.0, 100, 400), Request(0.2, 100, 2)], backend=backend)
        decode = job(config, ServeOptions()).decode_time
        _, second = outcome.ranks["decode0.0"].transfers
        posting = second.posted - second.submitted
        assert posting > 0.050
        assert one["first"] < two["reserved"] < two["first"] < one["finished"]
        base, context = max(decode.step(1), 0.0007), decode.context
        steps = 399 * base + context * sum(range(101, 500))
        joined = 2 * (decode.step(2) - decode.step(1)) + context * (100 + 101)  # of the second, for two steps
        late = one["finished"] - one["first"] - steps - joined
        # the step under way when the read is posted ends with the post
        longest = posting - base - context * 100
        assert (longest - context * 400 <= late <= longest) if holds else late == close(0.0)


def test_prefill_notices_reads_after_its_next_launch_or_idle():
    costs = replace(VLLM.decode, idle=0.0, admit=0.0)
    engine = replace(VLLM, decode=costs, noticed="prefill", prefill=replace(VLLM.prefill, launch=0.05))
    requests = [Request(0.0, 100, 4), Request(0.01, 100, 4), Request(1.0, 100, 4)]
    _, (one, two, alone), _ = run(engine, requests)
    assert one["arrived"] < two["started"] + 0.05 * LAYERS
    assert one["polled"] == close(two["started"] + 0.05 * LAYERS)
    assert alone["polled"] == close(alone["arrived"])


def test_a_first_answer_takes_longer_with_its_prompt():
    costs = replace(VLLM.decode, idle=0.0)
    ends = []
    for token in (0.0, 1e-5):
        engine = replace(VLLM, decode=replace(costs, answer_token=token))
        _, (row,), _ = run(engine, [Request(0.0, 100, 3)])
        ends.append(row)
    assert ends[1]["first"] == close(ends[0]["first"] + 100 * 1e-5)
    assert ends[1]["finished"] == close(ends[0]["finished"])


def test_a_long_prompt_is_read_before_those_that_come_with_it():
    engine = replace(SGLANG, prefill=replace(SGLANG.prefill, arrive_token=1e-4, admit=0.0))
    requests = [Request(0.0, 300, 2), Request(0.0, 100, 2), Request(0.02, 100, 2)]
    _, rows, _ = run(engine, requests)
    began = rows[0]["started"]
    assert began == close(0.032)  # read until then, the others until 0.044 and 0.056
    assert [row["started"] - began for row in rows[1:]] == [close(LAYERS * 0.025)] * 2


def test_kv_is_posted_after_the_forward_later_under_load():
    sides = replace(SGLANG.prefill, send=0.004, arrive=0.0), replace(SGLANG.decode, arrive=0.0)
    engine = replace(SGLANG, prefill=sides[0], decode=sides[1])
    requests = [Request(0.0, 100, 2), Request(0.0, 100, 2), Request(0.005, 100, 2)]
    _, rows, outcome = run(engine, requests, policy=Policy(metadata="batch"))
    start = outcome.ranks["router"].value["start"]
    posts = sorted(write.submitted - start for write in outcome.ranks["prefill0.0"].transfers)
    launch, admit = LAYERS * 0.025, 0.0003
    began = rows[0]["started"]
    assert [row["started"] for row in rows] == [close(began), close(began), close(began + launch + 2 * admit)]
    # the third waits when the forward of the others is launched: their result is seen after its launch
    assert posts == [close(began + 2 * launch + 0.004)] * 2 + [close(began + 2 * launch + 3 * admit + 0.004)]


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=["pull", "push"])
def test_one_seed_gives_one_run_and_another_gives_another(engine: ServingEngine):
    requests = [Request(0.01 * number, 100, 20) for number in range(20)]
    varied = replace(engine, variation=0.3)
    first, again = (run(varied, requests)[1] for _ in range(2))
    assert first == again
    assert run(varied, requests, seed=1)[1] != first


# --- memory --------------------------------------------------------------------------------------------------------


def stepped(what: Deployment, rows: list[dict[str, Any]], requests: list[Request]) -> list[float]:
    """Return when each request ends, stepping token by token; pages are reserved and KV arrives as *rows* say."""
    page, size, retract = what.page_size, what.decode_pages, what.engine.preemption == "retract"
    move = what.shape.token_bytes(what.decode.tp) / what.engine.retract_rate if retract else 0.0
    coming = sorted(range(len(rows)), key=lambda n: rows[n]["polled"])
    context = [request.input + 1 for request in requests]
    left = [request.output - 1 for request in requests]
    awaited = [0] * len(rows)  # pages of requests that are not here yet
    running: list[int] = []
    preempted: list[int] = []
    again: dict[int, int] = {}  # requests whose KV is computed again, and the tokens that have been
    ends = [0.0] * len(rows)
    now = 0.0

    def pages(numbers: Any) -> int:
        return sum(-(-context[n] // page) for n in numbers)

    while coming or running or preempted or again:
        delay = 0.0
        for n in [n for n, done in again.items() if done == context[n]]:
            del again[n]
            context[n], left[n] = context[n] + 1, left[n] - 1
            running.append(n)
        for n in [n for n in running if not left[n]]:
            running.remove(n)
            ends[n] = now
        while coming and rows[coming[0]]["polled"] <= now + 1e-12:
            awaited[coming[0]] = 0
            running.append(coming.pop(0))
        for n in coming:
            awaited[n] = -(-requests[n].input // page) if rows[n]["reserved"] < now - 1e-12 else 0
        while pages(running) + pages(again) + sum(awaited) > size:
            order = sorted(running, key=lambda n: (rows[n]["joined"], n))
            least = min(running, key=lambda n: (requests[n].output - left[n], -requests[n].input))
            victim = least if what.engine.scheduler == "least_generated" else order[-1]
            running.remove(victim)
            preempted.insert(len(preempted) if retract else 0, victim)
            delay += context[victim] * move
        while preempted and pages([*running, *again, preempted[0]]) + sum(awaited) <= size:
            back = preempted.pop(0)
            delay += context[back] * move
            if retract:
                running.append(back)
            else:
                again[back] = 0
        pieces, budget = [], what.chunk - len(running)
        for n in again:
            if tokens := min(budget, context[n] - again[n]):
                pieces.append((again[n], tokens))
                again[n], budget = again[n] + tokens, budget - tokens
        if running or pieces:
            forward = what.decode_time.step(len(running)) if running else 0.0
            if pieces:
                forward = what.decode_time.prefill([*pieces, (0, len(running))] if running else pieces)
            now += delay + forward + what.decode_time.context * sum(context[n] for n in running)
            for n in running:
                context[n], left[n] = context[n] + 1, left[n] - 1
        elif coming:
            now = rows[coming[0]]["polled"]
    return ends


BARE = ServingEngine(name="bare", memory="grow", preemption="retract", scheduler="fcfs")


def test_retraction_takes_as_long_as_links_to_host_memory_allow():
    slow = replace(QUIET, gpu=replace(QUIET.gpu, pcie=BARE.retract_rate / 4))
    requests = [Request(0.0, 48, 40)] * 2
    (what, fast, _), (_, late, _) = (run(BARE, requests, kv=pool(8), hw=hw) for hw in (QUIET, slow))
    move = 64 * job(what, ServeOptions()).shape.token_bytes(1) / BARE.retract_rate
    for (one, other), moves in zip(zip(fast, late, strict=True), (1, 2), strict=True):
        assert other["finished"] - one["finished"] == pytest.approx(3 * move * moves)


def test_a_polling_scheduler_sees_a_write_when_its_forward_ends():
    engine = replace(BARE, prefill=HostCosts(send=0.001))
    requests = [Request(0.0, 512, 2), Request(1e-4, 4096, 2)]
    polls = {"policy": Policy(queues=1, notify="poll"), "kv": pool(400), "scheduler": SchedulerLimits(chunk=8192)}
    _, (first, second), _ = run(engine, requests, **polls)
    assert second["started"] == close(first["prefilled"] - 0.001)
    assert first["arrived"] == close(second["prefilled"])
    _, (alone,), _ = run(engine, requests[:1], **polls)
    assert alone["arrived"] < alone["prefilled"] + 0.001


@pytest.mark.parametrize(("policy", "pages"), [("fcfs", 20), ("fcfs", 25), ("least_generated", 20)])
@pytest.mark.parametrize("preemption", ["retract", "recompute"])
def test_preemption_goes_as_stepping_token_by_token_does(policy: str, pages: int, preemption: str):
    requests = [Request(0.0, 20 + 13 * (number % 7), 30 + 17 * (number % 5)) for number in range(6)]
    engine = replace(BARE, scheduler=policy, preemption=preemption)
    scheduler = SchedulerLimits(chunk=64, decode_batch=8)  # some are computed again in two pieces
    config, rows, outcome = run(engine, requests, kv=pool(pages), scheduler=scheduler)
    assert outcome.ranks["decode0.0"].value["preemptions"] > 0
    ends = stepped(job(config, ServeOptions()), rows, requests)
    assert [row["finished"] for row in rows] == pytest.approx(ends, rel=1e-9)


def test_reserved_tokens_keep_requests_out():
    requests = [Request(0.0, 48, 4), Request(0.0, 48, 4)]
    # 3 pages each and 8 in all; with 3 more pages kept for each request the second waits for the first
    _, (one, two), _ = run(replace(BARE, reserved_tokens=48), requests, kv=pool(8))
    assert two["reserved"] >= one["finished"]
    _, (one, two), _ = run(BARE, requests, kv=pool(8))
    assert two["reserved"] < one["finished"]


def pool(pages: int) -> Any:
    kv = configured().kv
    page = 16 * job(configured(), ServeOptions()).shape.token_bytes(1)
    return replace(kv, pool=pages * page)


# --- the engines of conf/engine ------------------------------------------------------------------------------------

FIRST_TOKEN = {
    # tokens of the prompt: ms from prefill's answer to decode's first token, medians of single requests on 2 x H200
    "vllm": {
        128: 15.9,
        256: 16.0,
        512: 15.3,
        1024: 17.0,
        2048: 18.8,
        4096: 24.4,
        8192: 29.9,
        16384: 40.8,
        32768: 64.1,
    },
    "sglang": {4096: 0.9, 8192: 1.6, 16384: 1.8, 32768: 3.4},
}
BACKENDS = {"vllm": "nixl_vllm", "sglang": "mooncake_nvlink"}
COMPUTE = {"vllm": "h200_fa3", "sglang": "h200_triton"}
TIMES = [(name, tokens, time) for name, times in FIRST_TOKEN.items() for tokens, time in times.items()]


@pytest.mark.parametrize(("name", "tokens", "expected"), TIMES)
def test_single_requests_are_met_within_15_percent(name: str, tokens: int, expected: float):
    """In sample: host costs of both engines, and the rate of nixl_vllm, were fitted to these (vLLM's: data/live).

    SGLang answers when prefill has seen that all is written; so its time is taken from there.
    """
    words = "hw=2xh200", "model=qwen3-8b", f"compute={COMPUTE[name]}"
    config = composed(f"engine={name}", f"backend={BACKENDS[name]}", *words)
    config = replace(config, engine=replace(config.engine, variation=0.0))
    requests = [Request(0.5, tokens, 16)]
    outcome = Model(config.hw, config.backend).run(specs(config, job(config, ServeOptions()), requests))
    (row,) = outcome.ranks["router"].value["rows"]
    times = dict(zip(NAMES, row[4:], strict=True))
    answered = times["prefilled"] + config.engine.prefill.answer if times["asked"] else times["arrived"]
    rounding = 0.05  # of the medians
    assert times["first"] - answered == pytest.approx(expected / 1e3, abs=(0.15 * expected + rounding) / 1e3)
