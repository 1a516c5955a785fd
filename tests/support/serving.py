"""Serving on the model, as tests of more than one room run it: `configured` composes, `serve` runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.serve import ServeOptions, run
from pdsim.compute.forward import Compute
from pdsim.config import Config
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm
from pdsim.models.parallel import Parallel, Side
from pdsim.results.record import Result
from pdsim.serving.settings import Kv, SchedulerLimits, Workload
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome, RankSpec
from tests.support.configs import EIGHT, LLM, LOOPBACK, make_config
from tests.support.engines import engine

__all__ = [
    "ASIDE",
    "GENERATED",
    "GQA",
    "MLA",
    "ONE",
    "POOL",
    "Killing",
    "configured",
    "on_loopback",
    "quarantined",
    "rows",
    "serve",
    "values",
]

ONE = Side(tp=1)
ASIDE = Policy(queues=64, shard="room", metadata="batch")
"""Threads post beside the scheduler, a queue for each room, and metadata is in the last batch."""

GENERATED = Workload(arrivals="poisson", count=40, rate=200.0, input_mean=300, output_mean=12)
GQA = replace(LLM, heads=8, kv_heads=8, hidden=128)
MLA = replace(LLM, attention="mla", latent_dim=72)
POOL = Kv(page_size=16, pool=1 << 20)


def configured(
    prefill: Side = ONE,
    decode: Side = ONE,
    model: Llm = LLM,
    options: Mapping[str, Any] = {},
    **changes: Any,
) -> Config:
    """Return a configuration of `serve` on eight modelled GPUs with *options* of the experiment and *changes*."""
    values = {
        "hw": EIGHT,
        "model": model,
        "parallel": Parallel(prefill=prefill, decode=decode),
        "experiment": ServeOptions(**options),
        "workload": GENERATED,
        "kv": POOL,
        "policy": ASIDE,
        "scheduler": SchedulerLimits(chunk=256, decode_batch=8),
    }
    return make_config(Path("unused"), **(values | changes))


class Killing:
    """A model on which ranks are ended by force."""

    def __init__(self, config: Config, kill: Mapping[str, float]) -> None:
        self.model = Model(config.hw, config.backend, memory=config.memory, seed=config.seed)
        self.kill = kill

    def run(self, ranks: list[RankSpec], kill: Mapping[str, float] = {}) -> Outcome:
        return self.model.run(ranks, self.kill)


def serve(config: Config, kill: Mapping[str, float] = {}) -> Result:
    """Run *config* on the model; ranks end by force when *kill* says."""
    return run(config, Killing(config, kill), silent)


def values(result: Result) -> dict[str, Any]:
    """Return the metrics of *result* by name."""
    return {metric.name: metric.value for metric in result.summary}


def rows(result: Result) -> list[dict[str, Any]]:
    """Return the requests of *result*, a row each."""
    columns = result.requests
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def on_loopback(
    name: str, prefill: Side = ONE, decode: Side = ONE, model: Llm = GQA, deadline: float = 30.0, **changes: Any
) -> Config:
    """Return a configuration of `serve` with *changes* on the real engine *name*, on the memory of this host."""
    settings = {
        "target": "real",
        "hw": LOOPBACK,
        "backend": engine(name),
        "policy": Policy(),
        "workload": replace(GENERATED, count=4, input_mean=90, output_mean=3),
        "scheduler": SchedulerLimits(chunk=64, decode_batch=4),
        "compute": Compute(scale=0.1),
    }
    return configured(prefill, decode, model, {"deadline": deadline}, **(settings | changes))


def quarantined(result: Result) -> int:
    """Return the pages that leaders of *result* had in quarantine at the end."""
    assert result.outcome is not None
    leaders = [rank.value for name, rank in result.outcome.ranks.items() if name.endswith(".0") and rank.value]
    return sum(value["quarantined_pages"] for value in leaders)
