# SPDX-License-Identifier: Apache-2.0
"""The deployments of given lists that fit a machine, and the highest load at which one meets an SLO.

A load is what is offered over what the busier side can do, in closed form, so deployments of any size are searched
between 0 and 1.  A probe holds if the share of requests that met the SLO reaches the target; it is sure if the
target lies outside the share's interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from experiments.serve import ServeOptions, check_fits, job, on_model, specs
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Parallel
from pdsim.results.record import half_width, percentile
from pdsim.serving.deployment import Deployment
from pdsim.serving.load import offered_load, scaled
from pdsim.serving.workload import Request

LEAST = 0.01
"""The lowest load that is probed: an SLO that fails there is missed by single requests."""

_WIDER = 1.06
"""From one probe to the next, away from the answer, until the interval tells."""

_STRIDE = 1.2
"""From one probe to the next until one holds and one fails; squared with every step."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a simulation at one load says of the SLO."""

    load: float  # of the busier side
    rate: float  # requests a second that were offered
    tokens: float  # output tokens a second that they ask for
    attainment: float  # share of requests that meet the SLO, 0 to 1
    half: float  # of its 95 % interval, from batch means, since neighbouring requests are alike
    ttft: float | None  # seconds, 90th percentile of those that got a first token
    tpot: float | None  # seconds, 90th percentile likewise
    requests: int  # simulated, the warm-up included

    def holds(self, target: float) -> bool:
        """Return whether the share is at least *target*."""
        return self.attainment >= target

    def sure(self, target: float) -> bool:
        """Return whether *target* lies outside the interval."""
        return abs(self.attainment - target) >= self.half


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The answer for one deployment: the highest load that holds, and between which loads the true one lies."""

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
    highest: float = 1.0,
    confident: bool = False,
) -> Capacity:
    """Return the highest load below *highest* at which *measure*, a simulation, holds, within a share *tolerance*.

    The search strides from *start*, such as the answer for a similar deployment, until it has a load that holds and
    one that fails; the gap between them is then halved.  If *confident*, it goes on to loads that the interval tells
    from *target*, on both sides.  *low* and *high* of the result are 0 and *highest* where no probe was sure.
    """
    probes: list[Probe] = []
    low, high, load, stride = 0.0, highest, min(start, highest * 0.95), _STRIDE
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
        probes += _surely(measure, target, best.load, highest, probes)
    sure = [one.load for one in probes if one.holds(target) and one.sure(target)]
    fails = [one.load for one in probes if not one.holds(target) and one.sure(target)]
    return Capacity(best=best, low=max(sure, default=0.0), high=min(fails, default=highest), probes=tuple(probes))


def _surely(
    measure: Callable[[float], Probe], target: float, load: float, highest: float, probes: Sequence[Probe]
) -> list[Probe]:
    # Down to one that surely holds, and up to one that surely fails, if there is any.
    measured: list[Probe] = []
    for step, holds in ((1 / _WIDER, True), (_WIDER, False)):
        at = load
        while not any(one.holds(target) == holds and one.sure(target) for one in (*probes, *measured)):
            at *= step
            if not load / 2 < at < highest:
                break
            measured.append(measure(at))
    return measured


def capacity(
    config: Config,
    requests: Sequence[Request],
    options: ServeOptions,
    attainment: float,
    warmup: float,
    tolerance: float,
    start: float,
    *,
    confident: bool = False,
) -> Capacity:
    """Return the capacity of *config* for *requests* by `bisect`, the first share *warmup* of them not counted.

    Raise a `ConfigError` if it cannot serve them at all: a request fits no pool, or the model cannot be divided.
    """
    what = job(config, options)
    check_fits(what, requests)
    return bisect(
        lambda load: _probe(config, what, requests, load, warmup), attainment, tolerance, start, confident=confident
    )


def _probe(config: Config, what: Deployment, requests: Sequence[Request], load: float, warmup: float) -> Probe:
    # What becomes of *requests* that are offered at *load*, the first share *warmup* of them not counted.
    given = scaled(replace(config.workload, load=load, scaling="time"), what, requests, config.seed)
    columns = on_model(config, what, given).requests
    first = int(warmup * len(given))
    rows = list(zip(columns["ttft"], columns["tpot"], strict=True))[first:]
    slo = config.slo
    meets = [ttft is not None and ttft <= slo.ttft and (tpot or 0.0) <= slo.tpot for ttft, tpot in rows]
    good: npt.NDArray[np.float64] = np.array(meets, dtype=np.float64)
    offered = offered_load(what, given)
    assert offered is not None
    return Probe(
        load=load,
        rate=offered.rate,
        tokens=offered.rate * sum(request.output for request in given) / len(given),
        attainment=float(good.mean()),
        half=half_width(good, None) or 0.0,
        ttft=percentile([ttft for ttft, _ in rows if ttft is not None], 90.0),
        tpot=percentile([tpot for _, tpot in rows if tpot is not None], 90.0),
        requests=len(given),
    )


@dataclass(frozen=True, order=True)
class Shape:
    """A parallelism and a P:D ratio.

    The order is that of the fields, so the smallest parallelism comes first.
    """

    prefill_tp: int
    decode_tp: int
    prefill: int  # instances
    decode: int

    @property
    def gpus(self) -> int:
        """GPUs of one copy."""
        return self.prefill_tp * self.prefill + self.decode_tp * self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P tp{self.prefill_tp} : {self.decode}D tp{self.decode_tp}"


def configured(config: Config, shape: Shape) -> Config:
    """Return *config* with the parallelism of *shape*; pipeline, context and data parallelism stay."""
    prefill, decode = config.parallel.prefill, config.parallel.decode
    parallel = Parallel(
        prefill=replace(prefill, tp=shape.prefill_tp, instances=shape.prefill),
        decode=replace(decode, tp=shape.decode_tp, instances=shape.decode),
    )
    staging = config.kv.staging or (
        shape.prefill_tp != shape.decode_tp and config.model.attention != "mla" and config.engine.handoff == "push"
    )
    return replace(config, parallel=parallel, kv=replace(config.kv, staging=staging))


def feasible(
    config: Config,
    prefill_tp: Sequence[int],
    decode_tp: Sequence[int],
    instances: Sequence[int],
    requests: Sequence[Request],
) -> tuple[list[Shape], dict[Shape, str]]:
    """Return the shapes that can serve *requests*, sorted, and why the others cannot.

    Nothing is simulated: what is checked is that ranks have places, the model can be divided, and each request fits.
    """
    fitting, refused = [], {}
    for parts in product(prefill_tp, decode_tp, instances, instances):
        shape = Shape(*parts)
        own = configured(config, shape)
        try:
            what = job(own, ServeOptions())
            check_fits(what, requests)
            specs(own, what, requests[:1])  # finds a place for each rank
        except (ConfigError, ValueError) as error:
            refused[shape] = str(error)
        else:
            fitting.append(shape)
    return sorted(fitting), refused
