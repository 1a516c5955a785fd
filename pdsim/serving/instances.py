# SPDX-License-Identifier: Apache-2.0
"""Which instances there are, which of them are connected, and which is to have the next request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from pdsim.kv.bootstrap import Bootstrap
from pdsim.kv.mapping import dp_rank
from pdsim.kv.messages import Enroll, Meet
from pdsim.serving.deployment import Deployment, instance_of, life_name, rank_name
from pdsim.serving.seams import RoutingQuery, route, router_policy

__all__ = ["InstanceRegistry"]


def own_place(sender: str, message: Enroll) -> Enroll:
    """Return *message* with the place of *sender*, if its name has one: a rank that runs for others tells its own.

    >>> from pdsim.kv.messages import Terms
    >>> own_place("prefill0.3", Enroll("prefill0", 1, 0, Terms(64, "bf16"))).index
    3
    """
    instance, _, index = sender.rpartition(".")
    return replace(message, index=int(index)) if instance == message.instance and index.isdecimal() else message


class _Side:
    """The instances of one side, and the tokens outstanding at each that is formed.

    *load* has an entry for each instance that is formed, in tokens; policies and groups count all of them.
    """

    def __init__(self, instances: Sequence[str], dp: int, policy: str) -> None:
        self.names = tuple(instances)
        self.load: dict[str, int] = {}
        self._dp = dp
        self._group = {instance: number % dp for number, instance in enumerate(instances)}
        self._policy = router_policy(policy)

    def choose(self, room: int, able: Sequence[str], *known: Any) -> str:
        """Return that one of *able* that is to have *room*: of the group of its `dp_rank`, if one of those is left.

        What is *known* besides are the other fields of `RoutingQuery`, from the third on.
        """
        if self._dp > 1:
            group = dp_rank(room, self._dp)
            able = [name for name in able if self._group[name] == group] or able
        return route(self._policy, RoutingQuery(able, self.load, *known))


class InstanceRegistry:
    """The instances of *job*, by their places in the `Bootstrap` table, and the pairs of them that are connected.

    An instance is *awaited* from the start until it is formed or lost for the first time.

    Life of an instance: ranks `enroll`; with the last it is formed, and told to meet the other side; pairs are
    `link`ed as their ranks report; `lose` takes it out, and it may form anew with a later epoch.  The router has the
    one object.
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

    def life(self, instance: str) -> str:
        """Return the name of the life that *instance* is in, or of none: epoch 0."""
        return life_name(instance, self.bootstrap.epoch(instance))

    def alive(self, life: str) -> bool:
        """Return whether *life* goes on."""
        instance = instance_of(life)
        epoch = self.bootstrap.epoch(instance)
        return epoch > 0 and life_name(instance, epoch) == life

    def side(self, instance: str) -> _Side:
        """Return the side that *instance* is on."""
        return self.prefills if instance in self.prefills.names else self.decodes

    def enroll(self, message: Enroll) -> list[tuple[str, Meet]]:
        """Give a rank its place.  If that forms its instance, return which rank is to be sent what.

        The ranks of both sides of each new pair are told of the other, each in the life in which it enrolled.
        """
        if not self.bootstrap.enroll(message):
            return []
        side = self.side(message.instance)
        other = self.decodes if side is self.prefills else self.prefills
        side.load[message.instance] = 0
        self.awaited.discard(message.instance)
        mine, theirs = self.life(message.instance), [self.life(name) for name in other.load]
        pairs = [pair for peer in theirs for pair in ((mine, peer), (peer, mine))]
        return [told for life, peer in pairs for told in self._meets(life, peer)]

    def _meets(self, life: str, peer: str) -> Iterator[tuple[str, Meet]]:
        instance = instance_of(life)
        for index in range(self._job.grid(instance).size):
            yield rank_name(instance, index), Meet(life, peer, self.bootstrap.incarnation(instance, index))

    def link(self, prefill: str, decode: str) -> bool:
        """Take note that these two lives are connected; return False if either is over."""
        if not (self.alive(prefill) and self.alive(decode)):
            return False
        self._links.add((instance_of(prefill), instance_of(decode)))
        return True

    def linked(self, prefill: str, decode: str) -> bool:
        """Return whether these two instances are connected."""
        return (prefill, decode) in self._links

    def lose(self, instance: str) -> int:
        """Take *instance* out; return the newest incarnation of its ranks, -1 if none has enrolled."""
        self.awaited.discard(instance)
        self.side(instance).load.pop(instance, None)
        self._links = {link for link in self._links if instance not in link}
        return self.bootstrap.forget(instance)

    def choose(self, room: int, tokens: int = 1, blocks: tuple[int, ...] = ()) -> tuple[str, str] | None:
        """Return the lives of the prefill and the decode instance that are to have *room*; None if no pair is left.

        Its prompt has so many *tokens*, and *blocks* are the hashes of its blocks, where prefixes are cached.

        The prefill instance is chosen first, among those with any link, then the decode instance among those linked
        to it.
        """
        prefills = [name for name in self.prefills.names if any(name == prefill for prefill, _ in self._links)]
        if not prefills:
            return None
        prefill = self.prefills.choose(room, prefills, tokens, blocks)
        decodes = [name for name in self.decodes.names if (prefill, name) in self._links]
        rates = self._job.rates.get(prefill, {})
        decode = self.decodes.choose(room, decodes, tokens, blocks, self._under_way, rates)
        return self.life(prefill), self.life(decode)

    def add(self, life: str, tokens: int) -> None:
        """Count *tokens* more, or fewer, at *life*, unless it is over."""
        if self.alive(life):
            instance = instance_of(life)
            self.side(instance).load[instance] += tokens

    def send(self, life: str, tokens: int) -> None:
        """Count *tokens* more, or fewer, whose KV is on its way to *life*."""
        self._under_way[instance_of(life)] += tokens

    def missing(self) -> str:
        """Return which side has no instance."""
        return "prefill" if not self.prefills.load else "decode" if not self.decodes.load else "connected"
