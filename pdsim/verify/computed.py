# SPDX-License-Identifier: Apache-2.0
"""Check what was computed where and when, for `pdsim.verify.invariants`.

The leader's scheduler says which tokens of which rooms each forward covers, before it knows of pages; the ends of
forwards say which tokens a rank has computed.  What is read of a room on a prefill rank must be computed there:
every token in a page, and all of them where state or metadata is read.  And only computed tokens are written into
memory, each marked with the number of the chunk that computed it.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from pdsim.kv.contents import Contents, Marks
from pdsim.kv.messages import Submit
from pdsim.kv.pages import Pages, after
from pdsim.serving.prefill import PrefillWorker
from pdsim.serving.router import Router

_ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""

PROMPTS = 0xF000
"""The first number of shared prompts, above those of rooms."""


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
        self._schedulers: dict[str, Any] = {}  # by instance, of its last incarnation
        self._prompts: dict[int, int] = {}  # by room
        self._stores: dict[int, list[list[tuple[int, int]]]] = {}  # by leader: keys and pages that go to tiers
        self._loads: dict[int, list[tuple[int, int]]] = {}  # and that come from them
        # both, by incarnation and number of what moves them: a rank may hear of it long after its leader
        self._moves: dict[tuple[str, int], tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
        self._waiting: dict[int, list[list[Any]]] = {}  # by program, those that go when so many forwards have ended
        # by incarnation and tier: pages that have come there, and are not said to be there
        self._there = Counter[tuple[str, str]]()
        self._writes: dict[tuple[str, int, str], list[int]] = {}  # by move and tier: pages, and ranks that lack them
        self._leaving: dict[tuple[int, int], set[int]] = {}  # by program and move: pages that are on their way there
        self._sent_now: dict[str, bool] = {}  # by rank: whether its pages are sent before they are computed
        self._kept: dict[tuple[int, int], bytes] = {}  # by rank of an instance and key: what tiers have
        self._done: dict[str, dict[int, int]] = {}  # by rank and room: tokens that are computed, in this incarnation
        # by rank and room, of forwards whose layers leave by themselves: clock, beginning, seconds and last token
        self._begun: dict[tuple[str, int], list[tuple[Any, float, float, int]]] = {}

    def joined(self, member: Any) -> None:
        """Watch what *member*, a rank's program, computes if it is of prefill, and what it writes or compares."""
        if isinstance(member, Router):
            return
        prefill = isinstance(member.worker, PrefillWorker)
        contents: Contents = (member.mover.sender if prefill else member.mover.receiver).pool.contents
        if member.job.cache.prefill or member.job.cache.decode:  # then a page may be of another room's chunk
            contents.prompt = self._prompts.__getitem__
        else:
            contents.marks = self._marks
        if not prefill:
            return
        name, worker, scheduler = member.rank.name, member.worker, member.scheduler
        self._done[name] = {}
        if scheduler is not None:
            self._schedulers[name.partition(".")[0]] = scheduler
            if scheduler.tiers is not None:
                pool, pages = scheduler.pages.pool, scheduler.pages
                pool.reuse = partial(self._reuse, member, pool.reuse)
                pages.outgoing = partial(self._outgoing, member, pages.outgoing)
                pool.tiers.put = partial(self._puts, member, pool.tiers.put)
            scheduler.iteration_seconds = partial(self._timed, name, scheduler.iteration_seconds)
            scheduler.next_forward = partial(self._chosen, name, scheduler.next_forward)
            if member.job.cache.prefill and member.job.cache.found == "computed":
                scheduler.pages.commit = partial(self._known, member, scheduler.pages.commit)
        if worker.tiers is not None:
            traffic: Any = member.traffic
            traffic.offload = partial(self._offloads, member, traffic.offload)
            worker.tiers.move = partial(self._moved, member, worker.tiers.move)
            worker.tiers.written = partial(self._written, member, worker.tiers.written)
            if not member.job.cache.overlap:
                worker._begin_forward = partial(self._begins, member, worker._begin_forward)
        worker.compute = partial(self._compute, member, worker.compute)
        contents.computed = partial(self._own, name)
        if member.job.layerwise:
            self._begun = {of: begun for of, begun in self._begun.items() if of[0] != name}
            worker.mover.layers = partial(self._layers, member, worker.mover.layers)

    def submitted(self, request: Submit) -> None:
        """Note which prompt *request* has: rooms whose blocks begin alike have the same tokens."""
        blocks = request.hints.blocks if request.hints is not None else ()
        self._prompts[request.room] = PROMPTS + blocks[0] if blocks else request.room

    def _own(self, rank: str, room: int) -> range:
        # Without what it has from a cache, which others have left there.
        spans = self._spans.get(room)
        begun = [end for *_, end in self._begun.get((rank, room), ())]
        return range(spans[0].start if spans else 0, max([self.computed(rank, room), *begun]))

    def computed(self, rank: str, room: int, share: float = 1.0) -> int:
        """Return how many tokens of *room*, from its first, *rank* has computed, up to *share* of its layers."""
        done = self._done[rank].get(room, 0)
        for clock, begun, seconds, end in self._begun.get((rank, room), ()):
            if clock.now >= begun + share * seconds - _ROUNDING:
                done = max(done, end)
        return done

    def check(self, verb: str, rank: str, room: int, tokens: int, cached: int = 0, share: float = 1.0) -> None:
        """Check that *rank* has computed *tokens* of *room*, touched as *verb* says, in *share* of its layers.

        The first *cached* ones another room has computed: their contents say whether it has.
        """
        done = max(cached, self.computed(rank, room, share)) if rank in self._done else tokens
        if done < tokens:
            what = f"room {room} {verb} {rank} up to token {tokens}, of which {done} are computed there"
            self._report("I10", what)

    def _layers(self, member: Any, layers: Callable[..., None], message: Any, begun: float, seconds: float) -> None:
        name, clock = member.rank.name, member.clock
        for chunk in message.chunks:
            for span in self._spans.get(chunk.room, ()):
                if span.chunk == chunk.index:
                    self._begun.setdefault((name, chunk.room), []).append((clock, begun, seconds, span.end))
                    self._write(member, chunk.room, span.start)  # also what is not sent, for rooms beside it
        layers(message, begun, seconds)

    def _timed(self, leader: str, seconds: Callable[[Any], float], pieces: list[tuple[int, int]]) -> float:
        self._pieces[leader] = pieces
        return seconds(pieces)

    def _chosen(self, leader: str, choose: Callable[[bool], Any], ahead: bool = False) -> Any:
        forward = choose(ahead)
        if forward is not None:
            for chunk, piece in zip(forward.chunks, self._pieces.pop(leader, ()), strict=False):
                self._planned[leader, chunk.room, chunk.index] = piece
        return forward

    def _known(self, member: Any, commit: Callable[..., None], room: int, keys: Any) -> None:
        self.check("known on", member.rank.name, room, len(keys) * member.job.page_size)
        commit(room, keys)

    def _compute(self, member: Any, compute: Callable[[Any], Any], message: Any) -> Any:
        rank = member.rank.name
        for chunk in message.chunks:
            piece = self._planned.pop((rank, chunk.room, chunk.index), None)
            if piece is not None:
                self._plan(chunk.room, _ChunkSpan(chunk.index, piece[0], sum(piece)))
        forward = compute(message)
        forward.callbacks.insert(0, lambda _: self._ended(member, message))  # before what is computed is sent
        return forward

    def _plan(self, room: int, span: _ChunkSpan) -> None:
        spans = self._spans.setdefault(room, [])
        before = spans[-1].end if spans else span.start  # where a prefix was cached, the first begins after it
        if span.start != before:
            what = f"chunk {span.chunk} of room {room} is computed from token {span.start}, not {before}"
            self._report("I10", what)
        spans.append(span)

    def _ended(self, member: Any, message: Any) -> None:
        # A forward writes whether or not its rooms are still wanted: they must have their pages yet.
        done = self._done[member.rank.name]
        for chunk in message.chunks:
            for span in self._spans.get(chunk.room, ()):
                if span.chunk == chunk.index:
                    done[chunk.room] = max(done.get(chunk.room, 0), span.end)
                    self._write(member, chunk.room, span.start)
        self._store(member, 1)

    def _write(self, member: Any, room: int, start: int) -> None:
        if not member.rank.device.holds_bytes:
            return
        pages, page_size = self._pages(member, room), member.job.page_size
        if pages is None:
            self._report(
                "I3", f"the forward of room {room} on {member.rank.name} ends when it has no pages any more"
            )
        else:
            member.mover.contents.fill(room, after(pages, start // page_size), start // page_size * page_size)

    def _pages(self, member: Any, room: int) -> Pages | None:
        # All of them, those included that decode holds; None if it has none any more.
        scheduler = self._schedulers[member.rank.name.partition(".")[0]]
        return scheduler.pages.pool.owners.get(room) if scheduler.engine.incarnation == member.incarnation else ()

    def _outgoing(self, member: Any, outgoing: Callable[[], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        pages = outgoing()
        if pages and member.rank.device.holds_bytes:
            self._stores.setdefault(id(member), []).append(pages)
        return pages

    def _reuse(self, member: Any, reuse: Callable[..., Any], room: int, count: int, keys: Any) -> Any:
        given, loaded = reuse(room, count, keys), member.scheduler.pages.pool.loaded
        for key, (tier, _) in loaded if given is not None else ():
            if member.scheduler.pages.tiers.stores[tier].find(key) is None:
                self._report("I10", f"room {room} on {member.rank.name} finds a page in {tier}, which has it not")
        if given is not None and loaded and member.rank.device.holds_bytes:  # from tiers
            pages = [page for start, size in given[0] for page in range(start, start + size)]
            back = [(key, page) for (key, _), page in zip(loaded, pages[given[1] - len(loaded) :], strict=False)]
            self._loads.setdefault(id(member), []).extend(back)
        return given

    def _moved(self, member: Any, move: Callable[[Any], Any], message: Any) -> Any:
        # What goes to tiers is what forwards that have begun leave; what comes is what went there with that key.
        number, out = (message.incarnation, message.number), message.nbytes or message.writes
        if member.scheduler is not None:
            stores = self._stores.get(id(member), []) if out else []
            loads = self._loads.pop(id(member), []) if message.reads and not message.prefetch else []
            self._moves[number] = stores.pop(0) if stores else [], loads
        pages, loads = self._moves.get(number, ([], []))
        if pages:
            self._waiting.setdefault(id(member), []).append([member.worker._computing, pages, message.number])
        if out:
            self._store(member, 0)
        self._sent_now[member.rank.name] = bool(pages) and member.worker._computing > 0
        below = self._counts(member, message) if member.scheduler is not None else 0
        moved = move(message)
        self._sent_now[member.rank.name] = False
        if below:
            there = {(message.incarnation, "host"): below}
            moved.callbacks.insert(0, lambda _: self._there.update(there))

        def loaded(_: Any) -> None:
            for key, page in loads:
                data = self._kept.get((member.index, key))
                if data is None:
                    self._report("I10", f"page {page} on {member.rank.name} comes from a tier that was not given it")
                else:
                    member.mover.contents.put_page(page, data)

        if loads:
            moved.callbacks.insert(0, loaded)
        return moved

    def _counts(self, member: Any, message: Any) -> int:
        # The pages that it writes to each tier, and those that come to host memory from below.
        size, ranks = member.scheduler.tiers._page_bytes, 1 + len(member.followers)
        coming = {tier for number, tier in member.scheduler.tiers._under_way if number != message.number}
        for (incarnation, tier), pages in self._there.items():
            if incarnation == message.incarnation and pages > 0 and tier not in ("host", *coming):
                self._report("I10", f"{pages} pages came to {tier} of {member.rank.name}, which does not know them")
                self._there[incarnation, tier] = 0
        for tier, nbytes in (("host", message.nbytes), *((one.tier, one.nbytes) for one in message.writes)):
            self._writes[message.incarnation, message.number, tier] = [nbytes // size, ranks]
        return int(sum(one.nbytes for one in message.reads if one.tier != "host") // size)

    def _puts(self, member: Any, put: Callable[[str, Any], None], tier: str, keys: Any) -> None:
        tiers = member.scheduler.tiers._tiers
        # of host memory only those that it lacked: what comes from there again is not written again
        new = [] if tier not in tiers.stores else tiers.missing(tier, keys) if tier == "host" else keys
        self._there[member.incarnation, tier] -= len(new)
        if self._there[member.incarnation, tier] < 0:
            self._report("I10", f"{tier} of {member.rank.name} has {len(new)} pages, before all have come there")
        put(tier, keys)

    def _offloads(self, member: Any, offload: Callable[..., Any], *how: Any, **more: Any) -> Any:
        if self._sent_now.get(member.rank.name):
            self._report("I10", f"pages leave {member.rank.name} for a tier before the forward under way has ended")
        return offload(*how, **more)

    def _written(self, member: Any, written: Callable[[int, str], None], number: int, tier: str) -> None:
        self._leaving.pop((id(member), number), None)
        pages = self._writes.get((member.incarnation, number, tier), [0, 0])
        pages[1] -= 1
        if not pages[1]:
            self._there[member.incarnation, tier] += pages[0]
        written(number, tier)

    def _begins(self, member: Any, begin: Callable[[Any], Any], message: Any) -> Any:
        leaving = {page for (of, _), pages in self._leaving.items() if of == id(member) for page in pages}
        for chunk in message.chunks if leaving else ():
            first = [span.start for span in self._spans.get(chunk.room, ()) if span.chunk == chunk.index]
            pages = after(self._pages(member, chunk.room) or (), max([0, *first]) // member.job.page_size)
            own = {page + more for page, count in pages for more in range(count)}  # what it may write
            if own & leaving:
                what = f"page {min(own & leaving)}, which is on its way to host memory"
                self._report("I3", f"a forward of room {chunk.room} on {member.rank.name} writes {what}")
        return begin(message)

    def _store(self, member: Any, ended: int) -> None:
        waiting = self._waiting.get(id(member), [])
        for one in waiting:
            one[0] -= ended
        while waiting and not waiting[0][0]:
            _, pages, number = waiting.pop(0)
            self._leaving[id(member), number] = {page for _, page in pages}
            for key, page in pages:
                self._kept[member.index, key] = member.mover.contents.page_bytes(page)

    def _marks(self, room: int, tokens: range) -> Marks:
        spans = self._spans.get(room, ())
        inside = [(max(one.start, tokens.start), min(one.end, tokens.stop), one.chunk + 1) for one in spans]
        return tuple([one for one in inside if one[0] < one[1]])


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
