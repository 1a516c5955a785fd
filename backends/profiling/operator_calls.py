# SPDX-License-Identifier: Apache-2.0
"""Calls of PyTorch's operators for each case, over several copies of its inputs.

Matrices are those of `torch.nn.Linear`, so that products are of the kind that engines run.  Inputs
are normal random numbers: products of zeros run faster.  FP8 has a scale for each row and each
column (`torch._scaled_mm`).

How calls are repeated and timed is `backends.profiling.stopwatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from backends.profiling import attention, mixture
from backends.profiling.pointwise import compiled
from backends.profiling.stopwatch import copies

if TYPE_CHECKING:
    import torch

__all__ = ["build", "weight"]

Case = Mapping[str, Any]
Calls = list[Callable[[], object]]


def build(case: Case, device: str) -> Calls:
    """Return the calls of *case*, one for each copy of its inputs; every call does the same.

    Called once for each case of a measurement.  Raise a `KeyError` for an operator that is none,
    and whatever PyTorch raises if it cannot do this size here.
    """
    makers = {
        "launch": _launch,
        "gemm": _gemm,
        "norm": _norm,
        "activation": _activation,
        "rotary": _rotary,
        "decode": attention.decode,
        "prefill": attention.prefill,
        "mla_decode": attention.latent_decode,
        "mla_absorb": attention.absorb,
        "mla_prefill": attention.prefill,
        "experts": mixture.experts,
        "routing": mixture.routing,
    }
    return makers[str(case["operator"])](case, device)


def _launch(case: Case, device: str) -> Calls:  # noqa: ARG001
    import torch

    one = torch.zeros(32, device=device)
    return [lambda: one.add_(1.0)] * 256


def _gemm(case: Case, device: str) -> Calls:
    import torch
    from torch import _scaled_mm

    m, n, k = (int(case[name]) for name in ("tokens", "n", "k"))
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    if case["dtype"] == "fp8":
        narrow = x.to(torch.float8_e4m3fn)
        rows, columns = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)

        def scaled(weight: torch.Tensor) -> Callable[[], object]:
            return lambda: _scaled_mm(narrow, weight.t(), rows, columns, out_dtype=torch.bfloat16)

        wide = [weight(n, k, device) for _ in range(copies(n * k, device))]
        return [scaled(one.to(torch.float8_e4m3fn)) for one in wide]

    def product(matrix: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.mm(x, matrix.t(), out=out)

    return [product(weight(n, k, device)) for _ in range(copies(2 * n * k, device))]


def weight(n: int, k: int, device: str) -> torch.Tensor:
    """Return a matrix of *n* rows and *k* columns in bf16."""
    import torch

    return torch.empty(n, k, device=device, dtype=torch.bfloat16).normal_(0.0, 0.02)


# --- pointwise -----------------------------------------------------------------------------------------------------


def _norm(case: Case, device: str) -> Calls:
    import torch

    rows, width = int(case["tokens"]), int(case["n"])
    x, residual = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    gain = torch.ones(width, device=device, dtype=torch.bfloat16)
    call = compiled("norm", device)
    return [lambda: call(x, residual, gain)]


def _activation(case: Case, device: str) -> Calls:
    import torch

    x = torch.randn(int(case["tokens"]), 2 * int(case["n"]), device=device, dtype=torch.bfloat16)
    call = compiled("silu_mul", device)
    return [lambda: call(x)]


def _rotary(case: Case, device: str) -> Calls:
    import torch

    rows, heads, kv, width = (int(case[name]) for name in ("tokens", "heads", "kv_heads", "head_dim"))
    qkv = torch.randn(rows, (heads + 2 * kv) * width, device=device, dtype=torch.bfloat16)
    cos, sin = (torch.randn(rows, width // 2, device=device) for _ in range(2))
    gain = torch.ones(width, device=device, dtype=torch.bfloat16)
    store = torch.zeros(2, rows, kv, width, device=device, dtype=torch.bfloat16)
    call = compiled("rotate", device)

    def rotary() -> None:
        _, keys, values = call(qkv, cos, sin, gain, heads, kv)
        store[0].copy_(keys)
        store[1].copy_(values)

    return [rotary]
