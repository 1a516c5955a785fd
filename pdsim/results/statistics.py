# SPDX-License-Identifier: Apache-2.0
"""Means and percentiles, with one rule for samples that are too small.

Percentiles are numpy's default, linear interpolation between order statistics (type 7 of Hyndman and Fan, "Sample
Quantiles in Statistical Packages", 1996).  A percentile *q* above the median is only given if at least one sample in
100 / (100 - q) can lie above it: p90 needs 10 samples, p99 needs 100, p99.9 needs 1000.  With fewer it would be the
maximum under another name, so it is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pdsim.results.record import Metric

__all__ = ["METHOD", "PERCENTILES", "distribution", "label", "mean", "needed", "percentile"]

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
