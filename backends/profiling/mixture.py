# SPDX-License-Identifier: Apache-2.0
"""A layer of experts: grouped products over tokens sorted by expert, and the routing around them.

Products are `torch._grouped_mm` on a GPU, and one product an expert on a processor.  Which experts
are hit is set rather than routed, because the time depends on how many are, and on each one's
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from backends.profiling.pointwise import compiled
from backends.profiling.stopwatch import copies

if TYPE_CHECKING:
    import torch

__all__ = ["assigned", "experts", "mix", "routing"]

Calls = list[Callable[[], object]]


def experts(case: Mapping[str, Any], device: str) -> Calls:
    """Return both grouped products and the activation, of tokens that hit so many experts evenly.

    Columns: *tokens*, *experts* there are, *hit* ones, *per_token* that each token takes, *n* the
    hidden width and *width* the inner one.  Each call hits other experts than the one before, so
    that weights come from memory.
    """
    import torch

    rows, count, hit, per = (int(case[name]) for name in ("tokens", "experts", "hit", "per_token"))
    up, down = weights(count, int(case["n"]), int(case["width"]), device)
    x = torch.randn(rows * per, int(case["n"]), device=device, dtype=torch.bfloat16)
    every = torch.arange(count, device=device)

    def bound(shift: int) -> Callable[[], object]:
        ends = torch.searchsorted(_even(rows * per, hit, count, shift, device), every, right=True).to(torch.int32)
        return lambda: grouped(x, up, down, ends)

    # other experts each time, so that what was hit is cold
    return [
        bound(shift)
        for shift in range(copies(hit * int(case["n"]) * int(case["width"]) * 6, device, most=count // hit))
    ]


def _even(routed: int, hit: int, count: int, shift: int, device: str) -> torch.Tensor:
    import torch

    chosen = ((torch.arange(hit, device=device) * count // hit + shift) % count).sort().values
    return chosen[torch.arange(routed, device=device) * hit // routed]


def routing(case: Mapping[str, Any], device: str) -> Calls:
    """Return what a layer of experts does besides its products: choose, sort, gather, weigh and add.

    The router's logits are given; its product is a matrix product as any other.
    """
    import torch

    rows, count, per, width = (int(case[name]) for name in ("tokens", "experts", "per_token", "n"))
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    logits = torch.randn(rows, count, device=device, dtype=torch.bfloat16)
    made = torch.randn(rows * per, width, device=device, dtype=torch.bfloat16)

    def call() -> object:
        chosen, order, _ = assigned(logits, per)
        return x[order // per].shape, _gathered(made, chosen, order, rows)

    return [call]


def assigned(logits: torch.Tensor, per: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weights, order and ends of the experts that *logits* choose.

    Weights are of each token's *per* experts, (token, expert); the order sorts rows, a token and
    expert each, by expert; the ends say where each expert's rows end.
    """
    import torch

    weights, chosen = torch.topk(torch.softmax(logits.float(), -1), per)
    by_expert, order = torch.sort(chosen.flatten(), stable=True)
    every = torch.arange(logits.shape[1], device=logits.device)
    return weights, order, torch.searchsorted(by_expert, every, right=True).to(torch.int32)


def _gathered(made: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, rows: int) -> torch.Tensor:
    weighted = made * weights.flatten()[order, None].to(made.dtype)
    return made.new_zeros(rows, made.shape[1]).index_add_(0, order // weights.shape[1], weighted)


def mix(x: torch.Tensor, logits: torch.Tensor, per: int, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return a whole layer of experts: *x*, (token, hidden), through those that *logits*, (token, expert), choose.

    *per* experts a token; *up* and *down* are those of `weights`.  The result has the shape of *x*.
    """
    weights, order, ends = assigned(logits, per)
    return _gathered(grouped(x[order // per], up, down, ends), weights, order, x.shape[0])


def weights(count: int, hidden: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices of *count* experts: gate and up in one, and down.

    Shapes (expert, 2 x width, hidden) and (expert, hidden, width): rows first, as engines keep
    them.
    """
    import torch

    shapes = ((count, 2 * width, hidden), (count, hidden, width))
    up, down = (torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0.0, 0.02) for shape in shapes)
    return up, down


def grouped(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return what the experts make of *x*, whose rows are sorted by expert and end at *ends*.

    *x* is (row, hidden), *ends* the end of each expert's rows as int32; an expert without rows has
    that of the one before.
    """
    import torch
    from torch import _grouped_mm

    if x.device.type == "cpu":
        made, begin = torch.zeros_like(x), 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                gate, value = (x[begin:end] @ up[expert].t()).chunk(2, -1)
                made[begin:end] = (torch.nn.functional.silu(gate) * value) @ down[expert].t()
            begin = end
        return made
    hidden = _grouped_mm(x, up.transpose(1, 2), offs=ends)
    return _grouped_mm(compiled("silu_mul", "cuda")(hidden), down.transpose(1, 2), offs=ends)
