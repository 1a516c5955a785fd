# SPDX-License-Identifier: Apache-2.0
"""The deployments of given lists that fit a machine, and in closed form the most that each can serve under an SLO.

Nothing is simulated here: what closed form rules out need not be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf

import numpy as np

from experiments.serve import ServeOptions, check_fits, job
from pdsim.config import Config
from pdsim.config.rules import placement
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Parallel
from pdsim.results.record import percentile
from pdsim.serving.load import OfferedLoad, decode_rate, offered_load, prefill_iterations
from pdsim.serving.requests import Request, RequestTable


@dataclass(frozen=True, order=True)
class Shape:
    """A parallelism and a P:D ratio; without decode instances, colocated engines.

    The order is that of the fields, so the smallest parallelism comes first.
    """

    prefill_tp: int
    decode_tp: int
    prefill: int  # instances
    decode: int  # 0: the engines of prefill decode too
    prefill_hw: str = ""  # whose GPUs prefill has, as `Machine.prefill`

    @property
    def kind(self) -> tuple[bool, str]:
        """Return what deployments of different answers differ in: whether they are colocated, and prefill's GPUs."""
        return self.colocated, self.prefill_hw

    @property
    def colocated(self) -> bool:
        """Whether the same engines prefill and decode."""
        return not self.decode

    def __str__(self) -> str:
        if self.colocated:
            return f"{self.prefill} colocated tp{self.prefill_tp}"
        own = f" on {self.prefill_hw}" if self.prefill_hw else ""
        return f"{self.prefill}P tp{self.prefill_tp}{own} : {self.decode}D tp{self.decode_tp}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A shape that fits, how often the machine holds it, and what closed form says of one copy."""

    shape: Shape
    gpus: int  # of one copy
    prefill_gpus: int = 0  # of them, of the kind of `Shape.prefill_hw`
    copies: int  # that the machine holds; none has a node in part that another has, unless both fit it
    full: float  # requests a second at which the busier side has a load of 1
    bound: float  # requests a second that no copy exceeds under the SLO: `full`, or fewer for TPOT; 0 if alone fails
    ttft: float  # seconds, of a prompt alone: the percentile that must meet the SLO
    tpot: float  # seconds a token, of a request alone


def configured(config: Config, shape: Shape, router: str = "least_tokens") -> Config:
    """Return *config* as one copy of *shape* is served, on as many nodes as that needs.

    Pipeline, context and data parallelism stay.
    """
    prefill, decode = config.parallel.prefill, config.parallel.decode
    if shape.colocated:  # `colocated_places` makes engines of all GPUs of both sides
        spare = int(shape.prefill_tp == 1)
        parallel = Parallel(
            prefill=replace(prefill, tp=shape.prefill_tp, instances=max(1, shape.prefill - spare)),
            decode=replace(decode, tp=1, instances=1, pp=1, cp=1, dp=1, ep=1),
        )
        gpus, staging, deployment = shape.prefill_tp * shape.prefill, False, "colocated"
    else:
        parallel = Parallel(
            prefill=replace(prefill, tp=shape.prefill_tp, instances=shape.prefill),
            decode=replace(decode, tp=shape.decode_tp, instances=shape.decode),
        )
        unequal = shape.prefill_tp != shape.decode_tp and config.model.attention != "mla"
        staging = config.kv.staging or (unequal and config.engine.handoff == "push")
        gpus, deployment = parallel.prefill.gpus + parallel.decode.gpus, "disaggregated"
    each = config.hw.gpus
    nodes = -(-gpus // each)
    if shape.prefill_hw:
        nodes = -(-parallel.prefill.gpus // each) - (-parallel.decode.gpus // each)
    return replace(
        config,
        experiment=ServeOptions(router=router, deployment=deployment),
        hw=replace(config.hw, nodes=nodes, prefill=shape.prefill_hw),
        parallel=parallel,
        kv=replace(config.kv, staging=staging),
    )


def plans(
    config: Config, shapes: Sequence[Shape], requests: Sequence[Request], attainment: float
) -> tuple[list[Plan], dict[Shape, str]]:
    """Return the *shapes* that can serve *requests*, sorted, and why the others cannot.

    Ranks must have places, the model must be divisible, and each request must fit.
    """

    @cache
    def judged(prefill_tp: int, decode_tp: int, colocated: bool, hw: str) -> tuple[OfferedLoad, float, float, float]:
        # of one instance a side: its load, requests a second of decode for TPOT, and TTFT and TPOT of one alone
        engines = 1 + (colocated and prefill_tp == 1)
        one = configured(config, Shape(prefill_tp, decode_tp, engines, int(not colocated), hw))
        assert isinstance(one.experiment, ServeOptions)
        what = job(one, one.experiment)
        check_fits(what, requests)
        offered = offered_load(what, requests)
        if offered is None or not offered.highest:
            raise ConfigError(
                "experiment=capacity needs requests that arrive at different times; choose workload=poisson or a "
                "trace, and more than one request"
            )
        alone = np.array([sum(prefill_iterations(what, [request.input])) for request in requests])
        ttft = percentile(alone.tolist(), 100 * attainment) or float(alone.max())
        steps, tpot = decode_rate(what, requests, config.slo.tpot)
        for which, tenant in enumerate(config.workload.tenants):
            own = alone[RequestTable.of(requests).tenant == which]
            if len(own) and np.mean(own <= tenant.ttft) < attainment:
                steps = 0.0
        return offered, steps, ttft, tpot

    fitting, refused = [], {}
    for shape in sorted(shapes):
        if shape.colocated and shape.prefill_tp * shape.prefill == 1:
            refused[shape] = "a single engine of one GPU has no second side"
            continue
        own = configured(config, shape)
        gpus = (
            shape.prefill_tp * shape.prefill
            if shape.colocated
            else sum(side.gpus for side in (own.parallel.prefill, own.parallel.decode))
        )
        if own.hw.nodes > config.hw.nodes or gpus > config.hw.nodes * config.hw.gpus:
            refused[shape] = f"{gpus} GPUs are more GPUs than the machine has"
            continue
        try:
            if problem := next(placement(own), ""):
                raise ConfigError(problem)
            offered, steps, ttft, tpot = judged(shape.prefill_tp, shape.decode_tp, shape.colocated, shape.prefill_hw)
        except (ConfigError, ValueError) as error:
            refused[shape] = str(error)
            continue
        if shape.prefill_hw:
            parts = own.parallel.prefill.gpus, own.parallel.decode.gpus
            copies = _mixed_copies(parts, config.hw.nodes, config.hw.gpus)
            plan = _plan(config, shape, gpus, copies, offered, steps, ttft, tpot)
            fitting.append(replace(plan, prefill_gpus=parts[0]))
            continue
        copies = _copies(gpus, config.hw.nodes, config.hw.gpus)
        fitting.append(_plan(config, shape, gpus, copies, offered, steps, ttft, tpot))
    return fitting, refused


def _mixed_copies(parts: tuple[int, int], nodes: int, each: int) -> int:
    # *parts* of a copy are on nodes of different kinds; there are *nodes* in all
    def taken(copies: int) -> int:
        return sum(
            -(-copies // (each // gpus)) if gpus <= each else copies * -(-gpus // each)  # nodes of one kind
            for gpus in parts
        )

    return max(copies for copies in range(1, nodes * each + 1) if copies == 1 or taken(copies) <= nodes)


def _copies(gpus: int, nodes: int, each: int) -> int:
    return nodes * (each // gpus) if gpus <= each else nodes // -(-gpus // each)


def _plan(
    config: Config,
    shape: Shape,
    gpus: int,
    copies: int,
    offered: OfferedLoad,
    steps: float,
    ttft: float,
    tpot: float,
) -> Plan:
    if shape.colocated:  # what closed form says is of two engines of one GPU, or of one
        engines = shape.prefill / (2 if shape.prefill_tp == 1 else 1)
        full, bound = engines * offered.rate / offered.highest, engines * steps
    else:
        full = min(
            shape.prefill * offered.rate / offered.prefill if offered.prefill else inf,
            shape.decode * offered.rate / offered.decode if offered.decode else inf,
        )
        bound = shape.decode * steps
    if ttft > config.slo.ttft or tpot > config.slo.tpot:
        bound = 0.0
    return Plan(shape=shape, gpus=gpus, copies=copies, full=full, bound=min(full, bound), ttft=ttft, tpot=tpot)


def listed(
    prefill_tp: Sequence[int],
    decode_tp: Sequence[int],
    instances: Sequence[int],
    deployment: str,
    prefill_hw: Sequence[str] = (),
) -> Iterator[Shape]:
    """Yield every shape of the lists; colocated engines have the parallelism and the number of prefill's.

    Prefill has the GPUs of the machine or of one of *prefill_hw*.
    """
    if deployment != "colocated":
        kinds = "", *prefill_hw
        yield from (Shape(*parts) for parts in product(prefill_tp, decode_tp, instances, instances, kinds))
    if deployment != "disaggregated":
        yield from (Shape(tp, tp, count, 0) for tp, count in product(prefill_tp, instances))
