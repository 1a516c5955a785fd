# SPDX-License-Identifier: Apache-2.0
"""Times of operators that others measured: aiconfigurator's tables, and what a whole forward takes by them.

`aiconfigurator <https://github.com/ai-dynamo/aiconfigurator>`_ (Apache-2.0) ships Parquet tables of GEMMs,
attention, latent attention, experts and all-reduces, for a GPU, an engine and a version of it, in
``systems/data/GPU/OPERATOR/ENGINE/VERSION``.  They are read from there, by path; nothing of them is in this
repository. Latencies in them are milliseconds.  Evidence: *published*.

A forward is the sum of the operators of its layers.  What no table has, as norms, rotary embeddings, routing and the
expansion of latent rows, is left out, so a sum is a little short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.compute.shapes import LayerShape
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Llm

__all__ = ["FILES", "Operators", "read"]

FILES = {
    "gemm": "gemm/{engine}/{version}/gemm_perf.parquet",
    "prefill": "attention/{engine}/{version}/context_attention_perf.parquet",
    "decode": "attention/{engine}/{version}/generation_attention_perf.parquet",
    "prefill_mla": "mla/{engine}/{version}/context_mla_perf.parquet",
    "decode_mla": "mla/{engine}/{version}/generation_mla_perf.parquet",
    "moe": "moe/{engine}/{version}/moe_perf.parquet",
    "allreduce": "comm/{engine}/{version}/custom_allreduce_perf.parquet",
}
"""Files of a GPU's folder, by operator; those that are missing are only missed by models that need them."""

Rows = Mapping[str, npt.NDArray[Any]]


def read(folder: Path, engine: str = "sglang", version: str = "0.5.10") -> Operators:
    """Return the operators in *folder*, that of a GPU, as measured with *version* of *engine*.

    Raise a `ConfigError` if there is no table of GEMMs, without which no forward has a time.
    """
    import pyarrow.parquet as pq

    tables = {}
    for name, pattern in FILES.items():
        path = folder / pattern.format(engine=engine, version=version)
        if path.is_file():
            table = pq.read_table(path)
            tables[name] = {column: np.array(table.column(column).to_pylist()) for column in table.column_names}
    if "gemm" not in tables:
        path = folder / FILES["gemm"].format(engine=engine, version=version)
        raise ConfigError(f"{path} is not a file; name a folder of systems/data in a checkout of aiconfigurator")
    return Operators(tables)


@dataclass(frozen=True)
class Operators:
    """Tables of operators; times are seconds, interpolated between sizes that were measured, in logarithms of both.

    Below the smallest size its time is taken, beyond the largest the time grows in proportion. Sizes that were
    measured several times count with their median. Other dimensions must be those of a row, but for products, which
    take the nearest shape.

    Each method raises a `ConfigError` if its table was not read or has no such row.
    """

    tables: Mapping[str, Rows]
    _curves: dict[tuple[Any, ...], tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = field(
        default_factory=dict
    )

    def gemm(self, m: int, n: int, k: int, dtype: str) -> float:
        """Return the seconds of a product of *m* by *k* with *k* by *n*: the nearest shape's, scaled by its size."""
        rows = self._of("gemm", gemm_dtype=dtype)
        shapes = np.unique(np.stack([rows["n"], rows["k"]]), axis=1)
        near = shapes[:, np.argmin(np.abs(np.log(shapes[0] / n)) + np.abs(np.log(shapes[1] / k)))]
        scale = n * k / float(near[0] * near[1])
        return scale * self._at("gemm", "m", m, gemm_dtype=dtype, n=int(near[0]), k=int(near[1]))

    def prefill(self, tokens: int, heads: int, kv_heads: int, head_dim: int) -> float:
        """Return the seconds of causal attention of one sequence of *tokens*, one layer."""
        where = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": head_dim, "num_heads": heads}
        return self._at("prefill", "isl", tokens, batch_size=1, num_key_value_heads=kv_heads, step=0, **where)

    def decode(self, batch: int, context: int, heads: int, kv_heads: int, head_dim: int) -> float:
        """Return the seconds of attention of *batch* sequences of *context* tokens, one layer."""
        where = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": head_dim, "num_heads": heads}
        return self._at("decode", "step", context, batch_size=batch, num_key_value_heads=kv_heads, **where)

    def latent(self, side: str, batch: int, tokens: int, heads: int) -> float:
        """Return the seconds of latent attention, of *side* prefill or decode, with so many *heads* on the GPU."""
        by = "isl" if side == "prefill" else "step"
        return self._at(f"{side}_mla", by, tokens, batch_size=batch, num_heads=heads, kv_cache_dtype="bfloat16")

    def experts(self, tokens: int, model: Llm, width: int, dtype: str, tp: int) -> float:
        """Return the seconds of the routed experts of a layer for *tokens* that are spread evenly."""
        return self._at(
            "moe", "num_tokens", tokens, moe_dtype=dtype, hidden_size=model.hidden, inter_size=width,
            topk=model.experts_per_token, num_experts=model.experts, moe_tp_size=tp, moe_ep_size=1,
            distribution="balanced",
        )  # fmt: skip

    def allreduce(self, tokens: int, hidden: int, tp: int) -> float:
        """Return the seconds of one all-reduce of the activations of *tokens* among *tp* GPUs."""
        if tp == 1:
            return 0.0
        rows = self._of("allreduce", num_gpus=tp)
        kind = max(set(rows["backend"].tolist()))  # in a graph, where there are both
        return self._at("allreduce", "message_size", tokens * hidden, num_gpus=tp, backend=kind)

    def step(self, model: Llm, shape: LayerShape, batch: int, context: int, tp: int) -> float:
        """Return the seconds of a decode step of *batch* requests of *context* tokens each."""
        heads = max(1, model.heads // tp)
        if model.attention == "mla":
            attention = self.latent("decode", batch, context, heads)
        else:
            attention = self.decode(batch, context, heads, max(1, model.kv_heads // tp), model.head_dim)
        return self._layers(model, shape, batch, tp, attention)

    def forward(self, model: Llm, shape: LayerShape, tokens: int, tp: int) -> float:
        """Return the seconds of a prefill of one sequence of *tokens*."""
        heads = max(1, model.heads // tp)
        if model.attention == "mla":
            attention = self.latent("prefill", 1, tokens, heads)
        else:
            attention = self.prefill(tokens, heads, max(1, model.kv_heads // tp), model.head_dim)
        return self._layers(model, shape, tokens, tp, attention)

    def _layers(self, model: Llm, shape: LayerShape, tokens: int, tp: int, attention: float) -> float:
        # A dense layer is its attention, the products before and after it, two all-reduces and its MLP; one with
        # experts has these in place of the MLP.
        dtype = "fp8_block" if model.dtype_bytes == 1 else "bfloat16"

        def product(n: int, k: int) -> float:
            return self.gemm(tokens, n, k, dtype)

        out = model.heads * model.head_dim // tp
        if model.attention == "mla":
            rank = model.latent_dim - model.rope_dim
            linear = product(shape.query_rank + model.latent_dim, model.hidden)
            linear += product(model.heads * (model.head_dim + model.rope_dim) // tp, shape.query_rank)
            linear += 2 * product(model.heads * model.head_dim // tp, rank)
        else:
            linear = product((model.heads + 2 * model.kv_heads) * model.head_dim // tp, model.hidden)
        linear += product(model.hidden, out)
        common = attention + linear + 2 * self.allreduce(tokens, model.hidden, tp)
        dense = 0.0
        if shape.intermediate:
            dense = product(2 * shape.intermediate // tp, model.hidden)
            dense += product(model.hidden, shape.intermediate // tp)
        if not model.experts:
            return model.layers * (common + dense)
        mixed = self.experts(tokens, model, shape.expert, dtype, tp)
        if shape.shared:
            mixed += product(2 * shape.shared // tp, model.hidden) + product(model.hidden, shape.shared // tp)
        return model.layers * common + shape.dense * dense + (model.layers - shape.dense) * mixed

    def _of(self, table: str, **where: Any) -> Rows:
        if table not in self.tables:
            raise ConfigError(f"no table of {table} was read; this GPU, engine and version have none")
        rows = self.tables[table]
        keep = np.ones(len(rows["latency"]), bool)
        for name, value in where.items():
            keep &= rows[name] == value
        if not keep.any():
            said = ", ".join(f"{name}={value}" for name, value in where.items())
            raise ConfigError(f"the table of {table} has no row with {said}; take a shape that was measured")
        return {name: values[keep] for name, values in rows.items()}

    def _at(self, table: str, by: str, value: float, **where: Any) -> float:
        key = (table, by, *sorted(where.items()))
        if key not in self._curves:
            rows = self._of(table, **where)
            sizes = np.unique(rows[by])
            times = [float(np.median(rows["latency"][rows[by] == size])) for size in sizes]
            self._curves[key] = np.log(np.maximum(sizes, 1).astype(float)), np.log(np.array(times) * 1e-3)
        sizes, logs = self._curves[key]
        at = np.log(max(value, 1))
        if at > sizes[-1] and len(sizes) > 1:  # beyond what was measured, in proportion
            return float(np.exp(logs[-1] + at - sizes[-1]))
        return float(np.exp(np.interp(at, sizes, logs)))
