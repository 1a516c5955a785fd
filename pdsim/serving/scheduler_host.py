# SPDX-License-Identifier: Apache-2.0
"""What the host of a scheduler takes, as `HostCosts` says, and how it varies.

Each draw is from a stream of its own, named by the instance, so that one seed gives one run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import inf

import numpy as np
import numpy.typing as npt

from pdsim.serving.requests import stream
from pdsim.serving.settings import HostCosts

__all__ = ["PostingHost", "SchedulerHost", "StepVariation", "iteration_seconds"]

BUSY = 0.25
"""Seconds for which a request keeps the host busy that has come to it (`ServingEngine.busy`)."""
_DRAWS = 1024  # at a time
_AHEAD = 64  # at a time, of the others


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
        self._draws: list[float] = []  # ahead, the next one last
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

    def _drawn(self, mean: float) -> float:
        mean *= self.pace
        if not (mean and self._shape):
            return mean
        if not self._draws:  # many at a time are the same numbers as one after the other
            self._draws = self._random.gamma(self._shape, size=_AHEAD).tolist()[::-1]
        return mean * self._draws.pop() / self._shape


class PostingHost(SchedulerHost):
    """The host of a prefill rank, which posts the KV of a forward once it has ended: each post in its turn."""

    def __init__(self, costs: HostCosts, variation: float, seed: int, name: str) -> None:
        super().__init__(costs, variation, seed, name)
        self._turns: deque[float] = deque()  # when KV is posted that is not, or was last, on the clock
        self._came = -inf  # when the last request did

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

    def due(self, now: float) -> int:
        """Return how many posts are still to come at the time *now*."""
        return sum(when > now for when in self._turns)


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
