# SPDX-License-Identifier: Apache-2.0
"""How long a host takes for its part of a transfer, as a multiple of what the calibrated host took.

Posting is the host's work, and hosts differ: the same probe took 2.24, 2.4 and 3.0 us for a descriptor of Mooncake
over NVLink on three hosts with H200.  A calibration says which multiples are known (`Calibration.hosts`), a
configuration which one holds (`Config.host_factor`), and `measure` what a user's own host takes for the same Python.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pdsim.core.units import Seconds
from pdsim.hardware.costs import Engine, EngineModel

__all__ = ["drawn", "measure", "on_host"]

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
    ramp = tuple(replace(step, extra=step.extra * factor) for step in model.ramp)
    return replace(
        model,
        call=model.call * factor,
        descriptor=model.descriptor * factor,
        latency=model.latency * factor,
        ramp=ramp,
    )


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
    found = []
    for _ in range(repeats):
        begin, total = time.perf_counter(), 0
        for index in range(TURNS):
            total += index & 3
        found.append((time.perf_counter() - begin) / TURNS)
    return min(found), statistics.median(found), max(found)
