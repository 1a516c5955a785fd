# SPDX-License-Identifier: Apache-2.0
"""What people are told of a fit: its parameters, its errors, and how far jobs differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from pdsim.calibration import fit, noise_floor, read_overhead
from pdsim.calibration.from_samples import Fitted
from pdsim.calibration.samples import Samples
from pdsim.results.record import Table

__all__ = ["apart", "parameters", "table"]


def parameters(done: Fitted) -> Table:
    """Return what was fitted, and what the samples do not tell.

    Three columns: the dotted key, the value, and its 95 % interval or the reason why it has none.  Parameters that
    the samples do not tell come last.
    """
    calibration = done.calibration
    rows: list[list[Any]] = [
        [key, _told(value), " to ".join(calibration.intervals.get(key, (_why(key),)))]
        for key, value in calibration.parameters.items()
        if key not in calibration.unidentified
    ]
    rows += [[key, "not identified by these samples", "-"] for key in dict.fromkeys(calibration.unidentified)]
    heads = {"parameter": "", "value": "", "95 %": "interval of a bootstrap over configurations"}
    return Table(f"{calibration.name}: {calibration.form}", heads, rows)


def _why(key: str) -> str:
    if key.rpartition(".")[2] in read_overhead.FREE:
        return "reads cost no more, as far as they tell"
    return "as fast as the engine was" if key.startswith("hw.") else "follows from the form"


def apart(samples: Samples) -> str:
    """Return how far the jobs of *samples* are apart, in a line for people; nothing if there was one only."""
    found = noise_floor.floor(row.per_job for row in samples.rows)
    if found is None:
        return ""
    return (
        f"jobs differ by {found.apart:.1%} in the median: the mean of {found.jobs} is off by {found.median:.1%}, "
        f"and by {found.p95:.1%} at the 95th percentile, whatever the model"
    )


def _told(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(f"{step['first']} x {step['extra']}" for step in value) or "none"
    return str(value)


def table(every: Sequence[Fitted]) -> Table:
    """Return how far each of *every* is from what it has not seen, in all and by the bytes of a transfer.

    Errors are in per cent.  The rows of a calibration are "all", one for each decade of bytes if there are several,
    and "reads" where a calibration of writes was judged by them.
    """
    columns = {
        "calibration": "",
        "of": "transfers of so many bytes or up to ten times as many",
        "points": "left out of the fit",
        "mean %": "mean absolute error of the modelled time there",
        "median %": "median of that",
        "p95 %": "95th percentile of that",
        "bias %": "mean signed error, model minus sample",
        "floor %": "median error that is left to a model that knows what every point takes: its jobs differ so much",
        "floor p95 %": "95th percentile of that",
        "how": "what was left out",
    }
    return Table("Held-out error", columns, [row for done in every for row in _rows(done)])


def _rows(done: Fitted) -> Iterator[list[Any]]:
    calibration = done.calibration
    assert calibration.held_out is not None
    parts = {"all": calibration.held_out}
    if len(done.errors) > 1:
        parts |= {name: fit.summary(errors, "") for name, errors in done.errors.items()}
    if calibration.held_out_reads is not None:
        parts["reads"] = calibration.held_out_reads
    for name, one in parts.items():
        found = [asdict(one)[key] for key in ("mean", "median", "p95", "bias", "floor", "floor_p95")]
        numbers = [None if value is None else value * 100 for value in found]
        yield [calibration.name, name, one.points, *numbers, one.how]
