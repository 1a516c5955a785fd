# SPDX-License-Identifier: Apache-2.0
"""The pages of one scheduler, prefill, decode or colocated: who has them, what is cached, what is in quarantine."""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

from pdsim.core.clock import Clock
from pdsim.kv.layout import KvLayout
from pdsim.kv.messages import Submit
from pdsim.kv.pages import PagePool, Pages, PrefixPagePool, StatePool, after
from pdsim.kv.pages import page_pool as in_order
from pdsim.kv.tiers import Origin, Tiers
from pdsim.serving.deployment import Deployment
from pdsim.serving.requests import HASHED, Request, RequestTable


def page_keys(blocks: Sequence[int], tokens: int, page_size: int) -> list[int]:
    """Return the hash of each full page of a prompt of *tokens*; *blocks* are the hashes of `HASHED` tokens each.

    A page is named by the block that its last token lies in, and by where it ends: the block's hash is one of all
    that comes before, too.
    """
    ends = range(page_size, min(tokens, len(blocks) * HASHED) + 1, page_size)
    return [blocks[(end - 1) // HASHED] << 32 | end for end in ends]


def page_pool(job: Deployment, pages: int, cached: bool, tiers: Tiers | None = None, block: int = 1) -> PagePool:
    """Return a pool of so many *pages*, given out in *block*s; with *cached* it keeps prefixes, also in *tiers*."""
    if not cached:
        return in_order(job.engine.pages, pages, block)
    cache = job.cache
    return PrefixPagePool(pages, cache.eviction, int(cache.limit // job.page_size), tiers, cache.write)


class BlockManager:
    """Gives the pages of *pool*, and rows of *state*, to rooms, and takes them back.

    Where the pool caches prefixes, a room's first pages may be those of others before it; *keys* are the hashes of a
    prompt's full pages (`page_keys`).  Those that come from `tiers` are `incoming`, and
    those that go there `outgoing`, until the scheduler asks.

    A room that failed while its KV was on the way keeps its pages: they are in `quarantine` until it is proven that
    nothing of it moves, and `release` follows.
    """

    def __init__(self, pool: PagePool, page_size: int, state: StatePool | None = None) -> None:
        self.pool = pool
        self.state = state
        self._incoming: list[tuple[int, Origin]] = []
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
            self._incoming += pool.loaded
        return reused

    @property
    def loaded(self) -> Sequence[tuple[int, Origin]]:
        """Of the pages that the last `allocate` gave, the keys of those that tiers have, and where."""
        return () if self._prefixes is None else self._prefixes.loaded

    @property
    def tiers(self) -> Tiers | None:
        """What keeps prefixes below GPU memory."""
        return None if self._prefixes is None else self._prefixes.tiers

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
            self._prefixes.commit(room, keys)

    def store(self, room: int, keys: Sequence[int]) -> None:
        """Have the first pages of *room*, which are computed and known by *keys*, written to tiers, if any."""
        if self._prefixes is not None and self._prefixes.tiers is not None:
            self._prefixes.store(room, keys)

    def release(self, room: int, *, pages: bool = True) -> None:
        """Take back what *room* has: rows of state and, unless it was preempted, *pages*.

        With a prefix cache they keep what they hold until somebody needs them.
        """
        self.quarantined.discard(room)
        if pages:
            self.pool.release(room)
        if self.state is not None:
            self.state.release(room)

    def incoming(self) -> list[tuple[int, Origin]]:
        """Return the key and origin of each page that comes from tiers, since the last call.

        Once they are here, `came` is to be called.
        """
        incoming, self._incoming = self._incoming, []
        return incoming

    @property
    def has_incoming(self) -> bool:
        """Whether `incoming` has any."""
        return bool(self._incoming)

    def outgoing(self) -> list[tuple[int, int]]:
        """Return the key and number of each page that goes to tiers, since the last call.

        Once they are in host memory, `written` is to be called.
        """
        pool, tiers = self._prefixes, self.tiers
        if pool is None or tiers is None or not pool.outgoing:
            return []
        outgoing, pool.outgoing = pool.outgoing, []
        pool.written([key for key, _ in outgoing if not tiers.lack(key)])  # they have come by another way since
        return [(key, page) for key, page in outgoing if tiers.lack(key)]

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of *keys*, from the first on, the pool has."""
        return 0 if self._prefixes is None else self._prefixes.match(keys)

    def written(self, keys: Sequence[int], new: Container[int]) -> None:
        """Keep *keys*, which have gone to tiers, in host memory: those *new* to it, and those not evicted since."""
        pool = self._prefixes
        assert pool is not None
        assert pool.tiers is not None
        pool.tiers.put("host", [key for key in keys if key in new or pool.tiers.has("host", key)])
        pool.written(keys)

    def came(self, keys: Sequence[int]) -> None:
        """Let the pages of *keys*, which have come from tiers, be written and evicted as others are."""
        assert self._prefixes is not None
        self._prefixes.written(keys)


class DecodePages(BlockManager):
    """The pages of a decode scheduler, which a request gets before its KV comes.

    *held* says of a request how many of its first pages are here already, less than all; they are not moved.  The
    hashes of its prompt come as `RequestHints`.
    """

    def __init__(self, job: Deployment, layout: KvLayout) -> None:
        pool = page_pool(job, job.decode_pages, job.cache.decode, block=job.decode_block)
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
        return 0 if self._prefixes is None else self._prefixes.match(self.known(request))

    def output(self, request: Submit) -> int:
        """Return for how many tokens of its output *request* has pages from the start."""
        return request.output if self._job.engine.memory == "reserve" else 0

    def reserve(self, request: Submit, held: int) -> tuple[Pages, tuple[Pages, ...]] | None:
        """Return the pages after the first *held*, and the rows of state, of *request*; None if there are too few.

        They are for its input and, unless `ServingEngine.memory` has them grow, all of its output.
        """
        count = self._job.page_count(request.input + self.output(request))
        if self._prefixes is None:
            pages = self.pool.allocate(request.room, count - held)
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


class QuarantineStall:
    """For how long nothing but pages in quarantine has been in the way of a queue.

    They come back once it is proven that nobody writes to them, so it is worth waiting for them, but only *seconds*
    from when the queue was blocked first; then *wake* is called.
    """

    def __init__(self, clock: Clock, seconds: float, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._seconds = seconds
        self._wake = wake
        self._until: float | None = None

    def too_long(self) -> bool:
        """Return whether the queue, which is blocked now, has been for too long, so that its first must give up."""
        if self._until is None:
            self._until = self._clock.now + self._seconds
            self._clock.call_at(self._until, lambda _: self._wake(), None)
        return self._clock.now >= self._until

    @property
    def waiting(self) -> bool:
        """Whether the queue is blocked, and not for too long yet."""
        return self._until is not None and self._clock.now < self._until

    def clear(self) -> None:
        """Record that the queue is not blocked."""
        self._until = None


def out_of_memory(pages: PagePool, count: int, slot: bool = True) -> str:
    """Return why a room that needs *count* pages, and has a *slot* for metadata or not, fails."""
    if not slot:
        what = "all slots for metadata"
    else:
        what = f"{pages.used} of {pages.pages} pages" if pages.free < count else "rows of state"
    return f"OutOfMemory: {what} are in quarantine"


class PrefixCache:
    """Which tokens of prompts a cache of at most *capacity* blocks of `HASHED` tokens has; None is unlimited.

    A hash names a block together with all before it, so a lookup ends at the first block that is missing.  A block
    is used after those before it: it is evicted before them, and never held without them.

    >>> cache = PrefixCache(capacity=2)
    >>> cache.insert(Request(0.0, 1024, 1, None, (7, 8)))
    >>> cache.match(Request(0.0, 1500, 1, None, (7, 8, 9))), cache.match(Request(0.0, 600, 1, None, (8,)))
    (1024, 512)
    """

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be >= 1 block or None, got {capacity}")
        self._capacity = capacity
        self._blocks: OrderedDict[int, int] = OrderedDict()  # tokens of each, the least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, request: Request) -> int:
        """Return how many tokens of the prompt are held, from its start."""
        tokens = 0
        for block in request.hash_ids:
            held = self._blocks.get(block, 0)
            tokens += held
            if held < HASHED:  # a prompt may go on within a block that another has the beginning of
                break
        return min(tokens, request.input)

    def insert(self, request: Request) -> None:
        """Hold the prompt of *request*, and evict what is too much."""
        blocks, capacity, whole = self._blocks, self._capacity, request.input // HASHED
        for place, block in enumerate(request.hash_ids[whole:], whole):  # at most one, which is held in part
            blocks[block] = max(blocks.get(block, 0), request.input - place * HASHED)
            blocks.move_to_end(block)
        held = request.hash_ids[whole - 1 :: -1] if whole else ()  # the first is the most recently used
        blocks.update(dict.fromkeys(held, HASHED))
        if capacity is not None:
            for block in held:
                blocks.move_to_end(block)
        while capacity is not None and len(blocks) > capacity:
            blocks.popitem(last=False)


def hit_share(requests: Iterable[Request], capacity: int | None = None) -> float | None:
    """Return the share of all prompt tokens that one cache holds when their request arrives.

    Each prompt is held from its arrival on, not from the end of its prefill.  None if no request has `hash_ids`.
    """
    if isinstance(requests, RequestTable) and requests.hash_ids is None:
        return None
    cache, held, tokens, hashed = PrefixCache(capacity), 0, 0, False
    for request in requests:
        hashed = hashed or bool(request.hash_ids)
        held += cache.match(request)
        cache.insert(request)
        tokens += request.input
    return held / tokens if hashed else None
