"""Serving on the model, as tests of more than one room run it: `configured` composes, `serve` runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.serve import ServeOptions, job, result, run, specs
from pdsim.compute.forward import Compute
from pdsim.config import Config
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm, Parallel, Side
from pdsim.results.record import Result
from pdsim.serving.deployment import Deployment
from pdsim.serving.requests import STAMPS, Request
from pdsim.serving.settings import Kv, SchedulerLimits, Workload
from pdsim.sim.faults import Faults
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome, RankSpec
from tests.support.configs import EIGHT, LLM, LOOPBACK, make_config
from tests.support.engines import engine

ONE = Side(tp=1)
ASIDE = Policy(queues=64, shard="room", metadata="batch")
"""Threads post beside the scheduler, a queue for each room, and metadata is in the last batch."""

GENERATED = Workload(arrivals="poisson", count=40, rate=200.0, input_mean=300, output_mean=12)
GQA = replace(LLM, heads=8, kv_heads=8, hidden=128)
MLA = replace(LLM, attention="mla", latent_dim=72)
POOL = Kv(page_size=16, pool=1 << 20)
QUIET = replace(EIGHT, host=replace(EIGHT.host, tcp_latency=0.0, tcp_rate=1e30))
"""Control messages take no time."""


def configured(
    prefill: Side = ONE, decode: Side = ONE, model: Llm = LLM, options: Mapping[str, Any] = {}, **changes: Any
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


class Served(NamedTuple):
    """What became of requests: *rows* are the router's, with times from when the first could arrive."""

    job: Deployment
    outcome: Outcome
    rows: list[dict[str, Any]]

    @property
    def statuses(self) -> list[str]:
        return [row["status"] for row in self.rows]

    def account(self, rank: str) -> tuple[int, int, int]:
        """Return the free, used and quarantined pages of a leader, which are all of them."""
        value = self.outcome.ranks[rank].value
        counts = value["free_pages"], value["used_pages"], value["quarantined_pages"]
        assert sum(counts) == value["pages"]
        return counts

    def at_rest(self, *ranks: str) -> bool:
        """Return whether all pages of these leaders are free and nothing is remembered of any room."""
        clean = [self.outcome.ranks[rank].value["open_rooms"] == 0 for rank in ranks]
        return all(clean) and all(self.account(rank)[1:] == (0, 0) for rank in ranks)


def simulate(
    requests: Sequence[Request],
    kill: Mapping[str, float] = {},
    restarts: Mapping[str, float] = {},
    *,
    leaves: Sequence[Sequence[float]] = (),
    change: Mapping[str, Mapping[str, Any]] = {},
    others: Sequence[RankSpec] = (),
    faults: Faults | None = None,
    limit: float = 60.0,
    options: Mapping[str, Any] = {},
    **changes: Any,
) -> Served:
    """Serve *requests* on the model with *changes* of `configured`, beside *others*.

    Ranks end by force when *kill* says and start again when *restarts* says; users *leave*, by number and seconds;
    *change* replaces entries of the job that a rank is given.
    """
    config = configured(options=options, **changes)
    what = job(config, ServeOptions(**options))
    ranks: list[RankSpec] = []
    for spec in specs(config, what, requests):
        arguments = {**spec.arguments, "job": {**spec.arguments["job"], **change.get(spec.name, {})}}
        if spec.name == "router":
            arguments["leaves"] = [list(leave) for leave in leaves]
        ranks.append(replace(spec, arguments=arguments))
    parts = {"memory": config.memory, "limit": limit, "collective": config.collective, "faults": faults}
    model = Model(config.hw, config.backend, **parts)
    outcome = model.run([*ranks, *others], kill, restarts)
    value = outcome.ranks["router"].value
    table = []
    for prefill, decode, nbytes, status, *stamps in value["rows"]:
        times = {name: at and at - value["start"] for name, at in zip(STAMPS, stamps, strict=False)}
        table.append({"prefill": prefill, "decode": decode, "nbytes": nbytes, "status": status, **times})
    return Served(what, outcome, table)


def tabled(
    requests: Sequence[Request], job_changes: Mapping[str, Any] = {}, options: Mapping[str, Any] = {}, **changes: Any
) -> tuple[list[dict[str, Any]], Deployment, Result]:
    """Serve *requests* by a job with *job_changes*; return a row of results of each, the job, and the result."""
    config = configured(options=options, **changes)
    what = replace(job(config, ServeOptions(**options)), **job_changes)
    outcome = Model(config.hw, config.backend).run(specs(config, what, requests))
    assert not [rank.error for rank in outcome.ranks.values() if rank.error]
    table = result(config, what, requests, outcome)
    return rows(table), what, table


class Killing:
    def __init__(self, model: Model, kill: Mapping[str, float]) -> None:
        self.model, self.kill = model, kill

    def run(self, ranks: list[RankSpec]) -> Outcome:
        return self.model.run(ranks, self.kill)


def serve(config: Config, kill: Mapping[str, float] = {}) -> Result:
    """Run *config* on the model; ranks end by force when *kill* says."""
    parts = {"memory": config.memory, "seed": config.seed, "collective": config.collective}
    model = Model(config.hw, config.backend, **parts)
    return run(config, Killing(model, kill) if kill else model, silent)


def values(result: Result) -> dict[str, Any]:
    return {metric.name: metric.value for metric in result.summary}


def rows(result: Result) -> list[dict[str, Any]]:
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
    leaders = [rank.value for name, rank in result.outcome.ranks.items() if name.endswith(".0") and rank.value]
    return sum(value["quarantined_pages"] for value in leaders)
