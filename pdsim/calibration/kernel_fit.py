# SPDX-License-Identifier: Apache-2.0
"""Fit `Kernels` to what was measured, and say how far off they are where they were not fitted.

Every second size of an operator is held out, and all whole forwards; `pdsim.calibration.roof_fit` fits one
operator (`pdsim profile` asks for SciPy first).

A row is one measured point, as `pdsim profile` writes them and `pdsim.calibration.published` makes them of
the tables of others: the operator, its sizes as integers (0 where one has no meaning), and seconds (median, least
and most).  ``round`` is 0 but for repetitions, which only tell how stable the GPU was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pdsim.calibration.roof_fit import OPERATORS, fit_roof, row_seconds
from pdsim.compute.forward import OperatorForward
from pdsim.compute.kernels import AllReduce, Correction, Kernels, Peaks, Roof, shape_key
from pdsim.compute.row_work import Row, operator_of
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Llm

__all__ = ["Errors", "KernelFit", "Row", "fit", "forward_of", "layer_launch", "rows_of", "split"]

_NUMBERS = (
    *(
        "tp",
        "layers",
        "tokens",
        "n",
        "k",
        "batch",
        "context",
        "heads",
        "kv_heads",
        "head_dim",
        "value_dim",
        "experts",
    ),
    *("hit", "per_token", "width", "gpus", "round", "repeats"),
)
_SIZES = {"decode": ("batch", "context"), "mla_decode": ("batch", "context"), "mla_absorb": ("batch",)}
"""Columns whose values are sizes, every second of which is held out; of other operators ``tokens``."""
_FULL = ("cudnn", "flash", "reference")
_BEST = {"prefill": (*_FULL, ""), "mla_prefill": (*_FULL, "absorbed"), "decode": (*_FULL[1:], "")}
"""Kernels of an operator; the first that there is, is fitted."""


@dataclass(frozen=True)
class Errors:
    """How far off *what* is: medians and 95th percentiles of the absolute relative error, of *count* rows.

    All are of the model's seconds over the measured ones, less 1: 0.05 is five per cent too slow.
    """

    what: str
    count: int
    median: float
    p95: float
    bias: float  # the median of the signed error


@dataclass(frozen=True)
class KernelFit:
    """*kernels*, and their *errors*: of rows fitted to, held out, of whole forwards, and of a model left out.

    Only the last three are predictions.  The errors of a model left out are those of its forwards by kernels
    fitted to the rows of all other models.
    """

    kernels: Kernels
    errors: Sequence[Errors]


def rows_of(texts: Iterable[Mapping[str, str]]) -> list[Row]:
    """Return rows of text, as a CSV file has them, with numbers as numbers; empty columns are 0.

    Raise a `ConfigError` for a row whose times are not positive, or without an operator.
    """
    found: list[Row] = []
    for number, text in enumerate(texts, 1):
        try:
            row: dict[str, Any] = dict(text)
            row |= {name: int(text.get(name) or 0) for name in _NUMBERS}
            row |= {name: float(text[name]) for name in ("seconds", "low", "high")}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"row {number} of the profile: {error}; name a file that pdsim profile wrote"
            ) from error
        if not row.get("operator") or not row["seconds"] > 0:
            raise ConfigError(f"row {number} of the profile has no operator or no time; correct or delete the row")
        found.append(row)
    return found


def fit(rows: Sequence[Row], peaks: Peaks, gpu: str = "") -> KernelFit:
    """Return what fits *rows* of a GPU with these *peaks*, and its errors.

    Operators are fitted one by one, so a whole forward, which is never fitted to, tests that their sum is right.
    Its two parameters of its own, the launch of a layer kernel by kernel without and with experts, are the least
    that was measured (`layer_launch`).  Errors of a model left out are given where the others have products and
    attention to fit to.

    Raises:
        ConfigError: there are no matrix products or no attention to fit to.
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
        left = replace(_filled(_kernels(others, peaks, gpu), kernels), layer_launch=kernels.layer_launch)
        left = replace(left, mixed_launch=kernels.mixed_launch)
        mine = _of_forwards(left, [row for row in whole if row["model"] == name], peaks)
        errors += [replace(one, what=f"{one.what}, fitted without it") for one in mine]
    return KernelFit(kernels, errors)


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of operators to fit to, and those held out.

    Sizes of equal operators are sorted, and every second one is held out; of two sizes, every second place of
    their checkerboard.  Rows of kernels that an engine would not choose are in neither: of attention the first of
    `_BEST` that there is counts, of an all-reduce the fastest.
    """
    parts: tuple[list[Row], list[Row]] = ([], [])
    for operator in dict.fromkeys(str(row["operator"]) for row in rows):
        if operator in ("step", "forward", "launch"):
            continue
        mine = [row for row in rows if row["operator"] == operator and not row["round"]]
        if operator == "allreduce":
            mine = _fastest(mine)
        elif operator in _BEST:
            there = {row["kernel"] for row in mine}
            kernel = next((name for name in _BEST[operator] if name in there), "")
            mine = [row for row in mine if row["kernel"] == kernel]
        sizes = _SIZES.get(operator, ("tokens",))
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in mine:
            alike = (
                "dtype",
                "n",
                "k",
                "heads",
                "kv_heads",
                "head_dim",
                "width",
                "hit" if operator == "routing" else "n",
            )
            key = tuple(row[name] for name in alike)
            groups.setdefault((*key, 0 if "context" in sizes else row["context"]), []).append(row)
        for group in groups.values():
            places = [sorted({row[name] for row in group}) for name in sizes]
            for row in group:
                place = sum(values.index(row[name]) for name, values in zip(sizes, places, strict=True))
                parts[place % 2].append(row)
    return parts


def _fastest(rows: Sequence[Row]) -> list[Row]:
    found: dict[tuple[int, int], Row] = {}
    for row in rows:
        key = row["gpus"], row["tokens"] * row["n"]
        if key not in found or row["seconds"] < found[key]["seconds"]:
            found[key] = row
    return list(found.values())


def _filled(kernels: Kernels, other: Kernels) -> Kernels:
    lacking = {name: value for name, value in vars(other).items() if getattr(kernels, name) is None}
    return replace(kernels, **lacking)


# --- fitting -------------------------------------------------------------------------------------------------------


def _kernels(rows: Sequence[Row], peaks: Peaks, gpu: str) -> Kernels:
    found: dict[str, Any] = {}
    for name in OPERATORS:
        mine = [row for row in rows if operator_of(row) == name]
        if len(mine) >= 3:
            blend = found["prefill"].blend if name == "mla_prefill" and "prefill" in found else 0.0
            found[name] = fit_roof(name, mine, peaks, blend)
    if "gemm" not in found or not {"decode", "mla_decode"} & found.keys():
        raise ConfigError("the profile has too few rows of matrix products or attention; measure longer (--limit)")
    absorbed = any(row["kernel"] == "absorbed" for row in rows if row["operator"] == "mla_prefill")
    rings = {str(row["gpus"]) for row in rows if row["operator"] == "allreduce"}
    shared = {number: _ring(rows, int(number)) for number in sorted(rings)}
    if any(row["kernel"] == "tuned" for row in rows):
        found["tuned"] = tuple(
            dict.fromkeys(f"{row['experts']}x{row['width']}" for row in rows if row["kernel"] == "tuned")
        )
    kernels = Kernels(gpu=gpu, allreduce=shared, absorbed_prefill=absorbed, **found)
    return replace(kernels, shapes=_corrections(kernels, rows, peaks))


_SHAPES = 200
"""Most shapes of matrices that have a correction of their own; of more, as in published tables, none has."""


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
    found = {}
    for key, factors in sorted(shapes.items()):
        tokens = tuple(sorted(factors))
        found[key] = Correction(tokens=tokens, factor=tuple(float(f"{factors[each]:.3g}") for each in tokens))
    return found


def _ring(rows: Sequence[Row], gpus: int) -> AllReduce:
    from scipy.optimize import least_squares

    mine = [row for row in rows if row["operator"] == "allreduce" and row["gpus"] == gpus]
    nbytes = np.array([2.0 * row["tokens"] * row["n"] for row in mine])
    seconds = np.array([row["seconds"] for row in mine])

    def residuals(values: Any) -> Any:
        return np.log((np.exp(values[0]) + nbytes / np.exp(values[1])) / seconds)

    start = [np.log(seconds.min()), np.log(nbytes.max() / seconds.max())]
    latency, rate = np.exp(least_squares(residuals, start, loss="soft_l1", f_scale=0.05).x)
    return AllReduce(latency=float(f"{latency:.4g}"), rate=float(f"{rate:.4g}"))


# --- errors --------------------------------------------------------------------------------------------------------


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
    for model, tp, operator, mode in keys:
        if operator == "step" and mode == "eager":
            continue  # no engine decodes so
        ratios = []
        for row in rows:
            if (row["model"], row["tp"], row["operator"], row["mode"]) == (model, tp, operator, mode):
                time = forward_of(
                    kernels if mode == "eager" else replace(kernels, layer_launch=0.0, mixed_launch=0.0), row, peaks
                )
                step = operator == "step"
                found = (
                    time.step(row["batch"]) + _reading(time, row["batch"], row["context"])
                    if step
                    else time.prefill([(row["context"], row["tokens"])])
                )
                ratios.append(found / row["seconds"])
        yield _errors(f"{operator} of {model} tp{tp}, {mode}", ratios)


def _reading(time: OperatorForward, batch: int, context: int) -> float:
    return max(time.context_of(batch) * batch * context, time.sequence * context)


def forward_of(kernels: Kernels, row: Row, peaks: Peaks) -> OperatorForward:
    """Return the forward of the decoder in *row*: a shard, as if it were the whole of a model.

    With tensor parallelism a rank has fewer heads and narrower matrices, and that is what was measured: the row's
    own sizes are the model's.  ``hit`` stands for the size of the vocabulary in such rows.
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
    found = [
        row["seconds"] / row["layers"]
        for row in rows
        if row["operator"] == "forward" and row["mode"] == "eager" and bool(row["experts"]) == mixed
    ]
    return float(f"{min(found, default=0.0):.4g}")


def _errors(what: str, ratios: Sequence[float]) -> Errors:
    apart = np.array(ratios) - 1.0
    found = (np.median(np.abs(apart)), np.percentile(np.abs(apart), 95), np.median(apart))
    return Errors(what, len(ratios), *(float(value) for value in found))
