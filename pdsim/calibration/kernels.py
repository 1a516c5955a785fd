# SPDX-License-Identifier: Apache-2.0
"""Fit `Kernels` to measured operators, and say how far off they are where they were not fitted.

A row is one measured point, of `pdsim profile` or of `compaction.published`: the operator, its sizes as integers (0
where one has no meaning), and seconds (median, least and most).  ``round`` is 0 but for repetitions, which only tell
how stable the GPU was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pdsim.calibration.robust import SHARE, Space, robust_fit
from pdsim.compute.forward import OperatorForward
from pdsim.compute.kernels import AllReduce, Correction, Kernels, Peaks, Roof, shape_key
from pdsim.compute.row_work import Row, merged, operator_of, work
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Llm

NUMBERS = (
    "tp", "layers", "tokens", "n", "k", "batch", "context", "heads", "kv_heads", "head_dim", "value_dim", "experts",
    "hit", "per_token", "width", "gpus", "round", "repeats",
)  # fmt: skip
"""Columns of a row that are whole numbers."""

_SIZES = {"decode": ("batch", "context"), "mla_decode": ("batch", "context"), "mla_absorb": ("batch",)}
"""Columns whose values are sizes, every second of which is held out; of other operators ``tokens``."""
_FULL = ("cudnn", "flash", "reference")
_BEST = {"prefill": (*_FULL, ""), "mla_prefill": (*_FULL, "absorbed"), "decode": (*_FULL[1:], "")}
"""Kernels of an operator; the first that there is, is fitted."""


@dataclass(frozen=True)
class Errors:
    """Errors of *what*: the model's seconds over the measured ones, less 1, of *count* rows."""

    what: str
    count: int
    median: float  # of the absolute error
    p95: float  # 95th percentile of that
    bias: float  # the median of the signed error


@dataclass(frozen=True)
class KernelFit:
    """*kernels*, and their *errors*: of rows fitted to, held out, of whole forwards, and of a model left out."""

    kernels: Kernels
    errors: Sequence[Errors]


def rows_of(texts: Iterable[Mapping[str, str]]) -> list[Row]:
    """Return rows of text, as a CSV file has them, with numbers as numbers; empty columns are 0.

    Raise a `ConfigError` for a row whose times are not positive, or without an operator.
    """
    parsed: list[Row] = []
    for number, text in enumerate(texts, 1):
        try:
            row: dict[str, Any] = dict(text)
            row |= {name: int(text.get(name) or 0) for name in NUMBERS}
            row |= {name: float(text[name]) for name in ("seconds", "low", "high")}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"row {number} of the profile: {error}; name a file that pdsim profile wrote"
            ) from error
        if not row.get("operator") or not row["seconds"] > 0:
            raise ConfigError(f"row {number} of the profile has no operator or no time; correct or delete the row")
        parsed.append(row)
    return parsed


def fit(rows: Sequence[Row], peaks: Peaks, gpu: str = "") -> KernelFit:
    """Return the kernels fitted to *rows* of a GPU with these *peaks*, and their errors.

    Every second size of an operator is held out, and all whole forwards: these test that the sum of operators is
    right.  A model is left out in turn where the others have products and attention to fit to.  Raise a
    `ConfigError` if there are no matrix products or no attention.
    """
    fitted, held = split(rows)
    kernels = _kernels(fitted, peaks, gpu)
    kernels = replace(kernels, layer_launch=layer_launch(rows), mixed_launch=layer_launch(rows, mixed=True))
    whole = [row for row in rows if row["operator"] in ("step", "forward")]
    errors = [*_of_operators(kernels, fitted, held, peaks), *_of_forwards(kernels, whole, peaks)]
    for name in dict.fromkeys(str(row["model"]) for row in whole):
        others = [row for row in fitted if row["model"] != name]
        if not {"gemm", "decode", "prefill"} <= {str(row["operator"]) for row in others}:
            continue
        left = _kernels(others, peaks, gpu)
        lacking = {each: value for each, value in vars(kernels).items() if getattr(left, each) is None}
        left = replace(left, **lacking, layer_launch=kernels.layer_launch, mixed_launch=kernels.mixed_launch)
        mine = _of_forwards(left, [row for row in whole if row["model"] == name], peaks)
        errors += [replace(one, what=f"{one.what}, fitted without it") for one in mine]
    return KernelFit(kernels, errors)


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of operators to fit to, and those held out.

    Sizes of equal operators are sorted, and every second one is held out; of two sizes, every second place of
    their checkerboard.  Rows of kernels that an engine would not choose are in neither.
    """
    parts: tuple[list[Row], list[Row]] = ([], [])
    for operator in dict.fromkeys(str(row["operator"]) for row in rows):
        if operator in ("step", "forward", "launch"):
            continue
        mine = [row for row in rows if row["operator"] == operator and not row["round"]]
        if operator == "allreduce":
            mine.sort(key=lambda row: row["seconds"], reverse=True)
            mine = [*{(row["gpus"], row["tokens"] * row["n"]): row for row in mine}.values()]
        elif operator in _BEST:
            there = {row["kernel"] for row in mine}
            kernel = next((name for name in _BEST[operator] if name in there), "")
            mine = [row for row in mine if row["kernel"] == kernel]
        sizes = _SIZES.get(operator, ("tokens",))
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in mine:
            alike = ["dtype", "n", "k", "heads", "kv_heads", "head_dim", "width"]
            alike += ["hit"] * (operator == "routing") + ["context"] * ("context" not in sizes)
            groups.setdefault(tuple(row[name] for name in alike), []).append(row)
        for group in groups.values():
            places = [sorted({row[name] for row in group}) for name in sizes]
            for row in group:
                place = sum(values.index(row[name]) for name, values in zip(sizes, places, strict=True))
                parts[place % 2].append(row)
    return parts


def _kernels(rows: Sequence[Row], peaks: Peaks, gpu: str) -> Kernels:
    fitted: dict[str, Any] = {}
    for name in OPERATORS:
        mine = [row for row in rows if operator_of(row) == name]
        if len(mine) >= 3:
            blend = fitted["prefill"].blend if name == "mla_prefill" and "prefill" in fitted else 0.0
            fitted[name] = fit_roof(name, mine, peaks, blend)
    if "gemm" not in fitted or not {"decode", "mla_decode"} & fitted.keys():
        raise ConfigError("the profile has too few rows of matrix products or attention; measure longer (--limit)")
    absorbed = any(row["kernel"] == "absorbed" for row in rows if row["operator"] == "mla_prefill")
    rings = {str(row["gpus"]) for row in rows if row["operator"] == "allreduce"}
    shared = {number: _ring(rows, int(number)) for number in sorted(rings)}
    if tuned := [f"{row['experts']}x{row['width']}" for row in rows if row["kernel"] == "tuned"]:
        fitted["tuned"] = tuple(dict.fromkeys(tuned))
    kernels = Kernels(gpu=gpu, allreduce=shared, absorbed_prefill=absorbed, **fitted)
    return replace(kernels, shapes=_corrections(kernels, rows, peaks))


_SHAPES = 200  # of matrices, most, that have a correction of their own; of more, as in published tables, none has


def _corrections(kernels: Kernels, rows: Sequence[Row], peaks: Peaks) -> dict[str, Correction]:
    # A shape ("n x k", and its type) has a factor at each number of tokens that was measured, to three digits.  A
    # roof is one line for all shapes; what a library chooses for one of them may be well off it.
    shapes: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["operator"] == "gemm":
            key = shape_key(row["n"], row["k"], row["dtype"] == "fp8")
            shapes.setdefault(key, {})[row["tokens"]] = row["seconds"] / _seconds(kernels, row, peaks)
    if len(shapes) > _SHAPES:
        return {}
    corrections = {}
    for key, factors in sorted(shapes.items()):
        tokens = tuple(sorted(factors))
        corrections[key] = Correction(tokens=tokens, factor=tuple(float(f"{factors[each]:.3g}") for each in tokens))
    return corrections


def _ring(rows: Sequence[Row], gpus: int) -> AllReduce:
    mine = [row for row in rows if row["operator"] == "allreduce" and row["gpus"] == gpus]
    nbytes = np.array([2.0 * row["tokens"] * row["n"] for row in mine])
    seconds = np.array([row["seconds"] for row in mine])
    start = {"latency": float(seconds.min()), "rate": float(nbytes.max() / seconds.max())}
    ring = robust_fit(lambda at: at["latency"] + nbytes / at["rate"], seconds, start, scale=SCALE).values
    return AllReduce(**{name: float(f"{value:.4g}") for name, value in ring.items()})


OPERATORS = {
    "gemm": "fmbw", "gemm_fp8": "fmbw", "prefill": "fwa", "decode": "fmwa", "mla_prefill": "fmw", "mla_decode": "fm",
    "mla_absorb": "fm", "experts": "fmbw", "experts_fp8": "fmbw", "experts_tuned": "fmbw", "routing": "ma",
    "norm": "mw", "activation": "m", "rotary": "ma",
}  # fmt: skip
"""Operators, and the parts of their time.

Arithmetic (f), memory (m), blocks and depth of tiles (b, w), and kernels that only some rows have (a).
"""

_PRODUCTS = ("gemm", "gemm_fp8", "experts", "experts_fp8", "experts_tuned")
_ROWS: dict[str, tuple[int, ...]] = dict.fromkeys(_PRODUCTS, (0, 8, 16, 32, 64, 128))
_ROWS |= {"prefill": (0, 64, 128), "mla_prefill": (0, 64, 128), "decode": (0, 128)}
_COLUMNS = (64, 128, 256)
_GROUPED = 128  # columns of the tiles of PyTorch's grouped products, of twice as many where experts have many rows
_MAXIMUM = 21.0  # a blend at which the longest part nearly counts alone
_NOTHING = 1e-13  # seconds, and shares, that a fit has driven to zero
SCALE = 0.05  # the relative error from which on a row counts less
_BLEND = Space(lambda value: math.log(value - 1.0), lambda at: 1.0 + math.exp(min(at, 3.0)))
_FEW = 12  # rows below which nothing is said of a blend


def fit_roof(name: str, rows: Sequence[Row], peaks: Peaks, blend: float = 0.0) -> Roof:
    """Return the roof of the operator *name* that fits *rows* best, of all tiles that are tried.

    The time is ``launch + count * part + merge + (compute**p + memory**p + tiles**p)**(1/p)``, *count* being the
    number of experts.  Of decode attention the longest part counts alone, since a step is linear in its context.  Of
    a few rows the *blend* p is the given one, of the same kernel.
    """
    power = _MAXIMUM if name == "decode" else blend if blend and len(rows) < _FEW else 0.0
    roofs = [_fitted(name, rows, peaks, cut, power) for cut in _cuts(name, peaks.processors)]
    return min(roofs, key=lambda each: each[0])[1]


def _cuts(name: str, processors: int) -> Iterator[Roof]:
    for tile in _ROWS.get(name, (0,)):
        yield Roof(tile=tile)
        if tile and processors and "b" in OPERATORS[name]:
            for columns in _COLUMNS:
                yield Roof(tile=tile, columns=columns)
                if name == "experts" and columns == _GROUPED:
                    yield Roof(tile=tile, columns=columns, widened=True)


def row_seconds(roof: Roof, row: Row, peaks: Peaks) -> float:
    """Return the seconds of an operator's *row* by *roof*."""
    narrow = row["dtype"] == "fp8"
    seconds = roof.seconds(work(row, roof, peaks.processors), peaks, narrow, row["experts"])
    return seconds + (roof.merge if merged(row, roof, peaks.processors) else 0.0)


def _fitted(name: str, rows: Sequence[Row], peaks: Peaks, cut: Roof, power: float) -> tuple[float, Roof]:
    flops, nbytes, turns, depth = np.array([work(row, cut, peaks.processors) for row in rows], dtype=float).T
    merge = np.array([merged(row, cut, peaks.processors) for row in rows], dtype=float)
    count = np.array([row["experts"] if name.startswith("experts") else 0.0 for row in rows])
    if len(set(count)) == 1:  # of one number of experts nothing can be told
        count = 0 * count
    seconds = np.array([row["seconds"] for row in rows])
    least, has = float(seconds.min()), OPERATORS[name]
    half = SHARE.outward(0.5)
    walk = 0.3 * float(np.median(seconds[depth > 0] / depth[depth > 0])) if depth.any() else 0.0
    asked: tuple[tuple[str, float, Any], ...] = (  # parameters, where to begin, and whether these rows tell them
        ("launch", 0.7 * least, True),
        ("flops_share", half, "f" in has and flops.any()),
        ("memory_share", half, "m" in has and nbytes.any()),
        ("block", 0.1 * least, "b" in has and turns.any()),
        ("walk", walk, "w" in has and depth.any()),
        ("merge", 0.5 * least, "a" in has and merge.any() and not merge.all()),
        ("part", 1e-8, count.any()),
    )
    start = {key: value for key, value, some in asked if some}
    peak = peaks.narrow if name.endswith("_fp8") else peaks.flops
    if not power and sum(key in start for key in ("flops_share", "memory_share", "walk")) > 1:
        start["blend"] = 2.0

    def predicted(one: Mapping[str, float]) -> Any:
        compute = flops / (peak * one["flops_share"]) if "flops_share" in one else 0.0 * flops
        memory = nbytes / (peaks.memory * one["memory_share"]) if "memory_share" in one else 0.0 * flops
        tiles = turns * one.get("block", 0.0) + depth * one.get("walk", 0.0)
        longest = np.maximum(np.maximum(compute, memory), np.maximum(tiles, 1e-15))
        blend = one.get("blend", power or 1.0)
        norm = sum((part / longest) ** blend for part in (compute, memory, tiles))
        constant = one["launch"] + merge * one.get("merge", 0.0) + count * one.get("part", 0.0)
        return constant + longest * norm ** (1.0 / blend)

    spaces = {"flops_share": SHARE, "memory_share": SHARE, "blend": _BLEND}
    best = robust_fit(predicted, seconds, start, scale=SCALE, spaces=spaces)
    chosen: dict[str, Any] = {"blend": power or 1.0} | best.values
    chosen = {key: float(f"{value:.4g}") for key, value in chosen.items() if value > _NOTHING}
    return best.cost, replace(cut, **chosen)


def _of_operators(kernels: Kernels, fitted: Sequence[Row], held: Sequence[Row], peaks: Peaks) -> Iterator[Errors]:
    for name in [*OPERATORS, "allreduce"]:
        for rows, where in ((fitted, "fitted to"), (held, "held out")):
            ratios = [_seconds(kernels, row, peaks) / row["seconds"] for row in rows if operator_of(row) == name]
            if ratios:
                yield _errors(f"{name}, {where}", ratios)


def _seconds(kernels: Kernels, row: Row, peaks: Peaks) -> float:
    name = operator_of(row)
    if name == "allreduce":
        ring = kernels.allreduce[str(row["gpus"])]
        return float(ring.latency + 2.0 * row["tokens"] * row["n"] / ring.rate)
    roof: Roof | None = getattr(kernels, name)
    if roof is None:
        return float("nan")
    narrow = name.endswith("_fp8")
    seconds = row_seconds(roof, row, peaks)
    return seconds * (kernels.correction(row["n"], row["k"], narrow, row["tokens"]) if "gemm" in name else 1.0)


def _of_forwards(kernels: Kernels, rows: Sequence[Row], peaks: Peaks) -> Iterator[Errors]:
    keys = dict.fromkeys((str(row["model"]), row["tp"], str(row["operator"]), str(row["mode"])) for row in rows)
    launched = dict.fromkeys([key[3] for key in keys], replace(kernels, layer_launch=0.0, mixed_launch=0.0))
    launched["eager"] = kernels
    for model, tp, operator, mode in keys:
        if operator == "step" and mode == "eager":
            continue  # no engine decodes so
        ratios = []
        for row in rows:
            if (row["model"], row["tp"], row["operator"], row["mode"]) == (model, tp, operator, mode):
                time, batch, context = forward_of(launched[mode], row, peaks), row["batch"], row["context"]
                if operator == "step":
                    reading = max(time.context_of(batch) * batch * context, time.sequence * context)
                    modelled = time.step(batch) + reading
                else:
                    modelled = time.prefill([(context, row["tokens"])])
                ratios.append(modelled / row["seconds"])
        yield _errors(f"{operator} of {model} tp{tp}, {mode}", ratios)


def forward_of(kernels: Kernels, row: Row, peaks: Peaks) -> OperatorForward:
    """Return the forward of the decoder in *row*: a shard, as if it were the whole of a model.

    ``hit`` stands for the size of the vocabulary in such rows.
    """
    widths = {"intermediate_size": row["n"], "vocab_size": row["hit"], "moe_intermediate_size": row["width"]}
    model = Llm(
        name=str(row["model"]), parameters=1, active=1, layers=row["layers"], hidden=row["k"], heads=row["heads"],
        kv_heads=row["kv_heads"], head_dim=row["head_dim"], experts=row["experts"],
        experts_per_token=row["per_token"], hf_config=widths,
    )  # fmt: skip
    kv_bytes = 4.0 * row["kv_heads"] * row["head_dim"] * row["layers"]
    return OperatorForward(model=model, kernels=kernels, peaks=peaks, kv_bytes=kv_bytes)


def layer_launch(rows: Sequence[Row], mixed: bool = False) -> float:
    """Return the least seconds a layer of prefill launched kernel by kernel, with experts if *mixed*; 0 of none."""
    eager = [row for row in rows if (row["operator"], row["mode"]) == ("forward", "eager")]
    launches = [row["seconds"] / row["layers"] for row in eager if bool(row["experts"]) == mixed]
    return float(f"{min(launches, default=0.0):.4g}")


def _errors(what: str, ratios: Sequence[float]) -> Errors:
    apart = np.array(ratios) - 1.0
    figures = (np.median(np.abs(apart)), np.percentile(np.abs(apart), 95), np.median(apart))
    return Errors(what, len(ratios), *(float(value) for value in figures))
