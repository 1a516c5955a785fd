"""Decode steps in closed form give the times of stepping one by one."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.serve import ServeOptions, job
from pdsim.serving.settings import SchedulerLimits, Workload
from pdsim.serving.steps import DecodeSpan
from tests.support.serving import configured, serve


@pytest.mark.parametrize(
    ("time", "steps"), [(9.0, 1), (10.0, 1), (11.5, 1), (11.51, 2), (13.5, 2), (15.0, 3), (16.0, 3)]
)
def test_the_boundary_that_notices_something_is_the_first_one_not_before_it(time, steps):
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
def test_the_sum_is_that_of_single_steps_and_its_inverse_finds_the_boundary(
    start, base, cost, batch, context, steps
):
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
