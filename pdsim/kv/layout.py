"""Where the keys and values of a token lie in a rank's memory.

A rank's pool is one registered region::

    [plane][page][token][head][dim]  then  [aux buffer][slot][row]

A plane is one layer's K or V (K of layer 0, V of layer 0, K of layer 1, ...; with a latent cache one plane a layer), so
that pages which are neighbours in the pool are contiguous within each plane.

Unknown here: requests, engines, time, and who writes to whom (`pdsim.kv.mapping`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["AUX_BYTES", "AUX_ROWS", "KvLayout", "KvShape"]

AUX_ROWS = (64, 64, 64, 64, 512, 512, 64, 128, 64, 64)
"""Bytes of a request's row in each buffer of first-token metadata: output ids, cached tokens, log-probabilities and
their ids, top log-probabilities and their ids, top-k p, top-k ids, hidden states, room (as SGLang's without EAGLE)."""

AUX_BYTES = sum(AUX_ROWS)


@dataclass(frozen=True)
class KvShape:
    """What a model keeps of a token: K and V of *heads* heads in each layer or, with *latent_bytes*, one latent row."""

    layers: int
    heads: int
    head_bytes: int  # of K, or of V, in one head and layer
    latent_bytes: int = 0  # in one layer

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.latent_bytes < 0:
            raise ValueError(f"latent_bytes must be >= 0, got {self.latent_bytes}")

    @property
    def planes(self) -> int:
        """Planes of a pool."""
        return self.layers if self.latent_bytes else 2 * self.layers

    def local_heads(self, tp: int) -> int:
        """Heads that each of *tp* ranks keeps; beyond *heads* ranks they are replicated.

        Raise a `ValueError` unless one of the two numbers divides the other.
        """
        if max(self.heads, tp) % min(self.heads, tp):
            raise ValueError(f"{self.heads} KV heads over tp={tp}: one must divide the other")
        return max(1, self.heads // tp)

    def row_bytes(self, tp: int) -> int:
        """Bytes of a token in one plane on each of *tp* ranks; a latent row is whole on every rank."""
        return self.latent_bytes or self.local_heads(tp) * self.head_bytes

    def token_bytes(self, tp: int) -> int:
        """Bytes of a token in all planes on each of *tp* ranks."""
        return self.planes * self.row_bytes(tp)


@dataclass(frozen=True)
class KvLayout:
    """The pool of each of *tp* ranks: *pages* pages of *page_size* tokens, *slots* rows of first-token metadata."""

    shape: KvShape
    tp: int
    page_size: int
    pages: int
    slots: int

    def __post_init__(self) -> None:
        for name in ("tp", "page_size", "pages", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    @cached_property
    def row(self) -> int:
        """Bytes of a token in a plane."""
        return self.shape.row_bytes(self.tp)

    @cached_property
    def item(self) -> int:
        """Bytes of a page in a plane."""
        return self.row * self.page_size

    @cached_property
    def plane(self) -> int:
        """Bytes of a plane."""
        return self.item * self.pages

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of all planes; the metadata starts there."""
        return self.plane * self.shape.planes

    @cached_property
    def size(self) -> int:
        """Bytes of the region."""
        return self.kv_bytes + self.slots * AUX_BYTES

    def aux_offsets(self, slot: int) -> npt.NDArray[np.int64]:
        """Return where the row of *slot* starts in each metadata buffer."""
        rows = np.array(AUX_ROWS, np.int64)
        return self.kv_bytes + (np.cumsum(rows) - rows) * self.slots + slot * rows
