# SPDX-License-Identifier: Apache-2.0
"""A robust fit of an engine's parameters to samples, the choice of its form, and what the samples cannot tell.

Parameters are fitted as logarithms, residuals are ``log(model / sample)``, so that a microsecond counts for as much
as a second, with a loss that forgives outliers (scipy's ``soft_l1``).  The form is the simplest one whose error on
folds that it has not seen is within a standard error of the best's, in pairs (after Breiman et al., "Classification
and Regression Trees", 1984).  Intervals are from a bootstrap over whole configurations.  A ramp ends at a whole
number of descriptors, to which all else is fitted once more.  Knows neither files nor machines.

No choice hangs on the last digits of a least-squares solution, which differ between processors: errors and costs
that differ by less than a margin count as equal, and among equals the first is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pdsim.calibration.definition import HeldOut
from pdsim.calibration.forms import FORMS, Floats, Form, Points, stages_of, start_of
from pdsim.core.errors import ConfigError
from pdsim.hardware.costs import EngineModel

__all__ = ["LEAST", "Fit", "choose", "errors", "fit", "held_out", "intervals", "simplest", "summary", "told"]

Ints: TypeAlias = npt.NDArray[np.int64]

SCALE = 0.02
"""The relative error from which on a sample counts less: about what repeats of a transfer differ by."""

STARTS = 4
FOLDS = 5
RESAMPLES = 400
LEAST = 3
"""Fewer samples than this are no basis for any form."""

WIDEST = 4.0
"""An interval from x / 2 to 2 x, or wider, says that the samples do not tell the parameter."""

KNEE = 16.0
"""The same for where a ramp ends, which is told by the counts on either side of it only, each twice the one
before."""

NEGLIGIBLE = 1e-5
"""Relative errors that differ by less are equal: a solver stops within 1e-8, and a calibration has five digits."""

EQUAL = 1e-6
"""Costs that differ by a smaller share are equal: a solver stops where a step gains a share of less than 1e-8."""

DEPENDENT = 1e-3
"""Singular values of the Jacobian below this share of the largest mean that two parameters do the same."""

_EXPENDABLE = (
    *("first2", "extra2", "first1", "extra1", "saving"),
    *(
        "read",
        "read_descriptor",
        "read_rate",
        "wire_descriptor",
        "rate",
        "descriptor",
        "latency",
        "call",
        "queue_rate",
    ),
)
"""Which of several parameters that cannot be told apart is given up first."""


@dataclass(frozen=True)
class Fit:
    """A *form* with the parameters *at* which it is closest; *unidentified* are those that the samples do not tell.

    *at* holds a value for every parameter that any form has, in seconds, bytes and bytes/s, whether it is free or
    not; see `pdsim.calibration.forms.start_of`.
    """

    form: Form
    at: Mapping[str, float]
    unidentified: tuple[str, ...] = ()

    def seconds(self, points: Points) -> Floats:
        """Return what the fit says that each of *points* takes."""
        return self.form.seconds(self.at, points)


def errors(found: Fit, points: Points) -> Floats:
    """Return the relative error of *found* at each of *points*: model over sample, minus one.

    Shape (point,); positive where the model is too slow.
    """
    return found.seconds(points) / points.seconds - 1.0


def fit(form: Form, points: Points, base: EngineModel, at: Mapping[str, float] | None = None) -> Fit:
    """Return the best fit of *form*: from *at*, which also says what is not free, or from several starts and *base*.

    Raise a `ConfigError` if there are too few samples.

    With *at*, one search begins there: that is how folds and resamples are fitted again.  Without, `STARTS` searches
    begin at what the samples suggest, and the first whose cost equals the least wins.  Where a ramp ends is rounded
    to a whole number of descriptors, and the other parameters are fitted once more to that.
    """
    if len(points) < LEAST:
        raise ConfigError(f"{len(points)} samples are no basis for a fit; measure {LEAST} or more")
    fixed = dict(at) if at is not None else start_of(base, points.queues)
    found = _best(form, points, fixed, [at] if at is not None else list(_starts(form, points)))
    if ends := {name: max(1.0, float(round(found[name]))) for name in form.free if name.startswith("first")}:
        rest = replace(form, free=tuple(name for name in form.free if name not in ends))
        found = _best(rest, points, found | ends, [found])
    return Fit(form, found)


def _best(
    form: Form, points: Points, fixed: Mapping[str, float], starts: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    if not form.free:
        return dict(fixed)
    results = [_least(form, points, fixed, start) for start in starts]
    enough = min(float(result.cost) for result in results) * (1.0 + EQUAL) + len(points) * NEGLIGIBLE**4
    found = next(result for result in results if result.cost <= enough)
    return {**fixed, **dict(zip(form.free, map(float, np.exp(found.x)), strict=True))}


def _least(form: Form, points: Points, fixed: Mapping[str, float], start: Mapping[str, float]) -> Any:
    # Each stays within a factor of ``exp(12)`` of its start.
    from scipy.optimize import least_squares

    logs = np.log([start[name] for name in form.free])
    return least_squares(
        _residuals(form, points, fixed), logs, loss="soft_l1", f_scale=SCALE, bounds=(logs - 12.0, logs + 12.0)
    )


def _residuals(form: Form, points: Points, fixed: Mapping[str, float]) -> Any:
    def residuals(logs: Floats) -> Floats:
        at = {**fixed, **dict(zip(form.free, np.exp(logs), strict=True))}
        found: Floats = np.log(form.seconds(at, points) / points.seconds)
        return found

    return residuals


def _starts(form: Form, points: Points) -> Iterator[dict[str, float]]:
    # The first is the guess itself; the others multiply it by log-normal factors drawn from a fixed seed.
    total = points.blocks * points.size
    least, rate = float(points.seconds.min()), float((total / points.seconds).max())
    each = float((points.seconds / points.blocks / points.concurrency).min())
    middle = math.sqrt(float(points.blocks.max()))
    guess = {"call": 0.7 * least, "latency": 0.7 * least, "descriptor": each, "rate": rate, "queue_rate": rate * 1.1}
    guess |= {"wire_descriptor": 0.5 * each, "saving": 0.2 * least}
    guess |= {"extra1": each, "first1": max(2.0, middle / 3), "extra2": 0.3 * each, "first2": max(4.0, 6 * middle)}
    random = np.random.Generator(np.random.PCG64(len(points)))
    for index in range(STARTS):
        factors = np.exp(random.normal(0.0, 0.0 if not index else 1.0, len(form.free)))
        yield {name: guess[name] * float(factor) for name, factor in zip(form.free, factors, strict=True)}


# --- which form ----------------------------------------------------------------------------------------------------


def candidates(points: Points, base: EngineModel, forms: Sequence[Form] = FORMS) -> list[Form]:
    """Return those of *forms* that *points* can tell anything about, the stages of *base* first.

    Several transfers in flight tell what all share, and one alone what it may have for itself; where there are both,
    `pdsim.calibration.concurrency` looks at those in flight.  Single descriptors do not tell what one costs, nor
    whether stages overlap; within a descriptor they cannot.  Crowds alone hide constants.  What small batches save
    is a term of each form for a *base* that says which they are.

    A form is left out unless there are about two samples more than it has parameters; a ramp also needs six
    different numbers of descriptors.
    """
    serial = "pipeline" if base.overlap else "sum"
    single = bool((points.blocks == 1).all())
    crowded, lonely = bool((points.concurrency > 1).any()), bool((points.concurrency == 1).any())
    counts = len(np.unique(points.blocks))
    found: dict[Form, None] = {}
    for form in sorted(forms, key=lambda form: form.stages != stages_of(base)):
        free = dict.fromkeys(form.free)
        if crowded and not base.in_order:
            free["queue_rate"] = None
        if base.small is not None:
            free["saving"] = None
        gone = set() if lonely else {"rate", "call", "latency"}
        gone |= {"first1"} if points.queues else set()
        gone |= {"descriptor"} if single else set()
        if single and form.stages != serial:
            continue
        if "extra1" in free and counts < 6:
            continue
        if len(free) - len(gone) + 2 <= len(points):
            found[replace(form, free=tuple(name for name in free if name not in gone))] = None
    return list(found)


def choose(points: Points, base: EngineModel, forms: Sequence[Form] = FORMS) -> Fit:
    """Return the fit of the simplest of *forms* that predicts unseen samples as well as the best, within its spread.

    Each candidate is fitted, loses the parameters that it cannot tell apart, and is left out if it is more than
    twice as far off as the best at the samples themselves; `simplest` decides among the rest.  Raise a `ConfigError`
    if there are too few samples for any form.
    """
    every = [_identified(fit(form, points, base), points, base) for form in candidates(points, base, forms)]
    return simplest(_promising(every, points), points, base)


def simplest(fits: Sequence[Fit], points: Points, base: EngineModel) -> Fit:
    """Return the simplest of *fits* that predicts unseen ones of *points* as well as the best, within its spread.

    Simplest means fewest free parameters, then the stages of *base*, then the least mean error.  Spread is the
    standard error of the paired differences between the errors of a form and those of the best, over all folds.
    """
    if len(fits) == 1:
        return fits[0]
    seen = [np.concatenate([abs(error) for error in _fold_errors(one, points, base)]) for one in fits]
    means = np.array([error.mean() for error in seen])
    best = int(means.argmin())
    worse = [each - seen[best] for each in seen]  # in pairs: what both get wrong tells nothing of either
    close = [i for i, by in enumerate(worse) if by.mean() <= max(by.std() / math.sqrt(len(points)), NEGLIGIBLE)]

    def richness(index: int) -> tuple[int, bool]:
        form = fits[index].form
        return len(form.free), form.stages != stages_of(base)

    least = min(map(richness, close))
    close = [index for index in close if richness(index) == least]
    enough = means[close].min() + NEGLIGIBLE
    return fits[next(index for index in close if means[index] <= enough)]


def _promising(fits: Sequence[Fit], points: Points) -> list[Fit]:
    if not fits:
        raise ConfigError(f"{len(points)} samples are no basis for a fit; measure {LEAST} or more")
    means = [float(np.abs(errors(one, points)).mean()) for one in fits]
    found: list[Fit] = []
    for one, mean in zip(fits, means, strict=True):
        twin = any(np.allclose(one.seconds(points), other.seconds(points), rtol=1e-4) for other in found)
        if mean <= 2.0 * min(means) + NEGLIGIBLE and not twin:
            found.append(one)
    return found


def _fold_errors(found: Fit, points: Points, base: EngineModel) -> Iterator[Floats]:
    for kept, left in folds(len(points), FOLDS):
        yield errors(fit(found.form, points.take(kept), base, found.at), points.take(left))


def folds(count: int, parts: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield for each of *parts* folds which of *count* samples are kept and which are left out, each once.

    Which sample is in which fold depends on *count* and *parts* alone.  Indices are ascending.

    >>> sorted(int(index) for _, left in folds(5, 2) for index in left)
    [0, 1, 2, 3, 4]
    """
    order = np.random.Generator(np.random.PCG64(0)).permutation(count)
    for part in range(min(parts, count)):
        left = np.sort(order[part :: min(parts, count)])
        yield np.setdiff1d(np.arange(count), left), left


# --- what the samples tell -----------------------------------------------------------------------------------------


def _identified(found: Fit, points: Points, base: EngineModel) -> Fit:
    given_up: list[str] = []
    while (name := _dependent(found, points)) is not None:
        given_up.append(name)
        found = _given_up(found, (name,), points, base)
    return replace(found, unidentified=tuple(given_up))


def _given_up(found: Fit, names: Sequence[str], points: Points, base: EngineModel) -> Fit:
    form, start = found.form, start_of(base, points.queues)
    for name in names:
        form = form.without(name)
    return fit(form, points, base, {**found.at, **{name: start[name] for name in names}})


def _dependent(found: Fit, points: Points) -> str | None:
    # A parameter is involved by its share of the whole null space: which vectors span that is a matter of rounding.
    free = found.form.free
    if not free:
        return None
    logs = np.log([found.at[name] for name in free])
    residuals = _residuals(found.form, points, found.at)
    step = 1e-4
    columns = [(residuals(logs + move) - residuals(logs - move)) / (2 * step) for move in step * np.eye(len(free))]
    _, sizes, rows = np.linalg.svd(np.column_stack(columns))
    rank = int((sizes > DEPENDENT * sizes[0]).sum())
    if rank == len(free):
        return None
    shares = np.sqrt((rows[rank:] ** 2).sum(axis=0))
    involved = {name for name, share in zip(free, shares, strict=True) if share > 0.1}
    return next(name for name in _EXPENDABLE if name in involved)


def intervals(
    found: Fit, points: Points, base: EngineModel, resamples: int = RESAMPLES
) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of each free parameter, from fits to samples that were drawn with replacement.

    Each of *resamples* fits starts at *found* and keeps its form.  The ends are the 2.5th and 97.5th percentiles.
    """
    if not found.form.free:
        return {}
    random = np.random.Generator(np.random.PCG64(1))
    drawn: list[list[float]] = []
    for _ in range(resamples):
        which = random.integers(0, len(points), len(points)).astype(np.int64)
        again = fit(found.form, points.take(which), base, found.at)
        drawn.append([again.at[name] for name in found.form.free])
    low, high = np.percentile(np.array(drawn), (2.5, 97.5), axis=0)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(found.form.free)}


def told(found: Fit, points: Points, base: EngineModel) -> tuple[Fit, dict[str, tuple[float, float]]]:
    """Return *found* and its intervals, without the parameters whose interval is wider than from x / 2 to 2 x.

    The limit is `WIDEST`, or `KNEE` for where a ramp ends.  One parameter is given up at a time, in the order of
    `_EXPENDABLE`, and all else is fitted again; the two parameters of a step of a ramp are given up together.
    """
    spans = intervals(found, points, base)
    while wide := [name for name in _EXPENDABLE if name in spans and _is_wide(name, *spans[name])]:
        gone = {wide[0]}
        if wide[0].startswith(("extra", "first")):  # neither is anything without the other
            gone |= {wide[0].replace("first", "extra"), wide[0].replace("extra", "first")}
        lost = tuple(name for name in found.form.free if name in gone)
        found = replace(_given_up(found, lost, points, base), unidentified=(*found.unidentified, *lost))
        spans = intervals(found, points, base)
    return found, spans


def _is_wide(name: str, low: float, high: float) -> bool:
    return high > (KNEE if name.startswith("first") else WIDEST) * low


# --- how good it is ------------------------------------------------------------------------------------------------


def held_out(points: Points, base: EngineModel, forms: Sequence[Form] = FORMS, parts: int = 0) -> Floats:
    """Return the error at each of *points* of a fit, form and all, that has not seen it.

    One is left out at a time, or, with *parts*, one of so many folds.

    The form is chosen anew for each fold, so the error includes that of choosing.  Shape (point,), signed.
    """
    found = np.empty(len(points))
    for kept, left in folds(len(points), parts or len(points)):
        found[left] = errors(choose(points.take(kept), base, forms), points.take(left))
    return found


def summary(found: Floats, how: str) -> HeldOut:
    """Return what *found*, relative errors, amount to.

    *how* says in words which samples were left out; it is printed beside the numbers.
    """
    size = np.abs(found)
    return HeldOut(
        points=len(found),
        how=how,
        mean=float(size.mean()),
        median=float(np.median(size)),
        p95=float(np.percentile(size, 95.0)),
        bias=float(found.mean()),
    )
