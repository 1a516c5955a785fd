# SPDX-License-Identifier: Apache-2.0
"""How far predictions are from measurements: signed and absolute relative errors, by class and by decade of size.

An error is (predicted - measured) / measured; median and 95th percentile of its absolute value come with 95 %
intervals from a bootstrap over the points.  A class is what one error is stated for, such as pairs of ranks; its
points are of all sizes, so that a model which fails at one end of them cannot hide.  Transfers, collectives and live
servers are judged alike; of servers a class is a metric, and a point is a load, or single requests of one length.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import geometric_mean, median
from typing import Any, TypeAlias

import numpy as np

from pdsim.calibration import samples
from pdsim.calibration.robust import Floats
from pdsim.calibration.samples import Floor
from pdsim.core.errors import ConfigError
from pdsim.results.record import Metric, Table, percentile

RESAMPLES = 1000


@dataclass(frozen=True)
class Value:
    """One quantity of one point, predicted or measured."""

    group: str  # the class that it is judged in
    label: str  # of the point, and of the flow where it has several
    quantity: str  # "time" in seconds, or "rate" in bytes/s
    nbytes: int  # of a transfer
    value: float
    low: float | None = None  # of a prediction: 95 %
    high: float | None = None
    per_job: tuple[float, ...] = ()  # of a measurement: that of each job, whose geometric mean *value* is
    descriptors: int = 0  # of a transfer; 0: not of one
    gpus: int = 0  # that take part; 0: unknown
    factor: float = 1.0  # of a prediction: how far beyond the calibration's samples it is

    @property
    def key(self) -> tuple[str, str, str]:
        """The key by which a prediction and its measurement are matched."""
        return self.group, self.label, self.quantity


@dataclass(frozen=True)
class Compared:
    """A prediction beside its measurement, which is in the unit of ``predicted.quantity``: seconds or bytes/s."""

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

    @property
    def spread(self) -> float | None:
        """Largest relative deviation of a job from the measured value; None with a single job."""
        if len(self.per_job) < 2:
            return None
        return max(abs(each / self.measured - 1.0) for each in self.per_job)

    def within(self, bound: float) -> bool:
        """Return whether the error is at most *bound*, or twice `spread` where that is more."""
        return abs(self.error) <= max(bound, 2.0 * (self.spread or 0.0))

    def row(self) -> dict[str, Any]:
        """Return the row of ``validation.parquet``."""
        judged = {"measured": self.measured, "error": self.error, "covered": self.covered}
        return asdict(self.predicted) | {"per_job": list(self.per_job)} | judged


@dataclass(frozen=True)
class Bound:
    """Largest allowed error of a class, relative: 0.1 is 10 %.  None sets no limit."""

    median: float = math.inf
    p95: float | None = None
    seconds: float | None = None  # of the median error of times, not relative
    mean: float | None = None
    each: float | None = None  # of a single point, or twice what its jobs differ by; a class of such is not beyond


@dataclass(frozen=True)
class Class:
    """The errors of a class of points.  Pairs are 95 % intervals, errors relative where nothing else is said."""

    name: str
    points: int
    bias: float  # median of the signed error
    mean: float  # of the absolute error
    median: float  # of the absolute error
    median_interval: tuple[float, float]
    p95: float | None  # needs 20 points
    p95_interval: tuple[float, float] | None
    worst: str  # label of the point with the largest error
    bound: Bound | None = None
    floor: Floor | None = None  # what jobs that differ leave of the error; None if there was one job
    seconds: float | None = None  # median of the absolute error of times, not relative
    within: int | None = None  # points within `Bound.each`, if there is one
    inside: int | None = None  # points within their 95 % interval, if they have one

    @property
    def beyond(self) -> bool:
        """Whether it exceeds its bound; a quantity that was not computed exceeds nothing."""
        bound = self.bound or Bound()
        pairs = ((getattr(self, name), getattr(bound, name)) for name in ("median", "p95", "seconds", "mean"))
        exceeded = any(value is not None and limit is not None and value > limit for value, limit in pairs)
        return exceeded and self.within != self.points


def mean(runs: Sequence[Sequence[Value]]) -> list[Value]:
    """Return the geometric mean over *runs*, which are jobs, of each quantity that all of them have.

    A quantity that a job lacks is left out, because a mean over fewer jobs would have another floor.
    """
    means = []
    for same in grouped((value for run in runs for value in run), lambda value: value.key).values():
        values = tuple(value.value for value in same)
        if len(same) == len(runs):
            several = len(values) > 1 and min(values) > 0
            means.append(replace(same[0], value=geometric_mean(values), per_job=values) if several else same[0])
    return means


def compare(predicted: Iterable[Value], measured: Iterable[Value]) -> list[Compared]:
    """Return the values that match, in the order of *predicted*.  Raise a `ConfigError` if there are none.

    Values match by `Value.key`; measurements that are not positive and finite are left out.
    """
    have = {value.key: value for value in measured if value.value > 0 and math.isfinite(value.value)}
    pairs = [(value, have[value.key]) for value in predicted if value.key in have]
    if not pairs:
        raise ConfigError(
            "nothing to compare: no point is both predicted and measured; take files of the same design"
        )
    return [Compared(value, real.value, tuple(real.per_job)) for value, real in pairs]


def by_class(both: Sequence[Compared], bounds: Mapping[str, Bound], seed: int) -> list[Class]:
    """Return the errors of every class, each with the bound of its name or of the first word of it, or that of "".

    Intervals are drawn from *seed* and the name of the class, whichever others there are.
    """
    groups = grouped(both, lambda each: each.predicted.group)
    return [_class(name, own, _bound(name, bounds), seed) for name, own in groups.items()]


def by_decade(both: Sequence[Compared], seed: int) -> list[Class]:
    """Return the errors of the times of every class by decade of bytes: ``"pair, 1e6 B"``; these have no bounds."""
    sized = [each for each in both if each.predicted.quantity == "time" and each.predicted.nbytes > 0]

    def name(each: Compared) -> str:
        return f"{each.predicted.group}, 1e{math.floor(math.log10(each.predicted.nbytes))} B"

    return [_class(group, own, None, seed) for group, own in grouped(sized, name).items()]


def grouped(every: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return *every* by its *key*, in the order in which keys first occur."""
    groups: dict[Any, list[Any]] = {}
    for each in every:
        groups.setdefault(key(each), []).append(each)
    return groups


def _bound(name: str, bounds: Mapping[str, Bound]) -> Bound | None:
    return bounds.get(name) or bounds.get(name.partition(" ")[0].rstrip(",")) or bounds.get("")


def _class(name: str, both: Sequence[Compared], bound: Bound | None, seed: int) -> Class:
    signed = np.array([each.error for each in both])
    errors = np.abs(signed)
    draw = np.random.Generator(np.random.PCG64([seed, *name.encode()]))
    resampled = errors[draw.integers(0, len(errors), (RESAMPLES, len(errors)))]  # shape (resample, point)
    p95 = percentile(errors, 95.0)
    times = [abs(one.predicted.value - one.measured) for one in both if one.predicted.quantity == "time"]
    each = bound.each if bound else None
    covered = [one.covered for one in both if one.covered is not None]
    return Class(
        name=name,
        points=len(both),
        bias=float(np.median(signed)),
        mean=float(np.mean(errors)),
        median=float(np.median(errors)),
        median_interval=_interval(np.median(resampled, axis=1)),
        p95=p95,
        p95_interval=None if p95 is None else _interval(np.percentile(resampled, 95.0, axis=1)),
        worst=both[int(np.argmax(errors))].predicted.label,
        bound=bound,
        floor=samples.floor(each.per_job for each in both),
        seconds=float(np.median(times)) if times else None,
        within=None if each is None else sum(one.within(each) for one in both),
        inside=sum(covered) if covered else None,
    )


def _interval(values: Floats) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def tables(classes: Sequence[Class], decades: Sequence[Class]) -> list[Table]:
    """Return the table of classes and, if there are any, that of size decades; errors in per cent."""
    columns = {
        "points": "that were predicted and measured",
        "bias %": "median of the signed error, (predicted - measured) / measured",
        "mean %": "of the absolute error",
        "median %": "likewise",
        "95 % CI": "of that: bootstrap over the points",
        "p95 %": "95th percentile of the absolute error; needs 20 points",
        "CI": "of that",
        "worst": "the point with the largest error",
    }
    if floors := any(each.floor for each in (*classes, *decades)):
        columns |= {
            "floor %": "median error left to a model that knows what every point takes: its jobs differ so much",
            "floor p95 %": "95th percentile of that",
        }
    judged = columns | {"bound %": "of median and p95, or of each point", "verdict": "ok, or beyond the bound"}
    whole = [[*_cells(each, floors), _limits(each.bound), "beyond" if each.beyond else "ok"] for each in classes]
    if any(each.bound is not None and each.bound.seconds is not None for each in classes):
        judged |= {"median ms": "of the absolute error of times, not relative", "bound ms": "of that"}
        for row, each in zip(whole, classes, strict=True):
            pair = each.seconds, each.bound.seconds if each.bound else None
            row += ["-" if seconds is None else seconds * 1e3 for seconds in pair]
    if any(each.within is not None for each in classes):
        judged |= {"within": "points within their bound, or within twice what repeats differ by"}
        whole = [[*row, each.within] for row, each in zip(whole, classes, strict=True)]
    if any(each.inside is not None for each in classes):
        judged |= {"inside": "points within their 95 % interval"}
        whole = [[*row, each.inside] for row, each in zip(whole, classes, strict=True)]
    made = [Table("Error of each class", {"class": "of points"} | judged, whole)]
    if decades:
        parts = [_cells(each, floors) for each in decades]
        made.append(Table("Error of times by size", {"class": "and decade of bytes of a transfer"} | columns, parts))
    return made


def points(both: Sequence[Compared]) -> Table:
    """Return the table of every point; times are in ms if all take that long, otherwise in us."""
    unit, scale = ("ms", 1e3) if all(one.measured >= 1e-3 for one in both) else ("us", 1e6)
    columns = {"point": "and flow", "class": "", "quantity": f"time in {unit}, rate in GB/s"}
    columns |= {"predicted": "", "low": "95 %", "high": "95 %", "measured": "", "error %": "signed"}
    columns |= {"floor %": "how far repeated jobs are from what was measured, at most"}
    rows = []
    for each in both:
        value, spread = each.predicted, each.spread
        numbers = (value.value, value.low, value.high, each.measured)
        by = scale if value.quantity == "time" else 1e-9
        scaled = [None if number is None else number * by for number in numbers]
        error = [each.error * 100, None if spread is None else spread * 100]
        rows.append([value.label, value.group, value.quantity, *scaled, *error])
    return Table("Every point", columns, rows)


def failures(classes: Sequence[Class]) -> list[str]:
    """Return a line for each class beyond its bound."""
    lines = []
    for wrong in (each for each in classes if each.beyond):
        bound = wrong.bound or Bound()
        error = f"median {wrong.median:.1%}" if bound.mean is None else f"mean {wrong.mean:.1%}"
        if bound.seconds is not None and wrong.seconds is not None:
            error = f"median {wrong.seconds * 1e3:.2f} ms"
        left = f"; repeated jobs differ by {wrong.floor.median:.1%}" if wrong.floor else ""
        lines.append(f"{wrong.name}: error beyond its bound, {error}{left}")
    return lines


def _cells(each: Class, floors: bool) -> list[Any]:
    def ends(interval: tuple[float, float]) -> str:
        return f"{interval[0] * 100:.1f} to {interval[1] * 100:.1f}"

    p95 = None if each.p95 is None else each.p95 * 100
    median = [each.bias * 100, each.mean * 100, each.median * 100, ends(each.median_interval)]
    left = [each.floor.median * 100, each.floor.p95 * 100] if each.floor else [None, None]
    spread = ends(each.p95_interval) if each.p95_interval else "-"
    return [each.name, each.points, *median, p95, spread, each.worst, *(left if floors else [])]


def _limits(bound: Bound | None) -> str:
    if bound is not None and bound.each is not None:
        return f"{bound.each * 100:g}"
    if bound is None or bound.median == math.inf:
        return "-"
    return f"{bound.median * 100:g}" + (f" and {bound.p95 * 100:g}" if bound.p95 is not None else "")


def prediction_table(values: Sequence[Value]) -> Table:
    """Return the table of predictions alone, by class: times in us, rates in GB/s."""
    columns = {
        "class": "of points",
        "quantity": "time in us, rate in GB/s",
        "points": "that are predicted",
        "least": "of them",
        "median": "",
        "most": "",
        "within %": "median of half the 95 % interval, of the prediction",
    }
    rows: list[list[Any]] = []
    for (name, quantity), group in grouped(values, lambda value: (value.group, value.quantity)).items():
        numbers = np.array([value.value for value in group]) * (1e6 if quantity == "time" else 1e-9)
        spans = [(one.high - one.low) / one.value for one in group if one.low is not None and one.high is not None]
        within = float(np.median(spans)) * 50.0 if spans else None
        rows.append(
            [name, quantity, len(group), *(float(of(numbers)) for of in (np.min, np.median, np.max)), within]
        )
    return Table("Predicted", columns, rows)


def metrics(both: Sequence[Compared], classes: Sequence[Class]) -> list[Metric]:
    """Return the summary; errors are relative, and None where there are too few points."""
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


LATENCIES = ("ttft", "tpot", "e2e", "prefilled", "handoff")
"""Columns of a row, where it has them."""

BOUNDS = {"ttft_p50": 0.10, "ttft_p90": 0.15, "ttft_p99": 0.15, "tpot_p50": 0.05, "tpot_p99": 0.15, "e2e_p50": 0.05}
"""What is compared of each load, and the relative error that is asked for."""

SINGLE = "single-"
"""How the names of single requests of one length begin; the length in tokens follows."""

Quantiles: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by part and metric."""


def quantiles(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each metric of `BOUNDS`, in seconds, of the *rows* that ended well, if they are enough for it.

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


def values_of(of: Quantiles) -> list[Value]:
    """Return *of* as values to compare, whose group is the metric and whose label is the part."""
    every = ((part, *each) for part, metrics in of.items() for each in metrics.items())
    return [Value(metric, part, "time", 0, seconds) for part, metric, seconds in every if metric in BOUNDS]


def compare_files(expected: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Compared]:
    """Return the values that both files of a validation of servers have, without requests that failed.

    A measured value is the median of the runs that have it; *per_job* has the value of each run.  Raise a
    `ConfigError` if the files have nothing in common.
    """
    every: list[Value] = []
    for run in measured["runs"]:
        ended = {name: [row for row in rows if row["status"] == "ok"] for name, rows in run.items()}
        every += values_of({name: quantiles(rows) for name, rows in ended.items()})
    medians = []
    for same in grouped(every, lambda value: value.key).values():
        seen = tuple(value.value for value in same)
        medians.append(replace(same[0], value=median(seen), per_job=seen))
    return compare(values_of(expected["predicted"]), medians)
