# SPDX-License-Identifier: Apache-2.0
"""The decode side of serving: pages first, then continuous batching, with few events: steps are in closed form.

`DecodeScheduler` decides for its instance who gets pages and what runs in the next step.  Who moves the KV, and when
pages are free of it, is the handoff's (`pdsim.serving.handoff`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace
from mypy_extensions import mypyc_attr
from simpy.events import Event

from pdsim.core.clock import Timers
from pdsim.kv.messages import ROUTER, Abort, Arrival, Dropped, Finished, Offload, Submit, TransferDone
from pdsim.kv.pages import Pages
from pdsim.kv.pull import KvReader
from pdsim.kv.receiver import KvReceiver
from pdsim.serving.block_manager import DecodePages, out_of_memory
from pdsim.serving.deployment import Deployment
from pdsim.serving.policies import handoff_of
from pdsim.serving.rank_process import EngineRank, HandoffLeader, InstanceScheduler, Mover, Room
from pdsim.serving.steps import GrowingMemory, RunningBatch, drafts
from pdsim.transfer import Program
from pdsim.transfer.job import Rank


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a decode instance until the router stops it."""
    return (yield from decode_rank(rank, Deployment.from_plain(job), instance, index).run())


def decode_rank(rank: Rank, job: Deployment, instance: str, index: int) -> EngineRank:
    """Return the *index*-th rank of a decode *instance*; the first also schedules."""
    handoff, engine = handoff_of(job.engine), EngineRank(rank, job, instance, index)
    engine.mover = mover = handoff.decode_mover(engine)
    if not index:
        engine.scheduler = scheduler = DecodeScheduler(engine, mover)
        scheduler.handoff = handoff.decode_leader(scheduler, mover)
    return engine


class DecodeRequest(Room):
    """A request that has pages at the decode scheduler; before that it is a `Submit` in its queue.

    ::

        Submit              every rank has all of its KV
          |                         |
        queue --> reserved ------arrive------> arrived --notice--> ready --join--> running --last token--> over
                      |                                                             |   ^
                    fail                                                      preempt   resume
                      v                                                             v   |
                   failed --quiesced (nothing of it moves on any rank)--> over        preempted

    The scheduler notices, joins, preempts and resumes between two steps.  Times are seconds on the clock.
    """

    def __init__(self, request: Submit, reserved: float, ranks: int) -> None:
        super().__init__(request, ranks, "reserved")
        self.has_pages = True
        self.reserved = reserved
        self.reason = ""  # why what arrived cannot be used
        self.stamps: Arrival | None = None
        self.arrived = 0.0
        self.polled = 0.0
        self.joined = 0.0
        self.lag = 0  # of a noticed one: steps before the next that it can be in
        self.left = False  # nobody wants its tokens any more
        self.released = False  # nothing of it is written any more
        self.asked: float | None = None  # when this scheduler heard of it, if that was after prefill had answered
        self.first = 0.0  # its first token leaves the server
        self.context = 0  # of a preempted one: tokens that its next step reads
        self.steps = 0  # of a preempted one: that it still takes
        self.recomputed = 0  # of *context*, tokens whose KV is here again

    @property
    def waits(self) -> bool:
        """Whether its KV is on the way; otherwise it is here, or never will be."""
        return self.state == "reserved"

    def arrive(self, rank: int, now: float) -> bool:
        """Take note that *rank* has all of its KV *now*; return whether every rank has with that."""
        if not self.ranks.succeed(rank):
            return False
        self.state = "arrived"
        self.arrived = now
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class DecodeMover(Mover):
    """The half of a handoff on a decode rank, into whose pool *receiver* has the KV come."""

    def __init__(self, engine: EngineRank, receiver: KvReceiver | KvReader) -> None:
        super().__init__(engine, receiver.layout)
        self.receiver = receiver
        engine.handlers |= {
            Offload: engine.current(lambda _, message: self.offload(message)),
            Abort: engine.introduced(lambda _, message: receiver.forget(message.room)),
        }

    def __len__(self) -> int:
        return len(self.receiver)

    def begin(self) -> None:
        """Listen to what arrives."""
        self.engine.listen(self.receiver.notice)

    def offload(self, message: Offload) -> Event:
        """Move KV to host memory and then some back, over the links that transfers use; succeed at the end of both.

        Each way is at most at `ServingEngine.retract_rate`.
        """
        return self.engine.clock.process(self._offloading(message))

    def _offloading(self, message: Offload) -> Program:
        engine, rate = self.engine, self.engine.job.engine.retract_rate
        modelled = hasattr(engine.rank.device, "traffic")  # a real device moves no bytes of its own accord
        for size, back in ((message.nbytes, False), (message.back, True)):
            if size:
                yield engine.traffic.offload(size, back, rate) if modelled else engine.clock.timeout(size / rate)


@mypyc_attr(allow_interpreted_subclasses=True)
class DecodeLeader(HandoffLeader):
    """The half of a handoff beside *scheduler*: when the KV of a request may come, and its pages are free of it."""

    def __init__(self, scheduler: DecodeScheduler) -> None:
        self._scheduler = scheduler
        self._engine = scheduler.engine

    def submitted(self, request: Submit) -> bool:  # noqa: ARG002 for others
        """Take note of *request*, which has just come; return False if it must not be served any more."""
        return True

    def accept(self, request: Submit) -> None:
        """Have *request*, which the host has made known, queued once it is known where its KV is."""

    def has_slot(self) -> bool:
        """Return whether there is a row for the metadata of one more request."""
        return True

    def start(self, room: DecodeRequest, pages: Pages, state: tuple[Pages, ...], held: int) -> None:
        """Have the KV of *room* come to its *pages* and rows of *state*; the first *held* pages are here."""

    def posted(self) -> float:
        """Return until when this rank's thread posts reads, or takes what arrives."""
        return 0.0

    def notice(self, number: int) -> None:
        """Have the next look find a room whose KV is here, though the other side has not said so yet."""

    def read(self, room: DecodeRequest) -> None:
        """Take note that the scheduler has read the metadata of *room*."""

    def withdraw(self, number: int) -> bool:  # noqa: ARG002 for others
        """Give a room up that is not queued yet; return whether there is one."""
        return False

    def unadmitted(self, number: int) -> None:
        """Take note that a room which had no pages is given up."""

    def failed(self, room: DecodeRequest) -> None:
        """Have *room* given up on both sides: its pages are in quarantine until every rank has quiesced it."""

    def forget(self, number: int) -> None:
        """Give back what this part holds for a room that failed and is quiesced."""


class DecodeScheduler(InstanceScheduler[DecodeRequest, DecodePages, DecodeLeader]):
    """Decides what an instance decodes, and owns its pages and the requests that they are given to.

    Everything is looked at between steps and only there (`_between_steps`): requests that came, KV that arrived,
    requests that are done.  So a step without news needs no event.  With ``memory: reserve`` a request is admitted
    when there are pages for its input and all of its output, with ``grow`` for its input (`Preemption`).
    """

    def __init__(self, engine: EngineRank, mover: DecodeMover) -> None:
        job = engine.job
        super().__init__(engine, DecodePages(job, mover.layout), job.engine.decode)
        self.mover = mover
        self.complete: list[DecodeRequest] = []  # arrived, not noticed
        self.batch = RunningBatch(
            job.decode_time,
            job.decode_batch,
            self.host.costs,
            job.engine.overlap,
            self.host.steps,
            drafts=drafts(job, engine.instance),
        )
        self.preemption = Preemption(self)
        self.hits: dict[int, int] = {}  # by room: tokens that were cached
        self.timers = Timers(engine.clock, job.waiting_timeout, self._expire)
        self.joined: list[DecodeRequest] = []  # at this boundary, their first token comes with the next step
        self._coming: dict[int, Submit] = {}  # the host has not made them known yet
        self._queue: deque[Submit] = deque()  # no pages yet
        self._late: list[DecodeRequest] = []  # noticed while the next step was prepared already
        self._waiting: deque[DecodeRequest] = deque()  # noticed, no place in the batch
        self._left = False  # somebody has left
        self._held_up = 0.0  # seconds that this boundary takes before the next step begins
        self._due = math.inf  # the next boundary between steps that is looked at, and its event
        self._due_event: Event | None = None
        self._retracting = False  # KV goes to host memory or comes back: no step is under way
        self._news = False  # something has come meanwhile
        engine.handlers |= {Submit: self._submit, Abort: self.abort}

    def waits(self) -> bool:
        """Return whether it waits for pages in quarantine, or for KV that is retracted."""
        return super().waits() or self._retracting

    def report(self) -> dict[str, Any]:
        """Return the numbers of pages, of open rooms on this side, and of messages that came too late."""
        counts = super().report()
        counts["open_rooms"] += len(self.timers) + len(self._coming) + len(self._queue)
        counts["ignored"] += self.mover.receiver.ignored
        if self.job.cache.decode:
            counts["hits"] = self.hits
        if self.preemption.count:
            counts["preemptions"] = self.preemption.count
        return counts

    # --- what comes in ---

    def _submit(self, _: str, request: Submit) -> None:
        if request.decode != self.engine.incarnation:
            self.engine.ignore()
            return
        if not self.handoff.submitted(request):
            return
        seconds = self.host.arrive(request.input, self.clock.now)
        if seconds:
            self._coming[request.room] = request
            self.clock.call_at(self.clock.now + seconds, self._come, request)
        else:
            self.handoff.accept(request)

    def _come(self, request: Submit) -> None:
        if self._coming.pop(request.room, None) is not None:
            self.handoff.accept(request)

    def queue(self, request: Submit) -> None:
        """Have *request* wait for pages."""
        self._queue.append(request)
        if len(self._queue) == 1:
            self.wake()

    def withdraw(self, number: int) -> bool:
        """Give a room up that has no pages; return whether it was waiting here."""
        waited = self.handoff.withdraw(number)
        self.pages.forget(number)
        waited = self._coming.pop(number, None) is not None or waited
        for request in [request for request in self._queue if request.room == number]:
            self._queue.remove(request)
            self.pages.forget(number)
            waited = True
            self.wake()  # those behind it may lack fewer pages
        return waited

    def abort(self, _: str, message: Abort) -> None:
        """Give a room up for the router, which hears whether any of its bytes can have moved."""
        room, untouched = self.rooms.get(message.room), False
        if room is None:
            untouched = self.withdraw(message.room)
        elif room.waits or room.failed:
            self.fail(room)
        else:
            self.handoff.notice(message.room)
            room.left = self._left = True
            self.wake()
        self.engine.send(ROUTER, Dropped(message.room, untouched))
        if room is None:
            self.handoff.unadmitted(message.room)

    # --- what becomes of a room whose KV is on the way ---

    def arrived(self, room: DecodeRequest) -> None:
        """Have the next look notice *room*, whose KV is here."""
        self.timers.drop(room.request.room)
        self.complete.append(room)
        self.wake()

    def quarantine(self, room: DecodeRequest) -> bool:
        """Fail *room*, with its pages in quarantine; return whether that ends it: not one that is over already."""
        ended = room.fail()
        if ended:
            self.pages.quarantined.add(room.request.room)
        return ended

    def fail(self, room: DecodeRequest) -> None:
        """Fail *room* and have it given up on both sides; one that is over already stays as it is."""
        if self.quarantine(room):
            self.timers.drop(room.request.room)
            self.handoff.failed(room)
            self.wake()  # if all that is left is in quarantine, the next in the queue must not wait for ever

    def _expire(self, number: int) -> None:
        room = self.rooms[number]
        if not room.waits:
            self.handoff.notice(number)
            return
        reason = f"TransferTimeout: not all of it has arrived within {self.job.waiting_timeout:g} s"
        self.engine.send(ROUTER, TransferDone(number, reason=reason))
        self.fail(room)

    def forget(self, number: int) -> None:
        """End a room that failed: nothing of it moves any more on any rank."""
        del self.rooms[number]
        self.pages.forget(number)
        self.pages.release(number)
        self.handoff.forget(number)
        self.end_if_drained()
        self.wake()

    # --- between two steps ---

    def wake(self) -> None:
        """See to what has come at the end of the current step, or when an idle scheduler looks next."""
        if self._retracting:
            self._news = True
        else:
            self._set(self.batch.boundary(self.clock.now))

    def _set(self, time: float) -> None:
        if self._due <= time:
            return
        self._due = time
        event = self._due_event = self.clock.at(time)
        assert event.callbacks is not None
        event.callbacks.append(self._boundary)

    def _boundary(self, event: Event) -> None:
        if event is self._due_event and not self.engine.has_ended:
            due, self._due = self._due, math.inf
            self.engine.guard(self._between_steps, due)

    def _between_steps(self, due: float) -> None:
        # *due* is what the clock was set to: on a wall clock, now is a little later, and tokens are counted until
        # *due*.
        self.batch.advance(due)
        self._held_up = 0.0
        for room in self.preemption.computed():
            if self.job.engine.recompute and room.steps == room.request.output:
                room.first = self.clock.now + self.host.answer(room.request.input)
            if not self.preemption.go_on(room):
                self._done(room)
        for number in self.batch.finished():
            self._done(self.rooms[number])
        for room in self._late:
            room.lag -= 1
        self._waiting += [room for room in self._late if not room.lag]
        self._late = [room for room in self._late if room.lag]
        self.poll()
        if self._left:
            self._leave()
        self._join()
        self.preemption.make_room()
        self._admit()
        if self.preemption.out or self.preemption.back:
            self._retract()
        else:
            self._begin_step()

    def poll(self) -> None:
        """Notice what has arrived: the first tokens are out with the metadata, unless decode computes them.

        Each holds the loop up for `HostCosts.admit`.  With a pipeline of steps, if some are under way, it is in the
        batch only as many steps later as the pipeline is deep.
        """
        lag = self.job.engine.pipeline if self.batch.runs else 0
        for room in self.complete:
            room.state, room.polled = "ready", self.clock.now
            self.handoff.read(room)
            if room.reason:
                self.reject(room)
                continue
            self.pages.arrived(room.request.room)
            admission = self.host.admit(room.request.input)
            if self.job.engine.draft_layers:
                admission += self.job.drafted_again(room.request.input)
            self._held_up += admission
            room.first = room.polled + self._held_up + self.host.answer(room.request.input)
            if lag:
                room.lag = lag
                self._late.append(room)
            else:
                self._waiting.append(room)
        self.complete.clear()

    def _leave(self) -> None:
        self._left = False
        for number in self.batch.leave(lambda number: self.rooms[number].left):
            self._free(number)
        rooms: deque[DecodeRequest] | list[DecodeRequest]
        for rooms in (self._waiting, self._late, self.preemption.waiting, self.preemption.recomputing):
            for room in [room for room in rooms if room.left]:
                rooms.remove(room)
                self._free(room.request.room)

    def _join(self) -> None:
        while self._waiting and self.preemption.has_place:
            index = self.policy.join([room.request for room in self._waiting]) if len(self._waiting) > 1 else 0
            room = self._waiting[index]
            del self._waiting[index]
            room.state, room.joined = "running", self.clock.now
            request = room.request
            if self.job.engine.recompute:
                self.joined.append(room)
                self.batch.join(request.room, request.input, request.output)
            elif request.output == 1:
                self._done(room)
            else:
                self.batch.join(request.room, request.input + 1, request.output - 1)

    def _retract(self) -> None:
        # SGLang's decode scheduler waits for these copies, too: of every rank, until the leader's part is there.
        engine, preemption = self.engine, self.preemption
        each = self.job.shape.token_bytes(self.job.decode.tp)
        message = Offload(engine.incarnation, preemption.out * each, preemption.back * each)
        preemption.out = preemption.back = 0
        self._retracting = True
        engine.send(engine.followers, message)
        event = self.mover.offload(message)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: None if engine.has_ended else engine.guard(self._retracted))

    def _retracted(self) -> None:
        news, self._retracting, self._news = self._news, False, False
        self._begin_step()
        if news:
            self.wake()

    def _begin_step(self) -> None:
        # The step begins when the host is done with this boundary and, where that holds it, with transfers.
        # It is a mixed one if something is computed again; otherwise as many steps follow as no request ends or
        # lacks a page in, unless somebody waits who joins at the next look: for a place that a preemption has freed.
        joins = bool(self._late) or (bool(self._waiting) and self.preemption.has_place)
        start = self.clock.now + self._held_up
        if self.job.engine.posting_holds or self.job.handoff.notice or self.job.handoff.metadata_stall:
            start = self.batch.held(self.clock.now, max(start, self.handoff.posted()))
        if pieces := self.preemption.pieces():
            end = self.batch.begin_mixed(start, pieces)
        else:
            most = 1.0 if joins else math.inf
            end = self.batch.begin(start, min(most, self.preemption.memory.steps()))
        self._set(end)
        if self.job.decode_time.exchange:
            self._route(end, sum(new for _, new in pieces))
        if not pieces and not self.batch.runs and joins:
            self._set(start)
        for room in self.joined:
            room.first = self.batch.first_step() + self.host.answer(room.request.input)
        self.joined.clear()

    def _route(self, end: float, again: int) -> None:
        # Tokens on their way to experts take from what KV gets there; the steps have the length that they have
        # without KV.  Ranks of a group that do not schedule put nothing there.
        exchange = self.job.decode_time.exchange
        each = len(self.batch) * (1 + self.job.engine.draft)
        tokens = again + (self.batch.steps(end) * each if math.isfinite(end) else 0)
        network, port = tokens * exchange.network, tokens * exchange.port
        self.engine.traffic.exchange(network, port, end - self.clock.now)

    # --- pages ---

    def _admit(self) -> None:
        while self._queue and not self.preemption.waiting:
            index = self.policy.admit(self._queue)
            request = self._queue[index]
            held, given = 0, None
            if self.handoff.has_slot():
                held = self.pages.held(request)
                if self.preemption.admits(request, self.growing()):
                    given = self.pages.reserve(request, held)
            if given is None and not self.gives_up(self.growing()):
                return
            del self._queue[index]
            if given is None:
                count = self.job.page_count(request.input + self.pages.output(request))
                reason = out_of_memory(self.pages.pool, count, self.handoff.has_slot())
                self.engine.send(ROUTER, TransferDone(request.room, reason=reason))
                self.pages.forget(request.room)
                self.handoff.unadmitted(request.room)
                continue
            self.blocked.clear()
            room = self.rooms[request.room] = DecodeRequest(request, self.clock.now, self.job.decode.size)
            if self.job.cache.decode:
                self.hits[request.room] = held * self.job.page_size
            self.timers.add(request.room)
            self.handoff.start(room, *given, held)
        if not self._queue and not self.preemption.waiting:  # the next to come waits for quarantine as long
            self.blocked.clear()

    def growing(self) -> int:
        """Return how many rooms may come to need more pages: not failed ones, whose pages are in quarantine."""
        return len(self.rooms) - len(self.pages.quarantined)

    def _free(self, number: int) -> None:
        room = self.rooms.pop(number)
        self.pages.forget(number)
        self.pages.release(number, pages=room.has_pages)
        self.end_if_drained()

    def reject(self, room: DecodeRequest) -> None:
        """End *room*, whose KV is here, and tell the router its reason."""
        self._free(room.request.room)
        self.engine.send(ROUTER, TransferDone(room.request.room, reason=room.reason))

    def _done(self, room: DecodeRequest) -> None:
        number, stamps = room.request.room, room.stamps
        assert stamps is not None
        self._free(number)
        now = self.clock.now
        looks = room.arrived, room.polled, room.joined
        message = Finished(number, room.reserved, stamps.noticed, stamps.started, stamps.ended, *looks, now)
        if room.first != room.polled or room.asked is not None:
            ended = now + self.host.answer()
            message = replace(message, finished=max(ended, room.first), first=room.first, asked=room.asked)
        self.engine.send(ROUTER, message)


class Preemption:
    """The requests of *scheduler* that run out of pages as they grow (`GrowingMemory`).

    When the batch lacks pages, the policy's victim gives its own up.  It goes on when there are pages for its whole
    context: its KV is computed again in the steps of the others, or comes back from host memory.
    """

    def __init__(self, scheduler: DecodeScheduler) -> None:
        job = scheduler.job
        self.count = 0
        self.waiting: deque[DecodeRequest] = deque()  # gave their pages up
        self.recomputing: list[DecodeRequest] = []  # have pages again, and not all of their KV
        self.out = 0  # tokens whose KV goes to host memory before the next step
        self.back = 0  # and comes back
        self._scheduler = scheduler
        self._job = job
        self._batch = scheduler.batch
        self._pages = scheduler.pages
        self.memory = GrowingMemory(job, self._pages.pool, self._batch)
        self._again = job.engine.preemption == "recompute"

    @property
    def has_place(self) -> bool:
        """Whether one more request may enter the batch: those that are computed again have their places."""
        return len(self._batch) + len(self.recomputing) < self._batch.limit

    def admits(self, request: Submit, others: int) -> bool:
        """Return whether *request* may have pages for its prompt beside *others* that have some and grow."""
        return self.memory.admits(request.input - self._shared(request), others)

    def _shared(self, request: Submit) -> int:
        return self._pages.shared(self._pages.known(request))

    def make_room(self) -> None:
        """Give every request of the batch the pages of its next step.

        What is left over lets preempted ones go on, in their order, while each finds pages for its whole context and
        its reserve beside the others.  One in whose way is nothing but quarantine fails after a while.
        """
        scheduler, memory = self._scheduler, self.memory
        while memory.short():
            room = self.preempt(memory.victim(scheduler.policy, scheduler.rooms))
            if room in scheduler.joined:
                scheduler.joined.remove(room)
        memory.grow()
        while self.waiting and self.has_place:
            room = self.waiting[0]
            others = scheduler.growing() - len(self.waiting)
            if memory.admits(room.context - (self._shared(room.request) if self._again else 0), others):
                scheduler.blocked.clear()
                self._resume(self.waiting.popleft())
            elif scheduler.gives_up(others):
                room.reason = out_of_memory(self._pages.pool, self._pages.pool.free + 1)
                scheduler.reject(self.waiting.popleft())
            else:
                return

    def preempt(self, number: int) -> DecodeRequest:
        """Take *number* out of the batch, and its pages."""
        room = self._scheduler.rooms[number]
        member = self._batch.take(number)
        self._pages.pool.release(number)
        room.state, room.has_pages = "preempted", False
        room.context, room.steps, room.recomputed = member.context, member.left, 0
        self.count += 1
        if self._again:
            self.waiting.appendleft(room)
        else:
            self.out += room.context
            self.waiting.append(room)
        return room

    def _resume(self, room: DecodeRequest) -> None:
        keys = self._pages.known(room.request) if self._again else ()
        given = self._pages.allocate(room.request.room, self._job.page_count(room.context), keys)
        assert given is not None
        room.recomputed = given[1] * self._job.page_size
        room.has_pages = True
        if self._again:
            self.recomputing.append(room)
            return
        self.back += room.context
        if not room.first or (self._job.engine.recompute > 0 and room.steps == room.request.output):
            self._scheduler.joined.append(room)
        self._join(room, room.context, room.steps)

    def _join(self, room: DecodeRequest, context: int, steps: int) -> None:
        room.state, room.context, room.recomputed = "running", 0, 0
        self._batch.join(room.request.room, context, steps)

    def pieces(self) -> list[tuple[int, int]]:
        """Return what the next step computes again, (tokens before, tokens) each, and count it as done."""
        pieces, budget = [], self._job.chunk - len(self._batch) * (1 + self._job.engine.draft)
        for room in self.recomputing:
            tokens = min(budget, room.context - room.recomputed)
            if tokens <= 0:
                break
            pieces.append((room.recomputed, tokens))
            room.recomputed += tokens
            budget -= tokens
        return pieces

    def computed(self) -> list[DecodeRequest]:
        """Return the requests whose last piece the step that has ended computed."""
        return [room for room in self.recomputing if room.recomputed == room.context]

    def go_on(self, room: DecodeRequest) -> bool:
        """Let *room* go on, which got a token with its last piece; return False if that was its last token."""
        self.recomputing.remove(room)
        if room.steps > 1:
            self._join(room, room.context + 1, room.steps - 1)
        return room.steps > 1
