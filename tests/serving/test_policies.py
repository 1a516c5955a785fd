"""Scheduling and router policies: those that come with pdsim, and one that a package of somebody else brings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from experiments.serve import ServeOptions, job, specs
from pdsim.core.errors import ConfigError
from pdsim.serving import prefill
from pdsim.serving.policies import (
    FirstCome,
    Prompt,
    handoff_of,
    router_policy,
    scheduler_of,
)
from pdsim.serving.settings import ServingEngine
from pdsim.serving.workload import Request
from pdsim.sim.model import Model
from tests.support.serving import configured


@pytest.mark.parametrize("find", [scheduler_of, handoff_of])
def test_a_name_that_no_package_provides_is_refused_with_those_there_are(find):
    with pytest.raises(ConfigError, match=r"'nobodys'.*(fcfs|pull)"):
        find(ServingEngine(scheduler="nobodys", handoff="nobodys"))
    with pytest.raises(ConfigError, match="least_tokens"):
        router_policy("nobodys")


class Greedy(FirstCome):
    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int]:
        return 0, budget + 1


def test_a_policy_that_exceeds_the_step_ends_the_rank_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill, "scheduler_of", lambda engine: Greedy())
    config = configured(options={"deadline": 0.5})
    what = job(config, ServeOptions(deadline=0.5))
    outcome = Model(config.hw, config.backend, limit=5.0).run(specs(config, what, [Request(0.0, 600, 2)]))
    assert "engine.scheduler=fcfs gave 257 tokens of room 1, which has 600 left in a step of 256" in (
        outcome.ranks["prefill0.0"].error
    )
