# SPDX-License-Identifier: Apache-2.0
"""How long the operators of a forward take on a GPU: what ``pdsim profile`` found, as a configuration has it.

Each operator has a `Roof`: a constant, and the norm of three times, those of its arithmetic, its bytes and its tiles
(`pdsim.compute.tiles`).  Rates are shares of the hardware's own, so that numbers of one GPU say something of
another.  `pdsim.calibration.kernels` finds them, and `forward` adds them up.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pdsim.compute.tiles import WIDE, Work
from pdsim.core.units import NotNegative, NotNegativeInt, Rate, Seconds


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The time of an operator: ``launch`` and the *blend*-norm of its arithmetic, its bytes and its tiles.

    A share of 0 leaves its part out; tiles without *block* and *walk* take no time.
    """

    launch: Seconds = 0.0  # seconds of a call that does next to nothing
    flops_share: NotNegative = 0.0  # of the peak
    memory_share: NotNegative = 0.0  # of the memory's rate
    blend: Annotated[float, ">= 1"] = 1.0  # 1 adds all, more comes nearer to the longest of them
    part: Seconds = 0.0  # of experts: seconds of each that a layer has, hit or not, for sorting by them
    merge: Seconds = 0.0  # of kernels that only some sizes have: see `row_work.merged`
    tile: NotNegativeInt = 0  # rows of a tile; 0 rounds nothing and has no turns
    columns: NotNegativeInt = 0  # of products: columns of a tile; 0 only rounds rows up to whole tiles
    widened: bool = False  # of experts: twice the columns where each has many rows, see `tiles.WIDE`
    block: Seconds = 0.0  # of each tile that waited for another, whatever its depth
    walk: Seconds = 0.0  # of an element of a tile's depth

    def cut(self, rows: float = 0.0) -> tuple[int, int]:
        """Return rows and columns of a tile, of experts that have so many *rows* each in the mean."""
        return self.tile, 2 * self.columns if self.widened and rows > WIDE else self.columns

    def seconds(self, work: Work, peaks: Peaks, narrow: bool = False, parts: int = 0) -> float:
        """Return the seconds of *work*, of 8-bit elements if *narrow*, in so many *parts*, without `merge`."""
        peak = peaks.narrow if narrow else peaks.flops
        compute = work.flops / (peak * self.flops_share) if self.flops_share else 0.0
        memory = work.nbytes / (peaks.memory * self.memory_share) if self.memory_share else 0.0
        tiles = work.turns * self.block + work.depth * self.walk
        least = self.launch + parts * self.part
        if self.blend == 1.0 or (compute > 0.0) + (memory > 0.0) + (tiles > 0.0) < 2:
            return least + compute + memory + tiles
        norm = compute**self.blend + memory**self.blend + tiles**self.blend
        return least + float(norm ** (1.0 / self.blend))


@dataclass(frozen=True)
class Peaks:
    """A GPU's FLOPs a second, those of 8-bit elements, bytes of its memory a second, and its multiprocessors."""

    flops: float
    narrow: float
    memory: float
    processors: int = 0  # 0: unknown, tiles run side by side


def shape_key(n: int, k: int, narrow: bool) -> str:
    """Return the name of a matrix of *k* by *n*, of 8-bit elements if *narrow*, among `Kernels.shapes`."""
    return f"{n}x{k} fp8" if narrow else f"{n}x{k}"


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """An all-reduce among so many GPUs: *latency*, and bytes of the activations a second."""

    latency: Seconds  # of an all-reduce, however small
    rate: Rate  # bytes/s of the activations


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What a measured shape takes over what its `Roof` says: *factor* at so many *tokens*, ascending.

    Between them it is interpolated in the logarithm of both, beyond them it stays.
    """

    tokens: tuple[int, ...]  # of a forward, ascending
    factor: tuple[float, ...]  # times as long as the roof says, at each of *tokens*

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

    gpu: str = ""  # where it was measured: `pdsim.hardware.machine.Gpu.name`; on others it is assumed
    table: str = ""  # of operators, `pdsim.compute.tables`: what it has counts instead of the roofs below
    # of the table's tokens among experts: balanced, power_law_1.01 or power_law_1.2, balanced where it lacks that;
    # drawn: each token of a decode step goes to experts of its own, as with dummy weights
    imbalance: str = "power_law_1.01"
    prefill_by_heads: bool = False  # the table's latent prefill is of latent rows, and the engine's of heads
    gemm: Roof | None = None
    gemm_fp8: Roof | None = None
    shapes: Mapping[str, Correction] = field(default_factory=dict)  # of products, by `shape_key`; others have none
    prefill: Roof | None = None  # attention of one sequence's new tokens
    decode: Roof | None = None  # attention of one token of each sequence
    # attention of Triton's kernels (`Compute.attention`): new tokens, those to earlier ones, and decode
    triton_prefill: Roof | None = None
    triton_prefix: Roof | None = None
    triton_decode: Roof | None = None
    mla_prefill: Roof | None = None
    mla_decode: Roof | None = None
    mla_absorb: Roof | None = None
    absorbed_prefill: bool = False  # whether *mla_prefill* is of latent rows, as decode is, instead of heads
    experts: Roof | None = None  # both products of the routed experts
    experts_fp8: Roof | None = None
    experts_tuned: Roof | None = None  # of the experts that *tuned* names
    tuned: tuple[str, ...] = ()  # experts for which a library has tiles of its own, such as "128x192": 128, 192 wide
    routing: Roof | None = None  # choosing, sorting, gathering, adding
    norm: Roof | None = None
    activation: Roof | None = None
    rotary: Roof | None = None
    allreduce: Mapping[str, AllReduce] = field(default_factory=dict)  # by the number of GPUs
    layer_launch: Seconds = 0.0  # the least that a layer of prefill takes, launched kernel by kernel
    mixed_launch: Seconds = 0.0  # the same of a layer with experts; 0: as *layer_launch*
    scale_launch: Seconds = 0.0  # the same of scaling the activations of a product of 8 bits
    fused_saving: Seconds = 0.0  # of such a product where torch.compile scales: it is launched so much faster
    prompt_host: Seconds = 0.0  # of an iteration with prompts, beside its kernels: its inputs, its samples

    def roof(self, name: str, model: str) -> Roof:
        """Return the operator *name*.  Raise a `ValueError` that names *model* if it was not measured."""
        roof: Roof | None = getattr(self, name)
        if roof is None:
            raise ValueError(
                f"compute.kernels has no {name}, which model={model} needs; "
                f"measure it with pdsim profile model={model}"
            )
        return roof

    def correction(self, n: int, k: int, narrow: bool, tokens: int) -> float:
        """Return the factor of a product of *tokens* rows with *k* by *n*: 1 if its shape was not measured."""
        correction = self.shapes.get(shape_key(n, k, narrow))
        return 1.0 if correction is None else correction.at(tokens)

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
