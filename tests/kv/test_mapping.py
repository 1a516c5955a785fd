"""Who writes which heads to whom: every mapping up to 16 heads and 16 ranks a side, exhaustively."""

from __future__ import annotations

from collections import Counter

import pytest

from pdsim.kv.layout import KvShape
from pdsim.kv.mapping import head_slice, owned_heads, readers, writers

SIZES = (1, 2, 4, 8, 16)
ALL = [(heads, prefill, decode) for heads in SIZES for prefill in SIZES for decode in SIZES]


def gqa(heads: int) -> KvShape:
    return KvShape(layers=1, heads=heads, head_bytes=8)


MLA = KvShape(layers=1, heads=1, head_bytes=8, latent_bytes=8)


def arrivals(shape: KvShape, prefill: int, decode: int, rank: int) -> list[tuple[int, int]]:
    """Return which head arrives in which place of decode *rank*, once for every write."""
    found = []
    for writer in writers(shape, prefill, decode, rank):
        heads = head_slice(shape, prefill, decode, writer, rank)
        local = shape.local_heads(prefill)
        source, target, count = heads or (0, 0, local)
        owned = owned_heads(shape, prefill, writer)
        assert source + count <= local
        found += [(owned[source + index], target + index) for index in range(count)]
    return found


@pytest.mark.parametrize(("heads", "prefill", "decode"), ALL)
def test_every_head_that_a_decode_rank_owns_arrives_in_its_place_as_often_as_it_is_replicated(heads, prefill, decode):
    shape = gqa(heads)
    for rank in range(decode):
        counts = Counter(arrivals(shape, prefill, decode, rank))
        wanted = {(head, place) for place, head in enumerate(owned_heads(shape, decode, rank))}
        assert set(counts) == wanted
        assert set(counts.values()) == {max(1, prefill // max(heads, decode))}


@pytest.mark.parametrize(("heads", "prefill", "decode"), ALL)
def test_readers_and_writers_are_one_relation_seen_from_both_sides(heads, prefill, decode):
    for shape in (gqa(heads), MLA):
        forth = {(p, d) for p in range(prefill) for d in readers(shape, prefill, decode, p)}
        back = {(p, d) for d in range(decode) for p in writers(shape, prefill, decode, d)}
        assert forth == back


@pytest.mark.parametrize(("heads", "tp"), [(heads, tp) for heads in SIZES for tp in SIZES])
def test_ranks_own_every_head_as_often_as_there_are_replicas(heads, tp):
    counts = Counter(head for rank in range(tp) for head in owned_heads(gqa(heads), tp, rank))
    assert counts == dict.fromkeys(range(heads), max(1, tp // heads))


@pytest.mark.parametrize(("prefill", "decode"), [(p, d) for p in SIZES for d in SIZES])
def test_a_latent_row_is_written_once_to_each_decode_rank(prefill, decode):
    for rank in range(decode):
        (writer,) = writers(MLA, prefill, decode, rank)
        assert head_slice(MLA, prefill, decode, writer, rank) is None


@pytest.mark.parametrize(("heads", "prefill", "decode", "times"), [(2, 4, 1, 2), (2, 8, 2, 4), (1, 8, 1, 8)])
def test_replicated_writers_amplify_the_traffic_as_the_reference_says(heads, prefill, decode, times):
    shape = gqa(heads)
    written = sum(len(arrivals(shape, prefill, decode, rank)) for rank in range(decode))
    assert written == times * decode * shape.local_heads(decode)


# where the older formula, (d * Hd) % Hs without replication on the decode side, picks a wrong head
WRONG = {
    (2, 1, 4),
    (2, 1, 8),
    (2, 1, 16),
    (4, 1, 8),
    (4, 1, 16),
    (4, 2, 8),
    (4, 2, 16),
    (8, 1, 16),
    (8, 2, 16),
    (8, 4, 16),
}


def test_the_older_formula_differs_exactly_where_it_is_known_to_be_wrong():
    differs = set()
    for heads, prefill, decode in ALL:
        shape = gqa(heads)
        for rank in range(decode):
            (*_, writer) = writers(shape, prefill, decode, rank)
            found = head_slice(shape, prefill, decode, writer, rank)
            if prefill < decode and found is not None:
                older = rank * shape.local_heads(decode) % shape.local_heads(prefill)
                differs |= {(heads, prefill, decode)} if found.source != older else set()
    assert differs == WRONG


@pytest.mark.parametrize("function", [writers, readers])
def test_sizes_that_do_not_divide_one_another_are_refused(function):
    with pytest.raises(ValueError, match="prefill tp=2 and decode tp=3: one must divide the other"):
        function(gqa(6), 2, 3, 0)
