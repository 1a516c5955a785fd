# SPDX-License-Identifier: Apache-2.0
"""What NIXL's progress thread adds to a transfer: `intra.by_option` of `conf/backend/nixl.yaml`.

While the caller posts, the thread that makes progress takes the lock of UCX's worker again and again, so that each
descriptor takes longer and bytes move more slowly, however many other threads there are.  With ``num_threads`` those
post batches of ``split_batch_size`` (1,024) descriptors and more, side by side and on workers of their own: what is
left there is the wire.  So three numbers are fitted, *latency*, *descriptor* and *rate*, to all variants at once.

Sets of processes differ by more than any two models do.  A guest does not see who shares its cores: at any moment
24 of 32 processors of one launched 1.4 times as slowly as the others, soon other ones
(``data/benchmarks/cores-2xh200.csv``), and where its threads are bound matters less (6.3 to 7.7 us a descriptor,
``data/benchmarks/probe-bound-2xh200-again.parquet``).  So all sets of all hosts are fitted: the quickest of three
hosts was 15 % too fast in the median on the fourth.  The intervals are those of a set that nobody has seen,
from fits to each set alone, by Student's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from pdsim.calibration import samples
from pdsim.calibration.samples import Sample
from pdsim.calibration.transfers import SCALE
from pdsim.core.repository import data
from pdsim.hardware.costs import EngineModel, OptionCosts, Workers

__all__ = [
    "BASE",
    "FREE",
    "HOSTS",
    "VARIANTS",
    "ProcessSet",
    "errors",
    "fit",
    "process_sets",
    "spans",
    "spread",
]

BASE = "nixl_bare-2xh200"
"""The calibration that the costs are added to: the same library without its thread, in the same program."""

VARIANTS: Mapping[str, Workers | None] = {
    "nixl_thread0": None,
    "nixl_thread4": Workers(threads=4, least=1024),
    "nixl_thread8": Workers(threads=8, least=1024),
}
"""Samples in ``data/calibration``, and who posts large batches."""

HOSTS = ("", "-host2", "-host3", "-host4")
"""Ends of the names of a variant's samples, a host each; the last two's are of other pairs."""

FREE = ("latency", "descriptor", "rate")
_START = (1e-6, 2e-6, 0.8)
_BOUNDS = ((0.0, 0.0, 0.3), (1e-4, 2e-5, 1.0))


@dataclass(frozen=True)
class ProcessSet:
    """The pairs that one set of processes measured on a *host*, of `HOSTS`: samples of one job each."""

    variant: str
    host: str
    rows: Sequence[Sample]

    def model(self, base: EngineModel, values: Sequence[float]) -> EngineModel:
        """Return *base* with the costs *values*, in the order of `FREE`, and the workers of this variant."""
        latency, descriptor, rate = values
        costs = OptionCosts(
            options={}, latency=latency, descriptor=descriptor, rate=rate, workers=VARIANTS[self.variant]
        )
        return base.with_options(costs)


def process_sets() -> list[ProcessSet]:
    """Return all sets of processes of all variants."""
    sets = []
    for variant, host in product(VARIANTS, HOSTS):
        rows = samples.read(data("calibration", f"{variant}-2xh200{host}.csv")).rows
        jobs = range(min(len(row.per_job) for row in rows))
        sets += [ProcessSet(variant, host, [replace(row, seconds=row.per_job[job]) for row in rows]) for job in jobs]
    return sets


def fit(base: EngineModel, sets: Sequence[ProcessSet], *, held: bool = False) -> tuple[float, ...]:
    """Return what the thread adds to *base* in *sets*: seconds, seconds and a share, in the order of `FREE`.

    Pairs that are held out are left out, unless *held*.
    """
    from scipy.optimize import least_squares

    def residuals(values: Sequence[float]) -> npt.NDArray[np.float64]:
        scaled = [value * unit for value, unit in zip(values, _START, strict=True)]
        return np.concatenate([np.log1p(errors(base, one, scaled, held=None if held else False)) for one in sets])

    low, high = (np.array(bound) / _START for bound in _BOUNDS)
    solution = least_squares(residuals, np.ones(len(FREE)), bounds=(low, high), loss="soft_l1", f_scale=SCALE)
    return tuple(float(value) for value in solution.x * _START)


def errors(
    base: EngineModel, one: ProcessSet, values: Sequence[float], *, held: bool | None = None
) -> npt.NDArray[np.float64]:
    """Return the relative errors, model over sample minus one, at the pairs of *one*.

    *held* takes only those that are held out, or only the others; None takes all.
    """
    model = one.model(base, values)
    rows = [row for row in one.rows if held is None or row.held == held]
    modelled = [model.isolated_time(row.blocks, row.blocks * row.size, read=row.operation == "read") for row in rows]
    return np.array(modelled) / [row.seconds for row in rows] - 1.0


def spans(base: EngineModel, sets: Sequence[ProcessSet]) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of each of `FREE` for a set of processes that nobody has seen."""
    from scipy.stats import t

    each = np.array([fit(base, [one]) for one in sets])
    reach = t.ppf(0.975, len(sets) - 1) * each.std(axis=0, ddof=1) * np.sqrt(1.0 + 1.0 / len(sets))
    low = np.maximum(each.mean(axis=0) - reach, 0.0)
    high = np.minimum(each.mean(axis=0) + reach, (np.inf, np.inf, 1.0))
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(FREE)}


def spread(sets: Sequence[ProcessSet]) -> npt.NDArray[np.float64]:
    """Return how far one set is from the mean of the others.

    At pairs of less than 1,024 descriptors, where all agree.

    That is the error of a model that knows the mean of every pair.
    """
    times: dict[tuple[object, ...], list[float]] = {}
    for one in sets:
        for row in one.rows:
            if row.blocks < 1024:
                times.setdefault((one.host, *row.key), []).append(float(np.log(row.seconds)))
    factors = []
    for logs in times.values():
        for index, log in enumerate(logs):
            factors.append(abs(np.expm1(np.mean(logs[:index] + logs[index + 1 :]) - log)))
    return np.array(factors)
