"""Which prefill rank writes which heads to which decode rank.

H is the model's number of KV heads, P and D are the tensor-parallel sizes of the prefill and the decode side.  Ranks
beyond H replicate heads: of T ranks, rank r owns head ``r // (T / H)``.  The formulas are those of SGLang 0.5.23;
the earlier ``(d * Hd) % Hs`` picks the wrong head wherever D > H > P, because it forgets that decode ranks replicate.
"""

from __future__ import annotations

from typing import NamedTuple

from pdsim.kv.layout import KvShape

__all__ = ["HeadSlice", "head_slice", "owned_heads", "readers", "writers"]


class HeadSlice(NamedTuple):
    """So many *heads*, from the *source*-th of the writer's own to the *target*-th of the reader's own."""

    source: int
    target: int
    heads: int


def _check(prefill_tp: int, decode_tp: int) -> None:
    if max(prefill_tp, decode_tp) % min(prefill_tp, decode_tp):
        raise ValueError(f"prefill tp={prefill_tp} and decode tp={decode_tp}: one must divide the other")


def writers(shape: KvShape, prefill_tp: int, decode_tp: int, decode_rank: int) -> tuple[int, ...]:
    """Return the prefill ranks whose writes make up the pages of *decode_rank*.

    Replicas of a head all write it (the same bytes); of the ranks that hold the same latent rows only the first does.
    Raise a `ValueError` unless one of the two sizes divides the other.
    """
    _check(prefill_tp, decode_tp)
    if decode_tp >= prefill_tp:
        return (decode_rank * prefill_tp // decode_tp,)
    ratio = prefill_tp // decode_tp
    first = decode_rank * ratio
    return (first,) if shape.latent_bytes else tuple(range(first, first + ratio))


def readers(shape: KvShape, prefill_tp: int, decode_tp: int, prefill_rank: int) -> tuple[int, ...]:
    """Return the decode ranks that *prefill_rank* writes to: the inverse of `writers`, possibly empty."""
    return tuple(rank for rank in range(decode_tp) if prefill_rank in writers(shape, prefill_tp, decode_tp, rank))


def head_slice(
    shape: KvShape, prefill_tp: int, decode_tp: int, prefill_rank: int, decode_rank: int
) -> HeadSlice | None:
    """Return the heads that *prefill_rank* writes to *decode_rank*; None means whole rows, as both sides keep them."""
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
    """Return the heads that *rank* of *tp* keeps."""
    count = shape.local_heads(tp)
    first = rank // max(1, tp // shape.heads) * count
    return range(first, first + count)
