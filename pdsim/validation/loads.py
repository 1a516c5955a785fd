# SPDX-License-Identifier: Apache-2.0
"""What of predicted serving is judged: quantiles of latencies, load by load, from the files of live servers.

A *part* of a validation is a load, or single requests of one length, by name; its rows are requests with latencies
in seconds.  `pdsim.validation.verdicts` judges: a class is a metric, a point is a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from pdsim.results.record import percentile
from pdsim.validation.verdicts import Compared, Value, compare, grouped

LATENCIES = ("ttft", "tpot", "e2e", "prefilled", "handoff")
"""Columns of a row, where it has them."""

BOUNDS = {"ttft_p50": 0.10, "ttft_p90": 0.15, "ttft_p99": 0.15, "tpot_p50": 0.05, "tpot_p99": 0.15, "e2e_p50": 0.05}
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


def values(of: Quantiles) -> list[Value]:
    """Return *of* as what is compared: group and label are metric and part."""
    every = ((part, *each) for part, metrics in of.items() for each in metrics.items())
    return [Value(metric, part, "time", 0, seconds) for part, metric, seconds in every if metric in BOUNDS]


def compare_files(expected: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Compared]:
    """Return what the files of a validation of servers have in common; requests that failed are left out.

    A measured value is the median of the runs that have it; *per_job* has the value of each run.  Raise a
    `ConfigError` if the files have nothing in common.
    """
    every: list[Value] = []
    for run in measured["runs"]:
        ended = {name: [row for row in rows if row["status"] == "ok"] for name, rows in run.items()}
        every += values({name: quantiles(rows) for name, rows in ended.items()})
    medians = []
    for same in grouped(every, lambda value: value.key).values():
        seen = tuple(value.value for value in same)
        medians.append(replace(same[0], value=median(seen), per_job=seen))
    return compare(values(expected["predicted"]), medians)
