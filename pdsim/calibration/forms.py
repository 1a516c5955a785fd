# SPDX-License-Identifier: Apache-2.0
"""The forms that a fit chooses among: the closed form of `EngineModel.isolated_time` over arrays of samples.

With *n* descriptors of *s* bytes, a posting of ``P = call + n * descriptor + sum(min(n, first) * extra)``, and a
wire of ``W = n * (s / rate + wire_descriptor)``::

    sum        P + W + latency
    maximum    max(P, W) + latency
    pipeline   max(P(1) + W, P + W / n) + latency

A read has *read* more latency, *read_descriptor* more of its wire for each descriptor, and *read_rate* at most.
A batch of up to *small_bytes* and *small_descriptors*, which a backend states, takes *saving* less: of *latency*
first, then of *call*.

Of *c* transfers in flight each takes ``max(T(1), c * P, c * n * s / queue_rate)``: the poster takes one at a time,
and all share the queues (the operational bounds of a closed network, Denning and Buzen 1978).  Where a copy engine
carries one after the other (`EngineModel.in_order`), it is ``max(T(1), c * P, c * W)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pdsim.calibration.samples import Sample
from pdsim.hardware.costs import EngineModel, InlineSaving, Ramp

__all__ = ["FORMS", "Form", "Points", "model_of", "points_of", "stages_of", "start_of"]

Floats: TypeAlias = npt.NDArray[np.float64]
Parameters: TypeAlias = Mapping[str, float]

STAGES = ("sum", "maximum", "pipeline")
RAMPS = 2


@dataclass(frozen=True)
class Points:
    """Samples as columns.

    Arrays of shape (point,), all of one length: *blocks* descriptors of *size* bytes each, *concurrency* transfers
    in flight, *seconds* of one transfer.  Floats throughout, so that forms multiply them without overflow.
    """

    blocks: Floats
    size: Floats
    concurrency: Floats
    seconds: Floats
    queues: int = 0  # queue pairs that all of them used; 0 if that is not known

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Points:
        """Return the samples at *which*, indices or a mask."""
        columns = (self.blocks[which], self.size[which], self.concurrency[which], self.seconds[which])
        return Points(*columns, self.queues)


def points_of(samples: Sequence[Sample]) -> Points:
    """Return *samples* as columns.

    *queues* is known only if all samples agree on it.
    """

    def column(name: str) -> Floats:
        return np.array([getattr(row, name) for row in samples], dtype=np.float64)

    queues = {row.queues for row in samples}
    known = queues.pop() if len(queues) == 1 else 0
    return Points(column("blocks"), column("size"), column("concurrency"), column("seconds"), known)


@dataclass(frozen=True)
class Form:
    """Which stages there are, and which parameters are free; all others stay what they were.

    *stages* is one of `STAGES`; *free* are names of parameters of `start_of`, in the order in which a fit keeps
    them.
    """

    stages: str
    free: tuple[str, ...]

    @property
    def name(self) -> str:
        """Such as ``"maximum(latency, descriptor, rate)"``."""
        return f"{self.stages}({', '.join(self.free)})"

    def without(self, parameter: str) -> Form:
        """Return the form in which *parameter* is not free."""
        return replace(self, free=tuple(name for name in self.free if name != parameter))

    def seconds(self, at: Parameters, points: Points) -> Floats:
        """Return how long a transfer of each of *points* takes with the parameters *at*.

        Shape (point,).  *at* must have every parameter of `start_of`; rates of ``inf`` do not limit.
        """
        n, total = points.blocks, points.blocks * points.size
        rate = min(at["rate"], at["queue_rate"], at["read_rate"])
        early, late = _saved(at, n, total)
        posting, wire = _posting(at, n) - early, total / rate + n * (at["wire_descriptor"] + at["read_descriptor"])
        if self.stages == "sum":
            alone = posting + wire
        elif self.stages == "maximum":
            alone = np.maximum(posting, wire)
        else:
            alone = np.maximum(_posting(at, np.ones(1)) - early + wire, posting + wire / n)
        alone = alone + at["latency"] + at["read"] - late
        shared = wire if at["in_order"] else total / at["queue_rate"]
        crowded = points.concurrency * np.maximum(posting, shared)
        busy: Floats = np.where(points.concurrency > 1, np.maximum(alone, crowded), alone)
        return busy


def _posting(at: Parameters, n: Floats) -> Floats:
    # Threads of the engine shorten it as `pdsim.hardware.costs.Workers` says.
    if at["workers"]:
        n = np.minimum(n, np.maximum(n // at["workers"], at["least"]))
    seconds: Floats = at["call"] + n * at["descriptor"]
    for index in range(1, RAMPS + 1):
        seconds = seconds + np.minimum(n, at[f"first{index}"]) * at[f"extra{index}"]
    return seconds


def _saved(at: Parameters, n: Floats, total: Floats) -> tuple[Floats, Floats]:
    small = (n <= at["small_descriptors"]) & (total <= at["small_bytes"])
    saving = np.where(small, at["saving"], 0.0)
    late = np.minimum(saving, at["latency"])
    return np.minimum(saving - late, at["call"]), late


_RAMPS = ((), ("extra1", "first1"), ("extra1", "first1", "extra2", "first2"))
_CONSTANTS = {"sum": (("call",),), "maximum": (("latency",), ("call", "latency")), "pipeline": (("call",),)}

# a sum does not tell the two of a descriptor apart
_WIRES: Mapping[str, tuple[tuple[str, ...], ...]] = {"sum": ((),)}

FORMS = tuple(
    Form(stages, (*constant, "descriptor", *ramps, *wire, "rate"))
    for ramps in _RAMPS
    for stages in STAGES
    for wire in _WIRES.get(stages, ((), ("wire_descriptor",)))
    for constant in _CONSTANTS[stages]
)
"""From the simplest to the richest."""


def stages_of(base: EngineModel) -> str:
    """Return the stages of *base*, which stand until samples tell better."""
    return "pipeline" if base.pipelined else "maximum" if base.overlap else "sum"


def model_of(form: Form, at: Parameters, base: EngineModel) -> EngineModel:
    """Return *base* with the parameters *at*, of which those of queues replace what its queues allow together.

    Steps of a ramp that cost nothing are left out, and *queue_rate* is that of one of the queues of *base*.
    """
    small = None if base.small is None else replace(base.small, saving=at["saving"])
    ramps = [(round(at[f"first{index}"]), at[f"extra{index}"]) for index in range(1, RAMPS + 1)]
    return replace(
        base,
        call=at["call"],
        descriptor=at["descriptor"],
        latency=at["latency"],
        rate=at["rate"],
        queue_rate=at["queue_rate"] / base.queues,
        wire_descriptor=at["wire_descriptor"],
        overlap=form.stages != "sum",
        pipelined=form.stages == "pipeline",
        ramp=tuple(Ramp(first=first, extra=extra) for first, extra in ramps if extra > 0.0 and first),
        small=small,
    )


def start_of(base: EngineModel, queues: int = 0) -> dict[str, float]:
    """Return the parameters that stay what they are unless a form frees them.

    A rate is that of the path then, and of a ramp each of *queues* costs its first descriptor.  A transfer is a
    write.

    Every parameter that `Form.seconds` reads is there, those of both ramps and of small batches included, so that a
    fit may add the ones it frees.  Costs of one call are 0 and rates those of *base*.
    """
    ramps = {name: 0.0 for index in range(1, RAMPS + 1) for name in (f"first{index}", f"extra{index}")}
    ramps["first1"] = float(queues)
    fixed = {"call": 0.0, "latency": 0.0, "descriptor": base.descriptor, "rate": base.rate, "wire_descriptor": 0.0}
    small = base.small or InlineSaving(bytes=1, descriptors=1)  # which saves nothing
    fixed |= {"saving": small.saving, "small_bytes": small.bytes, "small_descriptors": small.descriptors}
    fixed |= {"read": 0.0, "read_descriptor": 0.0, "read_rate": math.inf}
    fixed |= {"workers": base.workers.threads, "least": base.workers.least} if base.workers else {"workers": 0.0}
    return {**fixed, "queue_rate": base.queues * base.queue_rate, "in_order": float(base.in_order), **ramps}
