# SPDX-License-Identifier: Apache-2.0
"""Which rank keeps what of a token, where that lies in its memory, and who writes what to whom.

`KvShape` says what a model keeps, `KvLayout` where it lies in a rank's region, `Grid` how the ranks of a group are
numbered, and `RankMap` which prefill rank writes which layers, heads and pages to which decode rank.  Unknown here:
requests, engines, time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdsim.transfer import Buffer

REGION, STAGING = "kv", "staging"
"""The names under which every rank registers its pool, and a decode rank its staging ring."""

COMPONENTS = ("mamba", "window", "index")
"""State of hybrid models beside keys and values, in the order of regions and messages.

- ``mamba``: one slot a request, in which every mamba layer keeps its convolution and its recurrent state;
- ``window``: keys and values of the layers with sliding-window attention, in a smaller pool of pages: a request
  needs only those that its window touches;
- ``index``: one row a token, the same on every rank (sparse attention), in the very pages of the request.

All of it moves once, with the last chunk.
"""

AUX_ROWS = (64, 64, 64, 64, 512, 512, 64, 128, 64, 64)
"""Bytes of a request's row in each buffer of first-token metadata: output ids, cached tokens, log-probabilities and
their ids, top log-probabilities and their ids, top-k p, top-k ids, hidden states, room (SGLang's, without EAGLE)."""

AUX_BYTES = sum(AUX_ROWS)

AUX_SIZES = np.array(AUX_ROWS, np.int64)
_AUX_STARTS = np.cumsum(AUX_SIZES) - AUX_SIZES


# --- what a model keeps --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """What a mamba layer keeps in one tensor: *dim_bytes* bytes in each dimension.

    Each of the *groups* of dimensions is divided over the tensor-parallel ranks by itself, so that a rank's slice of
    the whole (of a convolution over q, k and v, say) is not contiguous.
    """

    groups: tuple[int, ...]
    dim_bytes: int

    def __post_init__(self) -> None:
        if not self.groups or min(self.groups) < 1 or self.dim_bytes < 1:
            raise ValueError(f"groups={self.groups} and dim_bytes={self.dim_bytes} must be >= 1")

    def local(self, tp: int) -> tuple[int, ...]:
        """Return the dimensions of each group on each of *tp* ranks.  Raise a `ValueError` if they do not divide."""
        if any(group % tp for group in self.groups):
            raise ValueError(f"mamba dimensions {self.groups} over tp={tp}: tp must divide each of them; lower tp")
        return tuple(group // tp for group in self.groups)

    def nbytes(self, tp: int) -> int:
        """Return the bytes of a slot in one layer on each of *tp* ranks."""
        return sum(self.local(tp)) * self.dim_bytes


@dataclass(frozen=True)
class StateShape:
    """Which layers keep what: layer *i* is ``pattern[i % len(pattern)]``.

    ``a`` is full attention, ``w`` attention over the last *window* tokens, ``m`` a mamba layer that keeps the
    tensors *mamba*.  Layers with full attention keep *index_bytes* more of each token, 0 without sparse attention.

    >>> StateShape(pattern="wwa", window=1024).layers("a", range(8))
    (2, 5)
    """

    pattern: str = "a"
    window: int = 0
    mamba: tuple[Tensor, ...] = ()
    index_bytes: int = 0

    def __post_init__(self) -> None:
        if "a" not in self.pattern or set(self.pattern) - set("awm"):
            raise ValueError(f"pattern={self.pattern!r} must be of a, w and m, with at least one a (full attention)")
        if self.window < 0 or bool(self.window) != ("w" in self.pattern):
            raise ValueError(f"window={self.window} must be > 0 exactly if pattern={self.pattern!r} has a w")
        if bool(self.mamba) != ("m" in self.pattern):
            raise ValueError(f"mamba={self.mamba} must name tensors exactly if pattern={self.pattern!r} has an m")
        if self.index_bytes < 0:
            raise ValueError(f"index_bytes must be >= 0, got {self.index_bytes}")

    @cached_property
    def components(self) -> tuple[str, ...]:
        """Those of `COMPONENTS` that there are."""
        have = self.mamba, self.window, self.index_bytes
        return tuple(name for name, size in zip(COMPONENTS, have, strict=True) if size)

    def layers(self, kind: str, among: range) -> tuple[int, ...]:
        """Return the layers of *kind* (a, w or m) *among* these."""
        return _layers(self.pattern, kind, among)


@lru_cache(64)  # asked for each two ranks that meet
def _layers(pattern: str, kind: str, among: range) -> tuple[int, ...]:
    return tuple(layer for layer in among if pattern[layer % len(pattern)] == kind)


@dataclass(frozen=True)
class KvShape:
    """What a model keeps of a token: K and V of *heads* heads in each layer or, with *latent_bytes*, one latent row.

    *state* says which layers those are, and what the others keep.  Sizes are for all tensor-parallel ranks together.

    >>> llama = KvShape(layers=32, heads=8, head_bytes=256)  # Llama-3.1-8B in bf16
    >>> llama.token_bytes(tp=1), llama.token_bytes(tp=4)
    (131072, 32768)
    """

    layers: int
    heads: int
    head_bytes: int  # of K, or of V, in one head and layer
    latent_bytes: int = 0  # in one layer
    state: StateShape = StateShape()
    packed: bool = False  # K and V of a head lie side by side: *head_bytes* are of both, and a layer is one plane

    def __post_init__(self) -> None:
        _at_least_one(self, "layers", "heads", "head_bytes")
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
        return self.tensors * self.attention_layers * self.row_bytes(tp)


def stage_layers(layers: int, pp: int, stage: int) -> range:
    """Return which of *layers* the *stage* of *pp* pipeline stages has, one after the other.

    The last ``layers % pp`` stages have one more (as in SGLang).  Raise a `ValueError` if a stage would have none.

    >>> [stage_layers(8, 3, stage) for stage in range(3)]
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    if not 1 <= pp <= layers:
        raise ValueError(f"pp={pp} over {layers} layers: every stage needs at least one; lower pp")
    base, more = divmod(layers, pp)
    without = pp - more
    first = stage * base + max(0, stage - without)
    return range(first, first + base + (stage >= without))


def window_span(tokens: int, window: int, page_size: int) -> tuple[int, int]:
    """Return the first page that the window over *tokens* tokens touches, and how many: it touches whole pages.

    >>> window_span(tokens=300, window=128, page_size=64)
    (2, 3)
    """
    first = max(0, tokens - window) // page_size
    return first, -(-tokens // page_size) - first


def _at_least_one(what: object, *names: str) -> None:
    for name in names:
        if getattr(what, name) < 1:
            raise ValueError(f"{name} must be >= 1, got {getattr(what, name)}")


# --- where it lies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageTable:
    """Planes of equal size, each of *rows* rows (pages, or the slots of mamba layers) of consecutive tokens.

    A row of plane *p* lies at ``offsets[p] + row * item``.
    """

    component: str  # "kv" or one of `COMPONENTS`
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

    @cached_property
    def end(self) -> int:
        """The byte after the last."""
        return self.start + len(self.planes) * self.rows * self.item


@dataclass(frozen=True)
class KvLayout:
    """The pool of each of *tp* ranks of one pipeline *stage*, which is one registered region.

    ::

        [plane][page][token][head][dim]  then  [aux buffer][slot][row]  then, of hybrid models,
        [tensor][layer][slot],  [window plane][page][token][head][dim]  and  [index plane][page][token]

    A plane is one layer's K or V (K of layer 0, V of layer 0, K of layer 1, ...; with a latent cache one plane a
    layer), so that neighbouring pages are contiguous within each plane.  With *by_heads* a page of keys and values
    is ``[head][token][dim]``.  Raise a `ValueError` for sizes below 1, a stage outside *pp*, and for pools that the
    model's layers need and that are empty.
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
    by_heads: bool = False

    def __post_init__(self) -> None:
        _at_least_one(self, "tp", "page_size", "pages", "slots")
        if not 0 <= self.stage < self.pp:
            raise ValueError(f"stage must be >= 0 and < pp={self.pp}, got {self.stage}")
        state = self.shape.state
        for name, needed in (("state_slots", bool(state.mamba)), ("window_pages", bool(state.window))):
            if getattr(self, name) < needed:
                raise ValueError(f"{name} must be >= 1 for layers {state.pattern!r}, got {getattr(self, name)}")

    @cached_property
    def row(self) -> int:
        """Bytes of a token in a plane."""
        return self.shape.row_bytes(self.tp)

    @cached_property
    def item(self) -> int:
        """Bytes of a page in a plane."""
        return self.row * self.page_size

    @cached_property
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
        state, size, layers = self.shape.state, self.page_size, stage_layers(self.shape.layers, self.pp, self.stage)
        each = self.shape.tensors

        def planes(kind: str) -> tuple[int, ...]:
            return tuple(each * layer + part for layer in state.layers(kind, layers) for part in range(each))

        tables = [PageTable("kv", planes("a"), 0, self.pages, self.item, size)]
        start = tables[0].end + self.slots * AUX_BYTES
        for tensor in state.mamba:
            mamba = state.layers("m", layers)
            tables.append(PageTable("mamba", mamba, start, self.state_slots, tensor.nbytes(self.tp), 1, tensor))
            start = tables[-1].end
        if state.window:
            tables.append(PageTable("window", planes("w"), start, self.window_pages, self.item, size))
            start = tables[-1].end
        if state.index_bytes:
            full = state.layers("a", layers)
            tables.append(PageTable("index", full, start, self.pages, state.index_bytes * size, size))
        return tuple(tables)

    def row_bytes(self, component: str) -> int:
        """Return the bytes of one row of *component* (`PageTable.component`), a page or a slot, in all planes."""
        return sum(len(table.planes) * table.item for table in self.tables if table.component == component)

    def aux_offsets(self, slot: int) -> npt.NDArray[np.int64]:
        """Return where the row of *slot* starts in each metadata buffer: int64, one for each of `AUX_ROWS`."""
        return self.kv_bytes + _AUX_STARTS * self.slots + slot * AUX_SIZES


class HostMetadata:
    """The metadata rows of a rank in host memory, at the offsets that they would have in its pool: a `Buffer`."""

    pool = "host"
    address = 0

    def __init__(self, layout: KvLayout) -> None:
        self._start = layout.kv_bytes
        self._bytes = bytearray(layout.slots * AUX_BYTES)
        self.size = self._start + len(self._bytes)

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of *size* bytes at *offset*."""
        start = offset - self._start
        return bytes(self._bytes[start : start + size])

    def write(self, offset: int, data: bytes) -> None:
        """Store *data* at *offset*."""
        start = offset - self._start
        self._bytes[start : start + len(data)] = data


def read_metadata(rows: Buffer, layout: KvLayout, slot: int, contents: bool) -> tuple[bytes, ...]:
    """Return the rows of *slot*; zeros of the same sizes if the memory keeps no *contents*."""
    if not contents:
        return tuple(bytes(size) for size in AUX_ROWS)
    return tuple(rows.read(at, size) for at, size in zip(layout.aux_offsets(slot).tolist(), AUX_ROWS, strict=True))


def write_metadata(rows: Buffer, layout: KvLayout, slot: int, data: Sequence[bytes]) -> None:
    """Write *data* to the rows of *slot*: as many rows, and of each as many bytes, as both sides have."""
    for at, size, row in zip(layout.aux_offsets(slot).tolist(), AUX_ROWS, data, strict=False):
        rows.write(at, row[:size])


# --- who writes what to whom ---------------------------------------------------------------------------------------


class Coordinates(NamedTuple):
    """A rank's place in its group's `Grid`, from 0: tensor-parallel rank, pipeline stage, context-parallel rank."""

    tp: int
    pp: int
    cp: int


@dataclass(frozen=True)
class Grid:
    """The ranks of one attention group: *tp* attention tensor-parallel ranks in each of *cp* times *pp* blocks.

    Ranks are numbered with tp fastest, then cp, then pp: a stage's ranks are neighbours, and rank 0 leads.  The last
    *omitted* of them do what those before them do, and are not run (`experiments.serve.equal_ranks`).

    >>> Grid(tp=2, pp=2, cp=2).at(5), Grid(tp=2, pp=2, cp=2).rank(1, 1, 0)
    (Coordinates(tp=1, pp=1, cp=0), 5)
    """

    tp: int
    pp: int = 1
    cp: int = 1
    omitted: int = 0

    def __post_init__(self) -> None:
        _at_least_one(self, "tp", "pp", "cp")

    @property
    def size(self) -> int:
        """Ranks in all, but those that are not run."""
        return self.tp * self.pp * self.cp - self.omitted

    @property
    def counts(self) -> tuple[int, ...]:
        """For how many ranks each counts: those of the second half stand for those that are not run."""
        half = self.size // 2
        return (1,) * (self.size - half) + (1 + self.omitted // half if half else 1,) * half

    def at(self, rank: int) -> Coordinates:
        """Return the place of *rank*.  Raise an `IndexError` if there is no such rank."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is not one of {self.size}")
        block, tp = divmod(rank, self.tp)
        return Coordinates(tp, *divmod(block, self.cp))

    def rank(self, tp: int, pp: int = 0, cp: int = 0) -> int:
        """Return the rank at a place: the inverse of `at`."""
        return (pp * self.cp + cp) * self.tp + tp


class HeadSlice(NamedTuple):
    """So many *heads*, from the *source*-th of the writer's own to the *target*-th of the reader's own."""

    source: int
    target: int
    heads: int


class RankShare(NamedTuple):
    """What one prefill rank writes to one decode rank, of the layers that both have, for any request."""

    components: tuple[str, ...]  # "kv" and those of `COMPONENTS`
    heads: HeadSlice | None  # of keys and values; None means whole rows, as both sides keep them
    shard: int = 0  # which of the reader's (P > D) or the writer's (P < D) parts of each group of mamba dimensions
    aux: bool = True  # the first-token metadata

    @property
    def with_last(self) -> bool:
        """Whether something goes with the last chunk even if that has no page for the reader."""
        return self.aux or self.components not in ((), ("kv",))


WHOLE = RankShare(("kv", *COMPONENTS), None)
"""Everything, between ranks that keep the same."""


def tp_writers(prefill_tp: int, decode_tp: int, decode_rank: int) -> range:
    """Return the prefill tensor-parallel ranks that hold what *decode_rank* needs.

    Raise a `ValueError` unless one of the two sizes divides the other.

    >>> tp_writers(4, 2, decode_rank=1), tp_writers(2, 4, decode_rank=3)
    (range(2, 4), range(1, 2))
    """
    if max(prefill_tp, decode_tp) % min(prefill_tp, decode_tp):
        raise ValueError(
            f"prefill tp={prefill_tp} and decode tp={decode_tp}: one must divide the other; use powers of two"
        )
    first = decode_rank * prefill_tp // decode_tp
    return range(first, first + max(1, prefill_tp // decode_tp))


def head_slice(
    shape: KvShape, prefill_tp: int, decode_tp: int, prefill_rank: int, decode_rank: int
) -> HeadSlice | None:
    """Return the heads that *prefill_rank* writes to *decode_rank*; None means whole rows, as both sides keep them.

    Both are tensor-parallel ranks, and *prefill_rank* is one of `tp_writers`.  Ranks beyond the number of heads
    replicate them.  As SGLang 0.5.23; the earlier ``(d * Hd) % Hs`` picks the wrong head wherever there are more
    decode ranks than heads, and more heads than prefill ranks.

    >>> head_slice(KvShape(layers=1, heads=8, head_bytes=256), 2, 4, prefill_rank=0, decode_rank=1)
    HeadSlice(source=2, target=0, heads=2)
    """
    if prefill_tp == decode_tp or shape.latent_bytes:
        return None
    source_heads, target_heads = shape.local_heads(prefill_tp), shape.local_heads(decode_tp)
    if prefill_tp > decode_tp:
        replicas = max(1, prefill_tp // shape.heads)
        return HeadSlice(0, prefill_rank // replicas * source_heads % target_heads, source_heads)
    replicas = max(1, decode_tp // shape.heads)
    return HeadSlice(decode_rank // replicas * target_heads % source_heads, 0, target_heads)


def owned_heads(shape: KvShape, tp: int, rank: int) -> range:
    """Return the heads of the model that *rank* of *tp* keeps; one that other ranks keep too where heads are fewer.

    >>> shape = KvShape(layers=1, heads=4, head_bytes=256)
    >>> owned_heads(shape, 2, 1), owned_heads(shape, 8, 5)  # 8 ranks keep each head twice
    (range(2, 4), range(2, 3))
    """
    count = shape.local_heads(tp)
    first = rank // max(1, tp // shape.heads) * count
    return range(first, first + count)


def share(pages: int, cp: int, cp_rank: int) -> range:
    """Return which of a request's *pages*, by position, one of *cp* ranks writes; the first ones have one page more.

    >>> [share(7, 3, rank) for rank in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    base, more = divmod(pages, cp)
    first = cp_rank * base + min(cp_rank, more)
    return range(first, first + base + (cp_rank < more))


@dataclass(frozen=True)
class RankMap:
    """Who writes what to whom between a group of *prefill* ranks and one of *decode* ranks.

    Pipeline stages write the planes of their layers.  Context-parallel ranks all hold whole requests: with
    *all_cp_ranks* each writes its `share` of the pages, else rank 0 writes them all; state and metadata come from
    rank 0.  Of ranks that hold the same latent or index rows only the first writes them; replicas of a head all
    write it.  Both sides make one from the same arguments, so they agree without a message.

    Raise a `ValueError` if decode ranks are context-parallel, if decode has several stages but not those of prefill,
    or unless one of the tensor-parallel sizes divides the other.

    >>> ranks = RankMap(KvShape(layers=2, heads=8, head_bytes=256), prefill=Grid(4), decode=Grid(2))
    >>> list(ranks.writers(1)), list(ranks.readers(3)), ranks.expected(1, pages=10)
    ([2, 3], [1], 2)
    """

    shape: KvShape
    prefill: Grid
    decode: Grid
    all_cp_ranks: bool = False

    def __post_init__(self) -> None:
        tp_writers(self.prefill.tp, self.decode.tp, 0)
        if self.decode.cp != 1:
            raise ValueError(f"decode cp={self.decode.cp}: decode ranks are not context-parallel; use cp=1")
        if self.decode.pp not in (1, self.prefill.pp):
            raise ValueError(
                f"decode pp={self.decode.pp} and prefill pp={self.prefill.pp}: decode needs the same stages, or one"
            )
        stage_layers(self.shape.layers, self.prefill.pp, 0)

    def writers(self, reader: int) -> dict[int, RankShare]:
        """Return the prefill ranks that write to decode rank *reader*, in ascending order, and what each writes."""
        return {writer: part for writer in range(self.prefill.size) if (part := self.part(writer, reader))}

    def readers(self, writer: int) -> dict[int, RankShare]:
        """Return the decode ranks that *writer* writes to, and what each gets: the inverse, possibly empty."""
        return {reader: part for reader in range(self.decode.size) if (part := self.part(writer, reader))}

    def part(self, writer: int, reader: int) -> RankShare | None:
        """Return what *writer* writes to *reader*, both numbers in their grids; None if that is nothing."""
        tp, pp, cp = self.prefill.at(writer)
        target_tp, target_pp, _ = self.decode.at(reader)
        ranks = tp_writers(self.prefill.tp, self.decode.tp, target_tp)
        if tp not in ranks or (self.decode.pp > 1 and pp != target_pp) or (cp and not self.all_cp_ranks):
            return None
        first = tp == ranks[0]
        components = tuple(self._components(first, pp, cp))
        # the last stage has the first token, and tells others
        aux = first and not cp and (pp == self.prefill.pp - 1 or self.decode.pp > 1)
        if not components and not aux:
            return None
        heads = head_slice(self.shape, self.prefill.tp, self.decode.tp, tp, target_tp)
        shard = tp - ranks[0] if len(ranks) > 1 else target_tp % (self.decode.tp // self.prefill.tp)
        return RankShare(components, heads, shard, aux)

    def share(self, writer: int, pages: int) -> range:
        """Return the positions that *writer* writes of a request's *pages*."""
        return share(pages, self.prefill.cp, self.prefill.at(writer).cp) if self.all_cp_ranks else range(pages)

    def expected(self, reader: int, pages: int) -> int:
        """Return how many ranks write to *reader* in the handoff of a request of *pages* pages."""
        parts = self.writers(reader).items()
        return sum(1 for writer, part in parts if part.with_last or self.share(writer, pages))

    def _components(self, first: bool, stage: int, cp: int) -> Iterator[str]:
        state, layers = self.shape.state, stage_layers(self.shape.layers, self.prefill.pp, stage)
        rows = first or not self.shape.latent_bytes
        if rows and state.layers("a", layers):
            yield "kv"
        if cp:
            return
        if state.layers("m", layers):
            yield "mamba"
        if rows and state.layers("w", layers):
            yield "window"
        if first and state.index_bytes and state.layers("a", layers):
            yield "index"
