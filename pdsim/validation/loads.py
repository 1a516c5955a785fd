# SPDX-License-Identifier: Apache-2.0
"""What predicted serving is judged by: quantiles of latencies, load by load, beside what repeats differ by.

A *part* of a validation is a load, or single requests of one length, by name; its rows are requests with latencies
in seconds.  An error is met within its bound or within twice the spread of the runs, whichever is larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, TypeAlias

import numpy as np

from pdsim.core.errors import ConfigError
from pdsim.results.record import Table, percentile
from pdsim.validation.verdicts import Compared, Value

__all__ = ["BOUNDS", "LATENCIES", "SINGLE", "compare", "compare_files", "errors", "quantiles", "tables", "within"]

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


def within(one: Compared) -> bool:
    """Return whether the error is within its bound, or within twice the spread of the runs where that is larger."""
    return abs(one.error) <= max(BOUNDS[one.predicted.group], 2.0 * (one.spread or 0.0))


def _by_metric(both: Sequence[Compared]) -> dict[str, list[Compared]]:
    # those of loads
    loads = [one for one in both if not one.predicted.label.startswith(SINGLE)]
    groups = {metric: [one for one in loads if one.predicted.group == metric] for metric in BOUNDS}
    return {metric: of for metric, of in groups.items() if of}


def errors(both: Sequence[Compared]) -> dict[str, float]:
    """Return the mean absolute error of each metric over the loads."""
    return {metric: fmean(abs(one.error) for one in of) for metric, of in _by_metric(both).items()}


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
            None if one.spread is None else 100 * one.spread, "yes" if within(one) else "no",
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
    for metric, of in _by_metric(both).items():
        spread = [one.spread for one in of if one.spread is not None]
        wrong = [abs(one.error) for one in of]
        worst = [100 * fmean(wrong), 100 * max(wrong), 100 * fmean(spread) if spread else None]
        summary.append([metric, len(of), *worst, 100 * BOUNDS[metric], sum(map(within, of))])
    return [Table("Predicted and measured", heads, rows), Table("Errors", metrics, summary)]
