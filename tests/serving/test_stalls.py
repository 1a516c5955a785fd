"""When the router gives requests up as stalled: not while somebody works for them, or owes it an answer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from experiments.faults.scenario import attempt, draw
from experiments.serve import ServeOptions, job, specs
from pdsim.serving.workload import Request
from pdsim.sim.faults import Faults, Silence, Slow
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome
from tests.support.serving import GQA, ONE, configured

DEADLINE = 0.6
"""Seconds; the stall limit is four thirds of it, and twice the 10 ms that the request can take."""


def served(faults: Faults, kill: Mapping[str, float] = {}) -> tuple[str, Outcome]:
    """Return how a request ends that comes at 1 s."""
    config = configured(ONE, ONE, GQA)
    ranks = specs(config, job(config, ServeOptions(deadline=DEADLINE)), [Request(1.0, 100, 4)])
    outcome = Model(config.hw, config.backend, memory="tracked", limit=60.0, faults=faults).run(ranks, kill)
    status: str = outcome.ranks["router"].value["rows"][0][3]
    return status.partition(":")[0], outcome


def test_a_forward_that_takes_longer_than_the_stall_limit_is_waited_for():
    status, outcome = served(Faults(slow=(Slow("prefill0.0", 0.0, 9.0, 2000.0),)))
    assert status == "ok"
    assert outcome.seconds > 1.0 + 4 * DEADLINE  # most of it one forward


def test_the_loss_of_a_rank_that_was_silent_just_before_is_waited_for():
    silent = Faults(silences=(Silence("prefill0.0", 0.99, 1.45),))  # lost at 2.2, stalled at 2
    assert served(silent)[0] == "ok"
    assert served(silent, {"prefill0.0": 1.4501})[0] == "PeerLost"


@pytest.mark.parametrize("seed", [203167, 207181, 209800, 210084])
def test_requests_of_ranks_that_are_slow_silent_and_lost_are_not_stalled(seed: int):
    tried = attempt(draw(seed, 50, 0.4))
    assert tried.violations == []
    assert "Stalled" not in tried.statuses
