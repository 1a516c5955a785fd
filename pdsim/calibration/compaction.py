# SPDX-License-Identifier: Apache-2.0
"""aiconfigurator's tables of operators: compact ones made of them, how far off these are, and rows to fit to.

A kind of operator is a grid: rows that differ in what `Kind.columns` names are curves of their own, the sizes of
`Kind.axes` are interpolated.  Of the sizes of an axis as many are kept as it takes until rows of the sizes that were
removed are within a bound.  Half of those rows choose what is kept; the errors in a table are of the other half.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.calibration.kernels import NUMBERS
from pdsim.compute.row_work import Row
from pdsim.compute.tables import Grid, Key
from pdsim.core.errors import ConfigError

Columns = dict[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float64]
BOUND = 0.13  # of the 95th percentile of the relative error, of the rows that choose what is kept
SPIKE = 0.10  # logarithm of times: a point so much longer than both neighbours was disturbed while it was measured
DISTURBED = 0.2  # the same of a row and the median of what its neighbours along each axis say
SHORTEST = 1e-6  # seconds; the tables have differences of two measurements, and a shorter one counts as so much


@dataclass(frozen=True)
class Kind:
    """How one kind of operator stands in aiconfigurator's tables.

    *files* are patterns below a GPU's folder; *read* makes columns of a file's, which have ``seconds``.
    """

    name: str
    files: tuple[str, ...]  # with {engine} and {version}; an older version stands in for one that is missing
    columns: tuple[str, ...]
    axes: tuple[str, ...]  # the last one or two are tokens, batch or context: times never fall along them
    read: Callable[[Columns], Columns]
    monotone: tuple[str, ...] = ()
    bound: float = BOUND
    noisy: bool = False  # rows that are far off from all their neighbours are not fitted to
    apart: bool = False  # a grid for each of the first column, each of sizes of its own: "gemm.bfloat16"

    def axis(self, name: str) -> int:
        """Return which axis of an array of values has the sizes called *name*; the first has the keys."""
        return 1 + self.axes.index(name)


@dataclass(frozen=True)
class Summary:
    """What became of a kind: rows read, sizes kept, and the errors of the rows held out (absolute, relative)."""

    kind: str
    version: str
    rows: int
    kept: int  # values in the table
    held: int  # rows that neither are kept nor chose what is
    median: float
    p95: float
    disturbed: float  # share of the rows held out that are far off from all their neighbours: `DISTURBED`
    quiet: float  # the 95th percentile of the others


# --- what the files say --------------------------------------------------------------------------------------------


def _absorb(table: Columns) -> Columns:
    return {
        "op": table["op_name"], "dtype": table["bmm_dtype"], "heads": table["num_heads"],
        "tokens": table["num_tokens"], "seconds": table["latency"] * 1e-3,
    }  # fmt: skip


def _gemm(table: Columns) -> Columns:
    m = table["m"].astype(int)
    keep = (m % 16 == 0) | np.isin(m, (1, 2, 4, 8))
    return {
        "dtype": table["gemm_dtype"][keep], "n": table["n"][keep], "k": table["k"][keep], "tokens": m[keep],
        "seconds": table["latency"][keep] * 1e-3,
    }  # fmt: skip


def _attention(table: Columns) -> Columns:
    heads, kv = table["num_heads"].astype(int), table["num_key_value_heads"].astype(int)
    window = table.get("window_size", np.zeros(len(heads), int))
    return {
        "dtype": table["attn_dtype"], "kv_dtype": table["kv_cache_dtype"], "head_dim": table["head_dim"],
        "window": window, "kv_heads": np.where(heads == kv, 0, kv), "heads": heads, "batch": table["batch_size"],
        "tokens": table["isl"], "context": table["step"] + 1, "seconds": table["latency"] * 1e-3,
    }  # fmt: skip


def _mla(table: Columns) -> Columns:
    heads = table["num_heads"].astype(int)
    return {
        "dtype": table.get("gemm_type", table["mla_dtype"]), "kv_dtype": table["kv_cache_dtype"], "heads": heads,
        "batch": table["batch_size"], "tokens": table["isl"], "context": table["step"] + 1,
        "seconds": table["latency"] * 1e-3,
    }  # fmt: skip


def _moe(table: Columns) -> Columns:
    tp, ep = table["moe_tp_size"].astype(int), table["moe_ep_size"].astype(int)
    return {
        "dtype": table["moe_dtype"], "distribution": table["distribution"], "hidden": table["hidden_size"],
        "width": table["inter_size"].astype(int) // tp, "top_k": table["topk"],
        "experts": table["num_experts"], "ep": ep, "tokens": table["num_tokens"],
        "seconds": table["latency"] * 1e-3,
    }  # fmt: skip


def _allreduce(table: Columns) -> Columns:
    kind = table.get("backend", table["kernel_source"]).astype(str)
    graph = np.char.find(kind, "graph") >= 0
    keep = graph if graph.any() else np.ones(len(kind), bool)
    return {
        "gpus": table["num_gpus"][keep], "elements": table["message_size"][keep],
        "seconds": table["latency"][keep] * 1e-3,
    }  # fmt: skip


def _deepep(table: Columns) -> Columns:
    name = "num_token" if "num_token" in table else "num_tokens"
    both: list[Columns] = []
    for half in ("dispatch", "combine"):
        if "dispatch_transmit_us" in table:
            seconds = (table[f"{half}_transmit_us"] + table[f"{half}_notify_us"]) * 1e-6
        else:
            seconds = table[f"{half}_avg_t_us"] * 1e-6
        count = len(seconds)
        mode = "normal" if "dispatch_sms" in table else "low_latency"
        both.append({
            "mode": np.full(count, mode), "half": np.full(count, half),
            "dtype": np.full(count, "default"), "nodes": table["node_num"],
            "hidden": table["hidden_size"], "top_k": table["num_topk"], "experts": table["num_experts"],
            "ranks": 8 * table["node_num"], "tokens": table[name], "seconds": seconds,
        })  # fmt: skip
    return {name: np.concatenate([one[name] for one in both]) for name in both[0]}


def _alltoall(table: Columns) -> Columns:
    return {
        "mode": table.get("comm_backend", table["kernel_source"]).astype(str), "half": table["phase"].astype(str),
        "dtype": table.get("comm_dtype", np.full(len(table["latency"]), "default")),
        "nodes": table.get("node_num", np.ones(len(table["latency"]), int)), "hidden": table["hidden_size"],
        "top_k": table["topk"], "experts": table["num_experts"],
        "ranks": table["ep_size"], "tokens": table["num_tokens"], "seconds": table["transmit_us"] * 1e-6,
    }  # fmt: skip


def _quantize(table: Columns) -> Columns:
    op = "static" if str(table["op_name"][0]) == "scale_matrix" else "scale"
    count = len(table["latency"])
    return {
        "op": np.full(count, op), "dtype": table["quant_dtype"], "width": table["k"], "tokens": table["m"],
        "seconds": table["latency"] * 1e-3,
    }  # fmt: skip


_ATTENTION = ("dtype", "kv_dtype", "head_dim", "window", "kv_heads")
_EXCHANGE = ("mode", "half", "dtype", "nodes", "ranks", "hidden", "top_k", "experts")
KINDS = (
    Kind("gemm", ("gemm/{engine}/{version}/gemm_perf.parquet",), ("dtype",), ("n", "k", "tokens"), _gemm,
         ("tokens",), 0.115, noisy=True, apart=True),
    Kind("prefill", ("attention/{engine}/{version}/context_attention_perf.parquet",), _ATTENTION,
         ("heads", "batch", "tokens"), _attention, ("batch", "tokens")),
    Kind("decode", ("attention/{engine}/{version}/generation_attention_perf.parquet",), _ATTENTION,
         ("heads", "batch", "context"), _attention, ("batch", "context")),
    Kind("mla_prefill", ("mla/{engine}/{version}/context_mla_perf.parquet",), ("dtype", "kv_dtype"),
         ("heads", "batch", "tokens"), _mla, ("batch", "tokens"), 0.09),
    Kind("mla_decode", ("mla/{engine}/{version}/generation_mla_perf.parquet",), ("dtype", "kv_dtype"),
         ("heads", "batch", "context"), _mla, ("batch", "context"), 0.09),
    Kind("mla_prefill_module", ("mla/{engine}/{version}/mla_context_module_perf.parquet",), ("dtype", "kv_dtype"),
         ("heads", "batch", "tokens"), _mla, ("batch", "tokens"), 0.09),
    Kind("mla_decode_module", ("mla/{engine}/{version}/mla_generation_module_perf.parquet",), ("dtype", "kv_dtype"),
         ("heads", "batch", "context"), _mla, ("batch", "context"), 0.09),
    Kind("mla_absorb", ("mla_bmm/{engine}/{version}/mla_bmm_perf.parquet",), ("op", "dtype"), ("heads", "tokens"),
         _absorb, ("tokens",), 0.05),
    Kind("moe", ("moe/{engine}/{version}/moe_perf.parquet",),
         ("dtype", "distribution", "hidden", "width", "top_k", "experts", "ep"), ("tokens",), _moe, ("tokens",),
         0.11),
    Kind("allreduce", ("comm/{engine}/{version}/custom_allreduce_perf.parquet",), ("gpus",), ("elements",),
         _allreduce, ("elements",), 0.06),
    Kind("alltoall", ("comm/{engine}/{version}/moe_a2a_perf.parquet",), _EXCHANGE, ("tokens",), _alltoall,
         ("tokens",), noisy=True),
    Kind("deepep", ("comm/{engine}/{version}/wideep_deepep_normal_perf.parquet",
                    "comm/{engine}/{version}/wideep_deepep_ll_perf.parquet"), _EXCHANGE, ("tokens",), _deepep,
         ("tokens",)),
    Kind("quantize", ("quantize/{engine}/{version}/scale_matrix_perf.parquet",
                      "quantize/{engine}/{version}/computescale_perf.parquet"), ("op", "dtype"), ("width", "tokens"),
         _quantize, ("tokens",), 0.09),
)  # fmt: skip
"""Kinds of operators that tables are made of."""


def tables_of(folder: Path, engine: str, version: str) -> Iterator[tuple[Kind, str, Columns]]:
    """Yield each kind that *folder*, of a GPU, has of *engine*, the version that it is of, and its columns.

    A file that *version* lacks is taken from the newest version before it.  Raise a `ConfigError` if there is no
    table of GEMMs, without which no forward has a time.
    """
    for kind in KINDS:
        parts = []
        used = ""
        for pattern in kind.files:
            path, newest = _newest(folder, pattern, engine, version)
            if path is not None:
                parts.append(kind.read(_columns(path)))
                used = newest if not used or newest == used else f"{used}, {newest}"
        if not parts and kind.name == "gemm":
            path = folder / kind.files[0].format(engine=engine, version=version)
            raise ConfigError(f"{path} is not a file; name a folder of systems/data of aiconfigurator-core")
        if not parts:
            continue
        columns = {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}
        if not kind.apart:
            yield kind, used, columns
            continue
        first = kind.columns[0]
        for value in sorted(set(columns[first].tolist())):
            mine = columns[first] == value
            one = replace(kind, name=f"{kind.name}.{value}")
            yield one, used, {name: values[mine] for name, values in columns.items()}


def _newest(folder: Path, pattern: str, engine: str, version: str) -> tuple[Path | None, str]:
    every = [(_order(path.parent.name), path) for path in folder.glob(pattern.format(engine=engine, version="*"))]
    known = [each for each in every if each[0] <= _order(version)]
    if not known:
        return None, ""
    path = max(known)[1]
    return path, path.parent.name


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _columns(path: Path) -> Columns:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    arrays = {name: table.column(name).to_numpy() for name in table.column_names}
    return {name: values.astype(str) if values.dtype.kind == "O" else values for name, values in arrays.items()}


# --- grids ---------------------------------------------------------------------------------------------------------


def compact(kind: Kind, columns: Columns, version: str = "") -> tuple[Grid, Summary]:
    """Return the grid of *kind* for the rows of *columns*, with as few sizes as its bound allows, and its errors."""
    keys, axes, values = _dense(kind, columns)
    known = ~np.isnan(values)
    disturbed = known & (np.abs(values - _around(axes, values)) > DISTURBED) & kind.noisy
    whole = _rising(kind, _smooth(kind, axes, _filled(values)))
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
    grid = Grid(
        kind=kind.name,
        columns=kind.columns,
        keys={key: place for place, key in enumerate(keys)},
        axes={name: sizes[some] for name, sizes, some in zip(kind.axes, axes, kept, strict=True)},
        values=thin.astype(np.float32),
        measured=known[cells],
    )
    summary = Summary(
        kind.name, version, len(columns["seconds"]), thin.size, int(held.size), float(np.median(held)),
        float(np.quantile(held, 0.95)), float(np.mean(disturbed[out])),
        float(np.quantile(quiet, 0.95)) if quiet.size else 0.0,
    )  # fmt: skip
    return grid, summary


def _dense(kind: Kind, columns: Columns) -> tuple[list[Key], list[Floats], Floats]:
    # Of several kernels for the same sizes the fastest counts, as an engine that tunes itself takes it.
    uniques = [np.unique(columns[name], return_inverse=True) for name in kind.columns]
    joint = np.ravel_multi_index([place for _, place in uniques], [len(values) for values, _ in uniques])
    codes, place = np.unique(joint, return_inverse=True)
    parts = np.unravel_index(codes, [len(values) for values, _ in uniques])
    named = [values[part].tolist() for (values, _), part in zip(uniques, parts, strict=True)]
    keys: list[Key] = list(zip(*named, strict=True))
    at = [place]
    axes = []
    for name in kind.axes:
        sizes, inverse = np.unique(columns[name].astype(int), return_inverse=True)
        axes.append(sizes.astype(float))
        at.append(inverse)
    values = np.full((len(keys), *map(len, axes)), np.inf)
    np.minimum.at(values, tuple(at), np.log(np.maximum(columns["seconds"].astype(float), SHORTEST)))
    values[np.isinf(values)] = np.nan
    return keys, axes, values


def _filled(values: Floats) -> Floats:
    # What is filled counts as not measured; it only lets curves end where rows do.
    for axis in range(values.ndim - 1, -1, -1):
        values = np.apply_along_axis(_line, axis, values, axis > 0)
    return values


def _line(line: Floats, grows: bool) -> Floats:
    there, places = np.flatnonzero(~np.isnan(line)), np.arange(len(line))
    if len(there) in (0, len(line)):
        return line
    filled: Floats = np.interp(places, there, line[there])
    if grows and len(there) > 1:
        slope = max(0.0, line[there[-1]] - line[there[-2]]) / (there[-1] - there[-2])
        beyond = places > there[-1]
        filled[beyond] = line[there[-1]] + slope * (places[beyond] - there[-1])
    return filled


def _around(axes: Sequence[Floats], values: Floats) -> Floats:
    said = np.full((len(axes), *values.shape), np.nan)
    for axis, sizes in enumerate(axes):
        if len(sizes) < 3:
            continue
        logs = np.log(sizes)
        share = (logs[1:-1] - logs[:-2]) / (logs[2:] - logs[:-2])
        lines = np.moveaxis(values, axis + 1, -1)
        np.moveaxis(said[axis], axis + 1, -1)[..., 1:-1] = (1.0 - share) * lines[..., :-2] + share * lines[..., 2:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a value without neighbours
        middle = np.nanmedian(said, axis=0)
    return np.where(np.isnan(middle), values, middle)


def _smooth(kind: Kind, axes: Sequence[Floats], values: Floats) -> Floats:
    if kind.noisy:
        middle = _around(axes, values)
        values = np.where(np.abs(values - middle) > DISTURBED, middle, values)
    axis = kind.axis(kind.monotone[-1])
    lines = np.moveaxis(values, axis, -1).copy()
    if lines.shape[-1] > 2:
        middle, left, right = lines[..., 1:-1], lines[..., :-2], lines[..., 2:]
        lines[..., 1:-1] = np.where(middle > np.maximum(left, right) + SPIKE, 0.5 * (left + right), middle)
        first = lines[..., 0]
        lines[..., 0] = np.where(first > lines[..., 1] + SPIKE, lines[..., 1], first)
    return np.moveaxis(lines, -1, axis)


def _rising(kind: Kind, values: Floats) -> Floats:
    axes = [kind.axis(name) for name in kind.monotone]
    for axis in axes * len(axes):
        values = np.apply_along_axis(_isotonic, axis, values)
    for axis in axes:  # one axis may have undone a little of the other
        above = np.maximum.accumulate(values, axis)
        below = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
        values = 0.5 * (above + below)
    return values


def _isotonic(line: Floats) -> Floats:
    if not (np.diff(line) < 0.0).any():
        return line
    blocks: list[tuple[float, int]] = []
    for value in line.tolist():
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            last, some = blocks.pop()
            mean, count = (last * some + mean * count) / (some + count), some + count
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


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
        table = _columns(paths[name]) if paths[name].is_file() else {}
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
