# SPDX-License-Identifier: Apache-2.0
"""What a scenario of `experiment=faults` is: a job, its requests, and everything that happens to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdsim.hardware.costs import Engine
from pdsim.hardware.machine import Machine
from pdsim.serving.deployment import Deployment
from pdsim.serving.workload import Request
from pdsim.sim.faults import Faults
from pdsim.transfer.job import RankSpec

__all__ = ["Scenario"]


@dataclass(frozen=True)
class Scenario:
    """What is served, and what goes wrong meanwhile."""

    seed: int
    job: Deployment
    specs: list[RankSpec]
    requests: list[Request]
    cancels: Mapping[int, float]
    faults: Faults
    kill: Mapping[str, float]
    restart: Mapping[str, float]
    limit: float
    machine: Machine
    engine: Engine
    text: str  # what it is, in one line
