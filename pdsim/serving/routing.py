# SPDX-License-Identifier: Apache-2.0
"""Router policies that do more than count tokens or turns: they draw, remember prompts, or look at links.

What is drawn is of a stream of its own, so that one run is like the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdsim.serving.prefix_cache import PrefixCache
from pdsim.serving.seams import RoutingQuery
from pdsim.serving.workload import Request, stream

__all__ = ["CacheAware", "PowerOfTwo", "TransferAware"]


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
