# SPDX-License-Identifier: Apache-2.0
"""Deployments that fit a machine, the most that each can serve under an SLO, and at which load it no longer does.

`plans` bounds them in closed form; `Search` simulates, at one rate or until it knows the load.

A load is what is offered over what the busier side can do, in closed form, so deployments of any size are searched
between 0 and 1.  A probe holds if the share of requests that met the SLO reaches the target; it is sure if the
target lies outside the share's interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import fsum, inf
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.serve import ServeOptions, check_fits, job, on_model
from experiments.serve.tables import within
from pdsim.config import Config
from pdsim.config.rules import placement
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Parallel
from pdsim.results.record import Result, half_width, percentile
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
    """A shape that fits, the copies that the machine holds, and the closed-form bounds of one copy."""

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
        alone = np.array([fsum(prefill_iterations(what, [request.input])) for request in requests])
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
        total = config.hw.nodes * config.hw.gpus
        if own.hw.nodes > config.hw.nodes or gpus > total:
            kinds = " on nodes of two kinds" if shape.prefill_hw else ""
            refused[shape] = f"more GPUs{kinds} than the {total} of hw.nodes={config.hw.nodes}; raise hw.nodes"
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


LEAST = 0.01
"""The lowest load that is probed: an SLO that fails there is missed by single requests."""

_WIDER = 1.06
"""From one probe to the next, away from the answer, until the interval tells; squared with every step."""

_STRIDE = 1.2
"""From one probe to the next until one holds and one fails; squared with every step."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The SLO attainment of one copy at one load, simulated; requests of the warm-up are left out."""

    load: float  # of the busier side
    rate: float  # requests a second that were offered
    tokens: float  # output tokens a second that they ask for
    attainment: float  # share of requests that meet the SLO, 0 to 1; with tenants the lowest of theirs
    within_ttft: float  # share that meet its TTFT
    within_tpot: float  # share that meet its TPOT
    half: float  # of the attainment's 95 % interval, from batch means, since neighbouring requests are alike
    ttft: float | None  # seconds, 90th percentile of those that got a first token
    tpot: float | None  # seconds, 90th percentile likewise
    requests: int  # simulated, the warm-up included
    met: str  # a bit for each request in hexadecimal digits, set if it met the SLO; the last may be padding
    tenants: dict[str, float] = field(default_factory=dict)  # share of each one's requests that meet its SLO

    def holds(self, target: float) -> bool:
        """Return whether the share is at least *target*."""
        return self.attainment >= target

    def sure(self, target: float) -> bool:
        """Return whether *target* lies outside the interval."""
        return abs(self.attainment - target) >= self.half


def paired(one: Probe, other: Probe, warmup: float) -> tuple[float, float] | None:
    """Return the difference in attainment of *one* and *other* on the same requests, and half its 95 % interval.

    None if they are of different numbers of requests, or of too few.
    """
    if one.requests != other.requests:
        return None
    bits = [np.unpackbits(np.frombuffer(bytes.fromhex(each.met), np.uint8)) for each in (one, other)]
    first, last = int(warmup * one.requests), one.requests
    more = bits[0][first:last].astype(np.float64) - bits[1][first:last]
    half = half_width(more, None)
    return None if half is None else (float(more.mean()), half)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The capacity of one deployment: the highest load that holds, and the interval of the true one."""

    best: Probe | None  # None: the SLO fails at any load
    low: float  # the highest load that surely holds, 95 %
    high: float  # the lowest that surely fails; 1 by the closed form
    probes: tuple[Probe, ...]


def bisect(
    measure: Callable[[float], Probe],
    target: float,
    tolerance: float,
    start: float,
    *,
    known: Sequence[Probe] = (),
    confident: bool = False,
) -> Capacity:
    """Return the highest load below 1 at which *measure*, a simulation, holds, within a share *tolerance*.

    *known* are probes that hold.  The search strides from *start* until it has a load that holds and one that fails;
    the gap between them is then halved.  If *confident*, it goes on to loads that the interval tells from *target*,
    on both sides.  *low* and *high* of the result are 0 and 1 where no probe was sure.
    """
    probes = list(known)
    low, high = max((one.load for one in known), default=0.0), 1.0
    load, stride = min(start, 0.95), _STRIDE
    failed = False
    while high - low > tolerance * high and high > LEAST:
        probe = measure(load)
        probes.append(probe)
        if probe.holds(target):
            low = load
        else:
            high, failed = load, True
        if not failed:
            load = min(load * stride, (load + high) / 2)
        elif not low:
            load = max(load / stride, LEAST / 2)
        else:
            load = (low + high) / 2
        stride *= stride
    best = max((one for one in probes if one.holds(target)), key=lambda one: one.load, default=None)
    if confident and best is not None:
        probes += _surely(measure, target, best.load, probes)
    sure = [one.load for one in probes if one.holds(target) and one.sure(target)]
    fails = [one.load for one in probes if not one.holds(target) and one.sure(target)]
    return Capacity(best=best, low=max(sure, default=0.0), high=min(fails, default=1.0), probes=tuple(probes))


def _surely(measure: Callable[[float], Probe], target: float, load: float, probes: Sequence[Probe]) -> list[Probe]:
    # Down to one that surely holds, and up to one that surely fails, if there is any.
    measured: list[Probe] = []
    for step, holds in ((1 / _WIDER, True), (_WIDER, False)):
        at = load
        while not any(one.holds(target) == holds and one.sure(target) for one in (*probes, *measured)):
            at, step = at * step, step * step
            if not load / 2 < at < 1.0:
                break
            measured.append(measure(at))
    return measured


@dataclass(frozen=True, kw_only=True)
class Search:
    """The work of one process: simulate a copy of *plan* at *rate* and, if *search*, find its capacity."""

    plan: Plan
    rate: float = 0.0  # requests a second of one copy that are tried first: without them there is no search; 0: none
    requests: int  # the first so many
    search: bool = True
    start: float = 0.6  # load of the first probe of the search
    tolerance: float
    confident: bool = False  # go on to loads that surely hold and surely fail
    eased: tuple[float, float] = (1.0, 1.0)  # by which the limits of TTFT and of TPOT are multiplied

    @property
    def key(self) -> str:
        """Its name in a file of parts."""
        return (
            f"{self.plan.shape} rate={self.rate!r} requests={self.requests} search={self.search} "
            f"start={self.start!r} tolerance={self.tolerance!r} confident={self.confident} "
            f"eased={self.eased!r}"
        )

    def capacity(
        self, config: Config, requests: RequestTable, router: str, attainment: float, warmup: float
    ) -> Capacity:
        """Return the capacity; its `best` is None if the SLO failed at *rate*."""
        plan, own, config = self.plan, requests[: self.requests], _eased(config, *self.eased)

        def measure(load: float) -> Probe:
            return probe(config, plan, own, load, router, warmup)

        if not self.rate:
            return bisect(measure, attainment, self.tolerance, self.start, confident=self.confident)
        load = self.rate / plan.full
        tried = measure(load)
        if self.search and tried.holds(attainment):
            known = (tried,)
            return bisect(measure, attainment, self.tolerance, load * _STRIDE, known=known, confident=self.confident)
        holds, sure = tried.holds(attainment), tried.sure(attainment)
        return Capacity(
            best=tried if holds else None,
            low=load if holds and sure else 0.0,
            high=load if sure and not holds else 1.0,
            probes=(tried,),
        )


def _eased(config: Config, ttft: float, tpot: float) -> Config:
    def times(limits: Any) -> Any:
        return replace(limits, ttft=limits.ttft * ttft, tpot=limits.tpot * tpot)

    workload = replace(config.workload, tenants=tuple(map(times, config.workload.tenants)))
    return replace(config, slo=times(config.slo), workload=workload)


def served(config: Config, plan: Plan, requests: RequestTable, rate: float, router: str) -> Result:
    """Return the result of *requests* that arrive at one copy of *plan* at a mean *rate* a second."""
    own = configured(config, plan.shape, router)
    assert isinstance(own.experiment, ServeOptions)
    span = float(requests.arrival[-1] - requests.arrival[0])
    given = requests.but(arrival=requests.arrival * ((len(requests) - 1) / span / rate))
    return on_model(own, job(own, own.experiment), given)


def probe(config: Config, plan: Plan, requests: RequestTable, load: float, router: str, warmup: float) -> Probe:
    """Return the probe of *requests* at *load*, without the first share *warmup* of them."""
    rate = load * plan.full
    columns = served(config, plan, requests, rate, router).requests
    count, slo = len(requests), config.slo
    first = int(warmup * count)
    ttft, tpot = (list(columns[name]) for name in ("ttft", "tpot"))
    soon, fast = within(columns, slo)
    good: npt.NDArray[np.float64] = (soon & fast)[first:].astype(np.float64)
    each = {
        tenant.name: good[requests.tenant[first:] == which]
        for which, tenant in enumerate(config.workload.tenants)
        if requests.tenant is not None
    }
    shares = {name: float(own.mean()) for name, own in each.items() if len(own)}
    counted = each[min(shares, key=lambda name: shares[name])] if shares else good
    return Probe(
        load=load,
        rate=rate,
        tokens=rate * float(requests.output.sum()) / count,
        attainment=float(counted.mean()),
        within_ttft=float(soon[first:].mean()),
        within_tpot=float(fast[first:].mean()),
        half=half_width(counted, None) or 0.0,
        ttft=percentile([each for each in ttft[first:] if each is not None], 90.0),
        tpot=percentile([each for each in tpot[first:] if each is not None], 90.0),
        requests=count,
        met=np.packbits(soon & fast).tobytes().hex(),
        tenants=shares,
    )
