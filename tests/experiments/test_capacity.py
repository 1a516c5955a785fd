"""`experiment=capacity`: a bracket that closes, deployments that fit, an answer on any number of processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from experiments.capacity import CapacityOptions, front, run
from experiments.capacity.search import Capacity, Probe, Shape, bisect, configured, feasible
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.serving.settings import Kv, Slo
from pdsim.serving.workload import load
from pdsim.sim.model import Model
from tests.support.serving import GENERATED, GQA
from tests.support.serving import configured as served

ROOMY = Kv(page_size=16)


def probe(load: float, attainment: float = 1.0, half: float = 0.0, ttft: float = 0.1, tpot: float = 0.01) -> Probe:
    return Probe(
        load=load, rate=load * 10, tokens=load, attainment=attainment, half=half, ttft=ttft, tpot=tpot, requests=100
    )


def at(load: float, *, knee: float = 0.63, half: float = 0.0) -> Probe:
    """Return a probe of a system whose share of good requests falls through 0.9 at *knee*."""
    return probe(load, min(1.0, 0.9 + (knee - load)), half)


@pytest.mark.parametrize("start", [0.05, 0.3, 0.62, 0.63, 0.64, 0.95, 5.0])
def test_the_bracket_closes_on_the_knee_wherever_it_starts(start: float):
    answer = bisect(at, 0.9, 0.02, start)
    assert answer.best is not None
    assert answer.best.load <= 0.63 < answer.high
    assert answer.high - answer.low <= 0.02 * answer.high
    assert len(answer.probes) < (10 if start == 0.62 else 16)


@pytest.mark.parametrize(("confident", "least", "most"), [(False, 0.0, 1.0), (True, 0.5, 0.75)])
def test_a_bracket_spans_the_loads_that_are_not_sure(confident: bool, least: float, most: float):
    answer = bisect(partial(at, half=0.05), 0.9, 0.02, 0.62 if confident else 0.3, confident=confident)
    assert answer.best is not None
    assert answer.best.load <= 0.63
    assert least <= answer.low <= 0.58
    assert 0.68 <= answer.high <= most


def test_capacity_is_none_where_single_requests_fail_and_ends_below_the_closed_form():
    none, all_ = (bisect(partial(at, knee=knee), 0.9, 0.02, 0.6) for knee in (-1.0, 2.0))
    assert (none.best, none.low) == (None, 0.0)
    assert all_.best is not None
    assert (0.97 < all_.best.load < 1.0, all_.high) == (True, 1.0)


def test_the_front_keeps_what_nothing_beats():
    fast, full = probe(0.2), probe(0.8, ttft=0.4, tpot=0.03)
    beaten, failed = probe(0.5, ttft=0.5, tpot=0.03), probe(0.9, attainment=0.5, ttft=0.01)
    one = Capacity(best=full, low=0.0, high=1.0, probes=(fast, full, beaten, failed))
    assert [each.probe for each in front({Shape(1, 1, 4, 4): one}, 8, 0.9)] == [full, fast]


def test_deployments_that_do_not_fit_are_named_with_the_reason():
    config = served(model=GQA, kv=ROOMY)
    requests = load(config.workload, 0, config.model.context)
    shapes, refused = feasible(config, (1, 2, 3), (1,), (1, 4, 7), requests)
    assert Shape(1, 1, 4, 4) in shapes
    assert all(shape.gpus <= 8 for shape in shapes)
    assert "GPUs" in refused[Shape(1, 1, 4, 7)]
    assert "heads" in refused[Shape(3, 1, 1, 1)]
    assert len(shapes) + len(refused) == 27
    staging = [configured(config, Shape(tp, 2, 1, 1)).kv.staging for tp in (2, 1)]
    assert staging == [False, True]  # sides of different width stage


def search(**options: Any) -> Result:
    small = {
        "prefill_tp": (1,), "decode_tp": (1,), "instances": (1, 2),
        "requests": 100, "final_requests": 150, "finalists": 1, "processes": 1,
    }  # fmt: skip
    experiment = CapacityOptions(**small | options)
    slo = Slo(ttft=0.1, tpot=0.1)
    config = served(model=GQA, kv=ROOMY, experiment=experiment, workload=GENERATED, slo=slo)
    return run(config, Model(config.hw, config.backend), silent)


def test_the_answer_does_not_depend_on_the_number_of_processes():
    one, two = search(), search(processes=2)
    assert (one.summary, one.tables) == (two.summary, two.tables)
    assert (one.values["deployments"], one.values["deployments_within_slo"]) == (4, 4)
    answer = {row[0]: row[1] for row in one.tables[0].rows}
    assert len(one.tables[0].rows) <= 10
    assert answer["best"].endswith((" copies on 8 GPUs", " copy on 8 GPUs"))


def test_a_search_without_a_deployment_is_refused():
    with pytest.raises(ConfigError, match="no deployment of experiment"):
        search(prefill_tp=(3,))
