# SPDX-License-Identifier: Apache-2.0
"""A rank's forward: what serving asks for, and the sum of operators that answers it where they were measured.

`forward` chooses: a configuration with `Compute.kernels` adds up operators, another has the roofline of
`pdsim.compute.roofline`.  All quantities are of one tensor-parallel rank; those of an instance compute
alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from pdsim.compute.experts import Exchange
from pdsim.compute.kernels import Kernels, Peaks, Roof
from pdsim.compute.options import Compute
from pdsim.compute.roofline import HOST_FLOPS, forward_time, kv_shape
from pdsim.compute.shapes import LayerShape, Product, layer_shape, products
from pdsim.compute.tiles import (
    SORTED,
    SPLIT,
    Work,
    causal_attention,
    decode_rows,
    grouped,
    product,
    whole_sequences,
)
from pdsim.hardware.machine import Machine
from pdsim.models.llm import Llm
from pdsim.models.parallel import Side

_ATTENTION = ("qkv", "qkv_down", "q_up", "kv_up", "out")
"""Products of attention: of the tokens of one group; others are of those of all."""

__all__ = ["ForwardModel", "OperatorForward", "forward", "peaks"]


@runtime_checkable
class ForwardModel(Protocol):
    """How long the iterations of a rank take, in seconds."""

    def prefill(self, pieces: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of an iteration over *pieces*, each with so many tokens of context and so many new."""

    def step(self, batch: int) -> float:
        """Return the seconds of a decode iteration of *batch* requests, without those for their context."""

    def context_of(self, batch: int) -> float:
        """Return the seconds that a token of context adds to a decode iteration of *batch* requests."""

    @property
    def context(self) -> float:
        """The most seconds that a token of context adds to a decode iteration, of whatever batch."""

    @property
    def sequence(self) -> float:
        """Seconds that a token of the longest context alone keeps a decode iteration; 0: there is no such limit."""

    @property
    def exchange(self) -> Exchange:
        """What tokens send to experts of other ranks meanwhile."""


def forward(model: Llm, machine: Machine, compute: Compute, side: Side, direct: bool = False) -> ForwardModel:
    """Return the forward of *model* on an instance of *side*, whose ranks are on *machine*.

    Tokens go to experts of other ranks *direct*, or by way of nodes (`pdsim.compute.experts`).

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
    gpu = machine.gpu
    return Peaks(gpu.compute, gpu.compute_fp8 or gpu.compute, gpu.memory_rate, gpu.processors)


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
        linear = self._linear(tokens, len(taken), absorbed=self.kernels.absorbed_prefill)
        device = (linear + self._layers() * self._attention(taken)) / self.share
        return self.scale * (max(device, self._launching / self.share) + self.overhead)

    def step(self, batch: int) -> float:
        """Return the seconds of a decode iteration of *batch* requests, without those for their context."""
        part = -(-batch // self.stages)
        roof = self._decode_roof()
        attention = roof.launch + (0.0 if self._whole(part) else roof.merge)
        device = (self._linear(part, part, absorbed=True) + self._layers() * attention) / self.share
        return self.stages * self.scale * (device + self.overhead)

    def context_of(self, batch: int) -> float:
        """Return the seconds that a token of context adds to a decode iteration of *batch* requests.

        Kernels with tiles multiply all rows of one, few of which a request has (`tiles.decode_rows`).
        """
        return self._token(-(-batch // self.stages))

    @cached_property
    def context(self) -> float:
        """The most seconds that a token of context adds to a decode iteration, of whatever batch."""
        heads, processors = self._kv_heads, self.peaks.processors
        # the fewest sequences that are not split, and that take three turns
        whole = [math.ceil(SPLIT * processors / heads), 2 * processors // heads + 1] if processors else []
        return max(self._token(sequences) for sequences in (1, *whole))

    @cached_property
    def sequence(self) -> float:
        """Seconds that a token of the longest context alone keeps a decode iteration.

        Tiles of a split sequence are added up one after the other, so a few sequences leave memory idle.
        """
        roof = self._decode_roof()
        return self.scale * self._layers() * roof.walk if self.model.attention != "mla" else 0.0

    @property
    def exchange(self) -> Exchange:
        """What tokens send to experts of other ranks: nothing."""
        return Exchange()

    # --- parts -----------------------------------------------------------------------------------------------------

    @cached_property
    def _launching(self) -> float:
        """Seconds that launching all layers of a prefill takes, kernel by kernel."""
        kernels, layers = self.kernels, self.model.layers
        mixed = layers - self.shape.dense if self.model.experts else 0
        return (layers - mixed) * kernels.layer_launch + mixed * (kernels.mixed_launch or kernels.layer_launch)

    def _layers(self) -> int:
        pattern = self.model.hybrid.pattern
        return max(1, round(self.model.layers * pattern.count("a") / len(pattern)))

    @property
    def _heads(self) -> int:
        return max(1, self.model.heads // (self.tp // self.dp))

    @property
    def _kv_heads(self) -> int:
        return max(1, self.model.kv_heads // (self.tp // self.dp))

    def _attention(self, pieces: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of one layer's attention of *pieces*: new tokens to themselves and earlier ones."""
        model, heads = self.model, self._heads
        if model.attention == "mla":
            width, shared, name = 2 * model.head_dim + model.rope_dim, heads, "mla_prefill"
            if self.kernels.absorbed_prefill:
                width, shared = 2 * model.latent_dim - model.rope_dim, 1
            token_bytes = 2.0 * shared * width
        else:
            width, name = 2 * model.head_dim, "prefill"
            token_bytes = int(self.kv_bytes * self.share / self._layers())
        roof = self.kernels.roof(name, model.name)
        work = causal_attention(pieces, heads, width, token_bytes, roof.tile, self.peaks.processors)
        return roof.seconds(work, self.peaks) + (roof.merge if any(before for before, _ in pieces) else 0.0)

    def _decode_roof(self) -> Roof:
        return self.kernels.roof("mla_decode" if self.model.attention == "mla" else "decode", self.model.name)

    def _whole(self, sequences: int) -> bool:
        """Return whether decode attention of so many *sequences* splits none of them."""
        return bool(self._decode_roof().tile) and whole_sequences(sequences, self._kv_heads, self.peaks.processors)

    def _token(self, sequences: int) -> float:
        """Return the seconds that a token of context adds to a decode iteration of so many *sequences*."""
        roof, layers, model = self._decode_roof(), self._layers(), self.model
        if model.attention == "gqa":
            rows = decode_rows(sequences, self._kv_heads, roof.tile, self.peaks.processors)
            width = 2 * model.head_dim
        else:
            rows, width = self._heads, 2 * model.latent_dim - model.rope_dim
        work = Work(2.0 * width * rows / self.share, self.kv_bytes / layers)
        return self.scale * layers * (roof.seconds(work, self.peaks) - roof.launch)

    def _linear(self, tokens: int, sequences: int, absorbed: bool) -> float:
        """Return the seconds of all that is not attention, of *tokens* of a group in so many *sequences*."""
        model, shape, every = self.model, self.shape, tokens * self.dp
        total = 0.0
        for one, narrow in self._products[absorbed]:
            rows = tokens if one.name in _ATTENTION else every
            rows = sequences if one.name == "head" else rows
            total += one.times * self.gemm(rows, one.n, one.k, narrow)
        if absorbed and model.attention == "mla":
            total += model.layers * self._absorb(tokens)
        dense = shape.dense if model.experts else model.layers
        mixed = model.layers - dense
        total += 2 * model.layers * self._pointwise("norm", tokens, 4 * model.hidden)
        if dense:
            total += dense * self._pointwise("activation", every, 3 * shape.intermediate // self.tp)
        if model.attention == "gqa":
            width = self._heads + 2 * self._kv_heads
            total += model.layers * self._pointwise("rotary", tokens, 2 * width * model.head_dim)
        if mixed:
            total += mixed * self.experts(every, self._hit(every), shape.expert // self.tp)
            total += mixed * self._pointwise("routing", every, 6 * model.experts_per_token * model.hidden)
        return total + 2 * model.layers * self._allreduce(tokens)

    @cached_property
    def _products(self) -> dict[bool, list[tuple[Product, bool]]]:
        """The products of a prefill (False) and of a step (True), and whether they are of 8-bit elements."""
        narrow = self.model.dtype_bytes == 1 and self.kernels.gemm_fp8 is not None
        found = {each: products(self.model, self.tp, self.tp // self.dp, absorbed=each) for each in (False, True)}
        # the head and the router stay in bf16
        return {
            each: [(one, narrow and one.name not in ("head", "router")) for one in found[each]] for each in found
        }

    def gemm(self, rows: int, n: int, k: int, narrow: bool) -> float:
        """Return the seconds of a product of *rows* by *k* with *k* by *n*, of 8-bit elements if *narrow*."""
        narrow = narrow and self.kernels.gemm_fp8 is not None
        roof = self.kernels.roof("gemm_fp8" if narrow else "gemm", self.model.name)
        work = product(rows, n, k, 1 if narrow else 2, roof.tile, roof.columns, self.peaks.processors)
        seconds = roof.seconds(work, self.peaks, narrow)
        return seconds * self.kernels.correction(n, k, narrow, rows)

    def experts(self, tokens: int, hit: float, width: int) -> float:
        """Return the seconds of both products of the routed experts, *width* wide, for *tokens* that hit so many."""
        model = self.model
        routed = tokens * model.experts_per_token
        narrow = model.dtype_bytes == 1 and self.kernels.experts_fp8 is not None
        tuned = not narrow and f"{model.experts}x{width}" in self.kernels.tuned
        name = "experts_fp8" if narrow else "experts_tuned" if tuned else "experts"
        roof = self.kernels.roof(name, model.name)
        tile, columns = roof.cut(routed / model.experts)
        size = 1 if narrow else 2
        work = grouped(routed, hit, model.hidden, width, size, tile, columns, self.peaks.processors, self.even)
        return roof.seconds(work, self.peaks, narrow, model.experts)

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
        return roof.seconds(Work(4.0 * tokens * elements, nbytes), self.peaks)

    def _pointwise(self, name: str, rows: int, width: int) -> float:
        """Return the seconds of the operator *name*, which moves *width* elements of 2 bytes a row.

        Published tables have none of these: a forward by them is short by so much.
        """
        roof: Roof | None = getattr(self.kernels, name)
        if roof is None:
            return 0.0
        # of norms a row is one tile, whose elements are added up one after the other
        work = Work(0.0, 2.0 * rows * width, depth=self.model.hidden if name == "norm" else 0.0)
        more = rows > 1 if name == "rotary" else name == "routing" and rows * self.model.experts_per_token > SORTED
        return roof.seconds(work, self.peaks) + (roof.merge if more else 0.0)

    def _allreduce(self, tokens: int) -> float:
        if self.tp == 1:
            return 0.0
        ring = self.kernels.ring(self.tp)
        return ring.latency + 2.0 * tokens * self.model.hidden / ring.rate
