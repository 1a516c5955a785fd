"""Serve a trace or generated requests: router, prefill and decode engines, KV handed over through the waist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments import _serve_report as report
from pdsim.config import Config
from pdsim.errors import ConfigError
from pdsim.results.record import Result
from pdsim.serving.compute import forward_time, kv_shape
from pdsim.serving.job import ROUTER, Job, rank_name
from pdsim.serving.placement import pages, places
from pdsim.serving.router import POLICIES
from pdsim.serving.workload import Request, load
from pdsim.transfer import Outcome, Place, RankSpec, Target
from pdsim.units import Seconds

__all__ = ["Options", "job", "run", "specs"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is particular to serving: `conf/experiment/serve.yaml`."""

    router: str = "least_tokens"  # or "round_robin"
    deadline: Seconds = 300.0  # of silence, after which a rank counts as gone

    def __post_init__(self) -> None:
        if self.router not in POLICIES:
            raise ValueError(f"experiment.router must be one of {', '.join(POLICIES)}, got {self.router!r}")
        if not self.deadline > 0:
            raise ValueError(f"experiment.deadline must be > 0, got {self.deadline}")


def run(config: Config, target: Target, progress: Callable[[float, str], None]) -> Result:
    """Serve the workload and return what became of every request.

    Raise a `ConfigError` before anything starts if the workload or the machine cannot do it.
    """
    options = Options(**{key: value for key, value in config.experiment.items() if key != "name"})
    requests = load(config.workload, config.seed, config.model.context)
    what = job(config, options)
    _check_fits(what, requests)
    progress(0.0, f"serving {len(requests)} requests")
    outcome = target.run(specs(config, what, requests))
    progress(1.0, "")
    return result(config, what, requests, outcome)


def job(config: Config, options: Options) -> Job:
    """Return what every rank is told."""
    parallel, shape = config.parallel, kv_shape(config.model)
    ranks = parallel.prefill.gpus + parallel.decode.gpus

    def pool(side: Any) -> int:
        return pages(side, config.model, shape, config.hw, config.kv, config.scheduler, ranks)

    return Job(
        prefill_tp=parallel.prefill.tp,
        prefill_instances=parallel.prefill.instances,
        decode_tp=parallel.decode.tp,
        decode_instances=parallel.decode.instances,
        shape=shape,
        page_size=config.kv.page_size,
        prefill_pages=pool(parallel.prefill),
        decode_pages=pool(parallel.decode),
        slots=2 * config.scheduler.decode_batch,
        chunk=config.scheduler.chunk,
        prefill_batch=config.scheduler.prefill_batch,
        decode_batch=config.scheduler.decode_batch,
        prefill_time=forward_time(config.model, config.hw, config.compute, parallel.prefill.tp),
        decode_time=forward_time(config.model, config.hw, config.compute, parallel.decode.tp),
        policy=options.router,
        deadline=options.deadline,
    )


def specs(config: Config, what: Job, requests: Sequence[Request]) -> list[RankSpec]:
    """Return the ranks of the job: the router on the first host, then prefill and decode."""
    plain = what.plain()
    arguments = {"job": plain, "requests": [list(request) for request in requests]}
    found = [RankSpec(ROUTER, "pdsim.serving.router:program", Place(), arguments)]
    prefill, decode = places(config.parallel, config.hw)
    for side, instances, where in (("prefill", what.prefills, prefill), ("decode", what.decodes, decode)):
        ranks = [(instance, tp_rank) for instance in instances for tp_rank in range(what.tp(instance))]
        for (instance, tp_rank), place in zip(ranks, where, strict=True):
            arguments = {"instance": instance, "tp_rank": tp_rank, "job": plain}
            name = rank_name(instance, tp_rank)
            found.append(RankSpec(name, f"pdsim.serving.{side}:program", place, arguments))
    return found


def result(config: Config, what: Job, requests: Sequence[Request], outcome: Outcome) -> Result:
    """Return what *outcome* says of *requests*."""
    router = outcome.ranks[ROUTER]
    value = router.value or {"start": 0.0, "rows": [["", "", 0, router.error or "lost", *[None] * 8]] * len(requests)}
    columns = report.columns(requests, value)
    failures = [f"{name}: {rank.error}" for name, rank in outcome.ranks.items() if rank.error]
    failures += [f"request {number}: {status}" for number, status in enumerate(columns["status"]) if status != "ok"]
    return Result(
        summary=report.metrics(columns, config.slo, outcome),
        tables=report.tables(columns, outcome),
        requests=columns,
        transfers=[record for rank in outcome.ranks.values() for record in rank.transfers],
        failures=failures,
        notes=report.notes(columns, what, outcome),
        outcome=outcome,
    )


def _check_fits(what: Job, requests: Sequence[Request]) -> None:
    sizes = sorted((what.prefill_tp, what.decode_tp))
    if sizes[1] % sizes[0]:
        raise ConfigError(
            f"parallel.prefill.tp={what.prefill_tp} and parallel.decode.tp={what.decode_tp}: one must be a multiple of "
            "the other, or the heads of a rank have no one place on the other side; use powers of two"
        )
    for number, request in enumerate(requests):
        for side, tokens, have in (
            ("prefill", request.input, what.prefill_pages),
            ("decode", request.input + request.output, what.decode_pages),
        ):
            if what.page_count(tokens) > have:
                raise ConfigError(
                    f"request {number} needs {what.page_count(tokens)} pages of {what.page_size} tokens on the {side} "
                    f"side, whose ranks have {have}; raise kv.pool, scheduler.memory_fraction or parallel.{side}.tp, "
                    "or choose a workload of shorter requests"
                )
