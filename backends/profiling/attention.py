# SPDX-License-Identifier: Apache-2.0
"""Attention as PyTorch has it, over dense keys and values: not the kernels of FlashInfer or FlashMLA.

Kernels: ``cudnn`` and ``flash`` (FlashAttention 2) of scaled_dot_product_attention, ``paged`` the
latter with a table of blocks where PyTorch takes one, ``bmm`` products over all of the latent rows,
and ``reference``, the processor's.  Layouts are those of FlashAttention, (sequence, token, head,
element), in bf16.

Each function takes a case of `backends.profiling.inventory` and returns calls that do the same over
different copies of the inputs, as many as it takes for a call to find nothing of its keys and
values in the GPU's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from backends.profiling.stopwatch import copies

if TYPE_CHECKING:
    import torch

__all__ = ["absorb", "attend", "decode", "latent_decode", "prefill"]

Calls = list[Callable[[], object]]
_FLASH = "_flash_attention_forward"  # PyTorch's FlashAttention with a causal mask that ends at the last key
PAGE = 256
"""Tokens of a block of the paged kernel: FlashAttention 2 takes multiples of 256."""


def attend(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention of *q* to *k* and *v*, causal so that the last query sees all keys, by *kernel*.

    *q* is (sequence, new token, query head, element), *k* and *v* (sequence, any token, KV head,
    element); fewer KV heads than query heads are shared evenly.  The result has the shape of *q*,
    with the width of *v* or zeros behind it.

    With cuDNN and earlier chunks the result is a sum and not attention: an engine computes both
    parts and merges them by their log-sums, and only the time of that is of interest here.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    new, every = q.shape[1], k.shape[1]
    if kernel == "flash":
        if v.shape[3] != q.shape[3]:  # FlashAttention has one width for all: zeros fill the values up
            v = torch.nn.functional.pad(v, (0, q.shape[3] - v.shape[3]))
        made: torch.Tensor = getattr(torch.ops.aten, _FLASH)(q, k, v, None, None, new, every, 0.0, new > 1, False)[0]
        return made
    heads = [one.transpose(1, 2) for one in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]
    full = torch.nn.functional.scaled_dot_product_attention
    if kernel == "cudnn":
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            if new == every or new == 1:
                return full(*heads, is_causal=new > 1, enable_gqa=grouped).transpose(1, 2)
            # keys of earlier chunks, without a mask, and those of this one: an engine merges both by their sums
            early = [heads[0], *(one[:, :, : every - new] for one in heads[1:])]
            late = [heads[0], *(one[:, :, every - new :] for one in heads[1:])]
            first = full(*early, enable_gqa=grouped)
            return first.add_(full(*late, is_causal=True, enable_gqa=grouped)).transpose(1, 2)
    mask = torch.ones(new, every, dtype=torch.bool, device=q.device).tril(every - new)
    return full(*heads, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)


def prefill(case: Mapping[str, Any], device: str) -> Calls:
    """Return attention of new tokens of one sequence to themselves and to those of earlier chunks.

    Columns: *tokens* new ones, *context* earlier ones, *heads*, *kv_heads*, *k* the width of
    queries and keys (*head_dim* without it), *value_dim*.
    """
    import torch

    new, context, heads, kv = (int(case[name]) for name in ("tokens", "context", "heads", "kv_heads"))
    width = int(case.get("k") or case["head_dim"])
    q = torch.randn(1, new, heads, width, device=device, dtype=torch.bfloat16)
    kernel, calls = str(case["kernel"]), []
    value = int(case["value_dim"])
    for _ in range(copies((context + new) * kv * (width + value) * 2, device, most=8)):
        k = torch.randn(1, context + new, kv, width, device=device, dtype=torch.bfloat16)
        v = torch.randn(1, context + new, kv, value, device=device, dtype=torch.bfloat16)
        calls.append(_bound(kernel, q, k, v))
    return calls


def _bound(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    return lambda: attend(kernel, q, k, v)


def decode(case: Mapping[str, Any], device: str) -> Calls:
    """Return attention of one new token of each sequence of a batch to its context.

    Columns: *batch*, *context*, *heads*, *kv_heads*, *head_dim*.  All sequences have the same
    context.
    """
    import torch

    batch, context, heads, kv, width = (
        int(case[name]) for name in ("batch", "context", "heads", "kv_heads", "head_dim")
    )
    q = torch.randn(batch, 1, heads, width, device=device, dtype=torch.bfloat16)
    calls = []
    for _ in range(copies(4 * batch * context * kv * width, device, most=64)):
        k, v = (torch.randn(batch, context, kv, width, device=device, dtype=torch.bfloat16) for _ in range(2))
        calls.append(_paged(q, k, v) if case["kernel"] == "paged" else _bound(str(case["kernel"]), q, k, v))
    return calls


def _paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    import torch

    batch, context, heads, width = k.shape
    blocks = batch * context // PAGE
    table = torch.randperm(blocks, device=k.device, dtype=torch.int32).view(batch, context // PAGE)
    pools = [one.view(blocks, PAGE, heads, width) for one in (k, v)]
    ends = torch.arange(batch + 1, device=k.device, dtype=torch.int32)
    used = torch.full((batch,), context, device=k.device, dtype=torch.int32)
    rows = q.view(batch, q.shape[2], width)

    def call() -> object:
        return getattr(torch.ops.aten, _FLASH)(
            rows, *pools, ends, ends * context, 1, context, 0.0, False, False, seqused_k=used, block_table=table
        )

    return call


# --- latent attention ----------------------------------------------------------------------------------------------


def latent_decode(case: Mapping[str, Any], device: str) -> Calls:
    """Return absorbed attention of one new token a sequence to latent rows, which all heads share.

    Two batched products and a softmax, over rows of *k* elements of which the first *value_dim* are
    the values: what DeepSeek's attention does in decode, without the fused kernels that engines
    have for it (an upper bound).
    """
    import torch

    batch, context, heads, width, rank = (
        int(case[name]) for name in ("batch", "context", "heads", "k", "value_dim")
    )
    q = torch.randn(batch, heads, width, device=device, dtype=torch.bfloat16)

    def bound(rows: torch.Tensor) -> Callable[[], object]:
        def call() -> object:
            scores = torch.softmax(torch.bmm(q, rows.transpose(1, 2)), -1)
            return torch.bmm(scores, rows[:, :, :rank])

        return call

    count = copies(2 * batch * context * width, device, most=16)
    return [
        bound(torch.randn(batch, context, width, device=device, dtype=torch.bfloat16).mul_(0.05))
        for _ in range(count)
    ]


def absorb(case: Mapping[str, Any], device: str) -> Calls:
    """Return the two products a head that take queries to latent rows, and what comes back to values.

    Matrices are (head, width, rank) and (head, rank, width); in absorbed attention they stand for
    expanding the cache.
    """
    import torch

    batch, heads, width, rank = (int(case[name]) for name in ("batch", "heads", "head_dim", "value_dim"))
    q = torch.randn(heads, batch, width, device=device, dtype=torch.bfloat16)
    back = torch.randn(heads, batch, rank, device=device, dtype=torch.bfloat16)

    def bound(up: torch.Tensor, down: torch.Tensor) -> Callable[[], object]:
        return lambda: (torch.bmm(q, up), torch.bmm(back, down))

    def matrices() -> list[torch.Tensor]:
        shapes = ((heads, width, rank), (heads, rank, width))
        return [torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in shapes]

    return [bound(*matrices()) for _ in range(copies(4 * heads * width * rank, device, most=64))]
