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

from pdsim.kv.messages import Abort, Dropped, Finished, RankQuiesced, Submit, TransferDone
from pdsim.kv.pages import Pages
from pdsim.kv.pull import KvReader
from pdsim.kv.receiver import KvReceiver
from pdsim.kv.rooms import QuarantineStall, Timers, out_of_memory
from pdsim.serving.block_manager import DecodePages
from pdsim.serving.decode_steps import DecodeRequest, DecodeWorker, Preemption, Retraction, RunningBatch
from pdsim.serving.deployment import ROUTER, Deployment
from pdsim.serving.policies import handoff_of, scheduler_of
from pdsim.serving.rank_process import EngineRank, HandoffLeader, Mover
from pdsim.serving.scheduler_host import SchedulerHost
from pdsim.transfer import Program
from pdsim.transfer.job import Rank

__all__ = [
    "DecodeLeader",
    "DecodeMover",
    "DecodeRequest",
    "DecodeScheduler",
    "decode_rank",
    "program",
]


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a decode instance until the router stops it."""
    return (yield from decode_rank(rank, Deployment.from_plain(job), instance, index).run())


def decode_rank(rank: Rank, job: Deployment, instance: str, index: int) -> EngineRank:
    """Return the *index*-th rank of a decode *instance*; the first also schedules."""
    handoff, engine = handoff_of(job.engine), EngineRank(rank, job, instance, index)
    engine.mover = mover = handoff.decode_mover(engine)
    engine.worker = worker = DecodeWorker(engine, lambda room: mover.receiver.forget(room))
    if not index:
        engine.scheduler = scheduler = DecodeScheduler(engine, worker, mover)
        scheduler.handoff = handoff.decode_leader(scheduler, mover)
    return engine


@mypyc_attr(allow_interpreted_subclasses=True)
class DecodeMover(Mover):
    """The half of a handoff on a decode rank, into whose pool *receiver* has the KV come."""

    def __init__(self, engine: EngineRank, receiver: KvReceiver | KvReader) -> None:
        super().__init__(engine, receiver.layout)
        self.receiver = receiver

    def __len__(self) -> int:
        return len(self.receiver)

    def begin(self) -> None:
        """Listen to what arrives."""
        self.engine.listen(self.receiver.notice)


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
        """Have *room* given up on both sides: its pages are in quarantine until every rank is quiet about it."""

    def forget(self, number: int) -> None:
        """Give back what this part has of a room that failed, and of which nothing moves any more."""


class DecodeScheduler:
    """Decides what an instance decodes, and owns its pages and the requests that they are given to.

    Everything is looked at between steps and only there (`_between_steps`): requests that came, KV that arrived,
    requests that are done.  So a step without news needs no event.  With ``memory: reserve`` a request is admitted
    when there are pages for its input and all of its output, with ``grow`` for its input (`Preemption`).

    A page is free, cached, or of a room in `rooms`; a room that failed while its KV was on the way stays there, with
    its pages, until `RankQuiesced` has come from every rank.
    """

    handoff: DecodeLeader

    def __init__(self, engine: EngineRank, worker: DecodeWorker, mover: DecodeMover) -> None:
        job, instance = engine.job, engine.instance
        self.engine = engine
        self.mover = mover
        self.job = job
        self.clock = engine.clock
        self.rooms: dict[int, DecodeRequest] = {}
        self.complete: list[DecodeRequest] = []  # arrived, not noticed
        self.pages = pages = DecodePages(job, mover.layout)
        self.policy = scheduler_of(job.engine)
        self.host = SchedulerHost(job.engine.decode, job.engine.variation, job.seed, instance, job.layers(instance))
        self.batch = RunningBatch(
            job.decode_time, job.decode_batch, self.host.costs, job.engine.overlap, self.host.steps
        )
        self.hits: dict[int, int] = {}  # by room: tokens that were cached
        self.timers = Timers(engine.clock, job.waiting_timeout, self._expire)
        self._coming: dict[int, Submit] = {}  # the host has not made them known yet
        self._queue: deque[Submit] = deque()  # no pages yet
        self._late: list[DecodeRequest] = []  # noticed while the next step was prepared already
        self._waiting: deque[DecodeRequest] = deque()  # noticed, no place in the batch
        self._joined: list[DecodeRequest] = []  # at this boundary, their first token comes with the next step
        self._left = False  # somebody has left
        self._held_up = 0.0  # seconds that this boundary takes before the next step begins
        self._due = math.inf  # the next boundary between steps that is looked at, and its event
        self._due_event: Event | None = None
        self._blocked = QuarantineStall(engine.clock, job.deadline, self.wake)
        self._retraction = Retraction(worker, self._go_on)
        self.preemption = Preemption(
            self.rooms, self.batch, pages, self.policy, self._retraction, self._blocked, job
        )
        self._stopping = False
        engine.rank.gauge("pages", instance, lambda: pages.pool.used / pages.pool.pages)
        engine.works.append(self._waits)
        engine.handlers |= {Submit: self._submit, RankQuiesced: self.quiesced, Abort: self.abort}

    # --- the rank: see `InstanceScheduler` ---

    def begin(self) -> None:
        """Do nothing: what comes wakes it."""

    def report(self) -> dict[str, Any]:
        """Return the account of pages, what is not over on this side, and how many messages came too late."""
        waiting = len(self.timers) + len(self._coming) + len(self._queue) + self.handoff.open_rooms
        counts: dict[str, Any] = self.pages.report() | {
            "open_rooms": len(self.rooms) + len(self.mover) + waiting,
            "ignored": self.engine.ignored + self.mover.receiver.ignored,
        }
        counts |= {"hits": self.hits} if self.job.cache.decode else {}
        return counts | ({"preemptions": self.preemption.count} if self.preemption.count else {})

    def _waits(self) -> bool:
        # What ends by itself: pages in quarantine, and KV that is retracted.
        return self._blocked.waiting or self._retraction.under_way

    def drop(self, incarnation: str) -> None:
        """Fail the requests whose KV was to come from *incarnation*, of a prefill instance."""
        self.handoff.drop(incarnation)

    def stop(self) -> None:
        """Take no more requests."""
        self._stopping = True
        self.handoff.stop()

    def end_if_drained(self) -> None:
        """End if the job is over and no room is left."""
        if self._stopping and not self.rooms:
            self.engine.end()

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
            waited = True
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

    def quiesced(self, _: str, message: RankQuiesced) -> None:
        """Count a rank on which nothing of a failed room moves; the last one frees its pages."""
        room = self.rooms.get(message.room)
        if room is None:
            self.engine.ignore()
            return
        room.quiet += 1
        if room.quiet == self.job.decode.size:
            self._drop(message.room)
            self.wake()

    def _drop(self, number: int) -> None:
        del self.rooms[number]
        self.pages.forget(number)
        self.pages.release(number)
        self.handoff.forget(number)
        self.end_if_drained()

    # --- the scheduler ---

    def wake(self) -> None:
        """See to what has come at the end of the current step, or when an idle scheduler looks next."""
        if self._retraction.under_way:
            self._retraction.news = True
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
        self._promote_pending()
        self.poll()
        if self._left:
            self._leave()
        self._join()
        self._make_room()
        self._admit()
        if self._retraction.out or self._retraction.back:
            self._retraction.move()
        else:
            self._begin_step()

    def _go_on(self, news: bool) -> None:
        self._begin_step()
        if news:
            self.wake()

    def _promote_pending(self) -> None:
        for room in self._late:
            room.lag -= 1
        self._waiting += [room for room in self._late if not room.lag]
        self._late = [room for room in self._late if room.lag]

    def poll(self) -> None:
        """Notice what has arrived: the first tokens are out with the metadata, unless decode computes them.

        Each holds the loop up for `HostCosts.admit`.  With a pipeline of steps, if some are under way, it is in the
        batch only as many steps later as the pipeline is deep.
        """
        room_lag = self.job.engine.pipeline if self.batch.runs else 0
        for room in self.complete:
            room.notice(self.clock.now)
            self.handoff.read(room)
            if room.reason:
                self._reject(room)
                continue
            self.pages.arrived(room.request.room)
            self._held_up += self.host.admit(room.request.input)
            room.first = room.polled + self._held_up + self.host.answer(room.request.input)
            if room_lag:
                room.lag = room_lag
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
        recompute = self.job.engine.recompute
        while self._waiting and self.preemption.has_place:
            index = self.policy.join([room.request for room in self._waiting])
            room = self._waiting[index]
            del self._waiting[index]
            room.state, room.joined = "running", self.clock.now
            request = room.request
            if recompute:
                self._joined.append(room)
                self.batch.join(request.room, request.input, request.output)
            elif request.output == 1:
                self._done(room)
            else:
                self.batch.join(request.room, request.input + 1, request.output - 1)

    def _begin_step(self) -> None:
        # The step begins when the host is done with this boundary and, where that holds it, with transfers.
        # It is a mixed one if something is computed again; otherwise as many steps follow as no request ends or
        # lacks a page in.
        start = self.clock.now + self._held_up
        if self.job.engine.posting_holds or self.job.handoff.notice or self.job.handoff.metadata_stall:
            start = self.batch.held(self.clock.now, max(start, self.handoff.posted()))
        if pieces := self.preemption.pieces():
            end = self.batch.begin_mixed(start, pieces)
        else:
            most = 1.0 if self._late else math.inf
            end = self.batch.begin(start, min(most, self.preemption.steps()))
        self._set(end)
        if self.job.decode_time.exchange:
            self._route(end, sum(new for _, new in pieces))
        if not pieces and not self.batch.runs and self._late:
            self._set(start)
        for room in self._joined:
            room.first = self.batch.first_step() + self.host.answer(room.request.input)
        self._joined.clear()

    def _route(self, end: float, again: int) -> None:
        # They take from what KV gets there; the steps have the length that they have without KV.  Ranks of a group
        # that do not schedule put nothing there.
        exchange = self.job.decode_time.exchange
        tokens = again + (self.batch.steps(end) * len(self.batch) if math.isfinite(end) else 0)
        network, port = tokens * exchange.network, tokens * exchange.port
        self.engine.traffic.exchange(network, port, end - self.clock.now)

    # --- pages ---

    def _make_room(self) -> None:
        # One in whose way is nothing but quarantine fails as in `_admit`.
        for room in self.preemption.make_room(self._joined, self.growing):
            room.reason = out_of_memory(self.pages.pool, self.pages.pool.free + 1)
            self._reject(room)

    def _admit(self) -> None:
        # If nothing but pages, or slots, in quarantine are in its way, it waits for `Deployment.deadline` seconds
        # and then fails.
        while self._queue and not self.preemption.waiting:
            index = self.policy.admit(self._queue)
            request = self._queue[index]
            held, rows = self._find_memory(request) if self.handoff.has_slot() else (0, None)
            if rows is None:
                if self.growing():
                    self._blocked.clear()
                    return
                if not self._blocked.too_long():
                    return
                del self._queue[index]
                count = self.job.page_count(request.input + (0 if self.preemption.grows else request.output))
                reason = out_of_memory(self.pages.pool, count, self.handoff.has_slot())
                self.engine.send(ROUTER, TransferDone(request.room, reason=reason))
                self.handoff.unadmitted(request.room)
                continue
            del self._queue[index]
            self._blocked.clear()
            room = self.rooms[request.room] = DecodeRequest(request, self.clock.now, self.job.decode.size)
            if self.job.cache.decode:
                self.hits[request.room] = held * self.job.page_size
            self.timers.add(request.room)
            self.handoff.start(room, *rows, held)

    def growing(self) -> int:
        """Return how many rooms may come to need more pages: not failed ones, whose pages are in quarantine."""
        return len(self.rooms) - len(self.pages.quarantined)

    def _find_memory(self, request: Submit) -> tuple[int, tuple[Pages, tuple[Pages, ...]] | None]:
        held = self.pages.held(request)
        fits = self.preemption.admits(request.input, request, self.growing())
        return held, self.pages.reserve(request, held) if fits else None

    def _free(self, number: int) -> None:
        room = self.rooms.pop(number)
        self.pages.forget(number)
        self.pages.release(number, pages=room.has_pages)
        self.end_if_drained()

    def _reject(self, room: DecodeRequest) -> None:
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
