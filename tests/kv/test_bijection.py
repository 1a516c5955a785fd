"""Every head, layer, token and state row arrives exactly once, or exactly as often as ranks replicate what it is.

The batches of all writers are executed on small pools: for each byte of a decode rank's pool it is counted how often
it is written, and what is there in the end is compared with what its name says should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.kv.contents import Contents
from pdsim.kv.layout import AUX_ROWS, Grid, KvLayout, KvShape, RankMap, StateShape, Tensor, window_span
from pdsim.kv.pages import Pages, Runs, cut, pair
from pdsim.kv.plan import planner

SIZES = (1, 2, 4, 8, 16)
ROOM = 5
MAMBA = (Tensor((16, 16, 32), 6), Tensor((16,), 20))
ATTENTION = StateShape()
EVERYTHING = StateShape("mwa", window=5, mamba=MAMBA, index_bytes=12)


def gqa(heads: int, layers: int = 2, state: StateShape = ATTENTION) -> KvShape:
    return KvShape(layers, heads, 8, state=state)


def mla(layers: int = 2, state: StateShape = ATTENTION) -> KvShape:
    return KvShape(layers, 1, 8, latent_bytes=24, state=state)


class Memory:
    """A buffer that counts how often each byte is written by a batch."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.writes = np.zeros(size, np.int64)
        self.size, self.pool, self.address = size, "default", 0

    def read(self, offset: int, size: int) -> bytes:
        return self.bytes[offset : offset + size].tobytes()

    def write(self, offset: int, data: bytes) -> None:
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def receive(self, source: Memory, batch: object) -> None:
        for start, to, size in zip(batch.source_offset, batch.target_offset, batch.size, strict=True):
            self.bytes[to : to + size] = source.bytes[start : start + size]
            self.writes[to : to + size] += 1


def runs(pages: list[int]) -> Pages:
    return tuple((page, 1) for page in pages)


class Handoff:
    """One request of *tokens* tokens in *chunks* chunks, handed over by every prefill rank to every decode rank."""

    def __init__(
        self, both: RankMap, page_size: int, tokens: int, source: list[int], target: list[int], chunks: int
    ):
        self.map, self.page_size, self.tokens = both, page_size, tokens
        self.pages = -(-tokens // page_size)
        self.source_pages, self.target_pages = source[: self.pages], target[: self.pages]
        span = window_span(tokens, both.shape.state.window, page_size)[1]
        rows = {
            "mamba": ([1], [0]),
            "window": (
                [3 * page % 31 for page in range(1, span + 1)],
                [5 * page % 31 for page in range(2, span + 2)],
            ),
            "index": (self.source_pages, self.target_pages),
        }
        state = [rows[name] for name in both.shape.state.components]
        self.source_state, self.target_state = (tuple(runs(side[i]) for side in state) for i in (0, 1))
        self.state = tuple(pair(runs(mine), runs(theirs)) for mine, theirs in state)
        self.runs = pair(runs(self.source_pages), runs(self.target_pages))
        edges = np.linspace(0, self.pages, chunks + 1).astype(int).tolist()
        self.chunks = [(first, end) for first, end in pairwise(edges) if end > first]
        self.senders = [self.prefill(rank) for rank in range(both.prefill.size)]

    def layout(self, grid: Grid, rank: int, pages: list[int]) -> KvLayout:
        return KvLayout(self.map.shape, grid.tp, self.page_size, max(pages) + 1, 2, grid.pp, grid.at(rank).pp, 2, 31)

    def prefill(self, rank: int) -> tuple[KvLayout, Memory]:
        grid = self.map.prefill
        layout = self.layout(grid, rank, self.source_pages)
        memory = Memory(layout.size)
        contents = Contents(memory, layout, grid.at(rank).tp)
        contents.fill(ROOM, runs(self.source_pages), 0)
        contents.fill_state(ROOM, self.source_state, self.tokens)
        contents.fill_aux(ROOM, 1)
        return layout, memory

    def parts(self, writer: int) -> Iterator[tuple[Runs, bool]]:
        """Yield what *writer* writes of each chunk, and whether the chunk is the last."""
        mine = self.map.share(writer, self.pages)
        for first, end in self.chunks:
            start, stop = max(first, mine.start), min(end, mine.stop)
            yield cut(self.runs, start, max(0, stop - start)), end == self.pages

    def check(self, reader: int) -> None:
        """Hand over to decode rank *reader* and check every byte of its pool."""
        layout = self.layout(self.map.decode, reader, self.target_pages)
        memory = Memory(layout.size)
        wrote = set()
        for writer in self.map.writers(reader):
            mine, sent = self.senders[writer]
            part = self.map.part(writer, reader)
            for rows, last in self.parts(writer):
                rows = rows if "kv" in part.components else ()
                if rows or (last and part.with_last):
                    extra = ((1, 0), self.state) if last else ()
                    memory.receive(sent, planner(mine, layout, part).batch(rows, *extra))
                    wrote.add(writer)
        assert len(wrote) == self.map.expected(reader, self.pages)
        contents = Contents(memory, layout, self.map.decode.at(reader).tp)
        assert not contents.verify(ROOM, runs(self.target_pages), self.pages * self.page_size)
        assert not contents.verify_state(ROOM, self.target_state, self.tokens)
        assert not contents.verify_aux(ROOM, 0)
        assert (memory.writes == self.wanted(layout)).all()

    def wanted(self, layout: KvLayout) -> np.ndarray:
        """Return how often each byte of a decode rank's pool must be written; bytes of nobody, never."""
        shape, prefill, decode = self.map.shape, self.map.prefill.tp, self.map.decode.tp
        replicas = 1 if shape.latent_bytes else max(1, prefill // max(shape.heads, decode))
        rows = dict(zip(shape.state.components, self.target_state, strict=True)) | {"kv": runs(self.target_pages)}
        found = np.zeros(layout.size, np.int64)
        for table in layout.tables:
            times = replicas if table.component in ("kv", "window") else 1
            for start in table.offsets.tolist():
                for row, _ in rows[table.component]:
                    found[start + row * table.item : start + (row + 1) * table.item] = times
        for offset, size in zip(layout.aux_offsets(0).tolist(), AUX_ROWS, strict=True):
            found[offset : offset + size] = 1
        return found


SOURCE, TARGET = [7, 2, 3, 4, 9, 0, 5], [1, 2, 6, 8, 9, 3, 0]


def hand_over(both: RankMap, page_size: int = 2, pages: int = 3, chunks: int = 2) -> None:
    handoff = Handoff(both, page_size, pages * page_size - page_size // 2, SOURCE, TARGET, chunks)
    for reader in range(both.decode.size):
        handoff.check(reader)


SHAPES = {f"gqa {heads}": gqa(heads) for heads in SIZES} | {"mla": mla()}
SHAPES |= {"hybrid": gqa(4, 3, EVERYTHING), "hybrid mla": mla(3, EVERYTHING)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_heads_and_state_arrive_between_any_tensor_parallel_sizes(shape):
    for prefill, decode in product(SIZES, SIZES):
        hand_over(RankMap(shape, Grid(prefill), Grid(decode)))


@st.composite
def handoffs(draw: st.DrawFn) -> Handoff:
    heads = 2 ** draw(st.integers(0, 3))
    layers = draw(st.integers(4, 11))
    pattern = draw(st.sampled_from(["a", "aw", "ma", "wma", "aam"]))
    state = StateShape(
        pattern,
        draw(st.integers(1, 40)) if "w" in pattern else 0,
        MAMBA if "m" in pattern else (),
        draw(st.sampled_from([0, 12])),
    )
    shape = gqa(heads, layers, state) if draw(st.booleans()) else mla(layers, state)
    pp, cp = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tp, other = (2 ** draw(st.integers(0, 4)) for _ in range(2))
    both = RankMap(shape, Grid(tp, pp, cp), Grid(other, draw(st.sampled_from([1, pp]))), draw(st.booleans()))
    page_size, pages = draw(st.sampled_from([1, 3, 16])), draw(st.integers(1, 8))
    tokens = (pages - 1) * page_size + draw(st.integers(1, page_size))
    lists = [draw(st.permutations(range(12))) for _ in range(2)]
    return Handoff(both, page_size, tokens, *lists, draw(st.integers(1, 4)))


@given(handoffs(), st.data())
@settings(max_examples=60)
def test_uneven_stages_scattered_pages_and_any_layers_arrive_too(handoff: Handoff, data: st.DataObject):
    handoff.check(data.draw(st.integers(0, handoff.map.decode.size - 1)))
