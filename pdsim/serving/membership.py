# SPDX-License-Identifier: Apache-2.0
"""Who serves: the instances that have enrolled, which pairs of them are connected, and what follows from a loss.

The router has a `Membership`, with the `InstanceRegistry`.  Every rank that moves bytes has a `PeerConnector`, and a
`PeerFence` if others move bytes in its memory; its leader counts the answers with `ReadyCount` and `FenceCount`.

An *incarnation* names one run of an instance from its start to its loss, ``"prefill0@2"``: the instance and its
epoch, which counts how often all of its ranks had enrolled.  Ranks enroll over the `pdsim.transfer.Channel` and not
over HTTP: messages have types and a version, keep their order, and are the same on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pdsim.core.errors import MessageError, PeerLost, TransferFailed
from pdsim.kv.layout import dp_rank
from pdsim.kv.messages import (
    ConnectPeer,
    Fence,
    Fenced,
    Gone,
    KvMessage,
    KvSpec,
    Ready,
    RegisterPool,
    RegisterRank,
    RoomQuery,
    RoomReply,
)
from pdsim.kv.rooms import ExpiringMap
from pdsim.serving.deployment import ROUTER, Deployment, epoch_of, incarnation_name, index_of, instance_of, rank_name
from pdsim.serving.rank_process import EngineRank, Handler, RankProcess
from pdsim.serving.seams import RoutingQuery, route, router_policy
from pdsim.transfer import Program

__all__ = [
    "KNOWN",
    "Bootstrap",
    "FenceCount",
    "InstanceRegistry",
    "Membership",
    "PeerConnector",
    "PeerFence",
    "PeerTable",
    "ReadyCount",
]

KNOWN = 120.0
"""Seconds for which it is remembered where a room went (SGLang's entries live for 120 to 240)."""


class Bootstrap:
    """The table of ranks: a place for each rank of each instance; *sizes* are the instances' numbers of ranks.

    An instance is formed when a rank has enrolled for each of its places; its epoch counts how often it was.
    `forget` empties the places of an instance that was lost, and it forms again with ranks that were started later.
    The first rank that enrolls sets the `KvSpec` (page size and type of KV) that all others must share.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self._places: dict[str, dict[int, int]] = {name: {} for name in sizes}  # start of each rank, in ns
        self._epochs = dict.fromkeys(sizes, 0)
        self._until = dict.fromkeys(sizes, -1)  # when the newest rank that was forgotten was started
        self._formed: dict[str, int] = {}  # epoch of those that are
        self._spec: tuple[str, KvSpec] | None = None  # of the first that enrolled, who sets them

    def check(self, message: RegisterRank) -> None:
        """Raise a `MessageError` if the sender of *message* has no place here, or cannot exchange KV with others.

        The error names both values and the way out.
        """
        size = self._sizes.get(message.instance)
        if size is None or not 0 <= message.index < size:
            known = ", ".join(f"{name} of {ranks}" for name, ranks in self._sizes.items())
            raise MessageError(f"rank {message.index} of {message.instance} has no place; there are {known} ranks")
        if self._spec is None:
            self._spec = f"rank {message.index} of {message.instance}", message.spec
            return
        first, spec = self._spec
        for name in KvSpec.__struct_fields__:
            mine, theirs = getattr(message.spec, name), getattr(spec, name)
            if mine != theirs:
                raise MessageError(
                    f"rank {message.index} of {message.instance} has {name}={mine}, {first} {theirs}: both sides "
                    f"must have the same; start it with {name}={theirs}"
                )

    def replaces(self, message: RegisterRank) -> bool:
        """Return whether *message* is of a newer process of a rank that has a place in a formed instance."""
        known = self._places[message.instance].get(message.index)
        return message.instance in self._formed and known is not None and message.started > known

    def enroll(self, message: RegisterRank) -> bool:
        """Give the rank that sent *message* its place, and return whether that forms the instance.

        A rank has one place however often it asks.  A process older than the one that has it gets none, nor does
        one that was started before its instance was forgotten: it has been told to end (`forget`).
        """
        places = self._places[message.instance]
        if message.started <= max(self._until[message.instance], places.get(message.index, -1)):
            return False
        places[message.index] = message.started
        if len(places) < self._sizes[message.instance] or message.instance in self._formed:
            return False
        self._epochs[message.instance] += 1
        self._formed[message.instance] = self._epochs[message.instance]
        return True

    def forget(self, instance: str) -> int:
        """Empty the places of *instance*; return when the newest rank that had one was started, -1 if none had."""
        self._formed.pop(instance, None)
        places, self._places[instance] = self._places[instance], {}
        self._until[instance] = max([self._until[instance], *places.values()])
        return self._until[instance]

    def started(self, instance: str, index: int) -> int:
        """Return when the rank at place *index* of *instance* was started; raise a `KeyError` if there is none."""
        return self._places[instance][index]

    def epoch(self, instance: str) -> int:
        """Return the epoch of *instance*, 0 unless it is formed."""
        return self._formed.get(instance, 0)


class _Side:
    """The instances of one side; *load* has the tokens outstanding at each that is formed."""

    def __init__(self, instances: Sequence[str], dp: int, policy: str) -> None:
        self.names = tuple(instances)
        self.load: dict[str, int] = {}
        self._dp = dp
        self._group = {instance: number % dp for number, instance in enumerate(instances)}
        self._policy = router_policy(policy)

    def choose(self, room: int, able: Sequence[str], *known: Any) -> str:
        # *known* are the fields of `RoutingQuery` from the third on.
        if self._dp > 1:
            group = dp_rank(room, self._dp)
            able = [name for name in able if self._group[name] == group] or able
        return route(self._policy, RoutingQuery(able, self.load, *known))


class InstanceRegistry:
    """The instances of *job*, the pairs of them that are connected, and the tokens outstanding at each.

    An instance is *awaited* from the start until it is formed or lost for the first time.  Life of an instance:
    ranks `enroll`; the last one forms it, and its ranks connect to those of the other side; pairs are `link`ed as
    their ranks report; `lose` removes it, and it may form again with a later epoch.
    """

    def __init__(self, job: Deployment) -> None:
        self._job = job
        self.prefills = _Side(job.prefills, 1 if job.query_dp else job.prefill_dp, job.policy)
        self.decodes = _Side(job.decodes, job.decode_dp, job.policy)
        self.bootstrap = Bootstrap({name: job.grid(name).size for name in (*job.prefills, *job.decodes)})
        self.awaited = set(self.prefills.names + self.decodes.names)
        self._links: set[tuple[str, str]] = set()
        self._under_way = dict.fromkeys(self.decodes.names, 0)  # tokens whose KV is not there yet

    @property
    def connected(self) -> bool:
        """Whether no instance is awaited and all that are formed are linked."""
        return not self.awaited and len(self._links) == len(self.prefills.load) * len(self.decodes.load)

    def current(self, instance: str) -> str:
        """Return the incarnation that *instance* is in; one of epoch 0 while it is not formed."""
        return incarnation_name(instance, self.bootstrap.epoch(instance))

    def alive(self, incarnation: str) -> bool:
        """Return whether *incarnation* is formed, and neither lost nor replaced."""
        instance = instance_of(incarnation)
        epoch = self.bootstrap.epoch(instance)
        return epoch > 0 and incarnation_name(instance, epoch) == incarnation

    def side(self, instance: str) -> _Side:
        """Return the side that *instance* is on."""
        return self.prefills if instance in self.prefills.names else self.decodes

    def enroll(self, message: RegisterRank) -> list[tuple[str, ConnectPeer]]:
        """Give a rank its place; return the `ConnectPeer` messages to send, by rank, if that forms its instance.

        The ranks of both sides of each new pair are sent the incarnation of the other.
        """
        if not self.bootstrap.enroll(message):
            return []
        side = self.side(message.instance)
        other = self.decodes if side is self.prefills else self.prefills
        side.load[message.instance] = 0
        self.awaited.discard(message.instance)
        mine, theirs = self.current(message.instance), [self.current(name) for name in other.load]
        pairs = [pair for peer in theirs for pair in ((mine, peer), (peer, mine))]
        return [message for incarnation, peer in pairs for message in self._connections(incarnation, peer)]

    def _connections(self, incarnation: str, peer: str) -> Iterator[tuple[str, ConnectPeer]]:
        instance = instance_of(incarnation)
        for index in range(self._job.grid(instance).size):
            yield rank_name(instance, index), ConnectPeer(incarnation, peer, self.bootstrap.started(instance, index))

    def link(self, prefill: str, decode: str) -> bool:
        """Record that these two incarnations are connected; return False if either is over."""
        if not (self.alive(prefill) and self.alive(decode)):
            return False
        self._links.add((instance_of(prefill), instance_of(decode)))
        return True

    def linked(self, prefill: str, decode: str) -> bool:
        """Return whether these two instances are connected."""
        return (prefill, decode) in self._links

    def lose(self, instance: str) -> int:
        """Remove *instance*; return when its newest rank was started, in ns, -1 if none has enrolled."""
        self.awaited.discard(instance)
        self.side(instance).load.pop(instance, None)
        self._links = {link for link in self._links if instance not in link}
        return self.bootstrap.forget(instance)

    def choose(self, room: int, tokens: int = 1, blocks: tuple[int, ...] = ()) -> tuple[str, str] | None:
        """Return the incarnations of prefill and decode that get *room*; None if no connected pair is left.

        *tokens* and *blocks* are those of its prompt.  The prefill instance is chosen first, among those with any
        link, then the decode instance among those linked to it.
        """
        prefills = [name for name in self.prefills.names if any(name == prefill for prefill, _ in self._links)]
        if not prefills:
            return None
        prefill = self.prefills.choose(room, prefills, tokens, blocks)
        decodes = [name for name in self.decodes.names if (prefill, name) in self._links]
        rates = self._job.rates.get(prefill, {})
        decode = self.decodes.choose(room, decodes, tokens, blocks, self._under_way, rates)
        return self.current(prefill), self.current(decode)

    def add(self, incarnation: str, tokens: int) -> None:
        """Count *tokens* more, or fewer, at *incarnation*, unless it is over."""
        if self.alive(incarnation):
            instance = instance_of(incarnation)
            self.side(instance).load[instance] += tokens

    def send(self, incarnation: str, tokens: int) -> None:
        """Count *tokens* more, or fewer, whose KV is on its way to *incarnation*."""
        self._under_way[instance_of(incarnation)] += tokens

    def missing(self) -> str:
        """Return which side has no instance."""
        return "prefill" if not self.prefills.load else "decode" if not self.decodes.load else "connected"


class Membership:
    """Keeps the registry of instances for *process*, the router, and declares instances lost.

    SGLang runs this beside its router, as the bootstrap server.  An instance is lost if a rank of it has been silent
    for `Deployment.deadline`, is reported lost by a peer's engine, is refused, or enrolls again: its other ranks are
    told to end, and those of the other side to forget it.

    *changed* is called each time that an instance is connected or lost.  *lost* is called with the incarnation, the
    reason and whether it was formed, before the other side hears of the loss: what that is asked about rooms must
    reach it first.
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
        self._process = process
        self._job = job
        self._changed = changed
        self._lost = lost
        handlers: dict[type[KvMessage], Handler] = {
            RegisterRank: self._enroll,
            Ready: self._ready,
            RoomQuery: self._locate,
            Gone: lambda _, message: self.lose_incarnation(message.instance, message.reason),
        }
        process.handlers |= handlers

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
        if (instance := instance_of(rank)) in self.instances:
            self._lose(instance, f"MessageError: {reason}")

    def lose_incarnation(self, incarnation: str, reason: str) -> None:
        """Lose *incarnation*, unless it is over: its instance may have been started again since."""
        if self.registry.alive(incarnation):
            self._lose(instance_of(incarnation), reason)
        else:
            self._process.ignore()

    def _enroll(self, sender: str, message: RegisterRank) -> None:
        # A rank that has a place already was started again: its instance is lost first, with all its other ranks.
        # One that cannot serve with the others is refused.
        try:
            self.registry.bootstrap.check(message)
        except MessageError as error:
            self._process.refuse(sender, str(error))
            return
        if self.registry.bootstrap.replaces(message):
            self._lose(message.instance, f"PeerLost: {sender} was started again")
        self.last_heard[sender] = self._process.clock.now
        for name, connect in self.registry.enroll(message):
            self._process.send(name, connect)

    def _ready(self, _: str, message: Ready) -> None:
        if self.registry.link(message.incarnation, message.peer):
            self._changed()
        else:
            self._process.ignore()

    def _locate(self, sender: str, message: RoomQuery) -> None:
        known = {room: where for room in message.rooms if (where := self.directory.get(room)) is not None}
        self._process.send(sender, RoomReply(message.instance, known))

    def _lose(self, instance: str, reason: str) -> None:
        registry, job = self.registry, self._job
        incarnation, formed = registry.current(instance), instance in registry.side(instance).load
        until = registry.lose(instance)
        for name in job.ranks(instance):
            self.last_heard.pop(name, None)
        self._process.send(job.ranks(instance), Gone(incarnation, reason, until))
        self._lost(incarnation, reason, formed)
        if formed:
            for other in (registry.prefills if instance in job.decodes else registry.decodes).load:
                self._process.send(job.ranks(other), Gone(incarnation, reason))
        self._changed()


# --- connections between ranks -------------------------------------------------------------------------------------


class PeerTable(Protocol):
    """The ranks of the other side that a rank is connected to, by the incarnation of their instance."""

    def __contains__(self, incarnation: str) -> bool:
        """Return whether *incarnation* is expected to connect."""

    def expect(self, incarnation: str) -> None:
        """Expect *incarnation*, also if this rank moves no bytes of it."""

    def drop(self, incarnation: str) -> None:
        """Forget the ranks of *incarnation*."""

    def connect(self, message: RegisterPool) -> None:
        """Connect to the rank that sent *message*, or raise what `Endpoint.connect` does or a `MessageError`."""


class PeerConnector:
    """Connects *process*, the rank that posts transfers, to the ranks of the other side that register with it.

    The router names the incarnations to `connect_peer`, and their ranks send a `RegisterPool` each; either may come
    first.  *peers* keeps the connections.  *ready* is called with an incarnation when it is named and after each
    connection to it; it checks whether that was the last.
    """

    def __init__(self, process: EngineRank, peers: PeerTable, ready: Callable[[str], None]) -> None:
        self._process = process
        self._peers = peers
        self._ready = ready
        self._early: dict[str, RegisterPool] = {}  # by sender: of incarnations that this rank is not to know yet
        process.handlers |= {RegisterPool: self._register}

    def connect_peer(self, incarnation: str) -> None:
        """Connect to the ranks of *incarnation* that have registered, and to others as they do."""
        self._peers.expect(incarnation)
        early, self._early = self._early, {}
        for sender, register in early.items():
            self._register(sender, register)
        self._ready(incarnation)

    def disconnect_peer(self, incarnation: str) -> None:
        """Forget the ranks of *incarnation*, and their messages."""
        self._peers.drop(incarnation)
        self._early = {name: register for name, register in self._early.items() if register.instance != incarnation}

    def _register(self, sender: str, message: RegisterPool) -> None:
        # A rank that is gone is reported to the router; one with a pool of another kind is refused.
        if message.incarnation != self._process.incarnation or message.instance not in self._peers:
            kept = self._early.get(sender)  # one of each rank, and of no incarnation that is over for long
            if kept is None or _epochs(kept) <= _epochs(message):  # those of two epochs may come in any order
                self._early[sender] = message
            return
        try:
            self._peers.connect(message)
        except PeerLost as error:
            self._process.send(ROUTER, Gone(message.instance, f"PeerLost: {error}"))
        except (MessageError, TransferFailed) as error:  # another kind of pool, or no address at all
            self._process.refuse(sender, str(error))
        else:
            self._ready(message.instance)


def _epochs(message: RegisterPool) -> tuple[int, int]:
    return epoch_of(message.instance), epoch_of(message.incarnation)


class ReadyCount:
    """Which of a leader's *ranks* are connected to each incarnation of the other side, and which of these are lost.

    A rank may report twice, or before its leader knows that incarnation; each counts once.  A pair is the two names
    in a `Ready`, so nothing reported in an earlier epoch of either side counts in a later one.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ready: dict[tuple[str, str], set[int]] = {}  # by `Ready.incarnation` and `Ready.peer`
        self._last_lost: dict[str, int] = {}  # by instance: the last epoch that is known to be over

    def count(self, rank: int, message: Ready) -> bool:
        """Count *rank*; return whether all are connected now."""
        ranks = self._ready.setdefault((message.incarnation, message.peer), set())
        ranks.add(rank)
        return len(ranks) == self._ranks

    def lose(self, incarnation: str) -> None:
        """Record that *incarnation* is over, and forget which ranks were connected to it."""
        instance = instance_of(incarnation)
        self._last_lost[instance] = max(epoch_of(incarnation), self._last_lost.get(instance, 0))
        self._ready = {
            incarnations: ranks for incarnations, ranks in self._ready.items() if incarnation not in incarnations
        }

    def lost(self, incarnation: str) -> bool:
        """Return whether *incarnation*, or a later one of its instance, was lost."""
        return epoch_of(incarnation) <= self._last_lost.get(instance_of(incarnation), -1)

    def keep(self, incarnation: str) -> None:
        """Forget what was counted in other incarnations of this instance than *incarnation*."""
        self._ready = {
            incarnations: ranks for incarnations, ranks in self._ready.items() if incarnation in incarnations
        }


# --- fences --------------------------------------------------------------------------------------------------------
# A lost incarnation may have posted transfers that still land.  Its pages stay in quarantine until every rank has
# the proof of its endpoint (`Endpoint.quiesced`) about every rank that reaches into its memory: on decode where
# prefill pushes, on prefill where decode pulls.


class PeerFence:
    """Proves on one rank, *process*, that nothing of a lost instance moves in its memory any more.

    *peers* are the ranks by index that move bytes there.  *fenced* is called with the answer to each `Fence`, once
    it is proven; *parted*, if given, with the name of each rank of an instance for which a new proof has come.
    There is no proof about an incarnation that is alive; one about epoch *n* holds for all earlier ones.
    """

    def __init__(
        self,
        process: EngineRank,
        peers: Sequence[int],
        fenced: Callable[[Fenced], None],
        parted: Callable[[str], None] | None = None,
    ) -> None:
        self._process = process
        self._peers = peers
        self._fenced = fenced
        self._parted = parted
        self._proven: dict[str, int] = {}  # by instance: up to which epoch nothing of it moves here
        process.handlers |= {Fence: lambda _, message: self.prove(message)}

    def introduce(self, peer: str, message: Callable[[], KvMessage]) -> None:
        """Send *message* to the ranks of *peer*, an incarnation, once nothing of an earlier one moves here."""
        self._process.clock.process(self._introduce(peer, message))

    def prove(self, fence: Fence) -> None:
        """Answer *fence* once nothing of the incarnation that it names moves here."""
        self._process.clock.process(self._prove(fence))

    def _introduce(self, peer: str, message: Callable[[], KvMessage]) -> Program:
        yield from self._wait(instance_of(peer), epoch_of(peer) - 1)
        if not self._process.has_ended:
            self._process.send([rank_name(instance_of(peer), index) for index in self._peers], message())

    def _prove(self, fence: Fence) -> Program:
        yield from self._wait(instance_of(fence.peer), epoch_of(fence.peer))
        if not self._process.has_ended:
            self._fenced(Fenced(fence.number))

    def _wait(self, instance: str, epoch: int) -> Program:
        for index in self._peers:
            if self._proven.get(instance, 0) >= epoch:
                return
            yield self._process.rank.endpoint.quiesced(rank_name(instance, index))
        if self._proven.get(instance, 0) < epoch:
            self._proven[instance] = epoch
            if self._parted is not None:
                for index in self._peers:
                    self._parted(rank_name(instance, index))


class FenceCount:
    """The fences that the leader of an instance, *process*, waits for; *proof* is that of its own rank.

    *free* is called with each room of a fence once every rank has answered it.  Numbers follow the start of the
    process, so an answer to an earlier process of the leader is none to this one.
    """

    def __init__(self, process: EngineRank, proof: PeerFence, free: Callable[[int], None]) -> None:
        self._process = process
        self._proof = proof
        self._free = free
        self._number = process.started
        self._open: dict[int, tuple[list[int], set[int]]] = {}  # rooms, and ranks without proof
        process.handlers[Fenced] = self._fenced

    def begin(self, incarnation: str, rooms: list[int]) -> None:
        """Ask every rank for the proof about *incarnation*, for which *rooms* wait."""
        self._number += 1
        self._open[self._number] = rooms, set(range(len(self._process.followers) + 1))
        fence = Fence(self._number, incarnation)
        self._process.send(self._process.followers, fence)
        self._proof.prove(fence)

    def _fenced(self, sender: str, message: Fenced) -> None:
        fence = self._open.get(message.number)
        if fence is None:
            self._process.ignore()
            return
        rooms, missing = fence
        missing.discard(index_of(sender))
        if not missing:
            del self._open[message.number]
            for room in rooms:
                self._free(room)
