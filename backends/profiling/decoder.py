# SPDX-License-Identifier: Apache-2.0
"""A whole decoder with random weights: what its operators take together, as a check of what is added up.

Layers of grouped-query attention, an MLP or experts, with weights of their own, the shard of one
tensor-parallel rank without all-reduces; the head if all layers are there.  Keys and values lie
dense.  Sampling is the largest logit.

The kernel model (`pdsim.compute.kernels`) is fitted to single operators; whole steps and
forwards are held out of that fit, and the difference to them is the error that it states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from backends.profiling import mixture
from backends.profiling.attention import attend
from backends.profiling.operator_calls import weight
from backends.profiling.pointwise import compiled

if TYPE_CHECKING:
    import torch

__all__ = ["DecoderStack"]


class DecoderStack:
    """The decoder of *case*, on *device*; `call` returns a step or a prefill of it as something to be timed.

    Columns that make it: *layers*, *heads*, *kv_heads*, *head_dim*, *k* the hidden width, *n* the
    inner width of the MLP, *experts* with *per_token* and *width*, *hit* the rows of the head or 0
    for none.  Its weights take most of a GPU's memory, so it is kept for all cases with the same
    `key`.
    """

    def __init__(self, case: Mapping[str, Any], device: str) -> None:
        import torch

        self.device = device
        self._heads, self._kv, self._width = (int(case[name]) for name in ("heads", "kv_heads", "head_dim"))
        self.key = self.key_of(case)
        hidden, inner = int(case["k"]), int(case["n"])
        self._hidden, self._per = hidden, int(case["per_token"])
        qkv = (self._heads + 2 * self._kv) * self._width
        self._layers = []
        for _ in range(int(case["layers"])):
            layer = {"qkv": weight(qkv, hidden, device), "out": weight(hidden, self._heads * self._width, device)}
            if case["experts"]:
                layer["router"] = weight(int(case["experts"]), hidden, device)
                layer["up"], layer["down"] = mixture.weights(
                    int(case["experts"]), hidden, int(case["width"]), device
                )
            else:
                layer |= {"up": weight(2 * inner, hidden, device), "down": weight(hidden, inner, device)}
            self._layers.append(layer)
        self._head = weight(int(case["hit"]), hidden, device) if case["hit"] else None
        self._gain = torch.ones(hidden, device=device, dtype=torch.bfloat16)
        self._own_gain = torch.ones(self._width, device=device, dtype=torch.bfloat16)

    @staticmethod
    def key_of(case: Mapping[str, Any]) -> tuple[int, ...]:
        """Return what tells one decoder from another."""
        numbers = ("layers", "heads", "kv_heads", "head_dim", "k", "n", "experts", "per_token", "width", "hit")
        return tuple(int(case[name]) for name in numbers)

    def call(self, case: Mapping[str, Any], kernels: Mapping[str, str]) -> Callable[[], object]:
        """Return one forward of *case*, with the attention of *kernels*, by operator.

        A ``step`` has one new token for each of *batch* sequences with *context* tokens; a
        ``forward`` has *tokens* new ones of one sequence after *context*.  *kernels* names the
        attention for "prefill" and "decode".  The caches are allocated here, not in the call.
        """
        import torch

        sequences = int(case.get("batch") or 1)
        new = int(case.get("tokens") or 1)
        every = int(case["context"]) + (new if case["operator"] == "forward" else 0)
        kernel = kernels["prefill" if case["operator"] == "forward" else "decode"]
        shape = (2, sequences, every, self._kv, self._width)
        cache = [torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in self._layers]
        x = torch.randn(sequences * new, self._hidden, device=self.device, dtype=torch.bfloat16)
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
        # *x* is (sequences x new, hidden), *cache* a (2, sequence, token, KV head, element) tensor a
        # layer, whose last *new* tokens are overwritten.
        import torch

        norm, rotate, silu_mul = (compiled(name, self.device) for name in ("norm", "rotate", "silu_mul"))
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
                x = mixture.mix(normed, normed @ layer["router"].t(), self._per, layer["up"], layer["down"])
            else:
                x = silu_mul(normed @ layer["up"].t()) @ layer["down"].t()
        if self._head is None:
            return x
        last = x.view(sequences, new, -1)[:, -1]
        final, _ = norm(last, residual.view(sequences, new, -1)[:, -1], self._gain)
        return torch.argmax(final @ self._head.t(), -1)
