# SPDX-License-Identifier: Apache-2.0
"""What the host of a scheduler takes, as `HostCosts` says, and how it varies.

Each draw is from a stream of its own, named by the instance, so that one seed gives one run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from pdsim.serving.settings import HostCosts
from pdsim.serving.workload import stream

__all__ = ["SchedulerHost", "StepVariation"]

_DRAWS = 1024  # at a time
_AHEAD = 64  # at a time, of the others


class SchedulerHost:
    """The host of one scheduler.  Without *variation*, a coefficient of variation, every cost is its mean.

    *costs* are those of a forward of so many *layers*: `HostCosts.launch` is that of all of them.

    Draws are from a gamma distribution with the mean of the cost and the given coefficient of variation, so they are
    never negative.
    """

    def __init__(self, costs: HostCosts, variation: float, seed: int, name: str, layers: int = 1) -> None:
        self.costs = replace(costs, launch=costs.launch * layers)
        self.steps = StepVariation(costs.step, variation, seed, name) if variation and costs.step else None
        self._shape = variation**-2 if variation else 0.0
        self._random = stream(seed, f"{name}.host")
        self._draws: list[float] = []  # ahead, the next one last

    def arrive(self, tokens: int) -> float:
        """Return the seconds from the arrival of a request of *tokens* to its scheduler."""
        return self._drawn(self.costs.arrive + tokens * self.costs.arrive_token)

    def admit(self, tokens: int) -> float:
        """Return the seconds for which preparing a request of *tokens* holds the scheduler's loop up."""
        return self._drawn(self.costs.admit + tokens * self.costs.admit_token)

    def answer(self, tokens: int = 0) -> float:
        """Return the seconds from the end of a step to the answer leaving the server.

        A request's first answer has the *tokens* of its prompt to see to.
        """
        return self._drawn(self.costs.answer + tokens * self.costs.answer_token)

    def send(self) -> float:
        """Return the seconds from the end of a forward to the post of its KV."""
        return self._drawn(self.costs.send)

    def step(self) -> float:
        """Return the seconds of one iteration."""
        return self._drawn(self.costs.step)

    def _drawn(self, mean: float) -> float:
        if not (mean and self._shape):
            return mean
        if not self._draws:  # many at a time are the same numbers as one after the other
            self._draws = self._random.gamma(self._shape, size=_AHEAD).tolist()[::-1]
        return mean * self._draws.pop() / self._shape


class StepVariation:
    """By how much the host time of steps differs from its mean, one draw a step, summed up ahead of time.

    Sums are kept in blocks, so that a long run costs as much a step as a short one, and no memory once it is past.
    """

    def __init__(self, mean: float, variation: float, seed: int, name: str) -> None:
        self._mean = mean
        self._shape = variation**-2
        self._random = stream(seed, f"{name}.steps")
        self._blocks: deque[list[float]] = deque()
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
            blocks.append((self._sum + np.cumsum(drawn)).tolist())
            self._sum = blocks[-1][-1]
        return blocks[number - self._first][place]

    def forget(self, step: int) -> None:
        """Take note that nobody will ask for fewer steps than *step*."""
        while self._blocks and (self._first + 1) * _DRAWS < step:
            self._blocks.popleft()
            self._first += 1
