# SPDX-License-Identifier: Apache-2.0
"""A calibration: parameters of a machine and an engine that were fitted to samples, and how far to trust them.

It is a file of `conf/calibration`, with every sample beside it (``<name>.csv``).  Posting is the host's work, and
hosts differ: a calibration says by which factors (`Calibration.hosts`), a configuration which one holds
(`Config.host_factor`), and `measure` what a user's own host takes for the same Python.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from pdsim.core.errors import ConfigError
from pdsim.core.units import NotNegative, Positive, PositiveInt, Seconds
from pdsim.hardware.costs import Engine, EngineModel

__all__ = ["OWNERS", "Calibration", "HeldOut", "applied", "covers", "drawn", "measure", "on_host", "widening"]

OWNERS = ("hw", "backend")
"""The groups of a configuration whose parameters a calibration may set: those that keep sources."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """How far the fit is from samples that it has not seen: relative errors of the modelled time, 0.01 is 1 %.

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
    """Fitted *parameters*, for the machines and backends that it names and for no others.

    `pdsim.calibration.calibrate` makes and writes one, a configuration names it or finds it by its pair of machine
    and backend, and `applied` lays it over the configuration.  Values of *parameters* and *intervals* are text with
    a unit, as in YAML.  The ranges *descriptors*, *bytes* and *gpus*, and those of *hosts*, are what a run is
    compared with: beyond them it is extrapolated (`factors`).

    Raise a `ValueError` for a range that is not two
    ascending positive numbers, or a parameter outside the groups of `OWNERS`.
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
    # the host's part of a transfer on other hosts, as multiples of that on this one
    hosts: tuple[Positive, ...] = ()
    host: float = 0.0  # the `host_factor` that a run was given; 0: none, so it may be any of *hosts*
    turn: Seconds = 0.0  # of the loop of `pdsim doctor --host` on this host; 0: nobody measured it
    unidentified: tuple[str, ...] = ()  # what these samples cannot tell: at its default, and not to be believed
    held_out: HeldOut | None = None
    held_out_reads: HeldOut | None = None  # of a calibration of writes: the same for reads
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, span in (("descriptors", self.descriptors), ("bytes", self.bytes), ("gpus", self.gpus)):
            if span and (len(span) != 2 or not 0 < span[0] <= span[1]):
                raise ValueError(f"calibration.{name} must be the least and the most of a sample, got {list(span)}")
        if wrong := [key for key in self.parameters if key.partition(".")[0] not in OWNERS]:
            raise ValueError(f"calibration.parameters.{wrong[0]} must begin with one of {', '.join(OWNERS)}")

    def factors(self, *, descriptors: int = 0, nbytes: int = 0, gpus: int = 0) -> dict[str, float]:
        """Return by which factor each lies outside the samples; what is inside, or 0 for unknown, is left out.

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
    """Return how many times as wide an interval is *factor* times beyond the samples of a calibration.

    It grows by as much again with each doubling, ``1 + log2(factor)``: a rule, not a measurement.

    >>> widening(1.0), widening(4.0)
    (1.0, 3.0)
    """
    return 1.0 + math.log2(max(1.0, factor))


def applied(
    values: Mapping[str, Any], calibration: Calibration, overridden: Iterable[str]
) -> tuple[dict[str, Any], Calibration, dict[str, str]]:
    """Return plain *values* with the calibration in them, its remainder, and the sources.

    The remainder is what a run keeps of it; sources are by dotted key.

    What is *overridden* by hand stays as it is.  What is kept has no parameters any more, for they are in the
    values: a run that is repeated from its own ``config.yaml`` changes nothing.  Raise a `ConfigError` if the
    calibration is for another machine or another backend.

    *values* is the composed configuration as nested mappings, whose values may still be text; it is not changed.
    The second item is the calibration to keep with the run: name, intervals and errors.
    """
    _check_pair(values, calibration)
    by_hand = tuple(overridden)
    chosen = {key: value for key, value in calibration.parameters.items() if not covers(by_hand, key)}
    changed = dict(values)
    for key, value in chosen.items():
        changed = _set(changed, key.split("."), value, key)
    intervals = {key: span for key, span in calibration.intervals.items() if not covers(by_hand, key)}
    kept = replace(calibration, parameters={}, intervals=intervals)
    return changed, kept, {key: calibration.evidence(key) for key in chosen}


def covers(keys: Iterable[str], number: str) -> bool:
    """Return whether one of the dotted *keys* is *number* or stands above it.

    >>> covers(["backend.intra"], "backend.intra.call"), covers(["backend.intra"], "backend.intranode")
    (True, False)
    """
    return any(f"{number}.".startswith(f"{key}.") for key in keys)


def _check_pair(values: Mapping[str, Any], calibration: Calibration) -> None:
    for group in OWNERS:
        owner = values.get(group)
        name = owner.get("name") if isinstance(owner, Mapping) else None
        known: tuple[str, ...] = getattr(calibration, group)
        if name not in known:
            raise ConfigError(
                f"calibration={calibration.name} is for {group}={' or '.join(known)}, not for {group}={name}; leave "
                f"calibration out for the one of this pair, if there is one, or set calibration=none"
            )


def _set(values: Mapping[str, Any], path: list[str], value: Any, key: str) -> dict[str, Any]:
    # Mappings on the way are copied, so that the caller's stay as they are.  Raise a `ConfigError` that names *key*
    # if one is missing: only the last part of a path may be new.
    head, *rest = path
    if not rest:
        return {**values, head: value}
    below = values.get(head)
    if not isinstance(below, Mapping):
        raise ConfigError(f"calibration.parameters.{key}: this configuration has no {head} that it could belong to")
    return {**values, head: _set(below, rest, value, key)}


# --- other hosts ---------------------------------------------------------------------------------------------------

TURNS = 200_000
"""Turns of the loop that `measure` times, as in the rows "host" of `data/benchmarks/probe-*.parquet`."""


def on_host(engine: Engine, factor: float) -> Engine:
    """Return *engine* on a host that takes *factor* times as long to post, and to see the end.

    Scaled are *call*, *descriptor*, *latency* and the steps of the ramp, of both models; rates and what happens on
    the wire stay, because the host has no part in them.
    """
    models = {at: getattr(engine, at) for at in ("intra", "inter")}
    moved = {at: _model(model, factor) for at, model in models.items() if model is not None}
    return replace(engine, intra=moved.get("intra"), inter=moved.get("inter"))


def _model(model: EngineModel, factor: float) -> EngineModel:
    scaled = {name: getattr(model, name) * factor for name in ("call", "descriptor", "latency")}
    return replace(model, **scaled, ramp=tuple(replace(step, extra=step.extra * factor) for step in model.ramp))


def drawn(hosts: Sequence[float], seed: int, count: int) -> list[float]:
    """Return factors of *count* hosts such as *hosts*, drawn from *seed*: log-normal, with their mean and spread.

    They are within 0.1 to 10, as `Config.host_factor` is.  Raise a `ValueError` for fewer than two hosts.

    >>> drawn([0.9, 1.1], seed=0, count=2) == drawn([0.9, 1.1], seed=0, count=3)[:2]
    True
    """
    if len(hosts) < 2:
        raise ValueError(f"hosts must be two or more to have a spread, got {list(hosts)}")
    logs = [math.log(factor) for factor in hosts]
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *b"host"])))
    factors = np.exp(random.normal(statistics.mean(logs), statistics.stdev(logs), count))
    return [float(factor) for factor in np.clip(factors, 0.1, 10.0)]


def measure(repeats: int = 30) -> tuple[Seconds, Seconds, Seconds]:
    """Return the least, the median and the most seconds of one turn of a Python loop, in *repeats* of some 10 ms.

    Runs for ``repeats * 10`` ms or so on the calling thread.  Compare the least with `Calibration.turn` of the
    calibrated host: others are disturbed by whatever else runs.
    """
    turns = []
    for _ in range(repeats):
        begin, total = time.perf_counter(), 0
        for index in range(TURNS):
            total += index & 3
        turns.append((time.perf_counter() - begin) / TURNS)
    return min(turns), statistics.median(turns), max(turns)
