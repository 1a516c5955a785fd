# SPDX-License-Identifier: Apache-2.0
"""How long a forward takes: a roofline with the share of the peaks that kernels reach, plus a constant an iteration.

All quantities are of one tensor-parallel rank; the ranks of an instance compute alike.  `docs/model.md` derives the
formulas and says what they leave out.

Tokens that travel to experts on other ranks add an `Exchange`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdsim.compute.shapes import four_bit_parameters
from pdsim.kv.layout import KvShape, StateShape, Tensor
from pdsim.models.llm import Llm, Side

HOST_FLOPS = 1e12
"""Assumed for a rank on a machine without GPUs, where compute is emulated anyway: `compute.scale` is the knob."""


def kv_shape(model: Llm) -> KvShape:
    """Return what *model* keeps of a token, for all layers together; shares of ranks follow from it."""
    latent = model.latent_dim * model.kv_bytes if model.attention == "mla" else 0
    hybrid = model.hybrid
    mamba: tuple[Tensor, ...] = ()
    if "m" in hybrid.pattern:
        conv = Tensor(hybrid.conv_groups, hybrid.conv_width * model.dtype_bytes)
        mamba = (conv, Tensor((hybrid.ssm_heads,), hybrid.ssm_head_elements * hybrid.ssm_dtype_bytes))
    state = StateShape(hybrid.pattern, hybrid.window if "w" in hybrid.pattern else 0, mamba, hybrid.index_bytes)
    return KvShape(model.layers, model.kv_heads, model.head_dim * model.kv_bytes, latent, state)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the experts of other ranks add to a forward; without values, nothing.

    >>> Exchange(network=1e6, port=2e6, network_rate=1e9, port_rate=1e10, latency=1e-3).seconds(10)
    0.011
    """

    network: float = 0.0  # bytes that a token sends through its rank's card, in all layers; as many come in
    port: float = 0.0  # the same through its rank's port of the interconnect
    network_rate: float = 1.0  # bytes/s
    port_rate: float = 1.0  # bytes/s
    latency: float = 0.0  # seconds an iteration, of all its dispatches and combines
    overlap: bool = False  # two halves of a batch take turns: one computes while the tokens of the other travel

    def __bool__(self) -> bool:
        """Return whether tokens travel at all."""
        return bool(self.network or self.port)

    def seconds(self, tokens: float) -> float:
        """Return how long those of *tokens* of a rank take when nothing else uses the links."""
        if not (self.network or self.port):
            return 0.0
        return max(tokens * self.network / self.network_rate, tokens * self.port / self.port_rate) + self.latency


@dataclass(frozen=True, kw_only=True)
class ForwardTime:
    """The coefficients of a rank's forward.

    `pdsim.compute.forward.forward_time` makes them.  Times are affine in what a decode batch has of context, so that
    many steps have a closed form: ``step(batch) + context * tokens`` (and `sequence` for the longest).
    """

    token_flops: float  # linear layers, a token
    pair_flops: float  # attention of prefill, a query and a key
    decode_pair_flops: float  # the same of decode; more with MLA, whose queries meet latent rows there
    weight_bytes: float  # of the rank
    token_weight_bytes: float  # that one token uses; fewer than all in a mixture of experts
    expert_bytes: float  # of *weight_bytes*, routed experts; 0 if there are none, or nothing is known of them
    expert_share: float  # of routed experts, that one token uses
    groups: int  # attention groups, whose tokens read the experts together
    kv_bytes: float  # of a token
    flops: float  # a second, of linear layers
    attention_flops: float  # a second
    prefix_flops: float  # a second, of attention to tokens of earlier iterations
    padded: bool  # attention of a batch computes as many rows of each sequence as of the longest
    memory_rate: float  # bytes a second, of keys and values
    sequence_rate: float  # bytes a second, of those of one sequence in a decode step; infinity: as *memory_rate*
    weight_rate: float  # bytes a second
    blend: float  # the norm of compute and memory; 0: the longer one counts alone
    token_allreduce: float  # seconds a token, all layers
    allreduce: float  # seconds an iteration, all layers
    overhead: float  # seconds an iteration
    scale: float  # of the whole
    stages: int = 1  # of a pipeline, that a token passes one after the other; the rest is of one of them
    exchange: Exchange = field(default_factory=Exchange)  # tokens on their way to experts of other ranks
    graph_tokens: int = 0  # of an iteration that is launched as one

    def launching(self, tokens: int) -> float:  # noqa: ARG002
        """Return 0: an engine knows what launching kernels takes (`HostCosts.launch`)."""
        return 0.0

    def prefill(self, pieces: Iterable[tuple[int, int]], mean: int = 0, ahead: float = 0.0) -> float:  # noqa: ARG002
        """Return the seconds of an iteration over *pieces*, each with so many tokens of context and so many new.

        Rows that pad a sequence to the longest of the batch meet all of its keys, new ones and those of the context.
        Of one stage: the next iteration may begin then, and the first has passed the last one *stages* times as
        late.
        """
        longest = 0
        if self.padded:
            pieces = list(pieces)
            longest = max(new for _, new in pieces)
        tokens = context = pairs = prefix = 0
        for before, new in pieces:
            tokens += new
            context += before
            prefix += new * before
            pairs += new * (new + 1) // 2  # causal: the i-th new token sees before + i keys
            if longest > new:
                pairs += (longest - new) * new
                prefix += (longest - new) * before
        if self.prefix_flops == self.attention_flops:
            pairs, prefix = pairs + prefix, 0
        kv = (context + tokens) * self.kv_bytes
        tokens = mean or tokens
        compute = self._sum(tokens * self.token_flops, self.flops, pairs * self.pair_flops, self.attention_flops)
        if prefix:
            compute += prefix * self.pair_flops / self.prefix_flops
        memory = self._sum(self._weights(tokens), self.weight_rate, kv, self.memory_rate)
        return self._total(self._roof(compute, memory), tokens)

    def step(self, batch: int) -> float:
        """Return the seconds of a decode iteration of *batch* requests, without those for their context.

        With pipeline stages as many parts of the batch are under way, one in each, and a request's next token comes
        when its part has passed all of them.
        """
        stage = -(-batch // self.stages)
        parts = 2 if self.exchange and self.exchange.overlap else 1  # each of which reads the weights
        share = stage / parts
        linear = self._roof(share * self.token_flops / self.flops, self._weights(share) / self.weight_rate)
        return self.stages * self._total(parts * linear, stage)

    def context_of(self, batch: int) -> float:  # noqa: ARG002
        """Return the seconds that a token of context adds to a decode iteration of *batch* requests: `context`."""
        return self.context

    @property
    def context(self) -> float:
        """Seconds that a token of context adds to a decode iteration: its keys and values are read once."""
        return self.scale * max(self.kv_bytes / self.memory_rate, self.decode_pair_flops / self.attention_flops)

    @property
    def sequence(self) -> float:
        """Seconds that a token of the longest context alone keeps a decode iteration; 0 without a limit of its own.

        A decode kernel splits a sequence among a bounded number of thread blocks (Triton's in SGLang: 8 a head).
        So a few sequences leave most of the memory's rate unused, and the iteration waits for the longest of them.
        """
        return self.scale * self.kv_bytes / self.sequence_rate

    def _total(self, computing: float, tokens: int) -> float:
        alone = computing + tokens * self.token_allreduce + self.allreduce
        travelling = self.exchange.seconds(tokens)
        both = max(alone, travelling) if self.exchange.overlap else alone + travelling
        return self.scale * (both + self.overhead)

    @staticmethod
    def _sum(one: float, rate: float, other: float, other_rate: float) -> float:
        return (one + other) / rate if rate == other_rate else one / rate + other / other_rate

    def _roof(self, compute: float, memory: float) -> float:
        # The longer one, or both by their norm.
        if not self.blend:
            return max(compute, memory)
        return float((compute**self.blend + memory**self.blend) ** (1.0 / self.blend))

    def _weights(self, tokens: float) -> float:
        # Of E experts, n tokens that each go to k, independently and evenly, hit E (1 - (1 - k / E)^n) in the mean:
        # each token misses one with probability 1 - k / E.  All groups run at once, so n is the tokens of all of
        # them.
        if not self.expert_bytes:
            return min(self.weight_bytes, tokens * self.token_weight_bytes)
        hit: float = 1.0 - (1.0 - self.expert_share) ** (tokens * self.groups)
        return self.weight_bytes - self.expert_bytes * (1.0 - hit)


def weight_bytes(model: Llm, side: Side) -> float:
    """Return the bytes of weights that a rank of *side* holds.

    Tensor parallelism divides all of them.  With expert parallelism the experts are divided among all ranks and the
    rest among those of an attention group; each of these has it whole.
    """
    four = four_bit_parameters(model) if model.mlp_dtype else 0.0
    total = four * model.mlp_bytes + (model.parameters - four) * model.dtype_bytes
    if side.ep == 1:
        return total / side.tp / side.pp
    experts = expert_parameters(model) * model.mlp_bytes
    return (experts / side.tp + (total - experts) / side.attention_tp) / side.pp


def expert_parameters(model: Llm) -> float:
    """Return how many of the parameters of *model* are routed experts'.

    Of E experts a token uses k, and all the rest: ``parameters - active`` are those of E - k experts of each layer.
    """
    if not model.experts:
        return 0.0
    return (model.parameters - model.active) * model.experts / (model.experts - model.experts_per_token)
