# SPDX-License-Identifier: Apache-2.0
"""Compact tables of operators made of aiconfigurator's, how far off these are, and rows to fit to.

Of the sizes of an axis of `pdsim.compute.published.Kind` as many are kept as it takes until rows of the sizes that
were removed are within a bound.  Half of those rows choose what is kept; errors in a table are of the other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.calibration.kernels import NUMBERS
from pdsim.compute.published import DISTURBED, KINDS, Columns, Floats, Kind, around, columns_in, dense, grid, rising
from pdsim.compute.row_work import Row
from pdsim.compute.tables import Grid
from pdsim.core.errors import ConfigError


@dataclass(frozen=True)
class Summary:
    """The result for one kind: rows read, sizes kept, and absolute relative errors of the rows held out."""

    kind: str
    version: str
    rows: int
    kept: int  # values in the table
    held: int  # rows that neither are kept nor chose what is
    median: float
    p95: float
    disturbed: float  # share of the rows held out that are far off from all their neighbours: `DISTURBED`
    quiet: float  # the 95th percentile of the others


def compact(kind: Kind, columns: Columns, version: str = "") -> tuple[Grid, Summary]:
    """Return the grid of *kind* for the rows of *columns*, with as few sizes as its bound allows, and its errors."""
    keys, axes, values = dense(kind, columns)
    known = ~np.isnan(values)
    disturbed = known & (np.abs(values - around(axes, values)) > DISTURBED) & kind.noisy
    whole = rising(kind, axes, values)
    chooses = np.random.default_rng(0).random(values.shape) < 0.5
    kept = _chosen(kind, axes, values, whole, known & chooses & ~disturbed)
    cells = np.ix_(range(len(keys)), *kept)
    thin = whole[cells]
    errors = _errors(axes, kept, thin, values)
    rest = np.ones(values.shape, bool)
    rest[cells] = False
    out = known & ~chooses & rest
    out = out if out.any() else known  # nothing was removed
    held, quiet = np.abs(errors[out]), np.abs(errors[out & ~disturbed])
    made = grid(kind, keys, [sizes[some] for sizes, some in zip(axes, kept, strict=True)], thin, known[cells])
    summary = Summary(
        kind.name, version, len(columns["seconds"]), thin.size, int(held.size), float(np.median(held)),
        float(np.quantile(held, 0.95)), float(np.mean(disturbed[out])),
        float(np.quantile(quiet, 0.95)) if quiet.size else 0.0,
    )  # fmt: skip
    return made, summary


def _chosen(
    kind: Kind, axes: Sequence[Floats], values: Floats, whole: Floats, chooses: npt.NDArray[np.bool_]
) -> list[list[int]]:
    # Rows of all sizes are off from *whole* already where they are noisy or fall; no choice is better than that.
    kept = [sorted({0, len(sizes) - 1}) for sizes in axes]
    noise = np.abs(np.expm1(whole - values))
    while True:
        cells = np.ix_(range(len(values)), *kept)
        errors = np.abs(_errors(axes, kept, whole[cells], values))
        errors[~chooses] = errors[cells] = np.nan
        removed = np.isfinite(errors)
        if not removed.any():
            return kept
        if np.quantile(errors[removed], 0.95) <= max(kind.bound, 1.1 * float(np.quantile(noise[removed], 0.95))):
            return kept
        best = 0.0, 0, 0
        for axis, sizes in enumerate(axes):
            places = np.setdiff1d(np.arange(len(sizes)), kept[axis])
            if not len(places):
                continue
            others = tuple(each for each in range(errors.ndim) if each != axis + 1)
            excess = np.nansum(np.maximum(errors - kind.bound / 2, 0.0), axis=others)
            # an axis is worth what it saves for the values that one more size of it costs
            costs = np.prod([len(some) for other, some in enumerate(kept) if other != axis])
            spread = np.array([np.sum(excess[_gap(kept[axis], place)]) for place in places])
            worth = (excess[places] + 0.5 * spread) / costs
            at = int(np.argmax(worth))
            if worth[at] > best[0]:
                best = float(worth[at]), axis, int(places[at])
        if best[0] <= 0.0:
            return kept
        kept[best[1]] = sorted({*kept[best[1]], best[2]})


def _gap(kept: Sequence[int], place: int) -> slice:
    after = next(index for index, each in enumerate(kept) if each > place)
    return slice(kept[after - 1] + 1, kept[after])


def _errors(axes: Sequence[Floats], kept: Sequence[Sequence[int]], thin: Floats, values: Floats) -> Floats:
    dense = thin
    for axis, (sizes, some) in enumerate(zip(axes, kept, strict=True)):
        logs = np.log(sizes)
        weights = np.array([np.interp(logs, logs[list(some)], unit) for unit in np.eye(len(some))]).T
        dense = np.moveaxis(np.tensordot(dense, weights, (axis + 1, 1)), -1, axis + 1)
    errors: Floats = np.expm1(dense - values)
    return errors


def about(source: Mapping[str, Any], summaries: Sequence[Summary]) -> dict[str, Any]:
    """Return a table's description of itself: its source, and rows, values and errors of each kind."""
    kinds = {
        one.kind: {
            "version": one.version, "rows": one.rows, "values": one.kept, "held_out": one.held,
            "median": round(one.median, 4), "p95": round(one.p95, 4), "disturbed": round(one.disturbed, 4),
            "p95_of_the_others": round(one.quiet, 4),
        }
        for one in summaries
    }  # fmt: skip
    return {**source, "kinds": kinds}


# --- rows to fit to ------------------------------------------------------------------------------------------------

_NARROWEST, _WIDEST = 512, 30_000  # of matrices
_LATENT, _RANK = 576, 512  # elements of a latent row, and of its value: the tables are of DeepSeek-V3's


def published(folder: Path, engine: str, version: str) -> Iterator[Row]:
    """Yield the rows of the tables of *folder*, of a GPU, for `kernels.fit`: *engine* and *version* as measured.

    They are in bf16, products and experts also in FP8 with scales of blocks; a row's least and most are its median.
    Raise a `ConfigError` if there is no table of GEMMs.
    """
    paths = {kind.name: folder / kind.files[0].format(engine=engine, version=version) for kind in KINDS}
    if not paths["gemm"].is_file():
        raise ConfigError(f"{paths['gemm']} is not a file; name a folder of systems/data of aiconfigurator-core")
    for name, make in (
        ("gemm", _gemm_row), ("prefill", _prefill_row), ("decode", _decode_row),
        ("mla_prefill", partial(_prefill_row, latent=True)), ("mla_decode", partial(_decode_row, latent=True)),
        ("moe", _experts_row), ("allreduce", _allreduce_row),
    ):  # fmt: skip
        table = columns_in(paths[name]) if paths[name].is_file() else {}
        for values in zip(*table.values(), strict=True):
            given = dict(zip(table, values, strict=True))
            if (sizes := make(given)) is not None:
                seconds = float(given["latency"]) * 1e-3
                yield {**_EMPTY, **sizes, "seconds": seconds, "low": seconds, "high": seconds}


_EMPTY: dict[str, Any] = {
    **dict.fromkeys(NUMBERS, 0), "kernel": "", "mode": "graph", "dtype": "bf16", "model": ""
}  # fmt: skip
TUNED = ("128x192", "128x384", "128x768", "512x128", "512x256")
"""Experts, and their width, for which SGLang has tiles found on an H200 in bf16: others take its default.

Its folder fused_moe_triton/configs has a file for each, such as E=128,N=192,device_name=NVIDIA_H200.json.
"""
_DTYPES = {"bfloat16": "bf16", "fp8_block": "fp8"}


def _gemm_row(row: dict[str, Any]) -> dict[str, Any] | None:
    m, n, k = (int(row[name]) for name in ("m", "n", "k"))
    usual = min(n, k) >= _NARROWEST and max(n, k) <= _WIDEST and (m < 16 or m % 16 == 0)
    if row["gemm_dtype"] not in _DTYPES or not usual:
        return None
    return {"operator": "gemm", "dtype": _DTYPES[row["gemm_dtype"]], "tokens": m, "n": n, "k": k}


def _in_bf16(row: dict[str, Any]) -> bool:
    types = [row[name] for name in ("attn_dtype", "mla_dtype", "kv_cache_dtype") if name in row]
    return all(each == "bfloat16" for each in types)


def _heads(row: dict[str, Any], latent: bool) -> dict[str, Any]:
    if latent:
        return {"heads": int(row["num_heads"]), "kv_heads": 1, "k": _LATENT, "value_dim": _RANK}
    heads = {"heads": int(row["num_heads"]), "kv_heads": int(row["num_key_value_heads"])}
    return heads | dict.fromkeys(("head_dim", "value_dim"), int(row["head_dim"]))


def _prefill_row(row: dict[str, Any], latent: bool = False) -> dict[str, Any] | None:
    if not _in_bf16(row) or row["batch_size"] != 1 or row["isl"] < 128 or (not latent and row["step"]):
        return None
    # The tables do not say which kernel of latent attention they have, but counted as expanded they reach 185 TFLOPS
    # and as absorbed 620, as other attention does.
    kernel = {"operator": "mla_prefill", "kernel": "absorbed"} if latent else {"operator": "prefill"}
    return {**_heads(row, latent), **kernel, "tokens": int(row["isl"])}


def _decode_row(row: dict[str, Any], latent: bool = False) -> dict[str, Any] | None:
    if not _in_bf16(row) or not 127 <= row["step"] <= 32767 or row["batch_size"] > 512:
        return None
    sizes = {"batch": int(row["batch_size"]), "context": int(row["step"]) + 1}
    return {**_heads(row, latent), "operator": "mla_decode" if latent else "decode", **sizes}


def _experts_row(row: dict[str, Any]) -> dict[str, Any] | None:
    if row["moe_dtype"] not in _DTYPES or row["distribution"] != "balanced" or row["moe_ep_size"] != 1:
        return None
    tokens, per, count = (int(row[name]) for name in ("num_tokens", "topk", "num_experts"))
    width = int(row["inter_size"]) // int(row["moe_tp_size"])
    if width < 64 or count < 64:
        return None
    sizes = {"tokens": tokens, "per_token": per, "experts": count, "hit": min(count, tokens * per), "width": width}
    kernel = "tuned" if row["moe_dtype"] == "bfloat16" and f"{count}x{width}" in TUNED else ""
    sizes |= {"n": int(row["hidden_size"])}
    return {**sizes, "operator": "experts", "kernel": kernel, "dtype": _DTYPES[row["moe_dtype"]]}


def _allreduce_row(row: dict[str, Any]) -> dict[str, Any] | None:
    if not str(row["backend"]).endswith("graph") or row["message_size"] < 1024:
        return None
    size = {"tokens": int(row["message_size"]) // 1024, "n": 1024}
    return {**size, "operator": "allreduce", "gpus": int(row["num_gpus"])}
