# SPDX-License-Identifier: Apache-2.0
"""How far jobs are from one another that do the same, and what that leaves for any model to reach.

A host is not always as fast: on 2 x H200 its part of a transfer takes 1.3 or 1.7 times as long for tenths of a
second, or for a whole job, whatever is transferred (`docs/validation.md`).  Repeats within a job share that, so
several jobs are run, and the geometric mean of their medians counts.  A median of medians would do worse: where a
third of the jobs are slow, it is the time of a slow job as often as not, or that of a fast one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Floor", "floor", "mean"]

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Floor:
    """What jobs alone make of the errors of a class of points: relative, 0.01 is 1 %.

    With a spread s between jobs, the mean of *jobs* of them is s / sqrt(jobs) off the mean of any number.  That is
    the error of a model that knows this mean of every point, so no deterministic model can be expected to come
    closer.
    """

    jobs: int  # of a point, least
    apart: float  # median distance of a job's median from the mean of the others
    median: float  # of the absolute error that is left
    p95: float  # its 95th percentile


def mean(medians: Sequence[float]) -> float:
    """Return the geometric mean of the *medians* of jobs: a job that is slow by a factor counts for the factor.

    >>> round(mean([1.0, 4.0]), 9)
    2.0
    """
    return float(np.exp(np.mean(np.log(medians))))


def floor(points: Iterable[Sequence[float]]) -> Floor | None:
    """Return the floor for *points*, each with the medians of its jobs; those of one job tell nothing.

    With J jobs, m_j the logarithm of a median and m their mean, the sum of (m_j - m)^2 / J is (J - 1) / J s^2 in
    expectation, so that |m_j - m| / sqrt(J - 1) has the size s / sqrt(J) of the error of a mean of J.

    Return None if no point has several jobs.

    >>> two = floor([(1.0, 1.21)])
    >>> two.jobs, round(two.median, 4)  # log(1.21) / 2, from the mean of both
    (2, 0.0953)
    """
    several = [np.log(medians) for medians in points if len(medians) > 1]
    if not several:
        return None
    away = [np.abs(logs - logs.mean()) for logs in several]
    left = np.concatenate([by / np.sqrt(len(by) - 1) for by in away])
    apart = np.concatenate([by * len(by) / (len(by) - 1) for by in away])  # from the mean of the others
    median, p95 = np.percentile(left, (50.0, 95.0))
    return Floor(min(map(len, several)), float(np.median(apart)), float(median), float(p95))
