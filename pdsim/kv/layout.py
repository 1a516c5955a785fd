# SPDX-License-Identifier: Apache-2.0
"""Where the keys and values of a token lie in a rank's memory.

A rank's pool is one registered region::

    [plane][page][token][head][dim]  then  [aux buffer][slot][row]  then, of hybrid models, [tensor][layer][slot],
    [window plane][page][token][head][dim]  and  [index plane][page][token]

A plane is one layer's K or V (K of layer 0, V of layer 0, K of layer 1, ...; with a latent cache one plane a layer),
so that pages which are neighbours in the pool are contiguous within each plane.  A rank of a pipeline stage has the
planes of its stage's layers only.  With ``by_heads`` a page of keys and values is ``[head][token][dim]``: what some
of its heads keep is one piece.

Unknown here: requests, engines, time, and who writes to whom (`pdsim.kv.mapping`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pdsim.kv.state import StateShape, Tensor, stage_layers
from pdsim.transfer import Buffer

__all__ = [
    "AUX_BYTES",
    "AUX_ROWS",
    "HostMetadata",
    "KvLayout",
    "KvShape",
    "PageTable",
    "read_metadata",
    "write_metadata",
]

AUX_ROWS = (64, 64, 64, 64, 512, 512, 64, 128, 64, 64)
"""Bytes of a request's row in each buffer of first-token metadata: output ids, cached tokens, log-probabilities and
their ids, top log-probabilities and their ids, top-k p, top-k ids, hidden states, room (SGLang's, without EAGLE)."""

AUX_BYTES = sum(AUX_ROWS)

ATTENTION = StateShape()
"""Every layer has full attention and nothing else."""


@dataclass(frozen=True)
class KvShape:
    """What a model keeps of a token: K and V of *heads* heads in each layer or, with *latent_bytes*, one latent row.

    *state* says which layers those are, and what the others keep.

    Each of a layer's planes has ``heads * head_bytes`` bytes of a token; sizes are for all tensor-parallel ranks
    together.

    >>> llama = KvShape(layers=32, heads=8, head_bytes=256)  # Llama-3.1-8B in bf16
    >>> llama.token_bytes(tp=1), llama.token_bytes(tp=4)
    (131072, 32768)
    """

    layers: int
    heads: int
    head_bytes: int  # of K, or of V, in one head and layer
    latent_bytes: int = 0  # in one layer
    state: StateShape = ATTENTION
    packed: bool = False  # K and V of a head lie side by side: *head_bytes* are of both, and a layer is one plane

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.latent_bytes < 0:
            raise ValueError(f"latent_bytes must be >= 0, got {self.latent_bytes}")
        if not self.attention_layers:
            raise ValueError(f"{self.layers} layers of pattern={self.state.pattern!r}: none has full attention")

    @property
    def tensors(self) -> int:
        """Planes of a layer: K and V, or one with both, or the latent row."""
        return 1 if self.latent_bytes or self.packed else 2

    @property
    def attention_layers(self) -> int:
        """Layers with full attention."""
        return len(self.state.layers("a", range(self.layers)))

    @property
    def planes(self) -> int:
        """Planes of keys and values in all layers with full attention."""
        return self.tensors * self.attention_layers

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
        """Bytes of a token in the planes of all layers on each of *tp* ranks."""
        return self.planes * self.row_bytes(tp)


@dataclass(frozen=True)
class PageTable:
    """Planes of equal size, one after the other, each of *rows* rows: pages, or the slots of mamba layers.

    A row of plane *p* lies at ``offsets[p] + row * item``; tokens follow one another within a row.
    """

    component: str  # "kv" or one of `pdsim.kv.state.COMPONENTS`
    planes: tuple[int, ...]  # their numbers in the whole model, ascending
    start: int  # of the first plane, in the region
    rows: int
    item: int  # bytes of a row
    tokens: int  # of a row, which divide it evenly; 1 for a slot
    tensor: Tensor | None = None  # of a slot

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each plane starts."""
        return self.start + np.arange(len(self.planes), dtype=np.int64) * (self.rows * self.item)

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.start + len(self.planes) * self.rows * self.item

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all planes."""
        return len(self.planes) * self.item


@dataclass(frozen=True)
class KvLayout:
    """The pool of each of *tp* ranks of one pipeline *stage*.

    *pages* pages of *page_size* tokens, *slots* rows of first-token metadata; of hybrid models also *state_slots*
    slots and *window_pages* pages.

    The same for all tensor-parallel ranks of the stage.  Raise a `ValueError` for sizes below 1, a stage outside
    *pp*, and for pools that the model's layers need and that are empty.
    """

    shape: KvShape
    tp: int
    page_size: int
    pages: int
    slots: int
    pp: int = 1
    stage: int = 0
    state_slots: int = 0
    window_pages: int = 0
    by_heads: bool = False  # a page has all tokens of a head, then those of the next

    def __post_init__(self) -> None:
        for name in ("tp", "page_size", "pages", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 <= self.stage < self.pp:
            raise ValueError(f"stage must be >= 0 and < pp={self.pp}, got {self.stage}")
        state = self.shape.state
        for name, needed in (("state_slots", bool(state.mamba)), ("window_pages", bool(state.window))):
            if getattr(self, name) < needed:
                raise ValueError(f"{name} must be >= 1 for layers {state.pattern!r}, got {getattr(self, name)}")

    @cached_property
    def layers(self) -> range:
        """The layers of the stage."""
        return stage_layers(self.shape.layers, self.pp, self.stage)

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

    @property
    def kv_bytes(self) -> int:
        """Bytes of all planes of keys and values; the metadata starts there."""
        return self.tables[0].end

    @property
    def size(self) -> int:
        """Bytes of the region."""
        return self.kv_bytes + self.slots * AUX_BYTES if len(self.tables) == 1 else self.tables[-1].end

    @cached_property
    def tables(self) -> tuple[PageTable, ...]:
        """Keys and values first, then the tables of each component of the state."""
        state, size = self.shape.state, self.page_size
        regions = [PageTable("kv", self._planes("a"), 0, self.pages, self.item, size)]
        start = regions[0].end + self.slots * AUX_BYTES
        mamba = state.layers("m", self.layers)
        for tensor in state.mamba:
            regions.append(PageTable("mamba", mamba, start, self.state_slots, tensor.nbytes(self.tp), 1, tensor))
            start = regions[-1].end
        if state.window:
            regions.append(PageTable("window", self._planes("w"), start, self.window_pages, self.item, size))
            start = regions[-1].end
        if state.index_bytes:
            layers = state.layers("a", self.layers)
            regions.append(PageTable("index", layers, start, self.pages, state.index_bytes * size, size))
        return tuple(regions)

    def row_bytes(self, component: str) -> int:
        """Return the bytes of one row of *component* (`PageTable.component`): a page, a slot."""
        return sum(table.row_bytes for table in self.tables if table.component == component)

    def aux_offsets(self, slot: int) -> npt.NDArray[np.int64]:
        """Return where the row of *slot* starts in each metadata buffer.

        int64 of shape (10,), one for each of `AUX_ROWS`.
        """
        rows = np.array(AUX_ROWS, np.int64)
        return self.kv_bytes + (np.cumsum(rows) - rows) * self.slots + slot * rows

    def _planes(self, kind: str) -> tuple[int, ...]:
        each = self.shape.tensors
        return tuple(
            each * layer + part for layer in self.shape.state.layers(kind, self.layers) for part in range(each)
        )


class HostMetadata:
    """The metadata rows of a rank in host memory, at the offsets that they would have in its pool.

    It has the parts of a `pdsim.transfer.Buffer` that reading and writing need, and is never registered.
    """

    pool = "host"
    address = 0

    def __init__(self, layout: KvLayout) -> None:
        self._start = layout.kv_bytes
        self._bytes = bytearray(layout.slots * AUX_BYTES)
        self.size = self._start + len(self._bytes)

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of *size* bytes at *offset*.  Raise an `IndexError` outside the rows."""
        first = self._first(offset, size)
        return bytes(self._bytes[first : first + size])

    def write(self, offset: int, data: bytes) -> None:
        """Store *data* at *offset*; the errors of `read`."""
        first = self._first(offset, len(data))
        self._bytes[first : first + len(data)] = data

    def _first(self, offset: int, size: int) -> int:
        if size < 0 or offset < self._start or offset + size > self.size:
            raise IndexError(f"[{offset}, {offset + size}) is outside the rows, [{self._start}, {self.size})")
        return offset - self._start


def read_metadata(rows: Buffer, layout: KvLayout, slot: int, contents: bool) -> tuple[bytes, ...]:
    """Return the rows of *slot*; zeros of the same sizes if the memory keeps no *contents*."""
    if not contents:
        return tuple(bytes(size) for size in AUX_ROWS)
    return tuple(rows.read(at, size) for at, size in zip(layout.aux_offsets(slot).tolist(), AUX_ROWS, strict=True))


def write_metadata(rows: Buffer, layout: KvLayout, slot: int, data: Sequence[bytes]) -> None:
    """Write *data* to the rows of *slot*: as many rows, and of each as many bytes, as both sides have.

    The rows are those of `read_metadata` on the other side.
    """
    for at, size, row in zip(layout.aux_offsets(slot).tolist(), AUX_ROWS, data, strict=False):
        rows.write(at, row[:size])
