# SPDX-License-Identifier: Apache-2.0
"""The open seams of serving: which request runs next, who moves its KV, and which instance gets it.

Each is a protocol; its implementations are classes that packages register under an entry-point group, pdsim's own in
its `pyproject.toml`.  A configuration chooses one by name: `engine.scheduler`, `engine.handoff`,
`experiment.router`.

A scheduler in another package is a class and two lines::

    class Shortest(FirstCome):
        def prefill(self, queue, budget):
            index = min(range(len(queue)), key=lambda i: queue[i].request.input)
            return index, min(budget, queue[index].request.input - queue[index].done)

registered in its ``pyproject.toml`` under ``pdsim.schedulers``, and chosen by ``engine.scheduler=NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from pdsim.core import plugins

if TYPE_CHECKING:
    from pdsim.kv.messages import Submit
    from pdsim.serving.settings import ServingEngine

__all__ = [
    "Handoff",
    "Prompt",
    "RouterPolicy",
    "RoutingQuery",
    "Running",
    "Scheduler",
    "handoff_of",
    "route",
    "router_policy",
    "scheduler_of",
]


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
    """What runs in the next step.  Sequences are in order of arrival, and never empty.

    One instance serves one scheduler process, prefill or decode.  Its constructor is given
    `engine.scheduler_options` as keywords.
    """

    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int] | None:
        """Return the position in *queue* and the tokens, at most *budget*, of the next piece of a prefill step.

        It is called until the budget is spent, no request is left, or it returns None, which ends the step.
        """

    def admit(self, queue: Sequence[Submit]) -> int:
        """Return the position in *queue* of the request that gets decode pages next; others wait until it has."""

    def join(self, ready: Sequence[Submit]) -> int:
        """Return the position among *ready*, whose KV is here, of the request that enters the decode batch next."""

    def victim(self, running: Sequence[Running]) -> int:
        """Return the position among *running* of the request that gives its pages up, for the others to go on."""


class Handoff(Protocol):
    """Who moves the KV of a request from prefill to decode, and in which order the two sides work.

    It makes the parts of both sides that differ by that, as `pdsim.serving.prefill.PrefillHandoff` and
    `pdsim.serving.decode.DecodeHandoff` say.
    """

    serial: bool
    """Whether decode hears of a request only when prefill has answered; otherwise both hear of it at once."""


class RoutingQuery(NamedTuple):
    """What a router knows when a request needs an instance of one side."""

    able: Sequence[str]  # instances that are connected
    load: Mapping[str, int]  # tokens outstanding at each
    input: int  # tokens of the prompt; how many will be generated it does not know
    blocks: tuple[int, ...] = ()  # hashes of the prompt's blocks, where prefixes are cached
    under_way: Mapping[str, int] = {}  # tokens whose KV each decode instance has not got yet
    rates: Mapping[str, float] = {}  # bytes/s from the chosen prefill instance to each of decode; none for prefill


class RouterPolicy(Protocol):
    """Which instance of a side gets a request.  There is one for each side, made without arguments.

    One that needs to know more has a method ``route(ask: RoutingQuery) -> str``, which is called instead of
    `choose`.

    `pdsim.serving.membership.InstanceRegistry` asks it, for prefill and for decode apart.  *load* is updated when a
    request is sent out, prefilled, and closed.
    """

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:
        """Return one of *able*, which are connected; *load* has the tokens outstanding at each."""


def route(policy: RouterPolicy, ask: RoutingQuery) -> str:
    """Return which instance *policy* has for *ask*."""
    informed = getattr(policy, "route", None)
    return cast("str", informed(ask)) if informed is not None else policy.choose(ask.able, ask.load)


def scheduler_of(engine: ServingEngine) -> Scheduler:
    """Return the scheduling policy of *engine*.  Raise a `ConfigError` if there is none of that name."""
    return cast("Scheduler", plugins.resolve(plugins.SCHEDULERS, engine.scheduler)(**engine.scheduler_options))


def handoff_of(engine: ServingEngine) -> Handoff:
    """Return the handoff of *engine*.  Raise a `ConfigError` if there is none of that name."""
    return cast("Handoff", plugins.resolve(plugins.HANDOFFS, engine.handoff)())


def router_policy(name: str) -> RouterPolicy:
    """Return a router policy for one side.  Raise a `ConfigError` if there is none called *name*."""
    return cast("RouterPolicy", plugins.resolve(plugins.ROUTERS, name)())
