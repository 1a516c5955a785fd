# SPDX-License-Identifier: Apache-2.0
"""Fit the `Roof` of one operator to its measured rows.

Fits minimise relative errors, robustly: `scipy.optimize.least_squares` with its ``soft_l1`` loss, on the logarithms
of positive parameters; shares of peaks stay below 1.  How tiles are cut is not differentiable: each of a few ways is
fitted, and the best is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pdsim.compute.kernels import Peaks, Roof
from pdsim.compute.row_work import Row, merged, work

__all__ = ["OPERATORS", "fit_roof", "row_seconds"]

OPERATORS = {
    "gemm": "fmbw",
    "gemm_fp8": "fmbw",
    "prefill": "fwa",
    "decode": "fmwa",
    "mla_prefill": "fmw",
    "mla_decode": "fm",
    "mla_absorb": "fm",
    "experts": "fmbw",
    "experts_fp8": "fmbw",
    "experts_tuned": "fmbw",
    "routing": "ma",
    "norm": "mw",
    "activation": "m",
    "rotary": "ma",
}
"""Operators, and the parts of their time.

Arithmetic (f), memory (m), blocks and depth of tiles (b, w), and kernels that only some rows have (a).
"""

_ROWS: dict[str, tuple[int, ...]] = dict.fromkeys(
    ("gemm", "gemm_fp8", "experts", "experts_fp8", "experts_tuned"), (0, 8, 16, 32, 64, 128)
)
_ROWS |= {"prefill": (0, 64, 128), "mla_prefill": (0, 64, 128), "decode": (0, 128)}
_COLUMNS = (64, 128, 256)
_GROUPED = 128
"""Columns of the tiles of PyTorch's grouped products, of twice as many where experts have many rows."""
_MAXIMUM = 21.0
"""A blend at which the longest part nearly counts alone."""
_NOTHING = 1e-13
"""Seconds, and shares, that a fit has driven to zero."""
_FEW = 12
"""Rows below which nothing is said of a blend."""


def fit_roof(name: str, rows: Sequence[Row], peaks: Peaks, blend: float = 0.0) -> Roof:
    """Return the roof of the operator *name* that fits *rows* best, of all tiles that are tried.

    The time is ``launch + count * part + merge + (compute**p + memory**p + tiles**p)**(1/p)``: a blend that is their
    sum for ``p = 1`` and their maximum for large *p*; *count* is the number of experts.  Of decode attention the
    longest part counts alone, since a step is linear in its context.  Of a few rows the *blend* is the given one, of
    the same kernel.
    """
    power = _MAXIMUM if name == "decode" else blend if blend and len(rows) < _FEW else 0.0
    found = [_fitted(name, rows, peaks, cut, power) for cut in _cuts(name, peaks.processors)]
    return min(found, key=lambda each: each[0])[1]


def _cuts(name: str, processors: int) -> Iterator[Roof]:
    for tile in _ROWS.get(name, (0,)):
        yield Roof(tile=tile)
        if tile and processors and "b" in OPERATORS[name]:
            for columns in _COLUMNS:
                yield Roof(tile=tile, columns=columns)
                if name == "experts" and columns == _GROUPED:
                    yield Roof(tile=tile, columns=columns, widened=True)


def row_seconds(roof: Roof, row: Row, peaks: Peaks) -> float:
    """Return what *roof* says of an operator's *row*."""
    narrow = row["dtype"] == "fp8"
    seconds = roof.seconds(work(row, roof, peaks.processors), peaks, narrow, row["experts"])
    return seconds + (roof.merge if merged(row, roof, peaks.processors) else 0.0)


def _fitted(name: str, rows: Sequence[Row], peaks: Peaks, cut: Roof, power: float) -> tuple[float, Roof]:
    from scipy.optimize import least_squares

    flops, nbytes, turns, depth = np.array([work(row, cut, peaks.processors) for row in rows], dtype=float).T
    merge = np.array([merged(row, cut, peaks.processors) for row in rows], dtype=float)
    count = np.array([row["experts"] if name.startswith("experts") else 0.0 for row in rows])
    if len(set(count)) == 1:  # of one number of experts nothing can be told
        count = 0 * count
    has = OPERATORS[name]
    there = {  # parameters that these rows say something of, and where to look for them first
        "flops_share": "f" in has and flops.any(),
        "memory_share": "m" in has and nbytes.any(),
        "block": "b" in has and turns.any(),
        "walk": "w" in has and depth.any(),
        "merge": "a" in has and merge.any() and not merge.all(),
        "part": count.any(),
    }
    names = ["launch", *(key for key, some in there.items() if some)]
    seconds = np.array([row["seconds"] for row in rows])
    least = float(seconds.min())
    start = {"launch": 0.7 * least, "block": 0.1 * least, "merge": 0.5 * least, "part": 1e-8}
    if there["walk"]:
        start["walk"] = 0.3 * float(np.median(seconds[depth > 0] / depth[depth > 0]))
    peak = peaks.narrow if name.endswith("_fp8") else peaks.flops
    blended = not power and sum(key in names for key in ("flops_share", "memory_share", "walk")) > 1
    if blended:
        names.append("blend")

    def values(point: Any) -> dict[str, Any]:
        every = dict(zip(names, point, strict=True))
        made = {key: 1.0 / (1.0 + np.exp(-at)) if key.endswith("share") else np.exp(at) for key, at in every.items()}
        made["blend"] = 1.0 + np.exp(np.minimum(every["blend"], 3.0)) if blended else power or 1.0
        return made

    def residuals(point: Any) -> Any:
        one = values(point)
        compute = flops / (peak * one["flops_share"]) if "flops_share" in one else 0.0 * flops
        memory = nbytes / (peaks.memory * one["memory_share"]) if "memory_share" in one else 0.0 * flops
        tiles = turns * one.get("block", 0.0) + depth * one.get("walk", 0.0)
        longest = np.maximum(np.maximum(compute, memory), np.maximum(tiles, 1e-15))
        norm = sum((part / longest) ** one["blend"] for part in (compute, memory, tiles))
        constant = one["launch"] + merge * one.get("merge", 0.0) + count * one.get("part", 0.0)
        return np.log(constant + longest * norm ** (1.0 / one["blend"])) - np.log(seconds)

    point = [0.5 if key.endswith("share") else 0.0 if key == "blend" else np.log(start[key]) for key in names]
    found = least_squares(residuals, point, loss="soft_l1", f_scale=0.05)
    fitted: dict[str, Any] = {
        key: float(f"{value:.4g}") for key, value in values(found.x).items() if value > _NOTHING
    }
    return float(found.cost), replace(cut, **fitted)
