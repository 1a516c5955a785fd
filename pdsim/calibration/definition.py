# SPDX-License-Identifier: Apache-2.0
"""A calibration: parameters of a machine and an engine that were fitted to samples, and how far to trust them.

Posting is the host's work, and hosts differ: a calibration says by which factors (`Calibration.hosts`), a
configuration which one holds (`Config.host_factor`), and `measure` what a user's own host takes for the same Python.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from pdsim.core.units import NotNegative, Positive, PositiveInt, Seconds
from pdsim.hardware.costs import Engine


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Errors of the fit on samples held out: relative errors of the modelled time, 0.01 is 1 %.

    *floor* and *floor_p95* compare with *median* and *p95*: they are what remains for a model that knows the mean of
    every point, because repeated jobs differ.  They are None where there was one job only.
    """

    points: PositiveInt
    how: str  # which samples were left out
    mean: NotNegative  # of the absolute error
    median: NotNegative
    p95: NotNegative
    bias: float  # mean of the signed error, model minus sample
    jobs: PositiveInt = 1  # whose mean each sample is
    # of the median: what jobs that differ leave for any model, `samples.floor`
    floor: NotNegative | None = None
    floor_p95: NotNegative | None = None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted *parameters*, for the machines and backends that it names and for no others: `conf/calibration`.

    Values of *parameters* and *intervals* are text with a unit, as in YAML.  Beyond the ranges *descriptors*,
    *bytes*, *gpus* and that of *hosts* a run is extrapolated (`factors`).
    """

    name: str
    # "measured" on our interface; "published" by others, or by another tool; "assumed": by the model
    kind: Annotated[str, "one of measured, published, assumed"] = "measured"
    hw: tuple[str, ...] = ()
    backend: tuple[str, ...] = ()
    form: str = ""  # of the fit; docs/calibration.md
    date: str = ""
    source: str = ""  # who measured, with which tool
    parameters: Mapping[str, Any] = field(default_factory=dict)  # by dotted key, such as "backend.intra.call"
    intervals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # 95 %, from a bootstrap over the samples
    descriptors: tuple[int, ...] = ()  # of a sample, least and most: beyond them it is extrapolated
    bytes: tuple[int, ...] = ()  # the same of the bytes of a sample
    gpus: tuple[int, ...] = ()  # the same of the GPUs that took part in one
    # the host's part of a transfer on each known host, as a multiple of the calibrated one's
    hosts: tuple[Positive, ...] = ()
    host: float = 0.0  # the `host_factor` that a run was given; 0: none, so it may be any of *hosts*
    turn: Seconds = 0.0  # of the loop of `pdsim doctor --host` on this host; 0: nobody measured it
    unidentified: tuple[str, ...] = ()  # what these samples cannot tell: at its default, and not to be believed
    held_out: HeldOut | None = None
    held_out_reads: HeldOut | None = None  # of a calibration of writes: the same for reads
    provenance: Mapping[str, str] = field(default_factory=dict)

    def factors(self, *, descriptors: int = 0, nbytes: int = 0, gpus: int = 0) -> dict[str, float]:
        """Return the factor by which each lies outside the samples, without those inside and unknown ones (0).

        ``"hosts"`` is there for a `host` that is slower or quicker than any that is known.

        >>> Calibration(name="c", descriptors=(4, 64), gpus=(2, 2)).factors(descriptors=1, nbytes=9, gpus=8)
        {'descriptors': 4.0, 'gpus': 4.0}
        """
        known = (min(self.hosts), max(self.hosts)) if self.hosts else ()
        compared: tuple[tuple[str, float, Sequence[float]], ...] = (
            ("descriptors", descriptors, self.descriptors),
            ("bytes", nbytes, self.bytes),
            ("gpus", gpus, self.gpus),
            ("hosts", self.host, known),
        )
        factors = {name: max(at / span[1], span[0] / at) for name, at, span in compared if at and span}
        return {name: factor for name, factor in factors.items() if factor > 1.0}

    def evidence(self, key: str) -> str:
        """Return the source of the parameter *key*, in the form of `pdsim.hardware.machine.EVIDENCE`."""
        low_high = self.intervals.get(key)
        spread = f", 95 % {' to '.join(low_high)}" if low_high else ""
        return f"{self.kind}: {self.source}, {self.date}, calibration {self.name}{spread}"


def widening(factor: float) -> float:
    """Return the factor by which an interval widens *factor* times beyond the samples of a calibration.

    It grows by as much again with each doubling, ``1 + log2(factor)``: a rule, not a measurement.

    >>> widening(1.0), widening(4.0)
    (1.0, 3.0)
    """
    return 1.0 + math.log2(max(1.0, factor))


TURNS = 200_000
"""Turns of the loop that `measure` times, as in the rows "host" of `data/benchmarks/probe-*.parquet`."""


_OF_HOST = ("call", "descriptor", "latency", "ramp")
_TIME = re.compile(r"([\d.]+)(ns|us|ms|s)\b")


def of_usual_host(calibration: Calibration) -> Calibration:
    """Return *calibration* with the costs of its median host; without parameters it stays as it is.

    The median is the best guess for a host that nobody has measured (`data/validation`, each host left out in turn).
    What `on_host` scales is scaled here, with its intervals; *hosts* become multiples of the median.
    """
    usual = statistics.median(calibration.hosts or (1.0,))

    def scaled(value: Any) -> Any:
        if isinstance(value, str):
            return _TIME.sub(lambda time: f"{float(time[1]) * usual:.6g}{time[2]}", value)
        if isinstance(value, Mapping):
            return {name: scaled(part) for name, part in value.items()}
        return type(value)(map(scaled, value)) if isinstance(value, (list, tuple)) else value

    def adapted(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: scaled(of) if key.rpartition(".")[2] in _OF_HOST else of for key, of in values.items()}

    if usual == 1.0 or not calibration.parameters:
        return calibration
    return replace(
        calibration,
        source=f"{calibration.source}, the host's part times {usual:g}, the median of {len(calibration.hosts)}",
        parameters=adapted(calibration.parameters),
        intervals=adapted(calibration.intervals),
        hosts=tuple(factor / usual for factor in calibration.hosts),
    )


def on_host(engine: Engine, factor: float) -> Engine:
    """Return *engine* on a host that takes *factor* times as long to post, and to see the end.

    Rates and what happens on the wire stay, because the host has no part in them.
    """
    models = {}
    for at in ("intra", "inter"):
        if (model := getattr(engine, at)) is not None:
            scaled = {name: getattr(model, name) * factor for name in ("call", "descriptor", "latency")}
            ramp = tuple(replace(step, extra=step.extra * factor) for step in model.ramp)
            models[at] = replace(model, **scaled, ramp=ramp)
    return replace(engine, **models)


def drawn(hosts: Sequence[float], seed: int, count: int) -> list[float]:
    """Return factors of *count* hosts such as *hosts*, two or more: log-normal, with their mean and spread.

    They are drawn from *seed*, and within 0.1 to 10, as `Config.host_factor` is.

    >>> drawn([0.9, 1.1], seed=0, count=2) == drawn([0.9, 1.1], seed=0, count=3)[:2]
    True
    """
    logs = [math.log(factor) for factor in hosts]
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *b"host"])))
    factors = np.exp(random.normal(statistics.mean(logs), statistics.stdev(logs), count))
    return [float(factor) for factor in np.clip(factors, 0.1, 10.0)]


def measure(repeats: int = 30) -> tuple[Seconds, Seconds, Seconds]:
    """Return the least, the median and the most seconds of one turn of a Python loop, in *repeats* of some 10 ms.

    Compare the least with `Calibration.turn` of the calibrated host: longer ones were disturbed by other processes.
    """
    turns = []
    for _ in range(repeats):
        begin, total = time.perf_counter(), 0
        for index in range(TURNS):
            total += index & 3
        turns.append((time.perf_counter() - begin) / TURNS)
    return min(turns), statistics.median(turns), max(turns)
