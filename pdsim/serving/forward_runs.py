# SPDX-License-Identifier: Apache-2.0
"""Prefill forwards of one long prompt, one after the other, in one message.

Nothing but the failure of the request changes which forwards these are: it is the first in the queue, and takes each
of them whole.  So the leader sends `Forwards`, and each rank knows when they end and when their KV is posted.  What
comes meanwhile changes when hosts act that sleep, and what the leader's host draws for launches and posts: then all
that is ahead is worked out anew.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from simpy.events import Event

from pdsim.core.clock import fire
from pdsim.kv.messages import Chunk, Forwards
from pdsim.kv.pages import cut
from pdsim.kv.push import KvSender
from pdsim.serving.policies import takes_first
from pdsim.serving.steps import PostingHost

if TYPE_CHECKING:
    # their module imports this one
    Scheduler = Any
    Request = Any
    Worker = Any


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
    if most <= 1:  # for one more it costs more than it saves
        return chunk, ()
    seconds = [job.prefill_time.prefill([(room.done + n * size, size)]) for n in range(most)]
    room.done += most * size
    room.sent += most * pages
    room.chunks += most
    return replace(chunk, runs=cut(runs, 0, pages * (most + 1))), tuple(seconds)


def _has_runs(scheduler: Scheduler) -> bool:
    job, engine = scheduler.job, scheduler.job.engine
    exact = engine.ahead and engine.overlap and engine.noticed != "prefill" and engine.prefill.send > 0.0
    alone = not (job.cache.prefill or job.cache.tiered or job.gather or job.prefill_time.exchange)
    plain = isinstance(scheduler.mover.sender, KvSender) and not (job.layerwise or job.staging)
    known = scheduler.engine.schedules and job.prefill.pp == 1 and not job.chunk % job.page_size
    beside = job.handoff.queues and job.handoff.notify != "poll"  # else posts may hold the scheduler up
    return bool(exact and alone and plain and known and beside and takes_first(scheduler.policy))


class ForwardRun:
    """The forwards of *message*: number *n* ends at ``ends[n]``, and its KV is posted at ``turns[n]``."""

    def __init__(self, message: Forwards, posts: PostingHost, last: Event, over: Event) -> None:
        self.message = message
        self.chunk = message.chunks[0]
        self.pages = self.chunk.runs[0][2] // (1 + len(message.more))
        self.forwards: Any = None  # `pdsim.sim.hosts.ScheduledComputations`
        self.ends: list[float] = []  # of those
        self.turns: list[float] = []  # of a follower once the first has ended: those before have drawn theirs
        self.expected: tuple[list[float], list[float]] = [], []  # ends and turns
        self.last = last  # when the last forward begins, or the request has failed
        self.over = over
        self.stopped = 0.0  # if the request has failed: seconds of the forward after the last one, if that is chosen
        self.posting = False  # whether the first has been posted
        self.together = False  # whether all are one sequence of writes
        self.posted = 0  # of those that are not
        self.passed = 0  # forwards whose end has passed
        self._costs: tuple[list[float], list[float]] | None = None  # of posts of the others
        self._posts = posts

    def pass_by(self, now: float) -> None:
        """Take note that those that end until *now* have ended."""
        passed = bisect_right(self.ends, now)
        self._posts.go_by_turns(self.turns[self.passed : passed])
        self.passed = passed
        self._costs = None

    def set_turn(self, number: int, end: float, late: float = 0.0) -> None:
        """Have the KV of *number*, which ends at *end*, posted after the others, *late* seconds later than usual."""
        place = number - self.passed
        if place >= 0:
            turns = self.turns
            if self._costs is None:
                self._costs = self._posts.costs_ahead(1 + len(self.message.more) - self.passed)
            sends, following = self._costs
            last = turns[number - 1] if place else self._posts.last
            del turns[number:]
            turns.append(max(last + following[place], end + (sends[place] + late)))

    def retime(self) -> None:
        """Have the KV of those that have not ended posted, each as it ends."""
        self.turns[self.passed :] = self._posts.ahead(self.ends[self.passed :])


class Launches:
    """How the host of *scheduler* launches the forwards of *run*, each while the one before goes on.

    They are chosen, take as long and cost the host as if `PrefillScheduler` chose them one by one.
    """

    def __init__(self, scheduler: Scheduler, run: ForwardRun) -> None:
        self._scheduler = scheduler
        self._run = run
        self._ends = [scheduler.launched]  # of the launch of each forward
        self._choices: list[float] = []  # when each but the first is chosen
        self._chosen = 0  # how many of them have been
        self._costs: tuple[list[float], list[float]] | None = None  # of steps and launches of the others

    def catch_up(self) -> None:
        """Draw the costs of forwards that have been chosen by now, and of posts of those that have ended."""
        now = self._scheduler.clock.now
        self._run.pass_by(now)
        self._costs = None
        chosen = bisect_right(self._choices, now)
        if chosen > self._chosen:
            self._scheduler.host.go_by(chosen - self._chosen)
            self._scheduler.launched = self._ends[chosen]
            self._chosen = chosen

    def stop(self, begun: int) -> float:
        """Choose no more; return the seconds of the forward after the *begun*, 0 if that is not chosen."""
        del self._choices[self._chosen :]
        return self._run.forwards.seconds[begun] if self._chosen >= begun else 0.0

    def after(self, forwards: Any, number: int) -> float:
        """Return the seconds of the one of *forwards* after *number*, whose end is known; 0 if there is none."""
        run, acts = self._run, forwards.ends[number]
        if number + 1 == len(forwards.seconds):
            run.set_turn(number, acts)
            return 0.0
        launched, over = self._ends[number], forwards.begins[number] + forwards.seconds[number]
        unseen = over <= launched < acts  # its launch ends after it, and before the host knows of its end
        if unseen:
            run.set_turn(number, acts)
        if number < self._chosen:
            seconds: float = forwards.seconds[number + 1]
        else:
            seconds = self._choose(number, forwards.begins[number], over, acts)
        if not unseen:
            run.set_turn(number, acts, max(0.0, self._ends[number + 1] - acts))
        return seconds

    def _choose(self, number: int, begin: float, over: float, acts: float) -> float:
        # As `PrefillScheduler.next_forward`: when the forward before has been launched or, if that takes longer than
        # itself, at its end.
        scheduler, run, launched = self._scheduler, self._run, self._ends[number]
        costs = scheduler.host.costs
        at, posts = (max(begin, launched), number) if launched < over else (acts, number + (launched < acts))
        if self._costs is None:
            self._costs = scheduler.host.ahead_of(len(run.message.more) - self._chosen)
        steps, launches = self._costs
        step, launch = steps[number - self._chosen], launches[number - self._chosen]
        posting = scheduler.worker.posts.due(at) + posts - bisect_right(run.turns, at, run.passed, posts)
        beside = costs.posted_beside + costs.posted_more * (posting - 1) if posting else 0.0
        del self._choices[number:], self._ends[number + 1 :]
        self._choices.append(at)
        self._ends.append(at + launch + beside)
        seconds: float = max(run.message.more[number], costs.launch, step)
        if over <= launched < acts:
            seconds = max(seconds + beside, self._ends[-1] - acts)
        else:
            seconds = max(seconds, self._ends[-1] - over)
        return seconds


class ForwardRuns:
    """The runs of a prefill *worker*, which a `KvSender` serves."""

    def __init__(self, worker: Worker, sender: KvSender) -> None:
        self._worker = worker
        self._sender = sender
        self._engine = worker.engine
        self._clock = worker.engine.clock
        self.open: list[ForwardRun] = []  # whose KV is not all posted
        self._launches: Launches | None = None  # of the last, on the rank that schedules

    def begin(self, message: Forwards) -> ForwardRun:
        """Begin the forwards of *message* now."""
        clock, scheduler = self._clock, self._worker.scheduler
        run = ForwardRun(message, self._worker.posts, clock.event(), clock.event())
        if scheduler is not None:
            self._launches = Launches(scheduler, run)
        name = message.incarnation, run.chunk.room, run.chunk.index
        seconds = (message.seconds, *message.more)
        run.forwards = self._engine.schedule(name, seconds, partial(self._expect, run), self._launches)
        run.ends = run.forwards.ends
        self.open.append(run)
        self._expect(run)
        return run

    def _expect(self, run: ForwardRun) -> None:
        # Act at ends and turns, which are known or have changed; what has been expected at others does nothing then.
        clock, ends, turns = self._clock, run.ends, run.turns
        if self._launches is None and turns:
            run.pass_by(clock.now)
            run.retime()
        if run.expected == (ends, turns):
            return
        run.expected = ends[:], turns[:]
        if not turns:
            clock.call_at(ends[0], self._end_first, run)  # before `_end`, should one be left
        clock.call_at(ends[-1], self._end, run)
        if self._launches is not None and not run.last.triggered:
            clock.call_at(ends[-2], self._begin_last, run)
        if not turns:
            return
        if not run.posting:
            clock.call_at(turns[0], self._begin_to_post, run)
        elif run.together:
            self._sender.retime(run.chunk.room, turns)
            clock.call_at(turns[-1], self._all_posted, run)
        elif run.posted < len(turns):
            clock.call_at(turns[run.posted], self._post_next, run)

    def catch_up(self) -> None:
        """Draw the costs of the scheduler's host for what has been chosen, and has ended, by now."""
        if self._launches is not None:
            self._launches.catch_up()

    def go_on(self) -> None:
        """Go on at the pace of the scheduler's host, which has changed, and with other draws."""
        if self.open and not self.open[-1].over.triggered:
            self.open[-1].forwards.move()

    def stop(self, room: int) -> None:
        """Let the forward of *room* that is under way be its last: the request has failed."""
        run, launches = self.open[-1] if self.open else None, self._launches
        if run is None or launches is None or run.chunk.room != room or run.over.triggered:
            return
        begun = bisect_right(run.forwards.begins, self._clock.now)
        if begun < len(run.forwards.seconds):
            launches.catch_up()
            run.stopped = launches.stop(begun)
            if not run.last.triggered:
                run.last.succeed()
            run.forwards.stop(begun)

    # --- ends of forwards ---

    def _end_first(self, run: ForwardRun) -> None:
        if not run.turns and self._clock.now >= run.ends[0]:
            run.retime()
            self._expect(run)

    def _begin_last(self, run: ForwardRun) -> None:
        if not run.last.triggered and self._clock.now >= run.ends[-2]:
            fire(run.last)

    def _end(self, run: ForwardRun) -> None:
        if not run.over.triggered and self._clock.now >= run.ends[-1]:
            run.forwards.conclude()
            if self._worker.scheduler is not None:
                self._put_off(run, self._worker.scheduler.launching(0.0))
            run.pass_by(inf)
            self._worker.ended()
            fire(run.over)

    def _put_off(self, run: ForwardRun, late: float) -> None:
        # The host still launches the next forward for *late* seconds, if others begin with it: then it posts.
        if late:
            run.set_turn(len(run.ends) - 1, run.ends[-1], late)
            self._expect(run)

    # --- posting ---

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
