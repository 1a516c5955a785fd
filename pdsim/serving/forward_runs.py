# SPDX-License-Identifier: Apache-2.0
"""Prefill forwards of one long prompt, one after the other, in one message.

Nothing but the failure of the request changes which forwards these are: it is the first in the queue, and takes each
of them whole.  So the leader sends `Forwards`, and each rank knows when they end and when their KV is posted.  What
comes meanwhile only changes the pace of the leader's host, and by that when it posts.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from simpy.events import Event

from pdsim.core.clock import fire
from pdsim.kv.messages import Chunk, Forwards
from pdsim.kv.pages import cut
from pdsim.kv.push import KvSender
from pdsim.serving.policies import takes_first
from pdsim.serving.steps import PostingHost, SchedulerHost

if TYPE_CHECKING:
    # their module imports this one
    Scheduler = Any
    Request = Any
    Worker = Any

MARGIN = 3.0
"""How many times as long a forward must take as what the host does beside it, on average: then it never waits."""


def further(scheduler: Scheduler, room: Request, chunk: Chunk) -> tuple[Chunk, tuple[float, ...]]:
    """Return the seconds of the forwards after *chunk* that *room* has for itself, and *chunk* with their pages.

    All pages are neighbours on both sides; the last forward of a request is not among them.
    """
    job = scheduler.job
    if scheduler.has_runs is None:
        scheduler.has_runs = _has_runs(scheduler)
    if not scheduler.has_runs:
        return chunk, ()
    size, pages = job.chunk, job.chunk // job.page_size
    if sum([count for _, _, count in chunk.runs]) != pages:
        return chunk, ()
    most = (room.total - room.done - 1) // size
    runs = cut(room.runs, chunk.first_page - chunk.held, pages * (most + 1))[:1]
    most = min(most, runs[0][2] // pages - 1)
    seconds = [job.prefill_time.prefill([(room.done + n * size, size)]) for n in range(max(0, most))]
    costs, busy = scheduler.host.costs, job.engine.busy
    beside = max(costs.step * busy, costs.launch * busy + costs.posted_beside + costs.posted_more)
    if not seconds or min(seconds) < MARGIN * beside:
        return chunk, ()
    room.done += most * size
    room.sent += most * pages
    room.chunks += most
    return replace(chunk, runs=cut(runs, 0, pages * (most + 1))), tuple(seconds)


def _has_runs(scheduler: Scheduler) -> bool:
    job, engine = scheduler.job, scheduler.job.engine
    exact = engine.ahead and engine.overlap and engine.noticed != "prefill" and engine.prefill.send > 0.0
    alone = not (job.cache.prefill or job.cache.tiered or job.gather or job.prefill_time.exchange)
    plain = isinstance(scheduler.mover.sender, KvSender) and not (job.layerwise or job.staging)
    known = bool(scheduler.engine.ends((0.0,))) and job.prefill.pp == 1 and not job.chunk % job.page_size
    beside = job.handoff.queues and job.handoff.notify != "poll"  # else posts may hold the scheduler up
    return bool(exact and alone and plain and known and beside and takes_first(scheduler.policy))


class ForwardRun:
    """The forwards of *message*: number *n* ends at ``ends[n]``, and its KV is posted at ``turns[n]``."""

    def __init__(self, message: Forwards, ends: list[float], posts: PostingHost, last: Event, over: Event) -> None:
        self.message = message
        self.chunk = message.chunks[0]
        self.pages = self.chunk.runs[0][2] // len(ends)
        self.ends = ends
        self.turns: list[float] = []  # once the first has ended: those before have drawn theirs
        self.last = last  # when the last forward begins, or the request has failed
        self.over = over
        self.stopped = 0.0  # if the request has failed: seconds of the forward after the last one
        self.posting = False  # whether the first has been posted
        self.together = False  # whether all are one sequence of writes
        self.posted = 0  # of those that are not
        self._posts = posts
        self._passed = 0

    def pass_by(self, now: float) -> None:
        """Take note that those that end until *now* have ended."""
        passed = bisect_right(self.ends, now)
        self._posts.go_by(self.turns[self._passed : passed])
        self._passed = passed

    def retime(self) -> None:
        """Have those that have not ended posted as the host's pace now says."""
        self.turns[self._passed :] = self._posts.ahead(self.ends[self._passed :])


class ForwardRuns:
    """The runs of a prefill *worker*, which a `KvSender` serves."""

    def __init__(self, worker: Worker, sender: KvSender) -> None:
        self._worker = worker
        self._sender = sender
        self._engine = worker.engine
        self._clock = worker.engine.clock
        self.open: list[ForwardRun] = []  # whose KV is not all posted
        self._choices: list[float] = []  # when the forwards of the last are chosen that have not been, on the clock
        self._pace = 1.0  # of the host, for which turns are worked out

    def begin(self, message: Forwards) -> ForwardRun:
        """Begin the forwards of *message* now."""
        clock = self._clock
        ends = self._engine.ends((message.seconds, *message.more))
        run = ForwardRun(message, ends, self._worker.posts, clock.event(), clock.event())
        self.open.append(run)
        clock.call_at(ends[0], self._end_first, run)
        clock.call_at(ends[-1], self._end, run)
        if not self._engine.index:
            clock.call_at(ends[-2], self._begin_last, run)
        return run

    def pass_by(self, now: float) -> None:
        """Take note of the forwards that have ended until *now*."""
        for run in self.open:
            run.pass_by(now)

    def chosen(self, launched: float) -> ForwardRun:
        """Return the run that begins now, whose first forward is launched until then: others as one begins."""
        run = self.open[-1]
        self._choices = [max(self._clock.now, launched), *run.ends[:-2]]
        return run

    def catch_up(self, host: SchedulerHost) -> None:
        """Draw the costs of *host* for forwards that have been chosen by now."""
        passed = bisect_right(self._choices, self._clock.now)
        for _ in range(passed):
            host.step()
            host.launch()
        del self._choices[:passed]
        self.pass_by(self._clock.now)

    def retime(self) -> None:
        """Post what has not been computed as the host's pace says, if that has changed."""
        clock, pace = self._clock, self._worker.posts.pace
        if pace == self._pace:
            return
        self._pace = pace
        self.pass_by(clock.now)
        for run in self.open:
            if not run.turns or run.ends[-1] <= clock.now:
                continue
            run.retime()
            if not run.posting:
                clock.call_at(run.turns[0], self._begin_to_post, run)
            elif run.together:
                self._sender.retime(run.chunk.room, run.turns)
                clock.call_at(run.turns[-1], self._all_posted, run)
            else:
                clock.call_at(run.turns[run.posted], self._post_next, run)

    def stop(self, room: int) -> None:
        """Let the forward of *room* that is under way be its last: the request has failed."""
        clock = self._clock
        for run in self.open:
            under_way = bisect_right(run.ends, clock.now)
            if run.chunk.room == room and under_way < len(run.ends) - 1:
                run.pass_by(clock.now)
                run.stopped = run.message.more[under_way]
                self._choices = [at for at in self._choices if at <= clock.now]
                del run.ends[under_way + 1 :], run.turns[under_way + 1 :]
                clock.call_at(run.ends[-1], self._end, run)
                if run.posting and run.together:
                    clock.call_at(run.turns[-1], self._all_posted, run)
                if not run.last.triggered:
                    run.last.succeed()

    def _end_first(self, run: ForwardRun) -> None:
        self._pace = self._worker.posts.pace
        run.retime()
        self._clock.call_at(run.turns[0], self._begin_to_post, run)

    def _begin_last(self, run: ForwardRun) -> None:
        if not run.last.triggered:
            fire(run.last)

    def _end(self, run: ForwardRun) -> None:
        if not run.over.triggered:
            if self._worker.launching is not None:
                self._put_off(run, self._worker.launching(0.0))
            run.pass_by(inf)
            self._worker.ended()
            fire(run.over)

    def _put_off(self, run: ForwardRun, late: float) -> None:
        # The host still launches the next forward for *late* seconds, if others begin with it: then it posts.
        if late and self._clock.now < run.turns[-1]:
            run.turns[-1] += late
            if run.posting and run.together:
                self._sender.retime(run.chunk.room, run.turns)
                self._clock.call_at(run.turns[-1], self._all_posted, run)
            elif run.posting:
                self._clock.call_at(run.turns[-1], self._post_next, run)

    # --- posting; an event that has been put off, or brought forward, comes too early or too late ---

    def _begin_to_post(self, run: ForwardRun) -> None:
        if not run.posting and self._clock.now >= run.turns[0] and not self._engine.has_ended:
            run.posting = True
            self._engine.guard(self._post, run)

    def _post(self, run: ForwardRun) -> None:
        run.together = self._sender.send_in_turn(run.chunk, run.pages, run.turns)
        if run.together:
            self._clock.call_at(run.turns[-1], self._all_posted, run)
        else:
            self._post_next(run)

    def _post_next(self, run: ForwardRun) -> None:
        number = run.posted
        if number == len(run.turns) or self._clock.now < run.turns[number] or self._engine.has_ended:
            return
        run.posted += 1
        chunk, pages = run.chunk, run.pages
        runs = cut(chunk.runs, number * pages, pages)
        part = replace(chunk, index=chunk.index + number, first_page=chunk.first_page + number * pages, runs=runs)
        self._engine.guard(self._sender.send_layers, [part], self._engine.clock.now, 0.0)
        if run.posted < len(run.turns):
            self._clock.call_at(run.turns[run.posted], self._post_next, run)
        else:
            self._all_posted(run)

    def _all_posted(self, run: ForwardRun) -> None:
        if run in self.open and self._clock.now >= run.turns[-1] and not self._engine.has_ended:
            self.open.remove(run)
            self._engine.guard(self._conclude, run)

    def _conclude(self, run: ForwardRun) -> None:
        self._sender.computed(run.chunk)
        self._sender.poll()
        self._worker.sent()
