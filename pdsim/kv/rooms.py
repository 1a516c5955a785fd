# SPDX-License-Identifier: Apache-2.0
"""The state of a room, on one rank and of a group, and for how long rooms wait, stall and are remembered."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from itertools import takewhile
from typing import Any, Generic, TypeVar

from pdsim.core.clock import Clock
from pdsim.kv.pages import PagePool

Value = TypeVar("Value")

OVER = 600.0
"""Seconds for which a room that failed is remembered, so that no late message revives it: far longer than any
message or notification takes, and short enough to keep few of them."""


class Status(IntEnum):
    """The states of a handoff, in order; the minimum over the ranks of a group is the status of the group.

    ::

        BOOTSTRAPPING -> WAITING -> TRANSFERRING -> SUCCESS
              |             |            |
              +-------------+------------+--------> FAILED

    SUCCESS and FAILED absorb (`advance`); invariant I1 of `docs/faults.md` checks that.
    """

    FAILED = 0
    BOOTSTRAPPING = 1  # the other side has not been heard of
    WAITING = 2  # for input: pages are known, no bytes have moved
    TRANSFERRING = 3
    SUCCESS = 4


def advance(old: Status, new: Status) -> Status:
    """Return the status after *old* when *new* is reported: FAILED and SUCCESS absorb, and nothing goes back.

    >>> advance(Status.TRANSFERRING, Status.WAITING).name, advance(Status.FAILED, Status.SUCCESS).name
    ('TRANSFERRING', 'FAILED')
    """
    if old is Status.FAILED or old is Status.SUCCESS:
        return old
    return new if new is Status.FAILED or new > old else old


class Consensus:
    """The status of one room in a group of *size* ranks, kept by its leader: the least that any of them has.

    `succeed` by each rank, or `fail` once and then `settle` by each rank.  SGLang takes that minimum by a collective
    before each step of the scheduler.  Raise a `ValueError` for a rank that the group does not have.
    """

    __slots__ = ("_reported", "_size", "status")

    def __init__(self, size: int) -> None:
        self._size = size
        self._reported: set[int] = set()
        self.status = Status.WAITING

    @property
    def over(self) -> bool:
        """Whether the status is final: it never changes any more."""
        return self.status is Status.FAILED or self.status is Status.SUCCESS

    def succeed(self, rank: int) -> bool:
        """Record that *rank* has done its part, however often it says so; return whether that ends the room."""
        if self.over or not self._is_last(rank):
            return False
        self.status = Status.SUCCESS
        return True

    def fail(self) -> bool:
        """Record that the room has failed on some rank; return whether that ends it, which it does once."""
        if self.over:
            return False
        self.status = Status.FAILED
        self._reported.clear()
        return True

    def settle(self, rank: int) -> bool:
        """Record that of the failed room nothing moves on *rank*; return whether that was the last to say so."""
        return self.status is Status.FAILED and rank not in self._reported and self._is_last(rank)

    def _is_last(self, rank: int) -> bool:
        if not 0 <= rank < self._size:
            raise ValueError(f"rank {rank} is not one of {self._size}")
        self._reported.add(rank)
        return len(self._reported) == self._size


class Timers:
    """A time limit of *seconds* for each of many rooms; *expire* is called with one that reaches it.

    All have the same limit, so they expire in the order in which they were added, and one event serves them all.
    Without a limit (0 seconds) nothing ever expires.
    """

    def __init__(self, clock: Clock, seconds: float, expire: Callable[[int], None]) -> None:
        self._clock = clock
        self._seconds = seconds
        self._expire = expire
        self._limits: dict[int, float] = {}
        self._armed = False

    def __len__(self) -> int:
        """Return how many rooms have a limit."""
        return len(self._limits)

    def add(self, room: int) -> None:
        """Begin the time of *room*."""
        if self._seconds:
            self._limits[room] = self._clock.now + self._seconds
            self._arm()

    def drop(self, room: int) -> None:
        """End the time of *room*, if it has begun."""
        self._limits.pop(room, None)

    def _arm(self) -> None:
        if self._limits and not self._armed:
            self._armed = True
            self._clock.call_at(next(iter(self._limits.values())), self._ring, None)

    def _ring(self, _: Any) -> None:
        self._armed = False
        now = self._clock.now
        for room, _limit in list(takewhile(lambda entry: entry[1] <= now, self._limits.items())):
            if self._limits.pop(room, None) is not None:  # or *expire* of another one has dropped it
                self._expire(room)
        self._arm()


class ExpiringMap(Generic[Value]):
    """Values by room that are forgotten *seconds* after they were set: what came for a room that may never come.

    What is too old is dropped when the next value is set, at a cost that does not grow with the number of rooms.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._values: dict[int, tuple[float, Value]] = {}

    def __len__(self) -> int:
        """Return how many are remembered, some of them too old."""
        return len(self._values)

    def __contains__(self, room: int) -> bool:
        """Return whether *room* is remembered."""
        entry = self._values.get(room)
        return entry is not None and self._clock.now < entry[0]

    def set(self, room: int, value: Value) -> None:
        """Remember *value* for *room* from now on, and forget what is too old."""
        self._values.pop(room, None)  # to the end: in order of time
        self._values[room] = (self._clock.now + self._seconds, value)
        while (oldest := next(iter(self._values))) not in self:
            del self._values[oldest]

    def get(self, room: int) -> Value | None:
        """Return what is remembered for *room*, or None."""
        return self._values[room][1] if room in self else None

    def pop(self, room: int) -> Value | None:
        """Return what is remembered for *room*, or None, and forget it."""
        value = self.get(room)
        self._values.pop(room, None)
        return value


class QuarantineStall:
    """For how long nothing but pages in quarantine has been in the way of a queue.

    They come back once it is proven that nobody writes to them, so it is worth waiting for them, but only *seconds*
    from when the queue was blocked first; then *wake* is called.
    """

    def __init__(self, clock: Clock, seconds: float, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._seconds = seconds
        self._wake = wake
        self._until: float | None = None

    def too_long(self) -> bool:
        """Return whether the queue, which is blocked now, has been for too long, so that its first must give up."""
        if self._until is None:
            self._until = self._clock.now + self._seconds
            self._clock.call_at(self._until, lambda _: self._wake(), None)
        return self._clock.now >= self._until

    @property
    def waiting(self) -> bool:
        """Whether the queue is blocked, and not for too long yet."""
        return self._until is not None and self._clock.now < self._until

    def clear(self) -> None:
        """Record that the queue is not blocked, or by rooms that will be over by themselves."""
        self._until = None


def out_of_memory(pages: PagePool, count: int, slot: bool = True) -> str:
    """Return why a room that needs *count* pages, and has a *slot* for metadata or not, fails."""
    if not slot:
        what = "all slots for metadata"
    else:
        what = f"{pages.used} of {pages.pages} pages" if pages.free < count else "rows of state"
    return f"OutOfMemory: {what} are in quarantine"
