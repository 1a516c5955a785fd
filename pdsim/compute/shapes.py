# SPDX-License-Identifier: Apache-2.0
"""The matrix products of a model's forward: the widths that `Llm` leaves to its ``config.json``, and what follows.

Widths are those of one tensor-parallel rank.  Where ``hf_config`` has no width of the MLP, it is what the number of
parameters leaves for it, without the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdsim.core.errors import ConfigError
from pdsim.models.llm import Llm

ATTENTION = ("qkv", "qkv_down", "q_up", "kv_up", "out")
"""Products of attention."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What `Llm` does not say of a model's layers."""

    intermediate: int  # width of a dense layer's MLP; 0 if every layer has experts
    dense: int = 0  # layers without experts, of a mixture of experts
    expert: int = 0  # width of a routed expert
    shared: int = 0  # of the shared experts together
    query_rank: int = 0  # of mla: width of the query's low rank
    vocabulary: int = 0  # rows of the embedding and columns of the head; 0: unknown


class Product(NamedTuple):
    """A matrix product: so many rows with a matrix of *k* by *n*, *times* a forward."""

    name: str
    n: int
    k: int
    times: int


def layer_shape(model: Llm) -> LayerShape:
    """Return the widths of *model*'s layers, from `Llm.hf_config` where it has them; raise a `ConfigError`."""
    own = model.hf_config

    def width(name: str) -> int:
        value = own.get(name) or 0  # null where a model has none
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(
                f"model.hf_config.{name} must be a number >= 0, got {value!r}; correct it, or leave it out"
            )
        return int(value)

    vocabulary = width("vocab_size")
    if not model.experts:
        given = width("intermediate_size") or round(_mlp(model, vocabulary) / (3 * model.hidden))
        return LayerShape(intermediate=given, query_rank=width("q_lora_rank"), vocabulary=vocabulary)
    # of E experts a token uses k: what it leaves out is those of E - k experts of each layer
    dense = width("first_k_dense_replace")
    left_out = (model.parameters - model.active) / (model.experts - model.experts_per_token)
    expert = width("moe_intermediate_size") or round(left_out / max(1, model.layers - dense) / (3 * model.hidden))
    return LayerShape(
        intermediate=width("intermediate_size") if dense else 0,
        dense=dense,
        expert=expert,
        shared=width("n_shared_experts") * expert,
        query_rank=width("q_lora_rank"),
        vocabulary=vocabulary,
    )


def four_bit_parameters(model: Llm) -> float:
    """Return how many weights of *model* are of its `Llm.mlp_dtype`."""
    shape = layer_shape(model)
    if not model.experts:
        return model.parameters - 2 * shape.vocabulary * model.hidden
    experts = (model.layers - shape.dense) * (model.experts * shape.expert + shape.shared)
    return 3.0 * model.hidden * (experts + shape.dense * shape.intermediate)


def product_dtype(model: Llm, name: str) -> str:
    """Return the type of the weights of the product *name*: ``bf16``, ``fp8``, or `Llm.mlp_dtype`.

    The head and the router have 16 bits.
    """
    if name in ("head", "router"):
        return "bf16"
    if model.mlp_dtype and not (model.experts and name in ATTENTION):
        return model.mlp_dtype
    return "fp8" if model.dtype_bytes == 1 else "bf16"


def _mlp(model: Llm, vocabulary: int) -> float:
    attention = model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    return max(0.0, (model.active - 2 * vocabulary * model.hidden) / model.layers - attention)


def products(model: Llm, tp: int, attention_tp: int = 0, absorbed: bool = False) -> Iterator[Product]:
    """Yield the products of a forward on one of *tp* ranks, but for those of routed experts.

    Attention is divided among *attention_tp* ranks, by default all.  With latent attention, *absorbed* leaves out
    the expansion of keys and values, as decode does.  The last, ``"head"``, is of the last tokens of sequences only.
    """
    shape, parts = layer_shape(model), attention_tp or tp
    heads, layers = max(1, model.heads // parts), model.layers
    if model.attention == "mla":
        rank = model.latent_dim - model.rope_dim
        query = model.head_dim + model.rope_dim
        yield Product("qkv_down", shape.query_rank + model.latent_dim, model.hidden, layers)
        yield Product("q_up", heads * query, shape.query_rank or model.hidden, layers)
        if not absorbed:
            yield Product("kv_up", 2 * heads * model.head_dim, rank, layers)
    else:
        keys = max(1, model.kv_heads // parts)
        yield Product("qkv", (heads + 2 * keys) * model.head_dim, model.hidden, layers)
    yield Product("out", model.hidden, heads * model.head_dim, layers)
    dense = shape.dense if model.experts else layers
    if dense:
        yield Product("gate_up", 2 * shape.intermediate // tp, model.hidden, dense)
        yield Product("down", model.hidden, shape.intermediate // tp, dense)
    if model.experts:
        yield Product("router", model.experts, model.hidden, layers - dense)
        if shape.shared:
            yield Product("shared_gate_up", 2 * shape.shared // tp, model.hidden, layers - dense)
            yield Product("shared_down", model.hidden, shape.shared // tp, layers - dense)
    if shape.vocabulary:
        yield Product("head", shape.vocabulary // tp, model.hidden, 1)
