"""The whole configuration of a run, as frozen dataclasses.  Nothing below the command line knows OmegaConf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdsim.calibration.definition import Calibration
from pdsim.costs import Collective, Engine
from pdsim.hardware import Machine
from pdsim.kv.policy import Policy
from pdsim.serving.settings import Compute, Kv, Llm, Parallel, Scheduler, Slo, Workload

__all__ = ["Check", "Config"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """Which guards there are beside those that cannot be done without."""

    plausible: bool = True  # refuse quantities that nothing has: `pdsim.cli.plausible.BOUNDS`


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run: what to run (*experiment*), on what (*hw*, *backend*, *target*), and everything that it depends on."""

    target: str  # "model" or "real"
    experiment: Mapping[str, Any]  # its name, and the options that `experiments.<name>.Options` types
    hw: Machine
    backend: Engine
    model: Llm
    parallel: Parallel
    calibration: Calibration | None = None  # what it set is in hw and backend already; the rest says how good that is
    workload: Workload = field(default_factory=Workload)
    kv: Kv = field(default_factory=Kv)
    policy: Policy = field(default_factory=Policy)  # of the backend, under whose key it is written
    scheduler: Scheduler = field(default_factory=Scheduler)
    compute: Compute = field(default_factory=Compute)
    collective: Collective | None = None  # what groups of ranks gather with
    slo: Slo = field(default_factory=Slo)
    check: Check = field(default_factory=Check)
    memory: str = "timing"  # of the model: "timing" keeps sizes only, "tracked" also bytes
    seed: int = 0
    output: str = "results"

    def __post_init__(self) -> None:
        if self.target not in ("model", "real"):
            raise ValueError(f"target must be one of model, real, got {self.target!r}")
        if self.memory not in ("timing", "tracked"):
            raise ValueError(f"memory must be one of timing, tracked, got {self.memory!r}")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
        if not self.output:
            raise ValueError(f"output must name a folder, got {self.output!r}")
