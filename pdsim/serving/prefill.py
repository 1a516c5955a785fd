# SPDX-License-Identifier: Apache-2.0
"""The prefill side of serving: continuous batching with chunked prefill; each chunk is moved as it is computed.

`PrefillScheduler` decides for its instance what runs, `PrefillWorker` computes it on every rank.  Who moves the KV,
and when a request may start and is over for that, is the handoff's (`pdsim.serving.handoff`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace
from mypy_extensions import mypyc_attr
from simpy.events import Event

from pdsim.core.clock import fire
from pdsim.core.errors import PdsimError, TransferError
from pdsim.kv.messages import (
    ROUTER,
    Abort,
    Chunk,
    Destination,
    Dropped,
    Forward,
    Forwards,
    Submit,
    TransferDone,
    index_of,
)
from pdsim.kv.pages import Pages, Runs, after, before, cut, pair
from pdsim.kv.pull import KvSource
from pdsim.kv.push import KvSender
from pdsim.serving.block_manager import BlockManager, out_of_memory, page_keys, page_pool
from pdsim.serving.cp_gather import ForwardGather
from pdsim.serving.deployment import Deployment
from pdsim.serving.forward_runs import ForwardRuns, further
from pdsim.serving.offload import TierMover, TierScheduler, then, tiers_of
from pdsim.serving.policies import handoff_of, step_pieces
from pdsim.serving.rank_process import EngineRank, HandoffLeader, InstanceScheduler, Mover, Room
from pdsim.serving.steps import PostingHost, iteration_seconds
from pdsim.transfer import Program
from pdsim.transfer.job import Rank


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a prefill instance until the router stops it."""
    return (yield from prefill_rank(rank, Deployment.from_plain(job), instance, index).run())


def prefill_rank(rank: Rank, job: Deployment, instance: str, index: int) -> EngineRank:
    """Return the *index*-th rank of a prefill *instance*; the first also schedules."""
    handoff, engine = handoff_of(job.engine), EngineRank(rank, job, instance, index)
    engine.mover = mover = handoff.prefill_mover(engine)
    engine.worker = worker = PrefillWorker(engine, mover)
    if job.gather is not None:
        engine.gather = ForwardGather(rank, job, instance, index, mover.layout, mover.contents)
    if not index:
        engine.scheduler = scheduler = PrefillScheduler(engine, worker, mover)
        scheduler.handoff = handoff.prefill_leader(scheduler, mover)
    return engine


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillMover(Mover):
    """The half of a handoff on a prefill rank: *sender* is given each chunk when it is computed."""

    def __init__(self, engine: EngineRank, sender: KvSender | KvSource) -> None:
        super().__init__(engine, sender.layout)
        self.sender = sender
        self.contents = sender.pool.contents

    def __len__(self) -> int:
        return len(self.sender)

    def report(self) -> dict[str, Any]:
        """Return why metadata did not go the way of the policy, and how often."""
        return {"fallbacks": self.sender.fallbacks}

    def started(self, message: Forward) -> None:
        """Move what can go while the forward runs, which has begun on the device."""
        for chunk in message.cached:
            self.sender.send(chunk)

    def computed(self, chunks: Iterable[Chunk], last: bool) -> None:  # noqa: ARG002 for others
        """Move *chunks*, whose forward has ended; *last*: there are no more of it."""
        for chunk in chunks:
            self.sender.send(chunk)

    def posted(self) -> float:
        """Return until when the scheduler's thread posts, on the clock; the past if it does not."""
        return 0.0


class PrefillRequest(Room):
    """A request at the prefill scheduler, from its `Submit` until nothing of it is left on any rank.

    ::

        Submit                        pages                 every rank has computed it, and moved what it moves
          |                             |                     |
        waiting --queue--> queued --start--> running ----complete----> push: over
          |                  |                  |                      pull: kept --read--> over
          +------ fail ------+------ fail ------+                              |                 |
                             v                                               revoke -> revoked --+
                          failed --quiesced (nothing of it moves on any rank)--> over

    It waits until its KV has somewhere to go; pushed, that is its *destination*.  Times are seconds on the clock.
    """

    def __init__(self, request: Submit, ranks: int) -> None:
        super().__init__(request, ranks, "waiting")
        self.total = request.input
        self.destination: Destination | None = None
        self.ready = 0.0  # when the host has made it known to the scheduler
        self.noticed = 0.0  # when it could be queued
        self.started = 0.0  # when it got pages
        self.ended = 0.0  # its last forward on this rank
        self.runs: Runs = ()  # of the whole request, once it has pages
        self.state_runs: tuple[Runs, ...] = ()  # of each component
        self.slot = -1  # of its metadata
        self.done = 0  # tokens that a forward has covered or covers now, or that were cached
        self.sent = 0  # pages that a chunk has, and those that decode holds
        self.gathered = 0  # tokens that context-parallel ranks have gathered with its forwards
        self.keys: Sequence[int] = ()  # of its pages, where there is a prefix cache
        self.priority = 0
        self.chunks = 0
        self.nbytes = 0

    def start(self, now: float, destination: Destination, pages: Pages, state: tuple[Pages, ...], slot: int) -> None:
        """Give it *pages* after those that decode holds, paired with where they go."""
        self.state = "running"
        self.started = now
        self.has_pages = True
        self.destination = destination
        self.sent = destination.held
        self.slot = slot
        self.runs = pair(pages, destination.pages)
        self.state_runs = tuple(map(pair, state, destination.state))


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillLeader(HandoffLeader):
    """The half of a handoff beside *scheduler*: when a request may start, and when it is over, as its KV says."""

    def __init__(self, scheduler: PrefillScheduler) -> None:
        self._scheduler = scheduler
        self._engine = scheduler.engine

    def accept(self, room: PrefillRequest) -> None:
        """Have *room*, which has just come, queued once its KV has somewhere to go."""

    def start(self, room: PrefillRequest) -> bool:
        """Give *room*, the first in the queue, what it needs to run; return whether there was enough."""
        raise NotImplementedError

    def has_slot(self) -> bool:
        """Return whether there is a row for the metadata of one more request."""
        return True

    def look(self, _: Any = None) -> None:
        """Do what this side does when a forward is launched, and when there is none to launch."""

    def complete(self, room: PrefillRequest) -> None:
        """Act on *room*: every rank has computed and moved its part."""

    def abort(self, sender: str, number: int, room: PrefillRequest | None) -> None:
        """Give *room*, of that *number*, up for *sender*; there is none if it is over or has not come."""

    def forget(self, room: PrefillRequest) -> None:
        """Give back what this part holds for *room*, which is over and quiesced."""


class PrefillScheduler(InstanceScheduler[PrefillRequest, BlockManager, PrefillLeader]):
    """Decides what an instance computes, and owns its pages and the rooms that they are given to.

    A request is queued when its KV has somewhere to go.  Each iteration (`next_forward`) takes up to `chunk` tokens;
    every rank computes it, and its chunks are moved (`PrefillWorker`) while the next is computed.  A request has
    pages for its whole input from its first forward until every rank has done its part.
    """

    def __init__(self, engine: EngineRank, worker: PrefillWorker, mover: PrefillMover) -> None:
        job = engine.job
        tiers = tiers_of(job, lambda: engine.traffic) if job.cache.tiered else None
        pool = page_pool(job, job.prefill_pages, job.cache.prefill, tiers, block=job.prefill_block)
        pages = BlockManager(pool, job.page_size, job.state_pool(mover.layout))
        super().__init__(engine, pages, job.engine.prefill)
        self.worker = worker
        self.mover = mover
        self.hits: dict[int, int] = {}  # by room: tokens that were cached
        self._counts = job.prefill.counts
        self._queue: deque[PrefillRequest] = deque()
        self._idle: Event | None = None
        self._next: Forward | None = None
        self._begun: list[int] = []  # failed rooms of it, which ranks hear of when it has begun
        self.launched = self._ends = 0.0  # with ``ahead``, on the clock, of the last launch and the running forward
        self._held_up = 0.0  # seconds that the requests which the next forward begins hold it up
        self.has_runs: bool | None = None  # whether forwards may be chosen at once, when that has been asked
        worker.scheduler = self
        self.tiers: TierScheduler | None = None
        if worker.tiers is not None and tiers is not None:
            self.tiers = TierScheduler(engine, tiers, pages, mover.layout, worker.tiers, self.wake)
        engine.handlers |= {Submit: self._submit, TransferDone: self._sent, Abort: engine.introduced(self._abort)}

    def begin(self) -> None:
        """Begin to schedule."""
        self.clock.process(self._iterate())

    def report(self) -> dict[str, Any]:
        """Return the numbers of pages, of open rooms on this side, and of messages that came too late."""
        counts = super().report() | ({"hits": self.hits} if self.job.cache.prefill else {})
        return counts | ({} if self.tiers is None else self.tiers.report())

    def drop(self, incarnation: str) -> None:
        """Give up the rooms that were to go to *incarnation*, of a decode instance."""
        for room in [room for room in self.rooms.values() if room.request.decode == incarnation]:
            self._give_up(room)
        self.handoff.drop(incarnation)

    # --- what becomes of a room ---

    def _submit(self, _: str, request: Submit) -> None:
        if request.prefill != self.engine.incarnation:
            self.engine.ignore()
            return
        now = self.clock.now
        room = PrefillRequest(request, self.job.prefill.size)
        if self.worker.runs is not None:
            self.worker.runs.catch_up()
        self.host.pace = self.worker.posts.take(now, self.job.engine.busy)
        room.ready = now + self.host.arrive(request.input, now)
        if self.worker.runs is not None:
            self.worker.runs.go_on()
        if request.hints is not None:
            room.priority = request.hints.priority
            room.keys = page_keys(request.hints.blocks, request.input, self.job.page_size)
        self.rooms[request.room] = room
        if self.tiers is not None:
            self.clock.call_at(room.ready, self._prefetch, room)
        self.handoff.accept(room)

    def queue(self, room: PrefillRequest) -> None:
        """Have *room* wait for its first forward, from when the host has made it known to the scheduler."""
        room.state = "queued"
        enqueue = self._enqueue if self.tiers is None else self._after_prefetch
        if room.ready > self.clock.now:
            self.clock.call_at(room.ready, enqueue, room)
        else:
            enqueue(room)

    def _prefetch(self, room: PrefillRequest) -> None:
        assert self.tiers is not None
        self.tiers.prefetch(room, self.pages.usable(room.keys, room.request.input))

    def _after_prefetch(self, room: PrefillRequest) -> None:
        assert self.tiers is not None
        self.tiers.queue(room, self._enqueue)

    def _enqueue(self, room: PrefillRequest) -> None:
        if not room.failed:
            self._queue.append(room)
            self.wake()

    def _sent(self, sender: str, message: TransferDone) -> None:
        room = self.rooms.get(message.room)
        if room is None:
            self.engine.ignore()
        elif message.reason:
            self.fail(room, message.reason, message.lost)
        elif not room.failed:
            if sender == self.engine.rank.name:
                room.ended = self.clock.now
            room.nbytes += message.nbytes * self._counts[index_of(sender)]
            if room.ranks.succeed(index_of(sender)):
                self.handoff.complete(room)

    def _abort(self, sender: str, message: Abort) -> None:
        # The router is told whether the room began: one that has no pages yet has moved nothing, and may start anew
        # elsewhere. What another incarnation has written, only that incarnation or the decode side itself can say.
        if sender != ROUTER and message.incarnation != self.engine.incarnation:
            self.engine.ignore()
            return
        room = self.rooms.get(message.room)
        if sender == ROUTER:
            self.engine.send(ROUTER, Dropped(message.room, room is not None and not room.has_pages))
        self.handoff.abort(sender, message.room, room)
        if room is not None:
            self._give_up(room)

    def fail(self, room: PrefillRequest, reason: str, lost: str = "") -> None:
        """Fail *room* and tell the router, with the instance that is *lost* if that is why; only once."""
        if not room.failed:
            self.engine.send(ROUTER, TransferDone(room.request.room, reason=reason, lost=lost))
            self._give_up(room)

    def _give_up(self, room: PrefillRequest) -> None:
        if room.fail():
            number = room.request.room
            if room in self._queue:
                self._queue.remove(room)
            if room.has_pages:
                self.pages.quarantined.add(number)
            if self._next is not None and self.job.cache.found == "scheduled":
                self._begun.extend(chunk.room for chunk in self._next.chunks if chunk.room == number)
            if number not in self._begun:
                self._abort_on_ranks(number)
            self.wake()

    def _abort_on_ranks(self, number: int) -> None:
        self.engine.send(self.engine.followers, Abort(number))
        self.worker.abort(number)

    def forget(self, number: int) -> None:
        """End a room: nothing of it moves any more on any rank, so what it has here is free."""
        room = self.rooms.pop(number)
        self.handoff.forget(room)
        if room.has_pages:
            self.pages.release(number)
            self.wake()
        self.end_if_drained()

    # --- what runs ---

    def wake(self) -> None:
        """Let an idle scheduler look; one that is computing looks at the end of its iteration."""
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()

    def _iterate(self) -> Program:
        try:
            while not self.engine.has_ended:
                yield from self._iteration()
        except PdsimError as error:
            self.engine.fail(error)

    def _iteration(self) -> Program:
        engine, cache = self.engine, self.job.cache
        yield from self._posting()
        forward, self._next = self._still_wanted(self._next) or self.next_forward(), None
        if forward is None:
            if not self._queue:  # also when its last one has just failed: the next to come waits as long
                self.blocked.clear()
            if self.tiers is not None:
                self.tiers.store()
            self.handoff.look()
            self._idle = self.clock.event()
            yield self._idle
            return
        load = None if self.tiers is None else self.tiers.load([chunk.room for chunk in forward.chunks])
        if load is not None:
            self._next = forward
            yield load
            forward, self._next = self._still_wanted(forward), None
            assert forward is not None
        engine.send(engine.followers, forward)
        computed = self.worker.compute(forward)
        done = [(room, room.done) for room in (self.rooms.get(chunk.room) for chunk in forward.chunks) if room]
        while self._begun:
            self._abort_on_ranks(self._begun.pop())
        if self.job.engine.noticed == "prefill":
            self.clock.call_at(self.clock.now + self.host.costs.launch, self.handoff.look, None)
        if self.job.engine.ahead:
            yield from self._choose_ahead(forward)
        yield computed
        if cache.prefill:
            for room, tokens in done:  # without those of a forward that has been chosen ahead since
                if cache.found == "computed":
                    self._cache(room, tokens)
                if self.tiers is not None and room.request.room in self.rooms:
                    self.pages.store(room.request.room, room.keys[: tokens // self.job.page_size])
        if self.tiers is not None:
            self.tiers.store()

    def _choose_ahead(self, forward: Forward) -> Program:
        # The next one is chosen when the host has launched this one, and is launched while the GPU computes: what
        # comes later waits for the one after.  Where nothing waits then, the next is chosen at this one's end.
        self._ends = self.clock.now + forward.seconds + self.job.gather_seconds(sum(forward.tokens))
        if isinstance(forward, Forwards):
            assert self.worker.runs is not None
            run = self.worker.runs.open[-1]
            yield run.last
            self.worker.runs.catch_up()
            if run.stopped:  # the one after is launched, and computes nothing
                self._next = Forward(forward.incarnation, run.stopped, ())
                return
            self._ends = run.forwards.begins[-1] + run.forwards.seconds[-1]
        if self.launched < self._ends:
            yield self.clock.timeout(max(0.0, self.launched - self.clock.now))
            yield from self._posting()
            if self.clock.now <= self._ends:
                self._next = self.next_forward(ahead=True)

    def _posting(self) -> Program:
        # Without queues this thread posts: it neither chooses a forward nor looks at what has ended meanwhile.
        while self.mover.posted() > self.clock.now:
            yield self.clock.at(self.mover.posted())

    def _still_wanted(self, forward: Forward | None) -> Forward | None:
        # No rank had heard of it, so none waits for it before the pages of a failed room are free.  Where others may
        # have found those pages, as they were scheduled, they are computed all the same.
        if forward is None or self.job.cache.found == "scheduled":
            return forward
        rooms = ((chunk.room, self.rooms.get(chunk.room)) for chunk in forward.chunks)  # not all: thousands wait
        wanted = {number for number, room in rooms if room is not None and not room.failed}
        kept = [number for number, chunk in enumerate(forward.chunks) if chunk.room in wanted]
        if len(kept) == len(forward.chunks):
            return forward
        if isinstance(forward, Forwards):
            return Forward(forward.incarnation, forward.seconds, ())
        return replace(
            forward,
            chunks=tuple(forward.chunks[number] for number in kept),
            tokens=tuple(forward.tokens[number] for number in kept) if self.job.gather else forward.tokens,
            cached=tuple(chunk for chunk in forward.cached if chunk.room in wanted),
        )

    def next_forward(self, ahead: bool = False) -> Forward | None:
        """Return the next iteration, None if nothing can run; one chosen *ahead* runs when that of now has ended.

        Raise a `ConfigError` if the policy gives more tokens than there are.
        """
        self._held_up = 0.0
        if not self._queue:
            return None
        pieces: list[tuple[int, int]] = []
        chunks: list[Chunk] = []
        cached: list[Chunk] = []  # need no forward
        gathered: list[int] = []  # tokens of each chunk
        limits = self.job.chunk, self.job.prefill_batch
        for room, tokens in step_pieces(self._queue, *limits, self.policy, self.job.engine.scheduler, self._start):
            pieces.append((room.done, tokens))
            if self.job.cache.early and room.done // self.job.page_size > room.sent:
                cached.append(self._chunk(room, 0))
            chunks.append(self._chunk(room, tokens))
            gathered.append(self._gather(room))
        if not chunks:
            return None
        seconds = self._after_launch(self.iteration_seconds(pieces), self._held_up, ahead)
        if self.has_runs is not False and len(chunks) == 1 and room.total - room.done > limits[0]:
            chunk, more = further(self, room, chunks[0])
            if more:
                return Forwards(self.engine.incarnation, seconds, (chunk,), more=more)
        if self.job.gather is None:
            gathered = [sum(new for _, new in pieces)] if self.job.prefill_time.exchange else []
        return Forward(self.engine.incarnation, seconds, tuple(chunks), tuple(cached), tuple(gathered))

    def _start(self, room: PrefillRequest) -> PrefillRequest | None:
        if self.handoff.start(room):
            self.blocked.clear()
            self._held_up += self.host.admit(room.request.input)
            return room
        if self.gives_up(self.pages.running):
            count, slot = self.job.page_count(room.request.input), self.handoff.has_slot()
            self.fail(room, out_of_memory(self.pages.pool, count, slot))
        return None

    def allocate(self, room: PrefillRequest, held: int) -> tuple[Pages, tuple[Pages, ...]] | None:
        """Return the pages of *room* after the first *held*, and its rows of state; None if there are too few.

        Those that are cached need no forward, except that of the last token.
        """
        request, number = room.request, room.request.room
        count = self.job.page_count(request.input)
        given = self.pages.allocate(number, count, self.pages.usable(room.keys, request.input))
        if given is None:
            return None
        pages, cached = given
        if self.job.cache.prefill:
            room.done = room.gathered = self.hits[number] = cached * self.job.page_size
            if self.tiers is not None:
                self.tiers.began(number)
        rest = after(before(pages, count), held)  # a whole block of pages may be more than there are tokens for
        state = self.pages.allocate_state(number, request.input, request.input, rest)
        return None if state is None else (rest, state)

    def _chunk(self, room: PrefillRequest, tokens: int) -> Chunk:
        request, destination = room.request, room.destination
        assert destination is not None
        held, first = destination.held, room.sent
        room.done += tokens
        last = room.done == request.input
        end = max(held, self.job.page_count(room.done) if last else room.done // self.job.page_size)
        room.sent = end
        if self.job.cache.found == "scheduled":
            self._cache(room, room.done)
        chunk = Chunk(
            request.room,
            request.decode,
            room.chunks,
            first,
            request.input,
            cut(room.runs, first - held, end - first),
            last,
            (room.slot, destination.slot),
            room.noticed,
            room.started,
            room.state_runs if last else (),
            held,
        )
        room.chunks += 1
        return chunk

    def _gather(self, room: PrefillRequest) -> int:
        # The tokens of the pages that are complete with the room's last chunk.
        before, page = room.gathered, self.job.page_size
        room.gathered = room.done if room.done == room.request.input else room.done // page * page
        return room.gathered - before

    def _cache(self, room: PrefillRequest, tokens: int) -> None:
        number = room.request.room
        if number in self.rooms:
            self.pages.commit(number, room.keys[: tokens // self.job.page_size])

    # --- how long it takes ---

    def iteration_seconds(self, pieces: list[tuple[int, int]]) -> float:
        """Return how long an iteration over *pieces* takes, the host's share included."""
        forward = self.job.prefill_time.prefill(pieces)
        return iteration_seconds(forward, self.host.costs.launch, self.host.step(), self.job.engine.overlap)

    def launching(self, forward: float) -> float:
        """Return for how long the end of a *forward* is not seen to: an overlap loop launches the next one first."""
        if self.job.engine.ahead:
            if self._next is None and self.launched >= self.clock.now:  # a forward that its launch bounds
                self._next = self.next_forward(ahead=True)
            return max(0.0, self.launched - self.clock.now)
        return max(0.0, 2 * self.host.costs.launch - forward) if self.job.engine.overlap and self._queue else 0.0

    def _after_launch(self, forward: float, held_up: float, ahead: bool) -> float:
        # Posts of KV that go on beside a launch make it longer.  One that is launched *ahead* costs time only if its
        # launch ends later than the *forward* could.
        costs, posting = self.host.costs, self.worker.posts.due(self.clock.now)
        beside = costs.posted_beside + costs.posted_more * (posting - 1) if posting else 0.0
        if not self.job.engine.ahead:
            return forward + held_up + beside
        self.launched = self.clock.now + held_up + self.host.launch() + beside
        if not ahead:
            return max(forward + held_up + beside, self.launched - self.clock.now)
        return max(forward, self.launched - self._ends)


class PrefillWorker:
    """Computes on one prefill rank what the scheduler says, and has the *mover* move it."""

    def __init__(self, engine: EngineRank, mover: PrefillMover) -> None:
        job = engine.job
        self.engine = engine
        self.mover = mover
        self.posts = PostingHost(job.engine.prefill, job.engine.variation, job.seed, f"{engine.instance}.send")
        self.scheduler: PrefillScheduler | None = None  # of the first rank
        self._passed = [0.0] * job.prefill.at(engine.index).pp  # when each earlier stage ends its last forward
        self._gathering: Event | None = None  # the end of the last forward that is gathered, or whose tokens travel
        self._computing = 0  # forwards that have not ended; the device ends each
        self._computed_one = False  # whether one has since `_worked` was called
        self._unposted: deque[tuple[tuple[Chunk, ...], bool]] = deque()  # of forwards that have ended
        self._unsent: deque[Forward] = deque()  # that have begun, and whose chunks have not all been sent
        self.runs: ForwardRuns | None = None  # once there has been one
        self.tiers = TierMover(engine) if job.cache.tiered else None
        self._early: list[Forward] = []  # of these, those whose cached pages wait for the chunks before them
        engine.works.append(self._worked)
        engine.handlers[Forward] = engine.current(lambda _, message: self.compute(message))
        engine.handlers[Forwards] = engine.handlers[Forward]
        engine.handlers[Abort] = engine.introduced(lambda _, message: self.abort(message.room))

    def _worked(self) -> bool:
        computed, self._computed_one = self._computed_one, False
        return computed or self._computing > 0

    def compute(self, message: Forward) -> Event:
        """Occupy the device with a forward, then move its chunks.  The event succeeds when the forward ends.

        A pipeline stage begins when the stages before it have passed the forward on, as long each as *message* says,
        and what it reads is here from the tiers; with ``cache.overlap`` it only ends no sooner.
        """
        self.mover.sender.expect((*message.cached, *message.chunks))
        self._computing += 1
        self._unsent.append(message)
        if isinstance(message, Forwards):
            if self.runs is None:
                assert isinstance(self.mover.sender, KvSender)
                self.runs = ForwardRuns(self, self.mover.sender)
            return self.runs.begin(message).over
        clock = self.engine.clock
        begin = clock.now
        stage_seconds = message.seconds + self.engine.job.gather_seconds(sum(message.tokens))
        for stage, end in enumerate(self._passed):
            begin = self._passed[stage] = max(begin, end) + stage_seconds
        load, beside = None if self.tiers is None else self.tiers.load, self.engine.job.cache.overlap
        before = None if beside else load
        if begin > clock.now or before is not None:
            forward = clock.event()
            clock.call_at(begin, lambda done: self.engine.guard(self._pass, message, before, done), forward)
        else:
            forward = self._begin_forward(message)
        if beside and load is not None:
            forward = clock.all_of([forward, load])
        if self.tiers is not None:
            self.tiers.forward = forward
        assert forward.callbacks is not None
        forward.callbacks.append(lambda _: self.engine.guard(self._computed, message))
        return forward

    def abort(self, room: int) -> None:
        """End *room* after the forward that is under way, and move no more of it."""
        if self.runs is not None:
            self.runs.stop(room)
        self.mover.sender.abort(room)

    def ended(self) -> None:
        """Count a forward that has ended."""
        self._computing -= 1
        self._computed_one = True

    def _pass(self, message: Forward, load: Event | None, done: Event) -> None:
        if load is not None and load.callbacks is not None:
            load.callbacks.append(lambda _: self.engine.guard(self._pass, message, None, done))
        else:
            forward = self._begin_forward(message)
            assert forward.callbacks is not None
            forward.callbacks.append(lambda _: fire(done))

    def _begin_forward(self, message: Forward) -> Event:
        # What is cached can be moved at once, with ``layerwise`` each plane when its layer is computed.
        engine = self.engine
        device, now = cast("Any", engine.rank.device), engine.clock.now
        forward: Event = device.compute(message.seconds)
        if engine.gather is not None:
            forward, computed = engine.clock.event(), forward
            engine.clock.process(self._gathered(message, computed, forward))
        elif message.tokens:
            forward = self._routed(forward, message)
        if engine.job.layerwise:  # a process calls this, and workers are woken by callbacks only
            mover: Any = self.mover
            engine.clock.call_at(now, lambda its: engine.guard(mover.layers, message, *its), device.computing)
        elif message.cached:
            engine.clock.call_at(now, lambda begun: engine.guard(self._started, begun), message)
        return forward

    def _started(self, message: Forward) -> None:
        # Another rank may have sent the chunks before by now, and all send in one order.
        if message is self._unsent[0]:
            self.mover.started(message)
        else:
            self._early.append(message)

    def sent(self) -> None:
        """Go on with the next forward: the chunks of the first have been sent."""
        self._unsent.popleft()
        if self._early and self._early[0] is self._unsent[0]:
            self.mover.started(self._early.pop(0))

    def _routed(self, forward: Event, message: Forward) -> Event:
        # Starting an exchange drops the last one; a rank may not have ended it when it hears of the next.
        exchange, tokens = self.engine.job.prefill_time.exchange, sum(message.tokens)
        sizes = tokens * exchange.network, tokens * exchange.port, message.seconds
        before, clock, traffic = self._gathering, self.engine.clock, self.engine.traffic
        if before is None or before.processed:
            self._gathering = clock.all_of([forward, *traffic.exchange(*sizes)])
            return self._gathering
        done = self._gathering = clock.event()
        then(before, lambda: then(clock.all_of([forward, *traffic.exchange(*sizes)]), lambda: fire(done)))
        return done

    def _gathered(self, message: Forward, computed: Event, done: Event) -> Program:
        # All ranks gather in one order, also those that hear of a forward before another has gathered the last.
        before, self._gathering = self._gathering, done
        yield computed
        if before is not None and not before.processed:
            yield before
        assert self.engine.gather is not None
        try:
            yield from self.engine.gather.run(message)
        except TransferError as error:
            self.engine.fail(error)
        else:
            fire(done)

    def _computed(self, message: Forward) -> None:
        self.ended()
        clock = self.engine.clock
        late = 0.0 if self.scheduler is None else self.scheduler.launching(message.seconds)
        turns = self.posts.turns(clock.now, late, len(message.chunks))
        if not turns and not self._unposted and self.posts.last <= clock.now:
            self.mover.computed(message.chunks, True)
            self.sent()
            return
        # behind the others: there is no turn if it computed nothing, and turns may have passed in a pause
        turns = turns or [max(self.posts.last, clock.now)]
        pieces = [message.chunks] if len(turns) == 1 else [(chunk,) for chunk in message.chunks]
        for number, (when, chunks) in enumerate(zip(turns, pieces, strict=True), 1):
            self._unposted.append((chunks, number == len(turns)))
            clock.call_at(when, self._post, None)

    def _post(self, _: None) -> None:
        chunks, last = self._unposted.popleft()
        self.engine.guard(self.mover.computed, chunks, last)
        if last:
            self.sent()
