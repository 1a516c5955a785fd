# SPDX-License-Identifier: Apache-2.0
"""Find the parallelism and the P:D ratio that serve the most requests of a workload under an SLO, on one machine.

Each deployment of the lists that fits is searched for the highest load at which a share of requests
meets `slo`; the search begins where a similar deployment ended.  What does not fit is skipped, with
the reason.

Shapes and the search are in `experiments.capacity.search`, what is printed in `experiments.capacity.ranking`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated

from experiments.capacity import ranking
from experiments.capacity.search import Capacity, Search, Shape, capacity, configured, feasible
from experiments.serve import ServeOptions
from pdsim.config import Config, ExperimentOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import PositiveInt
from pdsim.results.record import Result
from pdsim.serving.workload import Request, draw
from pdsim.transfer.job import Target

__all__ = ["TARGETS", "CapacityOptions", "run"]

Hundreds = Annotated[int, ">= 100"]
Inner = Annotated[float, "> 0 and < 1"]

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
    attainment: Inner = 0.9  # share of requests that must meet the SLO
    requests: Hundreds = 200  # of a probe
    finalists: PositiveInt = 5  # deployments that are searched again, with more requests and half the tolerance
    final_requests: Hundreds = 2000  # of a probe of those
    warmup: Annotated[float, ">= 0 and < 1"] = 0.1  # share of them, the first, that do not count
    tolerance: Inner = 0.08  # of the load, to which the search goes on
    start: Inner = 0.6  # load of the first probe of each parallelism
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
            for shape, _, best in ranking.ranked(by_shape, gpus)[: options.finalists]
        ]
        for chain, capacities in zip(finals, mapped(_Chain.capacities, finals), strict=True):
            by_shape |= dict(zip(chain.shapes, capacities, strict=True))
            progress(1.0, f"{chain.shapes[0]} searched again")
    return Result(
        summary=ranking.metrics(by_shape, refused, gpus),
        tables=ranking.tables(by_shape, refused, gpus, config, search),
        notes=list(drawn.notes),
    )


@contextmanager
def _mapping(processes: int) -> Iterator[Callable[..., Iterator[list[Capacity]]]]:
    if processes == 1:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # which ends them when it is left early
        yield pool.imap
