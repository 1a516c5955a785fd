# SPDX-License-Identifier: Apache-2.0
"""The pages of one scheduler, prefill, decode or colocated: who has them, what is cached, what is in quarantine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdsim.kv.layout import KvLayout
from pdsim.kv.messages import Submit
from pdsim.kv.pages import PagePool, Pages, PrefixPagePool, StatePool, after
from pdsim.kv.pages import page_pool as in_order
from pdsim.serving.deployment import Deployment
from pdsim.serving.requests import HASHED
from pdsim.serving.settings import Cache

__all__ = ["BlockManager", "DecodePages", "page_keys", "page_pool"]


def page_keys(blocks: Sequence[int], tokens: int, page_size: int) -> list[int]:
    """Return the hash of each full page of a prompt of *tokens*; *blocks* are the hashes of 512 tokens each.

    A page is named by the block that its last token lies in, and by where it ends: the block's hash is one of all
    that comes before, too.
    """
    ends = range(page_size, min(tokens, len(blocks) * HASHED) + 1, page_size)
    return [blocks[(end - 1) // HASHED] << 32 | end for end in ends]


def page_pool(
    pages: int, cache: Cache, cached: bool, page_size: int, host: bool = False, order: str = "best_fit"
) -> PagePool:
    """Return a pool of so many *pages*; with *cached*, one that keeps prefixes as *cache* says.

    With *host*, it keeps them in host memory, too, if *cache* has any.  Without a cache pages are given out in
    *order*, one of `pdsim.kv.pages.ORDERS`.
    """
    if not cached:
        return in_order(order, pages)
    limit, there = int(cache.limit // page_size), int(cache.host // page_size) if host else 0
    return PrefixPagePool(pages, cache.eviction, limit, there)


class BlockManager:
    """Gives the pages of *pool*, and rows of *state*, to rooms, and takes them back.

    Where the pool caches prefixes, a room's first pages may be those of others before it; *keys* are the hashes of a
    prompt's full pages (`page_keys`).  `to_host` and `from_host` count pages of prefixes that go to host memory and
    come back, until the scheduler has had them moved.

    A room that failed while its KV was on the way keeps its pages: they are in `quarantine` until it is proven that
    nothing of it moves, and `release` follows.  This class sends nothing, and does not know who proves what.
    """

    def __init__(self, pool: PagePool, page_size: int, state: StatePool | None = None) -> None:
        self.pool = pool
        self.state = state
        self.to_host = 0
        self.from_host = 0
        self.quarantined: set[int] = set()
        self._prefixes = pool if isinstance(pool, PrefixPagePool) else None
        self._page_size = page_size

    def report(self) -> dict[str, int]:
        """Return the account of pages: those in use, in quarantine and free add up to ``pages``."""
        pool = self.pool
        held = sum([pool.count(room) for room in self.quarantined])
        return {
            "pages": pool.pages,
            "peak_pages": pool.peak,
            "free_pages": pool.free,
            "used_pages": pool.used - held,
            "quarantined_pages": held,
        }

    @property
    def running(self) -> int:
        """How many rooms have pages that they give back when they are done: in quarantine they may stay."""
        return len(self.pool) - len(self.quarantined)

    def usable(self, keys: Sequence[int], tokens: int) -> Sequence[int]:
        """Return those of *keys* that a prompt of *tokens* can reuse: its last token is computed in any case."""
        return keys[: (tokens - 1) // self._page_size]

    def match(self, keys: Sequence[int]) -> int:
        """Return how many pages of *keys*, from the first on, are here."""
        return 0 if self._prefixes is None else self._prefixes.match(keys)

    def shared(self, keys: Sequence[int]) -> int:
        """Return how many tokens of *keys* lie in pages that others use, so that one more user needs none."""
        pool = self._prefixes
        return 0 if pool is None else pool.in_use(keys[: pool.match(keys)]) * self._page_size

    def allocate(self, room: int, pages: int, keys: Sequence[int] = ()) -> tuple[Pages, int] | None:
        """Return so many *pages* for *room*, and how many of them are cached ones; None if there are too few."""
        pool = self._prefixes
        if pool is None:
            given = self.pool.allocate(room, pages)
            return None if given is None else (given, 0)
        reused = pool.reuse(room, pages, keys)
        if reused is not None:
            self.from_host += pool.loaded
        return reused

    @property
    def loaded(self) -> int:
        """Of the pages that the last `allocate` gave, those that come back from host memory."""
        return 0 if self._prefixes is None else self._prefixes.loaded

    def allocate_state(self, room: int, tokens: int, reach: int, pages: Pages) -> tuple[Pages, ...] | None:
        """Return the rows of state of *room*; None, and its pages are given back, if there are too few."""
        assert self.state is not None
        rows = self.state.allocate(room, tokens, reach, pages)
        if rows is None:
            self.pool.release(room)
        return rows

    def commit(self, room: int, keys: Sequence[int]) -> None:
        """Make the first pages of *room*, whose tokens are here, known by *keys*."""
        if self._prefixes is not None:
            self.to_host += self._prefixes.commit(room, keys)

    def quarantine(self, room: int) -> None:
        """Keep the pages of *room*, which failed, from everybody until they are released."""
        self.quarantined.add(room)

    def release(self, room: int, *, pages: bool = True) -> None:
        """Take back what *room* has: rows of state and, unless it was preempted, *pages*.

        With a prefix cache they keep what they hold until somebody needs them.
        """
        self.quarantined.discard(room)
        if pages:
            self.pool.release(room)
        if self.state is not None:
            self.state.release(room)

    def moves(self) -> tuple[int, int]:
        """Return how many pages of prefixes go to host memory and come back since the last call."""
        moves = self.to_host, self.from_host
        self.to_host = self.from_host = 0
        return moves


class DecodePages(BlockManager):
    """The pages of a decode scheduler, which a request gets before its KV comes.

    *held* says of a request how many of its first pages are here already, less than all; they are not moved.  The
    hashes of its prompt come as `RequestHints`.
    """

    def __init__(self, job: Deployment, layout: KvLayout) -> None:
        pool = page_pool(job.decode_pages, job.cache, job.cache.decode, job.page_size, order=job.engine.pages)
        super().__init__(pool, job.page_size, job.state_pool(layout))
        self.held: Callable[[Submit], int] = self._cached
        self._job = job
        self._keys: dict[int, list[int]] = {}  # of the prompt's pages, of each room that wants some

    def known(self, request: Submit) -> Sequence[int]:
        """Return the hashes of the pages of *request* that can be cached; none without a cache."""
        if self._prefixes is None:
            return ()
        keys = self._keys.get(request.room)
        if keys is None:
            blocks = request.hints.blocks if request.hints is not None else ()
            keys = self._keys[request.room] = page_keys(blocks, request.input, self._page_size)
        return self.usable(keys, request.input)

    def _cached(self, request: Submit) -> int:
        return self.match(self.known(request))

    def reserve(self, request: Submit, held: int) -> tuple[Pages, tuple[Pages, ...]] | None:
        """Return the pages and the rows of state that *request* gets; None if there are too few.

        They are for its input and, unless `ServingEngine.memory` has them grow, all of its output.  There are no
        pages for the first *held*.
        """
        reserved = request.output if self._job.engine.memory == "reserve" else 0
        count = self._job.page_count(request.input + reserved)
        if self._prefixes is None:
            given = self.allocate(request.room, count - held)
            pages = None if given is None else given[0]
        else:
            given = self.allocate(request.room, count, self.known(request))
            pages = None if given is None else after(given[0], held)
        if pages is None:
            return None
        state = self.allocate_state(request.room, request.input, request.input + request.output, pages)
        return None if state is None else (pages, state)

    def arrived(self, room: int) -> None:
        """Make the prompt of *room*, which is here, known to the prefix cache."""
        if self._prefixes is not None:
            self.commit(room, self._keys[room])

    def forget(self, room: int) -> None:
        """Forget the hashes of *room*, which is over."""
        self._keys.pop(room, None)
