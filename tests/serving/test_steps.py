"""Decode steps in closed form, forwards in one message, and what a request costs in SimPy events."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.serve import ServeOptions, job, run
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.models.llm import Side
from pdsim.results.record import Result
from pdsim.serving.settings import SchedulerLimits, Workload
from pdsim.serving.steps import DecodeSpan
from pdsim.sim.faults import CardOutage
from pdsim.sim.model import Model
from pdsim.transfer import TransferRecord
from tests.support.composed import composed
from tests.support.configs import ENGINE
from tests.support.serving import GQA, POOL, configured, serve


@pytest.mark.parametrize(
    ("time", "steps"), [(9.0, 1), (10.0, 1), (11.5, 1), (11.51, 2), (13.5, 2), (15.0, 3), (16.0, 3)]
)
def test_the_first_boundary_not_before_an_event_notices_it(time, steps):
    assert DecodeSpan(start=10.0, base=0.5, cost=0.25, batch=2, context=4).steps_until(time) == steps


@given(
    start=st.floats(0, 1e6),
    base=st.floats(1e-6, 1.0),
    cost=st.floats(0, 1e-6),
    batch=st.integers(1, 512),
    context=st.integers(1, 10**7),
    steps=st.integers(1, 5000),
)
@example(start=0.0, base=1e-3, cost=0.0, batch=1, context=1, steps=1)
def test_the_sum_and_its_inverse_equal_single_steps(start, base, cost, batch, context, steps):
    span = DecodeSpan(start, base, cost, batch, context)
    elapsed = 0.0
    for step in range(steps):
        elapsed += base + cost * (context + batch * step)
    assert span.end(steps) - start == pytest.approx(elapsed, rel=1e-9, abs=1e-9 * max(start, 1e-3))
    found = span.steps_until(span.end(steps))
    assert span.end(found) >= span.end(steps)
    assert found == 1 or span.end(found - 1) < span.end(steps)


def one_by_one(job, arrivals):
    """Return polled, joined and finished of each (arrived, request, input, output), stepping token by token."""
    coming, waiting, running = sorted(arrivals), [], []
    times: dict[int, list[float]] = {}
    now = 0.0
    while coming or waiting or running:
        running, done = [r for r in running if r[1]], [r for r in running if not r[1]]
        for request, _, _ in done:
            times[request].append(now)
        while coming and coming[0][0] <= now:
            _, request, context, output = coming.pop(0)
            times[request] = [now]
            waiting.append([request, output - 1, context + 1])
        while waiting and len(running) < job.decode_batch:
            request, left, context = waiting.pop(0)
            times[request] += [now] if left else [now, now]
            running += [[request, left, context]] if left else []
        if running:
            now += job.decode_time.step(len(running)) + job.decode_time.context * sum(r[2] for r in running)
            running = [[request, left - 1, context + 1] for request, left, context in running]
        elif coming:
            now = coming[0][0]
    return {request: tuple(found) for request, found in times.items()}


LOADS: list[tuple[float, int]] = [(50.0, 8), (300.0, 8), (300.0, 3), (2000.0, 64), (2000.0, 1)]


@pytest.mark.parametrize(("rate", "batch"), LOADS)
def test_the_engine_gives_the_times_of_stepping_token_by_token(rate, batch):
    workload = Workload(arrivals="poisson", count=150, rate=rate, input_mean=60, output_mean=40, output_cv=1.5)
    config = configured(workload=workload, scheduler=SchedulerLimits(chunk=512, decode_batch=batch))
    config = replace(config, kv=replace(config.kv, pool=1 << 24))
    result = serve(config)
    rows: list[list[Any]] = result.outcome.ranks["router"].value["rows"]
    requests = list(zip(result.requests["input"], result.requests["output"], strict=True))
    arrivals = [(row[8], number, *requests[number]) for number, row in enumerate(rows)]
    expected = one_by_one(job(config, ServeOptions()), arrivals)
    for number, row in enumerate(rows):
        assert row[9:] == pytest.approx(expected[number], rel=1e-12)


CHUNK = 256  # tokens
LONGER_THAN_THE_RUN = 1e9  # seconds: neither pings nor time limits are among the events


def events(count: int, tp: int, chunks: int, decode_tp: int = 0, **policy: str) -> int:
    """Return the events of serving *count* requests of *chunks* prefill iterations, one after the other."""
    given = chunks * CHUNK - 1
    lengths = {"input_mean": given, "input_cv": 0, "output_mean": 10, "output_cv": 0}
    config = configured(
        Side(tp=tp),
        Side(tp=decode_tp or tp),
        GQA,
        options={"deadline": LONGER_THAN_THE_RUN},
        backend=replace(ENGINE, timeout=LONGER_THAN_THE_RUN),
        kv=replace(POOL, pool=1 << 21),
        policy=Policy(queues=4, **policy),
        workload=Workload(arrivals="poisson", count=count, rate=0.01, **lengths),
        scheduler=SchedulerLimits(chunk=CHUNK, decode_batch=8),
    )
    outcome = serve(config).outcome
    return outcome.events


# without chunks: an arrival, two submissions, a destination, two steps and more of the schedulers, three reports;
# on each rank more a report of either side; metadata and each chunk, on each rank: its end; a chunk: the forward;
# of four equal ranks and more, two are simulated
@pytest.mark.parametrize(
    ("tp", "chunks", "count"), [(1, 1, 14), (1, 2, 16), (1, 4, 20), (2, 1, 20), (2, 2, 25), (4, 2, 25), (4, 4, 35)]
)
def test_a_request_costs_so_many_events_and_no_more(tp, chunks, count):
    assert (events(30, tp, chunks) - events(10, tp, chunks)) / 20 == count


# the planes of a chunk, one after the other, are one object at each writer: two events, where it begins and ends
@pytest.mark.parametrize(("tp", "decode_tp", "expected"), [(4, 2, 47), (2, 4, 49)])
def test_slices_by_plane_cost_so_many_events(tp, decode_tp, expected):
    assert (
        events(30, tp, 2, decode_tp, slices="plane") - events(10, tp, 2, decode_tp, slices="plane")
    ) / 20 == expected


LENGTHS = ["workload=poisson", "workload.output_mean=20", "scheduler.chunk=1024"]
LATE = CardOutage(0, 0, 1e8, 1e9)
"""What may come ends runs of forwards: nobody knows when theirs end."""


def both(*words: str) -> tuple[Result, Result]:
    config = composed("hw=8xh20", "simulate.fold=off", *LENGTHS, *words)
    model = Model(config.hw, config.backend, seed=config.seed)
    at_once, one_by_one = (run(config, one, silent) for one in (model, replace(model, outages=[LATE])))
    assert not at_once.failures
    return at_once, one_by_one


def moved(record: TransferRecord) -> tuple[tuple[str, str, int], tuple[float, ...]]:
    return (record.label, record.source, record.nbytes), (record.submitted, record.posted, record.completed)


# one is on an idle machine; in a burst the host slows down while a run goes on; slices go plane by plane and
# sequences of two prefill instances meet at one decode instance; users leave within a run
@pytest.mark.parametrize(
    "words",
    [
        "workload.input_mean=40000 workload.count=3 workload.rate=0.01",
        "workload.input_mean=20000 workload.count=12 workload.rate=1",
        "model=llama-3.1-8b parallel.prefill.tp=2 workload.input_mean=9000 workload.count=5 workload.rate=1",
        "model=llama-3.1-8b parallel=tp2 parallel.prefill.instances=2 workload.input_mean=20000 workload.count=12",
        "workload.input_mean=40000 workload.count=12 workload.rate=0.1 workload.aborts=1",
    ],
    ids=["alone", "burst", "slices", "crossing", "aborts"],
)
def test_forwards_told_at_once_change_no_times(words):
    at_once, one_by_one = both(*words.split())
    assert at_once.outcome.events < 0.92 * one_by_one.outcome.events
    for name, column in at_once.requests.items():
        same = [value if isinstance(value, str) else pytest.approx(value, abs=1e-7) for value in column]
        assert list(one_by_one.requests[name]) == same, name  # the longer message takes 20 ns
    logs = [sorted(map(moved, one.transfers)) for one in (at_once, one_by_one)]
    assert [who for who, _ in logs[0]] == [who for who, _ in logs[1]]
    assert [at for _, at in logs[0]] == [pytest.approx(at, abs=1e-7) for _, at in logs[1]]


def test_a_long_prompt_costs_hardly_more_events():
    short, long = (
        both(f"workload.input_mean={n}", "workload.input_cv=0", "workload.count=1")[0] for n in (8192, 65536)
    )
    assert long.outcome.events < 1.1 * short.outcome.events
