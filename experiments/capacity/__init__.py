# SPDX-License-Identifier: Apache-2.0
"""Find the parallelism and the P:D ratio that serve the most requests of a workload under an SLO, on one machine.

Each deployment of the lists that fits is searched (`search`) for the highest load at which a share of requests meets
`slo`; the search begins where a similar deployment ended.  What does not fit is skipped, with the reason.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, NamedTuple

from experiments.capacity.search import Capacity, Probe, Shape, capacity, configured, feasible
from experiments.jobs import Columns, tabulated
from experiments.serve import ServeOptions
from pdsim.config import Config, ExperimentOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import PositiveInt, format_time
from pdsim.results.record import Metric, Result, Table, pareto
from pdsim.serving.workload import Request, draw
from pdsim.transfer.job import Target

TARGETS = ("model",)
"""Where the experiment can run."""


@dataclass(frozen=True, kw_only=True)
class CapacityOptions(ExperimentOptions):
    """What is compared and how finely.

    More *requests* narrow the interval of each probe; they should be hundreds.
    """

    name: str = "capacity"
    # tensor parallelism of prefill instances
    prefill_tp: Annotated[tuple[PositiveInt, ...], "non-empty"] = (1, 2, 4, 8)
    decode_tp: Annotated[tuple[PositiveInt, ...], "non-empty"] = (1, 2, 4, 8)  # and of decode instances
    # of either side, in every combination that fits
    instances: Annotated[tuple[PositiveInt, ...], "non-empty"] = (1, 2, 3, 4, 5, 6, 7)
    attainment: Annotated[float, "> 0 and < 1"] = 0.9  # share of requests that must meet the SLO
    requests: Annotated[int, ">= 100"] = 200  # of a probe
    finalists: PositiveInt = 5  # deployments that are searched again, with more requests and half the tolerance
    final_requests: Annotated[int, ">= 100"] = 2000  # of a probe of those
    warmup: Annotated[float, ">= 0 and < 1"] = 0.1  # share of them, the first, that do not count
    tolerance: Annotated[float, "> 0 and < 1"] = 0.08  # of the load, to which the search goes on
    start: Annotated[float, "> 0 and < 1"] = 0.6  # load of the first probe of each parallelism
    router: str = "least_tokens"  # as `experiment.router` of experiment=serve
    processes: PositiveInt = 2  # that search deployments at the same time


@dataclass(frozen=True)
class _Chain:
    """Deployments of one parallelism, in order: each search begins where the one before ended."""

    config: Config
    options: CapacityOptions
    shapes: tuple[Shape, ...]
    requests: tuple[Request, ...]
    start: float  # load of the first probe
    final: bool = False  # half the tolerance, and loads that surely hold and surely fail

    def capacities(self) -> dict[Shape, Capacity]:
        capacities: dict[Shape, Capacity] = {}
        options, start = self.options, self.start
        tolerance = options.tolerance / (2 if self.final else 1)
        for shape in self.shapes:
            own, how = configured(self.config, shape), (options.attainment, options.warmup, tolerance, start)
            answer = capacity(own, self.requests, ServeOptions(router=options.router), *how, confident=self.final)
            capacities[shape] = answer
            start = answer.best.load if answer.best else start
        return capacities


def run(config: Config, _: Target, progress: ShowProgress) -> Result:
    """Search every deployment that fits and return the best, all of them, and the Pareto front.

    First every shape is searched coarsely, in chains of one parallelism; then the best *finalists* again, with more
    requests and half the tolerance.  Chains are independent and each is searched in order by one process, so the
    result does not depend on the number of processes.  Raise a `ConfigError` if no deployment fits.
    """
    options = CapacityOptions.of(config)
    workload = replace(config.workload, load=0.0)
    most = max(options.requests, options.final_requests)
    drawn = draw(replace(workload, count=min(most, workload.count or most)), config.seed, config.model.context)
    requests = tuple(drawn.requests)
    gpus = config.hw.nodes * config.hw.gpus
    lists = (options.prefill_tp, options.decode_tp, options.instances)
    shapes, refused = feasible(config, *lists, requests)
    if not shapes:
        raise ConfigError(
            f"no deployment of experiment.prefill_tp, decode_tp and instances can serve model={config.model.name} "
            f"on hw={config.hw.name}: {next(iter(refused.values()))}"
        )
    chains = [
        _Chain(config, options, tuple(group), requests[: options.requests], options.start)
        for _, group in groupby(shapes, key=lambda shape: (shape.prefill_tp, shape.decode_tp))
    ]
    by_shape: dict[Shape, Capacity] = {}
    with _mapping(options.processes) as mapped:
        for capacities in mapped(_Chain.capacities, chains):
            by_shape |= capacities
            progress(len(by_shape) / len(shapes), f"{len(by_shape)} of {len(shapes)} deployments searched")
        finals = [
            _Chain(config, options, (each.shape,), requests, each.probe.load, final=True)
            for each in _ranked(by_shape, gpus)[: options.finalists]
        ]
        for capacities in mapped(_Chain.capacities, finals):
            by_shape |= capacities
            progress(1.0, f"{next(iter(capacities))} searched again")
    ranked = _ranked(by_shape, gpus)
    return Result(
        served=True,
        summary=_metrics(ranked, by_shape, refused),
        tables=_tables(ranked, by_shape, refused, gpus, config, options.attainment),
        notes=list(drawn.notes),
    )


@contextmanager
def _mapping(processes: int) -> Iterator[Callable[..., Iterator[dict[Shape, Capacity]]]]:
    if processes == 1:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # which ends them when it is left early
        yield pool.imap


class Point(NamedTuple):
    """A probe of a deployment: a machine of *gpus* GPUs holds as many copies as fit, and the other GPUs are idle."""

    shape: Shape
    capacity: Capacity
    probe: Probe
    gpus: int

    @property
    def copies(self) -> int:
        """How many the machine holds."""
        return self.gpus // self.shape.gpus

    @property
    def rate(self) -> float:
        """Requests a second of all copies."""
        return self.probe.rate * self.copies

    @property
    def tokens(self) -> float:
        """Output tokens a second, over all GPUs of the machine."""
        return self.probe.tokens * self.copies / self.gpus

    def rate_at(self, load: float) -> float:
        """Return `rate` at another *load*."""
        return self.rate / self.probe.load * load


def _ranked(capacities: Mapping[Shape, Capacity], gpus: int) -> list[Point]:
    # Those that meet the SLO at some load, most requests first, equal ones by shape.
    able = [Point(shape, one, one.best, gpus) for shape, one in capacities.items() if one.best is not None]
    return sorted(able, key=lambda point: (-point.rate, point.shape))


def front(capacities: Mapping[Shape, Capacity], gpus: int, attainment: float) -> list[Point]:
    """Return the probes that meet the SLO and that no other beats in throughput, TTFT and TPOT at once.

    Better means more output tokens for each GPU, a shorter TTFT and a shorter TPOT, both at the 90th percentile.
    """
    held = [
        Point(shape, one, probe, gpus)
        for shape, one in sorted(capacities.items())
        for probe in one.probes
        if probe.holds(attainment) and probe.ttft is not None and probe.tpot is not None
    ]
    return pareto(held, lambda point: (-point.tokens, point.probe.ttft or 0.0, point.probe.tpot or 0.0))


def _metrics(
    ranked: Sequence[Point], capacities: Mapping[Shape, Capacity], refused: Mapping[Shape, str]
) -> list[Metric]:
    best = ranked[0] if ranked else None
    load, tokens = (
        "offered load of its busier side there",
        "output tokens a second there, over all GPUs of the machine",
    )
    return [
        Metric("deployments", len(capacities), "deployments that fit the machine and were searched"),
        Metric("deployments_within_slo", len(ranked), "of them, those that meet the SLO at some load"),
        Metric("deployments_skipped", len(refused), "of the lists, those that do not fit"),
        Metric("probes", sum(len(one.probes) for one in capacities.values()), "simulations"),
        Metric("capacity_rate", best and best.rate, "requests a second of the best deployment"),
        Metric("capacity_load", best and best.probe.load, load),
        Metric("capacity_tokens_per_gpu", best and best.tokens, tokens),
    ]


_COLUMNS: Columns[Point] = {
    "deployment": ("prefill and decode instances and their tensor parallelism", lambda point: str(point.shape)),
    "copies": ("that the machine holds", lambda point: point.copies),
    "rate": ("requests a second of all copies", lambda point: point.rate),
    "tokens/s/GPU": ("output tokens, over all GPUs of the machine", lambda point: point.tokens),
    "load": ("of the busier side", lambda point: point.probe.load),
    "95 % from": ("of the load: the highest that holds", lambda point: point.capacity.low),
    "95 % to": ("the lowest that fails, or 1", lambda point: point.capacity.high),
    "TTFT p90 s": ("", lambda point: point.probe.ttft),
    "TPOT p90 s": ("", lambda point: point.probe.tpot),
    "attainment": ("share of requests that meet the SLO", lambda point: point.probe.attainment or None),
}


def _tables(
    ranked: Sequence[Point],
    capacities: Mapping[Shape, Capacity],
    refused: Mapping[Shape, str],
    gpus: int,
    config: Config,
    attainment: float,
) -> list[Table]:
    none = Probe(load=0.0, rate=0.0, tokens=0.0, attainment=0.0, half=0.0, ttft=None, tpot=None, requests=0)
    unable = [Point(shape, one, none, gpus) for shape, one in sorted(capacities.items()) if one.best is None]
    columns = {name: _COLUMNS[name] for name in ("deployment", "tokens/s/GPU", "TTFT p90 s", "TPOT p90 s", "load")}
    reasons = Counter(
        "more GPUs than the machine has" if "GPUs" in text else text.rpartition("; ")[0].split(": ", 1)[-1]
        for text in refused.values()
    )
    skipped = [[count, reason] for reason, count in reasons.items()]
    slo = f"TTFT <= {format_time(config.slo.ttft)} and TPOT <= {format_time(config.slo.tpot)}"
    where = f"{config.model.name} on {config.hw.name}"
    answer = [
        ["searched", f"{len(capacities)} deployments searched, {len(refused)} skipped; {where}"],
        ["SLO", f"{slo} for {attainment:.0%} of requests"],
        *_answer(ranked),
    ]
    return [
        Table("Answer", {"": "", " ": ""}, answer),
        tabulated("Deployments", _COLUMNS, [*ranked, *unable]),
        tabulated("Pareto front", columns, front(capacities, gpus, attainment)),
        Table("Skipped", {"deployments": "", "because": ""}, skipped),
    ]


def _answer(ranked: Sequence[Point]) -> Iterator[list[str]]:
    # The best deployment, its interval, and how many come close.
    if not ranked:
        yield ["best", "none: the SLO fails at any load; relax slo, or take a faster machine"]
        return
    best, probe = ranked[0], ranked[0].probe
    low, high = (best.rate_at(load) for load in (best.capacity.low, best.capacity.high))
    share = f"{probe.attainment:.1%} +- {probe.half:.1%} of {probe.requests} requests at load {probe.load:.2f}"
    times = ("-" if seconds is None else format_time(seconds) for seconds in (probe.ttft, probe.tpot))
    yield ["best", f"{best.shape}, {best.copies} {'copy' if best.copies == 1 else 'copies'} on {best.gpus} GPUs"]
    yield ["serves", f"{best.rate:.3g} requests/s, {best.tokens:.4g} tokens/s/GPU out"]
    yield ["95 % interval", f"{low:.3g} to {high:.3g} requests/s"]
    yield ["attainment", share]
    yield ["latency", "TTFT p90 {}, TPOT p90 {}".format(*times)]
    if len(ranked) > 1:
        yield ["next", f"{ranked[1].shape}: {ranked[1].rate:.3g} requests/s"]
    close = [other for other in ranked[1:] if other.rate_at(other.capacity.high) >= best.rate]
    yield ["not told apart", f"{len(close)} others, whose intervals reach the best"]
