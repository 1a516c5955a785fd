# SPDX-License-Identifier: Apache-2.0
"""How a model is divided among the ranks of the prefill and the decode side."""

from __future__ import annotations

from dataclasses import dataclass

from pdsim.core.units import PositiveInt

__all__ = ["Parallel", "Side"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """The prefill or the decode side: *instances* engines of ``tp * pp * cp`` ranks, one GPU each.

    *tp* is the tensor parallelism of the whole engine.  With data-parallel attention, *dp* > 1, its ranks form *dp*
    attention groups of ``tp // dp`` ranks a stage, each with requests, pages and a scheduler of its own, as in
    SGLang: dp=4 with tp=4 is four groups of attention tp 1.

    With expert parallelism, *ep* equal to *tp*, each rank has whole experts and tokens travel to them
    (`pdsim.compute.forward`); with 1, the experts are divided as other weights are.
    """

    tp: PositiveInt
    instances: PositiveInt = 1
    pp: PositiveInt = 1  # pipeline stages
    cp: PositiveInt = 1  # context-parallel ranks
    dp: PositiveInt = 1  # attention groups
    ep: int = 1  # ranks that the experts are spread over

    @property
    def attention_tp(self) -> int:
        """Tensor-parallel ranks of an attention group."""
        return self.tp // self.dp

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.pp * self.cp * self.instances


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the GPUs are divided: prefill instances take the first, decode instances the next."""

    prefill: Side
    decode: Side
