# SPDX-License-Identifier: Apache-2.0
"""What a transfer engine costs: posting, the wire, completion, and the send queue in front of them.

Between GPUs one thread of a rank posts and asks for the ends of what it has posted, one thing after the other.

`EngineModel` has the formula.  No event is spent on a descriptor, nor on a transfer's turn at the posting thread,
which is a sum: ``free = max(now, free) + work``.  A transfer that shares nothing (`IsolatedTransfers`) costs one
event, at its end; another one costs one for the end of its flow, one for its completion if that is later, one if its
wire does not start at once, and one if a copy engine waits for its posting.
"""

from __future__ import annotations

from collections import Counter, deque
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING, Any

from simpy.events import NORMAL

from pdsim.core.clock import LAST
from pdsim.core.errors import BackendUnavailable, SendQueueFull
from pdsim.sim.hosts import PostingShare, PostingThread
from pdsim.sim.memory import CopyEngine
from pdsim.sim.sequence import AWAKE
from pdsim.transfer.job import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from pdsim.core.clock import Clock
    from pdsim.hardware.costs import Engine, EngineModel
    from pdsim.sim.faults import Chance, Draws, Observer
    from pdsim.sim.network import Flow, Link, Network, Path
    from pdsim.sim.sequence import Pace, Stages
    from pdsim.sim.tcp import Streams
    from pdsim.sim.topology import Route, Site, Topology


FIRST = 0.125
"""Share of the latency up to which a transfer may be on the wire to be over when its thread first asks for it:
37 x 12 KiB are, 37 x 96 KiB not (`data/benchmarks/transfers-4xh100.parquet`)."""


Plan = tuple[float, float, float, float, float, float]
"""When its turn comes, it is on the wire, off it, off the copy engine, and complete; and bytes/s on the wire."""


class Posting:
    """One transfer in the hands of the engine.  Made by `SendQueue.post`."""

    # no dataclass: compiled, it would look up the types of modules that are not loaded yet
    __slots__ = (
        *("aborted", "at_first", "at_once", "called", "carried", "descriptors", "done", "flow", "held"),
        *("least", "left", "nbytes", "plan", "posted", "queue", "tag", "wire", "work"),
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
        self.called: float | None = None  # when its thread takes it up, where that is not known before
        self.work = 0.0  # seconds that its descriptors take of the stream that all copies of the rank share
        self.least = 0.0  # when its bytes are there at the earliest
        self.flow: Flow | None = None
        self.plan: Plan | None = None  # of one that is isolated
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
        self.stream: Any = None  # of copies, which follow each other
        self.rest = 0.0  # of the stream after a copy, seconds for each byte
        self.occupancy = occupancy  # bytes that each descriptor keeps it from carrying
        self.streams: Streams | None = None  # of TCP, where the way takes time


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
        target: str = "",
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
        self.blocks = copier is not None and poster.threads == 1
        self._asks = self.blocks and not model.overlap
        self._one_stream = self._asks and model.one_stream
        self._draws = draws
        self.outstanding = self._most = 0  # descriptors, of all that is posted now, and of the largest ever
        self._clock: Clock = network.clock
        self._network = network
        self._isolated: IsolatedTransfers = network.isolated or IsolatedTransfers(network)
        network.isolated = self._isolated
        self._waiting: deque[Posting] = deque()
        queues: tuple[Link, ...] = ()
        if isfinite(model.queue_rate):
            queues = (network.link(f"{name}/queues", model.queues * model.queue_rate),)
        self._outward = self._way(outward, queues, target, read=False)
        self._inward = self._way(inward, queues, target, read=True)

    def _way(self, route: Route, queues: tuple[Link, ...], target: str, *, read: bool) -> WireStage:
        model = self.model
        # within a GPU there is no cap, for the rates are those of links to other GPUs
        fastest = cap = inf if self.copier is not None and self.copier.within else model.fastest(read=read)
        if self.copier is not None and model.copy_rate > cap:
            cap = model.copy_rate
        path = self._network.path((*route.links, *queues), cap)
        narrowest = min((link.nominal / path.links.count(link) for link in path.links), default=inf)
        latency, rate = model.latency + route.latency + read * model.read, min(fastest, narrowest)
        stage = WireStage(path, latency, rate, model.wire_overhead(narrowest, read=read))
        stage.rest = 1.0 / rate - 1.0 / min(cap, narrowest)
        stage.stream = (self.poster, target) if stage.rest else self.poster
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
        if poster.isolated is not None:
            self._isolated.go_on(poster.isolated)
        simple = not (model.depth or model.pipelined or poster.under_way or poster.share) and wire.streams is None
        simple = simple and not (copier and (wire.occupancy or beside))
        saves = model.small is not None and any(model.inline_saving(descriptors, nbytes))
        size = nbytes + descriptors * wire.occupancy
        if not simple or saves or model.fresh_descriptor or not size or (poster.free > now and not beside):
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
        posting.at_once = self._small is not None and self._small.takes(descriptors, nbytes)
        self.poster.under_way += not posting.at_once
        now = self._clock.now
        if flow is not None:
            posting.flow = flow
            flow.done, flow.tag = self._on_carried, posting
        elif begin >= now:
            # the copy engine, which may have to wake up first
            asked = begin if self.copier is None else submitted if self._overlap else posted
            if self.copier is None or asked > now:
                self._clock.call_at(asked, self.begin, posting)
            else:
                self.copier.busy[self._outward.stream], self.copier.idle = posting, begin
                self._clock.call_at(begin, self.carry, posting)
            return posting
        else:
            self._clock.call_at(over, self.complete, posting)
        if self.copier is not None:
            ended = max(end, posted)
            if flow is not None or ended > now:
                self.copier.busy[self._outward.stream] = posting
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
        if posting.plan is not None:
            self._isolated.go_on(posting)
        left, of = posting.left, max(posting.left, 1.0)
        if posting.flow is not None:
            left, posting.flow = self.stop(posting), None
        self.abort(posting)
        return max(1, ceil(posting.nbytes * left / of)), max(1, ceil(posting.descriptors * left / of))

    def abort(self, posting: Posting) -> None:
        """Stop *posting* where it is: none of its bytes moves any more, and it is never reported done."""
        if posting.aborted:
            return
        if posting.plan is not None:
            self._isolated.go_on(posting)
        posting.aborted = True
        if posting.posted is None:
            self._waiting.remove(posting)
            self._let_in()
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
        poster, now, descriptors = self.poster, self._clock.queue.now, posting.descriptors
        if poster.isolated is not None:
            self._isolated.go_on(poster.isolated)
        isolated = not poster.under_way and poster.free <= now
        self.outstanding += descriptors
        early = self._enter(posting) - max(0, descriptors - self._most) * self._fresh
        self._most = max(self._most, descriptors)
        if self._one_stream or posting.wire.rest:
            posting.at_first = posting.nbytes <= FIRST * posting.wire.latency * posting.wire.rate
        if poster.share is not None:
            work = (self.model.posting(descriptors) - early) * poster.slowness
            posting.posted = inf
            poster.post(work, self._on_taken, self._on_posted, posting)
            return
        start = max(now, poster.free)
        if self._draws is not None:
            isolated = False
            start += self._draws.start()
        work = (self.model.posting(descriptors) - early) * poster.slowness
        posting.posted = start + work
        if self._one_stream:
            posting.work = work
        elif (
            self._pipelined and posting.wire.rest and not posting.at_first
        ):  # its host posts nothing beside what a stream carries
            posting.work = (self.model.posting(1) - early) * poster.slowness
        poster.free = posting.posted + self._polls(posting)
        begin = start if self._overlap else posting.posted
        if self._pipelined:
            begin = start + (self.model.posting(1) - early) * poster.slowness
        if isolated and self._isolated.begin(posting, begin):
            return
        if begin > now:
            self._clock.call_at(begin, self.begin, posting)
        else:
            self.begin(posting)

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
        now = self._clock.now
        posting.called = now if self.blocks else None
        if self._overlap:
            first = self.model.posting(1) * self.poster.slowness if self._pipelined else 0.0
            self._clock.call_at(now + first, self.begin, posting)

    def _on_posted(self, posting: Posting) -> None:
        posting.posted = now = self._clock.now
        self.poster.free = now + self._polls(posting)
        if self._one_stream and posting.called is not None:
            posting.work = now - posting.called
        if not self._overlap:
            self.begin(posting)
        elif posting.carried and not posting.aborted:
            self._on_carried(posting)

    def begin(self, posting: Posting) -> None:
        """Let the turn of *posting* at the copy engine come, if there is one, and then its wire start."""
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
        if wire.occupancy and self.copier.shared and not wire.rest:  # nor do they let another process copy meanwhile
            posting.left += posting.descriptors * wire.occupancy
        self.copier.start(posting)

    def start(self, posting: Posting, left: float = -1.0) -> None:
        """Put what is *left* of *posting*, by default all that was when it began, on the wire."""
        size, wire = posting.left if left < 0.0 else left, posting.wire
        if wire.occupancy and self.copier is not None and not posting.least and posting.left == posting.nbytes:
            # descriptors hold up this GPU's copies, not the links that others share with it
            posting.least = self._clock.now + (size + posting.descriptors * wire.occupancy) / wire.rate
        posting.flow = self._network.start(wire.path, size, self._on_carried, posting)

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
        copier, now = self.copier, self._clock.now
        ended, over = self.ends(posting, now)
        if over > now:
            self._clock.call_at(over, self.complete, posting)
        if copier is not None:
            if ended > now:
                self._clock.call_at(ended, copier.leave, posting)
            else:
                copier.leave(posting)
        if over <= now:
            self.complete(posting)

    def ends(self, posting: Posting, off: float) -> tuple[float, float]:
        """Return when *posting*, whose wire is done at the time *off*, leaves the copy engine, and is complete."""
        wire, ready = posting.wire, posting.posted
        assert ready is not None
        if self._pipelined:  # and how long the last descriptor takes on the wire, alone
            ready += (posting.nbytes / posting.descriptors + wire.occupancy) / wire.rate
        ended = max(off + posting.nbytes * wire.rest, ready, posting.least)
        # rounded, what is saved may be more than the latency
        over = max(ended, ended + wire.latency + posting.held)
        return over if wire.rest else ended, over  # such a stream waits for its host

    def reported(self, posting: Posting, over: float) -> float:
        """Return when the end of *posting*, complete at the time *over*, is found if its thread posts no more."""
        asks = self._asks and not (posting.at_once or posting.at_first)
        return max(over, self.poster.free) if asks else over

    def complete(self, posting: Posting) -> None:
        """Report *posting*, which is complete, once its thread asks for that."""
        # The thread that asks for the end is posting: it finds it when it has done what it was given by now.
        free = self.poster.free
        if not self._asks or posting.at_once or posting.at_first:
            self.finish(posting)
        elif self.poster.share is not None:
            self.poster.post(0.0, _nobody, self.ask, posting)
        elif free > self._clock.now:
            self._clock.call_at(free, self.ask, posting)
        else:
            self.ask(posting)

    def ask(self, posting: Posting) -> None:
        """Report *posting*, whose thread asks for its end, unless more is on the one stream of its copies."""
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
        self._let_in()

    def _let_in(self) -> None:
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
        queue = SendQueue(self.network, poster, model, *routes, name, copier, self.draws, there.name)
        if copier is not None:
            self.network.isolated.cut()
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


class IsolatedTransfers:
    """Transfers of *network* that share nothing with another while they last, by the links that limit them.

    When the posting thread, the copy engine and the links of a transfer serve no other, all its times are known: it
    is in no queue, its flow is not in the network, and it takes one event, at its end.  What is about to use one of
    these *meets* it first: it becomes what it would have been at that time, with a flow and events of its own.  So
    results do not depend on which transfers are isolated.
    """

    def __init__(self, network: Network) -> None:
        self.links: dict[Link, Posting] = {}
        self._network = network
        self._clock: Clock = network.clock
        self._ways: dict[Path, tuple[float, tuple[Link, ...]]] = {}

    def begin(self, posting: Posting, begin: float) -> bool:
        """Let *posting*, whose wire is due at the time *begin*, be isolated; return whether it is.

        Its thread has nothing else under way.
        """
        queue, wire = posting.queue, posting.wire
        path, copier, size = wire.path, queue.copier, posting.left
        on = begin if copier is None else copier.alone_at(posting, begin)
        if on is None or wire.streams is not None or not size or self._network.foreseen.series:
            return False
        known = self._ways.get(path)
        if known is None:
            known = self._ways[path] = self._way(path)
        rate, links = known
        for link in links:
            if link in self.links:
                self.go_on(self.links[link])
                return False
        if not (rate and self._network.is_idle(path.live)):
            return False
        off = on + size / rate
        if copier is not None and wire.occupancy:
            posting.least = on + (size + posting.descriptors * wire.occupancy) / wire.rate
        ended, over = queue.ends(posting, off)
        posting.plan = begin, on, off, ended, over, rate
        queue.poster.isolated = posting
        for link in links:
            self.links[link] = posting
        reported = queue.reported(posting, over)
        self._clock.call_at(reported, self._end, posting, NORMAL if reported > off else LAST)
        return True

    def _way(self, path: Path) -> tuple[float, tuple[Link, ...]]:
        # Bytes/s of a flow that is alone on *path*, 0.0 if that is not known, and the links that others may pass.
        rates = [path.cap if link is path.own else link.capacity / path.links.count(link) for link in path.live]
        rate = min(rates, default=inf)
        links = tuple(link for link in dict.fromkeys(path.live) if link is not path.own)
        return rate if 0.0 < rate < inf else 0.0, links or path.live

    def _end(self, posting: Posting) -> None:
        if posting.plan is None:
            return
        _, _, _, ended, _, _ = posting.plan
        self._forget(posting)
        posting.wire.path.ended += posting.left
        if posting.queue.copier is not None:
            posting.queue.copier.served(posting, ended)
        posting.queue.finish(posting)

    def _forget(self, posting: Posting) -> None:
        posting.plan = posting.queue.poster.isolated = None
        for link in self._ways[posting.wire.path][1]:
            del self.links[link]

    def meet(self, links: Iterable[Link]) -> None:
        """Have the isolated transfers on *links* go on as others do."""
        if self.links:
            for link in links:
                if link in self.links:
                    self.go_on(self.links[link])

    def cut(self) -> None:
        """Have all go on as others do: what a link can carry, or which links limit a path, is about to change."""
        self.meet(list(self.links))
        self._ways.clear()

    def go_on(self, posting: Posting) -> None:
        """Have *posting* go on as others do, from what has become of it by now."""
        assert posting.plan is not None
        begin, on, off, ended, over, rate = posting.plan
        clock, queue, path = self._clock, posting.queue, posting.wire.path
        now, copier = clock.now, queue.copier
        self._forget(posting)
        if begin > now:
            clock.call_at(begin, queue.begin, posting)
            return
        if copier is not None:
            if ended >= now:
                copier.resume(posting, on)
            else:
                copier.served(posting, ended)
        if on > now:
            clock.call_at(on, queue.carry, posting)
        elif on == now:
            queue.carry(posting)
        elif off >= now:  # its end comes after all else of its instant
            carried = rate * (now - on)
            path.ended += carried
            queue.start(posting, max(posting.left - carried, 0.0))
        else:
            path.ended += posting.left
            if copier is not None and ended >= now:
                clock.call_at(ended, copier.leave, posting)
            if over >= now:
                clock.call_at(over, queue.complete, posting)
            else:
                clock.call_at(queue.reported(posting, over), queue.ask, posting)

    def carried(self) -> dict[Link, float]:
        """Return the bytes that they have carried over each link until now."""
        demand: dict[Link, float] = {}
        now = self._clock.now
        for posting in dict.fromkeys(self.links.values()):
            assert posting.plan is not None
            _, on, _, _, _, rate = posting.plan
            nbytes = min(max(rate * (now - on), 0.0), posting.left)
            for link in posting.wire.path.links:
                demand[link] = demand.get(link, 0.0) + nbytes
        return demand
