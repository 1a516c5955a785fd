# SPDX-License-Identifier: Apache-2.0
"""Means, percentiles and their intervals, with one rule for samples that are too small.

Percentiles are numpy's default, linear interpolation between order statistics (type 7 of Hyndman and Fan, "Sample
Quantiles in Statistical Packages", 1996).  A percentile *q* above the median is only given if at least one sample in
100 / (100 - q) can lie above it: p90 needs 10 samples, p99 needs 100, p99.9 needs 1000.  With fewer it would be the
maximum under another name, so it is None.

Latencies of neighbours are correlated, so an interval that takes them as independent is far too short.  The method
of batch means (Law, "Simulation Modeling and Analysis", 5th ed., section 9.5.3) cuts a run into a few long batches
whose values are nearly independent.  The trend test is Mann's and Kendall's (Mann, "Nonparametric tests against
trend", Econometrica 13, 1945) with the normal approximation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pdsim.results.record import Metric

__all__ = [
    "BATCHES",
    "METHOD",
    "PERCENTILES",
    "distribution",
    "half_width",
    "intervals",
    "label",
    "mean",
    "needed",
    "percentile",
    "trend",
]

METHOD = "linear interpolation between order statistics (numpy's default)"
PERCENTILES = (50.0, 90.0, 99.0, 99.9)

Values = Sequence[float] | npt.NDArray[np.float64]


def needed(q: float) -> int:
    """Return how many samples percentile *q* needs, from 0 to below 100; the median needs one."""
    if not 0 <= q < 100:
        raise ValueError(f"q(={q}) must be >= 0 and < 100")
    return 1 if q <= 50 else math.ceil(100 / (100 - Fraction(str(q))))


def percentile(values: Values, q: float) -> float | None:
    """Return percentile *q* of *values*, or None if there are fewer than `needed`."""
    if len(values) < needed(q):
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def mean(values: Values) -> float | None:
    """Return the arithmetic mean of *values*, or None if there are none."""
    return float(np.mean(np.asarray(values, dtype=np.float64))) if len(values) else None


def distribution(
    name: str,
    unit: str,
    values: Values,
    definition: str,
    percentiles: Sequence[float] = PERCENTILES,
    *,
    tabled: bool = False,
) -> tuple[Metric, ...]:
    """Return the mean and the *percentiles* of *values* as metrics ``<name>_avg_<unit>``, ``<name>_p99_<unit>``, ...

    *definition* says what one value is, such as "time from arrival to the first token".
    """
    metrics = [Metric(f"{name}_avg_{unit}", mean(values), f"mean of: {definition}", tabled)]
    for q in percentiles:
        least = f"; needs {needed(q)} samples, has {len(values)}" if len(values) < needed(q) else ""
        rule = f"p{q:g} of: {definition}{least}"
        metrics.append(Metric(f"{name}_{label(q)}_{unit}", percentile(values, q), rule, tabled))
    return tuple(metrics)


def label(q: float) -> str:
    """Return how percentile *q* is called in names: ``"p99"``, ``"p99_9"``."""
    return f"p{q:g}".replace(".", "_")


# --- intervals and trends, by batches of consecutive requests ------------------------------------------------------


Floats = npt.NDArray[np.float64]

BATCHES = {20: 2.093024, 10: 2.262157, 5: 2.776445}
"""Numbers of batches, and the 97.5 % point of Student's t with one degree of freedom fewer."""

_SMALLEST = 10
"""Values in a batch, at least."""

_TREND_BATCHES = 10
_SIGNIFICANT = 2.576
"""Standard deviations: 1 % of stationary runs are beyond by chance."""


def half_width(values: Floats, q: float | None) -> float | None:
    """Return half the length of the 95 % interval of percentile *q* of *values*, in order; of their mean for None.

    The most batches are taken whose values show no correlation, and the fewest if all do.  None for too few values:
    five batches of at least ten, each large enough for *q*.
    """
    least = max(_SMALLEST, 1 if q is None else needed(q))
    half = None
    for batches, quantile in BATCHES.items():
        if len(values) < batches * least:
            continue
        size = len(values) // batches
        parts = np.reshape(np.asarray(values[: batches * size], np.float64), (batches, size))
        of_batches = np.array([mean(part) for part in parts]) if q is None else np.percentile(parts, q, axis=1)
        half = quantile * float(np.std(of_batches, ddof=1)) / math.sqrt(batches)
        if _correlation(of_batches) <= 1.645 / math.sqrt(batches):
            break
    return half


def intervals(name: str, unit: str, values: Floats, percentiles: Sequence[float]) -> list[Metric]:
    """Return `half_width` of the mean and of *percentiles*, beside the metrics of `statistics.distribution`."""
    rule = "half the 95 % interval of the {}, by batch means; needs 5 batches of 10 requests or more"
    asked: list[tuple[str, float | None]] = [("avg", None), *((label(q), q) for q in percentiles)]
    return [
        Metric(f"{name}_{what}_half_{unit}", half_width(values, q), rule.format(what), tabled=True)
        for what, q in asked
    ]


def _correlation(values: Floats) -> float:
    centred = values - values.mean()
    square = float(np.dot(centred, centred))
    return float(np.dot(centred[:-1], centred[1:])) / square if square else 0.0


def trend(values: Floats) -> float | None:
    """Return by how much *values*, in order, grow from the first to the last tenth, if they do; 0.0 if they do not.

    They do if the means of ten batches rank upwards more than 1 % of stationary runs would.  None for fewer than
    100.
    """
    if len(values) < _TREND_BATCHES * _SMALLEST:
        return None
    means = np.array([part.mean() for part in np.array_split(values, _TREND_BATCHES)])
    ranks = sum(float(np.sum(np.sign(means[index + 1 :] - value))) for index, value in enumerate(means))
    n = _TREND_BATCHES
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return float(means[-1] - means[0]) if (ranks - 1) / deviation > _SIGNIFICANT else 0.0
