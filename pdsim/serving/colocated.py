# SPDX-License-Identifier: Apache-2.0
"""Serving without disaggregation: engines that prefill and decode, chunks and tokens in the same steps.

The whole job is one rank.  A step of an engine has a budget of tokens: every running request takes one of them, what
is left goes to prompts in the order of `engine.scheduler`.  Steps without prompts are in closed form, as in
`pdsim.serving.steps`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from simpy.events import Event

from pdsim.compute.forward import PIECE_LAUNCH
from pdsim.compute.roofline import ForwardTime
from pdsim.core.clock import Clock
from pdsim.kv.messages import Submit
from pdsim.serving.block_manager import BlockManager, page_keys, page_pool
from pdsim.serving.deployment import Deployment
from pdsim.serving.offload import then, tiers_of
from pdsim.serving.policies import RoutingQuery, route, router_policy, scheduler_of, step_pieces
from pdsim.serving.rank_process import LinkTraffic, RankProcess
from pdsim.serving.requests import RequestTable
from pdsim.serving.router import Arrivals, RoutedRequest
from pdsim.serving.steps import GrowingMemory, Member, RunningBatch, SchedulerHost, drafts
from pdsim.transfer import Program
from pdsim.transfer.job import Place, Rank


def instances(job: Deployment) -> tuple[str, ...]:
    """Return the names of the engines of *job*, or of their attention groups: those of its prefill instances."""
    return tuple(name.replace("prefill", "colocated", 1) for name in job.prefills)


def program(
    rank: Rank, *, job: Mapping[str, Any], requests: Sequence[Sequence[Any]], places: Sequence[Sequence[int | None]]
) -> Program:
    """Serve *requests*, a `RequestTable` or its rows, and return what `pdsim.serving.router.program` does.

    *job* is `Deployment.plain`.  *places* are node and GPU of each rank, engine by engine.  Fields of a row that
    belong to a handoff repeat the times beside them, and bytes are 0.
    """
    return (yield from _Service(rank, Deployment.from_plain(job), RequestTable.of(requests), places).run())


class _Service(RankProcess):
    """The engines of the job, and who is served where; nobody sends this rank anything."""

    def __init__(
        self, rank: Rank, job: Deployment, requests: RequestTable, places: Sequence[Sequence[int | None]]
    ) -> None:
        super().__init__(rank, job)
        self.rows: list[Any] = [None] * len(requests)
        self.hits: dict[int, tuple[int, int]] = {}  # tokens that were cached, and those in host memory of them
        self.under_way: dict[int, RoutedRequest] = {}
        self.arrivals = Arrivals(self, requests, job.hashed, self._arrive, self._end_if_done)
        self.load = dict.fromkeys(instances(job), 0)
        self.policy = router_policy(job.policy)
        both = replace(job.engine.prefill, answer_token=job.engine.decode.answer_token)
        self.host = SchedulerHost(both, job.engine.variation, job.seed, "colocated")
        self.last = SchedulerHost(job.engine.decode, job.engine.variation, job.seed, "colocated.last")
        device: Any = rank.device  # of the model: `experiments.serve` refuses others
        traffic: list[LinkTraffic] = [device.traffic.of(Place(node or 0, gpu)) for node, gpu in places]
        ranks = len(traffic) // len(self.load)
        self.engines = {
            name: ColocatedEngine(self.clock, job, name, self._finished, traffic[at * ranks : (at + 1) * ranks])
            for at, name in enumerate(self.load)
        }

    def run(self) -> Program:
        engines, dp = [*self.engines.values()], self.job.prefill_dp
        for at in range(0, len(engines), dp):
            one = engines[at : at + dp]
            self.clock.process(one[0].run() if dp == 1 else stepping_together(self.clock, one))
        self.arrivals.begin(self.clock.now)
        yield self.ended
        report: dict[str, Any] = {"start": self.arrivals.start, "rows": self.rows}
        if self.arrivals.times is not None:
            report["arrivals"] = self.arrivals.times
        if self.job.cache.prefill:
            report["hits"] = {number + 1: cached for number, (cached, _) in self.hits.items()}
            if self.job.cache.host:
                loads = {number + 1: loaded for number, (_, loaded) in self.hits.items() if loaded}
                report["tier_hits"] = {"host": loads}
        return report

    def _arrive(self, request: RoutedRequest) -> None:
        query = RoutingQuery(list(self.engines), self.load, request.input, request.blocks)
        name = route(self.policy, query)
        request.prefill = request.decode = name
        request.room = request.number
        self.under_way[request.number] = request
        self.load[name] += request.input + request.output
        # Requests are read one by one, and admitted by another process while the next one is read.
        seconds = self.host.arrive(request.input, self.clock.now) + self.host.admit(request.input)
        if seconds:
            self.clock.call_at(self.clock.now + seconds, self.engines[name].submit, request)
        else:
            self.engines[name].submit(request)

    def _finished(self, one: ColocatedRequest) -> None:
        one.joined += self.host.answer(one.request.input)
        one.finished = max(one.joined, one.finished + self.last.answer())
        if one.finished > self.clock.now:
            self.clock.call_at(one.finished, self._answered, one)
        else:
            self._answered(one)

    def _answered(self, one: ColocatedRequest) -> None:
        number, name, begin, first = one.request.room, one.request.prefill, one.started, one.joined
        self.load[name] -= one.request.input + one.request.output
        self.rows[number] = [name, name, 0, "ok", *[begin] * 3, *[first] * 4, one.finished]
        self.hits[number] = one.cached, one.loaded
        self.arrivals.follow(self.under_way.pop(number))
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self.arrivals.over and not self.under_way:
            self.end()


class Step(NamedTuple):
    """What a scheduler has chosen for a step."""

    pieces: list[tuple[int, int]]  # of prompts: tokens covered before, and tokens
    ends: list[ColocatedRequest]  # that it completes
    ahead: float  # seconds for which it has been launched; less than 0: what compiles first
    fresh: bool  # whether there are new requests, which the next step may begin


@dataclass(slots=True, eq=False)
class ColocatedRequest:
    """A request at an engine; times are seconds on the clock, -1 while unknown."""

    request: Submit
    total: int  # tokens that a step has to cover before the next is generated: the prompt, later all that there are
    left: int  # tokens that decode generates after that
    done: int = 0  # tokens of them that a step has covered or covers now, or that were cached
    has_pages: bool = False
    started: float = -1.0  # its first step
    joined: float = -1.0  # the end of the step with the last piece of its prompt, which gives the first token
    finished: float = -1.0
    keys: Sequence[int] = ()  # of its pages, where there is a prefix cache
    priority: int = 0
    cached: int = 0  # tokens of the prompt that no step computes
    loaded: int = 0  # of them, those that came back from host memory
    came: float = 0.0


def stepping_together(clock: Clock, groups: Sequence[ColocatedEngine]) -> Program:
    """Serve with the attention *groups* of one engine, for ever: their steps begin at once and end with the last.

    Each group has requests, pages and a queue of its own.  Experts, and layers without attention, compute the tokens
    of all: those of prompts as many as there are, those of decode padded to the largest batch (SGLang 0.5.12,
    ``dp_attention.py``, `DpPaddingMode`; vLLM 0.22.1, ``v1/worker/dp_utils.py``).
    """
    idle = True
    while True:
        chosen = [one.choose(idle) for one in groups]
        moves = [one for one in groups if one.moves]
        for one in moves:
            yield from one.move()
        tokens = sum(new for step in chosen for _, new in step.pieces)
        mean = -(-tokens // len(groups))
        seconds = max(one.begin_alone(step, mean) for one, step in zip(groups, chosen, strict=True))
        idle = not seconds
        if not idle:
            yield clock.at(clock.now + seconds)
            for one, step in zip(groups, chosen, strict=True):
                one.end_alone(step)
        elif not (moves or any(step.fresh or one.has_arrived for one, step in zip(groups, chosen, strict=True))):
            yield clock.any_of([one.news() for one in groups])


def _launch(job: Deployment) -> float:
    # Operators know their launches; of a roofline's forward the engine does.
    time = job.prefill_time
    if not isinstance(time, ForwardTime):
        return 0.0
    launch = PIECE_LAUNCH if time.graph_tokens >= job.chunk else job.engine.prefill.launch
    return launch * job.layers("prefill0")


class ColocatedEngine:
    """One engine of *job*, whose ranks compute alike; ``finished(request)`` is called at the end of each.

    A request has pages for its prompt from its first step on and, with ``engine.memory: reserve``, for all of its
    output.  With ``grow`` they come as tokens do, and when the batch lacks some, the scheduler's victim gives its
    own up: its KV is computed again as a prompt is, first in the queue, or moved to host memory and back over the
    links of the engine's GPUs, *traffic*, all at once; the next step waits for that.  With ``cache.host`` prefixes
    come back the same way, and nobody waits for those that go there.

    Each turn of `run` is one step with pieces of prompts, or as many decode steps as pass before anything changes.

    With ``engine.overlap`` a step is chosen and launched when the one before it begins, or has been launched.  Where
    the scheduler's thread launches (``engine.launching_holds``), tokens of a step wait for the next launch.
    """

    def __init__(
        self,
        clock: Clock,
        job: Deployment,
        name: str,
        finished: Callable[[ColocatedRequest], None],
        traffic: Sequence[LinkTraffic],  # of the model's GPUs
    ) -> None:
        self.clock = clock
        self.job = job
        self.traffic = traffic
        tiers = tiers_of(job, lambda: traffic[0]) if job.cache.tiered else None
        pool = page_pool(job, job.decode_pages, job.cache.prefill, tiers)
        self.pages = BlockManager(pool, job.page_size)
        self.policy = scheduler_of(job.engine)
        # pages of sliding-window layers; 0 without such layers
        self._windows = job.window_pages(job.decode_pages) if job.shape.state.window else 0
        self._finished = finished
        self._batch = RunningBatch(
            job.decode_time,
            job.decode_batch,
            job.engine.decode,
            job.engine.overlap,
            launch=_launch(job),
            drafts=drafts(job, name),
        )
        self._memory = GrowingMemory(job, pool, self._batch)
        self._arrived: deque[ColocatedRequest] = deque()  # since the scheduler looked
        self._unseen = 0  # decode steps since it did last
        self._queue: deque[ColocatedRequest] = deque()  # not prefilled
        self._open: dict[int, ColocatedRequest] = {}  # have begun
        self._retracted: deque[tuple[ColocatedRequest, Member]] = deque()  # whose KV is in host memory
        self._moving = [0, 0]  # tokens that go to host memory, and back, before the next step
        self._news: Event | None = None
        self._due = 0.0  # when the step of a group would end by itself
        self._prompts = False  # whether the step before had any
        self._compiling = job.engine.compiling  # seconds, until a step goes on with a prompt
        self._chosen = 0.0  # with overlap, when the scheduler chooses the next step
        self._unlooked = False  # and has not looked then: it is launching still
        holds = job.engine.launching_holds
        self._holds = job.engine.overlap and (holds == "always" or (holds == "alone" and len(traffic) == 1))
        self._first: list[ColocatedRequest] = []  # whose first token is of the step before
        self._last: list[ColocatedRequest] = []  # whose last one is

    def submit(self, request: RoutedRequest) -> None:
        """Take *request*, which the next step may begin, or with ``engine.overlap`` the one after it."""
        keys = page_keys(request.blocks, request.input, self.job.page_size)
        total, left, priority = request.input, request.output - 1, request.priority
        self._arrived.append(
            ColocatedRequest(request.submission(), total, left, keys=keys, priority=priority, came=self.clock.now)
        )
        if self._news is not None and not self._news.triggered:
            self._news.succeed()

    def run(self) -> Program:
        """Serve, for ever.  Raise a `ConfigError` if the scheduler gives a piece that does not fit."""
        idle = True
        while True:
            pieces, ends, ahead, fresh = self.choose(idle)
            idle, moves = False, self.moves
            if moves:
                yield from self.move()
            if pieces and self.job.engine.mixed:
                yield self.clock.at(self._batch.begin_mixed(self.clock.now, pieces, ahead=ahead))
                self._batch.advance(self.clock.now)
            elif pieces:
                yield self.clock.at(self.clock.now + self._batch.alone(pieces, ahead=ahead))
            elif len(self._batch):
                yield from self._decode(1 if fresh else math.inf)
            else:
                idle = True
                if not (moves or fresh or self._arrived):  # or a request may have come meanwhile
                    self._batch.begin(self.clock.now)
                    yield self.news()
                continue
            self._after(ends)

    def _after(self, ends: Sequence[ColocatedRequest]) -> None:
        # A step has ended, with those whose prompts it was the last of.
        for number in self._batch.finished():
            self._end(self._open[number])
        if self.job.cache.prefill:
            for one in self._open.values():
                if self.job.cache.found == "computed":
                    self._commit(one)
                if one.has_pages and self.pages.tiers is not None:
                    self.pages.store(one.request.room, one.keys[: one.done // self.job.page_size])
            self._store()
        for one in ends:
            self._next_token(one)

    def choose(self, idle: bool) -> Step:
        """Return the next step, of what is here now if the engine was *idle*, else of what the scheduler saw."""
        overlap, now = self.job.engine.overlap, self.clock.now
        self._make_room()
        if idle or not overlap:
            self._look(idle or self._prompts)
            self._chosen = now
        elif self._unlooked:
            self._look(True, self._chosen)
        pieces, ends = self._pieces()
        self._prompts = bool(pieces)
        ahead = now - self._chosen
        launched = self._chosen
        if self._compiling and any(before for before, _ in pieces):  # its launch takes longer
            ahead, launched, self._compiling = ahead - self._compiling, launched + self._compiling, 0.0
        if pieces:
            tokens = self._batch_tokens if self.job.engine.mixed else 0
            launched += self._batch.launching(tokens + sum(new for _, new in pieces))
        self._send(max(0.0, launched - now))
        # The next step is chosen while this one runs, from what is here now, or when this one has been launched.
        self._chosen, self._unlooked = max(now, launched), launched > now
        return Step(pieces, ends, ahead, overlap and not self._unlooked and self._look(self._prompts))

    def _send(self, late: float) -> None:
        # The tokens of the step before leave so many seconds after its end.
        for one in self._first:
            one.joined += late
        for one in self._last:
            one.finished += late
            self._finished(one)
        self._first.clear()
        self._last.clear()

    @property
    def _batch_tokens(self) -> int:
        return len(self._batch) * (1 + self.job.engine.draft)

    @property
    def moves(self) -> bool:
        """Whether KV has to move before the next step."""
        return any(self._moving) or self.pages.has_incoming

    @property
    def has_arrived(self) -> bool:
        """Whether there are requests that the scheduler has not seen."""
        return bool(self._arrived)

    def news(self) -> Event:
        """Return what happens when a request comes."""
        self._news = event = self.clock.event()
        return event

    def begin_alone(self, step: Step, mean: int) -> float:
        """Begin *step* of a group; return its seconds, were it alone, 0 without work.

        The groups of the engine have *mean* tokens of prompts each in the mean.
        """
        batch, now, pieces = self._batch, self.clock.now, step.pieces
        self._due = now
        if pieces and self.job.engine.mixed:
            self._due = batch.begin_mixed(now, pieces, mean, step.ahead)
        elif pieces:
            return batch.alone(pieces, mean, step.ahead)
        elif batch.begin(now, 1) < math.inf:
            self._due = batch.end(1)
        return self._due - now

    def end_alone(self, step: Step) -> None:
        """End *step* of a group, which may have waited for others."""
        if self.job.engine.mixed or not step.pieces:
            self._batch.advance(self._due)
            self._unseen = 0 if step.pieces else (self._unseen + 1) % self.job.engine.look
        self._after(step.ends)

    def _look(self, now: bool, until: float = math.inf) -> bool:
        # Whether there are new requests; those that have come since, *until* then, are seen *now* or after enough
        # decode steps.
        if not now and self._unseen:
            return False
        self._unseen = 0
        fresh = False
        while self._arrived and self._arrived[0].came <= until:
            self._queue.append(self._arrived.popleft())
            fresh = True
        return fresh

    def _decode(self, most: float) -> Program:
        # Steps until a request ends, memory does, or the scheduler sees a new request.
        batch = self._batch
        most = min(most, batch.least(), self._memory.steps())
        end = batch.begin(self.clock.now, most)
        if not self._arrived:
            self._news = self.clock.event()
            yield self.clock.any_of([self.clock.at(end), self._news])
        steps = batch.steps(self.clock.now)
        steps = int(min(steps - (self._unseen + steps) % -self.job.engine.look, most))
        if steps > 1:
            self._chosen = batch.end(steps - 1)
        end = batch.end(steps)
        if end > self.clock.now:
            yield self.clock.at(end)
        batch.advance(self.clock.now)
        self._unseen = (self._unseen + steps) % self.job.engine.look

    def _pieces(self) -> tuple[list[tuple[int, int]], list[ColocatedRequest]]:
        # A piece is ``(tokens covered before, tokens)``; the second are the requests that it completes.
        pieces: list[tuple[int, int]] = []
        ends: list[ColocatedRequest] = []
        limits = self.job.chunk - self._batch_tokens, self.job.prefill_batch
        for one, tokens in step_pieces(self._queue, *limits, self.policy, self.job.engine.scheduler, self._start):
            pieces.append((one.done, tokens))
            one.done += tokens
            if one.done == one.total:
                ends.append(one)
            if self.job.cache.found == "scheduled":
                self._commit(one)
        return pieces, ends

    def _start(self, one: ColocatedRequest) -> ColocatedRequest | None:
        # If it finds no pages, one that has some is taken, so that it ends and gives them back.
        if self._begin(one):
            return one
        return next((other for other in self._queue if other.has_pages), None)

    def _begin(self, one: ColocatedRequest) -> bool:
        # A request that was preempted has its place still, and needs pages only.  What is cached is counted as
        # done, for the request's first begin also in *cached*.
        request, again = one.request, one.started >= 0
        if not again and (self._retracted or len(self._open) >= self.job.decode_batch):
            return False
        known = self._known(one)
        if not self._memory.admits(one.total - self.pages.shared(known), self._holders()):
            return False
        tokens = one.total if self._memory.grows else one.total + request.output
        if self._windows and self._in_windows() + self._window(one) > self._windows:
            return False
        given = self.pages.allocate(request.room, self.job.page_count(tokens), known)
        if given is None:
            return False
        one.done = given[1] * self.job.page_size
        one.has_pages = True
        if not again:
            self._open[request.room] = one
            one.cached, one.started = one.done, self.clock.now
            one.loaded = len(self.pages.loaded) * self.job.page_size
        return True

    def _window(self, one: ColocatedRequest) -> int:
        # pages of sliding-window layers that it has at most
        return self.job.window_need(one.request.input + one.request.output)

    def _in_windows(self) -> int:
        return sum(self._window(one) for one in self._open.values() if one.has_pages)

    def _holders(self) -> int:
        return sum(one.has_pages for one in self._open.values())

    def _next_token(self, one: ColocatedRequest) -> None:
        if one.joined < 0:
            one.joined = self.clock.now
            if self._holds:
                self._first.append(one)
        if one.left == 0:
            self._end(one)
        else:
            self._batch.join(one.request.room, one.total + 1, one.left)

    def _end(self, one: ColocatedRequest) -> None:
        one.finished = self.clock.now
        del self._open[one.request.room]
        self.pages.release(one.request.room)
        if self._holds:
            self._last.append(one)
        else:
            self._finished(one)

    def _make_room(self) -> None:
        # While there are too few, the scheduler's victim is preempted.  What is left over lets retracted requests
        # go on, first in, first out, while they fit with their reserve.
        memory = self._memory
        while memory.short():
            self._preempt(memory.victim(self.policy, self._open))
        memory.grow()
        while self._retracted and len(self._batch) < self._batch.limit:
            one, member = self._retracted[0]
            if not memory.admits(member.context, self._holders()):
                return
            if self._windows and self._in_windows() + self._window(one) > self._windows:
                return
            self._retracted.popleft()
            self.pages.allocate(one.request.room, self.job.page_count(member.context))
            one.has_pages = True
            self._moving[1] += member.context
            self._batch.join(*member)

    def _preempt(self, number: int) -> None:
        # With ``preemption: retract`` its KV goes to host memory, which holds the next step up, and comes back
        # later.  Otherwise what there is of it, prompt and answer, is the prompt of a new prefill, first in the
        # queue.
        one = self._open[number]
        member = self._batch.take(number)
        self.pages.release(number)
        one.has_pages = False
        if self.job.engine.preemption == "retract":
            self._moving[0] += member.context
            self._retracted.append((one, member))
        else:
            one.total, one.left, one.done = member.context, member.left - 1, 0
            self._queue.appendleft(one)

    def move(self) -> Program:
        """Wait until prefixes and retracted KV have moved, at the rate of the links."""
        rate = self.job.engine.retract_rate
        (out, back), self._moving = self._moving, [0, 0]
        loaded = self.pages.incoming()
        for tokens, returns, most in (
            (out, False, rate),
            (back, True, rate),
            (len(loaded) * self.job.page_size, True, math.inf),
        ):
            if tokens:
                yield self._offload(tokens, returns, most)
        if loaded:
            self.pages.came([key for key, _ in loaded])

    def _store(self) -> None:
        if keys := [key for key, _ in self.pages.outgoing()]:
            then(self._offload(len(keys) * self.job.page_size), lambda: self.pages.written(keys, keys))

    def _offload(self, tokens: int, back: bool = False, rate: float = math.inf) -> Event:
        each = self.job.shape.token_bytes(self.job.decode.tp)
        return self.clock.all_of([one.offload(tokens * each, back, rate) for one in self.traffic])

    def _known(self, one: ColocatedRequest) -> Sequence[int]:
        return self.pages.usable(one.keys, one.request.input)

    def _commit(self, one: ColocatedRequest) -> None:
        if one.has_pages:
            self.pages.commit(one.request.room, one.keys[: one.done // self.job.page_size])
