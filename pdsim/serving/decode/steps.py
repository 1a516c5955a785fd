"""Many decode steps in closed form.

While the members of a batch stay the same, a step takes ``base + cost * context`` seconds, where *context* is the
number of tokens whose keys and values it reads and grows by the batch with every step.  So *n* steps take ``n * base +
cost * (n * context + batch * n * (n - 1) / 2)``, and no event is needed before somebody joins or leaves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pdsim.serving.compute.roofline import ForwardTime

__all__ = ["DecodeSpan", "RunningBatch"]


class DecodeSpan(NamedTuple):
    """Steps of one batch, the first of which begins at *start*."""

    start: float  # seconds
    base: float  # seconds of a step without context
    cost: float  # seconds a token of context
    batch: int
    context: int  # tokens read by the first step

    def end(self, steps: int) -> float:
        """Return when the last of so many steps ends."""
        tokens = steps * self.context + self.batch * (steps * (steps - 1) // 2)
        return self.start + (steps * self.base + self.cost * tokens)

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


class RunningBatch:
    """The requests that get a token each a step, at most *limit* of them; *time* says how long a step takes.

    Members change between steps only: `advance` to such a boundary, take out and put in, then `begin` the next step.
    """

    def __init__(self, time: ForwardTime, limit: int) -> None:
        self.limit = limit
        self._bases = [0.0] + [time.step(batch) for batch in range(1, limit + 1)]
        self._cost = time.context
        self._members: list[tuple[int, int, int]] = []  # a heap: step after which it is done, number, tokens at the end
        self._context = 0  # tokens that the next step reads
        self._step = 0  # steps since the start
        self._span: DecodeSpan | None = None  # since `begin`

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def boundary(self, now: float) -> float:
        """Return when the step ends that is under way at *now*; that is at once if there is none."""
        return now if self._span is None else self._span.end(self._span.steps_until(now))

    def advance(self, due: float) -> None:
        """Count the steps until the boundary at *due*, which a wall clock may have passed by now."""
        if self._span is not None:
            steps = self._span.steps_until(due)
            self._step += steps
            self._context += steps * len(self._members)

    def finished(self) -> Iterator[int]:
        """Take those out that have all their tokens, and yield their numbers."""
        while self._members and self._members[0][0] <= self._step:
            _, number, tokens = heapq.heappop(self._members)
            self._context -= tokens
            yield number

    def join(self, number: int, given: int, wanted: int) -> None:
        """Put in a request that has its first token of *wanted*, and *given* tokens of input."""
        heapq.heappush(self._members, (self._step + wanted - 1, number, given + wanted))
        self._context += given + 1

    def leave(self, left: Callable[[int], bool]) -> list[int]:
        """Take those out whose numbers *left* says have left; return them."""
        gone = [member for member in self._members if left(member[1])]
        for end, _, tokens in gone:
            self._context -= tokens - (end - self._step)
        self._members = [member for member in self._members if member not in gone]
        heapq.heapify(self._members)
        return [number for _, number, _ in gone]

    def begin(self, now: float) -> float:
        """Begin the next step at *now*; return when the first member will be done, infinity if there is none."""
        batch = len(self._members)
        if not batch:
            self._span = None
            return math.inf
        self._span = DecodeSpan(now, self._bases[batch], self._cost, batch, self._context)
        return self._span.end(self._members[0][0] - self._step)
