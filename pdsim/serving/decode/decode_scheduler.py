# SPDX-License-Identifier: Apache-2.0
"""The decode engine: pages first, then continuous batching, with few events: steps are in closed form."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict
from simpy.events import Event

from pdsim.core.native_class import mypyc_attr
from pdsim.kv.consensus import Consensus
from pdsim.kv.messages import (
    Abort,
    Destination,
    Dropped,
    Failed,
    Finished,
    Locate,
    Located,
    Reserve,
    Streamed,
    Submit,
)
from pdsim.kv.pages import Pages
from pdsim.kv.prefix_pages import PrefixPagePool
from pdsim.kv.rooms import QuarantineStall, out_of_memory
from pdsim.kv.status import Status
from pdsim.serving.decode.block_manager import BlockManager, DecodeRequest
from pdsim.serving.decode.growing_memory import GrowingMemory
from pdsim.serving.decode.preemption import Retraction, pieces_again
from pdsim.serving.decode.room_lookup import PATIENCE, RoomLookup
from pdsim.serving.decode.steps import Member, RunningBatch
from pdsim.serving.deployment import ROUTER, Deployment, leader
from pdsim.serving.scheduler_host import SchedulerHost
from pdsim.serving.seams import Running, handoff_of, scheduler_of
from pdsim.transfer import Program
from pdsim.transfer.job import Rank

__all__ = ["DecodeScheduler", "program"]


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a decode instance until the router stops it."""
    deployment = Deployment.from_plain(job)
    return (yield from handoff_of(deployment.engine).decode(rank, deployment, instance, index).run())


@mypyc_attr(allow_interpreted_subclasses=True)
class DecodeScheduler(BlockManager):
    """The rank that also schedules.

    Everything is looked at between steps and only there: requests that came, KV that arrived, requests that are
    done. So what happens within a step waits for its end, as in a real scheduler, and a step without news needs
    no event.

    With ``memory: reserve`` a request is admitted when there are pages for its input and all of its output:
    nothing that runs can ever run out of pages, so nothing is preempted and no two requests can wait for each
    other.  With ``grow`` it is admitted with pages for its input, and when the others lack some the scheduler's
    victim gives its own up: its KV is computed again in the steps of the others, or moved to host memory and
    back.

    Life of a request: `Submit`; queued; admitted (pages, and a `Destination` to prefill); complete; noticed
    between two steps; joins the batch; finished.  The order between two steps is that of `_between_steps`: tokens
    counted, requests done, arrivals noticed, places filled, pages grown, requests admitted, KV of the retracted
    moved, and the next step begun.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.policy = scheduler_of(job.engine)
        self.host = SchedulerHost(job.engine.decode, job.engine.variation, job.seed, instance, job.layers(instance))
        self.preemptions = 0
        self._coming: dict[int, Submit] = {}  # the host has not made them known yet
        self._queue: deque[Submit] = deque()  # no pages yet
        self._late: list[DecodeRequest] = []  # noticed while the next step was prepared already
        self._waiting: deque[DecodeRequest] = deque()  # noticed, no place in the batch
        self._preempted: deque[DecodeRequest] = deque()  # gave their pages up
        self._recomputing: list[DecodeRequest] = []  # have pages again, and not all of their KV
        self.batch = RunningBatch(
            job.decode_time, job.decode_batch, self.host.costs, job.engine.overlap, self.host.steps
        )
        self._memory = GrowingMemory(job, self.pages, self.batch) if job.engine.memory == "grow" else None
        self._held_up = 0.0  # seconds that this boundary takes before the next step begins
        self._retraction = Retraction(self, self.followers, self._go_on)
        self._joined: list[DecodeRequest] = []  # at this boundary, their first token comes with the next step
        self._left = False  # somebody has left
        self._due = math.inf  # the next boundary between steps that is looked at, and its event
        self._due_event: Event | None = None
        self._blocked = QuarantineStall(rank.clock, job.deadline, self._wake)
        self._lookup = RoomLookup(rank.clock, self._ask_where, self._enqueue, self._unknown)
        self.handlers |= {
            Submit: self._submit,
            Located: self._located,
            Abort: self._abort,
        }

    def report(self) -> dict[str, Any]:
        """As `BlockManager.report`, with requests that wait for pages, and the preemptions if there were any."""
        found = super().report()
        found["open_rooms"] += len(self._coming) + len(self._queue) + len(self._lookup)
        return found | ({"preemptions": self.preemptions} if self.preemptions else {})

    def working(self) -> bool:
        """As `DecodeWorker.working`; quarantined pages come back or are given up, and retracted KV arrives."""
        return super().working() or self._blocked.waiting or self._retraction.under_way

    # --- what comes in ---

    def _submit(self, _: str, request: Submit) -> None:
        if request.decode != self.life:
            self.ignore()
            return
        seconds = self.host.arrive(request.input, self.clock.now)
        if seconds:
            self._coming[request.room] = request
            self.clock.call_at(self.clock.now + seconds, self._come, request)
        else:
            self._take(request)

    def _come(self, request: Submit) -> None:
        if self._coming.pop(request.room, None) is not None:
            self._take(request)

    def _take(self, request: Submit) -> None:
        if request.prefill:
            self._enqueue(request)
        else:
            self._lookup.add(request)

    def _enqueue(self, request: Submit) -> None:
        self._queue.append(request)
        if len(self._queue) == 1:
            self._wake()

    def _ask_where(self, rooms: tuple[int, ...]) -> None:
        self.send(ROUTER, Locate(rooms, self.life))

    def _located(self, _: str, message: Located) -> None:
        if message.to == self.life:
            self._lookup.answer(message.lives)
        else:
            self.ignore()

    def _unknown(self, request: Submit) -> None:
        """Fail a request that no prefill instance says to have."""
        reason = f"TransferTimeout: no prefill instance has said within {PATIENCE:g} s that it has it"
        self.send(ROUTER, Failed(request.room, reason))

    def _abort(self, _: str, message: Abort) -> None:
        """Give a room up; one that is complete leaves at the end of the step, others have pages in quarantine."""
        room = self._rooms.get(message.room)
        before = self._unadmitted
        if room is None:
            self._lookup.drop(message.room)
            self.keys.pop(message.room, None)
            self._coming.pop(message.room, None)
            self._queue = deque(request for request in self._queue if request.room != message.room)
        elif room.consensus.status is Status.SUCCESS:
            room.left = self._left = True
            self._wake()
        else:
            self._fail(room)
        self.send(ROUTER, Dropped(message.room, self._unadmitted < before))

    @property
    def _unadmitted(self) -> int:
        return len(self._queue) + len(self._lookup) + len(self._coming)

    # --- the scheduler ---

    def _wake(self) -> None:
        """See to what has come at the end of the current step, or when an idle scheduler looks next."""
        if self._retraction.under_way:
            self._retraction.news = True
        else:
            self._set(self.batch.boundary(self.clock.now))

    def _set(self, time: float) -> None:
        """Make *time* the next boundary, unless an earlier one is set."""
        if self._due <= time:
            return
        self._due = time
        event = self._due_event = self.clock.at(time)
        assert event.callbacks is not None
        event.callbacks.append(self._boundary)

    def _boundary(self, event: Event) -> None:
        if event is self._due_event and not self.has_ended:
            due, self._due = self._due, math.inf
            self.guard(self._between_steps, due)

    def _between_steps(self, due: float) -> None:
        """Do all that a scheduler does between two steps, at the boundary *due*, and begin the next.

        *due* is what the clock was set to: on a wall clock, now is a little later, and tokens are counted until
        *due*.
        """
        self.batch.advance(due)
        self._held_up = 0.0
        if self._recomputing:
            self._computed_again()
        for number in self.batch.finished():
            self._done(self._rooms[number])
        self._ripen()
        self._poll()
        if self._left:
            self._leave()
        self._join()
        if self._memory is not None:
            self._make_room(self._memory)
        self._admit()
        if self._retraction:
            self._retraction.move()
        else:
            self._begin()

    def _go_on(self, news: bool) -> None:
        """Begin the next step, the KV of the retracted being where it goes."""
        self._begin()
        if news:
            self._wake()

    def _ripen(self) -> None:
        """Have those wait for a place in the batch that were noticed as many steps ago as the pipeline is deep."""
        for room in self._late:
            room.lag -= 1
        self._waiting += [room for room in self._late if not room.lag]
        self._late = [room for room in self._late if room.lag]

    def _poll(self) -> None:
        """Notice what has arrived: the first tokens are out with the metadata, unless decode computes them.

        Taking a request up holds the loop up, one after the other, and the next step begins that much later
        (`HostCosts.admit`).  With a pipeline of steps a request is in the batch only as many steps later as the
        pipeline is deep, if steps are under way.
        """
        room_lag = self.job.engine.pipeline if self.batch.runs else 0
        for room in self.complete:
            room.polled = self.clock.now
            self.release_slot(room)
            if room.reason:
                self._reject(room)
                continue
            self.cache(room)
            self._held_up += self.host.admit(room.request.input)
            room.first = room.polled + self._held_up + self.host.answer(room.request.input)
            if room_lag:
                room.lag = room_lag
                self._late.append(room)
            else:
                self._waiting.append(room)
        self.complete.clear()

    def release_slot(self, room: DecodeRequest) -> None:
        """Give the row back that the metadata of *room* came in, which have been read."""
        self.slots.release(room.request.room)

    def _leave(self) -> None:
        """Take those out of the batch whose tokens nobody wants any more; all of it is here, so nothing moves."""
        self._left = False
        for number in self.batch.leave(lambda number: self._rooms[number].left):
            self._free(number)
        others: list[deque[DecodeRequest] | list[DecodeRequest]] = [
            self._waiting, self._late, self._preempted, self._recomputing
        ]  # fmt: skip
        for rooms in others:
            for room in [room for room in rooms if room.left]:
                rooms.remove(room)
                self._free(room.request.room)

    def _join(self) -> None:
        """Put requests whose KV is here into the batch, in the order of the policy, while there are places."""
        recompute = self.job.engine.recompute
        while self._waiting and len(self.batch) + len(self._recomputing) < self.batch.limit:
            index = self.policy.join([room.request for room in self._waiting])
            room = self._waiting[index]
            del self._waiting[index]
            room.joined = self.clock.now
            request = room.request
            if recompute:
                self._joined.append(room)
                self.batch.join(request.room, request.input, request.output)
            elif request.output == 1:
                self._done(room)
            else:
                self.batch.join(request.room, request.input + 1, request.output - 1)

    def _begin(self) -> None:
        """Begin the next step, and say how long it is before anything can change by itself.

        The step begins when the host is done with this boundary and, with ``posting_holds``, with posting reads.
        It is a mixed one if something is computed again; otherwise as many steps follow as no request ends or
        lacks a page in.
        """
        start = self.clock.now + self._held_up
        if self.job.engine.posting_holds:
            start = self.batch.held(self.clock.now, max(start, self.posted()))
        if pieces := pieces_again(self._recomputing, self.job.chunk - len(self.batch)):
            end = self.batch.begin_mixed(start, pieces)
        else:
            most = 1.0 if self._late else math.inf
            if self._memory is not None:
                most = min(most, self._memory.steps())
            end = self.batch.begin(start, most)
        self._set(end)
        if self.job.decode_time.exchange:
            self._route(end, sum(new for _, new in pieces))
        if not pieces and not self.batch.runs and self._late:
            self._set(start)
        for room in self._joined:
            room.first = self.batch.first_step() + self.host.answer(room.request.input)
        self._joined.clear()

    def _route(self, end: float, again: int) -> None:
        """Put the tokens of the steps until *end*, and those computed *again*, on the links to their experts.

        They take from what KV gets there; the steps have the length that they have without KV.  Ranks of a group
        that do not schedule put nothing there.
        """
        device: Any = self.rank.device  # of the model: `experiments.serve` refuses others
        exchange = self.job.decode_time.exchange
        tokens = again + (self.batch.steps(end) * len(self.batch) if math.isfinite(end) else 0)
        device.traffic.exchange(tokens * exchange.network, tokens * exchange.port, end - self.clock.now)

    def _admit(self) -> None:
        """Give pages to requests of the queue, in the order of the policy, until the next one finds none.

        If nothing but pages, or slots, in quarantine are in its way, it waits for `Deployment.deadline` seconds and
        then fails.
        """
        while self._queue and not self._preempted:
            index = self.policy.admit(self._queue)
            request = self._queue[index]
            held, rows = self._find_memory(request) if self.has_slot() else (0, None)
            if rows is None:
                if self._growing():
                    self._blocked.clear()
                    return
                if not self._blocked.too_long():
                    return
                del self._queue[index]
                count = self.job.page_count(request.input + (0 if self._memory else request.output))
                self.send(ROUTER, Failed(request.room, out_of_memory(self.pages, count, self.has_slot())))
                self.unadmitted(request.room)
                continue
            del self._queue[index]
            self._blocked.clear()
            self._rooms[request.room] = DecodeRequest(request, self.clock.now, Consensus(self.job.decode.size))
            if self.job.cache.decode:
                self.hits[request.room] = held * self.job.page_size
            self._timers.add(request.room)
            self.start(request, *rows, held)

    def _growing(self) -> int:
        """Return how many rooms may come to need more pages: not failed ones, whose pages are in quarantine."""
        return len(self._rooms) - self.quarantined

    def _find_memory(self, request: Submit) -> tuple[int, tuple[Pages, tuple[Pages, ...]] | None]:
        """Return how many first pages of *request* are here, and the pages and rows of the rest; None if too few."""
        held, memory = self.held(request), self._memory
        if memory is not None and not memory.admits(request.input - self.shared(request), self._growing()):
            return held, None
        return held, self._allocate(request, held)

    def unadmitted(self, number: int) -> None:
        """See to what is left of a room that was given up before it had pages: nothing."""

    def posted(self) -> float:
        """Return when this rank has posted what it reads: never, for others write."""
        return 0.0

    def has_slot(self) -> bool:
        """Return whether there is a row for the metadata of one more room."""
        return self.slots.free > 0

    def start(self, request: Submit, pages: Pages, state: tuple[Pages, ...], held: int) -> None:
        """Have the KV of *request*, which has just got its *pages*, come here."""
        slot = self.slots.allocate(request.room)
        assert slot is not None
        if self.rank.device.holds_bytes:
            reserve = Reserve(self.life, request.room, request.input, pages, slot, state, held)
            self.send(self.followers, reserve)
            self.receiver.reserve(reserve)
        self.send(leader(request.prefill), Destination(request.prefill, request.room, pages, slot, state, held))

    def _reject(self, room: DecodeRequest) -> None:
        self._free(room.request.room)
        self.send(ROUTER, Failed(room.request.room, room.reason))

    def _done(self, room: DecodeRequest) -> None:
        """Free what *room* has and tell the router the times of its life."""
        number, stamps = room.request.room, room.stamps
        assert stamps is not None
        self._free(number)
        now = self.clock.now
        looks = room.arrived, room.polled, room.joined
        message = Finished(number, room.reserved, stamps.noticed, stamps.started, stamps.ended, *looks, now)
        if room.first != room.polled or room.asked is not None:
            ended = now + self.host.answer()
            times = asdict(message) | {"finished": max(ended, room.first)}
            message = Streamed(**times, first=room.first, asked=room.asked)
        self.send(ROUTER, message)

    # --- requests that run out of pages ---

    def _make_room(self, memory: GrowingMemory) -> None:
        """Give every request of the batch the pages of its next step.

        While there are too few, the scheduler's victim is preempted, of requests in the order in which they
        joined.  What is left over then lets preempted ones go on, in their order, while each finds pages for its
        whole context and its reserve.  One in whose way is nothing but quarantine fails as in `_admit`.
        """
        while memory.short():
            members = list(self.batch)
            running = [self._running(member) for member in members]
            running.sort(key=lambda one: self._rooms[one.room].joined)
            self.preempt(running[self.policy.victim(running)].room)
        memory.grow()
        while self._preempted and len(self.batch) + len(self._recomputing) < self.batch.limit:
            room = self._preempted[0]
            others = self._growing() - len(self._preempted)
            again = self.job.engine.preemption == "recompute"
            if not memory.admits(room.context - (self.shared(room.request) if again else 0), others):
                if others:
                    self._blocked.clear()
                elif self._blocked.too_long():
                    self._preempted.popleft()
                    room.reason = out_of_memory(self.pages, self.pages.free + 1)
                    self._reject(room)
                    continue
                return
            self._blocked.clear()
            room.recomputed = self._again(room)
            room.has_pages = True
            self._preempted.popleft()
            if again:
                self._recomputing.append(room)
            else:
                self._retraction.back(room.context)
                self._rejoin(room, room.context, room.steps)

    def _again(self, room: DecodeRequest) -> int:
        """Give a preempted *room* pages for its context, and return how many tokens of it are cached."""
        request, count = room.request, self.job.page_count(room.context)
        if self.job.engine.preemption == "recompute" and isinstance(self.pages, PrefixPagePool):
            found = self.pages.reuse(request.room, count, self.known(request))
            assert found is not None
            return found[1] * self.job.page_size
        self.pages.allocate(request.room, count)
        return 0

    def _running(self, member: Member) -> Running:
        request = self._rooms[member.number].request
        return Running(member.number, request.input, request.output - member.left)

    def preempt(self, number: int) -> None:
        """Take *number* out of the batch, and its pages."""
        room = self._rooms[number]
        member = next(member for member in self.batch if member.number == number)
        self.batch.leave(lambda other: other == number)
        self.pages.release(number)
        room.has_pages = False
        room.context, room.steps, room.recomputed = member.context, member.left, 0
        if room in self._joined:
            self._joined.remove(room)
        self.preemptions += 1
        if self.job.engine.preemption == "recompute":
            self._preempted.appendleft(room)
        else:
            self._retraction.out(room.context)
            self._preempted.append(room)

    def _rejoin(self, room: DecodeRequest, context: int, steps: int) -> None:
        """Put a preempted request back into the batch with *context* tokens and *steps* to go."""
        room.context = room.recomputed = 0
        if not room.first or (self.job.engine.recompute and steps == room.request.output):
            self._joined.append(room)
        self.batch.join(room.request.room, context, steps)

    def _computed_again(self) -> None:
        """Let those go on whose last piece has been computed, which gave them a token."""
        for room in [room for room in self._recomputing if room.recomputed == room.context]:
            self._recomputing.remove(room)
            context, steps = room.context + 1, room.steps - 1
            if self.job.engine.recompute and room.steps == room.request.output:
                room.first = self.clock.now + self.host.answer(room.request.input)
            room.context = room.recomputed = 0
            if steps:
                self.batch.join(room.request.room, context, steps)
            else:
                self._done(room)
