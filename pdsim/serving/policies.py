"""The scheduling and router policies that come with pdsim."""

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
    """As `FirstCome`, but the request with the fewest tokens is preempted, of several the longest prompt (SGLang)."""

    def victim(self, running: Sequence[Running]) -> int:
        """Take the one that loses least."""
        return min(range(len(running)), key=lambda index: (running[index].generated, -running[index].input))


class HighestPriority(LeastGenerated):
    """As `LeastGenerated`, but of requests that have not begun prefill takes those of the highest priority first."""

    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int] | None:
        """Take as much as fits of the first that has begun or, if none has, of the first of the highest priority."""
        index = max(range(len(queue)), key=lambda index: (queue[index].done > 0, queue[index].priority, -index))
        chosen = queue[index]
        return index, min(budget, chosen.request.input - chosen.done)


class LeastTokens:
    """The instance with the fewest tokens outstanding, the first among equals."""

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:
        """Return that one of *able*."""
        return min(able, key=load.__getitem__)


class RoundRobin:
    """One instance after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:  # noqa: ARG002 a protocol
        """Return the next of *able*."""
        self._turn += 1
        return able[(self._turn - 1) % len(able)]
