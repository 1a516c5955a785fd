"""Nodes, GPUs and routers that fail while requests are served: when, what that ends, and what users see of it."""

from dataclasses import replace
from typing import Any

import pytest

from experiments.serve import ServeOptions, job, specs
from pdsim.hardware.costs import EngineModel
from pdsim.hardware.machine import Nic
from pdsim.kv.messages import instance_of
from pdsim.models.llm import Parallel, Side
from pdsim.serving.failures import Failure, FailureRate, Failures, drawn, kills, recoveries
from pdsim.serving.settings import Workload
from pdsim.transfer.job import RankSpec
from tests.support.configs import EIGHT, ENGINE
from tests.support.serving import ONE, configured, rows, serve, values

TWO = Side(tp=1, instances=2)
CALM = Workload(arrivals="poisson", count=60, rate=20.0, input_mean=300, output_mean=12)
NODES = replace(EIGHT, nodes=2)


CARDS = replace(NODES, nic=Nic(count=4, rate=1e9))
ACROSS = replace(ENGINE, inter=EngineModel(path="rdma", call=5e-6, descriptor=1e-6, overlap=False, latency=0.0))


def ranks(**sides: Side) -> list[RankSpec]:
    config = configured(hw=NODES, parallel=Parallel(**({"prefill": ONE, "decode": ONE} | sides)))
    return specs(config, job(config, ServeOptions()), ())[1:]


def test_failures_are_those_of_the_seed_and_of_nothing_else():
    own = ranks(prefill=Side(tp=2, instances=2), decode=TWO)
    rates = Failures(node=FailureRate(every=100.0, repair=5.0), gpu=FailureRate(every=50.0, repair=1.0))
    found = drawn(rates, own, instance_of, 7, 10_000.0)
    assert found == drawn(rates, own, instance_of, 7, 10_000.0) != drawn(rates, own, instance_of, 8, 10_000.0)
    nodes = drawn(replace(rates, gpu=FailureRate()), own, instance_of, 7, 10_000.0)
    assert nodes == [each for each in found if each.what.startswith("node")]
    assert len(nodes) == pytest.approx(100, abs=30)
    assert len(found) - len(nodes) == pytest.approx(200, abs=45)


def test_engines_and_nodes_end_as_a_whole():
    own = ranks(prefill=Side(tp=2, instances=2), decode=TWO)
    rates = Failures(node=FailureRate(every=10.0), gpu=FailureRate(every=10.0))
    lost = {each.what: set(each.instances) for each in drawn(rates, own, instance_of, 0, 1000.0)}
    assert lost["node 0"] == {"prefill0", "prefill1"}
    assert lost["node 1"] == {"decode0", "decode1"}
    assert lost["GPU 0 of node 0"] == lost["GPU 1 of node 0"] == {"prefill0"}


def test_failures_last_until_repair_or_all_serve_again():
    both = ("prefill0.0", "decode0.0")
    times = kills([Failure(1.0, 5.0, "a", both), Failure(3.0, 9.0, "b", both[:1]), Failure(20.0, 21.0, "c", both)])
    ends, starts = {name: [1.0, 20.0] for name in both}, {both[0]: [9.0, 21.0], both[1]: [5.0, 21.0]}
    assert times == (ends, starts)
    failure = Failure(1.0, 5.0, "node 0", ("prefill0.0", "prefill1.0"))
    changes = [(0.0, "prefill0", "formed"), (2.0, "prefill0", "lost"), (3.0, "prefill1", "lost")]
    again = [(5.0, "prefill1", "formed"), (6.5, "prefill0", "formed")]
    assert recoveries([failure], changes + again) == [(2.0, 5.5)]
    assert recoveries([failure], changes + again[:1]) == [(2.0, None)]
    assert recoveries([Failure(1.0, 4.0, "router")], ()) == [(0.0, 3.0)]


def test_a_failing_card_ends_no_rank_nor_changes_draws():
    own = ranks(prefill=Side(tp=2, instances=2), decode=TWO)
    rates = Failures(node=FailureRate(every=100.0), nic=FailureRate(every=50.0, repair=1.0))
    found = drawn(rates, own, instance_of, 7, 10_000.0, cards=(0, 2))
    nodes = drawn(replace(rates, nic=FailureRate()), own, instance_of, 7, 10_000.0)
    cards = [each for each in found if each.card]
    assert nodes == [each for each in found if not each.card]
    assert len(cards) == pytest.approx(200, abs=45)
    assert {each.card for each in cards} == {(0, 0), (0, 2), (1, 0), (1, 2)}
    assert all((each.what, each.ranks) == ("NIC {1} of node {0}".format(*each.card), ()) for each in cards)
    assert kills(cards) == ({}, {})


def test_transfers_recover_by_another_card_or_by_repair():
    times = ((1.0, 5.0, (0, 0)), (3.0, 9.0, (0, 1)), (4.0, 6.0, (1, 0)))
    lost = [Failure(at, until, "NIC", card=card) for at, until, card in times]
    assert recoveries(lost, (), 0.1) == [(0.1, 4.0), (0.1, 6.0), (0.1, 2.0)]
    assert recoveries(lost, (), 0.1, 1) == [(0.1, 0.1), (0.1, 6.0), (0.1, 0.1)]
    assert recoveries(lost, (), 0.1, 2) == [(0.1, 0.1)] * 3


@pytest.mark.parametrize("failover", [False, True])
def test_transfers_of_a_card_fail_or_go_over_others(failover):
    engine = replace(ACROSS, failover=failover)
    down = Failures(nic=FailureRate(every=0.3, repair=0.2))
    config = configured(TWO, TWO, hw=CARDS, backend=engine, workload=CALM, failures=down)
    served = serve(config)
    lost = values(served)["requests_failed"]
    failed = {row["status"] for row in rows(served)} - {"ok"}
    assert values(served)["failures"] > 5
    assert values(served)["failure_notice_s"] == pytest.approx(0.1)
    assert served.failures == []
    assert values(served)["failure_recovery_s"] == pytest.approx(0.1 if failover else 0.2)
    assert (lost == 0) == failover
    assert {status.partition(":")[0] for status in failed} == (set() if failover else {"TransferFailed"})


def failing(failures: Failures, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    options = {"deadline": 0.3, "client_wait": 0.05} | options
    config = configured(TWO, TWO, options=options, workload=CALM, failures=failures)
    served = serve(config)
    assert served.failures == []
    return values(served), rows(served)


GPUS = Failures(gpu=FailureRate(every=0.5, repair=0.4))


def test_what_failures_end_is_served_with_retries_only():
    bare, _ = failing(GPUS, retries=0)
    users, requests = failing(GPUS, retries=0, client_retries=20)
    assert bare["failures"] == users["failures"] > 2
    assert bare["requests_failed"] > 0 == bare["asked_again"]
    assert users["requests_failed"] == 0 < users["asked_again"]
    assert {row["status"] for row in requests} == {"ok"}
    assert bare["failure_recovery_s"] == pytest.approx(0.4, abs=0.2)


def test_the_router_resends_only_what_had_not_moved():
    own, _ = failing(GPUS, retries=3)
    bare, _ = failing(GPUS, retries=0)
    assert own["sent_again"] > 0 == bare["sent_again"]
    assert own["requests_failed"] < bare["requests_failed"]


def test_a_failing_router_loses_what_is_under_way():
    down = Failures(router=FailureRate(every=1.0, repair=0.25))
    lost, requests = failing(down)
    assert lost["requests_failed"] == sum(row["status"] == "RouterLost: the router failed" for row in requests) > 0
    assert lost["failure_recovery_s"] == 0.25
    again, _ = failing(down, client_retries=20)
    assert again["requests_failed"] == 0


def test_a_user_who_leaves_does_not_send_again():
    down, again = Failures(router=FailureRate(every=0.5)), {"client_retries": 9, "client_wait": 5.0}
    leaving = replace(CALM, aborts=1.0, patience=1.0)
    config = configured(TWO, TWO, options=again, failures=down, workload=leaving)
    statuses = {row["status"].partition(":")[0] for row in rows(serve(config))}
    assert statuses <= {"ok", "Aborted"}


def test_without_failures_a_result_says_nothing_of_them():
    assert "failures" not in values(serve(configured()))
