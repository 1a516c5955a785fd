# SPDX-License-Identifier: Apache-2.0
"""A rank's forward: what serving asks for, and the sum of operators that answers it where they were measured.

`forward` chooses: a configuration with `Compute.kernels` adds up operators, another has the roofline of
`pdsim.serving.compute.roofline`.  All quantities are of one tensor-parallel rank; those of an instance compute
alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from pdsim.hardware import Machine
from pdsim.serving.compute.experts import Exchange
from pdsim.serving.compute.kernels import Kernels, Peaks, Roof, tiled
from pdsim.serving.compute.roofline import HOST_FLOPS, forward_time, kv_shape
from pdsim.serving.compute.shapes import LayerShape, layer_shape, products
from pdsim.serving.settings import Compute, Llm, Side

__all__ = ["ForwardModel", "OperatorForward", "forward", "peaks"]


@runtime_checkable
class ForwardModel(Protocol):
    """How long the iterations of a rank take, in seconds."""

    def prefill(self, pieces: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of an iteration over *pieces*, each with so many tokens of context and so many new."""

    def step(self, batch: int) -> float:
        """Return the seconds of a decode iteration of *batch* requests, without those for their context."""

    @property
    def context(self) -> float:
        """Seconds that a token of context adds to a decode iteration."""

    @property
    def sequence(self) -> float:
        """Seconds that a token of the longest context alone keeps a decode iteration; 0: there is no such limit."""

    @property
    def exchange(self) -> Exchange:
        """What tokens send to experts of other ranks meanwhile."""


def forward(model: Llm, machine: Machine, compute: Compute, side: Side, direct: bool = False) -> ForwardModel:
    """Return the forward of *model* on an instance of *side*, whose ranks are on *machine*.

    Tokens go to experts of other ranks *direct*, or by way of nodes (`pdsim.serving.compute.experts`).

    Raise a `ValueError` if *compute* has kernels, but not all that *model* needs.
    """
    if compute.kernels is None:
        return forward_time(model, machine, compute, side, direct)
    if side.ep > 1:
        raise ValueError(
            f"parallel.{'decode' if direct else 'prefill'}.ep={side.ep}: profiles have no tokens that travel; use "
            "compute=roofline, or ep=1"
        )
    return OperatorForward(
        model=model,
        kernels=compute.kernels,
        peaks=peaks(machine),
        tp=side.tp,
        dp=side.dp,
        share=side.pp * side.cp,
        stages=side.pp,
        kv_bytes=kv_shape(model).token_bytes(side.attention_tp) / (side.pp * side.cp),
        overhead=compute.overhead,
        scale=compute.scale,
    )


def peaks(machine: Machine) -> Peaks:
    """Return the peaks that kernels have shares of: those of the GPU, or of a host where compute is emulated."""
    if machine.gpu is None:
        return Peaks(HOST_FLOPS, HOST_FLOPS, machine.host.memory_rate)
    return Peaks(machine.gpu.compute, machine.gpu.compute_fp8 or machine.gpu.compute, machine.gpu.memory_rate)


@dataclass(frozen=True, kw_only=True)
class OperatorForward:
    """The forward of a rank as the sum of its operators; the same interface as `roofline.ForwardTime`.

    Attention is divided among ``tp // dp`` ranks, everything else among *tp*, whose tokens are those of *dp* groups.
    Stages and context-parallel ranks, *share*, divide the work.
    """

    model: Llm
    kernels: Kernels
    peaks: Peaks
    tp: int = 1
    dp: int = 1
    share: int = 1
    stages: int = 1  # of a pipeline, see `roofline.ForwardTime.step`
    kv_bytes: float  # of a token, on this rank
    overhead: float = 0.0  # seconds an iteration
    scale: float = 1.0
    even: bool = False  # whether tokens are spread over experts evenly, instead of independently of each other

    @cached_property
    def shape(self) -> LayerShape:
        """The widths of the model's layers."""
        return layer_shape(self.model)

    def __post_init__(self) -> None:
        self.step(1)  # refuses a model with operators that nobody measured
        self.prefill([(0, 1)])

    # --- what serving asks for -------------------------------------------------------------------------------------

    def prefill(self, pieces: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of an iteration over *pieces*, each with so many tokens of context and so many new."""
        taken = list(pieces)
        tokens = sum(new for _, new in taken)
        attention = sum(self._attention(before, new) for before, new in taken)
        linear = self._linear(tokens, len(taken), absorbed=self.kernels.absorbed_prefill)
        device = (linear + self._layers() * attention) / self.share
        least = self.kernels.layer_launch * self.model.layers / self.share
        return self.scale * (max(device, least) + self.overhead)

    def step(self, batch: int) -> float:
        """Return the seconds of a decode iteration of *batch* requests, without those for their context."""
        attention, part = self._decode_roof().launch, -(-batch // self.stages)
        device = (self._linear(part, part, absorbed=True) + self._layers() * attention) / self.share
        return self.stages * self.scale * (device + self.overhead)

    @cached_property
    def context(self) -> float:
        """Seconds that a token of context adds to a decode iteration."""
        roof, layers = self._decode_roof(), self._layers()
        one = roof.seconds(self._decode_flops(), self.kv_bytes / layers, self.peaks) - roof.launch
        return self.scale * one * layers

    @property
    def sequence(self) -> float:
        """Seconds that a token of the longest context alone keeps a decode iteration: there is no such limit."""
        return 0.0

    @property
    def exchange(self) -> Exchange:
        """What tokens send to experts of other ranks: nothing."""
        return Exchange()

    # --- parts -----------------------------------------------------------------------------------------------------

    def _layers(self) -> int:
        pattern = self.model.hybrid.pattern
        return max(1, round(self.model.layers * pattern.count("a") / len(pattern)))

    @property
    def _heads(self) -> int:
        return max(1, self.model.heads // (self.tp // self.dp))

    def _attention(self, before: int, new: int) -> float:
        """Return the seconds of one layer's attention of *new* tokens to themselves and *before* earlier ones."""
        model = self.model
        pairs = new * before + new * (new + 1) // 2
        if model.attention == "mla":
            width, heads, name = 2 * model.head_dim + model.rope_dim, self._heads, "mla_prefill"
            if self.kernels.absorbed_prefill:
                width, heads = 2 * model.latent_dim - model.rope_dim, 1
            nbytes = (before + new) * heads * width * 2
        else:
            width, name = 2 * model.head_dim, "prefill"
            nbytes = (before + new) * int(self.kv_bytes * self.share / self._layers())
        return self.kernels.roof(name, model.name).seconds(2 * pairs * width * self._heads, nbytes, self.peaks)

    def _decode_roof(self) -> Roof:
        return self.kernels.roof("mla_decode" if self.model.attention == "mla" else "decode", self.model.name)

    def _decode_flops(self) -> float:
        model = self.model
        width = 2 * model.head_dim if model.attention == "gqa" else 2 * model.latent_dim - model.rope_dim
        return 2 * width * self._heads / self.share

    def _linear(self, tokens: int, sequences: int, absorbed: bool) -> float:
        """Return the seconds of all that is not attention, of *tokens* of a group in so many *sequences*."""
        model, shape = self.model, self.shape
        narrow, every = model.dtype_bytes == 1, tokens * self.dp
        total = 0.0
        attention = ("qkv", "qkv_down", "q_up", "kv_up", "out")
        for product in products(model, self.tp, self.tp // self.dp, absorbed=absorbed):
            rows = tokens if product.name in attention else every
            rows = sequences if product.name == "head" else rows
            wide = product.name in ("head", "router")  # these stay in bf16
            total += product.times * self.gemm(rows, product.n, product.k, narrow and not wide)
        if absorbed and model.attention == "mla":
            total += model.layers * self._absorb(tokens)
        dense = shape.dense if model.experts else model.layers
        mixed = model.layers - dense
        total += 2 * model.layers * self._pointwise("norm", tokens, 4 * model.hidden)
        if dense:
            total += dense * self._pointwise("activation", every, 3 * shape.intermediate // self.tp)
        if model.attention == "gqa":
            width = self._heads + 2 * max(1, model.kv_heads // (self.tp // self.dp))
            total += model.layers * self._pointwise("rotary", tokens, 2 * width * model.head_dim)
        if mixed:
            total += mixed * self.experts(every, self._hit(every), shape.expert // self.tp)
            total += mixed * self._pointwise("routing", every, 6 * model.experts_per_token * model.hidden)
        return total + 2 * model.layers * self._allreduce(tokens)

    def gemm(self, rows: int, n: int, k: int, narrow: bool) -> float:
        """Return the seconds of a product of *rows* by *k* with *k* by *n*, of 8-bit elements if *narrow*."""
        narrow = narrow and self.kernels.gemm_fp8 is not None
        roof = self.kernels.roof("gemm_fp8" if narrow else "gemm", self.model.name)
        size = 1 if narrow else 2
        whole = -(-rows // roof.tile) * roof.tile if roof.tile else rows
        seconds = roof.seconds(2.0 * whole * n * k, size * (rows * k + n * k) + 2 * rows * n, self.peaks, narrow)
        return seconds * self.kernels.correction(n, k, narrow, rows)

    def experts(self, tokens: int, hit: float, width: int) -> float:
        """Return the seconds of both products of the routed experts, *width* wide, for *tokens* that hit so many."""
        model = self.model
        routed = tokens * model.experts_per_token
        narrow = model.dtype_bytes == 1 and self.kernels.experts_fp8 is not None
        roof = self.kernels.roof("experts_fp8" if narrow else "experts", model.name)
        weights = 3 * hit * model.hidden * width
        nbytes = (1 if narrow else 2) * weights + 2 * routed * (2 * model.hidden + 4 * width)
        whole = tiled(routed, hit, roof.tile)
        return roof.seconds(6.0 * whole * model.hidden * width, nbytes, self.peaks, narrow, model.experts)

    def _hit(self, tokens: int) -> float:
        """Return how many experts *tokens* hit: in the mean, or all that they can if they are spread evenly."""
        model = self.model
        if self.even:
            return min(model.experts, tokens * model.experts_per_token)
        return model.experts * (1.0 - (1.0 - model.experts_per_token / model.experts) ** tokens)

    def _absorb(self, tokens: int) -> float:
        model, rank = self.model, self.model.latent_dim - self.model.rope_dim
        elements = self._heads * model.head_dim * rank
        nbytes = 4 * elements + 4 * tokens * self._heads * (rank + model.head_dim)
        roof = self.kernels.mla_absorb or self.kernels.roof("gemm", model.name)
        return roof.seconds(4.0 * tokens * elements, nbytes, self.peaks)

    def _pointwise(self, name: str, rows: int, width: int) -> float:
        """Return the seconds of the operator *name*, which moves *width* elements of 2 bytes a row.

        Published tables have none of these: a forward by them is short by so much.
        """
        roof: Roof | None = getattr(self.kernels, name)
        return roof.seconds(0.0, 2.0 * rows * width, self.peaks) if roof is not None else 0.0

    def _allreduce(self, tokens: int) -> float:
        if self.tp == 1:
            return 0.0
        ring = self.kernels.ring(self.tp)
        return ring.latency + 2.0 * tokens * self.model.hidden / ring.rate
