# SPDX-License-Identifier: Apache-2.0
"""Prefixes of a prefill instance that go to tiers below GPU memory and come back: `Cache.host`, `ssd` and `remote`.

`TierScheduler` decides for the instance, `TierMover` moves the bytes of each rank.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from simpy.events import Event

from pdsim.core.clock import fire
from pdsim.core.errors import PdsimError
from pdsim.kv.layout import KvLayout
from pdsim.kv.messages import MovePrefixes, PrefixesWritten, TierMove, leader
from pdsim.kv.tiers import TIERS, Origin, PageStore, Tiers
from pdsim.serving.block_manager import BlockManager
from pdsim.serving.deployment import Deployment
from pdsim.serving.rank_process import EngineRank, LinkTraffic, Room
from pdsim.transfer import Program

BATCH = 128
"""Pages that a prefetch reads at a time (``STORAGE_BATCH_SIZE`` of SGLang's `mem_cache/hicache_storage.py`)."""


def tiers_of(job: Deployment, traffic: Callable[[], LinkTraffic]) -> Tiers:
    """Return the tiers of an instance of *job*, which has some, whose leader has *traffic*.

    A remote store is one for all, and with `Cache.shared` so are the other tiers, each as large as those of all.
    """
    cache, stores, size = job.cache, {}, job.page_size
    for tier, tokens in ((tier, getattr(cache, tier)) for tier in TIERS if getattr(cache, tier) >= size):
        if tier == "remote":
            stores[tier] = traffic().common(tier, partial(PageStore, int(tokens // size)))
        elif cache.shared:
            stores[tier] = traffic().common(tier, partial(PageStore, int(tokens // size) * len(job.prefills)))
        else:
            stores[tier] = PageStore(int(tokens // size))
    direct = TIERS if cache.prefetch == "none" else ("host",)
    return Tiers(stores, traffic().node, max(1, cache.chunk // size), direct)


class TierMover:
    """Moves pages of one rank to tiers and back, over links that they share with transfers."""

    def __init__(self, engine: EngineRank) -> None:
        self._engine = engine
        self._load: Event | None = None
        self._moving = 0  # reads, and writes to host memory, under way
        engine.works.append(lambda: self._moving > 0)
        self.written = self._tell
        self.forward: Event | None = None  # the last one's end
        engine.handlers[MovePrefixes] = engine.current(lambda _, message: self.move(message))

    @property
    def load(self) -> Event | None:
        """What the next forward waits for; None if nothing is under way."""
        return None if self._load is None or self._load.processed else self._load

    def move(self, message: MovePrefixes) -> Event:
        """Move KV to tiers and back.  The event succeeds when what is read is here."""
        traffic, clock, gpu = self._engine.traffic, self._engine.clock, not message.prefetch
        waits = [traffic.tier(one.tier, one.nbytes, one.objects, one.node, gpu=gpu) for one in message.reads]
        if message.nbytes or message.writes:
            out = self._out(message.nbytes)
            self._moving += 1
            then(out, partial(self._engine.guard, self._write, message))
            if message.blocking:
                waits.append(out)
        if not waits:
            return clock.timeout(0)
        read: Event = clock.all_of(waits)
        self._moving += 1
        then(read, self._moved)
        if gpu:
            before = self.load
            self._load = read if before is None else clock.all_of([before, read])
        return read

    def _out(self, nbytes: int) -> Event:
        # Only when a later pipeline stage has computed what goes, too.
        traffic, done = self._engine.traffic, self._engine.clock.event()
        if self.forward is None or self.forward.processed:
            return traffic.offload(nbytes)
        then(self.forward, lambda: then(traffic.offload(nbytes), lambda: fire(done)))
        return done

    def _moved(self) -> None:
        self._moving -= 1

    def _write(self, message: MovePrefixes) -> None:
        self._moved()
        self.written(message.number, "host")
        for one in message.writes:
            event = self._engine.traffic.tier(one.tier, one.nbytes, one.objects, out=True, gpu=False)
            then(event, partial(self._engine.guard, self.written, message.number, one.tier))

    def _tell(self, number: int, tier: str) -> None:
        engine = self._engine
        engine.send(leader(engine.instance), PrefixesWritten(engine.incarnation, number, tier))


class TierScheduler:
    """Has the pages of *pages*, laid out as *layout*, moved to *tiers* and back by *mover* and the other ranks.

    It calls *wake* when pages are free again.
    """

    def __init__(
        self,
        engine: EngineRank,
        tiers: Tiers,
        pages: BlockManager,
        layout: KvLayout,
        mover: TierMover,
        wake: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._clock = engine.clock
        self._cache = engine.job.cache
        self._tiers = tiers
        self._pages = pages
        self._page_bytes = layout.row_bytes("kv") + layout.row_bytes("index")
        self._mover = mover
        mover.written = self._wrote
        told = engine.current(lambda _, message: self._wrote(message.number, message.tier))
        engine.handlers[PrefixesWritten] = told
        self._wake = wake
        self._fetches: dict[int, tuple[float, Event]] = {}  # by room: when its prefetch began, and its end
        self._moves = 0
        # by number and tier: how many ranks have not written it, and what follows
        self._under_way: dict[tuple[int, str], tuple[int, Callable[[], object]]] = {}
        self.tier_hits: dict[str, dict[int, int]] = {}  # by tier and room: tokens that came from there
        self.tier_pages: dict[str, list[int]] = {}  # of each tier: pages that it was written, and that were read
        self.load_seconds: dict[int, float] = {}  # by room: seconds for which its first forward waited for them
        self.prefetch_seconds: dict[int, float] = {}  # and for which it was not queued before

    def report(self) -> dict[str, Any]:
        """Return what came from each tier, how many pages moved, and for how long requests waited."""
        return {
            "tier_hits": self.tier_hits,
            "tier_pages": self.tier_pages,
            "load_seconds": self.load_seconds,
            "prefetch_seconds": self.prefetch_seconds,
        }

    def began(self, number: int) -> None:
        """Note where the pages of room *number*, to which they have just been given, come from."""
        for tier, count in Counter(tier for _, (tier, _) in self._pages.loaded).items():
            self.tier_hits.setdefault(tier, {})[number] = count * self._engine.job.page_size

    def store(self) -> None:
        """Write computed pages to tiers, without a wait."""
        if self._cache.write != "back" and (out := self._pages.outgoing()):
            self._move(out, ())

    def load(self, rooms: Iterable[int]) -> Event | None:
        """Move what is to be moved before a forward over *rooms*; return the event that it waits for, if it does.

        What comes from below passes host memory, which keeps it.
        """
        back, out = self._pages.incoming(), self._pages.outgoing() if self._cache.write == "back" else []
        if not back and not out:
            return None
        now, event = self._clock.now, self._move(out, [origin for _, origin in back])
        if back:
            waiting = [room for room in rooms if any(room in hits for hits in self.tier_hits.values())]
            below = [key for key, (tier, _) in back if tier != "host"]

            def loaded() -> None:
                self._tiers.put("host", below)
                self._pages.came([key for key, _ in back])
                self._wake()
                for room in waiting:
                    self.load_seconds.setdefault(room, self._clock.now - now)

            then(event, loaded)
        return None if self._cache.overlap and not out else event

    def prefetch(self, room: Room, keys: Sequence[int]) -> None:
        """Begin to read what *room*, with *keys*, finds below host memory into that, if `Cache.prefetch` says so."""
        if self._cache.prefetch == "none" or room.failed:
            return
        hits = self._pages.match(keys)
        found = zip(keys[hits:], self._tiers.find(keys, hits, below=True), strict=False)
        if missing := [(key, origin) for key, origin in found if origin[0] != "host"]:
            self._fetches[room.request.room] = self._clock.now, self._clock.process(self._prefetch(room, missing))

    def queue(self, room: Room, enqueue: Callable[[Any], None]) -> None:
        """Call *enqueue* with *room* once its prefetch lets it go on, as the policy says."""
        number, now, policy = room.request.room, self._clock.now, self._cache.prefetch
        began, fetched = self._fetches.get(number, (now, None))
        if fetched is None or policy == "best_effort":
            enqueue(room)
            return
        waits: Event = fetched
        if policy == "timeout":
            rest = max(0.0, began + self._cache.prefetch_timeout - now)
            waits = self._clock.any_of([fetched, self._clock.timeout(rest)])

        def ready() -> None:
            self.prefetch_seconds[number] = self._clock.now - now
            self._engine.guard(enqueue, room)

        then(waits, ready)

    def _prefetch(self, room: Room, missing: Sequence[tuple[int, Origin]]) -> Program:
        # Once the request has begun, the batch under way is the last.
        try:
            for begin in range(0, len(missing), BATCH):
                if room.failed or room.has_pages:
                    return
                batch = missing[begin : begin + BATCH]
                yield self._move((), [origin for _, origin in batch], prefetch=True)
                self._tiers.put("host", [key for key, _ in batch])
        except PdsimError as error:
            self._engine.fail(error)
        finally:
            del self._fetches[room.request.room]

    def _move(self, out: Sequence[tuple[int, int]], back: Iterable[Origin], prefetch: bool = False) -> Event:
        tiers, keys = self._tiers, [key for key, _ in out]
        lacking = {tier: tiers.missing(tier, keys) for tier in tiers.stores}
        writes = {(tier, -1): len(those) for tier, those in lacking.items() if those}
        reads = Counter((tier, -1 if node == tiers.node else node) for tier, node in back)
        for index, moves in enumerate((writes, reads)):
            for (tier, _), count in moves.items():
                self.tier_pages.setdefault(tier, [0, 0])[index] += count
        self._moves += 1
        message = MovePrefixes(
            self._engine.incarnation,
            len(lacking.get("host", keys)) * self._page_bytes,
            self._of(writes)[("host", -1) in writes :],
            self._of(reads),
            self._moves,
            prefetch,
            bool(out) and self._cache.write == "back",
        )

        if out:
            ranks = len(self._engine.followers) + 1
            self._under_way[self._moves, "host"] = ranks, partial(self._written, keys, {*lacking.get("host", ())})
            for tier in lacking:
                if lacking[tier] and tier != "host":
                    self._under_way[self._moves, tier] = ranks, partial(tiers.put, tier, lacking[tier])
        self._engine.send(self._engine.followers, message)
        return self._mover.move(message)

    def _wrote(self, number: int, tier: str) -> None:
        # A tier has what all ranks have written to it, as SGLang's ranks agree by an all-reduce.
        ranks, action = self._under_way.pop((number, tier))
        if ranks > 1:
            self._under_way[number, tier] = ranks - 1, action
        else:
            action()

    def _written(self, keys: Sequence[int], new: Set[int]) -> None:
        self._pages.written(keys, new)
        self._wake()

    def _of(self, moves: Mapping[tuple[str, int], int]) -> tuple[TierMove, ...]:
        return tuple(
            TierMove(tier, count * self._page_bytes, -(-count // self._tiers.chunk), node)
            for (tier, node), count in moves.items()
        )


def then(event: Event, action: Callable[[], object]) -> None:
    """Call *action* when *event* has succeeded."""
    assert event.callbacks is not None

    def call(_: Event) -> None:
        action()

    event.callbacks.append(call)
