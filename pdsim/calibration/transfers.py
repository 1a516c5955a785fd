# SPDX-License-Identifier: Apache-2.0
"""Fit an engine's parameters to samples of transfers: which form, its values, and what samples cannot tell.

With *n* descriptors of *s* bytes, a posting of ``P = call + n * descriptor + sum(min(n, first) * extra)``, and a
wire of ``W = n * (s / rate + wire_descriptor)``, an isolated transfer takes `EngineModel.isolated_time`::

    sum        P + W + latency
    maximum    max(P, W) + latency
    pipeline   max(P(1) + W, P + W / n) + latency

Of *c* transfers in flight each takes ``max(T(1), c * P, c * n * s / queue_rate)``: the poster takes one at a time,
and all share the queues (the operational bounds of a closed network, Denning and Buzen 1978).  Where a copy engine
carries one after the other (`EngineModel.in_order`), it is ``max(T(1), c * P, c * W)``.

The form is the simplest one whose error on folds that it has not seen is within a standard error of the best's, in
pairs (after Breiman et al., "Classification and Regression Trees", 1984).  Intervals are from a bootstrap over whole
configurations.  A ramp ends at a whole number of descriptors, to which all else is fitted once more.

No choice hangs on the last digits of a least-squares solution, which differ between processors: errors and costs
that differ by less than a margin count as equal, and among equals the first is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, TypeAlias, cast

import numpy as np

from pdsim.calibration.definition import HeldOut
from pdsim.calibration.robust import Floats, Ints, Solution, bootstrap, robust_fit
from pdsim.calibration.samples import Sample
from pdsim.core.errors import ConfigError
from pdsim.hardware.costs import EngineModel, Ramp

__all__ = [
    "FORMS",
    "LEAST",
    "OF_READS",
    "Fit",
    "Form",
    "Points",
    "choose",
    "errors",
    "fit",
    "held_out",
    "identifiable",
    "intervals",
    "points_of",
    "read_overhead",
    "simplest",
    "start_of",
    "summary",
    "with_concurrency",
]

Intervals: TypeAlias = dict[str, tuple[float, float]]

SCALE = 0.02
"""The relative error from which on a sample counts less: about what repeats of a transfer differ by."""

STARTS, FOLDS, RESAMPLES = 4, 5, 400
RAMPS = 2
LEAST = 3
"""Fewer samples than this are no basis for any form."""

WIDEST = 4.0
"""An interval from x / 2 to 2 x, or wider, says that the samples do not tell the parameter."""

KNEE = 16.0
"""The same for where a ramp ends, which only the counts on either side of it tell, each twice the one before."""

NEGLIGIBLE = 1e-5
"""Relative errors that differ by less are equal: a solver stops within 1e-8, and a calibration has five digits."""

EQUAL = 1e-6
"""Costs that differ by a smaller share are equal: a solver stops where a step gains a share of less than 1e-8."""

DEPENDENT = 1e-3
"""Singular values of the Jacobian below this share of the largest mean that two parameters do the same."""

OF_READS = ("read", "read_descriptor", "read_rate")
"""What a read costs beyond a write: parameters of `EngineModel`."""

_EXPENDABLE = (
    *("first2", "extra2", "first1", "extra1", "saving", *OF_READS),
    *("wire_descriptor", "rate", "descriptor", "latency", "call", "queue_rate"),
)
"""Which of several parameters that cannot be told apart is given up first."""


# --- points, forms and fits ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """Samples as columns, arrays of shape (point,).

    *blocks* descriptors of *size* bytes each, *concurrency* transfers in flight, *seconds* of one transfer.
    """

    blocks: Floats
    size: Floats
    concurrency: Floats
    seconds: Floats
    queues: int = 0  # queue pairs that all of them used; 0 if that is not known
    read: bool = False  # whether they are compared as reads

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, which: Any) -> Points:
        """Return the samples at *which*, indices or a mask."""
        columns = (self.blocks[which], self.size[which], self.concurrency[which], self.seconds[which])
        return Points(*columns, self.queues, self.read)


def points_of(samples: Sequence[Sample], *, read: bool = False) -> Points:
    """Return *samples* as columns, compared as reads if *read*; *queues* is known only if all agree on it."""
    queues = {row.queues for row in samples}
    names = ("blocks", "size", "concurrency", "seconds")
    blocks, size, concurrency, seconds = (np.array([getattr(row, name) for row in samples], float) for name in names)
    return Points(blocks, size, concurrency, seconds, queues.pop() if len(queues) == 1 else 0, read)


@dataclass(frozen=True)
class Form:
    """Which stages there are, "sum", "maximum" or "pipeline", and which parameters are *free*, in a fit's order."""

    stages: str
    free: tuple[str, ...]

    @property
    def name(self) -> str:
        """Such as ``"maximum(latency, descriptor, rate)"``."""
        return f"{self.stages}({', '.join(self.free)})"

    def without(self, *parameters: str) -> Form:
        """Return the form in which *parameters* are not free."""
        return replace(self, free=tuple(name for name in self.free if name not in parameters))

    def model(self, at: Mapping[str, float], base: EngineModel) -> EngineModel:
        """Return *base* with these stages and the parameters *at*; a ramp that costs nothing is left out."""
        # while a fit moves where a ramp ends, that is no whole number
        ends = [(cast("int", at[f"first{index}"]), at[f"extra{index}"]) for index in range(1, RAMPS + 1)]
        same = ("call", "descriptor", "latency", "rate", "wire_descriptor", *OF_READS)
        values: dict[str, Any] = {name: at[name] for name in same}
        values["rate"] = min(at["rate"], at["queue_rate"])  # no transfer is faster than all queues together
        return replace(
            base,
            **values,
            queue_rate=at["queue_rate"] / base.queues,
            overlap=self.stages != "sum",
            pipelined=self.stages == "pipeline",
            ramp=tuple(Ramp(first=first, extra=extra) for first, extra in ends if extra > 0.0 and first > 0.0),
            small=base.small and replace(base.small, saving=at["saving"]),
        )


_RAMPS = ((), ("extra1", "first1"), ("extra1", "first1", "extra2", "first2"))
_CONSTANTS = {"sum": (("call",),), "maximum": (("latency",), ("call", "latency")), "pipeline": (("call",),)}
_WIRES = {"sum": ((),)}  # which does not tell apart the two costs of a descriptor

FORMS = tuple(
    Form(stages, (*constant, "descriptor", *ramps, *wire, "rate"))
    for ramps in _RAMPS
    for stages in ("sum", "maximum", "pipeline")
    for wire in _WIRES.get(stages, ((), ("wire_descriptor",)))
    for constant in _CONSTANTS[stages]
)
"""From the simplest to the richest."""


@dataclass(frozen=True)
class Fit:
    """A *form* of *base* with the parameters *at* which it is closest; samples do not tell the *unidentified*.

    *at* has a value for every parameter that any form has (`start_of`), in seconds, bytes and bytes/s, free or not.
    """

    form: Form
    at: Mapping[str, float]
    base: EngineModel
    unidentified: tuple[str, ...] = ()

    @property
    def model(self) -> EngineModel:
        """The engine's model with these parameters."""
        return self.form.model(self.at, self.base)

    def seconds(self, points: Points) -> Floats:
        """Return how long a transfer of each of *points* takes, shape (point,)."""
        model, total = self.model, points.blocks * points.size
        alone = model.isolated_times(points.blocks, total, read=points.read)
        if not (points.concurrency > 1).any():
            return alone
        posting, _, wire, _ = model.stages(points.blocks, total, read=points.read)
        shared = wire if model.in_order else total / self.at["queue_rate"]
        crowded = np.maximum(alone, points.concurrency * np.maximum(posting, shared))
        busy: Floats = np.where(points.concurrency > 1, crowded, alone)
        return busy


def start_of(base: EngineModel, queues: int = 0) -> dict[str, float]:
    """Return the parameters of a form that frees none: no constants, and descriptor and rates of *base*.

    Of a ramp each of *queues* costs its first descriptor.
    """
    fixed = dict.fromkeys(("call", "latency", "wire_descriptor", "read", "read_descriptor"), 0.0)
    fixed |= {"descriptor": base.descriptor, "rate": base.rate, "read_rate": math.inf}
    fixed |= {"queue_rate": base.queues * base.queue_rate, "saving": base.small.saving if base.small else 0.0}
    return fixed | {"extra1": 0.0, "first1": float(queues), "extra2": 0.0, "first2": 0.0}


def stages_of(base: EngineModel) -> str:
    """Return the stages of *base*, which stand until samples tell better."""
    return "pipeline" if base.pipelined else "maximum" if base.overlap else "sum"


def errors(fitted: Fit, points: Points) -> Floats:
    """Return the relative error of *fitted* at each of *points*, positive where the model is too slow."""
    return fitted.seconds(points) / points.seconds - 1.0


# --- fitting -------------------------------------------------------------------------------------------------------


def fit(form: Form, points: Points, base: EngineModel, at: Mapping[str, float] | None = None) -> Fit:
    """Return the best fit of *form*: from *at*, which also says what is not free, or from several starts and *base*.

    With *at*, one search begins there: that is how folds and resamples are fitted again.  Without, `STARTS` searches
    begin at what the samples suggest, and the first whose cost equals the least wins.  Where a ramp ends is rounded
    to a whole number of descriptors, and the other parameters are fitted once more to that.  Raise a `ConfigError`
    if there are too few samples.
    """
    if len(points) < LEAST:
        raise ConfigError(f"{len(points)} samples are too few for a fit; measure {LEAST} or more")
    fixed = dict(at) if at is not None else start_of(base, points.queues)
    best = _best(Fit(form, fixed, base), points, [at] if at is not None else list(_starts(form, points)))
    if ends := {name: max(1.0, float(round(best.at[name]))) for name in form.free if name.startswith("first")}:
        rest = replace(best, form=form.without(*ends), at={**best.at, **ends})
        best = replace(_best(rest, points, [best.at]), form=form)
    return best


def _best(fixed: Fit, points: Points, starts: Sequence[Mapping[str, float]]) -> Fit:
    if not fixed.form.free:
        return fixed

    def solved(start: Mapping[str, float]) -> Solution:
        return robust_fit(
            lambda values: replace(fixed, at={**fixed.at, **values}).seconds(points),
            points.seconds,
            {name: start[name] for name in fixed.form.free},
            scale=SCALE,
            reach=12.0,
        )

    results = [solved(start) for start in starts]
    enough = min(result.cost for result in results) * (1.0 + EQUAL) + len(points) * NEGLIGIBLE**4
    first = next(result for result in results if result.cost <= enough)
    return replace(fixed, at={**fixed.at, **first.values})


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
    `with_concurrency` looks at those in flight.  Single descriptors do not tell what one costs, nor whether stages
    overlap.  Crowds alone hide constants.  What small batches save is a term of each form for a *base* that says
    which they are.

    A form is left out unless there are about two samples more than it has parameters; a ramp also needs six
    different numbers of descriptors.
    """
    serial = "pipeline" if base.overlap else "sum"
    single = bool((points.blocks == 1).all())
    crowded, lonely = bool((points.concurrency > 1).any()), bool((points.concurrency == 1).any())
    added = ("queue_rate",) * (crowded and not base.in_order) + ("saving",) * (base.small is not None)
    gone = {"rate", "call", "latency"} if not lonely else set()
    gone |= {"first1"} if points.queues else set()
    gone |= {"descriptor"} if single else set()
    kept: dict[Form, None] = {}
    for form in sorted(forms, key=lambda form: form.stages != stages_of(base)):
        free = dict.fromkeys((*form.free, *added))
        if single and form.stages != serial:
            continue
        if "extra1" in free and len(np.unique(points.blocks)) < 6:
            continue
        if len(free) - len(gone) + 2 <= len(points):
            kept[replace(form, free=tuple(name for name in free if name not in gone))] = None
    return list(kept)


def choose(points: Points, base: EngineModel, forms: Sequence[Form] = FORMS) -> Fit:
    """Return the fit of the simplest of *forms* that predicts unseen samples as well as the best, within its spread.

    Each candidate is fitted, loses the parameters that it cannot tell apart, and is left out if it is more than
    twice as far off as the best at the samples themselves; `simplest` decides among the rest.  Raise a `ConfigError`
    if there are too few samples for any form.
    """
    every = [_identified(fit(form, points, base), points) for form in candidates(points, base, forms)]
    return simplest(_promising(every, points), points)


def simplest(fits: Sequence[Fit], points: Points) -> Fit:
    """Return the simplest of *fits* that predicts unseen ones of *points* as well as the best, within its spread.

    Simplest means fewest free parameters, then the stages of the base, then the least mean error.  Spread is the
    standard error of the paired differences between the errors of a form and those of the best, over all folds.
    """
    if len(fits) == 1:
        return fits[0]
    unseen = [np.concatenate([abs(error) for error in _fold_errors(one, points)]) for one in fits]
    means = np.array([error.mean() for error in unseen])
    best = unseen[int(means.argmin())]
    worse = [each - best for each in unseen]  # in pairs: what both get wrong tells nothing of either
    close = [i for i, by in enumerate(worse) if by.mean() <= max(by.std() / math.sqrt(len(points)), NEGLIGIBLE)]

    def richness(index: int) -> tuple[int, bool]:
        form = fits[index].form
        return len(form.free), form.stages != stages_of(fits[index].base)

    least = min(map(richness, close))
    close = [index for index in close if richness(index) == least]
    enough = means[close].min() + NEGLIGIBLE
    return fits[next(index for index in close if means[index] <= enough)]


def _promising(fits: Sequence[Fit], points: Points) -> list[Fit]:
    if not fits:
        raise ConfigError(f"{len(points)} samples are too few for a fit; measure {LEAST} or more")
    means = [float(np.abs(errors(one, points)).mean()) for one in fits]
    kept: list[Fit] = []
    for one, mean in zip(fits, means, strict=True):
        twin = any(np.allclose(one.seconds(points), other.seconds(points), rtol=1e-4) for other in kept)
        if mean <= 2.0 * min(means) + NEGLIGIBLE and not twin:
            kept.append(one)
    return kept


def _fold_errors(one: Fit, points: Points) -> Iterator[Floats]:
    for kept, left in _folds(len(points), FOLDS):
        yield errors(fit(one.form, points.take(kept), one.base, one.at), points.take(left))


def _folds(count: int, parts: int) -> Iterator[tuple[Ints, Ints]]:
    # Which sample is in which fold depends on *count* and *parts* alone.
    order = np.random.Generator(np.random.PCG64(0)).permutation(count)
    for part in range(min(parts, count)):
        left = np.sort(order[part :: min(parts, count)])
        yield np.setdiff1d(np.arange(count), left), left


# --- what the samples tell -----------------------------------------------------------------------------------------


def _identified(one: Fit, points: Points) -> Fit:
    given_up: list[str] = []
    while (name := _dependent(one, points)) is not None:
        given_up.append(name)
        one = _given_up(one, (name,), points)
    return replace(one, unidentified=tuple(given_up))


def _given_up(one: Fit, names: Sequence[str], points: Points) -> Fit:
    start = start_of(one.base, points.queues)
    return fit(one.form.without(*names), points, one.base, {**one.at, **{name: start[name] for name in names}})


def _dependent(one: Fit, points: Points) -> str | None:
    # A parameter is involved by its share of the whole null space: which vectors span that is a matter of rounding.
    free = one.form.free
    if not free:
        return None

    def logs(name: str, by: float) -> Floats:
        moved: Floats = np.log(replace(one, at={**one.at, name: one.at[name] * math.exp(by)}).seconds(points))
        return moved

    columns = [(logs(name, 1e-4) - logs(name, -1e-4)) / 2e-4 for name in free]
    _, sizes, rows = np.linalg.svd(np.column_stack(columns))
    rank = int((sizes > DEPENDENT * sizes[0]).sum())
    if rank == len(free):
        return None
    shares = np.sqrt((rows[rank:] ** 2).sum(axis=0))
    involved = {name for name, share in zip(free, shares, strict=True) if share > 0.1}
    return next(name for name in _EXPENDABLE if name in involved)


def intervals(one: Fit, points: Points, resamples: int = RESAMPLES) -> Intervals:
    """Return the 95 % interval of each free parameter, from *resamples* fits to samples drawn with replacement."""
    if not one.form.free:
        return {}

    def again(random: np.random.Generator) -> list[float]:
        drawn = random.integers(0, len(points), len(points)).astype(np.int64)
        refitted = fit(one.form, points.take(drawn), one.base, one.at)
        return [refitted.at[name] for name in one.form.free]

    low, high = bootstrap(again, resamples, seed=1)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(one.form.free)}


def identifiable(one: Fit, points: Points) -> tuple[Fit, Intervals]:
    """Return *one* and its intervals, without the parameters whose interval is wider than from x / 2 to 2 x.

    The limit is `WIDEST`, or `KNEE` for where a ramp ends.  One parameter is given up at a time, in the order of
    `_EXPENDABLE`, and all else is fitted again; the two parameters of a step of a ramp are given up together.
    """
    spans = intervals(one, points)
    while wide := [name for name in _EXPENDABLE if name in spans and _is_wide(name, *spans[name])]:
        gone = {wide[0], wide[0].replace("first", "extra"), wide[0].replace("extra", "first")}
        lost = tuple(name for name in one.form.free if name in gone)
        one = replace(_given_up(one, lost, points), unidentified=(*one.unidentified, *lost))
        spans = intervals(one, points)
    return one, spans


def _is_wide(name: str, low: float, high: float) -> bool:
    return high > (KNEE if name.startswith("first") else WIDEST) * low


# --- several transfers in flight -----------------------------------------------------------------------------------

SHARES = tuple(float(share) for share in np.linspace(0.0, 1.0, 21))
"""Of the constant that is *call*."""

TIMES = (*(float(times) for times in np.geomspace(1.0, 16.0, 141)), math.inf)
"""What the queues carry together, as a multiple of what one transfer reaches: steps of 2 %; inf does not limit."""

_SAME = 1e-9
"""Losses that differ by less, each sample's share of it, are equal: of queues that limit nothing all losses are."""

_WORTH = 0.1
"""A limit by which no crowd takes this much longer is noise."""


def with_concurrency(one: Fit, spans: Intervals, crowds: Points) -> tuple[Fit, Intervals]:
    """Return *one* and its intervals *spans* with what *crowds* tell, samples of two transfers in flight and more.

    What one transfer takes stays as it is: a program that posts by itself waits for its own thread between two
    samples, and no sample has that.  Crowds tell two things that single transfers cannot: which part of the constant
    is *call*, which keeps the poster, and which is *latency*, which transfers have side by side; and what the queues
    carry together, *queue_rate*.  Both are looked for on a grid, with intervals from a bootstrap over the crowds.
    Where they do not tell the part of *call*, all of the constant stays *call*; a *queue_rate* is not told that may
    be infinite, whose interval is too wide, or by which no crowd takes a tenth longer.  A copy engine that takes one
    transfer after the other has none.
    """
    shares = SHARES if "call" in one.form.free and one.form.stages in ("sum", "pipeline") else (1.0,)
    rate = min(one.at["rate"], one.at["queue_rate"])
    rates = TIMES if not one.base.in_order and math.isfinite(rate) else (math.inf,)
    cells = [(share, rate * times) for share, times in product(shares, rates)]
    if not len(crowds) or len(cells) == 1:
        return one, spans
    away = np.array([np.log(_split(one, *cell).seconds(crowds) / crowds.seconds) for cell in cells]) / SCALE
    losses = 2.0 * (np.sqrt(1.0 + away * away) - 1.0)  # shape (cell, sample)
    best = cells[int(_first_least(losses.sum(axis=1, keepdims=True), len(crowds))[0])]
    random = np.random.Generator(np.random.PCG64(2))
    counts = random.multinomial(len(crowds), np.full(len(crowds), 1.0 / len(crowds)), RESAMPLES)
    drawn = np.array(cells)[_first_least(losses @ counts.T, len(crowds))]  # shape (resample, 2)
    # of those drawn: between x and inf lies nothing
    low, high = np.percentile(drawn, (2.5, 97.5), axis=0, method="nearest")
    one, spans = _with_share(one, spans, best[0], (float(low[0]), float(high[0])))
    longer = _split(one, 1.0, best[1]).seconds(crowds) / one.seconds(crowds) - 1.0
    if longer.max() < _WORTH:
        return one, spans
    return _with_queues(one, spans, best[1], (float(low[1]), float(high[1])))


def _split(one: Fit, share: float, queue_rate: float) -> Fit:
    constant = one.at["call"] + one.at["latency"]
    parts = {"call": share * constant, "latency": (1.0 - share) * constant} if share < 1.0 else {}
    limit = {"queue_rate": queue_rate} if math.isfinite(queue_rate) else {}
    return replace(one, at={**one.at, **parts, **limit})


def _first_least(losses: Floats, samples: int) -> Ints:
    # Equal cells are common, and rounding, which depends on the processor, would choose among them.
    enough = losses.min(axis=0) * (1.0 + _SAME) + samples * _SAME
    first: Ints = (losses <= enough).argmax(axis=0)
    return first


def _with_share(one: Fit, spans: Intervals, share: float, ends: tuple[float, float]) -> tuple[Fit, Intervals]:
    # An interval that reaches 1 leaves all of it *call*.  One that starts at 0 makes all of it *latency*, and one
    # between the two frees both parameters, each with an interval of its own.
    low, high = ends
    if high >= 1.0:
        return one, spans
    if low > 0.0:
        form = replace(one.form, free=(*one.form.free, "latency"))
        one = replace(_split(one, share, math.inf), form=form)
        constant = one.at["call"] + one.at["latency"]
        both = {"call": (low * constant, high * constant), "latency": ((1 - high) * constant, (1 - low) * constant)}
        return one, {**spans, **both}
    free = tuple("latency" if name == "call" else name for name in one.form.free)
    one = replace(_split(one, 0.0, math.inf), form=replace(one.form, free=free))
    return one, {"latency" if name == "call" else name: span for name, span in spans.items()}


def _with_queues(one: Fit, spans: Intervals, rate: float, ends: tuple[float, float]) -> tuple[Fit, Intervals]:
    low, high = ends
    if not math.isfinite(high) or high > WIDEST * low * (1.0 + _SAME):  # a whole number of steps may be just so wide
        return one, spans
    form = replace(one.form, free=(*one.form.free, "queue_rate"))
    return replace(one, form=form, at={**one.at, "queue_rate": rate}), {**spans, "queue_rate": ends}


# --- reads ---------------------------------------------------------------------------------------------------------


def read_overhead(writes: Fit, samples: Sequence[Sample]) -> tuple[Fit, Intervals] | None:
    """Return *writes* with what reads cost beyond them, and its intervals, from the reads among *samples*.

    A read is told by its ratio to the write beside it: what the fit has wrong of a configuration it has wrong of
    both.  A read costs nothing more, more once (`read`), more for each descriptor on the wire (`read_descriptor`),
    more for each byte (`read_rate`), or two of these; the simplest that predicts unseen reads as well as the best is
    taken.  Where reads are faster, they cost nothing more.  Intervals are those that the fit of the writes leaves.

    Return None if there are too few reads of one transfer at a time with a write of the same configuration.
    """
    points = _as_writes_are(writes, samples)
    if points is None:
        return None
    return identifiable(_chosen_reads(writes, points), points)


def _chosen_reads(writes: Fit, points: Points) -> Fit:
    more = points.seconds - writes.seconds(points)
    once, each = float(np.median(more)), float(np.median(more / points.blocks))
    rate = float((points.blocks * points.size / points.seconds).max())
    start = {"read": max(once, 1e-8), "read_descriptor": max(each, 1e-9), "read_rate": rate}
    forms = [free for count in range(3) for free in combinations(OF_READS, count)]
    every = [
        fit(
            replace(writes.form, free=free),
            points,
            writes.base,
            {**writes.at, **{name: start[name] for name in free}},
        )
        for free in forms
    ]
    return simplest(every, points)


def _as_writes_are(writes: Fit, samples: Sequence[Sample]) -> Points | None:
    def where(row: Sample) -> tuple[Any, ...]:
        return row.layout, row.queues, row.blocks, row.size, row.concurrency

    beside = {where(row): row.seconds for row in samples if row.operation == "write"}
    reads = [row for row in samples if row.operation == "read" and row.concurrency == 1 and where(row) in beside]
    if len(reads) < LEAST:
        return None
    points = points_of(reads, read=True)
    ratio = np.array([row.seconds / beside[where(row)] for row in reads])
    return replace(points, seconds=ratio * writes.seconds(points))


# --- how good it is ------------------------------------------------------------------------------------------------


def held_out(points: Points, base: EngineModel, forms: Sequence[Form] = FORMS, parts: int = 0) -> Floats:
    """Return the signed error at each of *points* of a fit that has not seen it, the form chosen anew each time.

    One is left out at a time, or, with *parts*, one of so many folds.
    """
    away = np.empty(len(points))
    for kept, left in _folds(len(points), parts or len(points)):
        away[left] = errors(choose(points.take(kept), base, forms), points.take(left))
    return away


def summary(away: Floats, how: str) -> HeldOut:
    """Return what *away*, relative errors, amount to; *how* says in words which samples were left out."""
    size = np.abs(away)
    return HeldOut(
        points=len(away),
        how=how,
        mean=float(size.mean()),
        median=float(np.median(size)),
        p95=float(np.percentile(size, 95.0)),
        bias=float(away.mean()),
    )
