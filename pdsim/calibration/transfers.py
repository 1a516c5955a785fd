# SPDX-License-Identifier: Apache-2.0
"""Fit an engine's parameters to samples of transfers: which form, its values, and what samples cannot tell.

The forms are those of docs/calibration.md.  No choice hangs on the last digits of a least-squares solution, which
differ between processors: errors and costs that differ by less than a margin are equal, and the first is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, count, product
from typing import Any, TypeAlias, cast

import numpy as np

from pdsim.calibration.definition import HeldOut
from pdsim.calibration.robust import Floats, Ints, Solution, bootstrap, robust_fit
from pdsim.calibration.samples import Sample
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress, silent, within
from pdsim.hardware.costs import EngineModel, Ramp

Intervals: TypeAlias = Mapping[str, tuple[float, float]]

SCALE = 0.02  # the relative error from which on a sample counts less: about what repeats of a transfer differ by
STARTS, FOLDS, RESAMPLES = 4, 5, 400
RAMPS = 2
LEAST = 3  # fewer samples are no basis for any form
WIDEST = 4.0  # an interval from x / 2 to 2 x, or wider, says that the samples do not tell the parameter
KNEE = 16.0  # the same for where a ramp ends: only the counts beside it tell, each twice the one before
NEGLIGIBLE = 1e-5  # relative errors that differ by less are equal: a solver stops within 1e-8
EQUAL = 1e-6  # costs that differ by a smaller share are equal
DEPENDENT = 1e-3  # singular values of the Jacobian below this share of the largest: two parameters do the same

OF_READS = ("read", "read_descriptor", "read_rate")
"""What a read costs beyond a write: parameters of `EngineModel`."""

_EXPENDABLE = (  # which of several parameters that cannot be told apart is given up first
    *("first2", "extra2", "first1", "extra1", "saving", *OF_READS),
    *("wire_descriptor", "rate", "descriptor", "latency", "call", "queue_rate"),
)


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

    @property
    def nbytes(self) -> Floats:
        """The bytes of each transfer."""
        return self.blocks * self.size

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
    intervals: Intervals = field(default_factory=dict)  # 95 %, of free parameters

    def moved(self, **values: float) -> Fit:
        """Return the fit with other *values* of parameters."""
        return replace(self, at={**self.at, **values})

    @property
    def model(self) -> EngineModel:
        """The engine's model with these parameters; a ramp that costs nothing is left out."""
        at, base = self.at, self.base
        # while a fit moves where a ramp ends, that is no whole number
        ends = [(cast("int", at[f"first{index}"]), at[f"extra{index}"]) for index in range(1, RAMPS + 1)]
        same = ("call", "descriptor", "latency", "wire_descriptor", *OF_READS)
        values: dict[str, Any] = {name: at[name] for name in same}
        return replace(
            base,
            **values,
            rate=min(at["rate"], at["queue_rate"]),  # no transfer is faster than all queues together
            queue_rate=at["queue_rate"] / base.queues,
            overlap=self.form.stages != "sum",
            pipelined=self.form.stages == "pipeline",
            ramp=tuple(Ramp(first=first, extra=extra) for first, extra in ends if extra > 0.0 and first > 0.0),
            small=base.small and replace(base.small, saving=at["saving"]),
        )

    def seconds(self, points: Points) -> Floats:
        """Return how long a transfer of each of *points* takes, shape (point,).

        Of *c* in flight each takes ``max(T(1), c P, c n s / queue_rate)``, where a copy engine carries one after the
        other ``max(T(1), c P, c W)``: the bounds of a closed network (Denning and Buzen 1978).
        """
        model, busy = self.model, points.concurrency > 1
        alone: Floats = model.isolated_time(points.blocks, points.nbytes, read=points.read)
        if not busy.any():
            return alone
        posting, _, wire, _ = model.stages(points.blocks, points.nbytes, read=points.read)
        shared = wire if model.in_order else points.nbytes / self.at["queue_rate"]
        crowded = np.maximum(alone, points.concurrency * np.maximum(posting, shared))
        times: Floats = np.where(busy, crowded, alone)
        return times


def start_of(base: EngineModel, queues: int = 0) -> dict[str, float]:
    """Return the parameters of a form that frees none: no constants, and descriptor and rates of *base*.

    Of a ramp each of *queues* costs its first descriptor.
    """
    fixed = dict.fromkeys(("call", "latency", "wire_descriptor", "read", "read_descriptor"), 0.0)
    fixed |= {"descriptor": base.descriptor, "rate": base.rate, "read_rate": math.inf}
    fixed |= {"queue_rate": base.queues * base.queue_rate, "saving": base.small.saving if base.small else 0.0}
    return fixed | {"extra1": 0.0, "first1": float(queues), "extra2": 0.0, "first2": 0.0}


def _stages_of(base: EngineModel) -> str:
    return "pipeline" if base.pipelined else "maximum" if base.overlap else "sum"


def errors(fitted: Fit, points: Points) -> Floats:
    """Return the relative error of *fitted* at each of *points*, positive where the model is too slow."""
    return fitted.seconds(points) / points.seconds - 1.0


# --- fitting -------------------------------------------------------------------------------------------------------


def fit(form: Form, points: Points, base: EngineModel, at: Mapping[str, float] | None = None) -> Fit:
    """Return the best fit of *form*: by one search from *at*, which also says what is not free, or by `STARTS`.

    Where a ramp ends is rounded to a whole number of descriptors, and the rest is fitted once more to that.  Raise a
    `ConfigError` if there are too few samples.
    """
    if len(points) < LEAST:
        raise ConfigError(f"{len(points)} samples are too few for a fit; measure {LEAST} or more")
    fixed = Fit(form, start_of(base, points.queues) if at is None else dict(at), base)
    best = _best(fixed, points, _starts(form, points) if at is None else [at])
    if ends := {name: max(1.0, float(round(best.at[name]))) for name in form.free if name.startswith("first")}:
        best = replace(best, form=form.without(*ends)).moved(**ends)
        best = replace(_best(best, points, [best.at]), form=form)
    return best


def _best(fixed: Fit, points: Points, starts: Sequence[Mapping[str, float]]) -> Fit:
    if not fixed.form.free:
        return fixed

    def solved(start: Mapping[str, float]) -> Solution:
        return robust_fit(
            lambda values: fixed.moved(**values).seconds(points),
            points.seconds,
            {name: start[name] for name in fixed.form.free},
            scale=SCALE,
            reach=12.0,
        )

    results = [solved(start) for start in starts]
    enough = min(result.cost for result in results) * (1.0 + EQUAL) + len(points) * NEGLIGIBLE**4
    return fixed.moved(**next(result for result in results if result.cost <= enough).values)


def _starts(form: Form, points: Points) -> list[dict[str, float]]:
    # the first is the guess itself; the others multiply it by log-normal factors drawn from a fixed seed
    least, rate = float(points.seconds.min()), float((points.nbytes / points.seconds).max())
    each = float((points.seconds / points.blocks / points.concurrency).min())
    middle = math.sqrt(float(points.blocks.max()))
    guess = {"call": 0.7 * least, "latency": 0.7 * least, "descriptor": each, "rate": rate, "queue_rate": rate * 1.1}
    guess |= {"wire_descriptor": 0.5 * each, "saving": 0.2 * least}
    guess |= {"extra1": each, "first1": max(2.0, middle / 3), "extra2": 0.3 * each, "first2": max(4.0, 6 * middle)}
    random = np.random.Generator(np.random.PCG64(len(points)))
    factors = [np.exp(random.normal(0.0, 1.0 if index else 0.0, len(form.free))) for index in range(STARTS)]
    return [{name: guess[name] * float(by) for name, by in zip(form.free, each, strict=True)} for each in factors]


# --- which form ----------------------------------------------------------------------------------------------------


def candidates(points: Points, base: EngineModel, forms: Sequence[Form] = FORMS) -> list[Form]:
    """Return those of *forms* that *points* can tell anything about, the stages of *base* first.

    Single descriptors do not tell what one costs, nor whether stages overlap; crowds alone hide constants.  A form
    needs about two samples more than it has parameters, and a ramp six different numbers of descriptors.
    """
    serial = "pipeline" if base.overlap else "sum"
    single = bool((points.blocks == 1).all())
    crowded, lonely = bool((points.concurrency > 1).any()), bool((points.concurrency == 1).any())
    added = ("queue_rate",) * (crowded and not base.in_order) + ("saving",) * (base.small is not None)
    gone = {"rate", "call", "latency"} if not lonely else set()
    gone |= {"first1"} if points.queues else set()
    gone |= {"descriptor"} if single else set()
    kept: dict[Form, None] = {}
    for form in sorted(forms, key=lambda form: form.stages != _stages_of(base)):
        form = replace(form, free=tuple(dict.fromkeys((*form.free, *added))))
        known = not single or form.stages == serial
        steps = "extra1" not in form.free or len(np.unique(points.blocks)) >= 6
        if known and steps and len(form.free) - len(gone) + 2 <= len(points):
            kept[form.without(*gone)] = None
    return list(kept)


def choose(points: Points, base: EngineModel, forms: Sequence[Form] = FORMS) -> Fit:
    """Return the fit of the `simplest` of *forms*, without the parameters that it cannot tell apart.

    Forms more than twice as far off as the best at the samples themselves, and those that say the same as another,
    are left out.  Raise a `ConfigError` if there are too few samples for any form.
    """
    fits = [_identified(fit(form, points, base), points) for form in candidates(points, base, forms)]
    if not fits:
        raise ConfigError(f"{len(points)} samples are too few for a fit; measure {LEAST} or more")
    means = [float(np.abs(errors(one, points)).mean()) for one in fits]
    kept: list[Fit] = []
    for one, mean in zip(fits, means, strict=True):
        twin = any(np.allclose(one.seconds(points), other.seconds(points), rtol=1e-4) for other in kept)
        if mean <= 2.0 * min(means) + NEGLIGIBLE and not twin:
            kept.append(one)
    return simplest(kept, points)


def simplest(fits: Sequence[Fit], points: Points) -> Fit:
    """Return the simplest of *fits* that predicts unseen ones of *points* as well as the best, within its spread.

    Simplest means fewest free parameters, then the stages of the base, then the least mean error.  Spread is the
    standard error of the paired differences to the best over all folds (Breiman et al. 1984).
    """
    if len(fits) == 1:
        return fits[0]
    unseen = []
    for one in fits:
        folds = ((points.take(kept), points.take(left)) for kept, left in _folds(len(points), FOLDS))
        away = [errors(fit(one.form, kept, one.base, one.at), left) for kept, left in folds]
        unseen.append(np.abs(np.concatenate(away)))
    means = np.array([error.mean() for error in unseen])
    best = unseen[int(means.argmin())]
    worse = [each - best for each in unseen]  # in pairs: what both get wrong tells nothing of either
    close = [i for i, by in enumerate(worse) if by.mean() <= max(by.std() / math.sqrt(len(points)), NEGLIGIBLE)]
    richness = [(len(one.form.free), one.form.stages != _stages_of(one.base)) for one in fits]
    least = min(richness[index] for index in close)
    close = [index for index in close if richness[index] == least]
    enough = means[close].min() + NEGLIGIBLE
    return fits[next(index for index in close if means[index] <= enough)]


def _folds(count: int, parts: int) -> Iterator[tuple[Ints, Ints]]:
    # which sample is in which fold depends on *count* and *parts* alone
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
        times: Floats = np.log(one.moved(**{name: one.at[name] * math.exp(by)}).seconds(points))
        return times

    columns = [(logs(name, 1e-4) - logs(name, -1e-4)) / 2e-4 for name in free]
    _, sizes, rows = np.linalg.svd(np.column_stack(columns))
    rank = int((sizes > DEPENDENT * sizes[0]).sum())
    if rank == len(free):
        return None
    shares = np.sqrt((rows[rank:] ** 2).sum(axis=0))
    involved = {name for name, share in zip(free, shares, strict=True) if share > 0.1}
    return next(name for name in _EXPENDABLE if name in involved)


def identifiable(one: Fit, points: Points, progress: ShowProgress = silent) -> Fit:
    """Return *one* with intervals, without the parameters whose interval is wider than `WIDEST`, of a ramp `KNEE`.

    One parameter is given up at a time, in the order of `_EXPENDABLE`, and all else is fitted again; the two
    parameters of a step of a ramp are given up together.  *progress* is shown each resample, and each round counts
    as half of what is left, for nobody knows how many there will be.
    """
    left = 1.0
    while True:
        shown = within(progress, 1.0 - left, 1.0 - left / 2)
        left /= 2
        one = replace(one, intervals=_intervals(one, points, shown))
        wide = next((name for name in _EXPENDABLE if _is_wide(name, one.intervals.get(name))), None)
        if wide is None:
            return one
        gone = {wide, wide.replace("first", "extra"), wide.replace("extra", "first")}
        lost = tuple(name for name in one.form.free if name in gone)
        one = replace(_given_up(one, lost, points), unidentified=(*one.unidentified, *lost))


def _intervals(one: Fit, points: Points, progress: ShowProgress) -> Intervals:
    if not one.form.free:
        return {}

    resample = count(1)

    def again(random: np.random.Generator) -> list[float]:
        progress(next(resample) / RESAMPLES, "intervals")
        drawn = random.integers(0, len(points), len(points)).astype(np.int64)
        refitted = fit(one.form, points.take(drawn), one.base, one.at)
        return [refitted.at[name] for name in one.form.free]

    low, high = bootstrap(again, RESAMPLES, seed=1)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(one.form.free)}


def _is_wide(name: str, ends: tuple[float, float] | None) -> bool:
    return ends is not None and ends[1] > (KNEE if name.startswith("first") else WIDEST) * ends[0]


# --- several transfers in flight -----------------------------------------------------------------------------------

_SHARES = tuple(float(share) for share in np.linspace(0.0, 1.0, 21))  # of the constant that is *call*
_TIMES = (*(float(times) for times in np.geomspace(1.0, 16.0, 141)), math.inf)
"""What the queues carry together, as a multiple of what one transfer reaches: steps of 2 %; inf does not limit."""

_SAME = 1e-9  # losses that differ by less, each sample's share of it, are equal
_WORTH = 0.1  # a limit by which no crowd takes this much longer is noise


def with_concurrency(one: Fit, crowds: Points) -> Fit:
    """Return *one* with what *crowds* tell, samples of two transfers in flight and more.

    What one transfer takes stays as it is.  Crowds tell which part of the constant is *call*, which keeps the
    poster, and which is *latency*, which transfers have side by side; and what the queues carry together,
    *queue_rate*.  Both are looked for on a grid, with intervals from a bootstrap over the crowds.  What they do not
    tell stays: all of the constant *call*, and a *queue_rate* that may be infinite, whose interval is too wide, or
    by which no crowd takes a tenth longer.
    """
    shares = _SHARES if "call" in one.form.free and one.form.stages in ("sum", "pipeline") else (1.0,)
    rate = min(one.at["rate"], one.at["queue_rate"])
    rates = _TIMES if not one.base.in_order and math.isfinite(rate) else (math.inf,)
    cells = [(share, rate * times) for share, times in product(shares, rates)]
    if not len(crowds) or len(cells) == 1:
        return one
    away = np.array([np.log(_split(one, *cell).seconds(crowds) / crowds.seconds) for cell in cells]) / SCALE
    losses = 2.0 * (np.sqrt(1.0 + away * away) - 1.0)  # shape (cell, sample)
    share, rate = cells[int(_first_least(losses.sum(axis=1, keepdims=True), len(crowds))[0])]
    random = np.random.Generator(np.random.PCG64(2))
    counts = random.multinomial(len(crowds), np.full(len(crowds), 1.0 / len(crowds)), RESAMPLES)
    drawn = np.array(cells)[_first_least(losses @ counts.T, len(crowds))]  # shape (resample, 2)
    # of those drawn: between x and inf lies nothing
    low, high = np.percentile(drawn, (2.5, 97.5), axis=0, method="nearest").tolist()
    one = _with_share(one, share, low[0], high[0])
    longer = _split(one, 1.0, rate).seconds(crowds) / one.seconds(crowds) - 1.0
    # a whole number of steps may be just as wide as is allowed
    if longer.max() < _WORTH or not math.isfinite(high[1]) or high[1] > WIDEST * low[1] * (1.0 + _SAME):
        return one
    return replace(
        one.moved(queue_rate=rate),
        form=replace(one.form, free=(*one.form.free, "queue_rate")),
        intervals={**one.intervals, "queue_rate": (low[1], high[1])},
    )


def _split(one: Fit, share: float, queue_rate: float) -> Fit:
    constant = one.at["call"] + one.at["latency"]
    parts = {"call": share * constant, "latency": (1.0 - share) * constant} if share < 1.0 else {}
    return one.moved(**parts, **({"queue_rate": queue_rate} if math.isfinite(queue_rate) else {}))


def _first_least(losses: Floats, samples: int) -> Ints:
    # Equal cells are common, and rounding, which depends on the processor, would choose among them.
    enough = losses.min(axis=0) * (1.0 + _SAME) + samples * _SAME
    first: Ints = (losses <= enough).argmax(axis=0)
    return first


def _with_share(one: Fit, share: float, low: float, high: float) -> Fit:
    # An interval that reaches 1 leaves all of it *call*.  One that starts at 0 makes all of it *latency*, and one
    # between the two frees both parameters, each with an interval of its own.
    if high >= 1.0:
        return one
    if low > 0.0:
        constant = one.at["call"] + one.at["latency"]
        both = {"call": (low * constant, high * constant), "latency": ((1 - high) * constant, (1 - low) * constant)}
        form = replace(one.form, free=(*one.form.free, "latency"))
        return replace(_split(one, share, math.inf), form=form, intervals={**one.intervals, **both})
    names = {name: "latency" if name == "call" else name for name in one.form.free}
    spans = {names[name]: span for name, span in one.intervals.items()}
    form = replace(one.form, free=tuple(names.values()))
    return replace(_split(one, 0.0, math.inf), form=form, intervals=spans)


# --- reads ---------------------------------------------------------------------------------------------------------


def read_overhead(writes: Fit, samples: Sequence[Sample], progress: ShowProgress = silent) -> Fit | None:
    """Return *writes* with the extra costs of reads, from the reads among *samples*; None if these are too few.

    Reads are fitted by their ratio to the write of the same configuration: an error of the fit that both share
    cancels.  A read costs nothing more, or up to two of `OF_READS`; where reads are faster, nothing.
    Intervals are those that the fit of the writes leaves.
    """
    points = _as_writes_are(writes, samples)
    return None if points is None else identifiable(_chosen_reads(writes, points), points, progress)


def _chosen_reads(writes: Fit, points: Points) -> Fit:
    more = points.seconds - writes.seconds(points)
    once, each = float(np.median(more)), float(np.median(more / points.blocks))
    rate = float((points.nbytes / points.seconds).max())
    start = {"read": max(once, 1e-8), "read_descriptor": max(each, 1e-9), "read_rate": rate}
    every = [
        fit(
            Form(writes.form.stages, free),
            points,
            writes.base,
            {**writes.at, **{name: start[name] for name in free}},
        )
        for count in range(3)
        for free in combinations(OF_READS, count)
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
    """Return a summary of *away*, relative errors; *how* says in words which samples were left out."""
    size = np.abs(away)
    median, p95 = float(np.median(size)), float(np.percentile(size, 95.0))
    return HeldOut(
        points=len(away), how=how, mean=float(size.mean()), median=median, p95=p95, bias=float(away.mean())
    )
