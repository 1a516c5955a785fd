# SPDX-License-Identifier: Apache-2.0
"""What a configuration says about the time of a forward."""

from __future__ import annotations

from dataclasses import dataclass

from pdsim.compute.kernels import Kernels
from pdsim.core.units import Rate, Seconds, not_negative

__all__ = ["Compute"]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How long a forward takes: a roofline with an achieved share of the peak and a constant per iteration.

    Shares are of the hardware's own peak and rate (`pdsim.hardware.machine.Gpu`), so that a profile of one GPU can
    be used for another, as *assumed*.  Raise a `ValueError` for shares outside 0 to 1 and a *blend* outside 1 to 64.
    """

    flops_share: float = 0.55  # of the peak, that linear layers reach
    attention_share: float = 0.0  # of the peak, that attention reaches; 0 is as *flops_share*
    prefix_share: float = 0.0  # the same of attention to tokens of earlier chunks; 0 is as *attention_share*
    attention_padded: bool = False  # of a batch, every sequence is computed up to the rows of the longest
    memory_share: float = 0.8  # of the memory's rate, at which keys and values are read
    sequence_share: float = 0.0  # of that rate, which one sequence of a decode batch reaches at most; 0 is no limit
    weight_share: float = 0.0  # the same of weights; 0 is as *memory_share*
    blend: float = 0.0  # the norm of the two roofs, 1 adds them; 0: the higher one counts alone
    allreduce_rate: Rate = 0.0  # bytes/s of a tensor-parallel all-reduce; 0 takes the interconnect's rate
    allreduce_latency: Seconds = 12e-6
    exchange_share: float = 1.0  # of a card's rate, that tokens on their way to experts reach
    # of a dispatch, and of a combine (DeepEP's table, tests/serving/test_experts.py)
    exchange_latency: Seconds = 23e-6
    exchange_overlap: bool = False  # the halves of a batch take turns: one computes while the other's tokens travel
    overhead: Seconds = 2e-3  # of an iteration, scheduler and kernel launches
    scale: float = 1.0  # a loopback run emulates compute at this fraction of its length
    source: str = ""  # of the shares: "measured: …"; without one they are assumed
    measured_of: tuple[str, ...] = ()  # the models (`conf/model`) that it holds for; of others it is assumed
    kernels: Kernels | None = None  # times of operators, from pdsim profile, in place of the shares

    def __post_init__(self) -> None:
        for name in ("flops_share", "memory_share", "exchange_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"compute.{name} must be > 0 and <= 1, a share of the peak, got {getattr(self, name)}"
                )
        for name in ("attention_share", "prefix_share", "sequence_share", "weight_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"compute.{name} must be >= 0 and <= 1, got {getattr(self, name)}")
        if self.blend and not 1.0 <= self.blend <= 64.0:
            raise ValueError(f"compute.blend must be 0 or from 1 to 64, got {self.blend}")
        not_negative(
            "compute",
            allreduce_rate=self.allreduce_rate,
            allreduce_latency=self.allreduce_latency,
            exchange_latency=self.exchange_latency,
            overhead=self.overhead,
            scale=self.scale,
        )
