# SPDX-License-Identifier: Apache-2.0
"""What a transfer engine costs: posting, the wire, completion, and the send queue in front of them.

A transfer of *n* descriptors and *S* bytes goes through two stages (`EngineModel`, after LogGP with g =
*descriptor*):

1. The *poster*, one per endpoint, is busy for ``call + n * descriptor`` and a *ramp*; transfers take their turns.
2. The *wire* carries ``S + n * wire_descriptor * rate`` bytes as a flow over the route, at most at *rate*, and with
   all other transfers between the two endpoints at most at ``queues * queue_rate``.

The wire starts when posting does (*overlap*), when the first descriptor is posted (*pipelined*), or when posting has
ended.  The transfer completes *latency* after both have; pipelined, the last descriptor is still to be carried then.
*In order*, the wire takes the next transfer of a GPU when the one before is done: `pdsim.sim.wire`.
A read has *read* more latency, ``n * read_descriptor * rate`` more bytes for its wire, and at most *read_rate*.
A *small* transfer takes ``small.saving`` less if all that its poster has under way are such: it is done in the call.

No event is spent on a descriptor, nor on a transfer's turn at the poster, which is a sum: ``free = max(now, free) +
work``.  A transfer costs one for the end of its flow, one more if that meets other flows (both shared with all flows
of the instant), one for its completion if that is later, one if its wire does not start at once, and one if a copy
engine waits for its posting.

**Threads** that post to one GPU's copy engines: what they do at once, and what they do one at a time.

A thread that is alone posts as `EngineModel.posting` says.  The share *serial* of that work is done one at a time
by the threads of a process, the share *between* by those of all processes of the GPU.  Beside *a* other threads of
its process and *b* of others a thread goes on ``1 + a * serial + b * between`` times as slowly, so *k* threads of
one process are ``1 / (serial + (1 - serial) / k)`` times as fast as one (Amdahl's law).  Transfers of a rank wait
for one of its threads in the order in which they were posted.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from pdsim.core.errors import BackendUnavailable, SendQueueFull
from pdsim.sim.sequence import SeriesSteps
from pdsim.sim.wire import CopyEngine, Posting, WireStage

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.core.clock import Clock
    from pdsim.core.units import Seconds
    from pdsim.hardware.costs import Engine, EngineModel
    from pdsim.hardware.machine import Gpu
    from pdsim.sim.faults import Chance, Draws, Observer
    from pdsim.sim.network import Flow, Link, Network, Path
    from pdsim.sim.sequence import Stages
    from pdsim.sim.topology import Route, Site, Topology

__all__ = ["Fabric", "PostingShare", "PostingThread", "PostingThreads", "SendQueue"]


class PostingThread:
    """The thread, or the copy engine's launch, that hands descriptors over; one transfer after the other."""

    __slots__ = ("free", "slowness", "threads", "under_way")

    def __init__(self, threads: PostingThreads | None = None) -> None:
        self.threads = threads  # that share the work; None: there is this one
        self.free = 0.0  # when it has done everything that it was given
        self.slowness = 1.0  # how many times as long as usual its work takes
        self.under_way = 0  # transfers, but those that are done in the call that posts them


@dataclass(eq=False, slots=True)
class _Work:
    """What one thread is at: *left* seconds of it, as long as no other thread is at work."""

    threads: PostingThreads
    left: Seconds  # of a thread that is alone
    begin: Callable[[Any], None]
    done: Callable[[Any], None]
    tag: Any


class PostingShare:
    """What all threads on one GPU share, or, where there is none, those of one rank.

    It is a processor-sharing queue in closed form: one event stands for the next end, and is foreseen anew
    whenever a thread begins or ends something.  With *serial* of 0 the threads of a process do not slow each other,
    with 1 all of them together are as fast as one alone; *between* is the same of processes.
    """

    def __init__(self, clock: Clock, serial: float, between: float) -> None:
        self._clock = clock
        self._serial = serial
        self._between = between
        self._busy: list[_Work] = []
        self._since = clock.now
        self._turn = 0  # of the event that is to come: what was foreseen before does not hold any more

    def take(self, works: list[_Work]) -> None:
        """Let threads begin with *works* now."""
        self._advance()
        self._busy += works
        self._foresee()
        for work in works:
            work.begin(work.tag)

    def _slowness(self) -> dict[PostingThreads, float]:
        own = Counter(work.threads for work in self._busy)
        every = len(self._busy)
        return {
            threads: 1.0 + (count - 1) * self._serial + (every - count) * self._between
            for threads, count in own.items()
        }

    def _advance(self) -> None:
        now = self._clock.now
        if self._busy:
            slowness = self._slowness()
            for work in self._busy:
                work.left -= (now - self._since) / slowness[work.threads]
        self._since = now

    def _foresee(self) -> None:
        self._turn += 1
        if self._busy:
            slowness = self._slowness()
            least = min(max(0.0, work.left) * slowness[work.threads] for work in self._busy)
            over = [work for work in self._busy if max(0.0, work.left) * slowness[work.threads] <= least]
            self._clock.call_at(self._clock.now + least, self._end, (self._turn, over))

    def _end(self, foreseen: tuple[int, list[_Work]]) -> None:
        # Works that end together are those that were foreseen together, not those with a remainder of 0, which
        # rounding would miss.
        turn, over = foreseen
        if turn != self._turn:
            return
        self._advance()
        self._busy = [work for work in self._busy if work not in over]
        following = [work.threads.next() for work in over]
        for work in over:
            work.done(work.tag)
        self.take([work for work in following if work is not None])


class PostingThreads:
    """The *threads* of one rank, which share with those of others what *share* says.

    Work is taken up in the order in which it was posted.  A rank with one thread that shares with nobody needs
    none of this: its poster is a sum (`pdsim.sim.posting`).
    """

    def __init__(self, share: PostingShare, threads: int) -> None:
        self._share = share
        self._free = threads
        self._waiting: deque[_Work] = deque()

    def post(self, seconds: Seconds, begin: Callable[[Any], None], done: Callable[[Any], None], tag: Any) -> None:
        """Post work of *seconds* on a thread that is alone.

        ``begin(tag)`` is called when a thread takes it up, perhaps now, and ``done(tag)`` at its end.
        """
        work = _Work(self, seconds, begin, done, tag)
        if self._free:
            self._free -= 1
            self._share.take([work])
        else:
            self._waiting.append(work)

    def next(self) -> _Work | None:
        """Return what the thread that has just ended something takes up; without that it is free."""
        if self._waiting:
            return self._waiting.popleft()
        self._free += 1
        return None

    def drop(self, tag: Any) -> None:
        """Forget what was posted with *tag* and waits for a thread; a thread that is at it goes on to its end."""
        self._waiting = deque(work for work in self._waiting if work.tag is not tag)


class SendQueue:
    """Everything that one endpoint posts to one peer.

    *depth* bounds the descriptors posted and not complete.  At the limit `post` refuses (``full="refuse"``, as
    Mooncake's TCP does beyond 1024 blocks), or the transfer waits, first come, first served, without keeping the
    poster from other peers; a transfer larger than *depth* is let in alone, when nothing else is outstanding.
    """

    def __init__(
        self,
        network: Network,
        poster: PostingThread,
        model: EngineModel,
        outward: Route,
        inward: Route,
        name: str,
        copier: CopyEngine | None = None,
        draws: Draws | None = None,
    ) -> None:
        self.name = name
        self.model = model
        # what is asked for each transfer; the model is no compiled class
        self._overlap, self._pipelined, self._depth = model.overlap, model.pipelined, model.depth
        self._small, self._fresh = model.small, model.fresh_descriptor
        self._known: dict[int, float] = {}  # seconds of posting, by descriptors
        self._copier = copier
        self._draws = draws
        self.outstanding = self._most = 0  # descriptors, of all that is posted now, and of the largest ever
        self._clock: Clock = network.clock
        self._network = network
        self._poster = poster
        self._waiting: deque[Posting] = deque()
        queues: tuple[Link, ...] = ()
        if isfinite(model.queue_rate):
            queues = (network.link(f"{name}/queues", model.queues * model.queue_rate),)
        ways = []
        for read, route in enumerate((outward, inward)):
            # within a GPU, for the rates are those of links to other GPUs
            cap = inf if copier is not None and copier.within else model.fastest(read=bool(read))
            path = network.path((*route.links, *queues), cap)
            narrowest = min((link.nominal / path.links.count(link) for link in path.links), default=inf)
            rate = min(cap, narrowest)
            stage = WireStage(path, model.latency + route.latency + read * model.read, rate)
            stage.occupancy = model.wire_overhead(narrowest, read=bool(read))
            if route.chain is not None:
                answer = model.lanes * model.descriptor  # the engine's own latency is that of the last one only
                stage.streams = route.chain.streams(route.latency, answer, rate, model.lanes)
            ways.append(stage)
        self._outward, self._inward = ways

    def post(
        self,
        nbytes: int,
        descriptors: int,
        inward: bool,
        done: Callable[[Posting], None],
        tag: Any = None,
        held: float = 0.0,
    ) -> Posting:
        """Post a transfer to the peer, or from it if *inward*; ``done(posting)`` is called when it is complete.

        *held* seconds are added to its latency.  Raise `SendQueueFull` if the queue has no room and the engine does
        not wait.
        """
        posting = Posting(self._inward if inward else self._outward, nbytes, descriptors, done, tag, held)
        if not self._depth or (not self._waiting and self._has_room(descriptors)):
            self._admit(posting)
        elif self.model.full == "wait":
            self._waiting.append(posting)
        else:
            raise SendQueueFull(
                f"{descriptors} descriptors on top of {self.outstanding} outstanding on {self.name}: the engine "
                f"takes {self.model.depth} and refuses more; send smaller batches or fewer at once"
            )
        return posting

    def foresee(self, nbytes: int, descriptors: int, count: int) -> tuple[Path, float, SeriesSteps] | None:
        """Return path, bytes and steps of *count* writes posted one after the other from now on by an idle poster.

        Return None if what they do to each other, or to others, is more than `SeriesSteps` says.
        """
        model, wire, poster = self.model, self._outward, self._poster
        simple = not (model.depth or model.pipelined or poster.under_way or poster.threads) and wire.streams is None
        at_once = model.small is not None and model.small.takes(descriptors, nbytes)
        size = nbytes + descriptors * wire.occupancy
        if not simple or at_once or model.fresh_descriptor or poster.free > self._clock.now or not size:
            return None
        posting = model.posting(descriptors) * poster.slowness
        if self._copier is not None and self._copier.shared:
            return None
        if self._copier is not None and self._copier.sleeps:
            first = self._clock.now if model.overlap else self._clock.now + posting
            if not self._copier.stays_awake(first, posting + wire.latency):
                return None
        return wire.path, size, SeriesSteps(count, posting, model.overlap, wire.latency)

    def resume(
        self,
        nbytes: int,
        descriptors: int,
        stages: Stages,
        flow: Flow | None,
        done: Callable[[Posting], None],
        tag: Any,
    ) -> Posting:
        """Return a write of a series that is under way, as `post` would have made it.

        *flow* is its own, if it is on the wire.
        """
        _, posted, begin, end, over = stages
        posting = Posting(self._outward, nbytes, descriptors, done, tag, 0.0)
        posting.posted = self._poster.free = posted
        self.outstanding += descriptors
        self._poster.under_way += 1
        now = self._clock.now
        if flow is not None:
            posting.flow = flow
            self._network.on_end(flow, self._on_carried, posting)
        elif begin > now:
            self._clock.call_at(begin, self._begin, posting)
            return posting
        elif begin == now:
            self._begin(posting)
            return posting
        else:
            self._clock.call_at(over, self._complete, posting)
        if self._copier is not None:
            ended = max(end, posted)
            if flow is not None or ended > now:
                self._copier.hold(posting, self._poster)
            if flow is None and ended > now:
                self._clock.call_at(ended, self._make_way, posting)
        return posting

    def carried(self, at: float) -> None:
        """Take note that the last of a series was carried at *at*, which is past."""
        if self._copier is not None:
            self._copier.rests_since(at)

    def seconds(self, posting: Posting) -> float:
        """Return about how long *posting*, which has just been admitted, takes if nothing is in its way."""
        assert posting.posted is not None
        wire = posting.wire
        narrowest = max(1.0, min((link.capacity for link in wire.path.links), default=inf))
        posted = (
            posting.posted - self._clock.now if posting.posted < inf else self.model.posting(posting.descriptors)
        )
        return posted + posting.nbytes / narrowest + wire.latency + posting.held

    def abort(self, posting: Posting) -> None:
        """Stop *posting* where it is: none of its bytes moves any more, and it is never reported done."""
        if posting.aborted:
            return
        posting.aborted = True
        if posting.posted is None:
            self._waiting.remove(posting)
            return
        if posting.flow is not None:
            self._network.abort(posting.flow)
        if self._copier is not None:
            self._copier.leave(posting, self._poster)
            self._copier.rest(posting, self._poster)
        if self._poster.threads is not None:
            self._poster.threads.drop(posting)
        self._leave(posting)

    def _has_room(self, descriptors: int) -> bool:
        alone = self.model.full == "wait" and not self.outstanding
        return alone or self.outstanding + descriptors <= self._depth

    def _admit(self, posting: Posting) -> None:
        poster, now = self._poster, self._clock.now
        self.outstanding += posting.descriptors
        early = self._enter(posting) - max(0, posting.descriptors - self._most) * self._fresh
        self._most = max(self._most, posting.descriptors)
        if poster.threads is not None:
            work = (self._posting(posting.descriptors) - early) * poster.slowness
            posting.posted = inf
            poster.threads.post(work, self._on_taken, self._on_posted, posting)
            return
        start = max(now, poster.free)
        if self._draws is not None:
            start += self._draws.start()
        posting.posted = poster.free = start + (self._posting(posting.descriptors) - early) * poster.slowness
        begin = start if self._overlap else posting.posted
        if self._pipelined:
            begin = start + (self._posting(1) - early) * poster.slowness
        if begin > now:
            self._clock.call_at(begin, self._begin, posting)
        else:
            self._begin(posting)

    def _posting(self, descriptors: int) -> float:
        seconds = self._known.get(descriptors)
        if seconds is None:
            seconds = self._known[descriptors] = self.model.posting(descriptors)
        return seconds

    def _enter(self, posting: Posting) -> float:
        small, poster = self._small, self._poster
        if small is None or poster.under_way or not small.takes(posting.descriptors, posting.nbytes):
            poster.under_way += 1
            return 0.0
        posting.at_once = True
        early, late = self.model.inline_saving(posting.descriptors, posting.nbytes)
        posting.held -= late
        return early

    def _on_taken(self, posting: Posting) -> None:
        if self._overlap:
            first = self._posting(1) * self._poster.slowness if self._pipelined else 0.0
            self._clock.call_at(self._clock.now + first, self._begin, posting)

    def _on_posted(self, posting: Posting) -> None:
        posting.posted = self._clock.now
        if not self._overlap:
            self._begin(posting)
        elif posting.carried and not posting.aborted:
            self._on_carried(posting)

    def _begin(self, posting: Posting) -> None:
        if posting.aborted:
            return
        if self._copier is None:
            self._carry(posting)
        else:
            self._copier.take(self._carry, posting, self._poster)

    def _carry(self, posting: Posting) -> None:
        if posting.aborted:  # while the copy engine woke for it
            return
        wire = posting.wire
        size = posting.nbytes + posting.descriptors * wire.occupancy
        if wire.streams is not None:
            least, growing = wire.streams.start(self._clock.now, posting.descriptors, size)
            posting.least = self._clock.now + least
            posting.held += growing
        if self._copier is None:
            posting.flow = self._network.start(wire.path, size, self._on_carried, posting)
        else:
            self._copier.carry(self._network, posting, self._poster, size, self._on_carried)

    def _on_carried(self, posting: Posting) -> None:
        posting.flow = None
        assert posting.posted is not None
        if posting.posted == inf:
            posting.carried = True
        else:
            self._ends(posting)
        if self._copier is not None:
            self._copier.rest(posting, self._poster)

    def _ends(self, posting: Posting) -> None:
        assert posting.posted is not None
        wire = posting.wire
        ready = posting.posted + wire.tail(posting) if self._pipelined else posting.posted
        now = self._clock.now
        ended = max(max(now, ready), posting.least)
        # rounded, what is saved may be more than the latency
        over = max(ended, ended + wire.latency + posting.held)
        if over > now:
            self._clock.call_at(over, self._complete, posting)
        if self._copier is not None:
            if ended > now:
                self._clock.call_at(ended, self._make_way, posting)
            else:
                self._make_way(posting)
        if over <= now:
            self._complete(posting)

    def _make_way(self, posting: Posting) -> None:
        assert self._copier is not None
        self._copier.leave(posting, self._poster)

    def _complete(self, posting: Posting) -> None:
        if not posting.aborted:
            self._leave(posting)
            posting.done(posting)

    def _leave(self, posting: Posting) -> None:
        self.outstanding -= posting.descriptors
        if not posting.at_once:
            self._poster.under_way -= 1
        waiting = self._waiting
        while waiting and self._has_room(waiting[0].descriptors):
            self._admit(waiting.popleft())


class Fabric:
    """The hardware that all endpoints of a job share, on the job's *clock*.

    *chance* is there only where faults are injected, *draws* only where something jitters.  *gpu* is the machine's,
    and *crowded* has the node and GPU of those that serve several ranks.  *endpoints* has the last endpoint of each
    rank.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        topology: Topology,
        engine: Engine,
        chance: Chance | None = None,
        observer: Observer | None = None,
        gpu: Gpu | None = None,
        draws: Draws | None = None,
        crowded: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        self.clock = clock
        self.network = network
        self.topology = topology
        self.engine = engine
        self.chance = chance
        self.observer = observer
        self.gpu = gpu
        self.draws = draws
        self.crowded = crowded
        self.endpoints: dict[str, Any] = {}  # by rank
        self.copiers: dict[str, CopyEngine] = {}  # by the site whose ranks they serve
        self.shares: dict[str, PostingShare] = {}  # the same, of GPUs

    def threads(self, site: Site) -> PostingThreads | None:
        """Return the posting threads of a rank at *site*; None if nothing keeps its only one from its work.

        Ranks of one GPU that serves several (*crowded*) share what their threads must do one at a time.
        """
        engine, crowded = self.engine, (site.node, site.gpu) in self.crowded
        if engine.threads == 1 and not (crowded and engine.between):
            return None
        share = PostingShare(self.clock, engine.serial, engine.between)
        if crowded:
            share = self.shares.setdefault(site.name, share)
        return PostingThreads(share, engine.threads)

    def send_queue(self, name: str, poster: PostingThread, here: Site, there: Site) -> SendQueue:
        """Return the queue *name* of what *poster*, at *here*, posts to a rank at *there*.

        A copy engine that works in order is one for all ranks of its GPU.  Raise a `BackendUnavailable` if the
        engine has no model for that way, and what `Topology.route` raises.
        """
        engine, inside = self.engine, here.node == there.node
        model = engine.intra if inside else engine.inter
        if model is None:
            where, key = ("within a node", "intra") if inside else ("across nodes", "inter")
            raise BackendUnavailable(
                f"{name}: backend {engine.name!r} does not work {where} ({key}: null); place the ranks otherwise or "
                f"take another backend"
            )
        routes = self.topology.route(model.path, here, there), self.topology.route(model.path, there, here)
        copier = None
        if model.in_order:
            within = here == there
            made = CopyEngine(self.clock, self.gpu, self.draws, streams=model.streams, within=within)
            copier = self.copiers.setdefault(here.name + "/within" * within, made)
            copier.posters.add(poster)
        return SendQueue(self.network, poster, model, *routes, name, copier, self.draws)
