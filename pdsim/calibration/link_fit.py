# SPDX-License-Identifier: Apache-2.0
"""Fit what an engine over TCP costs on a link of known rate and delay: `conf/calibration/*-link.yaml`.

Knows no link and no simulation: whoever fits says what the model predicts with given parameters.  The samples and
the command are `benchmarks.known_link` and `benchmarks.known_link_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["LinkParameter", "fit"]

PARAMETERS = ("latency", "descriptor")
"""What is fitted: seconds of an answer, and of a block beside the bytes; fields of
`pdsim.hardware.costs.EngineModel`."""

START = (6e-4, 1e-4)
"""Where the search begins, in seconds."""


class LinkParameter(NamedTuple):
    """One parameter and its 95 % interval, in seconds."""

    name: str
    value: float
    low: float
    high: float


def fit(predicted: Callable[[float, float], Sequence[float]], measured: Sequence[float]) -> list[LinkParameter]:
    """Return the latency and the descriptor cost that bring *predicted* nearest to *measured*.

    Nearest is in relative terms.

    *predicted* returns the seconds of each sample from latency and descriptor; *measured* are medians, in seconds.
    Outliers count less (scipy's ``soft_l1`` from 2 % on).

    In the order of `PARAMETERS`.  Intervals are those of a linear least-squares fit at the solution: 1.96 standard
    errors of the logarithms, with the variance of the residuals there.  Needs at least three samples, and scipy.
    """
    from scipy.optimize import least_squares

    seconds = np.asarray(measured)

    def residuals(logs: Any) -> Any:
        latency, descriptor = np.exp(logs)
        return np.log(np.asarray(predicted(latency, descriptor)) / seconds)

    found = least_squares(residuals, np.log(START), loss="soft_l1", f_scale=0.02, diff_step=1e-2)
    variance = 2.0 * found.cost / (len(seconds) - len(START))
    spread = np.exp(1.96 * np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac)) * variance))
    values = np.exp(found.x)
    return [
        LinkParameter(name, float(value), float(value / by), float(value * by))
        for name, value, by in zip(PARAMETERS, values, spread, strict=True)
    ]
