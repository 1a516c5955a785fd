# SPDX-License-Identifier: Apache-2.0
"""What simulations say of a deployment under an SLO: at one rate, and at which load it holds the SLO no longer.

A load is what is offered over what the busier side can do, in closed form, so deployments of any size are searched
between 0 and 1.  A probe holds if the share of requests that met the SLO reaches the target; it is sure if the
target lies outside the share's interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from experiments.capacity.shapes import Plan, configured
from experiments.serve import ServeOptions, job, on_model
from experiments.serve.tables import within
from pdsim.config import Config
from pdsim.results.record import Result, half_width, percentile
from pdsim.serving.requests import RequestTable

LEAST = 0.01
"""The lowest load that is probed: an SLO that fails there is missed by single requests."""

_WIDER = 1.06
"""From one probe to the next, away from the answer, until the interval tells; squared with every step."""

_STRIDE = 1.2
"""From one probe to the next until one holds and one fails; squared with every step."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a simulation of one copy at one load says of the SLO; requests of the warm-up count in nothing."""

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
    """Return by how much *one* attains more than *other* with the same requests, and half the 95 % interval of that.

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
    """What one process does at a time: simulate a copy of *plan* at *rate* and, if *search*, find its capacity."""

    plan: Plan
    rate: float = 0.0  # requests a second of one copy that are tried first: without them there is no search; 0: none
    requests: int  # the first so many
    search: bool = True
    start: float = 0.6  # load of the first probe of the search
    tolerance: float
    confident: bool = False  # go on to loads that surely hold and surely fail

    @property
    def key(self) -> str:
        """Its name in a file of parts."""
        return (
            f"{self.plan.shape} rate={self.rate!r} requests={self.requests} search={self.search} "
            f"start={self.start!r} tolerance={self.tolerance!r} confident={self.confident}"
        )

    def capacity(
        self, config: Config, requests: RequestTable, router: str, attainment: float, warmup: float
    ) -> Capacity:
        """Return what was found; `Capacity.best` is None if the SLO failed at *rate*."""
        plan, own = self.plan, requests[: self.requests]

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


def served(config: Config, plan: Plan, requests: RequestTable, rate: float, router: str) -> Result:
    """Return what becomes of *requests* that arrive at one copy of *plan* at a mean *rate* a second."""
    own = configured(config, plan.shape, router)
    assert isinstance(own.experiment, ServeOptions)
    span = float(requests.arrival[-1] - requests.arrival[0])
    given = requests.but(arrival=requests.arrival * ((len(requests) - 1) / span / rate))
    return on_model(own, job(own, own.experiment), given)


def probe(config: Config, plan: Plan, requests: RequestTable, load: float, router: str, warmup: float) -> Probe:
    """Return what becomes of *requests* at *load*, the first share *warmup* of them not counted."""
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
