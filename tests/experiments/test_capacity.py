# SPDX-License-Identifier: Apache-2.0
"""`experiment=capacity`: a bracket that closes, deployments that fit, an answer on any number of processes."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from experiments import serve
from experiments.capacity import CapacityOptions, chosen, run
from experiments.capacity.answer import Entry, front
from experiments.capacity.search import (
    Capacity,
    Plan,
    Probe,
    Search,
    Shape,
    bisect,
    configured,
    listed,
    paired,
    plans,
)
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.hardware.machine import Machine, Nic
from pdsim.results.record import Result
from pdsim.serving.settings import Kv, Slo, Tenant, Workload
from pdsim.serving.workload import draw, load
from pdsim.sim.model import Model
from tests.support.configs import EIGHT, ENGINE
from tests.support.serving import GENERATED, GQA
from tests.support.serving import configured as served

ROOMY = Kv(page_size=16)
SLO = Slo(ttft=0.1, tpot=0.1)


def probe(load: float, attainment: float = 1.0, half: float = 0.0, ttft: float = 0.1, met: str = "") -> Probe:
    return Probe(
        load=load, rate=load * 10, tokens=load, attainment=attainment, within_ttft=attainment, within_tpot=1.0,
        half=half, ttft=ttft, tpot=ttft / 10, requests=100, met=met,
    )  # fmt: skip


def at(load: float, *, knee: float = 0.63, half: float = 0.0) -> Probe:
    """Return a probe of a system whose share of good requests falls through 0.9 at *knee*."""
    return probe(load, min(1.0, 0.9 + (knee - load)), half)


@pytest.mark.parametrize("start", [0.05, 0.3, 0.62, 0.63, 0.64, 0.95, 5.0])
def test_the_bracket_closes_on_the_knee_wherever_it_starts(start):
    answer = bisect(at, 0.9, 0.02, start)
    assert answer.best.load <= 0.63 < answer.high
    assert answer.high - answer.low <= 0.02 * answer.high
    assert len(answer.probes) < (10 if start == 0.62 else 16)


@pytest.mark.parametrize(("confident", "least", "most"), [(False, 0.0, 1.0), (True, 0.5, 0.75)])
def test_a_bracket_spans_the_loads_that_are_not_sure(confident, least, most):
    answer = bisect(partial(at, half=0.05), 0.9, 0.02, 0.62 if confident else 0.3, confident=confident)
    assert answer.best.load <= 0.63
    assert least <= answer.low <= 0.58
    assert 0.68 <= answer.high <= most


def test_capacity_lies_between_single_requests_and_the_closed_form():
    none, all_ = (bisect(partial(at, knee=knee), 0.9, 0.02, 0.6) for knee in (-1.0, 2.0))
    assert (none.best, none.low) == (None, 0.0)
    assert (0.97 < all_.best.load < 1.0, all_.high) == (True, 1.0)


def test_the_front_keeps_what_nothing_beats():
    fast, full = probe(0.2), probe(0.8, ttft=0.4)
    beaten, failed = probe(0.5, ttft=0.5), probe(0.9, attainment=0.5, ttft=0.01)
    one = Capacity(best=full, low=0.0, high=1.0, probes=(fast, full, beaten, failed))
    plan = Plan(shape=Shape(1, 1, 4, 4), gpus=8, copies=1, full=10.0, bound=10.0, ttft=0.1, tpot=0.01)
    entry = Entry(plan=plan, copies=1, capacity=one, probe=full)
    assert [each.probe for each in front([entry], 0.9)] == [full, fast]


def test_a_difference_is_of_the_same_requests():
    every, half = probe(0.5, met="f" * 26), probe(0.5, attainment=0.5, met="5" * 26)
    more = paired(every, half, 0.1)
    assert more[0] == 0.5
    assert 0.0 <= more[1] < 0.2
    assert paired(every, every, 0.1) == (0.0, 0.0)


def fitting() -> tuple[list[Plan], dict[Shape, str]]:
    config = served(model=GQA, kv=ROOMY, slo=SLO, workload=GENERATED)
    requests = load(config.workload, 0, config.model.context)
    return plans(config, list(listed((1, 2, 3), (1,), (1, 4, 7), "any")), requests, 0.9)


def test_deployments_that_do_not_fit_are_named_with_the_reason():
    able, refused = fitting()
    shapes = {plan.shape: plan for plan in able}
    assert (shapes[Shape(1, 1, 4, 4)].gpus, shapes[Shape(1, 1, 1, 1)].copies) == (8, 4)
    assert shapes[Shape(2, 2, 4, 0)].gpus == 8  # colocated
    assert all(plan.gpus * plan.copies <= 8 for plan in able)
    assert "GPUs" in refused[Shape(1, 1, 4, 7)]
    assert "heads" in refused[Shape(3, 1, 1, 1)]
    assert len(able) + len(refused) == 27 + 9
    config = served(model=GQA, kv=ROOMY)
    staging = [configured(config, Shape(tp, 2, 1, 1)).kv.staging for tp in (2, 1)]
    assert staging == [False, True]  # sides of different width stage


def test_copies_share_no_node_in_part_and_instances_none():
    hw, backend = replace(EIGHT, nodes=3, nic=Nic(count=8, rate=50e9)), replace(ENGINE, inter=ENGINE.intra)
    shapes = [Shape(2, 2, 1, 2), Shape(4, 4, 1, 2), Shape(4, 8, 1, 1), Shape(8, 1, 1, 4)]
    config = served(model=GQA, kv=ROOMY, hw=hw, backend=backend)
    able, _ = plans(config, shapes, load(config.workload, 0, config.model.context), 0.9)
    assert [(plan.gpus, plan.copies) for plan in able] == [(6, 3), (12, 1), (12, 1), (12, 1)]
    nodes = [configured(config, plan.shape).hw.nodes for plan in able]
    assert nodes == [1, 2, 2, 2]


def test_mixed_copies_have_nodes_of_both_kinds():
    hw, backend = replace(EIGHT, nodes=4, nic=Nic(count=8, rate=50e9)), replace(ENGINE, inter=ENGINE.intra)
    config = served(model=GQA, kv=ROOMY, hw=hw, backend=backend)
    shapes = [Shape(tp, 1, 2, 1, "8xb200") for tp in (1, 2, 4)]
    shapes += [Shape(8, 2, 4, 1, "8xb200"), Shape(1, 1, 1, 1, "8xb200")]
    able, refused = plans(config, shapes, load(config.workload, 0, config.model.context), 0.9)
    own = {plan.shape: (plan.gpus, plan.prefill_gpus, plan.copies) for plan in able}
    assert own == {
        shapes[0]: (3, 2, 8),  # two nodes of four halves, a node and more of single GPUs
        shapes[1]: (5, 4, 6),  # three nodes of two each, one of decode
        shapes[2]: (9, 8, 3),
        shapes[4]: (2, 1, 16),
    }
    assert list(refused) == [shapes[3]]  # five nodes
    assert str(shapes[1]) == "2P tp2 on 8xb200 : 1D tp1"
    first = configured(config, shapes[1])
    assert (first.hw.nodes, first.hw.prefill) == (2, "8xb200")


def test_a_mixed_deployment_costs_what_its_gpus_do():
    plan = Plan(shape=Shape(2, 1, 1, 2, "b"), gpus=4, prefill_gpus=2, copies=1, full=1.0, bound=1.0, ttft=0, tpot=0)
    entry = Entry(plan=plan, copies=1, capacity=Capacity(best=None, low=0.0, high=1.0, probes=()), probe=probe(0.5))
    cost = entry.cost({"": 4.0, "b": 6.0})
    assert cost == pytest.approx(5.0 / entry.tokens / 3600 * 1e6)
    assert entry.cost({"": 4.0}) is entry.cost({"b": 6.0}) is None


@pytest.mark.parametrize("slo", [SLO, Slo(ttft=0.1, tpot=0.0021)])
def test_no_simulation_holds_above_what_closed_form_allows(slo):
    workload = replace(GENERATED, count=200, output_mean=60)
    config = served(model=GQA, kv=ROOMY, slo=slo, workload=workload)
    requests = draw(workload, 0, config.model.context).requests
    able, _ = plans(config, list(listed((1,), (1,), (1, 2), "any")), requests, 0.9)
    assert len(able) == 5
    for plan in able:
        above = Search(plan=plan, rate=1.1 * plan.bound, requests=200, search=False, tolerance=0.1)
        found = above.capacity(config, requests, "least_tokens", 0.9, 0.1)
        assert found.best is None or plan.bound == pytest.approx(plan.full), plan  # a queue has no time to grow


def search(**changes: Any) -> Result:
    config = wanted(**changes)
    return run(config, Model(config.hw, config.backend), silent)


def wanted(slo: Slo = SLO, hw: Machine = EIGHT, **options: Any) -> Config:
    small = {
        "prefill_tp": (1,), "decode_tp": (1,), "instances": (1, 2),
        "requests": 100, "final_requests": 150, "finalists": 1, "processes": 1,
    }  # fmt: skip
    experiment = CapacityOptions(**small | options)
    workload = replace(GENERATED, count=150)
    return served(model=GQA, kv=ROOMY, experiment=experiment, workload=workload, slo=slo, hw=hw)


@cache
def ordinary() -> tuple[Result, list[float]]:
    shares: list[float] = []
    config = wanted()
    return run(config, Model(config.hw, config.backend), lambda share, *_: shares.append(share)), shares


def test_every_tenant_has_its_own_slo_also_in_closed_form():
    tenants = tuple(
        Tenant(name=name, rate=rate, ttft=ttft, tpot=1.0, input_mean=600, output_mean=8)
        for name, rate, ttft in (("hard", 0.2, 1e-6), ("easy", 4.0, 9.0))
    )
    config = replace(wanted(deployment="disaggregated"), workload=Workload(arrivals="poisson", tenants=tenants))
    answer = told(run(config, Model(config.hw, config.backend), silent))
    assert answer["SLO"] == "TTFT and TPOT of each tenant (hard 1 us, 1 s; easy 9 s, 1 s) for 90% of requests"
    assert answer["nearest"].endswith("of the worst tenant, meet the SLO (hard 0.0%, easy 100.0%)")

    def bound(*limits: tuple[float, float]) -> float:
        each = [
            Tenant(name=str(number), rate=1.0, ttft=ttft, tpot=tpot) for number, (ttft, tpot) in enumerate(limits)
        ]
        workload = Workload(arrivals="poisson", count=100, tenants=tuple(each))
        tightest = Slo(ttft=max(ttft for ttft, _ in limits), tpot=min(tpot for _, tpot in limits))
        config = replace(wanted(slo=tightest), workload=workload)
        (plan,), _ = plans(config, (Shape(1, 1, 1, 1),), draw(workload, 0, 4096).requests, 0.9)
        return plan.bound

    assert bound((9.0, 1.0), (8.0, 1.0)) > 0
    assert bound((9.0, 1.0), (8.0, 1e-9)) == bound((1e-9, 1.0), (8.0, 1.0)) == 0


def told(result: Result) -> dict[str, str]:
    return {row[0]: row[1] for row in result.tables[0].rows}


def test_the_answer_does_not_depend_on_the_number_of_processes():
    (one, shares), two = ordinary(), search(processes=2)
    assert (one.summary, one.tables) == (two.summary, two.tables)
    assert one.values["deployments"] == 5
    assert one.values["deployments_within_slo"]
    assert " of 8 GPUs" in told(one)["best"]
    at_one_rate = {round(row[3], 6) for row in one.tables[1].rows}
    assert len(at_one_rate) == 1
    assert shares == sorted(shares)  # what is left never grows
    assert shares[-1] <= 1.0
    assert len({*shares}) > 3


def test_the_answer_has_the_errors_of_servers_and_evidence():
    one, _ = ordinary()
    answer, rate = told(one), one.values["capacity_rate"]
    low, high = map(float, answer["95 % interval"].partition(" requests/s, ")[0].split(" to "))
    assert low <= rate <= high
    assert "TTFT 55.72 and TPOT 2.21 times off, as 19 loads of " in answer["95 % interval"]
    assert answer["compute"].startswith("assumed")
    assert {"engine", "model", "by the draw alone"} <= answer.keys()


@pytest.mark.parametrize("by", [0.5, 1.0, 2.0])
def test_a_capacity_is_searched_with_easier_and_harder_limits(by):
    config = wanted()
    requests = draw(config.workload, 0, config.model.context).requests
    (plan,), _ = plans(config, (Shape(1, 1, 1, 1),), requests, 0.9)
    eased = Search(plan=plan, requests=150, tolerance=0.1, eased=(by, by))
    limits = replace(config, slo=Slo(ttft=SLO.ttft * by, tpot=SLO.tpot * by))
    parts = requests, "least_tokens", 0.9, 0.1
    assert eased.capacity(config, *parts) == replace(eased, eased=(1.0, 1.0)).capacity(limits, *parts)


def test_fewest_gpus_serve_a_rate_that_fewer_do_not():
    most = search(deployment="disaggregated", instances=(1,)).values["capacity_rate"]
    few, many = (search(rate=share * most / 4, deployment="disaggregated", instances=(1,)) for share in (0.9, 2.5))
    assert (few.values["capacity_gpus"], few.values["best_copies"]) == (2, 1)
    assert (many.values["capacity_gpus"], many.values["best_copies"]) == (6, 3)
    assert many.values["capacity_rate"] == pytest.approx(2.5 * most / 4)
    assert told(many)["fewest GPUs"] == "6 of 8: 1P tp1 : 1D tp1, 3 copies"


@pytest.mark.parametrize(
    ("nodes", "why"),
    [(1, "more GPUs on nodes of two kinds than the 8 of hw.nodes=1"), (2, "backend=fast works within a node only")],
)
def test_another_kind_of_prefill_that_cannot_serve_is_refused(nodes, why):
    with pytest.raises(ConfigError, match=f"experiment.prefill_hw has 8xb200, which no deployment can use: {why}"):
        search(prefill_hw=("8xb200",), hw=replace(EIGHT, nodes=nodes))


def test_a_price_is_spread_over_the_tokens():
    result = search(rate=20.0, hw=replace(EIGHT, price=2.0))
    tokens, cost = result.values["capacity_tokens_per_gpu"], result.values["capacity_cost"]
    assert tokens
    assert cost == pytest.approx(2.0 / 3600 / tokens * 1e6)
    assert "hw.price=2" in told(result)["cost"]


def test_what_nothing_holds_says_how_near_and_why():
    slow, crowded = search(rate=1.0, slo=Slo(ttft=1e-6, tpot=0.1)), search(rate=1e5)
    assert told(slow)["fails"].startswith("TTFT: TTFT by 0.0%")
    assert told(slow)["one prompt alone"].startswith("TTFT of ")
    assert told(crowded)["one prompt alone"].startswith("meets both")
    assert told(search(slo=Slo(ttft=1e-6, tpot=0.1)))["best"].startswith("none of 8 GPUs")
    assert slow.values["capacity_rate"] is None


def test_a_search_goes_on_from_its_parts(tmp_path):
    file = tmp_path / "parts.jsonl"
    search(parts=str(file))
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:3]) + "\n")
    again = search(parts=str(file))
    assert again.tables == ordinary()[0].tables
    assert again.notes[-1].startswith("2 searches were run before")
    assert len(file.read_text().splitlines()) == len(lines)
    with pytest.raises(ConfigError, match="they do not add up"):
        search(parts=str(file), requests=101)


def test_the_chosen_run_serves_the_same_requests():
    result, _ = ordinary()
    own = chosen(wanted(), result.values)
    again = serve.run(own, Model(own.hw, own.backend), silent)
    assert list(again.requests["ttft"]) == pytest.approx(list(result.requests["ttft"]))


def test_a_search_without_a_deployment_is_refused():
    with pytest.raises(ConfigError, match="no deployment of experiment"):
        search(prefill_tp=(3,), deployment="disaggregated")
