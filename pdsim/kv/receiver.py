# SPDX-License-Identifier: Apache-2.0
"""The decode side of a handoff, on one rank: pages that wait for bytes, and when they have them all."""

from __future__ import annotations

from collections.abc import Callable

from pdsim.core.errors import MessageError
from pdsim.kv.contents import EVERY, Contents
from pdsim.kv.layout import HostMetadata, KvLayout, write_metadata
from pdsim.kv.mapping import RankMap
from pdsim.kv.messages import (
    Arrival,
    Destination,
    RankQuiesced,
    RegisterPool,
    StagingRequest,
    TransferDone,
    decode,
)
from pdsim.kv.peers import REGION
from pdsim.kv.policy import Policy, Staging
from pdsim.kv.rooms import OVER, ExpiringMap
from pdsim.kv.staging.staging_receiver import StagingReceiver
from pdsim.transfer import Notification
from pdsim.transfer.job import Rank

__all__ = ["KvReceiver"]

DEVICE = Policy()
"""Metadata lies on the device."""


class _IncomingRoom:
    """A request's handoff as this rank sees it."""

    def __init__(self) -> None:
        self.reserve: Destination | None = None
        self.received = 0  # writes that arrived
        self.counts: dict[int, int] = {}  # how many each writer made, once its last is here
        self.last: Arrival | None = None
        self.rows: tuple[bytes, ...] = ()  # of metadata that came as a message
        self.reason = ""  # why what arrived cannot be used


class KvReceiver:
    """Receives what the prefill ranks of *rank_map* write to a decode rank, the *index*-th of its group *instance*.

    A room is complete when as many writes have arrived as its writers say that they made, those to the staging ring
    scattered.  On memory that has contents every byte is then compared, of rooms up to number *checked*, for which
    the room's pages must be known by `reserve`, before or after (the two travel different ways).  *report* is called
    once for each room with `TransferDone` and the last `Arrival`, *quiet* once for each room to `forget`.

    States of a room: `reserve` and the arrivals come in any order; `TransferDone` is reported when all is here;
    `forget` ends it early.  What arrives within `OVER` seconds of that is ignored, and counted in *ignored*.
    """

    def __init__(
        self,
        rank: Rank,
        layout: KvLayout,
        instance: str,
        index: int,
        rank_map: RankMap,
        report: Callable[[TransferDone, Arrival], None],
        quiet: Callable[[RankQuiesced], None],
        policy: Policy = DEVICE,
        staging: Staging | None = None,
        checked: int = EVERY,
    ) -> None:
        self.layout = layout
        self._checked = checked
        self._rank = rank
        self._instance = instance
        self._index = index
        self.report = report
        self.writers = rank_map.writers(index)
        # a request of fewer pages than there are context-parallel ranks has fewer writers; others have all of them
        self._expected = [rank_map.expected(index, pages) for pages in range(rank_map.prefill.cp + 1)]
        self._rooms: dict[int, _IncomingRoom] = {}
        self._over: ExpiringMap[None] = ExpiringMap(rank.clock, OVER)
        self.ignored = 0  # arrivals and questions of rooms that were forgotten before
        self._buffer = rank.device.allocate(layout.size, policy.memory_pool)
        region = rank.endpoint.register(self._buffer, REGION)
        self._rows = HostMetadata(layout) if policy.metadata_on == "host" else self._buffer
        self.contents = Contents(self._buffer, layout, rank_map.decode.at(index).tp, self._rows)
        self.landing = StagingReceiver(rank, layout, index, rank_map, region, staging, quiet) if staging else None
        self._quiet = quiet

    def __len__(self) -> int:
        """Return the number of rooms that are not complete."""
        return len(self._rooms)

    def register(self, incarnation: str, peer: str) -> RegisterPool:
        """Return what `writers` of the incarnation *peer* need to know about this group's *incarnation*."""
        return RegisterPool(peer, self._rank.endpoint.address(), incarnation, self._index, self.layout)

    def reserve(self, message: Destination) -> None:
        """Take note of the pages that a room owns here, which memory with contents needs to be told."""
        room = self._room(message.room)
        room.reserve = message
        self._check(message.room, room)

    def forget(self, room: int) -> None:
        """Drop what is known of *room*, of which nothing will be written any more.

        `RankQuiesced` follows once nothing of it is copied any more either.
        """
        self._rooms.pop(room, None)
        self._over.set(room, None)
        if self.landing is None:
            self._quiet(RankQuiesced(room))
        else:
            self.landing.forget(room)

    def sever(self, rank: str) -> None:
        """Take back what *rank* has borrowed, now that it is proven that it writes here no more."""
        if self.landing is not None:
            self.landing.sever(rank)

    def ask(self, sender: str, message: StagingRequest) -> None:
        """Answer a question for a staging slot, unless its room is over: nobody would give that slot back.

        Such a question was held up, and its writer has given the room up, or is gone and waits for no answer.
        """
        if message.room in self._over:
            self.ignored += 1
        elif self.landing is not None:
            self.landing.ask(sender, message)

    def notice(self, notification: Notification) -> None:
        """Take note of a write that has arrived.  Raise a `MessageError` if its payload is not an `Arrival`."""
        arrival = decode(notification.payload)
        if not isinstance(arrival, Arrival):
            raise MessageError(f"{notification.sender} attached {type(arrival).__name__} to a write, need Arrival")
        if arrival.chunk < 0:
            self.arrive(arrival, count=notification.times)
        elif self.landing is not None:
            self.landing.scatter(arrival, self.arrive)

    def take(self, message: Arrival) -> None:
        """Take note of an arrival that came as a message, perhaps with metadata."""
        if message.rows and message.room not in self._over:
            self._room(message.room).rows = message.rows
        self.arrive(message)

    def arrive(self, arrival: Arrival, reason: str = "", count: int = 1) -> None:
        """Count one write, or *count* alike; with a *reason*, what cannot be used; not of a room that is forgotten.

        *reason* says why the bytes cannot be used, and is reported with the room.
        """
        if arrival.room in self._over:
            self.ignored += count
            return
        room = self._room(arrival.room)
        room.received += count
        room.reason = room.reason or reason
        if arrival.count:
            room.counts[arrival.writer] = arrival.count
            if room.last is None or arrival.ended >= room.last.ended:
                room.last = arrival
        self._check(arrival.room, room)

    def _room(self, number: int) -> _IncomingRoom:
        room = self._rooms.get(number)
        if room is None:
            room = self._rooms[number] = _IncomingRoom()
        return room

    def _check(self, number: int, room: _IncomingRoom) -> None:
        # On memory with contents it also waits for `reserve`, stores metadata that came as a message, and compares.
        if room.last is None or len(room.counts) < self._expected[min(room.last.pages, len(self._expected) - 1)]:
            return
        if room.received < sum(room.counts.values()):
            return
        reason = room.reason
        if self._rank.device.holds_bytes:
            if room.reserve is None:
                return
            if room.rows:  # into the slot that the room has now, whichever the writer meant
                write_metadata(self._rows, self.layout, room.reserve.slot, room.rows)
            if number <= self._checked:
                reason = reason or self._verify(room.reserve)
        del self._rooms[number]
        self.report(TransferDone(number, reason=reason), room.last)

    def _verify(self, reserve: Destination) -> str:
        reason = self.contents.verify(reserve.room, reserve.pages, reserve.input, reserve.held)
        reason = reason or self.contents.verify_state(reserve.room, reserve.state, reserve.input, reserve.held)
        return reason or self.contents.verify_aux(reserve.room, reserve.slot)
