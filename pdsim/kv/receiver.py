# SPDX-License-Identifier: Apache-2.0
"""The decode side of a pushed handoff, on one rank: pages that wait for bytes, and the staging ring.

Heads that two ranks do not keep alike may be staged: a chunk is gathered by its writer (`pdsim.kv.push`), written as
one block into a slot of the reader's `Ring`, and scattered into pages; see `StagingReceiver`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pdsim.core.clock import ExpiringMap
from pdsim.core.errors import MessageError, OutOfMemory, TransferError
from pdsim.kv.contents import KvPool
from pdsim.kv.layout import STAGING, KvLayout, RankMap, write_metadata
from pdsim.kv.messages import (
    OVER,
    Arrival,
    Destination,
    RankQuiesced,
    StagingRelease,
    StagingReply,
    StagingRequest,
    TransferDone,
    decode,
    encode,
)
from pdsim.kv.pages import Pages
from pdsim.kv.plan import BlockPlan, block_plans
from pdsim.kv.policy import Staging
from pdsim.transfer import Notification


@dataclass(slots=True)
class _IncomingRoom:
    """A request's handoff as this rank sees it."""

    reserve: Destination | None = None
    received: int = 0  # writes that arrived
    counts: dict[int, int] = field(default_factory=dict)  # how many each writer made, once its last is here
    last: Arrival | None = None
    rows: tuple[bytes, ...] = ()  # of metadata that came as a message
    reason: str = ""  # why what arrived cannot be used


class KvReceiver:
    """Receives what the prefill ranks of *rank_map* write into the *pool* of a decode rank.

    A room is complete when as many writes have arrived as its writers say that they made, those to the staging ring
    scattered.  On memory that has contents it must also be known by `reserve`, before or after (the two travel
    different ways), and is compared, up to room *checked*.  *report* is called once for each room with
    `TransferDone` and the last `Arrival`, *quiet* once for each room to `forget`.

    What arrives within `OVER` seconds of `forget` is ignored, and counted in *ignored*.  *held* is until when what
    has arrived holds the scheduler's thread, on the clock.
    """

    def __init__(
        self,
        pool: KvPool,
        rank_map: RankMap,
        report: Callable[[TransferDone, Arrival], None],
        quiet: Callable[[RankQuiesced], None],
        staging: Staging | None = None,
    ) -> None:
        rank, policy, index = pool.rank, pool.policy, pool.index
        self.pool = pool
        self.layout = pool.layout
        self.report = report
        self.writers = list(rank_map.writers(index))
        self.ignored = 0
        self.held = 0.0
        self._rank = rank
        self._quiet = quiet
        # a request of fewer pages than there are context-parallel ranks has fewer writers; others have all of them
        self._expected = [rank_map.expected(index, pages) for pages in range(rank_map.prefill.cp + 1)]
        self._rooms: dict[int, _IncomingRoom] = {}
        self._over: ExpiringMap[None] = ExpiringMap(rank.clock, OVER)
        self._notice = policy.notice
        self._stall = policy.metadata_stall if policy.metadata_by != "control" else 0.0
        self.landing: StagingReceiver | None = None
        if staging is not None:
            self.landing = StagingReceiver(pool, rank_map, staging, self.arrive, quiet)

    def __len__(self) -> int:
        """Return the number of rooms that are not complete."""
        return len(self._rooms)

    def reserve(self, message: Destination) -> None:
        """Record the pages that a room owns here, for memory with contents."""
        room = self._rooms.setdefault(message.room, _IncomingRoom())
        room.reserve = message
        self._check(message.room, room)

    def forget(self, room: int) -> None:
        """Drop what is known of *room*; `RankQuiesced` follows once nothing of it is copied any more."""
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

    def notice(self, notification: Notification) -> None:
        """Count a write that has arrived.  Raise a `MessageError` if its payload is not an `Arrival`."""
        arrival = decode(notification.payload)
        if not isinstance(arrival, Arrival):
            raise MessageError(f"{notification.sender} attached {type(arrival).__name__} to a write, need Arrival")
        self._hold(self._notice * notification.times)
        if arrival.chunk < 0 or self.landing is None:
            self.arrive(arrival, count=notification.times)
        else:
            self.landing.scatter(arrival)

    def arrive(self, arrival: Arrival, reason: str = "", count: int = 1) -> None:
        """Count *count* writes of *arrival*, unless its room is forgotten; a message may bring metadata.

        *reason* says why the bytes cannot be used.
        """
        if arrival.room in self._over:
            self.ignored += count
            return
        room = self._rooms.setdefault(arrival.room, _IncomingRoom())
        room.rows = arrival.rows or room.rows
        room.received += count
        room.reason = room.reason or reason
        if arrival.count:
            room.counts[arrival.writer] = arrival.count
            if room.last is None or arrival.ended >= room.last.ended:
                room.last = arrival
        self._check(arrival.room, room)

    def _hold(self, seconds: float) -> None:
        if seconds and self._rank.clock.virtual:  # a real thread takes what it takes
            self.held = max(self.held, self._rank.clock.now) + seconds

    def _check(self, number: int, room: _IncomingRoom) -> None:
        # On memory with contents it also waits for `reserve`, stores metadata that came as a message, and compares.
        if room.last is None or len(room.counts) < self._expected[min(room.last.pages, len(self._expected) - 1)]:
            return
        if room.received < sum(room.counts.values()):
            return
        reason, there = room.reason, room.reserve
        if self._rank.device.holds_bytes:
            if there is None:
                return
            if room.rows:  # into the slot that the room has now, whichever the writer meant
                write_metadata(self.pool.rows, self.layout, there.slot, room.rows)
            own = there.room, there.input, there.pages, there.state, there.held, there.slot
            reason = reason or self.pool.verify(*own)
        del self._rooms[number]
        self._hold(self._stall)
        self.report(TransferDone(number, reason=reason), room.last)


# --- the staging ring ----------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """*size* bytes of a ring from *position* on; positions only grow, ``position % ring.size`` is the offset."""

    position: int
    size: int


class Ring:
    """*size* bytes, handed out going round: the next slot begins where the last one ended, or at the next gap.

    Slots and questions have a *key* each.  Whoever calls `release` or `withdraw` calls `advance` afterwards.  *used*
    is bytes in slots, *peak* the most at one time.

    >>> ring = Ring(100)
    >>> ring.request("a", 60), ring.request("b", 60), ring.request("c", 10)  # b waits, and c behind it
    (Slot(position=0, size=60), None, None)
    >>> ring.release("a")
    >>> list(ring.advance())
    [('b', Slot(position=100, size=60)), ('c', Slot(position=160, size=10))]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.head = 0  # position where the next slot may begin
        self.used = 0
        self.peak = 0
        self.slots: dict[Any, Slot] = {}
        self._line: dict[Any, int] = {}  # in order of arrival

    def __len__(self) -> int:
        """Return the number of slots and questions."""
        return len(self.slots) + len(self._line)

    def request(self, key: Hashable, size: int) -> Slot | None:
        """Return a slot of *size* bytes for *key*, or None: then it stands in line until `advance` yields it.

        Raise `OutOfMemory` if the ring could never hold it, a `ValueError` if *key* is taken.
        """
        if key in self.slots or key in self._line:
            raise ValueError(f"{key} has a slot already, or waits for one")
        if size > self.size:
            raise OutOfMemory(f"a slot of {size} bytes exceeds the ring of {self.size}; raise kv.staging_ring")
        slot = None if self._line else self._give(key, size)
        if slot is None:
            self._line[key] = size
        return slot

    def advance(self) -> Iterator[tuple[Any, Slot]]:
        """Give slots to the first in line for as long as they fit, and yield each."""
        while self._line:
            key, size = next(iter(self._line.items()))
            slot = self._give(key, size)
            if slot is None:
                return
            del self._line[key]
            yield key, slot

    def release(self, key: Hashable) -> None:
        """Free the slot of *key*.  Raise a `KeyError` if it has none: nothing is freed twice."""
        self.used -= self.slots.pop(key).size

    def withdraw(self, key: Hashable) -> bool:
        """Take *key* out of the line; return whether it stood there."""
        return self._line.pop(key, None) is not None

    def offset(self, key: Hashable) -> int:
        """Return where the slot of *key* begins in the ring's memory."""
        return self.slots[key].position % self.size

    def _give(self, key: Hashable, size: int) -> Slot | None:
        position = self._place(size)
        if position is None:
            return None
        slot = self.slots[key] = Slot(position, size)
        self.head = position + size
        self.used += size
        self.peak = max(self.peak, self.used)
        return slot

    def _place(self, size: int) -> int | None:
        turns, first = divmod(self.head, self.size)
        if not self.slots:  # whatever lies between here and the end of the round is nobody's
            return self.head if first + size <= self.size else (turns + 1) * self.size
        taken = sorted((slot.position % self.size, slot.size) for slot in self.slots.values())
        for low, turn in ((first, turns), (0, turns + 1)):
            offset = self._gap(taken, low, size)
            if offset is not None:
                return turn * self.size + offset
        return None

    def _gap(self, taken: list[tuple[int, int]], low: int, size: int) -> int | None:
        for offset, length in taken:
            if offset + length <= low:
                continue
            if low + size <= offset:
                return low
            low = offset + length
        return low if low + size <= self.size else None


_Key = tuple[int, int, int]  # room, writer, chunk


@dataclass(slots=True, eq=False)
class _Question:
    """A chunk for which a slot was asked."""

    key: _Key
    sender: str
    pages: Pages
    arrival: Arrival | None = None  # of the block, which is in its slot
    scattering: bool = False
    forgotten: bool = False  # the pages may be another room's by now


class StagingReceiver:
    """The staging ring of the decode rank that has *pool*.

    `ask` is answered with a refusal, or a slot at once or later; `scatter` follows when the block has arrived, and
    *arrive* is called with its `Arrival` and "", or the text of an error, after which the slot is free.  *quiet* is
    called once for each room to `forget`, as soon as nothing of it is being scattered.  *refused* counts questions
    that were answered with no.

    **Safety.**  A slot is granted when its bytes are free, not before, so a writer that has it may write: there is
    no watermark that could be stale.  It is freed by the scatter, or by the block's arrival if the room is over; by
    the writer (`give_back`) once nothing of the room moves there, or with proof that the writer is dead (`sever`),
    for only they know; until then the ring allocates around it.  Which way a chunk goes is decided once, by the
    answer to its question.

    **Liveness.**  Slots are granted first come, first served, after at most `Staging.wait`.  A chunk that holds one
    needs nothing but its forward, which has begun, and its place in a queue of chunks that need no slot any more.
    The first in line fits at the latest when the ring is empty: what exceeds the ring is refused at once.
    """

    def __init__(
        self,
        pool: KvPool,
        rank_map: RankMap,
        staging: Staging,
        arrive: Callable[[Arrival, str], None],
        quiet: Callable[[RankQuiesced], None],
    ) -> None:
        rank = pool.rank
        self.ring = Ring(staging.ring)
        rank.gauge("ring", rank.name, lambda: self.ring.used / self.ring.size)
        self.refused = 0
        self._rank = rank
        self._pool = pool.region
        self._wait = staging.wait
        self._by_writer = staging.scatter == "writer"
        self._arrive = arrive
        self._quiet = quiet
        self._region = rank.endpoint.register(rank.device.allocate(staging.ring), STAGING)
        self._plans = dict(_plans(pool.layout, pool.index, rank_map))
        self._questions: dict[_Key, _Question] = {}

    def __len__(self) -> int:
        """Return the number of questions and slots that are not done with."""
        return len(self._questions)

    def ask(self, sender: str, message: StagingRequest) -> None:
        """Answer when there is room, in the order of the questions, or refuse what waits or takes too much."""
        key = message.room, message.writer, message.chunk
        self._questions[key] = _Question(key, sender, message.pages)
        try:
            slot = self.ring.request(key, message.size)
        except OutOfMemory:
            self._refuse(key)
            return
        if slot is None:
            self._rank.clock.call_at(self._rank.clock.now + self._wait, self._expire, key)
        else:
            self._answer(key, slot.position)

    def scatter(self, arrival: Arrival) -> None:
        """Copy the block that has arrived into its pages; free its slot at once if its room was forgotten.

        With ``scatter="chunk"`` it waits for the blocks of the other writers that have a slot for this chunk.
        """
        key = arrival.room, arrival.writer, arrival.chunk
        if key not in self.ring.slots:
            return
        question = self._questions[key]
        if question.forgotten:
            self._drop(key)
            self._advance()
            return
        question.arrival = arrival
        together = [question] if self._by_writer else list(self._waiting(arrival))
        if all(other.arrival is not None for other in together):
            for other in together:
                self._scatter(other)

    def give_back(self, message: StagingRelease) -> None:
        """Free a writer's slots of a quiesced room; those being scattered, when that ends."""
        self._drop_all(lambda question: question.key[:2] == (message.room, message.writer))

    def sever(self, rank: str) -> None:
        """Free all slots of prefill *rank*, proven to write no more."""
        self._drop_all(lambda question: question.sender == rank)

    def forget(self, room: int) -> None:
        """Scatter nothing more of *room*, and drop its questions; `RankQuiesced` follows the last copy of it.

        A block that waits for those of other writers is dropped too: its writer is done, and gives nothing back.
        """
        for question in list(self._questions.values()):
            if question.key[0] == room:
                question.forgotten = True
                waits = question.arrival is not None and not question.scattering
                if waits or question.key not in self.ring.slots:
                    self._drop(question.key)
        self._advance()
        self._quiet_if_still(room)

    def _waiting(self, arrival: Arrival) -> Iterator[_Question]:
        for key, question in self._questions.items():
            same = key[0] == arrival.room and key[2] == arrival.chunk
            if same and key in self.ring.slots and not question.scattering:
                yield question

    def _scatter(self, question: _Question) -> None:
        assert question.arrival is not None
        question.scattering = True
        plan, offset = self._plans[question.arrival.writer], self.ring.offset(question.key)
        try:
            copied = self._rank.device.copy(plan.scatter(self._region, offset, self._pool, question.pages))
        except TransferError as error:
            self._scattered(question, f"{type(error).__name__}: {error}")
            return
        copied.callbacks.append(lambda _: self._scattered(question, ""))

    def _scattered(self, question: _Question, reason: str) -> None:
        self._drop(question.key)
        self._advance()
        if question.forgotten:
            self._quiet_if_still(question.key[0])
        else:
            assert question.arrival is not None
            self._arrive(question.arrival, reason)

    def _quiet_if_still(self, room: int) -> None:
        if not any(question.scattering for key, question in self._questions.items() if key[0] == room):
            self._quiet(RankQuiesced(room))

    def _expire(self, key: _Key) -> None:
        if self.ring.withdraw(key):
            self._refuse(key)
            self._advance()

    def _refuse(self, key: _Key) -> None:
        self.refused += 1
        self._answer(key, -1)
        del self._questions[key]

    def _answer(self, key: _Key, position: int) -> None:
        room, _, chunk = key
        self._rank.channel.send(self._questions[key].sender, encode(StagingReply(room, chunk, position)))

    def _advance(self) -> None:
        for key, slot in self.ring.advance():
            self._answer(key, slot.position)

    def _drop_all(self, belongs: Callable[[_Question], bool]) -> None:
        for key, question in list(self._questions.items()):
            if belongs(question) and not question.scattering:
                self._drop(key)
        self._advance()

    def _drop(self, key: _Key) -> None:
        del self._questions[key]
        if not self.ring.withdraw(key):
            self.ring.release(key)


def _plans(layout: KvLayout, index: int, rank_map: RankMap) -> Iterator[tuple[int, BlockPlan]]:
    # Of each prefill rank by index; those that keep the same heads write pages directly, and need no plan.
    prefill = rank_map.prefill
    for writer, part in rank_map.writers(index).items():
        if part.heads is not None and "kv" in part.components:
            theirs = replace(layout, tp=prefill.tp, pp=prefill.pp, stage=prefill.at(writer).pp)
            yield writer, block_plans(theirs, layout, part.heads)[1]
