# SPDX-License-Identifier: Apache-2.0
"""Calls of PyTorch's operators for each case of `backends.profiling.inventory`, over several copies of its inputs.

Matrices are those of `torch.nn.Linear`; inputs are normal random numbers, for products of zeros run faster; all is
bf16.  There are as many copies as it takes for a call to find nothing of its inputs in the GPU's caches
(`backends.profiling.stopwatch.copies`).
"""

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import _grouped_mm, _scaled_mm
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from backends.profiling.stopwatch import MOST, copies

Case = Mapping[str, Any]
Call = Callable[[], object]
Made = tuple[int, int, Callable[[], Call]]  # bytes of a call's inputs, most copies of them, what makes one

_FLASH = "_flash_attention_forward"  # PyTorch's FlashAttention with a causal mask that ends at the last key
PAGE = 256  # tokens of a block of the paged kernel: FlashAttention 2 takes multiples of 256


def build(case: Case, device: str) -> list[Call]:
    """Return the calls of *case*, one for each copy of its inputs; every call does the same.

    Raise a `KeyError` for an unknown operator, and PyTorch's own error for a size that it cannot do.
    """
    operator = str(case["operator"])
    if operator == "launch":
        one = torch.zeros(32, device=device)
        return [lambda: one.add_(1.0)] * 256
    alike = {"norm": _norm, "activation": _activation, "rotary": _rotary, "routing": _routing}
    if operator in alike:
        return [alike[operator](case, device)]
    makers = {
        "gemm": _gemm,
        "decode": _decode,
        "prefill": _prefill,
        "mla_decode": _latent_decode,
        "mla_absorb": _absorb,
        "mla_prefill": _prefill,
        "experts": _experts,
    }
    nbytes, most, make = makers[operator](case, device)
    return [make() for _ in range(copies(nbytes, device, most))]


def _numbers(case: Case, *names: str) -> tuple[int, ...]:
    return tuple(int(case[name]) for name in names)


def _random(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _weight(*shape: int, device: str) -> torch.Tensor:
    return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0.0, 0.02)


def _gemm(case: Case, device: str) -> Made:
    m, n, k = _numbers(case, "tokens", "n", "k")
    x = _random(m, k, device=device)
    if case["dtype"] == "fp8":  # with a scale for each row and each column
        narrow = x.to(torch.float8_e4m3fn)
        rows, columns = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)

        def scaled() -> Call:
            matrix = _weight(n, k, device=device).to(torch.float8_e4m3fn)
            return lambda: _scaled_mm(narrow, matrix.t(), rows, columns, out_dtype=torch.bfloat16)

        return n * k, MOST, scaled
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)

    def product() -> Call:
        matrix = _weight(n, k, device=device)
        return lambda: torch.mm(x, matrix.t(), out=out)

    return 2 * n * k, MOST, product


# --- pointwise parts of a layer ------------------------------------------------------------------------------------


def _norm(case: Case, device: str) -> Call:
    rows, width = _numbers(case, "tokens", "n")
    x, residual = (_random(rows, width, device=device) for _ in range(2))
    gain, call = torch.ones(width, device=device, dtype=torch.bfloat16), _compiled("norm", device)
    return lambda: call(x, residual, gain)


def _activation(case: Case, device: str) -> Call:
    x, call = _random(int(case["tokens"]), 2 * int(case["n"]), device=device), _compiled("silu_mul", device)
    return lambda: call(x)


def _rotary(case: Case, device: str) -> Call:
    rows, heads, kv, width = _numbers(case, "tokens", "heads", "kv_heads", "head_dim")
    qkv = _random(rows, (heads + 2 * kv) * width, device=device)
    cos, sin = (torch.randn(rows, width // 2, device=device) for _ in range(2))
    gain = torch.ones(width, device=device, dtype=torch.bfloat16)
    store = torch.zeros(2, rows, kv, width, device=device, dtype=torch.bfloat16)
    call = _compiled("rotate", device)

    def rotary() -> None:
        _, keys, values = call(qkv, cos, sin, gain, heads, kv)
        store[0].copy_(keys)
        store[1].copy_(values)

    return rotary


def norm(x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the root-mean-square norm, in float32, of the sum of *x* and *residual*, (row, n) each, and the sum."""
    total = x + residual
    wide = total.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * gain, total


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return the product of the second half of *x* with the activation of the first: (row, 2 n) to (row, n)."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def rotate(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, gain: torch.Tensor, heads: int, kv: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of *qkv*; queries and keys normed a head, as in Qwen3, and rotated.

    *qkv* is (row, (heads + 2 kv) x width), *cos* and *sin* (row, width / 2), *gain* (width,); the results are
    (row, head, width).
    """
    width = gain.shape[0]
    rows = qkv.view(qkv.shape[0], heads + 2 * kv, width)
    wide = rows[:, : heads + kv].float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * gain.float()
    low, high = normed.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    turned = torch.cat([low * c - high * s, high * c + low * s], -1).to(qkv.dtype)
    return turned[:, :heads], turned[:, heads:], rows[:, heads + kv :]


@cache
def _compiled(name: str, device: str) -> Callable[..., Any]:
    # As one kernel, by Inductor, as engines have it; tried at once, so that a compiler that fails does so here.
    known: dict[str, Callable[..., Any]] = {"norm": norm, "silu_mul": silu_mul, "rotate": rotate}
    call = known[name]
    if device == "cpu":
        return call
    try:
        fused: Callable[..., Any] = torch.compile(call, dynamic=True)
        x = _random(6, 768, device=device)
        gain, half = torch.ones(64, device=device, dtype=torch.bfloat16), torch.randn(6, 32, device=device)
        trials: dict[str, tuple[Any, ...]] = {
            "norm": (x, x, torch.ones(768, device=device, dtype=torch.bfloat16)),
            "silu_mul": (x,),
            "rotate": (x, half, half, gain, 8, 2),
        }
        fused(*trials[name])
        torch.cuda.synchronize()
    except Exception as error:  # compilers raise anything; PyTorch's own kernels are measured instead
        print(f"not compiled: {name}: {str(error)[:200]}", flush=True)  # noqa: T201
        return call
    return fused


# --- attention over dense keys and values: PyTorch's, and not the kernels of FlashInfer or FlashMLA ----------------


def attend(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention of *q* to *k* and *v*, causal so that the last query sees all keys, by *kernel*.

    Kernels are ``cudnn``, ``flash`` (FlashAttention 2) and ``reference``, the processor's.  *q* is (sequence, new
    token, query head, element), *k* and *v* (sequence, any token, KV head, element).  The result has the shape of
    *q*, with the width of *v* or zeros behind it.  With cuDNN and earlier chunks it is a sum and not attention: an
    engine computes both parts and merges them by their log-sums, and only the time of that is of interest here.
    """
    new, every = q.shape[1], k.shape[1]
    if kernel == "flash":
        if v.shape[3] != q.shape[3]:  # FlashAttention has one width for all: zeros fill the values up
            v = functional.pad(v, (0, q.shape[3] - v.shape[3]))
        made: torch.Tensor = getattr(torch.ops.aten, _FLASH)(q, k, v, None, None, new, every, 0.0, new > 1, False)[0]
        return made
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    full = functional.scaled_dot_product_attention
    if kernel == "cudnn":
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            if new == every or new == 1:
                return full(q, k, v, is_causal=new > 1, enable_gqa=grouped).transpose(1, 2)
            # keys of earlier chunks, without a mask, and those of this one
            past = every - new
            first = full(q, k[:, :, :past], v[:, :, :past], enable_gqa=grouped)
            last = full(q, k[:, :, past:], v[:, :, past:], is_causal=True, enable_gqa=grouped)
            return first.add_(last).transpose(1, 2)
    mask = torch.ones(new, every, dtype=torch.bool, device=q.device).tril(every - new)
    return full(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)


def _prefill(case: Case, device: str) -> Made:
    # Of *tokens* new tokens of one sequence to themselves and to *context* of earlier chunks; *k* is the width of
    # queries and keys, *head_dim* without it.
    new, context, heads, kv, value = _numbers(case, "tokens", "context", "heads", "kv_heads", "value_dim")
    width = int(case.get("k") or case["head_dim"])
    q = _random(1, new, heads, width, device=device)

    def make() -> Call:
        k, v = (_random(1, context + new, kv, size, device=device) for size in (width, value))
        return lambda: attend(str(case["kernel"]), q, k, v)

    return (context + new) * kv * (width + value) * 2, 8, make


def _decode(case: Case, device: str) -> Made:
    # Of one new token of each sequence of a batch to its context; all have the same.
    batch, context, heads, kv, width = _numbers(case, "batch", "context", "heads", "kv_heads", "head_dim")
    q = _random(batch, 1, heads, width, device=device)

    def make() -> Call:
        k, v = (_random(batch, context, kv, width, device=device) for _ in range(2))
        return _paged(q, k, v) if case["kernel"] == "paged" else lambda: attend(str(case["kernel"]), q, k, v)

    return 4 * batch * context * kv * width, 64, make


def _paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    # FlashAttention with a table of blocks, where PyTorch takes one
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


def _latent_decode(case: Case, device: str) -> Made:
    # Absorbed attention of one new token a sequence to latent rows of *k* elements, which all heads share; the first
    # *value_dim* are the values.  Without the fused kernels that engines have for it, an upper bound.
    batch, context, heads, width, rank = _numbers(case, "batch", "context", "heads", "k", "value_dim")
    q = _random(batch, heads, width, device=device)

    def make() -> Call:
        rows = _random(batch, context, width, device=device).mul_(0.05)
        return lambda: torch.bmm(torch.softmax(torch.bmm(q, rows.transpose(1, 2)), -1), rows[:, :, :rank])

    return 2 * batch * context * width, 16, make


def _absorb(case: Case, device: str) -> Made:
    # The two products a head that take queries to latent rows, and what comes back to values: in absorbed attention
    # they stand for expanding the cache.
    batch, heads, width, rank = _numbers(case, "batch", "heads", "head_dim", "value_dim")
    q = _random(heads, batch, width, device=device)
    back = _random(heads, batch, rank, device=device)

    def make() -> Call:
        up, down = _random(heads, width, rank, device=device), _random(heads, rank, width, device=device)
        return lambda: (torch.bmm(q, up), torch.bmm(back, down))

    return 4 * heads * width * rank, 64, make


# --- a layer of experts: grouped products over tokens sorted by expert, and the routing around them ----------------


def _experts(case: Case, device: str) -> Made:
    # Both grouped products and the activation, of tokens that hit *hit* experts evenly: set, not routed, because
    # the time depends on how many are.  Each call hits other experts, so that weights come from memory.
    rows, count, hit, per, width, inner = _numbers(case, "tokens", "experts", "hit", "per_token", "n", "width")
    up, down = _expert_weights(count, width, inner, device)
    x = _random(rows * per, width, device=device)
    every, shifts = torch.arange(count, device=device), itertools.count()

    def make() -> Call:
        chosen = ((torch.arange(hit, device=device) * count // hit + next(shifts)) % count).sort().values
        even = chosen[torch.arange(rows * per, device=device) * hit // (rows * per)]
        ends = torch.searchsorted(even, every, right=True).to(torch.int32)
        return lambda: _grouped(x, up, down, ends)

    return hit * width * inner * 6, count // hit, make


def _routing(case: Case, device: str) -> Call:
    # What a layer of experts does besides its products: choose, sort, gather, weigh and add, from given logits.
    rows, count, per, width = _numbers(case, "tokens", "experts", "per_token", "n")
    x = _random(rows, width, device=device)
    logits = _random(rows, count, device=device)
    made = _random(rows * per, width, device=device)

    def call() -> object:
        chosen, order, _ = _assigned(logits, per)
        return x[order // per].shape, _gathered(made, chosen, order, rows)

    return call


def _assigned(logits: torch.Tensor, per: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Weights of each token's *per* experts, (token, expert); the order that sorts rows, a token and expert each, by
    # expert; where each expert's rows end.
    weights, chosen = torch.topk(torch.softmax(logits.float(), -1), per)
    by_expert, order = torch.sort(chosen.flatten(), stable=True)
    every = torch.arange(logits.shape[1], device=logits.device)
    return weights, order, torch.searchsorted(by_expert, every, right=True).to(torch.int32)


def _gathered(made: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, rows: int) -> torch.Tensor:
    weighted = made * weights.flatten()[order, None].to(made.dtype)
    return made.new_zeros(rows, made.shape[1]).index_add_(0, order // weights.shape[1], weighted)


def _mix(x: torch.Tensor, logits: torch.Tensor, per: int, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    # A whole layer: *x*, (token, hidden), through the *per* experts that *logits*, (token, expert), choose.
    weights, order, ends = _assigned(logits, per)
    return _gathered(_grouped(x[order // per], up, down, ends), weights, order, x.shape[0])


def _expert_weights(count: int, hidden: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    # Gate and up in one, (expert, 2 x width, hidden), and down, (expert, hidden, width): rows first, as engines do.
    return _weight(count, 2 * width, hidden, device=device), _weight(count, hidden, width, device=device)


def _grouped(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    # *x* is (row, hidden), sorted by expert; *ends* are those of each expert's rows, int32.
    if x.device.type == "cpu":
        made, begin = torch.zeros_like(x), 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                gate, value = (x[begin:end] @ up[expert].t()).chunk(2, -1)
                made[begin:end] = (functional.silu(gate) * value) @ down[expert].t()
            begin = end
        return made
    hidden = _grouped_mm(x, up.transpose(1, 2), offs=ends)
    return _grouped_mm(_compiled("silu_mul", "cuda")(hidden), down.transpose(1, 2), offs=ends)


# --- a whole decoder with random weights: what its operators take together, as a check of their sum ----------------


class DecoderStack:
    """The decoder of *case*, on *device*: the shard of one tensor-parallel rank, without all-reduces.

    Layers of grouped-query attention, an MLP or experts; the head if all layers are there.  Keys and values lie
    dense; sampling is the largest logit.  Its weights take most of a GPU's memory, so it is kept for all cases with
    the same `key`.
    """

    def __init__(self, case: Case, device: str) -> None:
        self.device = device
        self.key = self.key_of(case)
        layers, self._heads, self._kv, self._width, hidden, inner, experts, self._per, width, head = self.key
        self._hidden = hidden
        qkv = (self._heads + 2 * self._kv) * self._width
        self._layers = []
        for _ in range(layers):
            layer = {
                "qkv": _weight(qkv, hidden, device=device),
                "out": _weight(hidden, self._heads * self._width, device=device),
            }
            if experts:
                layer["router"] = _weight(experts, hidden, device=device)
                layer["up"], layer["down"] = _expert_weights(experts, hidden, width, device)
            else:
                layer["up"] = _weight(2 * inner, hidden, device=device)
                layer["down"] = _weight(hidden, inner, device=device)
            self._layers.append(layer)
        self._head = _weight(head, hidden, device=device) if head else None
        self._gain = torch.ones(hidden, device=device, dtype=torch.bfloat16)
        self._own_gain = torch.ones(self._width, device=device, dtype=torch.bfloat16)

    @staticmethod
    def key_of(case: Case) -> tuple[int, ...]:
        """Return what tells one decoder from another."""
        attention = ("layers", "heads", "kv_heads", "head_dim")
        return _numbers(case, *attention, "k", "n", "experts", "per_token", "width", "hit")

    def call(self, case: Case, kernels: Mapping[str, str]) -> Call:
        """Return one forward of *case*, with the attention of *kernels*, for "prefill" and "decode".

        A ``step`` has one new token for each of *batch* sequences with *context* tokens; a ``forward`` has *tokens*
        new ones of one sequence after *context*.  The caches are allocated here, not in the call.
        """
        sequences = int(case.get("batch") or 1)
        new = int(case.get("tokens") or 1)
        every = int(case["context"]) + (new if case["operator"] == "forward" else 0)
        kernel = kernels["prefill" if case["operator"] == "forward" else "decode"]
        shape = (2, sequences, every, self._kv, self._width)
        cache = [_random(*shape, device=self.device) for _ in self._layers]
        x = _random(sequences * new, self._hidden, device=self.device)
        angles = torch.randn(sequences * new, self._width // 2, device=self.device)
        cos, sin = angles.cos(), angles.sin()
        return lambda: self._forward(x, cache, cos, sin, sequences, new, kernel)

    def _forward(
        self,
        x: torch.Tensor,
        cache: list[torch.Tensor],
        cos: torch.Tensor,
        sin: torch.Tensor,
        sequences: int,
        new: int,
        kernel: str,
    ) -> torch.Tensor:
        # *x* is (sequences x new, hidden), *cache* a (2, sequence, token, KV head, element) tensor a layer, whose
        # last *new* tokens are overwritten.
        norm, rotate, silu_mul = (_compiled(name, self.device) for name in ("norm", "rotate", "silu_mul"))
        residual = torch.zeros_like(x)
        for layer, store in zip(self._layers, cache, strict=True):
            normed, residual = norm(x, residual, self._gain)
            q, k, v = rotate(normed @ layer["qkv"].t(), cos, sin, self._own_gain, self._heads, self._kv)
            rows = (sequences, new, -1, self._width)
            store[0, :, -new:].copy_(k.view(rows))
            store[1, :, -new:].copy_(v.view(rows))
            seen = attend(kernel, q.reshape(rows), store[0], store[1])
            x = seen.reshape(sequences * new, -1) @ layer["out"].t()
            normed, residual = norm(x, residual, self._gain)
            if "router" in layer:
                x = _mix(normed, normed @ layer["router"].t(), self._per, layer["up"], layer["down"])
            else:
                x = silu_mul(normed @ layer["up"].t()) @ layer["down"].t()
        if self._head is None:
            return x
        last = x.view(sequences, new, -1)[:, -1]
        final, _ = norm(last, residual.view(sequences, new, -1)[:, -1], self._gain)
        return torch.argmax(final @ self._head.t(), -1)
