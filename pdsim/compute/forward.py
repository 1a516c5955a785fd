# SPDX-License-Identifier: Apache-2.0
"""A rank's forward: what a configuration says of it, what serving asks for, and what answers.

`forward` chooses: a configuration with `Compute.kernels` adds up operators that were measured, another has the
roofline of `pdsim.compute.roofline`.  All quantities are of one tensor-parallel rank.

With expert parallelism each rank of an engine holds whole experts.  In every layer that has experts a rank
dispatches its tokens to the ranks whose experts they are routed to, and combines what comes back (`exchange`).  Two
ways of it are modelled, those of DeepEP (https://github.com/deepseek-ai/DeepEP):

* *by node*, as prefill does: a token crosses the network once for each other node with an expert of it, and is
  passed on there over the interconnect to each rank that has one;
* *direct*, as decode does: a token goes to each of its experts by itself, over the network to those on other nodes.

Routing is taken to be even and independent.  Dispatched tokens are of one byte an element with a scale of four bytes
for 128 of them where weights are of 8 bits or NVFP4, else of the weights' type; what is combined has two bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Protocol, runtime_checkable

from pdsim.compute import tables
from pdsim.compute.kernels import Kernels, Peaks, Roof
from pdsim.compute.lookup import Lookup
from pdsim.compute.roofline import HOST_FLOPS, Exchange, ForwardTime, expert_parameters, kv_shape, weight_bytes
from pdsim.compute.shapes import ATTENTION, LayerShape, Product, layer_shape, product_dtype, products
from pdsim.compute.tiles import SORTED, SPLIT, Work, causal_attention, decode_rows, grouped, product, whole_sequences
from pdsim.core.errors import ConfigError
from pdsim.core.units import NotNegative, NotNegativeInt, Positive, Rate, Seconds, Share
from pdsim.hardware.machine import Machine
from pdsim.models.llm import Llm, Side


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How long a forward takes: a roofline with an achieved share of the peak and a constant per iteration.

    Shares are of the hardware's own peak and rate (`pdsim.hardware.machine.Gpu`), so that a profile of one GPU can
    be used for another, as *assumed*.
    """

    name: str = ""  # as a choice of ``compute``; "auto" is replaced by the one that fits (`pdsim.config.presets`)
    chosen: str = ""  # why auto took it
    gpu: str = ""  # on which it was measured: `pdsim.hardware.machine.Gpu.name`; with kernels theirs counts
    engine: str = ""  # whose kernels, a family such as vllm; none: PyTorch's, or assumed
    flops_share: Annotated[float, "> 0 and <= 1"] = 0.55  # of the peak, that linear layers reach
    attention_share: Share = 0.0  # of the peak, that attention reaches; 0 is as *flops_share*
    prefix_share: Share = 0.0  # the same of attention to tokens of earlier chunks; 0 is as *attention_share*
    attention_padded: bool = False  # of a batch, every sequence is computed up to the rows of the longest
    memory_share: Annotated[float, "> 0 and <= 1"] = 0.8  # of the memory's rate, at which keys and values are read
    sequence_share: Share = 0.0  # of that rate, which one sequence of a decode batch reaches at most; 0 is no limit
    weight_share: Share = 0.0  # the same of weights; 0 is as *memory_share*
    blend: float = 0.0  # the norm of the two roofs, 1 adds them; 0: the higher one counts alone
    allreduce_rate: Rate = 0.0  # bytes/s of a tensor-parallel all-reduce; 0 takes the interconnect's rate
    allreduce_latency: Seconds = 12e-6  # of one, beside its bytes
    # of a card's rate, that tokens on their way to experts reach
    exchange_share: Annotated[float, "> 0 and <= 1"] = 1.0
    # of a dispatch, and of a combine (DeepEP's table, tests/serving/test_experts.py)
    exchange_latency: Seconds = 23e-6
    exchange_overlap: bool = False  # the halves of a batch take turns: one computes while the other's tokens travel
    # how attention groups reach experts, by a table: engines gather all tokens in a node, unless told DeepEP
    exchange_by: Annotated[str, "one of '', deepep, gather"] = ""
    overhead: Seconds = 2e-3  # of an iteration, scheduler and kernel launches
    # of small kernels in turn, that an iteration adds in each layer with experts
    mixed_latency: Seconds = 0.0
    latent_latency: Seconds = 0.0  # the same, in each layer with latent attention
    # times as long as the mean host of data/live (0.6 to 1.5) this one takes to launch an eager prefill from a table
    launch_factor: Positive = 1.0
    # tokens of an iteration up to which prompts run in CUDA graphs, without launches; 0: eager
    graph_tokens: NotNegativeInt = 0
    # kernels of attention: those of the table or profile, or Triton's (SGLang's --attention-backend triton)
    attention: Annotated[str, "one of '', triton"] = ""
    # likewise of products with FP8 weights in blocks, on Blackwell (SGLang's --fp8-gemm-backend)
    fp8_gemm: Annotated[str, "one of '', flashinfer_trtllm"] = ""
    scale: NotNegative = 1.0  # a loopback run emulates compute at this fraction of its length
    source: str = ""  # of the shares: "measured: …"; without one they are assumed
    measured_of: tuple[str, ...] = ()  # the models (`conf/model`) that it holds for; of others it is assumed
    kernels: Kernels | None = None  # times of operators, from pdsim profile, in place of the shares

    @property
    def measured_gpu(self) -> str:
        """The name of the GPU that it was measured on, or nothing."""
        return self.kernels.gpu if self.kernels else self.gpu


def captured(batch: int, twelve: bool = False) -> int:
    """Return the batch of the CUDA graph that a decode step of *batch* replays, padded: 1, 2, 4, or so many times 8.

    vLLM 0.22.1, ``cudagraph_capture_sizes``; SGLang 0.5.12, ``_generate_cuda_graph_batch_sizes``, has *twelve*, too.
    """
    if batch <= 4 or (twelve and 8 < batch <= 12):
        return batch if batch <= 2 else 4 if batch <= 4 else 12
    return -(-batch // 8) * 8


NORM_REDUCED = ("H100", "H200", "B200", "B300", "GB200", "GB300")
"""GPUs on which engines compute a norm in the all-reduce before it: of compute capability 9 and 10."""

_LONGEST = 64 << 8
"""Tokens of an iteration's prompts up to which one curve has all operators; beyond it experts' products split."""

PIECE_LAUNCH = 330e-6
"""Seconds in which a host launches a layer's attention and the CUDA graph around it: data/live, in-sample."""

NETWORK_HOP = 5e-6
"""Seconds of a step of an all-reduce between nodes: NCCL, src/graph/tuning.cc, hwLat of a tree with LL."""

GATHER = 14e-6
"""Seconds of NCCL's all-gather, and of its reduce-scatter, of few tokens on 8 H200 (aiconfigurator, 2.29.2)."""


def between_nodes(machine: Machine, ranks: int) -> tuple[float, float]:
    """Return the seconds that an all-reduce among *ranks* on several nodes takes beyond that of a node, and a byte.

    Each rank adds up its share of a node's sum with those of the other nodes, over its card (NCCL's two levels).
    """
    nodes = -(-ranks // machine.gpus) if machine.gpus else 1
    if nodes == 1 or not machine.nic.count:
        return 0.0, 0.0
    rate = machine.nic.rate * machine.nic.count  # of the node, whose ranks have a share each
    return 2 * math.ceil(math.log2(nodes)) * (NETWORK_HOP + machine.nic.latency), 2 * (nodes - 1) / nodes / rate


@runtime_checkable
class ForwardModel(Protocol):
    """How long the iterations of a rank take, in seconds."""

    def prefill(self, pieces: Iterable[tuple[int, int]], mean: int = 0, ahead: float = 0.0) -> float:
        """Return the seconds of an iteration over *pieces*, each with so many tokens of context and so many new.

        Attention groups have *mean* new tokens each in the mean, 0: as many as these; only attention is of *pieces*.
        The host has begun *ahead* seconds before the device is free.
        """

    def launching(self, tokens: int) -> float:
        """Return the seconds for which the host launches an iteration of so many new *tokens* of prompts."""

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

    Tokens go to experts of other ranks *direct*, or by way of nodes (`exchange`).

    Raise a `ValueError` if *compute* has kernels, but not all that *model* needs.
    """
    if compute.kernels is None:
        return forward_time(model, machine, compute, side, direct)
    return OperatorForward(
        model=model,
        kernels=compute.kernels,
        peaks=peaks(machine),
        tp=side.tp,
        dp=side.dp,
        ep=side.ep,
        share=side.pp * side.cp,
        stages=side.pp,
        kv_bytes=kv_shape(model).token_bytes(side.attention_tp) / (side.pp * side.cp),
        overhead=compute.overhead,
        exchange=exchange(model, machine, compute, side.ep, side.dp, direct)
        if side.ep > 1 < side.dp and not gathers(machine, compute, side)
        else Exchange(),
        node=machine.gpus,
        between={ranks: between_nodes(machine, ranks) for ranks in (side.tp, side.attention_tp)},
        launch_factor=compute.launch_factor,
        graph_tokens=compute.graph_tokens,
        twelve=compute.engine == "sglang",
        triton=compute.attention == "triton" and model.attention == "gqa",
        fp8_gemm=compute.fp8_gemm,
        scale=compute.scale,
    )


def gathers(machine: Machine, compute: Compute, side: Side) -> bool:
    """Return whether every rank of *side* has the tokens of all its attention groups before the experts."""
    return compute.exchange_by == "gather" or (not compute.exchange_by and side.tp <= machine.gpus)


def forward_time(model: Llm, machine: Machine, compute: Compute, side: Side, direct: bool = False) -> ForwardTime:
    """Return the coefficients of *model* on an instance of *side*, whose ranks are on *machine*.

    Stages and context-parallel ranks divide the work.  The groups are taken to be loaded alike, so that each has
    its share of the engine's arithmetic; weights are read once for the tokens of all of them.

    Weights of 8 bits, NVFP4 and MXFP4 are multiplied at the peak of FP8, where the GPU has one; attention is not.

    With expert parallelism tokens travel to their experts, *direct* or by way of nodes, instead of the all-reduce
    after the experts.  Raise a `ConfigError` where they cannot.
    """
    shape, share, tp, group = kv_shape(model), side.pp * side.cp, side.tp, side.attention_tp
    peak = machine.gpu.compute if machine.gpu else HOST_FLOPS
    narrow = model.dtype_bytes == 1 or model.mlp_dtype in ("nvfp4", "mxfp4")
    linear = (machine.gpu.compute_fp8 or peak) if machine.gpu and narrow else peak
    weights = weight_bytes(model, side)
    latency = (model.layers - model.dense_layers) * compute.mixed_latency if model.experts else 0.0
    latency += model.layers * compute.latent_latency if model.attention == "mla" else 0.0
    pairs = 4 * model.head_dim, 4 * model.head_dim  # of a head: the products with keys and with values
    if model.attention == "mla":
        pairs = _mla_pairs(model)
    memory = machine.gpu.memory_rate if machine.gpu else machine.host.memory_rate
    token_allreduce = allreduce = 0.0
    reduced, ring = (2, tp) if side.ep == 1 else (1, group)  # attention and MLP need one a layer each
    if ring > 1:
        hops, byte = between_nodes(machine, ring)
        near = min(ring, machine.gpus or ring)
        links = near - 1 if machine.interconnect.kind == "mesh" else 1  # of a mesh all carry a share at once
        rate = compute.allreduce_rate or links * machine.interconnect.rate or machine.host.tcp_rate
        # 2 (n - 1) / n of the activations leave each rank, in 16 bits also with FP8 weights
        sent = reduced * model.layers * 2 * model.hidden / share
        token_allreduce = sent * (2 * (near - 1) / near / rate + byte)
        allreduce = reduced * model.layers * (compute.allreduce_latency + hops) / side.pp
    return ForwardTime(
        token_flops=2 * model.active / group / share,
        pair_flops=pairs[0] * shape.attention_layers * model.heads / group / share,
        decode_pair_flops=pairs[1] * shape.attention_layers * model.heads / group / share,
        weight_bytes=weights,
        token_weight_bytes=weights * (model.active / model.parameters),
        expert_bytes=expert_parameters(model) * model.mlp_bytes / tp / side.pp,
        expert_share=model.experts_per_token / model.experts if model.experts else 0.0,
        groups=side.dp,
        kv_bytes=shape.token_bytes(group) / share,
        flops=linear * compute.flops_share,
        attention_flops=peak * (compute.attention_share or compute.flops_share),
        prefix_flops=peak * (compute.prefix_share or compute.attention_share or compute.flops_share),
        padded=compute.attention_padded,
        memory_rate=memory * compute.memory_share,
        sequence_rate=memory * compute.memory_share * compute.sequence_share if compute.sequence_share else math.inf,
        weight_rate=memory * (compute.weight_share or compute.memory_share),
        blend=compute.blend,
        token_allreduce=token_allreduce,
        allreduce=allreduce,
        overhead=compute.overhead + latency / side.pp,
        scale=compute.scale,
        stages=side.pp,
        exchange=exchange(model, machine, compute, side.ep, side.dp, direct) if side.ep > 1 else Exchange(),
        graph_tokens=compute.graph_tokens,
    )


def _mla_pairs(model: Llm) -> tuple[int, int]:
    # Prefill expands the latent row to a key of ``head_dim + rope_dim`` and a value of *head_dim* elements.  Decode
    # absorbs the expansion into the query and multiplies it with the row itself, of *latent_dim*, and the sum of
    # values is of the row without its positions (DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C): 640
    # and 2,176 with DeepSeek-V3's 128, 64 and 576, where a head of grouped-query attention of that size takes 512.
    prefill = 2 * (model.head_dim + model.rope_dim + model.head_dim)
    return prefill, 2 * (model.latent_dim + model.latent_dim - model.rope_dim)


def peaks(machine: Machine) -> Peaks:
    """Return the peaks that kernels have shares of: those of the GPU, or of a host where compute is emulated."""
    if machine.gpu is None:
        return Peaks(HOST_FLOPS, HOST_FLOPS, machine.host.memory_rate)
    gpu = machine.gpu
    return Peaks(gpu.compute, gpu.compute_fp8 or gpu.compute, gpu.memory_rate, gpu.processors)


@dataclass(frozen=True, kw_only=True)
class OperatorForward:
    """The forward of a rank as the sum of its operators; the same interface as `pdsim.compute.roofline.ForwardTime`.

    Attention is divided among ``tp // dp`` ranks, everything else among *tp*, whose tokens are those of *dp* groups.
    Stages and context-parallel ranks, *share*, divide the work.  With expert parallelism a rank computes what is
    routed to its experts, which is as much work in the mean; without attention groups every rank has all tokens, so
    that the sum after the experts stays, and with them every rank gathers all tokens, or they travel (*exchange*).
    """

    model: Llm
    kernels: Kernels
    peaks: Peaks
    tp: int = 1
    dp: int = 1
    ep: int = 1
    share: int = 1
    stages: int = 1  # of a pipeline, see `pdsim.compute.roofline.ForwardTime.step`
    kv_bytes: float  # of a token, on this rank
    overhead: float = 0.0  # seconds an iteration
    exchange: Exchange = field(default_factory=Exchange)  # tokens on their way to experts of other ranks
    node: int = 0  # GPUs of one
    between: Mapping[int, tuple[float, float]] = field(default_factory=dict)  # by ranks, `between_nodes`
    launch_factor: float = 1.0  # of eager launches and of *prompt_host*
    graph_tokens: int = 0  # of an iteration that is launched as one
    twelve: bool = False  # whether a step of 9 to 12 requests has a CUDA graph of its own
    triton: bool = False  # whether attention is Triton's instead of the table's
    fp8_gemm: str = ""  # whose products with FP8 weights, instead of the table's
    scale: float = 1.0
    _heads_of: dict[int, float] = field(default_factory=dict, repr=False)  # seconds of the head, by sequences
    _steps_of: dict[int, float] = field(default_factory=dict, repr=False)  # likewise of decode iterations

    @cached_property
    def shape(self) -> LayerShape:
        """The widths of the model's layers."""
        return layer_shape(self.model)

    def __post_init__(self) -> None:
        self.step(1)  # refuses a model with operators that nobody measured
        self.prefill([(0, 1)])

    # --- what serving asks for -------------------------------------------------------------------------------------

    def prefill(self, pieces: Iterable[tuple[int, int]], mean: int = 0, ahead: float = 0.0) -> float:
        """Return the seconds of an iteration over *pieces*: see `ForwardModel.prefill`."""
        taken = list(pieces)
        tokens = sum([new for _, new in taken])
        linear = self._prompts(mean or tokens, len(taken))
        if mean and mean != tokens:
            linear += self._own(tokens) - self._own(mean)
        seconds = (linear + self._attention_layers * self._attention(taken)) / self.share
        seconds = max(seconds, self.launching(tokens) - ahead)
        return self.scale * (seconds + self.launch_factor * self.kernels.prompt_host + self.overhead)

    def launching(self, tokens: int) -> float:
        """Return the seconds for which the host launches an iteration of so many new *tokens* of prompts."""
        if tokens > self.graph_tokens:
            return self._launching
        return self.launch_factor * self.model.layers * PIECE_LAUNCH / self.share

    def step(self, batch: int) -> float:
        """Return the seconds of a decode iteration of *batch* requests, without those for their context."""
        seconds = self._steps_of.get(batch)
        if seconds is None:
            seconds = self._steps_of[batch] = self._step(batch)
        return seconds

    def _step(self, batch: int) -> float:
        part = -(-batch // self.stages)
        if self._measured is not None:
            attention = self._measured.decode(part)[0]
        else:
            roof = self._decode_roof()
            attention = roof.launch + (0.0 if self._whole(part) else roof.merge)
        rows = part if self._table is None else captured(part, self.twelve)
        linear = self._linear(rows, rows, absorbed=True, step=True) - self._saved(rows)
        device = (linear + self._attention_layers * attention) / self.share
        return self.stages * self.scale * (device + self.overhead)

    def context_of(self, batch: int) -> float:
        """Return the seconds that a token of context adds to a decode iteration of *batch* requests."""
        return self._token(-(-batch // self.stages))

    @cached_property
    def context(self) -> float:
        """The most seconds that a token of context adds to a decode iteration, of whatever batch."""
        if self._measured is not None:
            return max(self._token(2**power) for power in range(10))
        heads, processors = self._kv_heads, self.peaks.processors
        # the fewest sequences that are not split, and that take three turns
        whole = [math.ceil(SPLIT * processors / heads), 2 * processors // heads + 1] if processors else []
        return max(self._token(sequences) for sequences in (1, *whole))

    @cached_property
    def sequence(self) -> float:
        """Seconds that a token of the longest context alone keeps a decode iteration.

        Tiles of a split sequence are added up one after the other, so a few sequences leave memory idle.
        """
        if self._measured is not None:
            return 0.0
        roof = self._decode_roof()
        return self.scale * self._attention_layers * roof.walk if self.model.attention != "mla" else 0.0

    # --- parts -----------------------------------------------------------------------------------------------------

    @cached_property
    def _table(self) -> Lookup | None:
        if not (name := self.kernels.table):
            return None
        from pdsim.compute import published  # which is long, and a roofline does without

        table = published.table(name) if name.startswith(published.WHOLE) else tables.read(name)
        return Lookup(
            table, self.model, self._heads, self._kv_heads, self.kernels.imbalance, self.kernels.prefill_by_heads,
            fused=self.graph_tokens > 0 and not self.twelve, fp8_gemm=self.fp8_gemm,
        )  # fmt: skip

    @cached_property
    def _measured(self) -> Lookup | None:  # attention
        return None if self.triton else self._table

    def _prompts(self, tokens: int, sequences: int) -> float:
        # By a table, what depends on the tokens is one curve, and what on the sequences, the head, is kept: a call
        # takes a tenth of the time.
        absorbed = self.kernels.absorbed_prefill
        if self._table is None or not 1 < tokens <= _LONGEST:
            return self._linear(tokens, sequences, absorbed)
        if (head := self._heads_of.get(sequences)) is None:
            head = self._linear(1, sequences, absorbed) - self._linear(1, 1, absorbed)
            self._heads_of[sequences] = head
        return self._by_tokens(tokens) + head

    def _own(self, tokens: int) -> float:
        # the products of *tokens* that only their attention group computes
        own = (each for each in self._products[self.kernels.absorbed_prefill] if each[0].name in ATTENTION)
        return math.fsum(one.times * self.gemm(tokens, one.n, one.k, dtype) for one, dtype in own)

    @cached_property
    def _by_tokens(self) -> tables.Curve:
        sizes = [*range(1, 65), *(round(64 * 2.0 ** (step / 16)) for step in range(1, 16 * 8 + 1))]
        assert sizes[-1] == _LONGEST
        seconds = [self._linear(size, 1, self.kernels.absorbed_prefill) for size in sizes]
        return tables.Curve(sizes, seconds, _LONGEST, "a forward without attention")

    @property
    def _module(self) -> bool:
        return self._table is not None and self._table.module

    @cached_property
    def _launching(self) -> float:
        kernels, layers = self.kernels, self.model.layers
        mixed = layers - self.shape.dense if self.model.experts else 0
        eager = (layers - mixed) * kernels.layer_launch + mixed * (kernels.mixed_launch or kernels.layer_launch)
        if self.model.attention == "mla":  # projections, norms and quantisations: a dense layer's launches more
            eager += layers * kernels.layer_launch
        scaled = sum(one.times for one, dtype in self._products[kernels.absorbed_prefill] if dtype == "fp8")
        apart = -kernels.fused_saving if self.graph_tokens else kernels.scale_launch  # torch.compile fuses it
        return self.launch_factor * (eager + scaled * apart) / self.share

    def _saved(self, rows: int) -> float:
        # What a CUDA graph of a step hides.  Shared experts run on a stream beside the router and the routed ones,
        # or are one of those.  The norm before a product is in the all-reduce before it.  SGLang 0.5.12 does both:
        # deepseek_v2.py, forward_normal_dual_stream; server_args.py, enable_flashinfer_allreduce_fusion.
        model = self.model
        if self._table is None or not model.experts:
            return 0.0
        seconds = math.fsum(
            one.times * self.gemm(rows * self.dp, one.n, one.k, dtype)
            for one, dtype in self._products[True]
            if one.name.startswith("shared")
        )
        within = 1 < self.tp <= (self.node or self.tp)
        if within and self.dp == 1 and self.kernels.gpu in NORM_REDUCED:
            seconds += 2 * model.layers * self._pointwise("norm", rows, 4 * model.hidden)
        return seconds

    @cached_property
    def _attention_layers(self) -> int:
        pattern = self.model.hybrid.pattern
        return max(1, round(self.model.layers * pattern.count("a") / len(pattern)))

    @property
    def _heads(self) -> int:
        return max(1, self.model.heads // (self.tp // self.dp))

    @property
    def _kv_heads(self) -> int:
        return max(1, self.model.kv_heads // (self.tp // self.dp))

    def _attention(self, pieces: Sequence[tuple[int, int]]) -> float:
        if self._measured is not None:
            return self._measured.prefill(pieces)
        model, heads = self.model, self._heads
        if self.triton:
            return self._triton_prefill(pieces)
        if model.attention == "mla":
            width, shared, name = 2 * model.head_dim + model.rope_dim, heads, "mla_prefill"
            if self.kernels.absorbed_prefill:
                width, shared = 2 * model.latent_dim - model.rope_dim, 1
            token_bytes = 2.0 * shared * width
        else:
            width, name = 2 * model.head_dim, "prefill"
            token_bytes = int(self.kv_bytes * self.share / self._attention_layers)
        roof = self.kernels.roof(name, model.name)
        work = causal_attention(pieces, heads, width, token_bytes, roof.tile, self.peaks.processors)
        return roof.seconds(work, self.peaks) + (roof.merge if any(before for before, _ in pieces) else 0.0)

    def _triton_prefill(self, pieces: Sequence[tuple[int, int]]) -> float:
        # SGLang 0.5.12, triton_ops/extend_attention.py: every sequence has as many rows as the longest, and tokens
        # of earlier chunks are gathered one by one.
        longest = max(new for _, new in pieces)
        pairs = sum(new * (new + 1) // 2 + (longest - new) * new for _, new in pieces)
        prefix = sum(longest * before for before, _ in pieces)
        pair, name = 4.0 * self._heads * self.model.head_dim, self.model.name
        own, far = self.kernels.roof("triton_prefill", name), self.kernels.roof("triton_prefix", name)
        seconds = own.seconds(Work(pair * pairs, 0.0), self.peaks)
        return seconds + (far.seconds(Work(pair * prefix, 0.0), self.peaks) if prefix else 0.0)

    def _decode_roof(self) -> Roof:
        if self.triton:
            return self.kernels.roof("triton_decode", self.model.name)
        return self.kernels.roof("mla_decode" if self.model.attention == "mla" else "decode", self.model.name)

    def _whole(self, sequences: int) -> bool:
        return bool(self._decode_roof().tile) and whole_sequences(sequences, self._kv_heads, self.peaks.processors)

    def _token(self, sequences: int) -> float:
        if self._measured is not None:
            return self.scale * self._attention_layers * self._measured.decode(sequences)[1] / self.share
        roof, layers, model = self._decode_roof(), self._attention_layers, self.model
        if model.attention == "gqa":
            rows = decode_rows(sequences, self._kv_heads, roof.tile, self.peaks.processors)
            width = 2 * model.head_dim
        else:
            rows, width = self._heads, 2 * model.latent_dim - model.rope_dim
        work = Work(2.0 * width * rows / self.share, self.kv_bytes / layers)
        return self.scale * layers * (roof.seconds(work, self.peaks) - roof.launch)

    def _linear(self, tokens: int, sequences: int, absorbed: bool, step: bool = False) -> float:
        model, shape, every = self.model, self.shape, tokens * self.dp
        total = 0.0
        for one, dtype in self._products[absorbed]:
            rows = tokens if one.name in ATTENTION else every  # of one group, or of all
            rows = sequences if one.name == "head" else rows
            total += one.times * self.gemm(rows, one.n, one.k, dtype)
            if dtype == "fp8" and self._table is not None:
                total += one.times * self._table.quantize(rows, one.k)
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
        if self._table is not None:
            total += self._beside(tokens, sequences)
        if mixed:
            total += mixed * self.experts(every, self._hit(every), shape.expert // self.tp, step)
            total += mixed * self._pointwise("routing", every, 6 * model.experts_per_token * model.hidden)
        total += model.layers * self._allreduce(tokens, self.tp // self.dp)
        # Groups gather their tokens before an MLP: those of prompts in a sum, as they differ in number, of a step by
        # NCCL's all-gather, which with its reduce-scatter is one (SGLang 0.5.12, layers/dp_attention.py).
        sum_of_all = self._allreduce(every, self.tp)
        if self.dp > 1 and not self.exchange:
            sum_of_all = sum_of_all - self._allreduce(1, self.tp) + 2 * GATHER if step else 2 * sum_of_all
        total += (dense if self.exchange else model.layers) * sum_of_all
        return total + self.exchange.seconds(tokens)

    def _beside(self, tokens: int, sequences: int) -> float:
        # What tables lack beside norms and activations: of latent attention two norms of low ranks, positions and
        # the store of the row, a layer; the embedding; and samples of the logits, which are read and written as four
        # bytes about twice, by some six kernels.
        model, shape, total = self.model, self.shape, 0.0
        if model.attention == "mla" and not self._module:
            ranks = shape.query_rank + model.latent_dim
            total += 2 * self._pointwise("norm", tokens, 2 * ranks)
            total += self._pointwise("rotary", tokens, 2 * (self._heads * model.rope_dim + model.latent_dim))
            total *= model.layers
        if (small := self.kernels.activation) is None:
            return total
        moved = Work(0.0, 4.0 * tokens * model.hidden + 16.0 * sequences * shape.vocabulary)
        return total + 6 * small.launch + small.seconds(moved, self.peaks)

    @cached_property
    def _products(self) -> dict[bool, list[tuple[Product, str]]]:
        model = self.model
        by_kind: dict[bool, Iterable[Product]] = {
            each: products(model, self.tp, self.tp // self.dp, absorbed=each) for each in (False, True)
        }
        if self._module:
            by_kind = {each: [one for one in by_kind[each] if one.name not in ATTENTION] for each in by_kind}
        return {each: [(one, product_dtype(model, one.name)) for one in by_kind[each]] for each in by_kind}

    def gemm(self, rows: int, n: int, k: int, dtype: str) -> float:
        """Return the seconds of a product of *rows* by *k* with *k* by *n*, weights of *dtype* (`product_dtype`)."""
        if self._table is not None:
            return self._table.gemm(rows, n, k, dtype)
        narrow = dtype != "bf16" and self.kernels.gemm_fp8 is not None
        roof = self.kernels.roof("gemm_fp8" if narrow else "gemm", self.model.name)
        work = product(rows, n, k, 1 if narrow else 2, roof.tile, roof.columns, self.peaks.processors)
        seconds = roof.seconds(work, self.peaks, narrow)
        return seconds * self.kernels.correction(n, k, narrow, rows)

    def experts(self, tokens: int, hit: float, width: int, step: bool = False) -> float:
        """Return the seconds of both products of the routed experts, *width* wide, for *tokens* that hit so many.

        A table has times of its own for a decode *step* (`Lookup.experts`).
        """
        if self._table is not None:
            return self._table.experts(tokens, width, self.ep, step)
        model = self.model
        routed = tokens * model.experts_per_token
        narrow = model.mlp_bytes <= 1 and self.kernels.experts_fp8 is not None
        tuned = not narrow and f"{model.experts}x{width}" in self.kernels.tuned
        name = "experts_fp8" if narrow else "experts_tuned" if tuned else "experts"
        roof = self.kernels.roof(name, model.name)
        tile, columns = roof.cut(routed / model.experts)
        size = 1 if narrow else 2
        work = grouped(routed, hit, model.hidden, width, size, tile, columns, self.peaks.processors, even=False)
        return roof.seconds(work, self.peaks, narrow, model.experts)

    def _hit(self, tokens: int) -> float:
        model = self.model
        return model.experts * (1.0 - (1.0 - model.experts_per_token / model.experts) ** tokens)

    def _absorb(self, tokens: int) -> float:
        if self._table is not None:
            return self._table.absorb(tokens)
        model, rank = self.model, self.model.latent_dim - self.model.rope_dim
        elements = self._heads * model.head_dim * rank
        nbytes = 4 * elements + 4 * tokens * self._heads * (rank + model.head_dim)
        roof = self.kernels.mla_absorb or self.kernels.roof("gemm", model.name)
        return roof.seconds(Work(4.0 * tokens * elements, nbytes), self.peaks)

    def _pointwise(self, name: str, rows: int, width: int) -> float:
        # Published tables have none of these: a forward by them is short by so much.
        roof: Roof | None = getattr(self.kernels, name)
        if roof is None:
            return 0.0
        if name == "rotary" and self.graph_tokens and not self.twelve and (small := self.kernels.activation):
            roof = replace(roof, launch=2 * small.launch)  # torch.compile: one with the norms, one stores rows
        # of norms a row is one tile, whose elements are added up one after the other
        work = Work(0.0, 2.0 * rows * width, depth=self.model.hidden if name == "norm" else 0.0)
        more = rows > 1 if name == "rotary" else name == "routing" and rows * self.model.experts_per_token > SORTED
        return roof.seconds(work, self.peaks) + (roof.merge if more else 0.0)

    def _allreduce(self, tokens: int, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        hops, byte = self.between.get(ranks, (0.0, 0.0))
        far, near = hops + 2.0 * tokens * self.model.hidden * byte, min(ranks, self.node or ranks)
        if self._table is not None:
            return far + self._table.allreduce(tokens, near)
        ring = self.kernels.ring(near)
        return far + ring.latency + 2.0 * tokens * self.model.hidden / ring.rate


# --- experts on other ranks ----------------------------------------------------------------------------------------


SCALES = 4 / 128
"""Bytes of scales for each byte of an FP8 activation (DeepSeek-V3, arXiv 2412.19437, section 3.3: tiles of 128)."""


def exchange(model: Llm, machine: Machine, compute: Compute, ranks: int, groups: int, direct: bool) -> Exchange:
    """Return what *model* exchanges on *machine* with its experts spread over *ranks*, in *groups* attention groups.

    The ranks of a group divide its tokens among them.  Raise a `ConfigError` for a model without experts, more ranks
    than experts, and for GPUs or nodes that nothing joins.
    """
    key = f"parallel.{'decode' if direct else 'prefill'}.ep={ranks}"
    if not model.experts:
        raise ConfigError(f"{key} spreads experts, and model={model.name} has none; leave ep at 1")
    if ranks > model.experts:
        raise ConfigError(f"{key} is more than the {model.experts} experts of a layer; lower tp and ep")
    near = min(ranks, machine.gpus)
    nodes = -(-ranks // near) if near else ranks
    if nodes > 1 and not machine.nic.count:
        raise ConfigError(f"{key} needs {nodes} nodes, and hw={machine.name} has no cards between them")
    if near > 1 and machine.interconnect.kind != "switch":
        raise ConfigError(
            f"{key}: experts are modelled over a switch between GPUs, and hw={machine.name} has "
            f"interconnect.kind={machine.interconnect.kind}; leave ep at 1"
        )
    chosen = model.experts_per_token
    if direct:
        network, port = chosen * (1 - near / ranks), chosen * (near - 1) / ranks
    else:
        network = nodes_hit(model, nodes) * (nodes - 1) / nodes if nodes > 1 else 0.0
        port = ranks * (1 - (1 - 1 / ranks) ** chosen) * (near - 1) / near
    eight = model.dtype_bytes == 1 or model.mlp_dtype == "nvfp4"
    width = model.hidden * ((1 + SCALES) if eight else model.dtype_bytes) + 2 * model.hidden
    layers, share = model.layers - model.dense_layers, groups / ranks
    return Exchange(
        network=layers * share * network * width,
        port=layers * share * port * width,
        network_rate=machine.nic.rate * machine.nic.count / machine.gpus * compute.exchange_share
        if nodes > 1
        else 1.0,
        port_rate=machine.interconnect.rate if near > 1 else 1.0,
        latency=2 * layers * compute.exchange_latency,
        overlap=compute.exchange_overlap,
    )


def nodes_hit(model: Llm, nodes: int) -> float:
    """Return on how many of *nodes*, in the mean, a token has an expert.

    A router that is limited to g of G groups of experts (DeepSeek-V3: 4 of 8) chooses those first.  A node that
    holds whole groups is missed if none of them is chosen; one of several that share a group, if its group is not
    chosen or has none of the token's experts there.
    """
    total, limit, chosen = model.expert_groups, model.groups_per_token, model.experts_per_token
    if not total:
        return float(nodes * (1 - (1 - 1 / nodes) ** chosen))
    if nodes <= total:
        return float(nodes * (1 - (1 - limit / total) ** (total / nodes)))
    return float(nodes * (limit / total) * (1 - (1 - total / nodes) ** (chosen / limit)))
