# SPDX-License-Identifier: Apache-2.0
"""What a read costs beyond a write, from samples of both of the same configurations.

A read is told by its ratio to the write beside it: what the fit has wrong of a configuration it has wrong of both,
and an engine's own misfit is then not taken for what reading costs.  Forms are that a read costs nothing more, more
once (`read`), more for each descriptor on the wire (`read_descriptor`), more for each byte (`read_rate`), and two of
these; the simplest that predicts unseen reads as well as the best is taken, as for writes.  What is free is
positive: where reads are faster, they cost nothing more.  Intervals are those that the fit of the writes leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from pdsim.calibration import fit
from pdsim.calibration.fit import LEAST, Fit
from pdsim.calibration.forms import Points, points_of
from pdsim.calibration.samples import Sample
from pdsim.hardware.costs import EngineModel

__all__ = ["FREE", "beyond"]

FREE = ("read", "read_descriptor", "read_rate")
"""What may be fitted: parameters of `EngineModel`."""

_FORMS = tuple(free for count in range(3) for free in combinations(FREE, count))


def beyond(
    writes: Fit, samples: Sequence[Sample], base: EngineModel
) -> tuple[Fit, Mapping[str, tuple[float, float]]] | None:
    """Return *writes* with what reads cost beyond them, and its intervals, from the reads among *samples*.

    Return None if there are too few reads of one transfer at a time with a write of the same configuration beside
    them.

    The first item has the parameters of *writes* and those of `FREE` that were found; its *unidentified* names those
    that the reads do not tell.  Reads with several transfers in flight are not used.
    """
    points = _as_writes_are(writes, samples)
    if points is None:
        return None
    return fit.told(_chosen(writes, points, base), points, base)


def _chosen(writes: Fit, points: Points, base: EngineModel) -> Fit:
    start = _start(writes, points)
    every = [
        fit.fit(replace(writes.form, free=free), points, base, {**writes.at, **{name: start[name] for name in free}})
        for free in _FORMS
    ]
    return fit.simplest(every, points, base)


def _as_writes_are(writes: Fit, samples: Sequence[Sample]) -> Points | None:
    # None if fewer than `LEAST` reads have a write of the same configuration.
    beside = {_where(row): row.seconds for row in samples if row.operation == "write"}
    reads = [row for row in samples if row.operation == "read" and row.concurrency == 1 and _where(row) in beside]
    if len(reads) < LEAST:
        return None
    points = points_of(reads)
    ratio = np.array([row.seconds / beside[_where(row)] for row in reads])
    return replace(points, seconds=ratio * writes.seconds(points))


def _where(row: Sample) -> tuple[Any, ...]:
    return row.layout, row.queues, row.blocks, row.size, row.concurrency


def _start(writes: Fit, points: Points) -> dict[str, float]:
    more = points.seconds - writes.seconds(points)
    once, each = float(np.median(more)), float(np.median(more / points.blocks))
    rate = float((points.blocks * points.size / points.seconds).max())
    return {"read": max(once, 1e-8), "read_descriptor": max(each, 1e-9), "read_rate": rate}
