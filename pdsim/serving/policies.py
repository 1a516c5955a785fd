# SPDX-License-Identifier: Apache-2.0
"""The scheduling and router policies that come with pdsim.

All of them are registered as entry points (`pyproject.toml`), as those of other packages are.  A policy decides; it
changes nothing, and is asked again whenever there is something to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdsim.kv.messages import Submit
from pdsim.serving.prefix_cache import PrefixCache
from pdsim.serving.requests import Request, stream
from pdsim.serving.seams import Prompt, RoutingQuery, Running

__all__ = [
    "CacheAware",
    "FirstCome",
    "HighestPriority",
    "LeastGenerated",
    "LeastTokens",
    "PowerOfTwo",
    "RoundRobin",
    "TransferAware",
]


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


class PowerOfTwo:
    """The less loaded of two instances drawn at random (Mitzenmacher, "The power of two choices", 2001).

    Both sides draw from streams of the same name, so their choices are alike for equal loads; seeds of runs do not
    change them.
    """

    def __init__(self) -> None:
        self._random = stream(0, "router.power_of_two")

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:
        """Return that one of *able*; the first of those drawn among equals."""
        drawn: list[int] = self._random.choice(len(able), size=min(2, len(able)), replace=False).tolist()
        return min((able[index] for index in drawn), key=load.__getitem__)


class CacheAware:
    """The instance with the fewest tokens outstanding, those of this prompt included that it does not have cached.

    So cached tokens weigh as much as waiting ones, as in NVIDIA Dynamo's KV router with a weight of 1.  Which
    prompts an instance has is guessed from where they were sent: what it evicted since is not known, as in SGLang's
    router.
    """

    def __init__(self) -> None:
        self._sent: dict[str, PrefixCache] = {}

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:
        """Return the least loaded of *able*, for a prompt that nothing is known of."""
        return min(able, key=load.__getitem__)

    def route(self, ask: RoutingQuery) -> str:
        """Return one of `RoutingQuery.able`, and take note that it has the prompt; the first among equals."""
        prompt = Request(0.0, ask.input, 1, None, ask.blocks)
        for name in ask.able:
            self._sent.setdefault(name, PrefixCache())
        chosen = min(ask.able, key=lambda name: ask.load[name] - self._sent[name].match(prompt))
        self._sent[chosen].insert(prompt)
        return chosen


class TransferAware:
    """The decode instance that has the prompt's KV first, by its rate from prefill and what is under way to it.

    Of prefill instances, and of equals, the one with the fewest tokens outstanding.
    """

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:
        """Return the least loaded of *able*."""
        return min(able, key=load.__getitem__)

    def route(self, ask: RoutingQuery) -> str:
        """Return one of `RoutingQuery.able`."""

        def cost(name: str) -> tuple[float, int]:
            tokens = ask.under_way.get(name, 0) + ask.input
            return (tokens / ask.rates[name] if ask.rates else 0.0), ask.load[name]

        return min(ask.able, key=cost)
