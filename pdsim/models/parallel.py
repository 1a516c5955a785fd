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

    def __post_init__(self) -> None:
        if self.tp % self.dp:
            raise ValueError(
                f"parallel.dp must divide tp={self.tp}, whose ranks it divides among groups, got {self.dp}"
            )
        if self.ep not in (1, self.tp):
            raise ValueError(
                f"parallel.ep must be 1 or tp={self.tp}, over all of whose ranks experts go, got {self.ep}"
            )
        if self.ep > 1 and self.pp * self.cp > 1:
            raise ValueError(f"parallel.ep={self.ep} has no stages or context-parallel ranks; leave pp and cp at 1")

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
    """How the GPUs are divided: prefill instances take the first, decode instances the next.

    Raise a `ValueError` for context-parallel decode ranks, and for decode stages that are not those of prefill.
    """

    prefill: Side
    decode: Side

    def __post_init__(self) -> None:
        prefill, decode = self.prefill, self.decode
        if decode.cp != 1:
            raise ValueError(f"decode.cp={decode.cp}: decode ranks are not context-parallel; leave decode.cp at 1")
        if decode.pp not in (1, prefill.pp):
            raise ValueError(
                f"decode.pp={decode.pp} and prefill.pp={prefill.pp}: decode has the stages of prefill or a single "
                f"one; use decode.pp=1 or decode.pp={prefill.pp}"
            )
