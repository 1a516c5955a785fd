# SPDX-License-Identifier: Apache-2.0
"""What schedulers choose, and how long it takes: accounts of their own, a part of `pdsim.verify.invariants`.

They follow the steps of a decode batch and the forwards of a prefill rank by what the model of compute and the costs
of hosts say, not by what the scheduler keeps.  What is chosen is bounded from both sides: a forward or a step has no
more than it may, and nothing that fits is left out; nobody is preempted while pages suffice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pdsim.kv.messages import Finished
from pdsim.kv.push import KvSender
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.deployment import gathered_tensors
from pdsim.serving.prefill import PrefillWorker
from pdsim.serving.router import Router
from pdsim.verify.waits import fits

_ROUNDING = 1e-9
"""Seconds, or tokens, by which two sums of the same may differ."""

Report = Callable[[str, str], None]


class ScheduleChecker:
    """Calls *report* with an invariant (I7, I12, I14 or I15) and a text for what is chosen, or lasts, wrongly."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last: dict[int, tuple[Any, Any]] = {}  # by room: who decodes it, and its request

    def finished(self, message: Finished) -> None:
        """Check that the tokens of *message* have left when the host had answered, no sooner and no later."""
        member, request = self._last.get(message.room, (None, None))
        if member is None or member.job.engine.variation:
            return
        costs, said = member.job.engine.decode, message.polled if message.first is None else message.first
        first = message.polled + sum(
            getattr(costs, name) + request.input * getattr(costs, f"{name}_token") for name in ("admit", "answer")
        )
        over = max(member.clock.now + costs.answer, said)
        if said < first - _ROUNDING or abs(message.finished - over) > _ROUNDING:
            what = f"first at {said:g} s and last at {message.finished:g}, not from {first:g} and at {over:g}"
            self._report("I14", f"tokens of room {message.room} leave {member.rank.name} {what}")

    def _served(self, member: Any, done: Callable[[Any], None], room: Any) -> None:
        self._last[room.request.room] = member, room.request
        done(room)

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        if isinstance(member, Router):
            return
        scheduler: Any = member.scheduler
        launches = None
        if scheduler is not None:
            _Arrivals(self._report, member)
            if isinstance(scheduler, DecodeScheduler):
                watched: Any = scheduler
                watched._done = partial(self._served, member, scheduler._done)
                _Steps(self._report, member)
                _Admission(self._report, member)
            else:
                launches = _Choices(self._report, member)
        if isinstance(member.worker, PrefillWorker):
            _Forwards(self._report, member, launches)


def _costs(member: Any) -> Any:
    return member.job.engine.prefill if member.prefill else member.job.engine.decode


class _Arrivals:
    """Watches the host of a scheduler, which reads one request after the other."""

    def __init__(self, report: Report, member: Any) -> None:
        self._report, self._member = report, member
        self._read = 0.0
        host = member.scheduler.host
        host.arrive = partial(self._arrives, host, host.arrive)

    def _arrives(self, host: Any, arrive: Callable[[int, float], float], tokens: int, now: float) -> float:
        seconds, costs = arrive(tokens, now), _costs(self._member)
        mean = (costs.arrive + tokens * costs.arrive_token) * host.pace
        known = max(self._read, now) + (0.0 if self._member.job.engine.variation else mean)
        if mean and now + seconds < known - _ROUNDING:
            what = f"a request of {tokens} tokens {seconds:g} s after it came"
            self._report("I7", f"{self._member.rank.name} reads {what}, beside those before it")
        self._read = now + seconds if mean else self._read
        return seconds


# --- decode --------------------------------------------------------------------------------------------------------


class _Own:
    """A request of a batch, between two steps."""

    def __init__(self, total: int, growth: float, steps: int) -> None:
        self.total = total  # tokens at its end
        self.growth = growth  # tokens a step
        self.steps = steps  # that it still takes

    @property
    def left(self) -> float:
        return self.steps * self.growth

    @property
    def tokens(self) -> int:
        # that its next step reads, as whole ones
        return self.total - math.ceil(self.left - _ROUNDING)


class _Batch:
    """The requests of the batch of *member*, by number, as they join and leave."""

    def __init__(self, report: Report, member: Any) -> None:
        self.own: dict[int, _Own] = {}
        self._report, self._member = report, member
        batch = member.scheduler.batch
        batch.join = partial(self._joins, batch, batch.join)
        batch.leave = partial(self._leaves, batch.leave)
        batch.finished = partial(self._finishes, batch.finished)

    def _joins(self, batch: Any, join: Callable[..., None], number: int, context: int, tokens: int) -> None:
        join(number, context, tokens)
        engine = self._member.job.engine
        ends = [(end, growth) for end, other, _, growth in batch._members if other == number]
        steps, growth = ends[0][0] - batch._step, ends[0][1]
        fewest = -(-tokens // (1 + engine.draft))
        most = fewest if engine.acceptance == 1.0 and engine.draft else tokens
        if len(ends) > 1 or not fewest <= steps <= most or abs(steps * growth - tokens) > _ROUNDING * tokens:
            what = f"takes {steps} steps of {growth:g} tokens for {tokens}, with {engine.draft} drafts"
            self._report("I14", f"room {number} on {self._member.rank.name} {what}")
        self.own[number] = _Own(context + tokens, growth, steps)

    def _leaves(self, leave: Callable[[Any], list[int]], left: Callable[[int], bool]) -> list[int]:
        gone = leave(left)
        for number in gone:
            self.own.pop(number, None)
        return gone

    def _finishes(self, finished: Callable[[], Iterator[int]]) -> Iterator[int]:
        for number in finished():
            own = self.own.pop(number, None)
            if own is None or own.steps:
                what = f"after other steps than it takes: {own and own.steps} are left"
                self._report("I14", f"room {number} on {self._member.rank.name} ends {what}")
            yield number
        if late := [number for number, own in self.own.items() if own.steps <= 0]:
            self._report("I14", f"room {late[0]} has all its tokens, and {self._member.rank.name} goes on with it")


class _Steps:
    """Follows the steps of a batch: when each ends, by what it reads, and that it is looked at then."""

    def __init__(self, report: Report, member: Any) -> None:
        self._report, self._member = report, member
        scheduler = self._scheduler = member.scheduler
        self._requests = _Batch(report, member)
        self._began: tuple[float, float] | None = None  # the steps under way: when, and seconds without context
        self._number = 0  # of the first of them
        self._pieces: list[tuple[int, int]] = []
        self._admitted = 0.0  # seconds that preparing requests takes
        scheduler.host.admit = partial(self._admits, scheduler.host.admit)
        scheduler.preemption.pieces = partial(self._computes_again, scheduler.preemption.pieces)
        scheduler._between_steps = partial(self._looks, scheduler._between_steps)
        scheduler._begin_step = partial(self._begins, scheduler._begin_step)

    def _ends(self) -> Iterator[float]:
        # Of the steps under way, one after the other.
        if self._began is None:
            return
        (end, base), batch = self._began, self._scheduler.batch
        own = [(each.total - each.left, each.growth) for each in self._requests.own.values()]
        cost = self._member.job.decode_time.context_of(len(own))
        vary, before, number = batch._variation, 0.0, 0
        if vary is not None:
            before = vary.until(self._number)
        while True:
            end += base + cost * sum([context + number * growth for context, growth in own])
            number += 1
            yield end if vary is None else end + vary.until(self._number + number) - before

    def _admits(self, admit: Callable[[int], float], tokens: int) -> float:
        seconds = admit(tokens)
        self._admitted += seconds
        return seconds

    def _computes_again(self, pieces: Callable[[], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        job, scheduler = self._member.job, self._scheduler
        chosen = self._pieces = pieces()
        batch = len(self._requests.own) * (1 + job.engine.draft)
        many = batch + sum(new for _, new in chosen)
        short = [room for room in scheduler.preemption.recomputing if room.recomputed < room.context]
        if (chosen and many > job.chunk) or any(new <= 0 for _, new in chosen):
            what = f"{batch} tokens of its batch and pieces {chosen}, of {job.chunk}"
            self._report("I15", f"a step of {self._member.rank.name} has {what}")
        if short and many < job.chunk:
            what = f"computes {many} tokens of {job.chunk}, and more of room {short[0].request.room} could be"
            self._report("I12", f"a step of {self._member.rank.name} {what}")
        return chosen

    def _looks(self, look: Callable[[float], None], due: float) -> None:
        batch, name, steps = self._scheduler.batch, self._member.rank.name, 0
        for end in self._ends():
            steps += 1
            if end > due - _ROUNDING:
                if end > due + _ROUNDING:
                    self._report("I14", f"{name} looks at {due:g} s, in a step that ends at {end:g} s")
                break
        for each in self._requests.own.values():
            each.steps -= steps
        self._admitted, before = 0.0, batch._step
        look(due)
        if batch._step - before != steps:
            self._report("I14", f"{name} counts {batch._step - before} steps that have ended, there are {steps}")

    def _begins(self, begin: Callable[[], None]) -> None:
        scheduler, job, now = self._scheduler, self._member.job, self._member.clock.now
        self._pieces = []
        begin()
        batch, engine = scheduler.batch, job.engine
        span, own, name = batch._span, self._requests.own, self._member.rank.name
        self._began = None
        if bool(own or self._pieces) != (span is not None):
            self._report("I12", f"{name} has {len(own)} requests, pieces {self._pieces}, and no steps for them")
        if span is None:
            return
        held = engine.posting_holds or job.handoff.notice or job.handoff.metadata_stall
        if span.start < now + (0.0 if held else self._admitted) - _ROUNDING:
            self._report("I14", f"{name} begins a step {span.start - now:g} s after it has looked: too early")
        if not held and span.start > now + self._drafted() + _ROUNDING:
            self._report("I14", f"{name} begins a step {span.start - now:g} s after it has looked: too late")
        self._began, self._number = (span.start, self._seconds(len(own))), batch._step
        first = next(self._ends())
        if abs(span.end(1) - first) > _ROUNDING and not job.decode_time.sequence:
            what = f"takes {span.end(1) - span.start:g} s, for {len(own)} requests and {self._pieces}"
            self._report("I14", f"a step of {name} {what} it should take {first - span.start:g}")
        joins = scheduler._late or (scheduler._waiting and len(own) < job.decode_batch)
        if joins and not scheduler.preemption.recomputing and scheduler._due > first + _ROUNDING:
            self._report("I12", f"{name} looks at {scheduler._due:g} s, and a request could join at {first:g} s")

    def _drafted(self) -> float:
        # What preparing requests takes, where decode computes the drafter's KV again, too.
        job = self._member.job
        if not job.engine.draft_layers or job.engine.draft_kv == "transferred":
            return self._admitted
        return math.inf

    def _seconds(self, batch: int) -> float:
        engine, time, costs = self._member.job.engine, self._member.job.decode_time, self._member.job.engine.decode
        tokens = batch * (1 + engine.draft)
        if self._pieces:
            forward = time.prefill([*self._pieces, (0, tokens)] if batch else self._pieces)
        else:
            forward = time.step(tokens) + engine.draft * engine.draft_share * time.step(batch)
        forward = max(forward, costs.launch * self._member.job.layers(self._member.instance))
        return float(max(forward, costs.step) if engine.overlap else forward + costs.step)


class _Admission:
    """Watches who gets pages at decode, who gives them up, and who gets none though there are enough."""

    def __init__(self, report: Report, member: Any) -> None:
        self._report, self._member = report, member
        scheduler = self._scheduler = member.scheduler
        pages, preemption = scheduler.pages, scheduler.preemption
        pages.reserve = partial(self._reserves, pages.reserve)
        preemption.preempt = partial(self._preempts, preemption.preempt)
        preemption._resume = partial(self._resumes, preemption._resume)
        self._retracted = [0, 0]  # tokens that go to host memory, and that come back, before the next step
        member.mover.offload = partial(self._offloads, member.mover.offload)
        scheduler._between_steps = partial(self._looks, scheduler._between_steps)

    @property
    def _others(self) -> int:
        return sum(not room.failed for room in self._scheduler.rooms.values())

    def _lacks(self, free: int, tokens: int, others: int) -> int:
        # How many of *free* pages are too few for *tokens* beside *others*, who may all grow.
        engine, block = self._member.job.engine, self._scheduler.pages.pool.block
        if engine.memory != "grow":
            return 0
        size, reserved = block * self._member.job.page_size, engine.reserved_tokens if others else 0
        return int(block * (-(-(tokens + reserved) // size) + -(-reserved // size) * others) - free)

    def _shared(self, request: Any) -> int:
        pool, shared = self._scheduler.pages.pool, 0
        for key in self._scheduler.pages.known(request):
            cached = pool._cached.get(key)
            if cached is None:
                break
            shared += cached.users > 0
        return shared * int(self._member.job.page_size)

    def _reserves(self, reserve: Callable[[Any, int], Any], request: Any, held: int) -> Any:
        free, waiting, name = (
            self._scheduler.pages.pool.free,
            self._scheduler.preemption.waiting,
            self._member.rank.name,
        )
        lacks = self._lacks(free, request.input - self._shared(request), self._others)
        given = reserve(request, held)
        if given is not None and waiting:
            what = f"while room {waiting[0].request.room} waits for its own again"
            self._report("I7", f"room {request.room} gets pages on {name} {what}")
        if given is not None and lacks > 0:
            self._report("I15", f"room {request.room} gets pages on {name}, which others that grow need: {lacks}")
        return given

    def _resumes(self, resume: Callable[[Any], None], room: Any) -> None:
        scheduler, name, number = self._scheduler, self._member.rank.name, room.request.room
        waiting, again = scheduler.preemption.waiting, self._member.job.engine.preemption == "recompute"
        shared = self._shared(room.request) if again else 0
        lacks = self._lacks(scheduler.pages.pool.free, room.context - shared, self._others - 1 - len(waiting))
        if lacks > 0:
            self._report("I15", f"room {number} goes on on {name} with pages that others need: {lacks}")
        if not again:
            self._retracted[1] += room.context
        resume(room)

    def _offloads(self, offload: Callable[[Any], Any], message: Any) -> Any:
        job, clock, began, tokens = self._member.job, self._member.clock, self._member.clock.now, self._retracted
        each, self._retracted = job.shape.token_bytes(job.decode.tp), [0, 0]
        if [message.nbytes, message.back] != [each * many for many in tokens]:
            what = f"{message.nbytes} bytes to host memory and {message.back} back, for tokens {tokens}"
            self._report("I14", f"{self._member.rank.name} moves {what}")
        seconds, moved = (message.nbytes + message.back) / job.engine.retract_rate, offload(message)

        def ends(_: Any) -> None:
            if clock.now - began < seconds * (1 - _ROUNDING) - _ROUNDING:
                what = f"{message.nbytes} and {message.back} bytes in {clock.now - began:g} s, not {seconds:g}"
                self._report("I14", f"{self._member.rank.name} moves to host memory and back {what}")

        moved.callbacks.insert(0, ends)
        return moved

    def _preempts(self, preempt: Callable[[int], Any], number: int) -> Any:
        scheduler, job, name = self._scheduler, self._member.job, self._member.rank.name
        pool, rooms, waiting = scheduler.pages.pool, scheduler.rooms, scheduler.preemption.waiting
        batch = list(scheduler.batch)
        needs = [pool.rounded(job.page_count(one.context)) - pool.count(one.number) for one in batch]
        if sum(need for need in needs if need > 0) <= pool.free:
            self._report("I14", f"{name} preempts room {number}, and {pool.free} pages suffice for {needs}")
        gains = {one.number: rooms[one.number].request.output - one.left for one in batch}
        if job.engine.scheduler == "fcfs":
            best = max(rooms[one.number].joined for one in batch) == rooms[number].joined
        else:
            best = min(gains.values()) == gains[number]
        if job.engine.scheduler in ("fcfs", "least_generated", "priority") and not best:
            self._report("I7", f"{name} preempts room {number}, of those that have got {gains}")
        room = preempt(number)
        if job.engine.preemption == "retract":
            self._retracted[0] += room.context
        if waiting[0 if job.engine.preemption == "recompute" else -1] is not room:
            self._report("I7", f"room {number} is preempted on {name}, and has not its place among those that wait")
        return room

    def _looks(self, look: Callable[[float], None], due: float) -> None:
        look(due)
        scheduler, name = self._scheduler, self._member.rank.name
        if self._member.has_ended:
            return
        preemption, pool = scheduler.preemption, scheduler.pages.pool
        if waiting := preemption.waiting:
            room, others = waiting[0], self._others - len(waiting)
            place = len(scheduler.batch) + len(preemption.recomputing) < self._member.job.decode_batch
            pages = pool.rounded(self._member.job.page_count(room.context))
            if place and pages <= pool.free and self._lacks(pool.free, room.context, others) <= 0:
                self._report("I12", f"room {room.request.room} could go on, and {name} leaves it preempted")
        elif scheduler._queue:
            first = scheduler._queue[scheduler.policy.admit(scheduler._queue)]
            reach, output = first.input + first.output, scheduler.pages.output(first)
            if self._lacks(pool.free, first.input, self._others) <= 0 and fits(scheduler, first, output, reach):
                self._report("I12", f"room {first.room} could have pages, and {name} gives it none")


# --- prefill -------------------------------------------------------------------------------------------------------


class _Choices:
    """Watches what the forwards of a prefill scheduler have, and how long they are said to take."""

    def __init__(self, report: Report, member: Any) -> None:
        self._report, self._member = report, member
        scheduler = self._scheduler = member.scheduler
        self._pieces: list[tuple[int, int]] = []
        self._seconds = 0.0  # of the last forward, without what its launch adds
        self._admitted = 0.0
        self.launched = 0.0  # when the launch of the last one that was chosen ends, at least
        scheduler.host.admit = partial(self._admits, scheduler.host.admit)
        scheduler.iteration_seconds = partial(self._lasts, scheduler.iteration_seconds)
        scheduler.next_forward = partial(self._chooses, scheduler.next_forward)
        scheduler._enqueue = partial(self._queues, scheduler._enqueue)
        if member.job.engine.scheduler == "priority":
            scheduler._start = partial(self._starts, scheduler._start)

    def _admits(self, admit: Callable[[int], float], tokens: int) -> float:
        seconds = admit(tokens)
        self._admitted += seconds
        return seconds

    def _queues(self, queue: Callable[[Any], None], room: Any) -> None:
        early = room.ready - self._member.clock.now
        if early > _ROUNDING:
            what = f"is queued {early:g} s before its scheduler knows of it"
            self._report("I15", f"room {room.request.room} on {self._member.rank.name} {what}")
        queue(room)

    def _starts(self, start: Callable[[Any], Any], room: Any) -> Any:
        started = start(room)
        if started is room:
            others = [each for each in self._scheduler._queue if not each.has_pages]
            hints = {each: each.request.hints.priority if each.request.hints else 0 for each in (room, *others)}
            above = [each.request.room for each in others if hints[each] > hints[room]]
            if above:
                what = f"before rooms {above[:3]} of a higher priority"
                self._report("I7", f"{self._member.rank.name} starts room {room.request.room} {what}")
        return started

    def _lasts(self, seconds: Callable[[list[tuple[int, int]]], float], pieces: list[tuple[int, int]]) -> float:
        job, costs, host = self._member.job, self._member.job.engine.prefill, self._scheduler.host
        said, self._pieces = seconds(pieces), list(pieces)
        forward = max(job.prefill_time.prefill(pieces), costs.launch * job.layers(self._member.instance))
        step = costs.step * host.pace
        least = max(forward, step) if job.engine.overlap else forward + step
        if job.engine.variation and step:
            least = forward
        if said < least - _ROUNDING or (not (job.engine.variation and step) and said > least + _ROUNDING):
            what = f"is to take {said:g} s for {pieces}, not {least:g}"
            self._report("I14", f"a forward of {self._member.rank.name} {what}")
        self._seconds = said
        return said

    def _chooses(self, choose: Callable[[bool], Any], ahead: bool = False) -> Any:
        self._pieces, self._admitted = [], 0.0
        forward = choose(ahead)
        scheduler, job, name = self._scheduler, self._member.job, self._member.rank.name
        tokens, queue = sum(new for _, new in self._pieces), scheduler._queue
        if queue and tokens < job.chunk and len(self._pieces) < job.prefill_batch and not self._member.has_ended:
            chosen = scheduler.policy.prefill(queue, job.chunk - tokens)
            first = None if chosen is None else queue[chosen[0]]
            if first is not None and (first.has_pages or fits(scheduler, first.request, 0, first.request.input)):
                what = f"{tokens} tokens of {job.chunk}, and more of room {first.request.room} could be computed"
                self._report("I12", f"a forward of {name} has {what}")
        if forward is not None:
            self._check_launch(forward.seconds, ahead)
        return forward

    def _check_launch(self, seconds: float, ahead: bool) -> None:
        job, costs, host = self._member.job, self._member.job.engine.prefill, self._scheduler.host
        launch = costs.launch * job.layers(self._member.instance) * host.pace
        varies = bool(job.engine.variation and host.pace != 1.0)
        held = 0.0 if ahead else self._admitted
        due = len(self._member.worker.posts._turns)
        beside = costs.posted_beside + costs.posted_more * due
        most = max(self._seconds + self._admitted, self._admitted + launch) + beside
        if seconds < self._seconds + held - _ROUNDING or (not varies and seconds > most + _ROUNDING):
            what = f"{seconds:g} s, with {self._seconds:g} to compute and {self._admitted:g} to prepare"
            self._report("I14", f"a forward of {self._member.rank.name} takes {what}")
        self.launched = 0.0
        if job.engine.ahead:
            self.launched = self._member.clock.now + self._admitted + (0.0 if varies else launch)


class _Forwards:
    """Follows the forwards of a prefill rank: when each can have ended, and that what it computes goes in order."""

    def __init__(self, report: Report, member: Any, choices: _Choices | None) -> None:
        self._report, self._member, self._choices = report, member, choices
        self._passed = [0.0] * member.job.prefill.at(member.index).pp  # when earlier stages pass the last one on
        self._end = 0.0  # of the last forward, at the earliest
        self._count = 0
        self._places: dict[tuple[int, int], int] = {}  # forward of each room and chunk; cached chunks come first
        self._last = 0  # the place of what was sent last
        self._next: dict[int, tuple[int, int]] = {}  # by room: the chunk and page that go next
        self._turn = 0.0  # when the last post is due
        self._travelling: list[list[Any]] = []  # the ends of exchanges, of forwards that have not ended
        worker = member.worker
        if member.job.prefill_time.exchange:
            member.traffic.exchange = partial(self._exchanges, member.traffic.exchange)
        worker.compute = partial(self._computes, worker.compute)
        worker.posts.turns = partial(self._turns, worker.posts, worker.posts.turns)
        if member.gather is not None:
            self._due: list[
                tuple[int, int]
            ] = []  # gathers of the forwards that end next: bytes of a rank, and tensors
            group = member.gather._group
            group.all_gather = partial(self._gathers, group.all_gather)
        if not member.job.layerwise:
            sender: Any = member.mover.sender
            sender.send = partial(self._sends, isinstance(sender, KvSender), sender.send)

    def _computes(self, compute: Callable[[Any], Any], message: Any) -> Any:
        job, begin = self._member.job, self._member.clock.now
        stage = message.seconds + job.gather_seconds(sum(message.tokens))
        for number, end in enumerate(self._passed):
            begin = self._passed[number] = max(begin, end) + stage
        end = self._end = max(begin, self._end) + message.seconds
        if self._choices is not None:
            end = max(end, self._choices.launched)
        self._count += 1
        for chunk in message.chunks:
            self._places[chunk.room, chunk.index] = 2 * self._count + 1
        for chunk in message.cached:
            self._places[chunk.room, chunk.index] = 2 * self._count
        forward = compute(message)
        forward.callbacks.insert(0, lambda _: self._ended(message, end))
        return forward

    def _gathers(self, gather: Callable[..., Any], *what: Any, **how: Any) -> Any:
        if how["label"]:
            self._due.append((what[2], how["times"]))
        return gather(*what, **how)

    def _check_gathers(self, message: Any) -> None:
        # Each tensor once, and of each rank as much as the one with the longest share has.
        cp, tensors = self._member.job.prefill.cp, gathered_tensors(self._member.mover.layout)
        shares = [0] * cp
        for tokens in message.tokens:
            blocks = [tokens // (2 * cp) + (number < tokens % (2 * cp)) for number in range(2 * cp)]
            shares = [share + blocks[n] + blocks[-1 - n] for n, share in enumerate(shares)]
        due = [(max(shares) * each.row, each.count) for each in tensors if max(shares)]
        done, self._due = self._due[: len(due)], self._due[len(due) :]
        if done != due:
            what = f"bytes and tensors {done} for {message.tokens} tokens, not {due}"
            self._report("I14", f"{self._member.rank.name} gathers {what}")

    def _exchanges(self, exchange: Callable[..., list[Any]], *sizes: float) -> list[Any]:
        events = exchange(*sizes)
        self._travelling.append(events)
        return events

    def _ended(self, message: Any, end: float) -> None:
        early = end - self._member.clock.now
        if self._member.gather is not None:
            self._check_gathers(message)
        if self._member.job.prefill_time.exchange:
            travelling = self._travelling.pop(0) if self._travelling else None
            if travelling is None or not all(one.triggered for one in travelling):
                self._report("I10", f"a forward ends on {self._member.rank.name} while its tokens travel to experts")
        if early > _ROUNDING:
            rooms = [chunk.room for chunk in message.chunks]
            self._report("I14", f"a forward of rooms {rooms} ends on {self._member.rank.name} {early:g} s too early")

    def _turns(
        self, posts: Any, turns: Callable[[float, float, int], Sequence[float]], now: float, late: float, rooms: int
    ) -> Sequence[float]:
        due, following = turns(now, late, rooms), posts.costs.send_next
        for when in due:
            before = self._turn + (0.0 if posts._shape else following * posts.pace)
            if when < before - _ROUNDING or (following and when <= self._turn) or when < now + late - _ROUNDING:
                what = f"at {when:g} s, the one before at {self._turn:g}, and a forward ends at {now:g}"
                self._report("I7", f"{self._member.rank.name} posts {what}")
            self._turn = when
        return due

    def _sends(self, pushed: bool, send: Callable[[Any], None], chunk: Any) -> None:
        name, number = self._member.rank.name, chunk.room
        index, page = self._next.get(number, (0, chunk.held))
        if pushed and (chunk.index, chunk.first_page) != (index, page):
            what = f"chunk {chunk.index} of room {number} from page {chunk.first_page}"
            self._report("I14", f"{name} sends {what}, after chunk {index - 1} to page {page}")
        self._next[number] = chunk.index + 1, chunk.first_page + sum(count for _, _, count in chunk.runs)
        place = self._places.pop((number, chunk.index), self._last)
        if place < self._last:
            self._report("I7", f"{name} sends chunk {chunk.index} of room {number} after those of a later forward")
        self._last = max(self._last, place)
        send(chunk)
