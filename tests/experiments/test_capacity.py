"""`experiment=capacity`: a bracket that closes, deployments that fit, an answer on any number of processes."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.capacity import CapacityOptions, run
from experiments.capacity.ranking import front
from experiments.capacity.search import Capacity, Probe, Shape, bisect, configured, feasible
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.serving.settings import Kv, Slo
from pdsim.serving.workload import load
from pdsim.sim.model import Model
from tests.support.serving import GENERATED, GQA
from tests.support.serving import configured as served

ROOMY = Kv(page_size=16)


def found(load: float, *, knee: float = 0.63, half: float = 0.0) -> Probe:
    """Return a probe of a system whose share of good requests falls through 0.9 at *knee*."""
    share = min(1.0, 0.9 + (knee - load))
    return Probe(
        load=load, rate=load * 10, tokens=load, attainment=share, half=half, ttft=load, tpot=0.01, requests=100
    )


@pytest.mark.parametrize("start", [0.05, 0.3, 0.6, 0.63, 0.64, 0.95, 5.0])
def test_the_bracket_closes_on_the_knee_wherever_it_starts(start: float):
    answer = bisect(found, 0.9, 0.02, start)
    assert answer.best is not None
    assert answer.best.load <= 0.63 < answer.high
    assert answer.high - answer.low <= 0.02 * answer.high
    assert len(answer.probes) < 16


def test_a_start_near_the_answer_takes_fewer_probes():
    assert len(bisect(found, 0.9, 0.02, 0.62).probes) < len(bisect(found, 0.9, 0.02, 0.05).probes)


def test_loads_that_the_interval_does_not_tell_are_not_sure():
    answer = bisect(lambda load: found(load, half=0.05), 0.9, 0.02, 0.3)
    assert answer.low <= 0.58
    assert answer.high >= 0.68


def test_a_confident_search_goes_on_to_loads_that_are_sure():
    answer = bisect(lambda load: found(load, half=0.05), 0.9, 0.02, 0.62, confident=True)
    assert answer.best is not None
    assert answer.best.load <= 0.63
    assert 0.5 < answer.low <= 0.58
    assert 0.68 <= answer.high < 0.75


def test_an_slo_that_single_requests_miss_has_no_capacity():
    answer = bisect(lambda load: found(load, knee=-1.0), 0.9, 0.02, 0.6)
    assert answer.best is None
    assert answer.low == 0.0


def test_what_always_holds_ends_below_the_closed_form():
    answer = bisect(lambda load: found(load, knee=2.0), 0.9, 0.02, 0.6)
    assert answer.best is not None
    assert 0.97 < answer.best.load < 1.0
    assert answer.high == 1.0


def test_the_front_keeps_what_nothing_beats():
    def point(load: float, ttft: float, tpot: float) -> Probe:
        return Probe(load=load, rate=load, tokens=load, attainment=1.0, half=0.0, ttft=ttft, tpot=tpot, requests=100)

    fast, full, beaten = point(0.2, 0.1, 0.01), point(0.8, 0.4, 0.03), point(0.5, 0.5, 0.03)
    failed = Probe(load=0.9, rate=0.9, tokens=0.9, attainment=0.5, half=0.0, ttft=0.01, tpot=0.01, requests=100)
    one = Capacity(best=full, low=0.0, high=1.0, probes=(fast, full, beaten, failed))
    assert [probe for _, probe in front({Shape(1, 1, 4, 4): one}, 8, 0.9)] == [full, fast]


def test_deployments_that_do_not_fit_are_named_with_the_reason():
    config = served(model=GQA, kv=ROOMY)
    requests = load(config.workload, 0, config.model.context)
    shapes, refused = feasible(config, (1, 2, 3), (1,), (1, 4, 7), requests)
    assert Shape(1, 1, 4, 4) in shapes
    assert all(shape.gpus <= 8 for shape in shapes)
    assert "GPUs" in refused[Shape(1, 1, 4, 7)]
    assert "heads" in refused[Shape(3, 1, 1, 1)]
    assert len(shapes) + len(refused) == 27


def test_only_sides_of_different_width_stage():
    config = served(model=GQA, kv=ROOMY)
    assert not configured(config, Shape(2, 2, 1, 1)).kv.staging
    assert configured(config, Shape(1, 2, 1, 1)).kv.staging


def search(config: Config, **options: Any) -> Result:
    experiment = {
        "prefill_tp": (1,), "decode_tp": (1,), "instances": (1, 2),
        "requests": 100, "final_requests": 150, "finalists": 1, "processes": 1,
    }  # fmt: skip
    own = served(
        model=GQA, kv=ROOMY, experiment=CapacityOptions(**experiment | options), workload=GENERATED, slo=config.slo
    )
    return run(own, Model(own.hw, own.backend), silent)


def test_the_answer_does_not_depend_on_the_number_of_processes():
    config = served(slo=Slo(ttft=0.1, tpot=0.1))
    one, two = search(config), search(config, processes=2)
    assert one.summary == two.summary
    assert one.tables == two.tables
    values = {metric.name: metric.value for metric in one.summary}
    assert values["deployments"] == 4
    assert values["deployments_within_slo"] == 4
    answer = {row[0]: row[1] for row in one.tables[0].rows}
    assert len(one.tables[0].rows) <= 10
    assert answer["best"].endswith((" copies on 8 GPUs", " copy on 8 GPUs"))


def test_no_deployment_that_fits_is_a_configuration_error():
    config = served(slo=Slo(ttft=0.1, tpot=0.1))
    with pytest.raises(ConfigError, match="no deployment of experiment"):
        search(config, prefill_tp=(3,))


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"experiment\.attainment must be > 0 and < 1, got 1"):
        CapacityOptions(attainment=1.0)
    with pytest.raises(ValueError, match=r"experiment\.instances must have values >= 1"):
        CapacityOptions(instances=())
