"""The offered load in closed form, against queues whose load, waiting time and stability are known."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.serve import ServeOptions, job
from pdsim.compute.forward import Compute
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.results.record import half_width, trend
from pdsim.serving.deployment import Deployment
from pdsim.serving.load import OfferedLoad, offered_load, prefill_iterations, scaled
from pdsim.serving.settings import Kv, SchedulerLimits, Workload
from pdsim.serving.workload import Request, draw, grid, load
from tests.support.configs import EIGHT
from tests.support.serving import configured, rows, serve, values

ALONE = SchedulerLimits(chunk=8192, prefill_batch=1, decode_batch=8)
"""A prefill engine that serves one request at a time: a queue with one server, first come, first served."""

PAPER = Compute(overhead=10e-3)
"""So slow that what a handoff takes is small beside a service."""


def queue(count: int, rate: float, *, cv: float = 0.0, **changes: Any) -> Config:
    """Return a run whose requests of one output token queue for one prefill instance.

    Control messages take the same time however many bytes they have.
    """
    hw = replace(EIGHT, host=replace(EIGHT.host, tcp_rate=1e18))
    lengths = {"input_mean": 256, "input_cv": cv, "output_mean": 1, "output_cv": 0}
    workload = Workload(arrivals="poisson", count=count, rate=rate, **lengths)
    return configured(workload=workload, scheduler=ALONE, compute=PAPER, kv=Kv(page_size=16), hw=hw, **changes)


def service(config: Config, requests: list[Request]) -> np.ndarray:
    what = job(config, ServeOptions())
    return np.array([sum(prefill_iterations(what, [request.input])) for request in requests])


def waits(config: Config) -> np.ndarray:
    """Return the seconds that each request waits for the prefill engine.

    Queueing begins with the request's way to the decode engine, which is the first one's whole: it finds no queue.
    """
    queueing = np.array([row["queueing"] for row in rows(serve(config))])
    assert 0 < queueing[0] < 1e-4
    return queueing - queueing[0]


def lindley(arrivals: list[float], services: np.ndarray) -> np.ndarray:
    """Return the waiting times of a queue with one server: ``W' = max(0, W + S - A)``."""
    delays = [0.0]
    for index in range(1, len(arrivals)):
        delays.append(max(0.0, delays[-1] + services[index - 1] - (arrivals[index] - arrivals[index - 1])))
    return np.array(delays)


@pytest.mark.parametrize("cv", [0.0, 1.0])
def test_each_request_waits_as_lindleys_recursion_says(cv):
    config = queue(400, 60.0, cv=cv)
    requests = load(config.workload, config.seed, config.model.context)
    expected = lindley([request.arrival for request in requests], service(config, requests))
    assert waits(config) == pytest.approx(expected, abs=1e-12)
    assert expected.max() > 3 * service(config, requests).mean()


def offered(what: Deployment, requests: Sequence[Request]) -> OfferedLoad:
    return offered_load(what, requests)


def test_loads_are_rates_times_service_of_saturated_batches():
    config = queue(50, 60.0)
    requests = load(config.workload, 0, config.model.context)
    what = job(config, ServeOptions())
    rate = 49 / (requests[-1].arrival - requests[0].arrival)
    one, two = (offered(replace(what, prefill_instances=count), requests) for count in (1, 2))
    assert one.prefill == pytest.approx(rate * service(config, requests).mean(), rel=1e-12)
    assert two.prefill == pytest.approx(one.prefill / 2, rel=1e-12)
    assert one.decode == 0  # the first token is prefill's
    what = job(configured(), ServeOptions())
    requests = [Request(float(number), 100, 21) for number in range(5)]  # 8 pages of 16 tokens
    full = offered(what, requests)
    assert full.decode_batch == what.decode_batch == 8
    steps = sum(what.decode_time.step(8) + what.decode_time.context * 8 * (100 + step) for step in range(1, 21))
    assert full.decode == pytest.approx(steps / 8, rel=1e-12)  # one request a second, eight share each step
    # three fill 24 pages, less what the next one's prefill holds
    assert offered(replace(what, decode_pages=25), requests).decode_batch in (2, 3)


def test_an_overloaded_engine_ends_as_the_closed_form_says():
    config = queue(400, 1e4)
    result = serve(config)
    span = result.requests["arrival"][-1] - result.requests["arrival"][0]
    assert values(result)["makespan_s"] == pytest.approx(result.offered_load["prefill"] * span, rel=0.01)
    assert result.notes[0].startswith("load: prefill ")
    assert result.notes[1].startswith("warning: overloaded: prefill is offered ")
    assert values(result)["stationary"] == 0
    assert any(note.startswith("not stationary: TTFT grows by ") for note in result.notes)


@pytest.mark.parametrize(("target", "word"), [(0.7, ""), (0.95, "near capacity"), (1.17, "overloaded")])
def test_loads_from_nine_tenths_on_are_warned_of(target, word):
    config = configured()
    result = serve(replace(config, workload=replace(config.workload, load=target)))
    said = values(result)
    assert max(said["offered_load_prefill"], said["offered_load_decode"]) == pytest.approx(target, rel=1e-9)
    assert any(note.startswith(f"warning: {word}") for note in result.notes) == bool(word)


def test_loads_are_said_in_plain_numbers():
    for prefill, decode, said in ((1.11, 0.0323, "111 %, decode 3.2 %"), (0.996, 0.1, "100 %, decode 10 %")):
        load = OfferedLoad(prefill=prefill, decode=decode, rate=1.0, decode_batch=1)
        assert load.line(Workload(arrivals="poisson")).startswith(f"load: prefill {said} of capacity")


def test_requests_all_at_once_offer_no_rate():
    config = configured()
    requests = [Request(0.0, 100, 5), Request(0.0, 100, 5)]
    assert offered_load(job(config, ServeOptions()), requests) is None
    with pytest.raises(ConfigError, match="requests that arrive at different times"):
        scaled(Workload(load=0.5), job(config, ServeOptions()), requests, 0)


def test_thinning_keeps_times_and_meets_the_mean_load():
    config = configured(workload=replace(Workload(arrivals="poisson", input_mean=300), count=4000, rate=500.0))
    requests = load(config.workload, 0, config.model.context)
    what = job(config, ServeOptions())
    thin = replace(config.workload, load=0.5, scaling="thinning")
    kept = scaled(thin, what, requests, 0)
    assert set(kept) < set(requests)
    assert offered(what, requests).highest > 1
    assert offered(what, kept).highest == pytest.approx(0.5, rel=0.1)
    with pytest.raises(ConfigError, match=r"set workload\.scaling=time"):
        scaled(replace(thin, load=100.0), what, requests, 0)


def gridded(folder: Path, count: int = 60, at_once: int = 5) -> Workload:
    path = folder / "trace.jsonl"
    lines = [
        f'{{"timestamp": {3000 * (number // at_once)}, "input_length": {number + 1}, "output_length": 2}}'
        for number in range(count)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return Workload(trace=str(path), jitter="auto")


def test_arrivals_on_a_grid_are_spread_in_order(tmp_path):
    workload = gridded(tmp_path)
    generated = draw(workload, 0, 4096)
    assert [request.input for request in generated.requests] == list(range(1, 61))
    assert all(one.arrival < other.arrival for one, other in pairwise(generated.requests))
    for number, request in enumerate(generated.requests):
        assert 3 * (number // 5) <= request.arrival < 3 * (number // 5) + 3
    assert "a grid of 3 s, 5.0 at a time" in generated.notes[0]
    assert draw(workload, 0, 4096) == generated
    assert draw(workload, 1, 4096).requests != generated.requests
    assert draw(replace(workload, jitter="none"), 0, 4096).requests[4].arrival == 0


def test_arrivals_on_a_grid_or_off_it_are_told(tmp_path):
    (note,) = draw(replace(gridded(tmp_path), jitter="none"), 0, 4096).notes
    assert note.startswith("warning: arrivals lie on a grid of 3 s, 5.0 at a time")
    assert note.endswith("workload.jitter=auto spreads them")
    assert draw(Workload(), 0, 8192).notes == ()
    assert draw(Workload(count=201), 0, 8192).notes == (
        "warning: the trace has 200 requests, fewer than workload.count=201",
    )
    workload = Workload(jitter="auto")
    assert draw(workload, 0, 8192).requests == load(replace(workload, jitter="none"), 0, 8192)
    assert "on no grid" in draw(workload, 0, 8192).notes[0]
    assert grid([0.0, 0.0, 0.7, 0.7, 2.1, 2.9, 2.9]) == 0.0


def test_skip_and_seconds_choose_a_part_before_the_speed(tmp_path):
    whole = replace(gridded(tmp_path), jitter="none")
    requests = load(replace(whole, skip=3.0, seconds=6.0, speed=2.0), 0, 4096)
    assert [request.input for request in requests] == list(range(6, 16))
    assert {request.arrival for request in requests} == {0.0, 1.5}
    with pytest.raises(ConfigError, match=r"has no requests after workload\.skip=99 s"):
        load(replace(whole, skip=99.0), 0, 4096)


def test_generated_arrivals_end_with_the_seconds():
    endless = Workload(arrivals="poisson", rate=50.0)
    requests = load(replace(endless, seconds=10.0), 0, 4096)
    more = load(replace(endless, count=1000), 0, 4096)
    assert [request.arrival for request in requests] == [request.arrival for request in more if request.arrival < 10]
    later = load(replace(endless, skip=4.0, seconds=6.0), 0, 4096)
    assert [one.arrival + 4 for one in later] == pytest.approx([r.arrival for r in requests if r.arrival >= 4])


def test_warmup_and_cooldown_leave_the_latencies_of_the_middle():
    config = configured()
    result = serve(replace(config, workload=replace(config.workload, warmup=0.05, cooldown=0.05)))
    last = result.requests["arrival"][-1]
    kept = [row["ttft"] for row in rows(result) if 0.05 <= row["arrival"] <= last - 0.05]
    assert 0 < len(kept) < 40
    assert values(result)["ttft_avg_s"] == pytest.approx(np.mean(kept), rel=1e-12)
    assert values(result)["requests"] == 40


def test_intervals_of_correlated_values_cover_what_they_estimate():
    """An AR(1) process of correlation 0.9: an interval for independent values would cover a third as often."""
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        noise, found, value = random.standard_normal(4000).tolist(), [], 0.0
        for each in noise:
            value = 0.9 * value + each
            found.append(value)
        values = np.array(found)
        half = half_width(values, None)
        covered += abs(values.mean()) <= half
    assert 0.88 <= covered / 200 <= 1.0


def test_a_growing_queue_is_told_from_a_steady_one():
    random = np.random.default_rng(2)
    noise = random.exponential(1.0, (300, 400))
    assert sum(bool(trend(row)) for row in noise) <= 9  # 1 % expected, of 300
    assert trend(noise[0] + np.linspace(0, 10, 400)) == pytest.approx(9, abs=1)
    assert trend(noise[0] - np.linspace(0, 10, 400)) == 0.0
    assert trend(noise[0][:99]) is None
    assert half_width(np.arange(49.0), 50.0) is None  # too few
    assert half_width(np.arange(50.0), 50.0) is not None
    assert half_width(np.arange(499.0), 99.0) is None
    assert values(serve(queue(300, 20.0)))["stationary"] == 1
