# SPDX-License-Identifier: Apache-2.0
"""Who serves: the instances that have registered, which pairs of them were introduced, and what follows from a loss.

An *incarnation* names one run of an instance from its start to its loss, ``"prefill0@2"``: the instance and its
epoch, which counts how often all of its ranks had registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdsim.core.clock import ExpiringMap
from pdsim.core.errors import MessageError
from pdsim.kv.messages import (
    ConnectPeer,
    Gone,
    KvMessage,
    KvSpec,
    Leave,
    RegisterRank,
    RoomLocations,
    RoomQuery,
    incarnation_name,
    instance_of,
    rank_name,
)
from pdsim.serving.deployment import Deployment
from pdsim.serving.policies import PairQuery, RoutingQuery, route, router_policy
from pdsim.serving.rank_process import Handler, RankProcess

KNOWN = 120.0
"""Seconds for which it is remembered where a room went (SGLang's entries live for 120 to 240)."""


class _Side:
    """The instances of one side; *load* has the tokens outstanding at each that is formed.

    Each of several *replicas* of the router sees the load as of the last exchange, every *sync* seconds, and what
    became of its own requests since.
    """

    def __init__(
        self, instances: Sequence[str], dp: int, policy: str, replicas: int, sync: float, resting: set[str]
    ) -> None:
        self.names = tuple(instances)
        self.load: dict[str, int] = {}
        self._dp = dp
        self._resting = resting
        self._group = {instance: number % dp for number, instance in enumerate(instances)}
        self.policies = [router_policy(policy) for _ in range(replicas)]
        self._views: list[dict[str, int]] = [{} for _ in range(replicas)] if replicas > 1 else []
        self._sync = sync
        self._exchanged = 0.0  # when they last did, a multiple of *sync*

    def query(self, room: int, replica: int, now: float, *known: Any) -> RoutingQuery:
        # *known* are the fields of `RoutingQuery` from the third on.
        if self._resting or len(self.load) < len(self.names):
            able = [name for name in self.names if name in self.load and name not in self._resting]
        else:
            able = list(self.names)
        if self._dp > 1:
            group = room % self._dp
            able = [name for name in able if self._group[name] == group] or able
        if not self._views:
            return RoutingQuery(able, self.load, *known)
        self._exchange(now)
        return RoutingQuery(able, {name: self._views[replica].get(name, 0) for name in able}, *known)

    def add(self, instance: str, tokens: int, replica: int, now: float) -> None:
        if self._views:
            self._exchange(now)
            self._views[replica][instance] = self._views[replica].get(instance, 0) + tokens
        self.load[instance] += tokens

    def remove(self, instance: str) -> None:
        for load in (self.load, *self._views):
            load.pop(instance, None)

    def _exchange(self, now: float) -> None:
        if self._sync and now >= self._exchanged + self._sync:
            self._exchanged = now // self._sync * self._sync
            self._views = [dict(self.load) for _ in self._views]


@dataclass(slots=True)
class _Instance:
    """The ranks of an instance that have registered."""

    size: int
    places: dict[int, int] = field(default_factory=dict)  # start of each rank, in ns
    formed: bool = False
    introduced: bool = False  # whether its ranks have heard of an instance of the other side since it was formed
    epoch: int = 0  # how often it was formed
    until: int = -1  # when the newest rank that was forgotten was started


class InstanceRegistry:
    """The instances of *job*, the pairs of them that were introduced, and the tokens outstanding at each.

    Life of an instance: ranks `register`, the last one forms it, and it may be chosen; `lose` removes it, and it may
    form again, of ranks that were started later.  It is *awaited* until it is formed or lost for the first time.
    The first room of a pair introduces its ranks (`introduce`): decode in SGLang registers with prefill as late.
    """

    def __init__(self, job: Deployment) -> None:
        self._job = job
        self.resting: set[str] = set()  # instances that get no requests, though they are formed
        shared = job.routers, job.routers_sync, self.resting
        self.prefills = _Side(job.prefills, 1 if job.query_dp else job.prefill_dp, job.policy, *shared)
        self.decodes = _Side(job.decodes, job.decode_dp, job.decode_policy or job.policy, *shared)
        together = not job.decode_policy and hasattr(self.prefills.policies[0], "pair")
        # of a token at prefill, where both sides are chosen together
        self._seconds = job.prefill_seconds([(0, job.chunk)]) / job.chunk if together else None
        self.awaited = set(self.prefills.names + self.decodes.names)
        self._instances = {name: _Instance(job.grid(name).size) for name in (*job.prefills, *job.decodes)}
        self._spec: tuple[str, KvSpec] | None = None  # of the first that registered, who sets them
        self._introduced: set[tuple[str, str]] = set()  # incarnations of prefill and decode
        self._under_way = dict.fromkeys(self.decodes.names, 0)  # tokens whose KV is not there yet

    def current(self, instance: str) -> str:
        """Return the incarnation that *instance* is in; one of epoch 0 while it is not formed."""
        known = self._instances[instance]
        return incarnation_name(instance, known.epoch if known.formed else 0)

    def alive(self, incarnation: str) -> bool:
        """Return whether *incarnation* is formed, and neither lost nor replaced."""
        instance = instance_of(incarnation)
        known = self._instances.get(instance)
        return known is not None and known.formed and incarnation == incarnation_name(instance, known.epoch)

    def formed(self, instance: str) -> bool:
        """Return whether *instance* may be chosen: all its ranks have registered, and none was lost since."""
        return self._instances[instance].formed

    def side(self, instance: str) -> _Side:
        """Return the side that *instance* is on."""
        return self.prefills if instance in self.prefills.names else self.decodes

    def check(self, message: RegisterRank) -> None:
        """Raise a `MessageError` if the sender of *message* has no place here, or cannot exchange KV with others."""
        known, rank = self._instances.get(message.instance), f"rank {message.index} of {message.instance}"
        if known is None or not 0 <= message.index < known.size:
            sizes = ", ".join(f"{name} of {each.size}" for name, each in self._instances.items())
            raise MessageError(f"{rank} has no place; there are {sizes} ranks")
        if self._spec is None:
            self._spec = rank, message.spec
            return
        first, spec = self._spec
        for name in KvSpec.__struct_fields__:
            mine, theirs = getattr(message.spec, name), getattr(spec, name)
            if mine != theirs:
                raise MessageError(
                    f"{rank} has {name}={mine}, {first} {theirs}: both sides must have the same; start it with "
                    f"{name}={theirs}"
                )

    def replaces(self, message: RegisterRank) -> bool:
        """Return whether *message* is of a newer process of a rank that has a place in an introduced instance.

        Before that its other ranks know nothing of the older process, which may have ended unheard before they
        started: the newer one just takes its place.
        """
        known = self._instances[message.instance]
        return known.introduced and message.started > known.places.get(message.index, message.started)

    def register(self, message: RegisterRank) -> bool:
        """Give a rank its place; return whether that forms its instance.

        A process older than the one that has the place gets none, nor does one that was started before its instance
        was lost: it was told to end.
        """
        instance = message.instance
        known = self._instances[instance]
        if message.started <= max(known.until, known.places.get(message.index, -1)):
            return False
        known.places[message.index] = message.started
        if len(known.places) < known.size or known.formed:
            return False
        known.formed = True
        known.epoch += 1
        self.side(instance).load[instance] = 0
        self.awaited.discard(instance)
        return True

    def has_place(self, message: RegisterRank) -> bool:
        """Return whether the process that sent *message* has the place of its rank."""
        return self._instances[message.instance].places.get(message.index) == message.started

    def introduce(self, prefill: str, decode: str) -> Iterator[tuple[str, ConnectPeer]]:
        """Yield the `ConnectPeer` messages to send, by rank, if these two incarnations have not met."""
        if (prefill, decode) in self._introduced:
            return
        self._introduced.add((prefill, decode))
        for mine, theirs in ((prefill, decode), (decode, prefill)):
            instance = instance_of(mine)
            self._instances[instance].introduced = True
            for index, started in sorted(self._instances[instance].places.items()):
                yield rank_name(instance, index), ConnectPeer(mine, theirs, started)

    def lose(self, instance: str) -> int:
        """Remove *instance*; return when its newest rank was started, in ns, -1 if none has registered."""
        self.awaited.discard(instance)
        self.side(instance).remove(instance)
        self._introduced = {pair for pair in self._introduced if instance not in map(instance_of, pair)}
        known = self._instances[instance]
        known.until = max([known.until, *known.places.values()])
        known.places, known.formed, known.introduced = {}, False, False
        return known.until

    def choose(
        self, room: int, tokens: int = 1, blocks: tuple[int, ...] = (), replica: int = 0, now: float = 0.0
    ) -> tuple[str, str] | None:
        """Return the incarnations of prefill and decode that get *room*; None if either side has none left.

        *replica* of the router chooses, at *now* seconds on the clock.
        """
        if any(side.load.keys() <= self.resting for side in (self.prefills, self.decodes)):
            return None
        ask = self.prefills.query(room, replica, now, tokens, blocks)
        policy: Any = self.prefills.policies[replica]
        if self._seconds is not None:
            other = self.decodes.query(room, replica, now, tokens, blocks, self._under_way)
            nbytes = self._job.shape.token_bytes(self._job.prefill.tp)
            pair = policy.pair(PairQuery(ask, other, self._job.rates, self._seconds, nbytes))
            return self.current(pair[0]), self.current(pair[1])
        prefill = route(policy, ask)
        rates = self._job.rates.get(prefill, {})
        known = tokens, blocks, self._under_way, rates
        decode = route(self.decodes.policies[replica], self.decodes.query(room, replica, now, *known))
        return self.current(prefill), self.current(decode)

    def add(self, incarnation: str, tokens: int, replica: int = 0, now: float = 0.0) -> None:
        """Count *tokens* more, or fewer, at *incarnation*, unless it is over; *replica* of the router knows it."""
        if tokens and self.alive(incarnation):
            instance = instance_of(incarnation)
            self.side(instance).add(instance, tokens, replica, now)

    def send(self, incarnation: str, tokens: int) -> None:
        """Count *tokens* more, or fewer, whose KV is on its way to *incarnation*."""
        self._under_way[instance_of(incarnation)] += tokens

    def missing(self) -> str:
        """Return which side has no instance."""
        return "prefill" if self.prefills.load.keys() <= self.resting else "decode"


class Membership:
    """Keeps the registry of instances for *process*, the router, and declares instances lost.

    SGLang runs this beside its router, as the bootstrap server.  An instance is lost if a rank of it has been silent
    for `Deployment.deadline`, is reported lost by a peer's engine, is refused, or registers again.  Its other ranks
    then get a message to end, and the ranks of the other side one to forget it.

    An instance that is to leave drains first: it gets no more requests, and ends in order when it has none.  Its
    ranks may start again later, or others on its GPUs that register as an instance of the other side: a role switch.

    *changed* is called each time that an instance is formed or lost.  *lost* is called with the incarnation, the
    reason and whether it was formed, before the other side hears of the loss: questions about its rooms must reach
    that side first.
    """

    def __init__(
        self,
        process: RankProcess,
        job: Deployment,
        changed: Callable[[], None],
        lost: Callable[[str, str, bool], None],
    ) -> None:
        self.registry = InstanceRegistry(job)
        # which prefill instance has which room, where decode instances ask; the router fills it as it routes
        self.directory: ExpiringMap[str] = ExpiringMap(process.clock, KNOWN)
        self.instances = (*job.prefills, *job.decodes)
        self.last_heard = {name: process.clock.now for instance in self.instances for name in job.ranks(instance)}
        self.changes: list[tuple[float, str, str]] = []  # seconds on the clock, instance, and "formed", "lost", ...
        self.draining: dict[str, float] = {}  # instances that are to leave, and until when they may have requests
        self._process = process
        self._job = job
        self._changed = changed
        self._lost = lost
        handlers: dict[type[KvMessage], Handler] = {
            RegisterRank: self._register,
            RoomQuery: self._locate,
            Gone: lambda _, message: self.lose_incarnation(message.instance, message.reason),
        }
        process.handlers |= handlers

    def introduce(self, prefill: str, decode: str) -> None:
        """Have the ranks of two incarnations connect to each other, once."""
        for name, connect in self.registry.introduce(prefill, decode):
            self._process.send(name, connect)

    def heard(self, rank: str) -> None:
        """Record that a message of *rank* has come."""
        if rank in self.last_heard:
            self.last_heard[rank] = self._process.clock.now

    def owes(self, asked: float) -> bool:
        """Return whether any rank has not been heard since *asked*: it will be, or is lost, within a deadline."""
        return any(at <= asked for at in self.last_heard.values())

    def lose_silent(self) -> None:
        """Lose the instances with a rank that has been silent for `Deployment.deadline`."""
        now, deadline = self._process.clock.now, self._job.deadline
        silent = [name for name, at in self.last_heard.items() if now - at > deadline]
        for instance in dict.fromkeys(map(instance_of, silent)):
            self._lose(instance, f"PeerLost: nothing from {instance} for {deadline} s")

    def lose_refused(self, rank: str, reason: str) -> None:
        """Lose the instance of *rank*, which *process* has refused."""
        if (instance := instance_of(rank)) in self.instances:  # not a rank of the job that is of none
            self._lose(instance, f"MessageError: {reason}")

    def lose_incarnation(self, incarnation: str, reason: str) -> None:
        """Lose *incarnation*, unless it is over: its instance may have been started again since."""
        if self.registry.alive(incarnation):
            self._lose(instance_of(incarnation), reason)
        else:
            self._process.ignore()

    def drain(self, instance: str, seconds: float, rooms: Mapping[int, Any]) -> None:
        """Have *instance* leave when it has none of *rooms* any more, unless its side has no other that serves.

        It serves again if it has some left after so many *seconds*, or if its side loses all others.  *rooms* are
        the `pdsim.serving.router.RoutedRequest` under way.
        """
        others = self.registry.side(instance).load.keys() - self.registry.resting - {instance}
        if not self.registry.formed(instance) or not others:
            return
        until = self._process.clock.now + seconds
        self.draining[instance] = until
        self.registry.resting.add(instance)
        self._changes_to(instance, "draining")

        def expire(_: Any) -> None:
            if self.draining.get(instance) == until:
                self._stay(instance)

        self._process.clock.call_at(until, expire, None)
        self.leave(rooms)

    def leave(self, rooms: Mapping[int, Any]) -> None:
        """End the draining instances that have none of *rooms*, and have the other side forget them."""
        busy = {name for each in rooms.values() for name in (each.prefill, each.decode)}
        for instance in [name for name in self.draining if self.registry.current(name) not in busy]:
            incarnation = self.registry.current(instance)
            self._remove(instance)
            self._changes_to(instance, "left")
            self._process.send(self._job.ranks(instance), Leave())
            self._forget(instance, incarnation, f"PeerLost: {instance} has left")

    def _stay(self, instance: str) -> None:
        del self.draining[instance]
        self.registry.resting.discard(instance)
        self._changes_to(instance, "serving")

    def _changes_to(self, instance: str, what: str) -> None:
        self.changes.append((self._process.clock.now, instance, what))

    def _remove(self, instance: str) -> int:
        if self.draining.pop(instance, None) is not None:
            self.registry.resting.discard(instance)
        for name in self._job.ranks(instance):
            self.last_heard.pop(name, None)
        return self.registry.lose(instance)

    def _forget(self, instance: str, incarnation: str, reason: str) -> None:
        registry = self.registry
        for other in (registry.prefills if instance in self._job.decodes else registry.decodes).load:
            self._process.send(self._job.ranks(other), Gone(incarnation, reason))

    def _register(self, sender: str, message: RegisterRank) -> None:
        # A rank that has a place already was started again: its instance is lost first, with all its other ranks.
        # One that cannot serve with the others is refused.
        try:
            self.registry.check(message)
        except MessageError as error:
            self._process.refuse(sender, str(error))
            return
        if self.registry.replaces(message):
            self._lose(message.instance, f"PeerLost: {sender} was started again")
        formed = self.registry.register(message)
        if self.registry.has_place(message):  # one told to end is not waited for
            self.last_heard[sender] = self._process.clock.now
        if formed:
            self._changes_to(message.instance, "formed")
            self._changed()

    def _locate(self, sender: str, message: RoomQuery) -> None:
        known = {room: where for room in message.rooms if (where := self.directory.get(room)) is not None}
        self._process.send(sender, RoomLocations(known, message.instance))

    def _lose(self, instance: str, reason: str) -> None:
        registry, job = self.registry, self._job
        incarnation, formed = registry.current(instance), registry.formed(instance)
        until = self._remove(instance)
        if formed:
            self._changes_to(instance, "lost")
        side = registry.side(instance)
        for other in [name for name in self.draining if name in side.names and side.load.keys() <= registry.resting]:
            self._stay(other)
        self._process.send(job.ranks(instance), Gone(incarnation, reason, until))
        self._lost(incarnation, reason, formed)
        if formed:
            self._forget(instance, incarnation, reason)
        self._changed()
