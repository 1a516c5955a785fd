# SPDX-License-Identifier: Apache-2.0
"""The shape of a model: what its layers keep, compute and weigh, and how it is divided among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pdsim.core.units import Count, NotNegativeInt, PositiveInt

DTYPES = {"bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp32": 4}
"""Bytes of an element by the name of its type; of those of one size, the first is the one usually meant."""
FOUR_BITS = {"nvfp4": 9 / 16, "mxfp4": 17 / 32, "int4": 33 / 64}
"""Bytes of a weight of 4 bits with its share of a scale, by the name of its type: 8 bits for 16 weights in NVFP4,
for 32 in MXFP4 (OCP Microscaling Formats 1.0), and 16 bits for 128 in AWQ and GPTQ."""


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """What a model keeps beside full attention's keys and values; without values, nothing.

    *pattern* names the kind of each layer, repeated as often as it takes: ``a`` full attention, ``w`` attention over
    the last *window* tokens, ``m`` a mamba (linear attention, state space) layer.
    """

    pattern: str = "a"  # a letter a layer, repeated: a full attention, w sliding window, m mamba
    window: NotNegativeInt = 0  # tokens
    # channels of a mamba layer's convolution, of each part that is sharded by itself
    conv_groups: tuple[int, ...] = ()
    conv_width: int = 0  # past inputs that it keeps of each channel: the kernel less one
    ssm_heads: int = 0  # of a mamba layer's recurrent state
    ssm_head_elements: int = 0  # of the state in one head
    ssm_dtype_bytes: int = 4  # bytes of an element of that state
    index_bytes: NotNegativeInt = 0  # of a token's row in the index of sparse attention, in one layer


@dataclass(frozen=True, kw_only=True)
class Llm:
    """The shape of a language model: `conf/model`, from its ``config.json``."""

    name: str  # as results call it
    parameters: Annotated[Count, "> 0"]  # in all
    active: Annotated[Count, "> 0"]  # used for one token; equal to *parameters* unless a mixture of experts
    layers: Annotated[int, "> 0 and <= 10000"]  # num_hidden_layers of config.json
    hidden: PositiveInt  # hidden_size
    heads: PositiveInt  # of queries: num_attention_heads
    kv_heads: PositiveInt  # before replication over tensor-parallel ranks
    head_dim: PositiveInt  # elements of a head's key or value
    attention: Annotated[str, "one of gqa, mla"] = "gqa"  # K and V per head, or one latent row per token and layer
    latent_dim: int = 0  # elements of that row
    dtype_bytes: PositiveInt = 2  # of a weight, and of a KV element unless *kv_dtype* says otherwise
    kv_dtype: str = ""  # of a KV element: one of `DTYPES`; "" is the first of *dtype_bytes* bytes
    # of weights of experts and MLPs, and of a dense model all layers', where they have 4 bits: `FOUR_BITS`
    mlp_dtype: Annotated[str, "one of '', nvfp4, mxfp4, int4"] = ""
    # of mla: dimensions of the latent row, and of a head's query and key, that carry positions
    rope_dim: NotNegativeInt = 0
    # routed experts of a layer; 0: dense, or unknown, and each token reads *active* parameters more
    experts: int = 0
    experts_per_token: NotNegativeInt = 0  # of them, that a token is routed to
    # of a layer's experts, of which a token's are in the best *groups_per_token*; 0: no groups
    expert_groups: NotNegativeInt = 0
    groups_per_token: int = 0  # groups that a token's experts are in
    dense_layers: NotNegativeInt = 0  # without experts, of a mixture of experts
    context: PositiveInt = 131072  # longest input + output, tokens
    hybrid: Hybrid = field(default_factory=Hybrid)
    # what config.json says besides, for servers of target=live
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def element(self) -> str:
        """The type of a KV element."""
        return self.kv_dtype or next((name for name, size in DTYPES.items() if size == self.dtype_bytes), "other")

    @property
    def mlp_bytes(self) -> float:
        """The bytes of a weight of an expert or an MLP, with its share of a scale."""
        return FOUR_BITS.get(self.mlp_dtype, self.dtype_bytes)

    @property
    def kv_bytes(self) -> int:
        """The bytes of a KV element."""
        return DTYPES.get(self.kv_dtype, self.dtype_bytes)


@dataclass(frozen=True, kw_only=True)
class Side:
    """The prefill or the decode side: *instances* engines of ``tp * pp * cp`` ranks, one GPU each.

    *tp* is the tensor parallelism of the whole engine.  With data-parallel attention, *dp* > 1, its ranks form *dp*
    attention groups of ``tp // dp`` ranks a stage, each with requests, pages and a scheduler of its own, as in
    SGLang: dp=4 with tp=4 is four groups of attention tp 1.

    With expert parallelism, *ep* equal to *tp*, each rank has whole experts and tokens travel to them
    (`pdsim.compute.forward`); with 1, the experts are divided as other weights are.
    """

    tp: PositiveInt  # tensor-parallel ranks of an instance
    instances: PositiveInt = 1  # of this side, alike
    pp: PositiveInt = 1  # pipeline stages
    cp: PositiveInt = 1  # context-parallel ranks
    dp: PositiveInt = 1  # attention groups
    ep: int = 1  # ranks that the experts are spread over

    @property
    def attention_tp(self) -> int:
        """Tensor-parallel ranks of an attention group."""
        return self.tp // self.dp or 1  # dp > tp is refused, once all that follows from it is known

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.pp * self.cp * self.instances


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the GPUs are divided: prefill instances take the first, decode instances the next."""

    prefill: Side
    decode: Side
