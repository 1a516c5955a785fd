"""The whole configuration of a run, as frozen dataclasses.  Nothing below the command line knows OmegaConf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from pdsim.calibration.definition import Calibration
from pdsim.costs import Collective, Engine, Jitter
from pdsim.hardware import Machine
from pdsim.kv.policy import Policy
from pdsim.serving.live import Live
from pdsim.serving.settings import Compute, Kv, Llm, Parallel, Scheduler, ServingEngine, Slo, Workload
from pdsim.units import Seconds

__all__ = ["Check", "Config", "Launch"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How ``target=real`` runs the processes of its ranks."""

    bind: str = "127.0.0.1"  # the address that ranks and their engines listen on; any but loopback can be reached
    silence: Seconds = 0.0  # of a rank, after which it is ended; 0: experiment.deadline, 300 s where there is none

    def __post_init__(self) -> None:
        try:
            ip_address(self.bind)
        except ValueError:
            raise ValueError(f"launch.bind must be an IP address such as 127.0.0.1, got {self.bind!r}") from None
        if not self.silence >= 0:
            raise ValueError(f"launch.silence must be >= 0, got {self.silence}")


@dataclass(frozen=True, kw_only=True)
class Check:
    """Which guards there are beside those that cannot be done without."""

    plausible: bool = True  # refuse quantities that nothing has: `pdsim.cli.plausible.BOUNDS`


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run: what to run (*experiment*), on what (*hw*, *backend*, *target*), and everything that it depends on."""

    target: str  # "model", "real" or "live"
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
    engine: ServingEngine = field(default_factory=ServingEngine)
    compute: Compute = field(default_factory=Compute)
    collective: Collective | None = None  # what groups of ranks gather with
    launch: Launch = field(default_factory=Launch)
    slo: Slo = field(default_factory=Slo)
    check: Check = field(default_factory=Check)
    live: Live = field(default_factory=Live)  # the servers of target=live
    host_factor: float = 1.0  # of the model: the host's part of a transfer, as a multiple of the calibrated one's
    jitter: Jitter = field(default_factory=Jitter)  # of the model
    memory: str = "timing"  # of the model: "timing" keeps sizes only, "tracked" also bytes
    seed: int = 0
    output: str = "results"

    def __post_init__(self) -> None:
        if self.target not in ("model", "real", "live"):
            raise ValueError(f"target must be one of model, real, live, got {self.target!r}")
        if self.target == "model" and self.launch != Launch():
            raise ValueError("launch is about processes, which target=model has none of; set target=real or leave it")
        if self.memory not in ("timing", "tracked"):
            raise ValueError(f"memory must be one of timing, tracked, got {self.memory!r}")
        if not 0.1 <= self.host_factor <= 10.0:
            raise ValueError(f"host_factor must be 0.1 to 10, got {self.host_factor}")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
        if not self.output:
            raise ValueError(f"output must name a folder, got {self.output!r}")
