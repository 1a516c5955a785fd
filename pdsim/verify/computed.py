# SPDX-License-Identifier: Apache-2.0
"""What was computed, where and when: the part of `pdsim.verify.invariants` that knows of forwards.

The leader's scheduler says which tokens of which rooms each forward covers, before it knows of pages; the ends of
forwards say which tokens a rank has computed.  What is read of a room on a prefill rank must be computed there:
every token in a page, and all of them where state or metadata is read.  And only computed tokens are written into
memory, each marked with the number of the chunk that computed it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdsim.kv.contents import Contents
from pdsim.kv.pages import Pages
from pdsim.serving.prefill import PrefillWorker
from pdsim.serving.router import Router

__all__ = ["ComputedChecker", "window_differs"]


class _ChunkSpan(NamedTuple):
    """The tokens of a request that one chunk covers."""

    chunk: int
    start: int
    end: int


class ComputedChecker:
    """Calls *report* with an invariant (I10) and a text for whatever is read but was not computed."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._pieces: dict[str, list[tuple[int, int]]] = {}  # by leader: those of the forward that it plans
        self._planned: dict[tuple[str, int, int], tuple[int, int]] = {}  # by leader, room and chunk: done, and new
        self._spans: dict[int, list[_ChunkSpan]] = {}  # by room, of forwards that have begun
        self._done: dict[str, dict[int, int]] = {}  # by rank and room: tokens that are computed, in this incarnation

    def joined(self, member: Any) -> None:
        """Watch what *member*, a rank's program, computes if it is of prefill, and what it writes or compares."""
        if isinstance(member, Router):
            return
        prefill = isinstance(member.worker, PrefillWorker)
        contents: Contents = (member.mover.sender if prefill else member.mover.receiver).pool.contents
        contents.marks = self._marks
        if not prefill:
            return
        name, worker, scheduler = member.rank.name, member.worker, member.scheduler
        self._done[name] = {}
        if scheduler is not None:
            scheduler.iteration_seconds = partial(self._timed, name, scheduler.iteration_seconds)
            scheduler.next_forward = partial(self._chosen, name, scheduler.next_forward)
        worker.compute = partial(self._compute, name, worker.compute)
        contents.computed = partial(self.computed, name)

    def computed(self, rank: str, room: int) -> int:
        """Return how many tokens of *room*, from its first, *rank* has computed."""
        return self._done[rank].get(room, 0)

    def check(self, verb: str, rank: str, room: int, tokens: int) -> None:
        """Check that *rank* has computed the first *tokens* tokens of *room*, which are touched as *verb* says."""
        done = self.computed(rank, room) if rank in self._done else tokens
        if done < tokens:
            what = f"room {room} {verb} {rank} up to token {tokens}, of which {done} are computed there"
            self._report("I10", what)

    # --- what is planned and computed ---

    def _timed(self, leader: str, seconds: Callable[[Any], float], pieces: list[tuple[int, int]]) -> float:
        self._pieces[leader] = pieces
        return seconds(pieces)

    def _chosen(self, leader: str, choose: Callable[[bool], Any], ahead: bool = False) -> Any:
        forward = choose(ahead)
        if forward is not None:
            for chunk, piece in zip(forward.chunks, self._pieces.pop(leader, ()), strict=False):
                self._planned[leader, chunk.room, chunk.index] = piece
        return forward

    def _compute(self, rank: str, compute: Callable[[Any], Any], message: Any) -> Any:
        for chunk in message.chunks:
            piece = self._planned.pop((rank, chunk.room, chunk.index), None)
            if piece is not None:
                self._plan(chunk.room, _ChunkSpan(chunk.index, piece[0], sum(piece)))
        forward = compute(message)
        forward.callbacks.insert(0, lambda _: self._ended(rank, message))  # before what is computed is sent
        return forward

    def _plan(self, room: int, span: _ChunkSpan) -> None:
        spans = self._spans.setdefault(room, [])
        before = spans[-1].end if spans else span.start  # where a prefix was cached, the first begins after it
        if span.start != before:
            what = f"chunk {span.chunk} of room {room} is computed from token {span.start}, not {before}"
            self._report("I10", what)
        spans.append(span)

    def _ended(self, rank: str, message: Any) -> None:
        done = self._done[rank]
        for chunk in message.chunks:
            for span in self._spans.get(chunk.room, ()):
                if span.chunk == chunk.index:
                    done[chunk.room] = max(done.get(chunk.room, 0), span.end)

    def _marks(self, room: int, tokens: range) -> npt.NDArray[np.uint64]:
        marks = np.zeros(len(tokens), np.uint64)
        for span in self._spans.get(room, ()):
            low, high = max(span.start, tokens.start) - tokens.start, min(span.end, tokens.stop) - tokens.start
            if low < high:
                marks[low:high] = span.chunk + 1
        return marks


def window_differs(contents: Contents, room: int, state: tuple[Pages, ...], tokens: int) -> str:
    """Return "" if the window among the rows of *state* holds each page that it touches, else what is wrong.

    Pages are those of the last tokens, each looked at: not by `window_span`, which writers and readers share.
    """
    layout = contents.layout
    shape = layout.shape.state
    if not shape.window:
        return ""
    number, table = next((n, table) for n, table in enumerate(layout.tables[1:]) if table.component == "window")
    rows = state[shape.components.index("window")]
    last = range(max(0, tokens - shape.window), tokens)
    pages = sorted({token // layout.page_size for token in last})
    have = [start + more for start, count in rows for more in range(count)]
    if len(have) < len(pages):
        return f"room {room} has {len(have)} window pages, its window touches {len(pages)}"
    for row, page in zip(have, pages, strict=False):
        first = page * layout.page_size
        whole = range(first, min(first + layout.page_size, tokens))
        if reason := contents.differs(table, number, room, ((row, 1),), whole):
            return f"window page {page}: {reason}"
    return ""
