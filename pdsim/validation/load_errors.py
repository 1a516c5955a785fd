# SPDX-License-Identifier: Apache-2.0
"""Predicted and measured serving, load by load: errors of quantiles beside the floor that repeats leave.

A *part* of a validation is a load, or single requests of one length, by name.  Its rows are
requests with latencies in seconds (`LATENCIES`), of the model or of a deployment; those of one part
are judged together.  Knows nothing of what was run.

A deployment that serves the same load twice does not give the same quantiles.  How far its runs are
apart is the *floor*: no prediction can be expected to be closer, so an error counts as met within
its bound or within twice the floor, whichever is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from pdsim.results.record import Table
from pdsim.results.statistics import percentile

__all__ = [
    "BOUNDS",
    "LATENCIES",
    "SINGLE",
    "Judged",
    "errors",
    "floors",
    "judged",
    "of_files",
    "quantiles",
    "tables",
]

LATENCIES = ("ttft", "tpot", "e2e", "prefilled", "handoff")
"""Columns of a row, where it has them."""

BOUNDS = {
    "ttft_p50": 0.10,
    "ttft_p90": 0.15,
    "ttft_p99": 0.15,
    "tpot_p50": 0.05,
    "tpot_p99": 0.15,
    "e2e_p50": 0.05,
}
"""What is compared of each load, and the relative error that is asked for."""

SINGLE = "single-"
"""How the names of single requests of one length begin; the length in tokens follows."""

Rows = Sequence[Mapping[str, Any]]


def quantiles(rows: Rows) -> dict[str, float]:
    """Return each of `BOUNDS` in seconds for *rows* that ended well, without those that so few cannot give.

    A 99th percentile takes 100 rows, a 90th ten (`pdsim.results.statistics.percentile`).
    """
    found = {}
    for name in BOUNDS:
        latency, _, share = name.rpartition("_p")
        values = [row[latency] for row in rows if row.get(latency) is not None]
        value = percentile(np.array(values), float(share)) if values else None
        if value is not None:
            found[name] = value
    return found


@dataclass(frozen=True)
class Judged:
    """One quantity of one part: predicted, and measured in one run or several."""

    part: str
    metric: str
    predicted: float  # seconds
    measured: tuple[float, ...]  # seconds, of each run

    @property
    def middle(self) -> float:
        """The median of what was measured."""
        return median(self.measured)

    @property
    def error(self) -> float:
        """Relative and signed: 0.1 is a prediction 10 % too high."""
        return self.predicted / self.middle - 1.0

    @property
    def floor(self) -> float | None:
        """How far runs are from their median, the furthest of them; None of a single run."""
        if len(self.measured) < 2:
            return None
        return max(abs(each / self.middle - 1.0) for each in self.measured)

    @property
    def within(self) -> bool:
        """Whether the error is within its bound, or within twice the floor where that is larger."""
        return abs(self.error) <= max(BOUNDS[self.metric], 2.0 * (self.floor or 0.0))


def judged(
    predicted: Mapping[str, Mapping[str, float]], measured: Sequence[Mapping[str, Mapping[str, float]]]
) -> list[Judged]:
    """Return what is both in *predicted* and in a run of *measured*, each by part and metric of `quantiles`.

    Runs that lack a part are left out of it, so the number of measured values may differ between
    parts.
    """
    found = []
    for part, metrics in predicted.items():
        for metric, value in metrics.items():
            seen = tuple(run[part][metric] for run in measured if metric in run.get(part, ()))
            if metric in BOUNDS and seen:
                found.append(Judged(part, metric, value, seen))
    return found


def of_files(expected: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Judged]:
    """Return what two files of `experiments.validate_live` have in common; requests that failed are left out."""
    runs = [
        {name: quantiles([row for row in rows if row["status"] == "ok"]) for name, rows in run.items()}
        for run in measured["runs"]
    ]
    return judged(expected["predicted"], runs)


def errors(found: Iterable[Judged], keep: Callable[[str], bool] = lambda _: True) -> dict[str, float]:
    """Return the mean absolute error of each metric over those loads whose names *keep* accepts."""
    by: dict[str, list[float]] = {}
    for one in found:
        if not one.part.startswith(SINGLE) and keep(one.part):
            by.setdefault(one.metric, []).append(abs(one.error))
    return {metric: fmean(by[metric]) for metric in BOUNDS if metric in by}


def floors(
    first: Mapping[str, Mapping[str, float]], others: Sequence[Mapping[str, Mapping[str, float]]]
) -> dict[str, float]:
    """Return by metric the mean over loads and runs of how far *others* are from *first*: what repeats differ by."""
    by: dict[str, list[float]] = {}
    for run in others:
        for part, metrics in run.items():
            for metric, value in metrics.items():
                if not part.startswith(SINGLE) and metric in first.get(part, ()):
                    by.setdefault(metric, []).append(abs(value / first[part][metric] - 1.0))
    return {metric: fmean(by[metric]) for metric in BOUNDS if metric in by}


def tables(found: Sequence[Judged]) -> list[Table]:
    """Return the tables of *found*: every part, and the errors of each metric over the loads.

    Single requests are in the first table only: they show the service times, and the loads what
    queues make of them.
    """
    heads = {
        "load": "or single requests of so many tokens",
        "metric": "of its requests",
        "predicted ms": "",
        "measured ms": "median of the runs",
        "error %": "predicted over measured, less 1",
        "floor %": "how far the runs are from their median, at most",
        "within": "of the bound, or of twice the floor",
    }
    rows = [
        [
            one.part, one.metric, one.predicted * 1e3, one.middle * 1e3, 100 * one.error,
            None if one.floor is None else 100 * one.floor, "yes" if one.within else "no",
        ]
        for one in found
    ]  # fmt: skip
    metrics = {
        "metric": "of the requests of a load",
        "loads": "that have it",
        "mean absolute %": "of the errors",
        "worst %": "",
        "floor %": "mean over the loads",
        "asked %": "the relative error that is asked for",
        "within": "loads within that, or within twice the floor",
    }
    return [Table("Predicted and measured", heads, rows), Table("Errors", metrics, list(_metrics(found)))]


def _metrics(found: Sequence[Judged]) -> Iterable[list[Any]]:
    for metric, bound in BOUNDS.items():
        of = [one for one in found if one.metric == metric and not one.part.startswith(SINGLE)]
        if of:
            spread = [one.floor for one in of if one.floor is not None]
            wrong = [abs(one.error) for one in of]
            yield [
                metric, len(of), 100 * fmean(wrong), 100 * max(wrong), 100 * fmean(spread) if spread else None,
                100 * bound, sum(one.within for one in of),
            ]  # fmt: skip
