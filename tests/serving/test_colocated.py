"""Engines that prefill and decode in the same steps: every time is the sum of the steps that led there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from experiments.serve import ServeOptions, job, on_model
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Hybrid, Side
from pdsim.serving.deployment import Deployment
from pdsim.serving.load import offered_load
from pdsim.serving.settings import Cache, HostCosts, Kv, ServingEngine
from pdsim.serving.workload import Request
from pdsim.transfer.job import Outcome
from tests.support.configs import EIGHT
from tests.support.serving import GENERATED, GQA, configured, rows, serve, tabled, values

TOGETHER = {"deployment": "colocated"}
TIGHT = [Request(0.0, 48, 40)] * 2


def served(
    requests: list[Request], job_changes: Mapping[str, Any] = {}, **changes: Any
) -> tuple[list[dict[str, Any]], Deployment, Outcome]:
    """Return what becomes of *requests* on one engine, whose job has *job_changes*, the job, and its outcome."""
    one = {"prefill_instances": 1, "decode_instances": 1} | job_changes
    table, what, result = tabled(requests, one, TOGETHER, kv=Kv(page_size=16), **changes)
    return table, what, result.outcome


def growing(preemption: str, **changes: Any) -> ServingEngine:
    return ServingEngine(name="bare", memory="grow", preemption=preemption, **changes)


def decode(what: Deployment, contexts: list[int]) -> float:
    """Return the seconds of a step that only decodes requests of these contexts."""
    return what.decode_time.step(len(contexts)) + what.decode_time.context * sum(contexts)


def mixed(what: Deployment, pieces: list[tuple[int, int]], contexts: list[int]) -> float:
    """Return the seconds of a step with pieces of prompts too; decoded tokens go through the layers with them."""
    batch = [(0, len(contexts))] if contexts else []
    return what.prefill_time.prefill([*pieces, *batch]) + what.decode_time.context * sum(contexts)


def test_one_request_alone_takes_its_chunks_and_its_steps():
    (row,), what, _ = served([Request(0.0, 600, 10)])
    chunks = [(0, 256), (256, 256), (512, 88)]
    first = sum(mixed(what, [chunk], []) for chunk in chunks)
    assert row["ttft"] == pytest.approx(first, rel=1e-12)
    steps = sum(decode(what, [600 + token]) for token in range(1, 10))
    assert row["e2e"] == pytest.approx(first + steps, rel=1e-12)
    assert row["queueing"] == row["handshake"] == row["transfer"] == row["polling"] == 0
    assert row["nbytes"] == 0


def test_a_prompt_that_comes_while_another_decodes_shares_its_steps():
    first, what, _ = served([Request(0.0, 100, 20)])
    begun = first[0]["ttft"] + decode(what, [101]) + 0.5 * decode(what, [102])  # within the second step of decode
    (one, other), what, _ = served([Request(0.0, 100, 20), Request(begun, 400, 2)])
    boundary = one["ttft"] + decode(what, [101]) + decode(what, [102])
    assert other["queueing"] == pytest.approx(boundary - begun, rel=1e-9)
    both = mixed(what, [(0, 255)], [103]) + mixed(what, [(255, 145)], [104])  # one token of 256 is the other's
    assert other["ttft"] == pytest.approx(boundary - begun + both, rel=1e-9)
    last = decode(what, [105, 401])
    assert other["e2e"] == pytest.approx(other["ttft"] + last, rel=1e-9)
    rest = sum(decode(what, [100 + token]) for token in range(6, 20))
    assert one["e2e"] == pytest.approx(boundary + both + last + rest, rel=1e-9)


@pytest.mark.parametrize(("changes", "steps"), [({}, 1), ({"overlap": True}, 2), ({"look": 4}, 4)])
def test_a_step_begins_with_the_requests_that_were_seen(changes, steps):
    engine = ServingEngine(name="bare", mixed=False, **changes)
    (alone,), what, _ = served([Request(0.0, 100, 20)], engine=engine)
    begun = alone["ttft"] + 0.5 * decode(what, [101])
    one, other = served([Request(0.0, 100, 20), Request(begun, 200, 2)], engine=engine)[0]
    before = sum(decode(what, [100 + token]) for token in range(1, steps + 1))
    prompt = mixed(what, [(0, 200)], [])  # without a token of the other
    assert other["ttft"] == pytest.approx(before + prompt - 0.5 * decode(what, [101]), rel=1e-9)
    assert one["e2e"] > alone["e2e"] + prompt


def test_prompts_take_their_launches_and_answers_leave_later():
    costs = HostCosts(answer=0.25, launch=1.0)
    engine = ServingEngine(name="bare", prefill=costs, decode=HostCosts(answer=0.5, answer_token=0.01))
    (row,), what, _ = served([Request(0.0, 100, 2)], engine=engine)
    first = what.shape.layers  # seconds of launches, which exceed the forward
    assert row["ttft"] == pytest.approx(first + 1.25, rel=1e-12)
    assert row["e2e"] == pytest.approx(first + 1.25, rel=1e-12)  # the last token cannot overtake it


def test_the_first_launch_that_goes_on_with_a_prompt_compiles():
    requests = [Request(0.0, 600, 1), Request(50.0, 600, 1)]
    (one, other), what, _ = served(requests, engine=ServingEngine(name="bare", mixed=False, compiling=7.0))
    chunks = [mixed(what, [chunk], []) for chunk in ((0, 256), (256, 256), (512, 88))]
    assert one["ttft"] == pytest.approx(chunks[0] + 7.0 + chunks[2], rel=1e-12)
    assert other["ttft"] == pytest.approx(sum(chunks), rel=1e-12)


def test_tokens_wait_while_the_next_step_compiles():
    requests = [Request(0.0, 200, 1), Request(0.0, 200, 1)]
    compiles = ServingEngine(name="bare", mixed=False, overlap=True, launching_holds="always", compiling=7.0)
    (one, other), what, _ = served(requests, engine=compiles)  # the second prompt is cut at 256 tokens
    first = mixed(what, [(0, 200), (0, 56)], [])
    assert one["ttft"] == pytest.approx(7.0, rel=1e-12)  # from the beginning, when the next step is chosen
    assert other["ttft"] == pytest.approx(max(7.0, first + mixed(what, [(56, 144)], [])), rel=1e-12)


def test_a_request_is_admitted_while_the_next_is_read():
    costs = HostCosts(arrive=0.25, admit=2.0)
    requests = [Request(0.0, 16, 1)] * 3
    engine = ServingEngine(name="bare", mixed=False, prefill=costs)
    table, *_ = served(requests, engine=engine)
    assert [row["queueing"] for row in table] == pytest.approx([2.25, 2.5, 2.75])


def test_a_request_without_pages_waits_for_the_first():
    requests = [Request(0.0, 100, 20), Request(0.0, 100, 20)]
    (one, other), *_ = served(requests, {"decode_pages": 15})
    assert other["queueing"] == pytest.approx(one["e2e"], rel=1e-12)


def test_a_request_without_window_or_state_waits_too():
    windows = replace(GQA, hybrid=Hybrid(pattern="wa", window=32))
    requests = [Request(0.0, 100, 20), Request(0.0, 100, 20)]
    # of the window each needs three pages of 16 tokens, and there are five
    (one, other), *_ = served(requests, {"decode_pages": 100, "window_share": 0.05}, model=windows)
    assert other["queueing"] == pytest.approx(one["e2e"], rel=1e-12)
    (_, other), *_ = served(requests, {"decode_pages": 100, "window_share": 0.06}, model=windows)
    assert other["queueing"] == 0
    state = Hybrid(pattern="ma", conv_groups=(64,), conv_width=3, ssm_heads=8, ssm_head_elements=64)
    mamba = replace(GQA, hybrid=state)
    config = configured(options=TOGETHER, kv=Kv(page_size=16, state_slots=3), model=mamba)
    assert job(config, ServeOptions(**TOGETHER)).decode_batch == 3


def test_the_gpus_of_both_sides_serve_everybody():
    wide = configured(Side(tp=2), Side(tp=1, instances=3), options=TOGETHER, kv=Kv(page_size=16))
    assert len(job(wide, ServeOptions(**TOGETHER)).prefills) == 2  # five GPUs hold two of two
    result = serve(configured(options=TOGETHER, kv=Kv(page_size=16)))
    assert values(result)["requests_ok"] == 40
    assert {row["prefill"] for row in rows(result)} == {"colocated0", "colocated1"}
    for row in rows(result):
        assert row["e2e"] == pytest.approx(row["queueing"] + row["compute"], rel=1e-12)


def test_engines_take_no_more_gpus_than_the_machine_has():
    def engines(tp: int, gpus: int) -> int:
        config = configured(Side(tp=tp), Side(tp=4), options=TOGETHER, hw=replace(EIGHT, gpus=gpus))
        return job(config, ServeOptions(**TOGETHER)).prefill_instances

    assert [engines(1, 1), engines(1, 2), engines(4, 4), engines(4, 8)] == [1, 2, 1, 2]
    with pytest.raises(ConfigError, match=r"parallel\.prefill\.tp=8 needs 8 GPUs, hw=\w+ has 4; lower tp"):
        engines(8, 4)


def test_the_offered_load_is_of_prefill_and_decode_together():
    config = configured(options=TOGETHER, kv=Kv(page_size=16))
    requests = [Request(float(number), 100, 21) for number in range(5)]
    offered = offered_load(job(config, ServeOptions(**TOGETHER)), requests)
    assert offered.highest == offered.prefill + offered.decode > 0


def test_what_colocated_engines_do_not_do_is_refused():
    with pytest.raises(ConfigError, match=r"leave workload\.aborts at 0"):
        serve(configured(options=TOGETHER, workload=replace(GENERATED, aborts=0.5)))


def test_growth_ends_where_pages_do_and_the_last_computes_again():
    (one, two), what, _ = served(TIGHT, {"decode_pages": 8}, engine=growing("recompute"))
    # both have 4 pages until the first token of a fifth is stored: 16 tokens after the first
    now = mixed(what, [(0, 48), (0, 48)], []) + sum(decode(what, [n, n]) for n in range(49, 65))
    rest = sum(decode(what, [n]) for n in range(65, 88))
    assert one["e2e"] == pytest.approx(now + rest, rel=1e-12)
    # 65 tokens at once give the second its next one; 22 more follow
    again = mixed(what, [(0, 65)], []) + sum(decode(what, [n]) for n in range(66, 88))
    assert two["e2e"] == pytest.approx(now + rest + again, rel=1e-12)


def test_a_retracted_request_moves_to_host_memory_and_back():
    (one, two), what, _ = served(TIGHT, {"decode_pages": 8}, engine=growing("retract"))
    move = 65 * what.shape.token_bytes(1) / what.engine.retract_rate
    now = mixed(what, [(0, 48), (0, 48)], []) + sum(decode(what, [n, n]) for n in range(49, 65)) + move
    rest = sum(decode(what, [n]) for n in range(65, 88))
    assert one["e2e"] == pytest.approx(now + rest, rel=1e-12)
    assert two["e2e"] == pytest.approx(now + 2 * rest + move, rel=1e-12)


def test_engines_share_the_memory_of_their_host():
    engine = growing("retract")
    narrow = replace(EIGHT, host=replace(EIGHT.host, memory_rate=engine.retract_rate))
    two = {"prefill_instances": 2, "decode_instances": 2, "decode_pages": 8}
    (before, what, _), (after, *_) = (served(TIGHT * 2, two, engine=engine, hw=hw) for hw in (EIGHT, narrow))
    move = 65 * what.shape.token_bytes(1) / engine.retract_rate
    later = [slow["e2e"] - fast["e2e"] for fast, slow in zip(before, after, strict=True)]
    assert later == pytest.approx([move, move, 2 * move, 2 * move])


@pytest.mark.parametrize("preemption", ["recompute", "retract"])
def test_many_requests_in_few_pages_all_end(preemption):
    requests = [Request(0.01 * n, 50 + 37 * (n % 9), 20 + 31 * (n % 7), priority=n % 2) for n in range(60)]
    table, *_ = served(requests, {"decode_pages": 40}, engine=growing(preemption, scheduler="priority"))
    assert {row["status"] for row in table} == {"ok"}


def test_prefixes_are_not_computed_but_come_from_host_memory():
    requests = [Request(0.0, 600, 2, None, (1, 2)), Request(1.0, 600, 2, None, (1, 2))]
    (one, two), what, _ = served(requests, cache=Cache(prefill=True))
    assert (one["cached_prefill"], two["cached_prefill"]) == (0, 592)
    assert two["ttft"] == pytest.approx(mixed(what, [(592, 8)], []), rel=1e-9)
    hw = replace(EIGHT, gpu=replace(EIGHT.gpu, pcie=1e9))
    requests = [Request(float(n), 512, 2, None, (block,)) for n, block in enumerate([1, 2, 3, 1])]
    cache = Cache(prefill=True, host=4096.0)
    (*_, last), what, outcome = served(requests, {"decode_pages": 40, "chunk": 1024}, cache=cache, hw=hw)
    assert (last["cached_prefill"], last["cached_host"]) == (496, 496)
    load = 496 * what.shape.token_bytes(1) / 1e9
    assert last["ttft"] == pytest.approx(load + mixed(what, [(496, 16)], []), rel=1e-9)
    assert any(share > 0 for name, share in outcome.links.items() if name.endswith("pcie.out"))


GROUPS = Side(tp=2, dp=2), Side(tp=2, dp=2)


def grouped(requests: list[Request], **changes: Any) -> tuple[list[dict[str, Any]], Deployment]:
    """Return what becomes of *requests* on one engine of two attention groups, and its job."""
    config = configured(*GROUPS, options=TOGETHER | {"engines": 1}, kv=Kv(page_size=16), **changes)
    what = job(config, ServeOptions.of(config))
    return rows(on_model(config, what, requests)), what


def test_a_step_of_groups_lasts_as_long_as_the_longest():
    (one, other), what = grouped([Request(0.0, 200, 5), Request(0.0, 100, 3)])
    assert {one["prefill"], other["prefill"]} == {"colocated0d0", "colocated0d1"}
    first = max(what.prefill_time.prefill([(0, tokens)], 150) for tokens in (200, 100))  # 150 in the mean
    steps = [max(decode(what, [200 + token]), decode(what, [100 + token])) for token in range(1, 3)]
    assert one["ttft"] == other["ttft"] == pytest.approx(first, rel=1e-12)
    assert other["e2e"] == pytest.approx(first + sum(steps), rel=1e-12)
    assert one["e2e"] == pytest.approx(first + sum(steps) + decode(what, [203]) + decode(what, [204]), rel=1e-12)


def test_a_group_without_requests_waits_with_the_other():
    (alone,), what = grouped([Request(0.0, 200, 3)])
    first = what.prefill_time.prefill([(0, 200)], 100)  # half of the tokens in the mean
    assert alone["ttft"] == pytest.approx(first, rel=1e-12)
    assert first < what.prefill_time.prefill([(0, 200)])
    begun = first + 0.5 * decode(what, [201])
    one, other = grouped([Request(0.0, 200, 3), Request(begun, 100, 1)])[0]
    assert other["queueing"] == pytest.approx(0.5 * decode(what, [201]), rel=1e-9)
    assert one["e2e"] == pytest.approx(begun + other["e2e"], rel=1e-9)


@pytest.mark.parametrize("mixed", [True, False])
def test_many_requests_on_groups_all_end(mixed):
    requests = [Request(0.01 * number, 100 + 37 * number % 400, 5 + number % 30) for number in range(60)]
    every, _ = grouped(requests, engine=growing("recompute", mixed=mixed, overlap=not mixed))
    assert [row["status"] for row in every] == ["ok"] * 60
    assert {row["prefill"] for row in every} == {"colocated0d0", "colocated0d1"}


@pytest.mark.parametrize(
    ("holds", "tp", "waits"), [("never", 1, 0), ("alone", 1, 1), ("alone", 2, 0), ("always", 2, 1)]
)
def test_tokens_wait_while_the_scheduler_launches_the_next_step(holds, tp, waits):
    engine = ServingEngine(name="bare", overlap=True, launching_holds=holds, prefill=HostCosts(launch=1.0))
    sides = {"prefill": Side(tp=tp), "decode": Side(tp=tp)}
    (one, other), what, _ = served([Request(0.0, 100, 2), Request(1.0, 100, 2)], engine=engine, **sides)
    launch = what.shape.layers
    assert one["ttft"] == pytest.approx((1 + waits) * launch, rel=1e-9)  # the other's step is chosen when it ends
    assert other["ttft"] == pytest.approx(2 * launch - 1.0, rel=1e-6)


def test_a_step_is_launched_while_the_one_before_runs():
    engine = ServingEngine(name="bare", overlap=True, mixed=False, prefill=HostCosts(launch=1.0))
    (alone,), what, _ = served([Request(0.0, 100, 20)], engine=engine)
    begun = alone["ttft"] + 0.5 * decode(what, [101])
    _, other = served([Request(0.0, 100, 20), Request(begun, 200, 2)], engine=engine)[0]
    assert other["ttft"] == pytest.approx(0.5 * decode(what, [101]) + what.shape.layers, rel=1e-9)
