# SPDX-License-Identifier: Apache-2.0
"""Rows as `pdsim profile` measures them, made of tables that others published, so that one fit reads both.

What tables and rows call differently is translated here.  Of matrix products those of a model's widths are taken.
The tables are aiconfigurator's (`pdsim.compute.operators`), whose latencies are milliseconds; they give
one number a point, so a row's least and most are its median.  A function below makes a row of a table's line, or
returns None for one that is not fitted to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdsim.calibration.kernels import Row
from pdsim.compute.operators import Operators

__all__ = ["TUNED", "rows"]

_NARROWEST, _WIDEST = 512, 30_000  # of matrices
_LATENT, _RANK = 576, 512  # elements of a latent row, and of its value: the tables are of DeepSeek-V3's


def rows(operators: Operators) -> Iterator[Row]:
    """Yield the rows of *operators* in bf16, and in FP8 with scales of blocks those of products and experts."""
    for name, make in (
        ("gemm", _gemm), ("prefill", _prefill), ("decode", _decode), ("prefill_mla", _latent_prefill),
        ("decode_mla", _latent_decode), ("moe", _experts), ("allreduce", _allreduce),
    ):  # fmt: skip
        table = operators.tables.get(name)
        if table is None:
            continue
        names = list(table)
        for values in zip(*table.values(), strict=True):
            given = dict(zip(names, values, strict=True))
            if (sizes := make(given)) is not None:
                seconds = float(given["latency"]) * 1e-3
                yield {**_NOTHING, **sizes, "seconds": seconds, "low": seconds, "high": seconds}


_NOTHING: dict[str, Any] = dict.fromkeys(
    ("tp", "layers", "tokens", "n", "k", "batch", "context", "heads", "kv_heads", "head_dim", "value_dim", "experts",
     "hit", "per_token", "width", "gpus", "round", "repeats"), 0
) | {"kernel": "", "mode": "graph", "dtype": "bf16", "model": ""}  # fmt: skip
TUNED = ("128x192", "128x384", "128x768", "512x128", "512x256")
"""Experts, and their width, for which SGLang has tiles found on an H200 in bf16: others take its default.

Its folder fused_moe_triton/configs has a file for each, such as E=128,N=192,device_name=NVIDIA_H200.json.
"""
_DTYPES = {"bfloat16": "bf16", "fp8_block": "fp8"}


def _whole_number(size: int) -> bool:
    return size < 16 or size % 16 == 0


def _gemm(row: dict[str, Any]) -> dict[str, Any] | None:
    m, n, k = (int(row[name]) for name in ("m", "n", "k"))
    usual = min(n, k) >= _NARROWEST and max(n, k) <= _WIDEST and _whole_number(m)
    if row["gemm_dtype"] not in _DTYPES or not usual:
        return None
    return {"operator": "gemm", "dtype": _DTYPES[row["gemm_dtype"]], "tokens": m, "n": n, "k": k}


def _plain(row: dict[str, Any]) -> bool:
    types = [row[name] for name in ("attn_dtype", "mla_dtype", "kv_cache_dtype") if name in row]
    return all(each == "bfloat16" for each in types)


def _heads(row: dict[str, Any]) -> dict[str, Any]:
    width = int(row["head_dim"])
    heads = {"heads": int(row["num_heads"]), "kv_heads": int(row["num_key_value_heads"])}
    return {**heads, "head_dim": width, "value_dim": width}


def _prefill(row: dict[str, Any]) -> dict[str, Any] | None:
    if not _plain(row) or row["batch_size"] != 1 or row["step"] or row["isl"] < 128:
        return None
    return {**_heads(row), "operator": "prefill", "tokens": int(row["isl"])}


def _decode(row: dict[str, Any]) -> dict[str, Any] | None:
    if not _plain(row) or not 127 <= row["step"] <= 32767 or row["batch_size"] > 512:
        return None
    return {**_heads(row), "operator": "decode", "batch": int(row["batch_size"]), "context": int(row["step"]) + 1}


def _latent_prefill(row: dict[str, Any]) -> dict[str, Any] | None:
    # The tables do not say which they have, but counted as expanded they reach 185 TFLOPS and as absorbed 620, as
    # other attention does.
    if not _plain(row) or row["batch_size"] != 1 or row["isl"] < 128:
        return None
    sizes = {"tokens": int(row["isl"]), "heads": int(row["num_heads"]), "kv_heads": 1}
    return {**sizes, "operator": "mla_prefill", "kernel": "absorbed", "k": _LATENT, "value_dim": _RANK}


def _latent_decode(row: dict[str, Any]) -> dict[str, Any] | None:
    if not _plain(row) or not 127 <= row["step"] <= 32767 or row["batch_size"] > 512:
        return None
    sizes = {"batch": int(row["batch_size"]), "context": int(row["step"]) + 1, "heads": int(row["num_heads"])}
    return {**sizes, "operator": "mla_decode", "kv_heads": 1, "k": _LATENT, "value_dim": _RANK}


def _experts(row: dict[str, Any]) -> dict[str, Any] | None:
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


def _allreduce(row: dict[str, Any]) -> dict[str, Any] | None:
    if not str(row["backend"]).endswith("graph") or row["message_size"] < 1024:
        return None
    size = {"tokens": int(row["message_size"]) // 1024, "n": 1024}
    return {**size, "operator": "allreduce", "gpus": int(row["num_gpus"])}
