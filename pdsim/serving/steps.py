# SPDX-License-Identifier: Apache-2.0
"""What steps take: the share of the host, and many decode steps of a batch in closed form.

While the members of a batch stay the same, a step takes ``base + cost * context`` seconds, where *context* is the
number of tokens whose keys and values it reads and grows by the batch with every step.  So *n* steps take ``n * base
+ cost * (n * context + batch * n * (n - 1) / 2)``, and no event is needed before somebody joins or leaves.

Costs of the host are drawn from streams of their own, named by the instance, so that one seed gives one run.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdsim.compute.forward import ForwardModel
from pdsim.kv.pages import PagePool
from pdsim.serving.deployment import Deployment
from pdsim.serving.policies import Running, Scheduler
from pdsim.serving.requests import stream
from pdsim.serving.settings import HostCosts, ServingEngine

BUSY = 0.25
"""Seconds for which a request keeps the host busy that has come to it (`ServingEngine.busy`)."""
_ROUNDING = 1e-9  # tokens
_DRAWS = 1024  # of steps, at a time
_AHEAD = 64  # of other costs


def iteration_seconds(forward: float, launch: float, step: float, overlap: bool) -> float:
    """Return the seconds of an iteration: launching its kernels bounds the *forward* from below.

    The host takes *step* seconds after it or, with *overlap*, meanwhile for the next one.
    """
    forward = max(forward, launch)
    return max(forward, step) if overlap else forward + step


class SchedulerHost:
    """The host of one scheduler, with costs of a forward of so many *layers*.

    Without *variation*, a coefficient of variation, every cost is its mean; otherwise draws are gamma-distributed.
    """

    def __init__(self, costs: HostCosts, variation: float, seed: int, name: str, layers: int = 1) -> None:
        self.costs = replace(costs, launch=costs.launch * layers)
        self.steps = StepVariation(costs.step, variation, seed, name) if variation and costs.step else None
        self._shape = variation**-2 if variation else 0.0
        self._random = stream(seed, f"{name}.host")
        self._drawn_ahead: list[float] = []  # many at a time take a fifth of the time each
        self._reading = 0.0  # until when requests are read that have come, on the clock
        self.pace = 1.0
        """Times as long as its mean each cost is now, steps excepted."""

    def arrive(self, tokens: int, now: float) -> float:
        """Return the seconds from the arrival *now* of a request of *tokens* to its scheduler, read one by one."""
        cost = self._drawn(self.costs.arrive + tokens * self.costs.arrive_token)
        if cost:
            self._reading = max(self._reading, now) + cost
        return self._reading - now if cost else 0.0

    def admit(self, tokens: int) -> float:
        """Return the seconds for which preparing a request of *tokens* holds the scheduler's loop up."""
        return self._drawn(self.costs.admit + tokens * self.costs.admit_token)

    def answer(self, tokens: int = 0) -> float:
        """Return the seconds from the end of a step to the answer leaving the server; *tokens* of a first one."""
        return self._drawn(self.costs.answer + tokens * self.costs.answer_token)

    def launch(self) -> float:
        """Return the seconds that the launch of a forward takes: on an idle host the same each time."""
        return self.costs.launch if self.pace == 1.0 else self._drawn(self.costs.launch)

    def step(self) -> float:
        """Return the seconds of one iteration."""
        return self._drawn(self.costs.step)

    def ahead_of(self, count: int) -> tuple[list[float], list[float]]:
        """Return what `step` and then `launch` will return the next *count* times: see `go_by`."""
        costs, pace, shape, draws = self.costs, self.pace, self._shape, self._draws
        step, launch, values = costs.step * pace, costs.launch * pace, self._ahead(count * draws)
        steps, launches = [step] * count, [launch] * count
        if step and draws:
            steps = [step * value / shape for value in values[::draws]]
        if launch and draws and pace != 1.0:
            launches = [launch * value / shape for value in values[draws - 1 :: draws]]
        return steps, launches

    def go_by(self, count: int) -> None:
        """Take the next *count* of what `ahead_of` has said."""
        self._forget(count * self._draws)

    @property
    def _draws(self) -> int:
        # of a step and a launch
        return bool(self._shape) * (bool(self.costs.step) + (bool(self.costs.launch) and self.pace != 1.0))

    def _ahead(self, count: int) -> list[float]:
        drawn = self._drawn_ahead
        while len(drawn) < count:
            drawn = self._drawn_ahead = self._random.gamma(self._shape, size=_AHEAD).tolist()[::-1] + drawn
        return drawn[len(drawn) - count :][::-1]

    def _forget(self, count: int) -> None:
        if count:
            del self._drawn_ahead[-count:]

    def _drawn(self, mean: float) -> float:
        mean *= self.pace
        if not (mean and self._shape):
            return mean
        if not self._drawn_ahead:
            self._drawn_ahead = self._random.gamma(self._shape, size=_AHEAD).tolist()[::-1]
        return mean * self._drawn_ahead.pop() / self._shape


class PostingHost(SchedulerHost):
    """The host of a prefill rank, which posts the KV of a forward once it has ended: each post in its turn."""

    def __init__(self, costs: HostCosts, variation: float, seed: int, name: str) -> None:
        super().__init__(costs, variation, seed, name)
        self._turns: deque[float] = deque()  # when KV is posted that is not, or was last, on the clock
        self._came = -math.inf  # when the last request did

    def take(self, now: float, busy: float) -> float:
        """Take note of a request that comes *now*; return the pace of the host, *busy* if another has just come."""
        self.pace = busy if now - self._came < BUSY else 1.0
        self._came = now
        return self.pace

    def turns(self, now: float, late: float, requests: int) -> list[float]:
        """Return when the KV of a forward that ends *now*, and is seen to *late* seconds later, is posted.

        Once for all of its *requests*, or with `HostCosts.send_next` once for each; nothing is at once.  Posts do
        not overtake each other.
        """
        seconds = self._drawn(self.costs.send) + late
        last = self._turns[-1] if self._turns else 0.0
        if not seconds and last <= now:
            return []
        while self._turns and self._turns[0] <= now:
            self._turns.popleft()
        starts: list[float] = []
        for _ in range(requests if self.costs.send_next else 1):
            last = max(last + (self._drawn(self.costs.send_next) if self.costs.send_next else 0.0), now + seconds)
            starts.append(last)
        self._turns.extend(starts)
        return starts

    def ahead(self, ends: Sequence[float]) -> list[float]:
        """Return when the KV of forwards, of one request each, that end at *ends* is posted: see `go_by_turns`."""
        last, turns = self.last, list[float]()
        for end, send, following in zip(ends, *self.costs_ahead(len(ends)), strict=True):
            last = max(last + following, end + send)
            turns.append(last)
        return turns

    def costs_ahead(self, count: int) -> tuple[list[float], list[float]]:
        """Return `HostCosts.send` and `send_next` of the next *count* posts."""
        pace, shape, draws = self.pace, self._shape, 2 if self.costs.send_next else 1
        send, following = self.costs.send * pace, self.costs.send_next * pace
        if not shape:
            return [send] * count, [following] * count
        values = self._ahead(count * draws)
        sends = [send * value / shape for value in values[::draws]]
        return sends, [following * value / shape for value in values[1::2]] if following else [0.0] * count

    @property
    def last(self) -> float:
        """When the last KV is posted that is known, on the clock."""
        return self._turns[-1] if self._turns else 0.0

    def go_by_turns(self, turns: Sequence[float]) -> None:
        """Take note that forwards have ended whose KV is posted at *turns*, the next that `ahead` has said."""
        self._turns.extend(turns)
        if self._shape:
            self._forget(len(turns) * (2 if self.costs.send_next else 1))

    def due(self, now: float) -> int:
        """Return how many posts are still to come at the time *now*."""
        count = 0
        for when in reversed(self._turns):
            if when <= now:
                break
            count += 1
        return count


class StepVariation:
    """By how much the host time of steps differs from its mean, one draw a step, summed up ahead of time.

    Sums are kept in blocks, so that a long run costs as much a step as a short one, and no memory once it is past.
    """

    def __init__(self, mean: float, variation: float, seed: int, name: str) -> None:
        self._mean = mean
        self._shape = variation**-2
        self._random = stream(seed, f"{name}.steps")
        self._blocks: deque[npt.NDArray[np.float64]] = deque()
        self._first = 0  # the number of the first block that is kept
        self._sum = 0.0  # at the end of the last one

    def until(self, step: int) -> float:
        """Return the sum of the deviations of the first *step* steps, in seconds; not of those to `forget`."""
        if not step:
            return 0.0
        number, place = divmod(step - 1, _DRAWS)
        blocks = self._blocks
        while number - self._first >= len(blocks):
            drawn = self._mean * (self._random.gamma(self._shape, 1 / self._shape, _DRAWS) - 1)
            blocks.append(self._sum + np.cumsum(drawn))  # of dozens of steps a request, nine are asked for
            self._sum = float(blocks[-1][-1])
        return blocks[number - self._first].item(place)

    def forget(self, step: int) -> None:
        """Take note that nobody will ask for fewer steps than *step*."""
        while self._blocks and (self._first + 1) * _DRAWS < step:
            self._blocks.popleft()
            self._first += 1


# --- decode steps --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DecodeSpan:
    """Steps of one batch; the first begins at *start*.

    With *variation* every step has a deviation of its own on top, whose sums are known ahead.

    >>> span = DecodeSpan(start=0.0, base=1.0, cost=0.5, batch=2, context=10)
    >>> span.end(1), span.end(2), span.steps_until(7.0)  # a step reads 2 tokens more than the one before: 6 s, 7 s
    (6.0, 13.0, 2)
    """

    start: float  # seconds
    base: float  # seconds of a step without context
    cost: float  # seconds a token of context
    batch: float  # tokens that its requests get a step, and that the next step reads, too
    context: float  # tokens read by the first step
    variation: StepVariation | None = None
    step: int = 0  # number of the first, for *variation*
    before: float = 0.0  # the sum of the deviations of all steps before that

    def end(self, steps: int) -> float:
        """Return when the last of so many steps ends."""
        tokens = steps * self.context + self.batch * (steps * (steps - 1) // 2)
        end = self.start + (steps * self.base + self.cost * tokens)
        if self.variation is None:
            return end
        return end + self.variation.until(self.step + steps) - self.before

    def steps_until(self, time: float) -> int:
        """Return the least number of steps, at least 1, whose end is not before *time*."""
        elapsed = time - self.start
        # half * n**2 + linear * n = elapsed, then put right what the root lost to rounding
        half = self.cost * self.batch / 2
        linear = self.base + self.cost * self.context - half
        root = math.sqrt(linear * linear + 4 * half * max(0.0, elapsed))
        steps = max(1, math.ceil(2 * max(0.0, elapsed) / (linear + root)))
        while self.end(steps) < time:
            steps += 1
        while steps > 1 and self.end(steps - 1) >= time:
            steps -= 1
        return steps


class Member(NamedTuple):
    """A request of a batch between two steps."""

    number: int
    context: int  # tokens that its next step reads, the one included that it stores
    left: int  # tokens that it still gets


class Drafts:
    """The steps of speculative decoding (`ServingEngine.draft`), drawn for each request of an instance *name*."""

    def __init__(self, engine: ServingEngine, seed: int, name: str) -> None:
        self.engine = engine
        self._random = stream(seed, f"{name}.drafts")

    def steps(self, tokens: int) -> int:
        """Return the steps after which a request has so many *tokens* more."""
        most, acceptance = 1 + self.engine.draft, self.engine.acceptance
        if acceptance == 1.0:
            return -(-tokens // most)
        gained = np.minimum(self._random.geometric(1.0 - acceptance, tokens), most)
        return int(np.searchsorted(np.cumsum(gained), tokens)) + 1


def drafts(job: Deployment, name: str) -> Drafts | None:
    """Return the `Drafts` of the instance *name*; None without speculative decoding."""
    return Drafts(job.engine, job.seed, name) if job.engine.draft else None


def steps_that_fit(contexts: Sequence[int], page_size: int, pages: int, most: int, growth: int = 1) -> int:
    """Return how many steps, at most *most*, some requests can take within so many *pages*.

    The next step of each reads one of *contexts*; it reads *growth* tokens more with every step, and stores them.
    Here contexts of 5 and 8 tokens still fit into two pages each, 6 and 9 do not:

    >>> steps_that_fit([4, 7], page_size=4, pages=4, most=10)
    2
    """

    def need(steps: int) -> int:
        ahead = (steps - 1) * growth + page_size - 1
        return sum([(tokens + ahead) // page_size for tokens in contexts])

    if need(most) <= pages:
        return most
    low, high = 0, most - 1  # need(low) fits, or low is 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if need(middle) <= pages else (low, middle - 1)
    return low


class RunningBatch:
    """The requests that get a token each a step, at most *limit* of them; *time* says how long a step takes.

    Members change between steps only: `advance` to such a boundary, take out and put in, then `begin` or
    `begin_mixed` the next step.  A host of *costs* adds its own to each step and, with *overlap*, only what exceeds
    the forward without context.  A step with prompts takes *launch* seconds at least.  With *drafts* a request gets
    several tokens a step: in each the mean of the steps that are drawn for it.
    """

    def __init__(
        self,
        time: ForwardModel,
        limit: int,
        costs: HostCosts | None = None,
        overlap: bool = False,
        variation: StepVariation | None = None,
        launch: float = 0.0,
        drafts: Drafts | None = None,
    ) -> None:
        self.limit = limit
        self._drafts = drafts
        self._launch = launch
        self._time = time
        self._host = costs or HostCosts()
        self._overlap = overlap
        self._variation = variation
        step = time.step if drafts is None else partial(drafts.engine.decode_step, time)
        self._base = cache(lambda batch: self._iteration(step(batch)))  # of the batches that there are
        self._cost = cache(time.context_of)
        self._sequence = time.sequence
        # a heap: step after which it is done, number, tokens at the end, tokens a step
        self._members: list[tuple[int, int, int, float]] = []
        self._context: float = 0.0  # tokens that the next step reads
        self._growth: float = 0.0  # tokens that all get a step
        self._step = 0  # steps since the start
        self._span: DecodeSpan | None = None  # since `begin`
        self._told = (math.nan, 0)  # what `end` has said last, and of how many steps
        self._idle_since = 0.0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        for end, number, tokens, growth in sorted(self._members, key=lambda member: member[1]):
            left = math.ceil((end - self._step) * growth - _ROUNDING)
            yield Member(number, tokens - left, left)

    def contexts(self) -> list[tuple[int, int]]:
        """Return number and context of all members, in no order."""
        if self._drafts is not None:
            return [(number, context) for number, context, _ in self]
        step = self._step
        return [(number, tokens - (end - step)) for end, number, tokens, _ in self._members]

    def least(self) -> int:
        """Return the fewest steps that any member still takes.  Raise an `IndexError` if there is none."""
        return self._members[0][0] - self._step

    @property
    def runs(self) -> bool:
        """Whether steps are under way."""
        return self._span is not None

    def boundary(self, now: float) -> float:
        """Return when the scheduler looks next at *now*: when the step under way ends or, if there is none, soon.

        Without a step it looks every `HostCosts.idle` seconds since the last ended; at once if that is 0.
        """
        if self._span is not None:
            return self.end(self._span.steps_until(now))
        idle = self._host.idle
        if not idle or now <= self._idle_since:
            return max(now, self._idle_since)
        looks = math.ceil((now - self._idle_since) / idle)
        return max(now, self._idle_since + looks * idle)

    def steps(self, time: float) -> int:
        """Return how many of the steps under way have ended at *time*; 0 if there are none."""
        return 0 if self._span is None else self._span.steps_until(time)

    def advance(self, due: float) -> None:
        """Count the steps until the boundary at *due*, which a wall clock may have passed by now."""
        if self._span is not None:
            told, steps = self._told
            if told != due:
                steps = self._span.steps_until(due)
            self._step += steps
            self._context += steps * self._growth

    def finished(self) -> Iterator[int]:
        """Take those out that have all their tokens, and yield their numbers."""
        while self._members and self._members[0][0] <= self._step:
            _, number, tokens, growth = heapq.heappop(self._members)
            self._context -= tokens
            self._growth -= growth
            yield number

    def join(self, number: int, context: int, tokens: int) -> None:
        """Add a request that gets so many *tokens*, one a step without drafts; its first step reads *context*."""
        steps = tokens if self._drafts is None else self._drafts.steps(tokens)
        growth = 1 if steps == tokens else tokens / steps
        heapq.heappush(self._members, (self._step + steps, number, context + tokens, growth))
        self._context += context
        self._growth += growth

    def take(self, number: int) -> Member:
        """Take *number* out."""
        member = next(member for member in self if member.number == number)
        self.leave(lambda other: other == number)
        return member

    def leave(self, left: Callable[[int], bool]) -> list[int]:
        """Take those out whose numbers *left* says have left; return them."""
        gone = [member for member in self._members if left(member[1])]
        for end, _, tokens, growth in gone:
            self._context -= tokens - (end - self._step) * growth
            self._growth -= growth
        self._members = [member for member in self._members if member not in gone]
        heapq.heapify(self._members)
        return [number for _, number, *_ in gone]

    def begin(self, now: float, most: float = math.inf) -> float:
        """Begin the next step; return when the first member is done, or *most* steps are; infinity without one."""
        batch = len(self._members)
        if not batch:
            self._span, self._idle_since = None, now
            return math.inf
        if self._variation is not None:
            self._variation.forget(self._step)
        self._span = self._spanned(now, self._base(batch))
        return self.end(int(min(self._members[0][0] - self._step, most)))

    def begin_mixed(self, now: float, pieces: Sequence[tuple[int, int]], mean: int = 0, ahead: float = 0.0) -> float:
        """Begin one step that also computes *pieces* of prompts (context, new tokens); return when it ends.

        Its launching has begun *ahead* seconds before *now*.
        """
        batch = len(self._members) * (1 if self._drafts is None else 1 + self._drafts.engine.draft)
        self._span = self._spanned(
            now, self.alone([*pieces, (0, batch)] if batch else pieces, mean and mean + batch, ahead)
        )
        return self.end(1)

    def alone(self, pieces: Sequence[tuple[int, int]], mean: int = 0, ahead: float = 0.0) -> float:
        """Return the seconds of a step that computes *pieces* of prompts and no token of the batch.

        *mean* tokens have the groups of an engine each in the mean, where they do not have as many.  Launching has
        begun *ahead* seconds before.
        """
        return self._iteration(max(self._time.prefill(pieces, mean, ahead), self._launch - ahead))

    def launching(self, tokens: int) -> float:
        """Return the seconds for which the host launches a step of so many *tokens*, some of them of prompts."""
        return max(self._launch, self._time.launching(tokens))

    def end(self, steps: int) -> float:
        """Return when so many *steps* since `begin`, which there is, end."""
        assert self._span is not None
        end = self._span.end(steps)
        self._told = end, steps
        return end

    def held(self, start: float, until: float) -> float:
        """Return when the step that could begin at *start* does if the host is busy *until* then.

        With *overlap*, and while steps are under way, the device has it already, and what follows is late by what
        the host takes longer.  A device that waits for work begins when the host is done.
        """
        if until <= start or not self._overlap or not self._members or self._span is None:
            return max(start, until)
        end = self._spanned(start, self._base(len(self._members))).end(1)
        return start + max(0.0, until - end)

    def first_step(self) -> float:
        """Return when the first step since `begin`, which there is, ends."""
        assert self._span is not None
        return self._span.end(1)

    def _spanned(self, start: float, base: float) -> DecodeSpan:
        # Attention reads the context of all, or waits for the longest alone: which of both is known when members
        # change.
        growth, context = self._growth, self._context
        cost = self._cost(len(self._members))
        if self._sequence:
            longest = max((tokens - (end - self._step) * each for end, _, tokens, each in self._members), default=0)
            if self._sequence * longest > cost * context:
                cost, growth, context = self._sequence, growth / len(self._members), longest
        before = self._variation.until(self._step) if self._variation is not None else 0.0
        return DecodeSpan(start, base, cost, growth, context, self._variation, self._step, before)

    def _iteration(self, forward: float) -> float:
        return iteration_seconds(forward, self._host.launch, self._host.step, self._overlap)


class GrowingMemory:
    """The pages of *pool* that the requests of *batch* have.

    With ``ServingEngine.memory=grow`` they are given between steps: as many as the next step stores into.  The
    scheduler asks whether they are `short`, preempts a `victim` until they are not, and then lets all `grow`.
    Otherwise a request has all its pages from the start, and they are never short.
    """

    def __init__(self, job: Deployment, pool: PagePool, batch: RunningBatch) -> None:
        self.grows = job.engine.memory == "grow"
        self._job = job
        self._pool = pool
        self._batch = batch
        self._lacking: list[tuple[int, int]] = []  # room and pages, of the next step
        self._block = job.page_size * pool.block  # tokens

    def admits(self, tokens: int, others: int) -> bool:
        """Return whether a request of *tokens* may have pages beside *others*, a number of requests that have some.

        Each of them, and the new one, has `ServingEngine.reserved_tokens` kept free; the only one needs none.
        """
        if not self.grows:
            return True
        reserved = self._job.engine.reserved_tokens if others else 0
        kept = self._pages(reserved) * others
        return self._pool.free - kept >= self._pages(tokens + reserved)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._block) * self._pool.block

    def short(self) -> bool:
        """Return whether there are too few pages for the next step of all."""
        if not self.grows:
            return False
        size, block, count = self._block, self._pool.block, self._pool.count
        needs = [(number, -(-tokens // size) * block - count(number)) for number, tokens in self._batch.contexts()]
        self._lacking = sorted([need for need in needs if need[1] > 0])
        return sum([pages for _, pages in self._lacking]) > self._pool.free

    def victim(self, policy: Scheduler, rooms: Mapping[int, Any]) -> int:
        """Return which of *rooms*, in the order in which they joined the batch, *policy* has give its pages up."""
        running: list[Running] = []
        for number, _, left in sorted(self._batch, key=lambda member: rooms[member.number].joined):
            request = rooms[number].request
            running.append(Running(number, request.input, request.output - left))
        return running[policy.victim(running)].room

    def grow(self) -> None:
        """Give every request the pages that its next step needs; `short` has just said that they are there."""
        for number, lacks in self._lacking:
            self._pool.extend(number, lacks)
        self._lacking = []

    def steps(self) -> float:
        """Return how many steps can be taken before a request lacks a page; infinity if none ever does."""
        if not (self.grows and len(self._batch)):
            return math.inf
        most, growth, block = self._batch.least(), 1 + self._job.engine.draft, self._pool.block
        # enough for all, even if each lacks a block for its next step
        if (1 - -(most - 1) * growth // self._block) * block * len(self._batch) <= self._pool.free:
            return math.inf
        members, count = self._batch.contexts(), self._pool.count
        pages = (self._pool.free + sum([count(number) for number, _ in members])) // block
        fit = steps_that_fit([tokens for _, tokens in members], self._block, pages, most, growth)
        return math.inf if fit == most else fit
