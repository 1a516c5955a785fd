"""How the tests of seeds run one on the model, and read what it says of one machine."""

from __future__ import annotations

from typing import Any

from experiments.reports.claims import as_rows
from pdsim.config import Config
from pdsim.core import plugins
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.sim.model import Model

__all__ = ["measure", "points"]


def measure(config: Config) -> Result:
    """Return what the seed that *config* names finds on the model."""
    model = Model(config.hw, config.backend, memory=config.memory, seed=config.seed, collective=config.collective)
    seed = plugins.resolve(plugins.EXPERIMENTS, config.experiment.name)
    result: Result = seed.run(config, model, silent)
    return result


def points(result: Result, claim: str, machine: str, target: str = "model") -> list[dict[str, Any]]:
    """Return what *result* says of *claim* on *machine*, and not what is committed of others; at least one point."""
    rows = as_rows(result, "Points")
    found = [row for row in rows if (row["claim"], row["machine"], row["target"]) == (claim, machine, target)]
    assert found
    return found
