# SPDX-License-Identifier: Apache-2.0
"""The scheduling and router policies that come with pdsim.

All of them are registered as entry points (`pyproject.toml`), as those of other packages are.  A policy decides; it
changes nothing, and is asked again whenever there is something to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdsim.kv.messages import Submit
from pdsim.serving.seams import Prompt, Running

__all__ = ["FirstCome", "HighestPriority", "LeastGenerated", "LeastTokens", "RoundRobin"]


class FirstCome:
    """First come, first served, in chunks that fill the step; the request that came last is preempted (vLLM)."""

    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int] | None:
        """Take as much of the first request as fits."""
        first = queue[0]
        return 0, min(budget, first.request.input - first.done)

    def admit(self, queue: Sequence[Submit]) -> int:  # noqa: ARG002 a protocol
        """Take the first."""
        return 0

    def join(self, ready: Sequence[Submit]) -> int:  # noqa: ARG002 a protocol
        """Take the first."""
        return 0

    def victim(self, running: Sequence[Running]) -> int:
        """Take the last."""
        return len(running) - 1


class LeastGenerated(FirstCome):
    """As `FirstCome`, but the request with the fewest tokens is preempted, of equal ones the longest prompt."""

    def victim(self, running: Sequence[Running]) -> int:
        """Take the one that loses least.

        >>> running = [Running(room, input=10 * room, generated=1 + (room == 1)) for room in (1, 2, 3)]
        >>> LeastGenerated().victim(running)
        2
        """
        return min(range(len(running)), key=lambda index: (running[index].generated, -running[index].input))


class HighestPriority(LeastGenerated):
    """As `LeastGenerated`, but of requests that have not begun prefill takes those of the highest priority first."""

    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int] | None:
        """Take as much as fits of the first that has begun or, if none has, of the first of the highest priority."""
        index = max(range(len(queue)), key=lambda index: (queue[index].done > 0, queue[index].priority, -index))
        chosen = queue[index]
        return index, min(budget, chosen.request.input - chosen.done)


class LeastTokens:
    """The instance with the fewest tokens outstanding, the first among equals.

    >>> LeastTokens().choose(["a", "b", "c"], {"a": 5, "b": 2, "c": 2})
    'b'
    """

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:
        """Return that one of *able*."""
        return min(able, key=load.__getitem__)


class RoundRobin:
    """One instance after the other.

    Turns are counted over all calls, so instances that come and go shift the order.

    >>> policy = RoundRobin()
    >>> [policy.choose(["a", "b"], {}) for _ in range(3)]
    ['a', 'b', 'a']
    """

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:  # noqa: ARG002 a protocol
        """Return the next of *able*."""
        self._turn += 1
        return able[(self._turn - 1) % len(able)]
