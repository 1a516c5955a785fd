# SPDX-License-Identifier: Apache-2.0
"""Which request runs next, which instance gets it, and who moves its KV: what a policy has to do, and pdsim's own.

A policy in another package is a class of these methods, registered in its ``pyproject.toml`` under
``pdsim.schedulers``, ``pdsim.routers`` or ``pdsim.handoffs`` and chosen by name: `engine.scheduler`,
`experiment.router`, `engine.handoff`.  It decides and changes nothing, and is asked whenever there is a choice.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.kv.messages import Submit
from pdsim.serving.block_manager import PrefixCache
from pdsim.serving.requests import Request, stream
from pdsim.serving.settings import ServingEngine


class Prompt(Protocol):
    """A request at a prefill scheduler."""

    @property
    def request(self) -> Submit:
        """Its room and its tokens.  A real engine does not know how many it will generate."""

    @property
    def done(self) -> int:
        """Tokens of the prompt that a forward has covered."""

    @property
    def priority(self) -> int:
        """The higher goes first, where a scheduler looks at it."""


class Running(NamedTuple):
    """A request in the decode batch."""

    room: int
    input: int  # tokens of the prompt
    generated: int  # tokens so far


class Scheduler(Protocol):
    """What runs in the next step of one prefill or decode instance.  Sequences are in order of arrival, never empty.

    Made with `engine.scheduler_options` as keywords.  Methods return a position in the sequence, the first unless a
    class says otherwise.
    """

    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int] | None:
        """Return the position in *queue* and the tokens, at most *budget*, of the next piece of a prefill step.

        It is called until the budget is spent, no request is left, or it returns None, which ends the step.
        """

    def admit(self, queue: Sequence[Submit]) -> int:  # noqa: ARG002 for others
        """Return which request gets decode pages next; others wait until it has."""
        return 0

    def join(self, ready: Sequence[Submit]) -> int:  # noqa: ARG002 for others
        """Return which request, whose KV is here, enters the decode batch next."""
        return 0

    def victim(self, running: Sequence[Running]) -> int:
        """Return which request gives its pages up, for the others to go on."""


class Handoff(Protocol):
    """Who moves the KV of a request, and in which order the two sides work: the classes of its four parts.

    They derive from `prefill.PrefillMover`, `prefill.PrefillLeader`, `decode.DecodeMover` and `decode.DecodeLeader`.
    """

    serial: bool
    """Whether decode hears of a request only when prefill has answered; otherwise both hear of it at once."""

    prefill_mover: Callable[..., Any]
    """Makes what moves the bytes of a prefill `EngineRank`."""
    prefill_leader: Callable[..., Any]
    """Makes what decides for a `PrefillScheduler`, when the mover of its rank is there."""
    decode_mover: Callable[..., Any]
    decode_leader: Callable[..., Any]


class RoutingQuery(NamedTuple):
    """What a router knows when a request needs an instance of one side."""

    able: Sequence[str]  # instances that are connected
    load: Mapping[str, int]  # tokens outstanding at each
    input: int  # tokens of the prompt; how many will be generated it does not know
    blocks: tuple[int, ...] = ()  # hashes of the prompt's blocks, where prefixes are cached
    under_way: Mapping[str, int] = {}  # tokens whose KV each decode instance has not got yet
    rates: Mapping[str, float] = {}  # bytes/s from the chosen prefill instance to each of decode; none for prefill


class PairQuery(NamedTuple):
    """What a router knows when a request needs an instance of either side; *rates* have all pairs."""

    prefill: RoutingQuery
    decode: RoutingQuery
    rates: Mapping[str, Mapping[str, float]]
    seconds: float  # that a token of a prompt takes at prefill
    nbytes: int  # of a token's KV, of each rank


class RouterPolicy(Protocol):
    """Which instance of a side gets a request.  There is one for each side, made without arguments.

    One that needs to know more has a method ``route(ask: RoutingQuery) -> str``, called instead of `choose`.  One
    that chooses both sides together has ``pair(ask: PairQuery) -> tuple[str, str]``, called on the one for prefill.
    """

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:
        """Return one of *able*, which are connected; *load* has the tokens outstanding at each."""


def route(policy: RouterPolicy, ask: RoutingQuery) -> str:
    """Return which instance *policy* has for *ask*.  Raise a `ConfigError` if it is none of `RoutingQuery.able`."""
    informed = getattr(policy, "route", None)
    chosen = informed(ask) if informed is not None else policy.choose(ask.able, ask.load)
    if chosen not in ask.able:
        able = ", ".join(ask.able)
        raise ConfigError(f"experiment.router: {type(policy).__name__} chose {chosen!r}; return one of {able}")
    return cast("str", chosen)


def scheduler_of(engine: ServingEngine) -> Scheduler:
    """Return the scheduling policy of *engine*.  Raise a `ConfigError` if there is none of that name."""
    return cast("Scheduler", plugins.resolve(plugins.SCHEDULERS, engine.scheduler)(**engine.scheduler_options))


def handoff_of(engine: ServingEngine) -> Handoff:
    """Return the handoff of *engine*.  Raise a `ConfigError` if there is none of that name."""
    return cast("Handoff", plugins.resolve(plugins.HANDOFFS, engine.handoff)())


def router_policy(name: str) -> RouterPolicy:
    """Return a router policy for one side.  Raise a `ConfigError` if there is none called *name*."""
    return cast("RouterPolicy", plugins.resolve(plugins.ROUTERS, name)())


def step_pieces(
    queue: deque[Any], budget: int, most: int, policy: Scheduler, name: str, start: Callable[[Any], Any]
) -> Iterator[tuple[Any, int]]:
    """Yield at most *most* requests of *queue*, with their next tokens, as *policy* fills a step of *budget* tokens.

    A request has ``done`` of its ``total`` tokens, and is taken from the queue; those with more to come return to
    its front, in their order.  ``start(request)`` gives pages to one that has none.  It returns which is taken: it,
    another that has begun and then ends, or None, and the step ends unless the request has left the queue.  Raise a
    `ConfigError` if the policy, called *name*, gives more tokens than there are.
    """
    partial: list[Any] = []
    while queue and budget > 0 and most:
        chosen = policy.prefill(queue, budget)
        if chosen is None:
            break
        one, tokens = queue[chosen[0]], chosen[1]
        whole = one.total != one.request.input  # it computes tokens again that the policy does not know of
        if not one.has_pages:
            waiting, first = len(queue), one
            one = start(first)
            if one is None:
                if len(queue) == waiting:
                    break
                continue
            whole = whole or one is not first
        left = one.total - one.done
        tokens = min(budget if whole else tokens, left)  # of what is cached it did not know
        if not 0 < tokens <= budget:
            raise ConfigError(
                f"engine.scheduler={name} gave {tokens} tokens of room {one.request.room}, which has {left} left in "
                f"a step of {budget}; give 1 to the lesser"
            )
        yield one, tokens
        budget -= tokens
        most -= 1
        queue.remove(one)
        if one.done < one.total:
            partial.append(one)
    queue.extendleft(reversed(partial))


class FirstCome(Scheduler):
    """First come, first served, in chunks that fill the step; the request that came last is preempted (vLLM)."""

    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int] | None:
        """Take as much of the first request as fits."""
        first = queue[0]
        return 0, min(budget, first.request.input - first.done)

    def victim(self, running: Sequence[Running]) -> int:
        """Take the last."""
        return len(running) - 1


class LeastGenerated(FirstCome):
    """As `FirstCome`, but the request with the fewest tokens is preempted, of equal ones the longest prompt."""

    def victim(self, running: Sequence[Running]) -> int:
        """Take the one that loses least."""
        return min(range(len(running)), key=lambda index: (running[index].generated, -running[index].input))


class HighestPriority(FirstCome):
    """As `LeastGenerated`, but of requests that have not begun prefill takes those of the highest priority first."""

    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int] | None:
        """Take as much as fits of the first that has begun or, if none has, of the first of the highest priority."""
        index = max(range(len(queue)), key=lambda index: (queue[index].done > 0, queue[index].priority, -index))
        chosen = queue[index]
        return index, min(budget, chosen.request.input - chosen.done)

    victim = LeastGenerated.victim


def takes_first(policy: Scheduler) -> bool:
    """Return whether *policy* goes on with a request that has begun prefill until all of it is computed."""
    return getattr(type(policy), "prefill", None) in (FirstCome.prefill, HighestPriority.prefill)


class LeastTokens:
    """The instance with the fewest tokens outstanding, the first among equals."""

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:
        """Return that one of *able*."""
        return min(able, key=load.__getitem__)


class RoundRobin:
    """One instance after the other; those that come and go shift the order."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:  # noqa: ARG002 a protocol
        """Return the next of *able*."""
        self._turn += 1
        return able[(self._turn - 1) % len(able)]


class Random:
    """Any instance, each as often; seeds of runs do not change which."""

    def __init__(self) -> None:
        self._random = stream(0, "router.random")

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:  # noqa: ARG002 a protocol
        """Return one of *able*."""
        return able[int(self._random.integers(len(able)))]


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


class CacheAware(LeastTokens):
    """The instance with the fewest tokens outstanding, those of this prompt included that it does not have cached.

    So cached tokens weigh as much as waiting ones, as in NVIDIA Dynamo's KV router with a weight of 1.  Which
    prompts an instance has is guessed from where they were sent: what it evicted since is not known, as in SGLang's
    router.
    """

    def __init__(self) -> None:
        self._sent: dict[str, PrefixCache] = {}

    def route(self, ask: RoutingQuery) -> str:
        """Return one of `RoutingQuery.able`, and take note that it has the prompt; the first among equals."""
        prompt = Request(0.0, ask.input, 1, None, ask.blocks)
        for name in ask.able:
            self._sent.setdefault(name, PrefixCache())
        chosen = min(ask.able, key=lambda name: ask.load[name] - self._sent[name].match(prompt))
        self._sent[chosen].insert(prompt)
        return chosen


class TransferAware(LeastTokens):
    """The decode instance that has the prompt's KV first, by its rate from prefill and what is under way to it.

    Of prefill instances, and of equals, the one with the fewest tokens outstanding.
    """

    def route(self, ask: RoutingQuery) -> str:
        """Return one of `RoutingQuery.able`."""

        def cost(name: str) -> tuple[float, int]:
            tokens = ask.under_way.get(name, 0) + ask.input
            return (tokens / ask.rates[name] if ask.rates else 0.0), ask.load[name]

        return min(ask.able, key=cost)


class FirstToken(CacheAware):
    """The pair that has the prompt's KV at decode first: prefill's queue and what it has not cached, then the way.

    The way takes what is under way to the decode instance, too.  Equals: the decode instance with the fewest tokens
    outstanding, then the first pair.  Where nothing moves (colocated engines) it is as `CacheAware`.
    """

    def pair(self, ask: PairQuery) -> tuple[str, str]:
        """Return one of prefill's and one of decode's `RoutingQuery.able`."""
        prompt = Request(0.0, ask.prefill.input, 1, None, ask.prefill.blocks)
        for name in ask.prefill.able:
            self._sent.setdefault(name, PrefixCache())
        queue = {
            name: (ask.prefill.load[name] + prompt.input - self._sent[name].match(prompt)) * ask.seconds
            for name in ask.prefill.able
        }

        def cost(pair: tuple[str, str]) -> tuple[float, int]:
            prefill, decode = pair
            tokens = ask.decode.under_way.get(decode, 0) + prompt.input
            way = tokens * ask.nbytes / ask.rates[prefill][decode] if ask.rates else 0.0
            return queue[prefill] + way, ask.decode.load[decode]

        chosen = min(((one, other) for one in ask.prefill.able for other in ask.decode.able), key=cost)
        self._sent[chosen[0]].insert(prompt)
        return chosen
