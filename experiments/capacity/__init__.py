# SPDX-License-Identifier: Apache-2.0
"""Find the parallelism and the P:D ratio that serve the most requests of a workload under an SLO, on one machine.

Each deployment of the lists that fits is searched (`search`) for the highest load at which a share of requests meets
`slo`; the search begins where a similar deployment ended.  What does not fit is skipped, with the reason.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any

from experiments.capacity.search import Capacity, Probe, Search, Shape, capacity, configured, feasible
from experiments.serve import ServeOptions
from pdsim.config import Config, ExperimentOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import PositiveInt, format_time
from pdsim.results.record import Metric, Result, Table
from pdsim.serving.workload import Request, draw
from pdsim.transfer.job import Target

__all__ = ["TARGETS", "CapacityOptions", "run"]


TARGETS = ("model",)
"""Where the experiment can run."""


@dataclass(frozen=True, kw_only=True)
class CapacityOptions(ExperimentOptions):
    """What is compared and how finely.

    Raise a `ValueError` that names the key for values out of range.  More *requests* narrow the interval of each
    probe; they should be hundreds.
    """

    name: str = "capacity"
    prefill_tp: tuple[int, ...] = (1, 2, 4, 8)  # tensor parallelism of prefill instances
    decode_tp: tuple[int, ...] = (1, 2, 4, 8)  # and of decode instances
    instances: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)  # of either side, in every combination that fits
    attainment: Annotated[float, "> 0 and < 1"] = 0.9  # share of requests that must meet the SLO
    requests: Annotated[int, ">= 100"] = 200  # of a probe
    finalists: PositiveInt = 5  # deployments that are searched again, with more requests and half the tolerance
    final_requests: Annotated[int, ">= 100"] = 2000  # of a probe of those
    warmup: Annotated[float, ">= 0 and < 1"] = 0.1  # share of them, the first, that do not count
    tolerance: Annotated[float, "> 0 and < 1"] = 0.08  # of the load, to which the search goes on
    start: Annotated[float, "> 0 and < 1"] = 0.6  # load of the first probe of each parallelism
    router: str = "least_tokens"  # as `experiment.router` of experiment=serve
    processes: PositiveInt = 2  # that search deployments at the same time

    def __post_init__(self) -> None:
        for name in ("prefill_tp", "decode_tp", "instances"):
            if min(getattr(self, name), default=0) < 1:
                raise ValueError(f"experiment.{name} must have values >= 1, got {list(getattr(self, name))}")
        self.serving()

    def serving(self) -> ServeOptions:
        """Return the options of each probe."""
        return ServeOptions(router=self.router)

    def search(self) -> Search:
        """Return how each deployment is searched."""
        return Search(attainment=self.attainment, warmup=self.warmup, tolerance=self.tolerance)


@dataclass(frozen=True)
class _Chain:
    """Deployments of one parallelism, in order: each search begins where the one before ended."""

    config: Config
    options: CapacityOptions
    shapes: tuple[Shape, ...]
    requests: tuple[Request, ...]
    search: Search
    start: float  # load of the first probe

    def capacities(self) -> list[Capacity]:
        capacities: list[Capacity] = []
        start = self.start
        for shape in self.shapes:
            own = configured(self.config, shape)
            capacities.append(capacity(own, self.requests, self.options.serving(), self.search, start))
            if capacities[-1].best is not None:
                start = capacities[-1].best.load
        return capacities


def run(config: Config, _: Target, progress: ShowProgress) -> Result:
    """Search every deployment that fits and return the best, all of them, and the Pareto front.

    First every shape is searched coarsely, in chains of one parallelism; then the best *finalists*
    again, with more requests and half the tolerance.  The result does not depend on the number of
    processes: chains are independent, and each is searched in order by one process.

    Raises:
        ConfigError: No deployment fits; with the reason of the first.
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
    search = options.search()
    chains = [
        _Chain(config, options, tuple(group), requests[: options.requests], search, options.start)
        for _, group in groupby(shapes, key=lambda shape: (shape.prefill_tp, shape.decode_tp))
    ]
    by_shape: dict[Shape, Capacity] = {}
    with _mapping(options.processes) as mapped:
        for chain, capacities in zip(chains, mapped(_Chain.capacities, chains), strict=True):
            by_shape |= dict(zip(chain.shapes, capacities, strict=True))
            progress(len(by_shape) / len(shapes), f"{len(by_shape)} of {len(shapes)} deployments searched")
        finer = replace(search, tolerance=search.tolerance / 2, confident=True)
        finals = [
            _Chain(config, options, (shape,), requests, finer, best.load)
            for shape, _, best in ranked(by_shape, gpus)[: options.finalists]
        ]
        for chain, capacities in zip(finals, mapped(_Chain.capacities, finals), strict=True):
            by_shape |= dict(zip(chain.shapes, capacities, strict=True))
            progress(1.0, f"{chain.shapes[0]} searched again")
    return Result(
        summary=metrics(by_shape, refused, gpus),
        tables=tables(by_shape, refused, gpus, config, search),
        notes=list(drawn.notes),
    )


@contextmanager
def _mapping(processes: int) -> Iterator[Callable[..., Iterator[list[Capacity]]]]:
    if processes == 1:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # which ends them when it is left early
        yield pool.imap


# --- the answer ----------------------------------------------------------------------------------------------------

Found = Mapping[Shape, Capacity]


def _rate(shape: Shape, probe: Probe, gpus: int) -> float:
    # A shape is simulated once, and the machine holds as many copies of it as fit; GPUs left over count, too.
    return probe.rate * (gpus // shape.gpus)


def _tokens(shape: Shape, probe: Probe, gpus: int) -> float:
    return probe.tokens * (gpus // shape.gpus) / gpus


def ranked(capacities: Found, gpus: int) -> list[tuple[Shape, Capacity, Probe]]:
    """Return the deployments that meet the SLO at some load, the one that serves most requests first.

    Requests a second are those of as many copies of the shape as the machine holds; equal ones are ordered by shape.
    """
    able = [(shape, one, one.best) for shape, one in capacities.items() if one.best is not None]
    return sorted(able, key=lambda entry: (-_rate(entry[0], entry[2], gpus), entry[0]))


def front(capacities: Found, gpus: int, attainment: float) -> list[tuple[Shape, Probe]]:
    """Return the probes that hold, of which no other is better in throughput, TTFT and TPOT at once.

    Better means more output tokens for each GPU, a shorter TTFT and a shorter TPOT, both at the 90th percentile.
    """
    points = [
        (shape, probe)
        for shape, one in capacities.items()
        for probe in one.probes
        if probe.holds(attainment) and probe.ttft is not None and probe.tpot is not None
    ]

    def values(point: tuple[Shape, Probe]) -> tuple[float, float, float]:
        shape, probe = point
        assert probe.ttft is not None
        assert probe.tpot is not None
        return -_tokens(shape, probe, gpus), probe.ttft, probe.tpot

    keyed = sorted(((values(point), point) for point in points), key=lambda entry: (entry[0], entry[1][0]))
    kept: list[tuple[tuple[float, float, float], tuple[Shape, Probe]]] = []
    for value, point in keyed:  # only one that comes before can be better: its throughput is no lower
        if not any(other[1] <= value[1] and other[2] <= value[2] for other, _ in kept):
            kept.append((value, point))
    return [point for _, point in kept]


def metrics(capacities: Found, refused: Mapping[Shape, str], gpus: int) -> list[Metric]:
    """Return the summary: how many deployments and simulations, and what the best deployment does.

    The last three are None if no deployment meets the SLO.
    """
    order = ranked(capacities, gpus)
    best = order[0] if order else None
    return [
        Metric("deployments", len(capacities), "deployments that fit the machine and were searched"),
        Metric("deployments_within_slo", len(order), "of them, those that meet the SLO at some load"),
        Metric("deployments_skipped", len(refused), "of the lists, those that do not fit"),
        Metric("probes", sum(len(one.probes) for one in capacities.values()), "simulations"),
        Metric(
            "capacity_rate",
            _rate(best[0], best[2], gpus) if best else None,
            "requests a second of the best deployment",
        ),
        Metric("capacity_load", best[2].load if best else None, "offered load of its busier side there"),
        Metric(
            "capacity_tokens_per_gpu",
            _tokens(best[0], best[2], gpus) if best else None,
            "output tokens a second there, over all GPUs of the machine",
        ),
    ]


def tables(
    capacities: Found, refused: Mapping[Shape, str], gpus: int, config: Config, search: Search
) -> list[Table]:
    """Return the answer, all deployments in order of it, the Pareto front, and what was skipped."""
    order = ranked(capacities, gpus)
    heads = {
        "deployment": "prefill and decode instances and their tensor parallelism",
        "copies": "that the machine holds",
        "rate": "requests a second of all copies",
        "tokens/s/GPU": "output tokens, over all GPUs of the machine",
        "load": "of the busier side",
        "95 % from": "of the load: the highest that holds",
        "95 % to": "the lowest that fails, or 1",
        "TTFT p90 s": "",
        "TPOT p90 s": "",
        "attainment": "share of requests that meet the SLO",
    }
    rows = [_row(shape, one, probe, gpus) for shape, one, probe in order]
    rows += [
        [str(shape), gpus // shape.gpus, 0.0, 0.0, 0.0, one.low, one.high, None, None, None]
        for shape, one in sorted(capacities.items())
        if one.best is None
    ]
    pareto = [
        [str(shape), _tokens(shape, probe, gpus), probe.ttft, probe.tpot, probe.load]
        for shape, probe in front(capacities, gpus, search.attainment)
    ]
    reasons: dict[str, int] = {}
    for text in refused.values():
        reasons[_reason(text)] = reasons.get(_reason(text), 0) + 1
    return [
        Table("Answer", {"": "", " ": ""}, _answer(order, capacities, refused, gpus, config, search)),
        Table("Deployments", heads, rows),
        Table(
            "Pareto front",
            {"deployment": "", "tokens/s/GPU": "output", "TTFT p90 s": "", "TPOT p90 s": "", "load": "of the probe"},
            pareto,
        ),
        Table("Skipped", {"deployments": "", "because": ""}, [[count, reason] for reason, count in reasons.items()]),
    ]


def _reason(text: str) -> str:
    return text.rpartition("; ")[0].split(": ", 1)[-1] if "GPUs" not in text else "more GPUs than the machine has"


def _row(shape: Shape, one: Capacity, probe: Probe, gpus: int) -> list[Any]:
    numbers = (_rate(shape, probe, gpus), _tokens(shape, probe, gpus), probe.load, one.low, one.high)
    return [str(shape), gpus // shape.gpus, *numbers, probe.ttft, probe.tpot, probe.attainment]


def _answer(
    order: list[tuple[Shape, Capacity, Probe]],
    capacities: Found,
    refused: Mapping[Shape, str],
    gpus: int,
    config: Config,
    search: Search,
) -> list[list[str]]:
    # What was searched, the best deployment, its interval, and how many come close.
    slo = f"TTFT <= {format_time(config.slo.ttft)} and TPOT <= {format_time(config.slo.tpot)}"
    searched = (
        f"{len(capacities)} deployments searched, {len(refused)} skipped; {config.model.name} on {config.hw.name}"
    )
    lines = [["searched", searched], ["SLO", f"{slo} for {search.attainment:.0%} of requests"]]
    if not order:
        return [*lines, ["best", "none: the SLO fails at any load; relax slo, or take a faster machine"]]
    shape, one, probe = order[0]
    scale = _rate(shape, probe, gpus) / probe.load
    copies = gpus // shape.gpus
    lines += [
        ["best", f"{shape}, {copies} {'copy' if copies == 1 else 'copies'} on {gpus} GPUs"],
        [
            "serves",
            f"{_rate(shape, probe, gpus):.3g} requests/s, {_tokens(shape, probe, gpus):.4g} tokens/s/GPU out",
        ],
        ["95 % interval", f"{one.low * scale:.3g} to {one.high * scale:.3g} requests/s"],
        [
            "attainment",
            f"{probe.attainment:.1%} +- {probe.half:.1%} of {probe.requests} requests at load {probe.load:.2f}",
        ],
        ["latency", f"TTFT p90 {_time(probe.ttft)}, TPOT p90 {_time(probe.tpot)}"],
    ]
    close = [other for other in order[1:] if _high(other, gpus) >= _rate(shape, probe, gpus)]
    if len(order) > 1:
        second, _, there = order[1]
        lines.append(["next", f"{second}: {_rate(second, there, gpus):.3g} requests/s"])
    lines.append(["not told apart", f"{len(close)} others, whose intervals reach the best"])
    return lines


def _high(entry: tuple[Shape, Capacity, Probe], gpus: int) -> float:
    shape, one, probe = entry
    return _rate(shape, probe, gpus) / probe.load * one.high


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_time(seconds)
