"""When the router gives requests up as stalled: not while somebody works for them, or owes it an answer."""

from dataclasses import replace

import pytest

from experiments.faults.scenario import attempt, draw
from pdsim.serving.settings import HostCosts, ServingEngine
from pdsim.serving.workload import Request
from pdsim.sim.faults import Faults, Silence, Slow, Squeeze
from tests.serving.test_cache import PREFILL, SETTINGS, SMALL
from tests.serving.test_tiers import EVERY, HW
from tests.support.serving import GQA, simulate

DEADLINE = 0.6
"""Seconds; the stall limit is four thirds of it, and twice the 10 ms that the request can take."""

ONE = [Request(1.0, 100, 4)]
HASTY = {"deadline": DEADLINE}
ONE_LATER = {"requests": ONE, "model": GQA, "options": HASTY, "memory": "tracked"}


def test_slow_forwards_and_silent_losses_are_waited_for():
    served = simulate(**ONE_LATER, faults=Faults(slow=(Slow("prefill0.0", 0.0, 9.0, 2000.0),)))
    assert served.statuses == ["ok"]
    assert served.outcome.seconds > 1.0 + 4 * DEADLINE  # most of it one forward
    silent = Faults(silences=(Silence("prefill0.0", 0.99, 1.45),))  # lost at 2.2, stalled at 2
    assert simulate(**ONE_LATER, faults=silent).statuses == ["ok"]
    (status,) = simulate(**ONE_LATER, faults=silent, kill={"prefill0.0": 1.4501}).statuses
    assert status.startswith("PeerLost: ")


def test_answers_wait_behind_others_in_a_slow_proxy():
    slow = ServingEngine(name="pulls", handoff="pull", proxy=0.1)
    served = simulate(**(ONE_LATER | {"requests": ONE * 20}), engine=slow)
    assert served.statuses == ["ok"] * 20  # the first was computed 1.9 s before decode is asked to pull it


@pytest.mark.parametrize("handoff", ["push", "pull"])
def test_descriptor_lists_that_take_long_are_waited_for(handoff):
    slow = ServingEngine(name="prepares", handoff=handoff, prepare=2e-2)
    served = simulate(**ONE_LATER, engine=slow)
    assert served.statuses == ["ok"]
    assert served.outcome.seconds > 1.0 + 4 * DEADLINE  # most of it before the first descriptor is posted


def test_an_answer_that_the_host_prepares_is_waited_for():
    slow = ServingEngine(name="answers", handoff="pull", prefill=HostCosts(answer=5 * DEADLINE))
    served = simulate(**ONE_LATER, engine=slow)
    assert served.statuses == ["ok"]
    assert served.outcome.seconds > 1.0 + 5 * DEADLINE


@pytest.mark.parametrize(("write", "way"), [("through", "in"), ("back", "out"), ("back", "in")])
def test_moves_to_tiers_and_back_are_waited_for(write, way):
    requests = [Request(at, given, wanted, None, tuple(blocks)) for at, given, wanted, blocks in EVERY]
    cut = Faults(squeezes=(Squeeze(f"node0/gpu0/pcie.{way}", 9.9 if way == "out" else 19.9, 23.0, 0.0),))
    cache = replace(PREFILL, host=4096.0, write=write)
    hw = replace(HW, host=replace(HW.host, tcp_latency=1e-5))  # else each pong comes with its ping
    served = simulate(requests, **SETTINGS | {"kv": SMALL, "hw": hw, "cache": cache}, options=HASTY, faults=cut)
    assert served.statuses == ["ok"] * 5
    assert served.outcome.seconds > 23.0


@pytest.mark.parametrize("seed", [203167, 207181, 209800, 210084])
def test_requests_of_slow_and_lost_ranks_are_not_stalled(seed):
    tried = attempt(draw(seed, 50, 0.4))
    assert tried.violations == []
    assert "Stalled" not in tried.statuses
