# SPDX-License-Identifier: Apache-2.0
"""What several transfers in flight tell of an engine, beyond what one at a time has told.

A sample of a crowd is the time from a transfer's submission to its completion.  A program that posts by itself
submits the next transfer when it has posted the last, and the wait for its own thread is in no sample: over NVLink
four transfers of 256 blocks take 1.0 to 1.3 times as long as one, not four times (2 x H200, three engines).  So
crowds may not move what single transfers say.  They tell two things that single ones cannot: which part of the
constant is *call*, which keeps the poster, and which is *latency*, which transfers have side by side; and what the
queues carry together, *queue_rate*.  Both are looked for on a grid, intervals are from a bootstrap over the crowds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import TypeAlias

import numpy as np

from pdsim.calibration.fit import RESAMPLES, SCALE, WIDEST, Fit, Ints
from pdsim.calibration.forms import Floats, Points
from pdsim.hardware.costs import EngineModel

__all__ = ["shared"]

SHARES = tuple(float(share) for share in np.linspace(0.0, 1.0, 21))
"""Of the constant that is *call*."""

TIMES = (*(float(times) for times in np.geomspace(1.0, 16.0, 141)), math.inf)
"""What the queues carry together, as a multiple of what one transfer reaches: steps of 2 %; inf does not limit."""

EQUAL = 1e-9
"""Losses that differ by less, each sample's share of it, are equal: of queues that limit nothing all losses are."""

WORTH = 0.1
"""A limit by which no crowd takes this much longer is noise."""

Spans: TypeAlias = dict[str, tuple[float, float]]


def shared(found: Fit, spans: Spans, crowds: Points, base: EngineModel) -> tuple[Fit, Spans]:
    """Return *found* and its intervals *spans* with what *crowds* tell, samples of two transfers in flight and more.

    What one transfer takes stays as it is.  Where they do not tell the part of *call*, all of the constant stays
    *call*; nor is a *queue_rate* told that may be infinite, whose interval is wider than from x / 2 to 2 x, or by
    which no crowd takes a tenth longer.  A copy engine that takes one transfer after the other has none.

    *spans* are 95 % intervals by parameter.  The same samples give the same result on any processor: the bootstrap
    draws from a fixed seed, and of cells of the grid whose losses are equal the first counts.
    """
    shares = SHARES if "call" in found.form.free and found.form.stages in ("sum", "pipeline") else (1.0,)
    rate = min(found.at["rate"], found.at["queue_rate"])
    rates = TIMES if not base.in_order and math.isfinite(rate) else (math.inf,)
    cells = [(share, rate * times) for share, times in product(shares, rates)]
    if not len(crowds) or len(cells) == 1:
        return found, spans
    losses = np.array([_loss(_split(found, *cell), crowds) for cell in cells])  # shape (cell, sample)
    best = cells[int(_least(losses.sum(axis=1, keepdims=True), len(crowds))[0])]
    random = np.random.Generator(np.random.PCG64(2))
    counts = random.multinomial(len(crowds), np.full(len(crowds), 1.0 / len(crowds)), RESAMPLES)
    drawn = np.array(cells)[_least(losses @ counts.T, len(crowds))]  # shape (resample, 2)
    # of those drawn: between x and inf lies nothing
    ends = np.percentile(drawn, (2.5, 97.5), axis=0, method="nearest")
    found, spans = _with_share(found, spans, best[0], (float(ends[0, 0]), float(ends[1, 0])))
    longer = _split(found, 1.0, best[1]).seconds(crowds) / found.seconds(crowds) - 1.0
    if longer.max() < WORTH:
        return found, spans
    return _with_queues(found, spans, best[1], (float(ends[0, 1]), float(ends[1, 1])))


def _split(found: Fit, share: float, queue_rate: float) -> Fit:
    constant = found.at["call"] + found.at["latency"]
    parts = {"call": share * constant, "latency": (1.0 - share) * constant} if share < 1.0 else {}
    limit = {"queue_rate": queue_rate} if math.isfinite(queue_rate) else {}
    return replace(found, at={**found.at, **parts, **limit})


def _loss(found: Fit, crowds: Points) -> Floats:
    away = np.log(found.seconds(crowds) / crowds.seconds) / SCALE
    loss: Floats = 2.0 * (np.sqrt(1.0 + away * away) - 1.0)
    return loss


def _least(losses: Floats, samples: int) -> Ints:
    # Equal cells are common, and rounding, which depends on the processor, would choose among them.
    enough = losses.min(axis=0) * (1.0 + EQUAL) + samples * EQUAL
    found: Ints = (losses <= enough).argmax(axis=0)
    return found


def _with_share(found: Fit, spans: Spans, share: float, ends: tuple[float, float]) -> tuple[Fit, Spans]:
    # An interval that reaches 1 leaves all of it *call*.  One that starts at 0 makes all of it *latency*, and one
    # between the two frees both parameters, each with an interval of its own.
    low, high = ends
    if high >= 1.0:
        return found, spans
    if low > 0.0:  # both are there
        form = replace(found.form, free=(*found.form.free, "latency"))
        found = replace(_split(found, share, math.inf), form=form)
        constant = found.at["call"] + found.at["latency"]
        both = {"call": (low * constant, high * constant), "latency": ((1 - high) * constant, (1 - low) * constant)}
        return found, {**spans, **both}
    free = tuple("latency" if name == "call" else name for name in found.form.free)
    found = replace(_split(found, 0.0, math.inf), form=replace(found.form, free=free))
    return found, {"latency" if name == "call" else name: span for name, span in spans.items()}


def _with_queues(found: Fit, spans: Spans, rate: float, ends: tuple[float, float]) -> tuple[Fit, Spans]:
    # It stays as it is if *ends*, the interval, is infinite or too wide.
    low, high = ends
    if not math.isfinite(high) or high > WIDEST * low * (1.0 + EQUAL):  # a whole number of steps may be just so wide
        return found, spans
    form = replace(found.form, free=(*found.form.free, "queue_rate"))
    return replace(found, form=form, at={**found.at, "queue_rate": rate}), {**spans, "queue_rate": ends}
