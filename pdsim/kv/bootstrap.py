# SPDX-License-Identifier: Apache-2.0
"""Who is there: the table of ranks that a handoff begins with.

One service a job, in the router's rank.  The router has to know anyway which instances are alive before it sends
them requests, so a service elsewhere would be a second thing to start, to watch and to lose.  It is spoken to over
the `pdsim.transfer.Channel` and not over HTTP: messages have types and a schema version, keep their order, need no
second stack of sockets and no polling until everybody is there, and are the same on the model.

A rank enrols once in each of its lives.  The table has a row for each instance (an attention group: one
data-parallel rank of an engine) and in it a place for each rank, at its number in the group's `Grid`, which stands
for its tensor-parallel, pipeline and context-parallel rank.  An instance is *formed* when all of its places are
taken; each time that happens it begins a new epoch, by which its peers tell its lives apart.

Names are compared whole: nothing here looks at how a name begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdsim.core.clock import Clock
from pdsim.kv.messages import Enroll, MessageError, Terms
from pdsim.kv.rooms import ExpiringMap

__all__ = ["KNOWN", "Bootstrap", "RoomDirectory"]

KNOWN = 120.0
"""Seconds for which it is remembered where a room went (SGLang's entries live for 120 to 240)."""


class Bootstrap:
    """The table of ranks.  *sizes* is how many each instance has, by name.  It has so many places and never more.

    An instance is formed when a rank has enrolled for each of its places; its epoch counts how often it was.
    `forget` empties the places of an instance that was lost, and it forms anew with ranks of newer incarnations.
    The first rank that enrols sets the `Terms` (page size and type of KV) that all others must share.

    The router's rank has the one object; it calls `check` and then `enroll` for each `Enroll` message, and `forget`
    when it declares an instance lost.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self._places: dict[str, dict[int, int]] = {instance: {} for instance in sizes}  # incarnation by number
        self._epochs = dict.fromkeys(sizes, 0)
        self._until = dict.fromkeys(sizes, -1)  # the newest incarnation that was forgotten
        self._formed: dict[str, int] = {}  # epoch of those that are
        self._terms: tuple[str, Terms] | None = None  # of the first that enrolled, who sets them

    def check(self, message: Enroll) -> None:
        """Raise a `MessageError` if the sender of *message* has no place here, or cannot exchange KV with others.

        The error names both values and the way out.
        """
        size = self._sizes.get(message.instance)
        if size is None or not 0 <= message.index < size:
            known = ", ".join(f"{name} of {ranks}" for name, ranks in self._sizes.items())
            raise MessageError(f"rank {message.index} of {message.instance} has no place; there are {known} ranks")
        if self._terms is None:
            self._terms = f"rank {message.index} of {message.instance}", message.terms
            return
        first, terms = self._terms
        for name in Terms.__struct_fields__:
            mine, theirs = getattr(message.terms, name), getattr(terms, name)
            if mine != theirs:
                raise MessageError(
                    f"rank {message.index} of {message.instance} has {name}={mine}, {first} {theirs}: both sides "
                    f"must have the same; start it with {name}={theirs}"
                )

    def replaces(self, message: Enroll) -> bool:
        """Return whether *message* is of a newer life of a rank that has a place in a formed instance."""
        known = self._places[message.instance].get(message.index)
        return message.instance in self._formed and known is not None and message.incarnation > known

    def enroll(self, message: Enroll) -> bool:
        """Give the rank that sent *message* its place, and return whether that forms the instance.

        A rank has one place however often it asks.  An older life than the one that has it gets none, nor does one
        that was started before its instance was forgotten: it has been told to end (`forget`).
        """
        places = self._places[message.instance]
        if message.incarnation <= max(self._until[message.instance], places.get(message.index, -1)):
            return False
        places[message.index] = message.incarnation
        if len(places) < self._sizes[message.instance] or message.instance in self._formed:
            return False
        self._epochs[message.instance] += 1
        self._formed[message.instance] = self._epochs[message.instance]
        return True

    def forget(self, instance: str) -> int:
        """Empty the places of *instance*; return the newest incarnation that has had one, -1 if there is none."""
        self._formed.pop(instance, None)
        places, self._places[instance] = self._places[instance], {}
        self._until[instance] = max([self._until[instance], *places.values()])
        return self._until[instance]

    def incarnation(self, instance: str, index: int) -> int:
        """Return the incarnation of the rank at place *index* of *instance*; raise a `KeyError` if there is none."""
        return self._places[instance][index]

    def epoch(self, instance: str) -> int:
        """Return the epoch of *instance*, 0 unless it is formed."""
        return self._formed.get(instance, 0)


class RoomDirectory:
    """Which prefill instance took which room, for decode instances to ask where the number of a room does not say.

    The router fills it as it routes; decode instances ask by message.  A room that is not known, or no longer, is
    left out of the answer.
    """

    def __init__(self, clock: Clock) -> None:
        self._lives: ExpiringMap[str] = ExpiringMap(clock, KNOWN)

    def took(self, room: int, life: str) -> None:
        """Take note that *room* went to the prefill instance *life*, for `KNOWN` seconds."""
        self._lives.set(room, life)

    def forget(self, room: int) -> None:
        """Take note that nobody will ask for *room* any more."""
        self._lives.pop(room)

    def locate(self, rooms: Iterable[int]) -> dict[int, str]:
        """Return the life that has each of *rooms*, of those that are known."""
        found = ((room, self._lives.get(room)) for room in rooms)
        return {room: life for room, life in found if life is not None}
