# SPDX-License-Identifier: Apache-2.0
"""What NIXL's progress thread adds to a transfer: `intra.by_option` of `conf/backend/nixl.yaml`.

While the caller posts, the thread that makes progress takes the lock of UCX's worker again and again, so that each
descriptor takes longer and bytes move more slowly, however many other threads there are.  With ``num_threads`` those
post batches of ``split_batch_size`` (1,024) descriptors and more.  So three numbers are fitted, *latency*,
*descriptor* and *rate*, to all variants at once.

Sets of processes differ by more than any two models do, for a guest does not see who shares its cores.  So all sets
of all hosts are fitted, and the intervals are those of a set that nobody has seen, from fits to each set alone, by
Student's distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.calibration import samples
from pdsim.calibration.robust import linear, robust_fit
from pdsim.calibration.samples import Sample
from pdsim.calibration.transfers import SCALE
from pdsim.config.compose import compose
from pdsim.core.files import data
from pdsim.hardware.costs import EngineModel, OptionCosts, Workers
from pdsim.results.record import Table

BASE = "nixl_bare-2xh200"
"""The calibration that the costs are added to: the same library without its thread, in the same program."""

VARIANTS = {
    "nixl_thread0": None,
    "nixl_thread4": Workers(threads=4, least=1024),
    "nixl_thread8": Workers(threads=8, least=1024),
}
"""Samples in ``data/calibration``, and who posts large batches."""

HOSTS = ("", "-host2", "-host3", "-host4")
"""Ends of the names of a variant's samples, a host each."""

START = {"latency": 1e-6, "descriptor": 2e-6, "rate": 0.8}
BOUNDS = {"latency": (0.0, 1e-4), "descriptor": (0.0, 2e-5), "rate": (0.3, 1.0)}
SPACES = {name: linear(value) for name, value in START.items()}  # none of the first two may be needed

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ProcessSet:
    """The pairs that one set of processes measured on a *host*, of `HOSTS`: samples of one job each."""

    variant: str
    host: str
    rows: Sequence[Sample]

    def modelled(self, base: EngineModel, values: dict[str, float], rows: Sequence[Sample]) -> list[float]:
        """Return the seconds of *rows* on *base* with the costs *values* and the workers of this variant."""
        costs: dict[str, Any] = {"options": {}, "workers": VARIANTS[self.variant], **values}
        model = base.with_options(OptionCosts(**costs))
        return [model.isolated_time(row.blocks, row.blocks * row.size, read=row.operation == "read") for row in rows]


def process_sets() -> list[ProcessSet]:
    """Return all sets of processes of all variants."""
    sets = []
    for variant, host in product(VARIANTS, HOSTS):
        rows = samples.read(data("calibration", f"{variant}-2xh200{host}.csv")).rows
        jobs = range(min(len(row.per_job) for row in rows))
        sets += [ProcessSet(variant, host, [replace(row, seconds=row.per_job[job]) for row in rows]) for job in jobs]
    return sets


def fit(base: EngineModel, sets: Sequence[ProcessSet]) -> dict[str, float]:
    """Return what the thread adds to *base* in *sets*, without the pairs that are held out: seconds, and a share."""
    kept = [(one, [row for row in one.rows if not row.held]) for one in sets]
    measured = [row.seconds for _, rows in kept for row in rows]
    return robust_fit(
        lambda values: [time for one, rows in kept for time in one.modelled(base, values, rows)],
        measured,
        START,
        scale=SCALE,
        spaces=SPACES,
        bounds=BOUNDS,
    ).values


def errors(base: EngineModel, one: ProcessSet, values: dict[str, float], *, held: bool) -> Floats:
    """Return the relative errors, model over sample minus one, at the pairs of *one* that are *held* out, or not."""
    rows = [row for row in one.rows if row.held == held]
    return np.array(one.modelled(base, values, rows)) / [row.seconds for row in rows] - 1.0


def spans(base: EngineModel, sets: Sequence[ProcessSet]) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of each parameter for a set of processes that nobody has seen."""
    from scipy.stats import t

    each = np.array([list(fit(base, [one]).values()) for one in sets])
    reach = t.ppf(0.975, len(sets) - 1) * each.std(axis=0, ddof=1) * np.sqrt(1.0 + 1.0 / len(sets))
    low = np.maximum(each.mean(axis=0) - reach, 0.0)
    high = np.minimum(each.mean(axis=0) + reach, (np.inf, np.inf, 1.0))
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(START)}


def spread(sets: Sequence[ProcessSet]) -> Floats:
    """Return how far one set is from the mean of the others: the error of a model that knows the mean of every pair.

    Pairs have fewer than 1,024 descriptors, where all variants are alike.
    """
    times: dict[tuple[object, ...], list[float]] = {}
    for one in sets:
        for row in one.rows:
            if row.blocks < 1024:
                key = one.host, row.operation, row.layout, row.blocks, row.size, row.concurrency
                times.setdefault(key, []).append(float(np.log(row.seconds)))
    others = [(log, logs[:index] + logs[index + 1 :]) for logs in times.values() for index, log in enumerate(logs)]
    return np.array([abs(np.expm1(np.mean(rest) - log)) for log, rest in others])


def bare() -> EngineModel:
    """Return the model that the costs are added to."""
    words = ["hw=2xh200", "backend=nixl", "experiment=transfer", f"calibration={BASE}", "host_factor=1"]
    model = compose(words).backend.intra
    assert model is not None
    return model


def tables() -> list[Table]:
    """Return what the thread adds, and the errors of each variant beside what sets differ by."""
    base, sets = bare(), process_sets()
    values, ends = fit(base, sets), spans(base, sets)
    scale = {"latency": 1e6, "descriptor": 1e6, "rate": 1.0}
    numbers = [[name, *(each * scale[name] for each in (value, *ends[name]))] for name, value in values.items()]
    rows: list[list[Any]] = []
    for variant in (*VARIANTS, ""):
        mine = [one for one in sets if variant in ("", one.variant)]
        cells: list[Any] = [variant or "all", len(mine)]
        for held in (False, True):
            away = np.concatenate([errors(base, one, values, held=held) for one in mine])
            cells += [100 * np.median(abs(away)), 100 * np.percentile(abs(away), 95), 100 * away.mean()]
        rows.append(cells)
    others = spread(sets)
    best = [100 * np.median(others), 100 * np.percentile(others, 95)]
    rows.append(["each set by the mean of the others", len(sets), None, None, None, *best, None])
    heads = ["variant", "sets", "fitted median %", "p95 %", "bias %"]
    heads += ["held out median %", "held out p95 %", "held out bias %"]
    return [
        Table("Added by the progress thread", dict.fromkeys(("what", "us or share", "low", "high"), ""), numbers),
        Table("Errors", dict.fromkeys(heads, ""), rows),
    ]
