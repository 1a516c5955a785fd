# SPDX-License-Identifier: Apache-2.0
"""What a transfer engine costs: posting, copy engines, the wire, completion, and the send queue in front of them.

Between GPUs one thread of a rank posts and asks for the ends of what it has posted, one thing after the other.

`EngineModel` has the formula.  No event is spent on a descriptor, nor on a transfer's turn at the posting thread,
which is a sum: ``free = max(now, free) + work``.  A transfer costs one event for the end of its flow, one for its
completion if that is later, one if its wire does not start at once, and one if a copy engine waits for its posting.
"""

from __future__ import annotations

from collections import Counter, deque
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING, Any

from pdsim.core.errors import BackendUnavailable, SendQueueFull
from pdsim.sim.hosts import PostingShare, PostingThread
from pdsim.sim.sequence import AWAKE
from pdsim.transfer.job import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from pdsim.core.clock import Clock
    from pdsim.hardware.costs import Engine, EngineModel
    from pdsim.hardware.machine import Gpu
    from pdsim.sim.faults import Chance, Draws, Observer
    from pdsim.sim.network import Flow, Link, Network, Path
    from pdsim.sim.sequence import Pace, Sleep, Stages
    from pdsim.sim.tcp import Streams
    from pdsim.sim.topology import Route, Site, Topology


FIRST = 0.125
"""Share of the latency up to which a transfer may be on the wire to be over when its thread first asks for it:
37 x 12 KiB are, 37 x 96 KiB not (`data/benchmarks/transfers-4xh100.parquet`)."""


class Posting:
    """One transfer in the hands of the engine.  Made by `SendQueue.post`."""

    # no dataclass: compiled, it would look up the types of modules that are not loaded yet
    __slots__ = (
        *("aborted", "at_first", "at_once", "carried", "descriptors", "done", "flow", "held"),
        *("least", "left", "nbytes", "posted", "queue", "tag", "wire", "work"),
    )

    def __init__(
        self,
        queue: SendQueue,
        wire: WireStage,
        nbytes: int,
        descriptors: int,
        done: Callable[[Posting], None],
        tag: Any,
        held: float,
    ) -> None:
        self.queue = queue
        self.wire = wire
        self.nbytes = nbytes
        self.descriptors = descriptors
        self.done = done
        self.tag = tag
        self.held = held
        self.left = nbytes + descriptors * wire.occupancy if queue.copier is None else nbytes  # bytes for the wire
        self.posted: float | None = None  # when posting ends or has ended; None while it waits for room
        self.work = 0.0  # seconds that its descriptors take of the stream that all copies of the rank share
        self.least = 0.0  # when its bytes are there at the earliest
        self.flow: Flow | None = None
        self.aborted = False
        self.at_once = False  # done in the call that posts it
        self.at_first = False  # over when its thread first asks
        self.carried = False  # by the wire, while a thread is still posting it


class WireStage:
    """One direction between two endpoints: what a posting thread writes, or what it reads."""

    def __init__(self, path: Path, latency: float, rate: float, occupancy: float) -> None:
        self.path = path
        self.latency = latency  # from the end of posting and wire to completion
        self.rate = rate  # of a transfer that is alone, and no fault on the way
        self.occupancy = occupancy  # bytes that each descriptor keeps it from carrying
        self.streams: Streams | None = None  # of TCP, where the way takes time


class CopyEngine:
    """Carries the transfers that the ranks of one GPU post: of each rank one at a time, in the order of their wires.

    So do the copies of a GPU over NVLink, whatever their streams (measured on 4 x H200: `docs/validation.md`); with
    *streams*, one for each peer, it stays with one until that is empty (`data/benchmarks/crossing-4xh200.parquet`).

    Ranks are processes, which have it in turns of at most `Gpu.slice` seconds, even in the middle of a copy
    (`data/benchmarks/field-crossing-2xh200.csv`); with 0 their copies go on side by side.  On one stream the
    descriptors of a transfer take their time when the copies before it have ended, and an end is seen when the
    stream is idle (`data/benchmarks/transfers-4xh100.parquet`).  Copies *within* a GPU are kernels: they have an
    engine of their own, and wait `Gpu.process_switch` when the turn is another process'.
    After `Gpu.idle_after` seconds without a transfer it sleeps, and takes `Gpu.idle_wake` to begin.
    """

    def __init__(
        self,
        clock: Clock,
        gpu: Gpu | None = None,
        draws: Draws | None = None,
        *,
        streams: bool = False,
        within: bool = False,
    ) -> None:
        self.within = within
        self.posters: set[PostingThread] = set()  # of the ranks that post through it
        self._clock = clock
        self._draws = draws
        self._streams = streams
        self._idle_after, self._idle_wake, self._slice, self._switch = 0.0, 0.0, 0.0, 0.0
        if gpu is not None:
            self._idle_after, self._idle_wake, self._slice = gpu.idle_after, gpu.idle_wake, gpu.slice
            self._switch = gpu.process_switch if within else 0.0
        self.idle = clock.now  # since when, or when it will be awake
        self.busy: dict[PostingThread, Posting] = {}
        self._ended: dict[PostingThread, float] = {}  # when the last copy of each was
        self._waiting: dict[PostingThread, deque[Posting]] = {}
        self.unseen: dict[PostingThread, list[Posting]] = {}  # what ended while more was on the stream
        self._owner: PostingThread | None = None  # of the engine, since `_since`
        self._last: PostingThread | None = None  # who had it before
        self._since = 0.0
        self._over = False  # whether its slice is, and others wait
        self._number = 0  # of the owner's turn: an alarm of an earlier one says nothing
        self._served: Posting | None = None  # what of the owner's is on the wire
        self._stalled: dict[PostingThread, Posting] = {}  # in the order in which they get their turns

    def take(self, posting: Posting) -> None:
        """Call `SendQueue.carry` when the turn of *posting* has come among those of its posting thread."""
        poster = posting.queue.poster
        if poster in self.busy:
            self._waiting.setdefault(poster, deque()).append(posting)
        else:
            self._begin(posting)

    def _begin(self, posting: Posting) -> None:
        now = self._clock.now
        if not self.busy and now - self.idle > self._idle_after:
            self.idle = now + self._idle_wake
        poster = posting.queue.poster
        self.busy[poster] = posting
        at = self.idle if self._draws is None else max(now, self.idle) + self._draws.copy()
        if posting.work:
            at = max(at, self._ended.get(poster, 0.0) + posting.work)
        if at > now:
            self._clock.call_at(at, posting.queue.carry, posting)
        else:
            posting.queue.carry(posting)

    def sleeps_before(self, at: float, pause: float) -> bool:
        """Return whether it may need waking for a transfer at *at*, or after *pause* seconds without any.

        It is not known where it is busy or several ranks post: then its rest depends on all of them.
        """
        if not self._idle_wake:
            return False
        idle = not self.busy and len(self.posters) == 1 and self.idle <= self._clock.now
        return not (idle and at - self.idle <= self._idle_after and pause < self._idle_after / 2)

    def sleep(self) -> Sleep | None:
        """Return since when it rests, if it sleeps and nobody but the one rank that posts can wake it."""
        known = not self.busy and len(self.posters) == 1 and self.idle <= self._clock.now
        return (self.idle, self._idle_after, self._idle_wake) if known and self._idle_wake else None

    def leave(self, posting: Posting) -> None:
        """Go on to the next of its posting thread, if it was *posting* that was carried."""
        poster = posting.queue.poster
        if self.busy.get(poster) is not posting:
            return
        del self.busy[poster]
        self._ended[poster] = self._clock.now
        if self._stalled.get(poster) is posting:
            del self._stalled[poster]
        self.idle = max(self.idle, self._clock.now)
        waiting, wire, at = self._waiting.get(poster), posting.wire, 0
        while waiting:
            if self._streams:
                at = next((index for index, other in enumerate(waiting) if other.wire is wire), 0)
            following = waiting[at]
            del waiting[at]
            if not following.aborted:
                self._begin(following)
                return
        for other in self.unseen.pop(poster, ()):
            self._clock.call_at(self._clock.now + other.wire.latency, other.queue.finish, other)

    # --- turns of ranks ---

    @property
    def shared(self) -> bool:
        return self._slice > 0.0 and len(self.posters) > 1

    def start(self, posting: Posting) -> None:
        """Put *posting* on the wire, now or in the turn of its rank."""
        if not self.shared:
            posting.queue.start(posting)
            return
        poster = posting.queue.poster
        if self._owner is None:
            self._own(poster)
        if self._owner is poster and not self._over:
            self._serve(posting)
            return
        self._stalled[poster] = posting
        if len(self._stalled) == 1:
            self._limit()

    def rest(self, posting: Posting) -> None:
        """Give the engine to the next rank, *posting* being off the wire, unless its own goes on at once."""
        if self._served is posting:
            self._served = None
        if self._owner is posting.queue.poster and self._served is None:
            self._pass()

    def _own(self, poster: PostingThread) -> None:
        self._owner, self._since, self._over = poster, self._clock.now, False
        self._number += 1

    def _serve(self, posting: Posting) -> None:
        self._served, before, self._last = posting, self._last, self._owner
        if self._switch and before is not None and before is not self._owner:
            self._clock.call_at(self._clock.now + self._switch, self._start, posting)
        else:
            self._start(posting)

    def _start(self, posting: Posting) -> None:
        if self._served is posting:
            posting.queue.start(posting)

    def _pass(self) -> None:
        self._owner = None
        if self._stalled:
            poster = next(iter(self._stalled))
            posting = self._stalled.pop(poster)
            self._own(poster)
            if self._stalled:
                self._limit()
            self._serve(posting)

    def _limit(self) -> None:
        gone = ceil((self._clock.now - self._since) / self._slice)
        self._clock.call_at(self._since + max(1, gone) * self._slice, self._end_slice, self._number)

    def _end_slice(self, number: int) -> None:
        posting = self._served
        if number != self._number or not self._stalled or posting is None:
            return
        if posting.flow is None:  # it has hardly come to it
            self._over = True
            return
        left = posting.queue.stop(posting)
        if left < 1.0:  # it ends at this very instant
            posting.left, self._over = 0.0, True
            self._serve(posting)
            return
        posting.left, posting.flow, self._served = left, None, None
        assert self._owner is not None
        self._stalled[self._owner] = posting
        self._pass()


class SendQueue:
    """Everything that one endpoint posts to one peer.

    *depth* bounds the descriptors posted and not complete.  At the limit `post` refuses (as Mooncake's TCP does), or
    the transfer waits, first come, first served, without keeping the posting thread from other peers; one larger
    than *depth* is let in when nothing else is outstanding.
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
        self.poster = poster
        self.cards: frozenset[tuple[int, int]] = frozenset()  # that all passes, by node
        # what is asked for each transfer; the model is no compiled class
        self._overlap, self._pipelined, self._depth = model.overlap, model.pipelined, model.depth
        self._small, self._fresh = model.small, model.fresh_descriptor
        self.copier = copier
        # between GPUs the thread that posts asks for the end too; where both overlap, within the call
        self.blocks = copier is not None and poster.share is None
        self._asks = self.blocks and not model.overlap
        self._one_stream = self._asks and model.one_stream
        self._draws = draws
        self.outstanding = self._most = 0  # descriptors, of all that is posted now, and of the largest ever
        self._clock: Clock = network.clock
        self._network = network
        self._waiting: deque[Posting] = deque()
        queues: tuple[Link, ...] = ()
        if isfinite(model.queue_rate):
            queues = (network.link(f"{name}/queues", model.queues * model.queue_rate),)
        self._outward = self._way(outward, queues, read=False)
        self._inward = self._way(inward, queues, read=True)

    def _way(self, route: Route, queues: tuple[Link, ...], *, read: bool) -> WireStage:
        model = self.model
        # within a GPU there is no cap, for the rates are those of links to other GPUs
        cap = inf if self.copier is not None and self.copier.within else model.fastest(read=read)
        path = self._network.path((*route.links, *queues), cap)
        narrowest = min((link.nominal / path.links.count(link) for link in path.links), default=inf)
        latency, rate = model.latency + route.latency + read * model.read, min(cap, narrowest)
        stage = WireStage(path, latency, rate, model.wire_overhead(narrowest, read=read))
        if route.chain is not None:
            answer = model.lanes * model.descriptor  # the engine's own latency is that of the last one only
            stage.streams = route.chain.streams(route.latency, answer, rate, model.lanes)
        return stage

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
        posting = Posting(self, self._inward if inward else self._outward, nbytes, descriptors, done, tag, held)
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

    def foresee(self, nbytes: int, descriptors: int, apart: bool, beside: bool) -> Pace | None:
        """Return what equal writes take that a thread posts from now on, one when the one before is complete.

        *apart*: there may be pauses between them, in which a copy engine goes to sleep.  *beside*: the thread posts
        for other series, and nothing else.  Return None if what they do to each other, or to others, is more than a
        `Series` says.
        """
        model, wire, poster, copier, now = self.model, self._outward, self.poster, self.copier, self._clock.now
        simple = not (model.depth or model.pipelined or poster.under_way or poster.share) and wire.streams is None
        simple = simple and not (copier and (wire.occupancy or beside))
        at_once = model.small is not None and model.small.takes(descriptors, nbytes)
        size = nbytes + descriptors * wire.occupancy
        if not simple or at_once or model.fresh_descriptor or not size or (poster.free > now and not beside):
            return None
        posting = model.posting(descriptors) * poster.slowness
        first = now if model.overlap else now + posting
        sleep = AWAKE
        if copier is not None:
            known = copier.sleep() if apart else None
            if copier.shared or (known is None and copier.sleeps_before(first, posting + wire.latency)):
                return None
            sleep = known or AWAKE
        return wire.path, size, posting, model.overlap, wire.latency, sleep

    def resume(
        self,
        nbytes: int,
        descriptors: int,
        stages: Stages,
        flow: Flow | None,
        done: Callable[[Posting], None],
        tag: Any,
    ) -> Posting:
        """Return a write of a series that is under way, as `post` would have made it, *flow* being on the wire."""
        submitted, posted, begin, end, over = stages
        posting = Posting(self, self._outward, nbytes, descriptors, done, tag, 0.0)
        posting.posted = posted
        self.poster.free = max(self.poster.free, posted + self._polls(posting))
        self.outstanding += descriptors
        self.poster.under_way += 1
        now = self._clock.now
        if flow is not None:
            posting.flow = flow
            flow.done, flow.tag = self._on_carried, posting
        elif begin >= now:
            # the copy engine, which may have to wake up first
            asked = begin if self.copier is None else submitted if self._overlap else posted
            if self.copier is None or asked > now:
                self._clock.call_at(asked, self._begin, posting)
            else:
                self.copier.busy[self.poster], self.copier.idle = posting, begin
                self._clock.call_at(begin, self.carry, posting)
            return posting
        else:
            self._clock.call_at(over, self._complete, posting)
        if self.copier is not None:
            ended = max(end, posted)
            if flow is not None or ended > now:
                self.copier.busy[self.poster] = posting
            if flow is None and ended > now:
                self._clock.call_at(ended, self.copier.leave, posting)
        return posting

    def over(self, nbytes: int, descriptors: int, posted: float, tag: Any) -> Posting:
        """Return a write of a series that is complete, and was *posted* then."""
        posting = Posting(self, self._outward, nbytes, descriptors, _nobody, tag, 0.0)
        posting.posted = posted
        return posting

    def carried(self, at: float) -> None:
        """Take note that the last of a series was carried at *at*, which is past."""
        if self.copier is not None:
            self.copier.idle = max(self.copier.idle, at)

    def seconds(self, posting: Posting) -> float:
        """Return about how long *posting*, which has just been admitted, takes if nothing is in its way."""
        assert posting.posted is not None
        wire = posting.wire
        narrowest = max(1.0, min((link.capacity for link in wire.path.links), default=inf))
        unknown = posting.posted == inf
        seconds = self.model.posting(posting.descriptors) if unknown else posting.posted - self._clock.now
        return seconds + posting.nbytes / narrowest + wire.latency + posting.held

    def recall(self, posting: Posting) -> tuple[int, int]:
        """Abort *posting*; return the bytes and descriptors that have not arrived: all if none is acknowledged."""
        left, of = posting.left, max(posting.left, 1.0)
        if posting.flow is not None:
            left, posting.flow = self.stop(posting), None
        self.abort(posting)
        return max(1, ceil(posting.nbytes * left / of)), max(1, ceil(posting.descriptors * left / of))

    def abort(self, posting: Posting) -> None:
        """Stop *posting* where it is: none of its bytes moves any more, and it is never reported done."""
        if posting.aborted:
            return
        posting.aborted = True
        if posting.posted is None:
            self._waiting.remove(posting)
            return
        if posting.flow is not None:
            self.stop(posting)
        if self.copier is not None:
            self.copier.leave(posting)
            self.copier.rest(posting)
        self.poster.drop(posting)
        self._leave(posting)

    def _has_room(self, descriptors: int) -> bool:
        alone = self.model.full == "wait" and not self.outstanding
        return alone or self.outstanding + descriptors <= self._depth

    def _admit(self, posting: Posting) -> None:
        poster, now, descriptors = self.poster, self._clock.now, posting.descriptors
        self.outstanding += descriptors
        early = self._enter(posting) - max(0, descriptors - self._most) * self._fresh
        self._most = max(self._most, descriptors)
        if poster.share is not None:
            work = (self.model.posting(descriptors) - early) * poster.slowness
            posting.posted = inf
            poster.post(work, self._on_taken, self._on_posted, posting)
            return
        start = max(now, poster.free)
        if self._draws is not None:
            start += self._draws.start()
        work = (self.model.posting(descriptors) - early) * poster.slowness
        posting.posted = start + work
        if self._one_stream:
            posting.work = work
            posting.at_first = posting.nbytes <= FIRST * posting.wire.latency * posting.wire.rate
        poster.free = posting.posted + self._polls(posting)
        begin = start if self._overlap else posting.posted
        if self._pipelined:
            begin = start + (self.model.posting(1) - early) * poster.slowness
        if begin > now:
            self._clock.call_at(begin, self._begin, posting)
        else:
            self._begin(posting)

    def _polls(self, posting: Posting) -> float:
        # Between GPUs the latency is the host's, which asks for the end: what else its thread posts comes after.
        return 0.0 if not self.blocks else max(0.0, posting.wire.latency + min(0.0, posting.held))

    def _enter(self, posting: Posting) -> float:
        # Return how much earlier it is posted because it is small and all that its thread has under way are such.
        small, poster = self._small, self.poster
        if small is None or poster.under_way or not small.takes(posting.descriptors, posting.nbytes):
            poster.under_way += 1
            return 0.0
        posting.at_once = True
        early: float
        early, late = self.model.inline_saving(posting.descriptors, posting.nbytes)
        posting.held -= late
        return early

    def _on_taken(self, posting: Posting) -> None:
        if self._overlap:
            first = self.model.posting(1) * self.poster.slowness if self._pipelined else 0.0
            self._clock.call_at(self._clock.now + first, self._begin, posting)

    def _on_posted(self, posting: Posting) -> None:
        posting.posted = self._clock.now
        if not self._overlap:
            self._begin(posting)
        elif posting.carried and not posting.aborted:
            self._on_carried(posting)

    def _begin(self, posting: Posting) -> None:
        if self.copier is None:
            self.carry(posting)
        elif not posting.aborted:
            self.copier.take(posting)

    def carry(self, posting: Posting) -> None:
        """Start the wire of *posting*, whose turn has come, unless it was aborted meanwhile."""
        if posting.aborted:
            return
        wire = posting.wire
        if wire.streams is not None:
            least, growing = wire.streams.start(self._clock.now, posting.descriptors, posting.left)
            posting.least = self._clock.now + least
            posting.held += growing
        if self.copier is None:
            self.start(posting)
            return
        if wire.occupancy:  # descriptors hold up this GPU's copies, not the links that others share with it
            held = posting.descriptors * wire.occupancy
            posting.least = self._clock.now + (posting.left + held) / wire.rate
        self.copier.start(posting)

    def start(self, posting: Posting) -> None:
        posting.flow = self._network.start(posting.wire.path, posting.left, self._on_carried, posting)

    def stop(self, posting: Posting) -> float:
        assert posting.flow is not None
        return self._network.abort(posting.flow)

    def _on_carried(self, posting: Posting) -> None:
        posting.flow = None
        if posting.posted == inf:
            posting.carried = True
        else:
            self._ends(posting)
        if self.copier is not None:
            self.copier.rest(posting)

    def _ends(self, posting: Posting) -> None:
        assert posting.posted is not None
        wire, copier = posting.wire, self.copier
        ready = posting.posted
        if self._pipelined:  # and how long the last descriptor takes on the wire, alone
            ready += (posting.nbytes / posting.descriptors + wire.occupancy) / wire.rate
        now = self._clock.now
        ended = max(max(now, ready), posting.least)
        # rounded, what is saved may be more than the latency
        over = max(ended, ended + wire.latency + posting.held)
        if over > now:
            self._clock.call_at(over, self._complete, posting)
        if copier is not None:
            if ended > now:
                self._clock.call_at(ended, copier.leave, posting)
            else:
                copier.leave(posting)
        if over <= now:
            self._complete(posting)

    def _complete(self, posting: Posting) -> None:
        # The thread that asks for the end is posting: it finds it when it has done what it was given by now.
        free = self.poster.free
        if not self._asks or posting.at_once or posting.at_first:
            self.finish(posting)
        elif free > self._clock.now:
            self._clock.call_at(free, self._ask, posting)
        else:
            self._ask(posting)

    def _ask(self, posting: Posting) -> None:
        if self._one_stream and self.copier is not None and self.poster in self.copier.busy:
            self.copier.unseen.setdefault(self.poster, []).append(posting)
        else:
            self.finish(posting)

    def finish(self, posting: Posting) -> None:
        if not posting.aborted:
            self._leave(posting)
            posting.done(posting)

    def _leave(self, posting: Posting) -> None:
        self.outstanding -= posting.descriptors
        if not posting.at_once:
            self.poster.under_way -= 1
        waiting = self._waiting
        while waiting and self._has_room(waiting[0].descriptors):
            self._admit(waiting.popleft())


def _nobody(_: Posting) -> None: ...


class Fabric:
    """The hardware that all endpoints of a job share, on the job's *clock*.

    *chance* is there only where faults are injected, *draws* only where something jitters; *crowded* has the places
    of GPUs that serve several ranks.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        topology: Topology,
        engine: Engine,
        chance: Chance | None = None,
        observer: Observer | None = None,
        draws: Draws | None = None,
        crowded: Container[Place] = (),
    ) -> None:
        self.clock, self.network, self.topology, self.engine = clock, network, topology, engine
        self.chance, self.observer, self.draws = chance, observer, draws
        self.endpoints: dict[str, Any] = {}  # the last of each rank
        self.failed: Counter[tuple[int, int]] = Counter()  # cards, by node: how many failures each has now
        self._crowded = crowded
        self._copiers: dict[str, CopyEngine] = {}  # by the site whose ranks they serve
        self._shares: dict[str, PostingShare] = {}  # the same, of GPUs

    def poster(self, site: Site) -> PostingThread:
        """Return what posts for a rank at *site*: without a share if nothing keeps its only thread from its work."""
        engine, crowded = self.engine, Place(site.node, site.gpu) in self._crowded
        if engine.threads == 1 and not (crowded and engine.between):
            return PostingThread()
        share = PostingShare(self.clock, engine.serial, engine.between)
        if crowded:
            share = self._shares.setdefault(site.name, share)
        return PostingThread(share, engine.threads)

    def send_queue(self, name: str, poster: PostingThread, here: Site, there: Site) -> SendQueue:
        """Return the queue *name* of what *poster*, at *here*, posts to a rank at *there*.

        Raise a `BackendUnavailable` if the engine has no model for that way, and what `Topology.route` raises.
        """
        engine, inside = self.engine, here.node == there.node
        model = engine.intra if inside else engine.inter
        if model is None:
            where, key = ("within a node", "intra") if inside else ("across nodes", "inter")
            raise BackendUnavailable(
                f"{name}: backend {engine.name!r} does not work {where} ({key}: null); place the ranks otherwise or "
                f"take another backend"
            )
        if model.path == "rdma":
            nic = self.topology.machine.nic
            model = model.on_cards(nic.rate, nic.rails, nic.ports)
        routes = self.topology.route(model.path, here, there), self.topology.route(model.path, there, here)
        copier = None
        if model.in_order:
            within = here == there
            made = CopyEngine(
                self.clock, self.topology.machine.gpu, self.draws, streams=model.streams, within=within
            )
            copier = self._copiers.setdefault(here.name + "/within" * within, made)
            copier.posters.add(poster)
        queue = SendQueue(self.network, poster, model, *routes, name, copier, self.draws)
        if model.path == "rdma":
            queue.cards = frozenset((site.node, site.card) for site in (here, there) if site.card is not None)
        return queue

    def fail(self, card: tuple[int, int]) -> None:
        """Have a card fail, a node and its number there; what becomes of its transfers is `SimEndpoint.leave`."""
        self.network.foreseen.cut()
        self.failed[card] += 1
        for endpoint in self.endpoints.values():
            endpoint.leave(card)

    def repair(self, card: tuple[int, int]) -> None:
        """End one failure of a card."""
        self.failed -= Counter((card,))
        for endpoint in self.endpoints.values():
            endpoint.choose_cards()
