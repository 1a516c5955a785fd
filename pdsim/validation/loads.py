# SPDX-License-Identifier: Apache-2.0
"""Judge predicted serving load by load: errors of quantiles beside the floor that repeats leave.

A *part* of a validation is a load, or single requests of one length, by name; its rows are requests with latencies
in seconds.  How far runs of the same load are apart is the *floor*: an error is met within its bound or within twice
the floor, whichever is larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, TypeAlias

import numpy as np

from pdsim.core.errors import ConfigError
from pdsim.results.record import Table, percentile
from pdsim.validation.verdicts import Compared, Value

__all__ = [
    "BOUNDS",
    "LATENCIES",
    "SINGLE",
    "compare",
    "compare_files",
    "errors",
    "floor",
    "quantiles",
    "tables",
    "within",
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

Quantiles: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by part and metric."""


def quantiles(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each of `BOUNDS` in seconds for *rows* that ended well, without those that so few cannot give.

    A 99th percentile takes 100 rows, a 90th ten (`pdsim.results.record.percentile`).
    """
    values = {}
    for name in BOUNDS:
        latency, _, share = name.rpartition("_p")
        seconds = [row[latency] for row in rows if row.get(latency) is not None]
        value = percentile(np.array(seconds), float(share)) if seconds else None
        if value is not None:
            values[name] = value
    return values


def compare(predicted: Quantiles, measured: Sequence[Quantiles]) -> list[Compared]:
    """Return what is both in *predicted* and in a run of *measured*: group and label are metric and part.

    What was measured is the median of the runs that have the part, each of which is in *per_job*.
    """
    both = []
    for part, metrics in predicted.items():
        for metric, value in metrics.items():
            seen = tuple(run[part][metric] for run in measured if metric in run.get(part, ()))
            if metric in BOUNDS and seen:
                both.append(Compared(Value(metric, part, "time", 0, value), median(seen), seen))
    return both


def compare_files(expected: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Compared]:
    """Return what the files of a validation of servers have in common; requests that failed are left out.

    Raise a `ConfigError` if that is nothing.
    """
    runs = [
        {name: quantiles([row for row in rows if row["status"] == "ok"]) for name, rows in run.items()}
        for run in measured["runs"]
    ]
    both = compare(expected["predicted"], runs)
    if not both:
        raise ConfigError("nothing to compare: no request of a part that was predicted has ended well")
    return both


def floor(one: Compared) -> float | None:
    """Return how far runs are from their median, the furthest of them; None of a single run."""
    if len(one.per_job) < 2:
        return None
    return max(abs(each / one.measured - 1.0) for each in one.per_job)


def within(one: Compared) -> bool:
    """Return whether the error is within its bound, or within twice the floor where that is larger."""
    return abs(one.error) <= max(BOUNDS[one.predicted.group], 2.0 * (floor(one) or 0.0))


def _loads(both: Iterable[Compared], metric: str) -> list[Compared]:
    return [one for one in both if one.predicted.group == metric and not one.predicted.label.startswith(SINGLE)]


def errors(both: Sequence[Compared]) -> dict[str, float]:
    """Return the mean absolute error of each metric over the loads."""
    sizes = {metric: [abs(one.error) for one in _loads(both, metric)] for metric in BOUNDS}
    return {metric: fmean(of) for metric, of in sizes.items() if of}


def tables(both: Sequence[Compared]) -> list[Table]:
    """Return the tables of *both*: every part, and the errors of each metric over the loads."""
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
            one.predicted.label, one.predicted.group, one.predicted.value * 1e3, one.measured * 1e3, 100 * one.error,
            None if (left := floor(one)) is None else 100 * left, "yes" if within(one) else "no",
        ]
        for one in both
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
    summary: list[list[Any]] = []
    for metric, bound in BOUNDS.items():
        if of := _loads(both, metric):
            spread = [left for one in of if (left := floor(one)) is not None]
            wrong = [abs(one.error) for one in of]
            worst = [100 * fmean(wrong), 100 * max(wrong), 100 * fmean(spread) if spread else None]
            summary.append([metric, len(of), *worst, 100 * bound, sum(map(within, of))])
    return [Table("Predicted and measured", heads, rows), Table("Errors", metrics, summary)]
