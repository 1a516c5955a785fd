# SPDX-License-Identifier: Apache-2.0
"""How long the operators of a forward take on a GPU: what ``pdsim profile`` found, as a configuration has it.

Each operator has a `Roof`: a constant, and the norm of two times, that of its arithmetic and that of its bytes.
Rates are shares of the hardware's own, so that numbers of one GPU say something of another.  `kernel_fit` beside
this module finds them; their errors are in the file that it writes, and `forward` adds them up.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdsim.guards import not_negative
from pdsim.units import Rate, Seconds

__all__ = ["AllReduce", "Correction", "Kernels", "Peaks", "Roof", "shape_key", "tiled"]


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The time of an operator: ``launch`` and the *blend*-norm of arithmetic and bytes at shares of the peaks.

    A share of 0 leaves its part out.  Raise a `ValueError` for negative numbers and a *blend* below 1.
    """

    launch: Seconds = 0.0  # seconds of a call that does next to nothing
    flops_share: float = 0.0  # of the peak
    memory_share: float = 0.0  # of the memory's rate
    blend: float = 1.0  # 1 adds both, more comes nearer to the longer of both
    part: Seconds = 0.0  # of experts: seconds of each that a layer has, hit or not, for sorting by them
    tile: int = 0  # rows of a tile, to whole ones of which arithmetic is rounded up; 0 rounds nothing

    def __post_init__(self) -> None:
        values = {"launch": self.launch, "flops_share": self.flops_share, "memory_share": self.memory_share}
        not_negative("compute.kernels", **values, part=self.part, tile=self.tile)
        if self.blend < 1.0:
            raise ValueError(f"compute.kernels: blend must be >= 1, got {self.blend}")

    def seconds(self, flops: float, nbytes: float, peaks: Peaks, narrow: bool = False, parts: int = 0) -> float:
        """Return the seconds of so many *flops*, of 8-bit elements if *narrow*, and *nbytes*, in so many *parts*."""
        peak = peaks.narrow if narrow else peaks.flops
        compute = flops / (peak * self.flops_share) if self.flops_share else 0.0
        memory = nbytes / (peaks.memory * self.memory_share) if self.memory_share else 0.0
        least = self.launch + parts * self.part
        if not compute or not memory or self.blend == 1.0:
            return least + compute + memory
        return least + float((compute**self.blend + memory**self.blend) ** (1.0 / self.blend))


@dataclass(frozen=True)
class Peaks:
    """A GPU's FLOPs a second, those of 8-bit elements, and bytes of its memory a second."""

    flops: float
    narrow: float
    memory: float


def shape_key(n: int, k: int, narrow: bool) -> str:
    """Return the name of a matrix of *k* by *n*, of 8-bit elements if *narrow*, among `Kernels.shapes`."""
    return f"{n}x{k} fp8" if narrow else f"{n}x{k}"


def tiled(rows: float, parts: float, tile: int) -> float:
    """Return how many rows are computed if *rows* lie in so many *parts* of whole tiles; *rows* if *tile* is 0."""
    return parts * math.ceil(rows / parts / tile) * tile if tile and parts else rows


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """An all-reduce among so many GPUs: *latency*, and bytes of the activations a second."""

    latency: Seconds
    rate: Rate


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What a measured shape takes over what its `Roof` says: *factor* at so many *tokens*, ascending.

    Between them it is interpolated in the logarithm of both, beyond them it stays.
    """

    tokens: tuple[int, ...]
    factor: tuple[float, ...]

    def at(self, tokens: int) -> float:
        """Return the factor at *tokens*."""
        place = bisect_left(self.tokens, tokens)
        if place == len(self.tokens) or self.tokens[place] == tokens or place == 0:
            return self.factor[min(place, len(self.tokens) - 1)]
        low, high = self.tokens[place - 1], self.tokens[place]
        share = math.log(tokens / low) / math.log(high / low)
        return float(self.factor[place - 1] ** (1.0 - share) * self.factor[place] ** share)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operators of a forward on one GPU: `Compute.kernels`, as `pdsim profile` writes it.

    Operators that were not measured have no number, and a model that needs one is refused.
    """

    gpu: str = ""  # where it was measured: `pdsim.hardware.Gpu.name`; on others it is assumed
    gemm: Roof | None = None
    gemm_fp8: Roof | None = None
    shapes: Mapping[str, Correction] = field(default_factory=dict)  # of products, by `shape_key`; others have none
    prefill: Roof | None = None  # attention of one sequence's new tokens
    decode: Roof | None = None  # attention of one token of each sequence
    mla_prefill: Roof | None = None
    mla_decode: Roof | None = None
    mla_absorb: Roof | None = None
    absorbed_prefill: bool = False  # whether *mla_prefill* is of latent rows, as decode is, instead of heads
    experts: Roof | None = None  # both products of the routed experts
    experts_fp8: Roof | None = None
    routing: Roof | None = None  # choosing, sorting, gathering, adding
    norm: Roof | None = None
    activation: Roof | None = None
    rotary: Roof | None = None
    allreduce: Mapping[str, AllReduce] = field(default_factory=dict)  # by the number of GPUs
    layer_launch: Seconds = 0.0  # the least that a layer of prefill takes, launched kernel by kernel

    def roof(self, name: str, model: str) -> Roof:
        """Return the operator *name*.  Raise a `ValueError` that names *model* if it was not measured."""
        found: Roof | None = getattr(self, name)
        if found is None:
            raise ValueError(
                f"compute.kernels has no {name}, which model={model} needs; "
                f"measure it with pdsim profile model={model}"
            )
        return found

    def correction(self, n: int, k: int, narrow: bool, tokens: int) -> float:
        """Return the factor of a product of *tokens* rows with *k* by *n*: 1 if its shape was not measured."""
        found = self.shapes.get(shape_key(n, k, narrow))
        return 1.0 if found is None else found.at(tokens)

    def ring(self, gpus: int) -> AllReduce:
        """Return the all-reduce among *gpus*: as measured, or taken from that among most.

        A ring moves 2 (n - 1) / n of the activations through each port; steps grow with the GPUs.  Raise a
        `ValueError` if none was measured.
        """
        if str(gpus) in self.allreduce:
            return self.allreduce[str(gpus)]
        known = sorted(int(number) for number in self.allreduce)
        if not known:
            raise ValueError(
                f"compute.kernels has no all-reduce, which tp={gpus} needs; measure one on several GPUs, or use tp=1"
            )
        near = known[-1]
        base = self.allreduce[str(near)]
        moved = ((gpus - 1) / gpus) / ((near - 1) / near)
        return AllReduce(latency=base.latency * math.log2(gpus) / math.log2(near), rate=base.rate / moved)
