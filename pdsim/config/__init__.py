# SPDX-License-Identifier: Apache-2.0
"""The whole configuration of a run, as frozen dataclasses.  Nothing below the command line knows OmegaConf.

`pdsim.config.loading.load` makes a `Config` from the mapping that was composed, once; from there to the rank
programs it stays what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Annotated, Any, Self

from pdsim.calibration.definition import Calibration
from pdsim.compute.forward import Compute
from pdsim.core import plugins
from pdsim.core.errors import ConfigError, instead
from pdsim.core.units import Seconds
from pdsim.hardware.costs import Collective, Engine, Jitter
from pdsim.hardware.machine import Machine
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm
from pdsim.models.parallel import Parallel
from pdsim.serving.settings import Cache, Kv, Live, SchedulerLimits, ServingEngine, Slo, Workload

__all__ = ["Check", "Config", "ExperimentOptions", "Launch", "Simulate"]


def _address(text: object) -> str:
    try:
        return str(ip_address(str(text)))
    except ValueError:
        raise ValueError(f"{text!r} is not an IP address such as 127.0.0.1") from None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How ``target=real`` runs the processes of its ranks.

    Only with ``target=real``.
    """

    # the address that ranks and their engines listen on; any but loopback can be reached
    bind: Annotated[str, _address] = "127.0.0.1"
    silence: Seconds = 0.0  # of a rank, after which it is ended; 0: experiment.deadline, 300 s where there is none


@dataclass(frozen=True, kw_only=True)
class Check:
    """Which guards there are beside those that cannot be done without."""

    plausible: bool = True  # refuse quantities that nothing has: `pdsim.config.rules.BOUNDS`


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """The options of one experiment; each experiment's module extends it with a frozen dataclass.

    Its fields are the keys below ``experiment`` of the configuration: their annotations give type and
    unit, their defaults are the only ones there are, and ``__post_init__`` raises a `ValueError` that begins with
    ``experiment.KEY`` for what no annotation can say.  ``name`` has the name that the module is registered under
    as its default.  A field ``deadline``, in seconds, is also the silence after which ``target=real`` ends a rank.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class OneWriteOptions(ExperimentOptions):
    ...     name: str = "one_write"
    ...     size: int = 1 << 20
    >>> OneWriteOptions(size=4096)
    OneWriteOptions(name='one_write', size=4096)
    """

    name: str  # of the experiment, as it is registered

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the options of *config*, which are of this class; raise a `ConfigError` if they are another's."""
        if not isinstance(config.experiment, cls):
            raise ConfigError(
                f"experiment={config.experiment.name} has options of its own, not those of {cls.__module__}; set "
                f"experiment={vars(cls)['name']}"
            )
        return config.experiment

    @property
    def silence(self) -> float | None:
        """Seconds of silence after which a rank counts as gone; None if the experiment does not say."""
        return getattr(self, "deadline", None)

    @staticmethod
    def class_for(values: Mapping[str, Any]) -> type[ExperimentOptions]:
        """Return the class of the options in *values*, by the name in them.

        Raise a `ConfigError` if no package registers that name, or if what it registers declares no such options.
        """
        name, known = values.get("name"), plugins.names(plugins.EXPERIMENTS)
        if name not in known:
            raise ConfigError(f"experiment.name={name} does not exist; {instead(str(name), known)}")
        module = plugins.resolve(plugins.EXPERIMENTS, name)
        classes = (each for each in vars(module).values() if isinstance(each, type))
        found = next((c for c in classes if issubclass(c, ExperimentOptions) and vars(c).get("name") == name), None)
        if found is None:
            raise ConfigError(
                f"experiment={name}: {plugins.target(plugins.EXPERIMENTS, name)} declares no options of that name; "
                f"give it a frozen dataclass that extends pdsim.config.ExperimentOptions, with "
                f"name: str = {name!r}"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """How ``target=model`` simulates; no choice here changes a result."""

    fold: Annotated[str, "one of auto, off"] = "auto"  # deprecated, without effect: every rank is simulated


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run: what to run (*experiment*), on what (*hw*, *backend*, *target*), and everything that it depends on.

    It is immutable; a variant is `dataclasses.replace`.  Numbers are in SI units.  *hw*, *backend*, *model*,
    *engine* and *collective* keep the source of each of their numbers.
    """

    target: Annotated[str, "one of model, real, live"]
    experiment: ExperimentOptions  # the options of the experiment that is run, with its name
    hw: Machine
    backend: Engine
    model: Llm
    parallel: Parallel
    # what it set is in hw and backend already; the rest says how good that is
    calibration: Calibration | None = None
    workload: Workload = field(default_factory=Workload)
    kv: Kv = field(default_factory=Kv)
    cache: Cache = field(default_factory=Cache)  # of prefixes
    policy: Policy = field(default_factory=Policy)  # of the backend, under whose key it is written
    scheduler: SchedulerLimits = field(default_factory=SchedulerLimits)
    engine: ServingEngine = field(default_factory=ServingEngine)
    compute: Compute = field(default_factory=Compute)
    collective: Collective | None = None  # what groups of ranks gather with
    launch: Launch = field(default_factory=Launch)
    slo: Slo = field(default_factory=Slo)
    check: Check = field(default_factory=Check)
    live: Live = field(default_factory=Live)  # the servers of target=live
    # of the model: the host's part of a transfer, as a multiple of the calibrated one's
    host_factor: Annotated[float, ">= 0.1 and <= 10"] = 1.0
    draw_host: bool = False  # of the model: draw `host_factor` from the seed, as the calibration's hosts differ
    jitter: Jitter = field(default_factory=Jitter)  # of the model
    simulate: Simulate = field(default_factory=Simulate)  # how the model does it
    # of the model: "timing" keeps sizes only, "tracked" also bytes
    memory: Annotated[str, "one of timing, tracked"] = "timing"
    # of the model: at how many instants, at least, the use of links and memories is kept; 0: never
    samples: Annotated[int, ">= 0 and <= 100000"] = 0
    # of the laws of simulation, in docs/reliability.md: "on" watches the run and fails it
    checks: Annotated[str, "one of on, off"] = "off"
    seed: Annotated[int, ">= 0 and < 9223372036854775808"] = 0
    output: str = "results"
