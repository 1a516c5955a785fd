# SPDX-License-Identifier: Apache-2.0
"""Tables of operators as aiconfigurator's files have them: rows, and grids of all sizes that were measured.

A kind of operator is a grid: rows that differ in what `Kind.columns` names are curves of their own, the sizes of
`Kind.axes` are interpolated.  ``compute=operators`` looks up in these grids; `pdsim.calibration.compaction` makes
the compact tables that come with pdsim of them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.compute.tables import Grid, Key, Table
from pdsim.core.errors import ConfigError

Columns = dict[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float64]
BOUND = 0.13  # of the 95th percentile of the relative error, of the rows that choose what is kept
SPIKE = 0.10  # logarithm of times: a point so much longer than both neighbours was disturbed while it was measured
DISTURBED = 0.2  # the same of a row and the median of what its neighbours along each axis say
SHORTEST = 1e-6  # seconds; the tables have differences of two measurements, and a shorter one counts as so much
WHOLE = "aiconfigurator/"
"""How names of tables begin that aiconfigurator-core has: GPU, engine and version follow."""
MISSING = "pip install 'pdsim[operators]', or set compute=auto"
"""What to do without aiconfigurator-core."""


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
                parts.append(kind.read(columns_in(path)))
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


def columns_in(path: Path) -> Columns:
    """Return the columns of the Parquet file *path* by name."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    arrays = {name: table.column(name).to_numpy() for name in table.column_names}
    return {name: values.astype(str) if values.dtype.kind == "O" else values for name, values in arrays.items()}


# --- grids ---------------------------------------------------------------------------------------------------------


class WholeGrids(Mapping[str, Grid]):
    """The grids of the files of *engine* and *version* in *folder*, each made when it is asked for."""

    def __init__(self, folder: Path, engine: str, version: str) -> None:
        self._columns = {kind.name: (kind, columns) for kind, _, columns in tables_of(folder, engine, version)}
        self._made: dict[str, Grid] = {}

    def __getitem__(self, name: str) -> Grid:
        if name not in self._made:
            kind, columns = self._columns[name]
            keys, axes, values = dense(kind, columns)
            self._made[name] = grid(kind, keys, axes, rising(kind, axes, values), ~np.isnan(values))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


@cache
def table(name: str) -> Table:
    """Return the table *name* of the package, such as ``aiconfigurator/h100_sxm/vllm/0.24.0``.

    Raise a `ConfigError` if it is not installed.
    """
    gpu, engine, version = name.removeprefix(WHOLE).split("/")
    if (folder := installed(gpu)) is None:
        raise ConfigError(f"compute.kernels.table={name} is not installed; {MISSING}")
    return Table(name, {}, WholeGrids(folder, engine, version))


@cache
def installed(gpu: str = "") -> Path | None:
    """Return the folder of aiconfigurator-core's tables, or that of *gpu*, such as h100_sxm; None without it."""
    found = find_spec("aiconfigurator_core")
    if found is None or not found.origin:
        return None
    folder = Path(found.origin).parent / "systems" / "data" / gpu
    return folder if folder.is_dir() else None


def grid(
    kind: Kind, keys: Sequence[Key], axes: Sequence[Floats], values: Floats, measured: npt.NDArray[np.bool_]
) -> Grid:
    """Return the grid of *kind* with *values* at the sizes of *axes*, for each of *keys*."""
    named = dict(zip(kind.axes, axes, strict=True))
    places = {key: place for place, key in enumerate(keys)}
    return Grid(kind=kind.name, columns=kind.columns, keys=places, axes=named, values=values.astype(np.float32),
                measured=measured)  # fmt: skip


def dense(kind: Kind, columns: Columns) -> tuple[list[Key], list[Floats], Floats]:
    """Return the keys, the sizes of each axis, and the logarithms of seconds, NaN where nothing was measured.

    Of several kernels for the same sizes the fastest counts, as an engine that tunes itself takes it.
    """
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


def rising(kind: Kind, axes: Sequence[Floats], values: Floats) -> Floats:
    """Return *values* without gaps and disturbed points, that never fall along the last axes."""
    return _rising(kind, _smooth(kind, axes, _filled(values)))


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


def around(axes: Sequence[Floats], values: Floats) -> Floats:
    """Return what the neighbours along each axis say of each of *values*: their median."""
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
        middle = around(axes, values)
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
