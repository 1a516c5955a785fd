"""Many decode steps in closed form.

While the members of a batch stay the same, a step takes ``base + cost * context`` seconds, where *context* is the
number of tokens whose keys and values it reads and grows by the batch with every step.  So *n* steps take ``n * base +
cost * (n * context + batch * n * (n - 1) / 2)``, and no event is needed before somebody joins or leaves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Stretch"]


class Stretch(NamedTuple):
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
