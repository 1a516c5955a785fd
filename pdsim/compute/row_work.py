# SPDX-License-Identifier: Apache-2.0
"""What the measured rows of operators had to do, counted as `OperatorForward` counts a model's."""

from collections.abc import Mapping
from typing import Any

from pdsim.compute.kernels import Roof
from pdsim.compute.tiles import SORTED, Work, causal_attention, decode_rows, grouped, product, whole_sequences

Row = Mapping[str, Any]


def operator_of(row: Row) -> str:
    """Return the name in `Kernels` of the operator of *row*."""
    if row["operator"] == "experts" and row["kernel"] == "tuned":
        return "experts_tuned"
    return f"{row['operator']}_fp8" if row["dtype"] == "fp8" else str(row["operator"])


def work(row: Row, roof: Roof, processors: int) -> Work:
    """Return what an operator's *row* has to do, in the tiles of *roof* on so many *processors*.

    Arithmetic is in operations (a multiplication and an addition are two); bytes are those read and written in
    memory once, two an element or one in FP8.  Causal attention of a prompt counts each pair of tokens once,
    ``tokens * context + tokens * (tokens + 1) / 2``; decode reads the keys and values of the whole context, and its
    depth is the context unless a sequence is one tile.
    """
    tokens, n, k, heads, kv = (row[name] for name in ("tokens", "n", "k", "heads", "kv_heads"))
    batch, context, width, value = (row[name] for name in ("batch", "context", "head_dim", "value_dim"))
    name, size = row["operator"], 1 if row["dtype"] == "fp8" else 2
    if name == "gemm":
        return product(tokens, n, k, size, *roof.cut(), processors)
    if name in ("prefill", "mla_prefill"):
        both = (k or width) + value
        return causal_attention([(context, tokens)], heads, both, 2.0 * kv * both, roof.tile, processors)
    if name == "decode":
        rows = decode_rows(batch, kv, roof.tile, processors)
        depth = 0 if roof.tile and whole_sequences(batch, kv, processors) else context
        return Work(4.0 * batch * context * rows * width, 4.0 * batch * context * kv * width, depth=depth)
    if name == "mla_decode":
        return Work(2.0 * batch * context * heads * (k + value), 2.0 * batch * context * k)
    if name == "mla_absorb":
        elements = heads * width * value
        return Work(4.0 * batch * elements, 4.0 * elements + 4.0 * batch * heads * (value + width))
    if name == "experts":
        routed = tokens * row["per_token"]
        return grouped(routed, row["hit"], n, row["width"], size, *roof.cut(routed / row["experts"]), processors)
    moved = {
        "routing": 6 * row["per_token"] * n,
        "norm": 4 * n,
        "activation": 3 * n,
        "rotary": 2 * (heads + 2 * kv) * width,
    }
    return Work(0.0, 2.0 * tokens * moved[name], depth=n if name == "norm" else 0)


def merged(row: Row, roof: Roof, processors: int) -> bool:
    """Return whether *row* has more kernels than others of its operator, whose time is `Roof.merge`.

    These add up parts of split sequences, those over tokens of earlier chunks, sort more rows than a warp does, or
    store keys and values of several tokens, which are not one piece.
    """
    if row["operator"] == "routing":
        return bool(row["tokens"] * row["per_token"] > SORTED)
    if row["operator"] == "rotary":
        return bool(row["tokens"] > 1)
    if row["operator"] == "decode":
        return roof.tile > 0 and not whole_sequences(row["batch"], row["kv_heads"], processors)
    return bool(row["operator"] == "prefill" and row["context"])
