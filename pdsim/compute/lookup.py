# SPDX-License-Identifier: Apache-2.0
"""The operators of one rank's forward, looked up in a `pdsim.compute.tables.Table`.

An operator that is asked for again and again has a curve of its own, so a lookup is a search in a short list and a
power.  Shapes that a table lacks count as the nearest one it has, scaled by their work, with a `RangeWarning`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pdsim.compute.tables import Curve, Floats, Key, RangeWarning, Table
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Llm

_FARTHEST = 2.5
"""Sum of the logarithms of ratios between an expert's shape and the nearest measured one, up to which it counts."""
_EXPERTS = {
    "nvfp4": ("nvfp4", "w4a16_mxfp4", "int4_wo"),
    "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4", "int4_wo"),
    "int4": ("int4_wo", "w4a16_mxfp4"),
}
"""Kinds of experts in tables, nearest first, by `Llm.mlp_dtype`: only Blackwell multiplies 4 bits."""
DRAWN = "drawn"
"""Each token of a decode step goes to experts of its own, whoever else is in the batch, as with dummy weights."""
_SKEWED = "power_law_1.01"
"""How the table's tokens are spread in prompts of such a server."""
_LAUNCHED = 2.0
"""How many times as long as without block scales a product of one row takes that was measured with its launches."""
_CONTEXTS = np.array([128.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0])
"""Tokens of context at which a decode step's attention is made a line in the context."""

FP8_GEMM = {"": math.inf, "flashinfer_trtllm": 440e12}
"""FLOPs a second that products with FP8 weights in blocks reach at most, by whose they are instead of the table's.

TensorRT-LLM's, as FlashInfer calls it, takes 0.83 and 1.63 ms for 1,024 and 2,048 rows by 7,168 x 24,576 on B200,
where DeepGEMM takes 0.15 and 0.26 (SGLang, pull request 13528).
"""

_REACH = 1024.0
"""Tokens of context that a batch was measured with at least, for larger ones to take as much longer as they are."""


class _Attention(NamedTuple):
    """A key of a table's attention, for so many heads, and how many times as long the model's takes."""

    kind: str
    key: Key
    heads: int
    factor: float


@dataclass(frozen=True)
class Lookup:
    """Seconds of the operators of *model*, of *heads* and *kv_heads* on a rank, by *table*.

    Weights of *narrow* models have 8 bits.  *imbalance* is how tokens are spread over experts, or `DRAWN`.
    """

    table: Table
    model: Llm
    heads: int
    kv_heads: int
    imbalance: str = _SKEWED
    # latent attention of prefill is that of heads: keys of head_dim + rope_dim, values of head_dim
    by_heads: bool = False
    fused: bool = False  # torch.compile scales activations in the norm or activation before a product
    fp8_gemm: str = ""  # of `FP8_GEMM`
    _curves: dict[tuple[str, int, int, int], Curve] = field(default_factory=dict, repr=False)
    _prefill: dict[int, Curve] = field(default_factory=dict, repr=False)
    _lines: dict[int, tuple[float, float]] = field(default_factory=dict, repr=False)
    _nearest: dict[str, _Attention] = field(default_factory=dict, repr=False, compare=False)  # by side

    @property
    def module(self) -> bool:
        """Whether latent attention was measured with its products, as a whole."""
        return self.model.attention == "mla" and "mla_decode_module" in self.table

    def gemm(self, rows: float, n: int, k: int, dtype: str) -> float:
        """Return the seconds of a product of *rows* by *k* with *k* by *n*, weights of *dtype* (`product_dtype`)."""
        name = (dtype, n, k, 0)
        curve = self._curves.get(name)
        if curve is None:
            curve = self._curves[name] = self._gemm(n, k, dtype)
        return curve(rows) if dtype != "fp8" else max(curve(rows), 2.0 * rows * n * k / FP8_GEMM[self.fp8_gemm])

    def _gemm(self, n: int, k: int, dtype: str) -> Curve:
        if dtype == "bf16":
            return self._product("bfloat16", n, k)
        if dtype == "fp8":
            return self._product(self._narrow, n, k)
        if f"gemm.{dtype}" in self.table:
            return self._product(dtype, n, k)
        warnings.warn(
            f"{self.table.name} has no products of {dtype}; weights of 8 bits count instead",
            RangeWarning,
            stacklevel=4,
        )
        return self._product(self._narrow, n, k)

    def quantize(self, rows: float, width: int) -> float:
        """Return the seconds that scaling *rows* by *width* activations to 8 bits takes beside a product.

        vLLM's products were measured with the conversion by a constant scale; finding that of a row takes more
        (aiconfigurator, ``collector/vllm/collect_gemm.py`` and ``collect_computescale.py``).  Where both are *fused*
        with the operator before, the conversion is taken off.
        """
        if self._narrow != "fp8" or "quantize" not in self.table:
            return 0.0
        name = ("quantize", width, 0, 0)
        curve = self._curves.get(name)
        if curve is None:
            kind = "static" if self.fused else "scale"
            curve = self._curves[name] = self.table.curve("quantize", (kind, "fp8"), "tokens", width=width)
        return -curve(rows) if self.fused else curve(rows)

    @cached_property
    def _narrow(self) -> str:
        # vLLM's block-scaled products were measured with the launches of their quantisation: none takes less than 60
        # to 300 us.  The smallest product tells.
        kinds = [each for each in ("fp8_block", "fp8") if f"gemm.{each}" in self.table] or ["bfloat16"]
        sizes = self.table.grid(f"gemm.{kinds[0]}").axes
        least = [self._product(each, sizes["n"][0], sizes["k"][0])(1) for each in kinds]
        return kinds[-1] if least[0] > _LAUNCHED * least[-1] else kinds[0]

    def _product(self, dtype: str, n: float, k: float) -> Curve:
        kind = f"gemm.{dtype}"
        sizes = self.table.grid(kind).axes["n"]
        parts = math.ceil(n / sizes[-1])  # a wider matrix is multiplied in parts of equal width
        curve = self.table.curve(kind, (dtype,), "tokens", splits=True, n=n / parts, k=k)
        return curve if parts == 1 else curve.times(parts)

    def experts(self, tokens: float, width: int, ranks: int = 1, step: bool = False) -> float:
        """Return the seconds of both products of the routed experts for *tokens*, each divided to *width*.

        Where *ranks* hold whole experts instead, it is that of the rank with most tokens, if the table has it.  Of a
        decode *step* whose tokens are `DRAWN`, those of the experts that are hit: the table's balanced tokens hit as
        many as they can.
        """
        drawn = step and self.imbalance == DRAWN
        name = ("drawn" if drawn else "experts", width, ranks, 0)
        curve = self._curves.get(name)
        if curve is None:
            imbalance = "balanced" if drawn else _SKEWED if self.imbalance == DRAWN else self.imbalance
            held = any(key[6] == ranks for key in self.table.grid("moe").keys)
            curve = self._experts(*((width * ranks, ranks) if held else (width, 1)), imbalance)
            self._curves[name] = curve
        if not drawn:
            return curve(tokens)
        share = self.model.experts_per_token / self.model.experts
        hit: float = (1.0 - (1.0 - share) ** tokens) / min(1.0, tokens * share)
        return hit * curve(tokens)

    def _experts(self, width: int, ranks: int, imbalance: str) -> Curve:
        model, grid = self.model, self.table.grid("moe")
        wanted = (model.hidden, width, model.experts_per_token, model.experts)
        own = _EXPERTS.get(model.mlp_dtype, ())
        narrow = ("fp8_block", "fp8") if model.mlp_bytes <= 1 else ()
        kinds = [(dtype, spread) for dtype in (*own, *narrow, "bfloat16") for spread in (imbalance, "balanced")]
        for kind in kinds:
            near = [
                (sum(abs(math.log(float(one) / other)) for one, other in zip(key[2:6], wanted, strict=True)), key)
                for key in grid.keys
                if key[:2] == kind and key[6] == ranks
            ]
            if near and min(near)[0] <= _FARTHEST:
                break
        else:
            raise ConfigError(
                f"compute.kernels.table={self.table.name} has no experts like those of model={model.name} (hidden, "
                f"width, chosen, experts: {wanted}) with compute.kernels.imbalance={self.imbalance}; choose another "
                "table"
            )
        distance, key = min(near)
        if own and key[0] not in own:
            warnings.warn(
                f"{self.table.name} has no experts of {own[0]} like those of {model.name}; those of {key[0]} count",
                RangeWarning,
                stacklevel=4,
            )
        curve = self.table.curve("moe", key, "tokens", splits=True)
        if not distance:
            return curve
        ratio = float(np.prod([mine / float(measured) for mine, measured in zip(wanted[:2], key[2:4], strict=True)]))
        ratio *= (wanted[2] / float(key[4]) * wanted[3] / float(key[5])) ** 0.5
        warnings.warn(
            f"{self.table.name}, moe: {wanted} counts as {key[2:6]}, the nearest measured, times {ratio:.2f}",
            RangeWarning,
            stacklevel=4,
        )
        return curve.times(ratio)

    def allreduce(self, tokens: float, gpus: int) -> float:
        """Return the seconds of one all-reduce of the activations of *tokens* among *gpus*."""
        name = ("allreduce", gpus, 0, 0)
        curve = self._curves.get(name)
        if curve is None:
            known = [int(key[0]) for key in self.table.grid("allreduce").keys]
            near = min(known, key=lambda each: abs(math.log(each / gpus)))
            if near != gpus:
                warnings.warn(
                    f"{self.table.name}, allreduce: {gpus} GPUs count as {near}, the nearest measured",
                    RangeWarning,
                    stacklevel=3,
                )
            curve = self._curves[name] = self.table.curve("allreduce", (near,), "elements", splits=True)
        return curve(tokens * self.model.hidden)

    def prefill(self, pieces: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of one layer's attention of *pieces*: new tokens to themselves and earlier ones.

        Sequences of a batch count as equally long ones with as many pairs of tokens; one with earlier tokens takes
        what its whole length takes over what those alone take.
        """
        batch = len(pieces)
        new = whole = before = 0
        for earlier, tokens in pieces:
            new += tokens * tokens
            before += earlier * earlier
            whole += (earlier + tokens) ** 2
        curve = self._prefill.get(batch)
        if curve is None:
            curve = self._prefill[batch] = self._batch(batch)
        if not before:
            return curve(math.sqrt(whole / batch))
        more = curve(math.sqrt(whole / batch)) - curve(math.sqrt(before / batch))
        return max(more, curve(math.sqrt(new / batch)))

    def _batch(self, batch: int) -> Curve:
        if self.by_heads and self.model.attention == "mla":
            width = self.model.head_dim
            key: Key = ("bfloat16", "bfloat16", width, 0, 0)
            factor = (2 * width + self.model.rope_dim) / (2 * width)
            return self._curve(batch, _Attention("prefill", key, self.heads, factor))
        return self._curve(batch, self._attention("prefill"))

    def _curve(self, batch: int, one: _Attention) -> Curve:
        parts = math.ceil(batch / self.table.grid(one.kind).axes["batch"][-1])
        whole = self.table.curve(one.kind, one.key, "tokens", growth=2.0, heads=one.heads, batch=batch / parts)
        if batch == 1:
            return whole.times(one.factor)
        alone = self.table.curve(one.kind, one.key, "tokens", growth=2.0, heads=one.heads, batch=1)
        return whole.times(one.factor * parts, alone.times(one.factor * batch))

    def decode(self, batch: int) -> tuple[float, float]:
        """Return the seconds of one layer's attention in a step of *batch* sequences, and those a token of context.

        The table's times are not a line in the context; this one is the nearest over `_CONTEXTS`, relatively.
        """
        line = self._lines.get(batch)
        if line is None:
            line = self._lines[batch] = self._line(max(1, batch))
        return line

    def _line(self, batch: int) -> tuple[float, float]:
        kind, key, heads, factor = self._attention("decode")
        grid, reaches = self.table.grid(kind), self._reaches

        def seconds(of: float, contexts: Floats) -> Floats:
            sizes, logs, _ = grid.slice(key, "context", heads=heads, batch=of)
            return np.asarray(factor * batch / of * np.exp(np.interp(np.log(contexts), np.log(sizes), logs)))

        own = min(float(batch), max((min(reach, _REACH), size) for size, reach in reaches)[1])
        most = next(reach for size, reach in reaches if size >= own)
        contexts = _CONTEXTS[most >= _CONTEXTS] if most >= 2 * _CONTEXTS[0] else np.array([max(most / 4, 1.0), most])
        times = seconds(own, contexts)
        # Contexts that only fewer sequences were measured with: memory is busy, and more take as much longer.
        tokens = max(size * reach for size, reach in reaches)
        for size, reach in reversed(reaches):
            if size < own and reach > most:
                more = _CONTEXTS[(most < _CONTEXTS) & (reach >= _CONTEXTS) & (batch * _CONTEXTS <= tokens)]
                contexts, times, most = np.append(contexts, more), np.append(times, seconds(size, more)), reach
        # least squares of relative errors of constant + slope * context
        rows = np.stack([1.0 / times, contexts / times], axis=1)
        (constant, slope), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
        if slope < 0.0:
            constant, slope = float(np.median(times)), 0.0
        elif constant < 0.0:
            constant, slope = 0.0, float(np.median(times / contexts))
        return float(constant), float(slope) / batch

    @cached_property
    def _reaches(self) -> list[tuple[float, float]]:
        # of each batch of the table the longest context that it was measured with
        kind, key, heads, _ = self._attention("decode")
        grid = self.table.grid(kind)
        every = [(size, grid.slice(key, "context", heads=heads, batch=size)) for size in grid.axes["batch"].tolist()]
        return [(size, float(sizes[measured].max(initial=sizes[0]))) for size, (sizes, _, measured) in every]

    def absorb(self, tokens: float) -> float:
        """Return the seconds of both products that absorb the expansion of latent rows, one layer; 0 of a module."""
        if self.module or "mla_absorb" not in self.table:
            return 0.0
        dtypes = {key[1] for key in self.table.grid("mla_absorb").keys}
        dtype = "fp8" if self.model.dtype_bytes == 1 and "fp8" in dtypes else "bfloat16"
        return sum(
            self.table.curve("mla_absorb", (name, dtype), "tokens", splits=True, heads=self.heads)(tokens)
            for name in ("mla_gen_pre", "mla_gen_post")
        )

    def _attention(self, side: str) -> _Attention:
        one = self._nearest.get(side)
        if one is None:  # once: it looks through all keys and heads of the table
            one = self._nearest[side] = self._find(side)
        return one

    def _find(self, side: str) -> _Attention:
        model = self.model
        kv = "fp8" if model.kv_bytes == 1 else "bfloat16"
        if model.attention == "mla":
            kind = f"mla_{side}_module" if self.module else f"mla_{side}"
            dtype = "fp8_block" if model.dtype_bytes == 1 and self.module else "bfloat16"
            keys = self.table.grid(kind).keys
            tried: list[Key] = [(dtype, kv), (dtype, "bfloat16"), ("bfloat16", kv), ("bfloat16", "bfloat16")]
            return _Attention(kind, next((key for key in tried if key in keys), tried[-1]), self.heads, 1.0)
        grid = self.table.grid(side)
        kv_heads = 0 if self.kv_heads == self.heads else self.kv_heads
        by = "tokens" if side == "prefill" else "context"

        def measured(key: Key) -> int:  # the nearest number of heads of which several sizes were measured, or 0
            known = [
                int(heads) for heads in (self.heads, *grid.axes["heads"])
                if grid.slice(key, by, heads=float(heads), batch=1)[2].sum() > 1
            ]  # fmt: skip
            return min(known, key=lambda heads: abs(math.log(heads / self.heads)), default=0)

        def far(key: Key, heads: int) -> tuple[float, ...]:
            apart = [
                abs(math.log(self.heads / heads)),
                float((not kv_heads) != (not key[4])),
                abs(math.log(self.kv_heads / (int(key[4]) or heads))),
            ]
            if side == "decode":  # whose time is that of reading the KV heads
                apart.reverse()
            return abs(math.log(float(key[2]) / model.head_dim)), float(key[1] != kv), *apart

        near = [
            (far(key, heads), heads, key)
            for key in grid.keys if key[0] == "bfloat16" and not key[3] and (heads := measured(key))
        ]  # fmt: skip
        if not near:
            raise ConfigError(f"compute.kernels.table={self.table.name} has no {side} in bf16; choose another table")
        _, heads, key = min(near)
        times = self.kv_heads / (int(key[4]) or heads) if side == "decode" else self.heads / heads
        factor = times * model.head_dim / float(key[2])
        if key[2] != model.head_dim or key[1] != kv or key[4] != kv_heads or heads != self.heads:
            warnings.warn(
                f"{self.table.name}, {side}: {self.heads} heads of {model.head_dim}, {self.kv_heads} KV heads in "
                f"{kv} count as {heads} of {key[2]}, {key[4] or heads} and {key[1]}, the nearest measured, "
                f"times {factor:.2f}",
                RangeWarning,
                stacklevel=6,
            )
        return _Attention(side, key, heads, factor)
