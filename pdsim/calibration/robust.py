# SPDX-License-Identifier: Apache-2.0
"""The one robust fit: parameters that bring a model nearest to measurements, in relative terms.

Residuals are ``log(model / measured)``, so that a microsecond counts for as much as a second, with scipy's
``soft_l1`` loss, which forgives outliers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = dict[str, float]


class Space(NamedTuple):
    """How a solver moves a parameter: *inward* from its value to what is moved, *outward* back."""

    inward: Callable[[float], float]
    outward: Callable[[float], float]


LOGARITHM = Space(math.log, math.exp)
"""Of what is positive."""

SHARE = Space(lambda value: math.log(value / (1.0 - value)), lambda at: 1.0 / (1.0 + math.exp(-at)))
"""Of what lies between 0 and 1."""


def linear(unit: float) -> Space:
    """Return the space of a parameter that may be 0 and is about *unit* large."""
    return Space(lambda value: value / unit, lambda at: at * unit)


class Solution(NamedTuple):
    """The fitted *values*, and the *cost* there."""

    values: Values
    cost: float


def robust_fit(
    predicted: Callable[[Values], Any],
    measured: Any,
    start: Mapping[str, float],
    *,
    scale: float,
    spaces: Mapping[str, Space] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    reach: float = math.inf,
) -> Solution:
    """Return the values that bring *predicted* nearest to *measured*, searched from *start*.

    From a relative error of *scale* on a measurement counts less.  Parameters move as logarithms unless *spaces* say
    otherwise, within their *bounds*, all others within *reach* of where they start, as they move.  Needs SciPy.
    """
    from scipy.optimize import least_squares

    seconds = np.asarray(measured, dtype=float)
    moved = {name: (spaces or {}).get(name, LOGARITHM) for name in start}
    first = np.array([moved[name].inward(value) for name, value in start.items()])
    low, high = first - reach, first + reach
    for index, name in enumerate(start):
        if bounds and name in bounds:
            low[index], high[index] = map(moved[name].inward, bounds[name])

    def values(point: Floats) -> Values:
        return {name: space.outward(float(at)) for (name, space), at in zip(moved.items(), point, strict=True)}

    def residuals(point: Floats) -> Floats:
        logs: Floats = np.log(np.asarray(predicted(values(point))) / seconds)
        return logs

    best = least_squares(residuals, first, loss="soft_l1", f_scale=scale, bounds=(low, high))
    return Solution(values(best.x), float(best.cost))


def bootstrap(fitted: Callable[[np.random.Generator], Any], resamples: int, seed: int) -> tuple[Floats, Floats]:
    """Return the ends of the 95 % intervals of what *fitted* returns for samples that it draws with replacement.

    *fitted* is called *resamples* times with one generator, which starts from *seed*.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    low, high = np.percentile(np.array([fitted(random) for _ in range(resamples)]), (2.5, 97.5), axis=0)
    return low, high
