# SPDX-License-Identifier: Apache-2.0
"""Pointwise parts of a layer, compiled into one kernel each by Inductor, as engines have kernels for them.

Uncompiled, each would be a handful of launches, of which none is what an engine runs.  On a
processor, and where no compiler works, they stay as they are, and the log says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["compiled", "norm", "rotate", "silu_mul"]


def norm(x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the root-mean-square norm of the sum of *x* and *residual*, and the sum.

    Both are (row, n) in bf16, *gain* (n,).  The norm is taken in float32, with 1e-6 below the root,
    as models do.
    """
    import torch

    total = x + residual
    wide = total.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * gain, total


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return the product of the second half of *x* with the activation of the first: (row, 2 n) to (row, n)."""
    import torch

    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rotate(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, gain: torch.Tensor, heads: int, kv: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of *qkv*; queries and keys normed a head, as in Qwen3, and rotated.

    *qkv* is (row, (heads + 2 kv) x width), *cos* and *sin* (row, width / 2), *gain* (width,); the
    results are (row, head, width).
    """
    import torch

    width = gain.shape[0]
    rows = qkv.view(qkv.shape[0], heads + 2 * kv, width)
    wide = rows[:, : heads + kv].float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * gain.float()
    low, high = normed.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    turned = torch.cat([low * c - high * s, high * c + low * s], -1).to(qkv.dtype)
    return turned[:, :heads], turned[:, heads:], rows[:, heads + kv :]


@cache
def compiled(name: str, device: str) -> Callable[..., Any]:
    """Return the pointwise function *name* as one kernel, as engines have it.

    Where it cannot be compiled it is returned as it is, and a line of the log says why.  Compiled
    once for each function and process, for any number of rows; tried at once, so that a compiler
    that fails does so here.
    """
    import torch

    known: dict[str, Callable[..., Any]] = {"norm": norm, "silu_mul": silu_mul, "rotate": rotate}
    call = known[name]
    if device == "cpu":
        return call
    try:
        fused: Callable[..., Any] = torch.compile(call, dynamic=True)
        x = torch.randn(6, 768, device=device, dtype=torch.bfloat16)
        gain, half = torch.ones(64, device=device, dtype=torch.bfloat16), torch.randn(6, 32, device=device)
        trials: dict[str, tuple[Any, ...]] = {
            "norm": (x, x, torch.ones(768, device=device, dtype=torch.bfloat16)),
            "silu_mul": (x,),
            "rotate": (x, half, half, gain, 8, 2),
        }
        fused(*trials[name])
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler may say: the kernels of PyTorch's own are measured then
        print(f"not compiled: {name}: {str(error)[:200]}", flush=True)  # noqa: T201
        return call
    return fused
