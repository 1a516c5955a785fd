"""The decode side of a handoff, on one rank: pages that wait for bytes, and when they have them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdsim.kv.contents import Contents
from pdsim.kv.layout import KvLayout
from pdsim.kv.mapping import RankMap
from pdsim.kv.messages import Arrival, Arrived, MessageError, Register, Reserve, decode
from pdsim.kv.sender import REGION
from pdsim.transfer import Notification, Rank

__all__ = ["KvReceiver"]


@dataclass(slots=True)
class _Room:
    """A request's handoff as this rank sees it."""

    reserve: Reserve | None = None
    received: int = 0  # writes that arrived
    counts: dict[int, int] = field(default_factory=dict)  # how many each writer made, once its last is here
    last: Arrival | None = None


class KvReceiver:
    """Receives what the prefill ranks of *rank_map* write to a decode rank, the *index*-th of its group *instance*.

    A room is complete when as many writes have arrived as its writers say that they made.  On memory that has contents
    every byte is then compared, for which the room's pages must be known by `reserve`, before or after (the two travel
    different ways).  *report* is called once for each room with `Arrived` and the last `Arrival`.
    """

    def __init__(
        self,
        rank: Rank,
        layout: KvLayout,
        instance: str,
        index: int,
        rank_map: RankMap,
        report: Callable[[Arrived, Arrival], None],
    ) -> None:
        self.layout = layout
        self._rank = rank
        self._instance = instance
        self._index = index
        self._report = report
        self.writers = rank_map.writers(index)
        # a request of fewer pages than there are context-parallel ranks has fewer writers; others have all of them
        self._expected = [rank_map.expected(index, pages) for pages in range(rank_map.prefill.cp + 1)]
        self._rooms: dict[int, _Room] = {}
        self._buffer = rank.device.allocate(layout.size)
        rank.endpoint.register(self._buffer, REGION)
        self._contents = Contents(self._buffer, layout, rank_map.decode.at(index).tp)

    def __len__(self) -> int:
        """Return the number of rooms that are not complete."""
        return len(self._rooms)

    def register(self) -> Register:
        """Return what every one of `writers` needs to know."""
        return Register(self._rank.endpoint.address(), self._instance, self._index, self.layout)

    def reserve(self, message: Reserve) -> None:
        """Take note of the pages that a room owns here, which memory with contents needs to be told."""
        room = self._room(message.room)
        room.reserve = message
        self._check(message.room, room)

    def forget(self, room: int) -> None:
        """Drop what is known of *room*, of which nothing will be written any more."""
        self._rooms.pop(room, None)

    def notice(self, notification: Notification) -> None:
        """Take note of a write that has arrived.  Raise a `MessageError` if its payload is not an `Arrival`."""
        arrival = decode(notification.payload)
        if not isinstance(arrival, Arrival):
            raise MessageError(f"{notification.sender} attached {type(arrival).__name__} to a write, need Arrival")
        room = self._room(arrival.room)
        room.received += 1
        if arrival.count:
            room.counts[arrival.writer] = arrival.count
            if room.last is None or arrival.ended >= room.last.ended:
                room.last = arrival
        self._check(arrival.room, room)

    def _room(self, number: int) -> _Room:
        room = self._rooms.get(number)
        if room is None:
            room = self._rooms[number] = _Room()
        return room

    def _check(self, number: int, room: _Room) -> None:
        if room.last is None or len(room.counts) < self._expected[min(room.last.pages, len(self._expected) - 1)]:
            return
        if room.received < sum(room.counts.values()):
            return
        reason = ""
        if self._rank.device.holds_bytes:
            if room.reserve is None:
                return
            reason = self._verify(room.reserve)
        del self._rooms[number]
        self._report(Arrived(number, reason), room.last)

    def _verify(self, reserve: Reserve) -> str:
        reason = self._contents.verify(reserve.room, reserve.pages, reserve.input)
        reason = reason or self._contents.verify_state(reserve.room, reserve.state, reserve.input)
        return reason or self._contents.verify_aux(reserve.room, reserve.slot)
