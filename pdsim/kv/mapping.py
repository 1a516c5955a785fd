# SPDX-License-Identifier: Apache-2.0
"""Which prefill rank writes what to which decode rank: heads, layers, page positions and state.

H is the model's number of KV heads, P and D are the attention tensor-parallel sizes of the prefill and the decode
side.  Ranks beyond H replicate heads: of T ranks, rank r owns head ``r // (T / H)``.  The formulas are those of
SGLang
0.5.23; the earlier ``(d * Hd) % Hs`` picks the wrong head wherever D > H > P, because it forgets that decode ranks
replicate.

Pipeline stages write the planes of their layers.  Context-parallel ranks all hold whole requests, since attention
gathers keys and values: either rank 0 writes everything, or each a share of the *positions* of a request's pages
(of their numbers would not do: the pages of a request need not be neighbours).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdsim.kv.layout import KvShape
from pdsim.kv.state import stage_layers

__all__ = [
    "WHOLE",
    "Grid",
    "HeadSlice",
    "RankMap",
    "RankShare",
    "dp_rank",
    "head_slice",
    "owned_heads",
    "share",
    "tp_writers",
]


class Coordinates(NamedTuple):
    """A rank's place in its group's `Grid`, from 0: tensor-parallel rank, pipeline stage, context-parallel rank."""

    tp: int
    pp: int
    cp: int


@dataclass(frozen=True)
class Grid:
    """The ranks of one attention group: *tp* attention tensor-parallel ranks in each of *cp* times *pp* blocks.

    Ranks are numbered with tp fastest, then cp, then pp: a stage's ranks are neighbours, and rank 0 leads.

    >>> Grid(tp=2, pp=2, cp=2).at(5), Grid(tp=2, pp=2, cp=2).rank(1, 1, 0)
    (Coordinates(tp=1, pp=1, cp=0), 5)
    """

    tp: int
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.cp

    def at(self, rank: int) -> Coordinates:
        """Return the place of *rank*.  Raise an `IndexError` if there is no such rank."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is not one of {self.size}")
        block, tp = divmod(rank, self.tp)
        pp, cp = divmod(block, self.cp)
        return Coordinates(tp, pp, cp)

    def rank(self, tp: int, pp: int = 0, cp: int = 0) -> int:
        """Return the rank at a place: the inverse of `at`."""
        return (pp * self.cp + cp) * self.tp + tp


def dp_rank(room: int, dp: int, explicit: int | None = None) -> int:
    """Return the data-parallel rank that serves *room*: the one asked for, or ``room % dp``, which both sides know.

    Raise a `ValueError` if there is no such rank.
    """
    if explicit is None:
        return room % dp
    if not 0 <= explicit < dp:
        raise ValueError(f"dp_rank must be >= 0 and < dp={dp}, got {explicit}")
    return explicit


class HeadSlice(NamedTuple):
    """So many *heads*, from the *source*-th of the writer's own to the *target*-th of the reader's own.

    Heads are counted within a rank: those of rank 1 of 2 ranks with 8 heads are 0 to 3 here, 4 to 7 in the model.
    """

    source: int
    target: int
    heads: int


class RankShare(NamedTuple):
    """What one prefill rank writes to one decode rank, of the layers that both have.

    The same for all requests between the two: which pages of a request are written is `RankMap.share`.
    """

    components: tuple[str, ...]  # "kv" and those of `pdsim.kv.state.COMPONENTS`
    heads: HeadSlice | None  # of keys and values; None means whole rows, as both sides keep them
    shard: int = 0  # which of the reader's (P > D) or the writer's (P < D) parts of each group of mamba dimensions
    aux: bool = True  # the first-token metadata

    @property
    def with_last(self) -> bool:
        """Whether something goes with the last chunk whichever pages that has."""
        return self.aux or self.components not in ((), ("kv",))


WHOLE = RankShare(("kv", "mamba", "window", "index"), None)
"""Everything, between ranks that keep the same."""


def _check(prefill_tp: int, decode_tp: int) -> None:
    if max(prefill_tp, decode_tp) % min(prefill_tp, decode_tp):
        raise ValueError(
            f"prefill tp={prefill_tp} and decode tp={decode_tp}: one must divide the other; use powers of two"
        )


def tp_writers(prefill_tp: int, decode_tp: int, decode_rank: int) -> range:
    """Return the prefill tensor-parallel ranks that hold what *decode_rank* needs.

    Raise a `ValueError` unless one of the two sizes divides the other.

    >>> tp_writers(4, 2, decode_rank=1), tp_writers(2, 4, decode_rank=3)
    (range(2, 4), range(1, 2))
    """
    _check(prefill_tp, decode_tp)
    if decode_tp >= prefill_tp:
        writer = decode_rank * prefill_tp // decode_tp
        return range(writer, writer + 1)
    ratio = prefill_tp // decode_tp
    return range(decode_rank * ratio, (decode_rank + 1) * ratio)


def head_slice(
    shape: KvShape, prefill_tp: int, decode_tp: int, prefill_rank: int, decode_rank: int
) -> HeadSlice | None:
    """Return the heads that *prefill_rank* writes to *decode_rank*; None means whole rows, as both sides keep them.

    Both are tensor-parallel ranks, and *prefill_rank* is one of `tp_writers`.  Where there are fewer heads than
    ranks, several ranks keep the same one.  Raise a `ValueError` unless one of the two sizes divides the other.

    >>> from pdsim.kv.layout import KvShape
    >>> head_slice(KvShape(layers=1, heads=8, head_bytes=256), 2, 4, prefill_rank=0, decode_rank=1)
    HeadSlice(source=2, target=0, heads=2)
    """
    _check(prefill_tp, decode_tp)
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

    >>> from pdsim.kv.layout import KvShape
    >>> shape = KvShape(layers=1, heads=4, head_bytes=256)
    >>> owned_heads(shape, 2, 1), owned_heads(shape, 8, 5)  # 8 ranks keep each head twice
    (range(2, 4), range(2, 3))
    """
    count = shape.local_heads(tp)
    first = rank // max(1, tp // shape.heads) * count
    return range(first, first + count)


def share(pages: int, cp: int, cp_rank: int) -> range:
    """Return which of a request's *pages*, by position, one of *cp* ranks writes.

    Shares are neighbours in order of rank, and the first ``pages % cp`` ranks have one page more:

    >>> [share(7, 3, rank) for rank in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    base, more = divmod(pages, cp)
    first = cp_rank * base + min(cp_rank, more)
    return range(first, first + base + (cp_rank < more))


@dataclass(frozen=True)
class RankMap:
    """Who writes what to whom between a group of *prefill* ranks and one of *decode* ranks.

    With *all_cp_ranks* each context-parallel rank writes its `share` of the pages, else rank 0 writes them all;
    state and metadata come from rank 0 in either case.  Of ranks that hold the same latent or index rows only the
    first writes them; replicas of a head all write it (the same bytes).

    Raise a `ValueError` if decode ranks are context-parallel, if decode has several stages but not those of prefill,
    or unless one of the tensor-parallel sizes divides the other.

    Both sides make one from the same arguments, so they agree without a message.

    >>> from pdsim.kv.layout import KvShape
    >>> ranks = RankMap(KvShape(layers=2, heads=8, head_bytes=256), prefill=Grid(4), decode=Grid(2))
    >>> ranks.writers(1), ranks.readers(3), ranks.expected(1, pages=10)
    ((2, 3), (1,), 2)
    """

    shape: KvShape
    prefill: Grid
    decode: Grid
    all_cp_ranks: bool = False

    def __post_init__(self) -> None:
        _check(self.prefill.tp, self.decode.tp)
        if self.decode.cp != 1:
            raise ValueError(f"decode cp={self.decode.cp}: decode ranks are not context-parallel; use cp=1")
        if self.decode.pp not in (1, self.prefill.pp):
            raise ValueError(
                f"decode pp={self.decode.pp} and prefill pp={self.prefill.pp}: decode needs the same stages, or one"
            )
        stage_layers(self.shape.layers, self.prefill.pp, 0)

    def writers(self, reader: int) -> tuple[int, ...]:
        """Return the prefill ranks that may write to decode rank *reader*, in ascending order."""
        tp, pp, _ = self.decode.at(reader)
        stages = range(self.prefill.pp) if self.decode.pp == 1 else (pp,)
        blocks = range(self.prefill.cp if self.all_cp_ranks else 1)
        ranks = tp_writers(self.prefill.tp, self.decode.tp, tp)
        candidates = (self.prefill.rank(writer, stage, cp) for stage in stages for cp in blocks for writer in ranks)
        return tuple(writer for writer in candidates if self.part(writer, reader))

    def readers(self, writer: int) -> tuple[int, ...]:
        """Return the decode ranks that *writer* may write to: the inverse of `writers`, possibly empty."""
        return tuple(reader for reader in range(self.decode.size) if self.part(writer, reader))

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
        knows = pp == self.prefill.pp - 1 or self.decode.pp > 1
        aux = first and not cp and knows
        if not components and not aux:
            return None
        heads = head_slice(self.shape, self.prefill.tp, self.decode.tp, tp, target_tp)
        return RankShare(components, heads, self._shard(tp, target_tp), aux)

    def share(self, writer: int, pages: int) -> range:
        """Return the positions that *writer* writes of a request's *pages*."""
        return share(pages, self.prefill.cp, self.prefill.at(writer).cp) if self.all_cp_ranks else range(pages)

    def expected(self, reader: int, pages: int) -> int:
        """Return how many ranks write to *reader* in the handoff of a request of *pages* pages.

        A decode rank is done when so many have said how much they wrote and all of it has arrived.
        """
        parts = ((writer, self.part(writer, reader)) for writer in self.writers(reader))
        return sum(1 for writer, part in parts if part and (part.with_last or self.share(writer, pages)))

    def _components(self, first: bool, stage: int, cp: int) -> Iterator[str]:
        shape, layers = self.shape, stage_layers(self.shape.layers, self.prefill.pp, stage)
        state = shape.state
        rows = first or not shape.latent_bytes
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

    def _shard(self, tp: int, target_tp: int) -> int:
        prefill, decode = self.prefill.tp, self.decode.tp
        return tp % (prefill // decode) if prefill > decode else target_tp % (decode // prefill)
