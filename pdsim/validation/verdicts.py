# SPDX-License-Identifier: Apache-2.0
"""How far predictions are from measurements: signed and absolute relative errors, by class and by decade of size.

An error is (predicted - measured) / measured; median and 95th percentile of its absolute value come with 95 %
intervals from a bootstrap over the points.  A class is what one error is stated for, such as pairs of ranks; its
points are of all sizes, so that a model which fails at one end of them cannot hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.calibration import samples
from pdsim.calibration.samples import Floor, floor
from pdsim.core.errors import ConfigError
from pdsim.results.record import Metric, Table, percentile

__all__ = [
    "Bound",
    "Class",
    "Compared",
    "Value",
    "by_class",
    "by_decade",
    "compare",
    "mean",
    "metrics",
    "prediction_table",
    "tables",
]

RESAMPLES = 1000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Value:
    """One quantity of one point, predicted or measured.

    Measurements and predictions are the same class, so that either may stand on either side of a comparison.
    """

    group: str  # the class that it is judged in
    label: str  # of the point, and of the flow where it has several
    quantity: str  # "time" in seconds, or "rate" in bytes/s
    nbytes: int  # of a transfer
    value: float
    low: float | None = None  # of a prediction: 95 %, from the calibration's uncertainty
    high: float | None = None
    per_job: tuple[float, ...] = ()  # of a measurement: that of each job, whose geometric mean *value* is
    descriptors: int = 0  # of a transfer; 0: not of one
    gpus: int = 0  # that take part; 0: unknown
    factor: float = 1.0  # of a prediction: how far beyond the calibration's samples it is

    @property
    def key(self) -> tuple[str, str, str]:
        """What a prediction and a measurement of one thing have in common."""
        return self.group, self.label, self.quantity


@dataclass(frozen=True)
class Compared:
    """A prediction beside its measurement.

    *measured* is in the unit of ``predicted.quantity``: seconds or bytes/s.
    """

    predicted: Value
    measured: float
    per_job: tuple[float, ...] = ()  # what was measured in each job, where there were several

    @property
    def error(self) -> float:
        """Relative and signed: 0.1 is a prediction 10 % too high."""
        return (self.predicted.value - self.measured) / self.measured

    @property
    def covered(self) -> bool | None:
        """Whether the measurement lies in the interval; None if there is none."""
        low, high = self.predicted.low, self.predicted.high
        return None if low is None or high is None else low <= self.measured <= high

    def row(self) -> dict[str, Any]:
        """Return the row of ``validation.parquet``."""
        judged = {"measured": self.measured, "error": self.error, "covered": self.covered}
        return asdict(self.predicted) | {"per_job": list(self.per_job)} | judged


@dataclass(frozen=True)
class Bound:
    """What the absolute error of a class may be.

    *median* and *p95* are relative, 0.1 is 10 %; a limit that is None, or infinite, does not judge.
    """

    median: float = math.inf
    p95: float | None = None
    seconds: float | None = None  # of the median error of times, not relative


@dataclass(frozen=True)
class Class:
    """The errors of a class of points.  Pairs are 95 % intervals, errors relative where nothing else is said.

    Made by `by_class` and `by_decade`; printed by `tables`.
    """

    name: str
    points: int
    bias: float  # median of the signed error
    median: float  # of the absolute error
    median_interval: tuple[float, float]
    p95: float | None  # needs 20 points
    p95_interval: tuple[float, float] | None
    worst: str  # label of the point with the largest error
    bound: Bound | None = None
    floor: Floor | None = None  # what jobs that differ leave of the error; None if there was one job
    seconds: float | None = None  # median of the absolute error of times, not relative

    @property
    def beyond(self) -> bool:
        """Whether it exceeds its bound.

        A quantity that was not computed, such as a p95 of fewer than 20 points, exceeds nothing.
        """
        if self.bound is None:
            return False
        limits = (self.median, self.bound.median), (self.p95, self.bound.p95), (self.seconds, self.bound.seconds)
        return any(value is not None and limit is not None and value > limit for value, limit in limits)


def mean(runs: Sequence[Sequence[Value]]) -> list[Value]:
    """Return the geometric mean over *runs*, a job each, of each quantity that all of them have.

    A quantity that a job lacks is left out, because a mean over fewer jobs would have another floor.
    """
    by_key: dict[tuple[str, str, str], list[Value]] = {}
    for value in (value for run in runs for value in run):
        by_key.setdefault((value.group, value.label, value.quantity), []).append(value)
    every = [same for same in by_key.values() if len(same) == len(runs)]
    return [_mean(same) for same in every]


def _mean(same: Sequence[Value]) -> Value:
    each = tuple(value.value for value in same)
    if len(each) == 1 or min(each) <= 0:
        return same[0]
    return replace(same[0], value=samples.mean(each), per_job=each)


def compare(predicted: Iterable[Value], measured: Iterable[Value]) -> list[Compared]:
    """Return what both have, in the order of *predicted*.  Raise a `ConfigError` if there is nothing.

    Values match by `Value.key`; measurements that are not positive and finite are left out.
    """
    have = {value.key: value for value in measured if value.value > 0 and math.isfinite(value.value)}
    both = [
        Compared(value, have[value.key].value, tuple(have[value.key].per_job))
        for value in predicted
        if value.key in have
    ]
    if not both:
        raise ConfigError(
            "nothing to compare: no point is both predicted and measured; take files of the same design"
        )
    return both


def by_class(both: Sequence[Compared], bounds: Mapping[str, Bound], seed: int) -> list[Class]:
    """Return the errors of every class, each with the bound of its name or of the first word of it, or that of "".

    Classes come in the order in which they first occur.  Intervals are drawn from *seed* and the name of the class,
    so that a class has the same interval whichever others there are.
    """
    groups = dict.fromkeys(each.predicted.group for each in both)
    return [
        _class(name, [each for each in both if each.predicted.group == name], _bound(name, bounds), seed)
        for name in groups
    ]


def by_decade(both: Sequence[Compared], seed: int) -> list[Class]:
    """Return the errors of the times of every class by decade of bytes: ``"pair, 1e6 B"``.

    Rates are left out, and these classes have no bounds.
    """
    groups: dict[str, list[Compared]] = {}
    for each in both:
        if each.predicted.quantity == "time" and each.predicted.nbytes > 0:
            decade = math.floor(math.log10(each.predicted.nbytes))
            groups.setdefault(f"{each.predicted.group}, 1e{decade} B", []).append(each)
    return [_class(name, groups[name], None, seed) for name in groups]


def _bound(name: str, bounds: Mapping[str, Bound]) -> Bound | None:
    return bounds.get(name) or bounds.get(name.partition(" ")[0].rstrip(",")) or bounds.get("")


def _class(name: str, both: Sequence[Compared], bound: Bound | None, seed: int) -> Class:
    signed = np.array([each.error for each in both])
    errors = np.abs(signed)
    draw = np.random.Generator(np.random.PCG64([seed, *name.encode()]))
    samples = errors[draw.integers(0, len(errors), (RESAMPLES, len(errors)))]  # shape (resample, point)
    p95 = percentile(errors, 95.0)
    times = [abs(each.predicted.value - each.measured) for each in both if each.predicted.quantity == "time"]
    return Class(
        name=name,
        points=len(both),
        bias=float(np.median(signed)),
        median=float(np.median(errors)),
        median_interval=_interval(np.median(samples, axis=1)),
        p95=p95,
        p95_interval=None if p95 is None else _interval(np.percentile(samples, 95.0, axis=1)),
        worst=both[int(np.argmax(errors))].predicted.label,
        bound=bound,
        floor=floor(each.per_job for each in both),
        seconds=float(np.median(times)) if times else None,
    )


def _interval(values: Floats) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


# --- for people ----------------------------------------------------------------------------------------------------


def tables(classes: Sequence[Class], decades: Sequence[Class]) -> list[Table]:
    """Return the table of classes and that of size decades; errors in per cent."""
    columns = {
        "points": "that were predicted and measured",
        "bias %": "median of the signed error, (predicted - measured) / measured",
        "median %": "of the absolute error",
        "95 % CI": "of that: bootstrap over the points",
        "p95 %": "95th percentile of the absolute error; needs 20 points",
        "CI": "of that",
        "worst": "the point with the largest error",
    }
    if any(each.floor for each in (*classes, *decades)):
        columns |= {
            "floor %": "median error left to a model that knows what every point takes: its jobs differ so much",
            "floor p95 %": "95th percentile of that",
        }
    judged = (
        {"class": "of points"} | columns | {"bound %": "of median and p95", "verdict": "ok, or beyond the bound"}
    )
    several = "floor %" in columns
    verdicts = [[_limits(each.bound), "beyond" if each.beyond else "ok"] for each in classes]
    whole = [[*_cells(each, several), *verdict] for each, verdict in zip(classes, verdicts, strict=True)]
    if any(each.bound is not None and each.bound.seconds is not None for each in classes):
        judged |= {"median ms": "of the absolute error of times, not relative", "bound ms": "of that"}
        whole = [[*row, *_milliseconds(each)] for row, each in zip(whole, classes, strict=True)]
    parts = [_cells(each, several) for each in decades]
    return [
        Table("Error of each class", judged, whole),
        Table("Error of times by size", {"class": "and decade of bytes of a transfer"} | columns, parts),
    ]


def prediction_table(values: Sequence[Value]) -> Table:
    """Return the table of predictions alone, by class: times in us, rates in GB/s."""
    columns = {
        "class": "of points",
        "quantity": "time in us, rate in GB/s",
        "points": "that are predicted",
        "least": "of them",
        "median": "",
        "most": "",
        "within %": "median of half the 95 % interval that the calibration's uncertainty leaves, of the prediction",
    }
    groups: dict[tuple[str, str], list[Value]] = {}
    for value in values:
        groups.setdefault((value.group, value.quantity), []).append(value)
    return Table("Predicted", columns, [_predicted(group) for group in groups.values()])


def _predicted(group: Sequence[Value]) -> list[Any]:
    name, quantity = group[0].group, group[0].quantity
    numbers = np.array([value.value for value in group]) * (1e6 if quantity == "time" else 1e-9)
    ends = [(value.low, value.high, value.value) for value in group]
    spans = [(high - low) / at for low, high, at in ends if low is not None and high is not None]
    within = float(np.median(spans)) * 50.0 if spans else None
    told = [float(of(numbers)) for of in (np.min, np.median, np.max)]
    return [name, quantity, len(group), *told, within]


def _cells(each: Class, several: bool) -> list[Any]:
    interval = _range(each.p95_interval) if each.p95_interval else "-"
    p95 = None if each.p95 is None else each.p95 * 100
    median = [each.bias * 100, each.median * 100, _range(each.median_interval)]
    left = [each.floor.median * 100, each.floor.p95 * 100] if each.floor else [None, None]
    return [each.name, each.points, *median, p95, interval, each.worst, *(left if several else [])]


def _range(interval: tuple[float, float]) -> str:
    return f"{interval[0] * 100:.1f} to {interval[1] * 100:.1f}"


def _limits(bound: Bound | None) -> str:
    if bound is None or bound.median == math.inf:
        return "-"
    return f"{bound.median * 100:g}" + (f" and {bound.p95 * 100:g}" if bound.p95 is not None else "")


def _milliseconds(each: Class) -> list[Any]:
    limit = each.bound.seconds if each.bound is not None else None
    return ["-" if seconds is None else seconds * 1e3 for seconds in (each.seconds, limit)]


def metrics(both: Sequence[Compared], classes: Sequence[Class]) -> list[Metric]:
    """Return the summary.

    Errors are relative, not per cent; a metric is None where there are too few points for it.
    """
    errors = np.abs([each.error for each in both])
    covered = [each.covered for each in both if each.covered is not None]
    share = sum(covered) / len(covered) if covered else None
    return [
        Metric("points", len(both), "quantities that were predicted and measured"),
        Metric("classes_beyond", sum(each.beyond for each in classes), "classes that exceed their bounds"),
        Metric("error_median", percentile(errors, 50.0), "median of the absolute relative error of all of them"),
        Metric("error_p95", percentile(errors, 95.0), "95th percentile of that; needs 20"),
        Metric(
            "covered", share, "share of measurements in the interval of their prediction; null without intervals"
        ),
    ]
