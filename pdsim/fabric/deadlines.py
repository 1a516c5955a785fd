# SPDX-License-Identifier: Apache-2.0
"""Deadlines of many things at the cost of few events.

Nearly all transfers complete before their deadline, so a timer for each would be nothing but load on the clock.
Deadlines are kept in a heap of their own, with one alarm at the first that may still matter.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from pdsim.clock import Alarm, Clock

if TYPE_CHECKING:
    from simpy.events import Event

__all__ = ["Deadlines"]


class Deadlines:
    """Calls ``expire(number)`` at the deadline of every number that is in *live* then.

    Nobody cancels a deadline: a number that is no longer in *live* is forgotten when it comes to the front.  So a
    transfer costs one push and one pop, and an event only when it is the first in the heap.
    """

    def __init__(self, clock: Clock, live: Container[int], expire: Callable[[int], None]) -> None:
        self._clock = clock
        self._live = live
        self._expire = expire
        self._heap: list[tuple[float, int]] = []
        self._alarm = Alarm(clock, self._on_alarm)
        self._at = inf  # what the alarm is set to

    def add(self, at: float, number: int) -> None:
        """Let the deadline of *number* be *at*, in seconds on the clock.

        One that lies before the alarm sets it anew; the old one finds that it does not count any more.
        """
        heappush(self._heap, (at, number))
        if at < self._at:
            if self._alarm.armed:  # too late; it will find that it is not the alarm any more
                self._alarm = Alarm(self._clock, self._on_alarm)
            self._arm(at)

    def _arm(self, at: float) -> None:
        self._at = at
        self._alarm.arm(at)

    def _on_alarm(self, alarm: Event) -> None:
        """Expire what is due, and set the alarm to the first that may still matter."""
        if alarm is not self._alarm:
            return
        now, heap = self._clock.now, self._heap
        self._at = -inf  # `add` leaves the alarm alone meanwhile
        while heap and (heap[0][0] <= now or heap[0][1] not in self._live):
            number = heappop(heap)[1]
            if number in self._live:
                self._expire(number)
        self._at = inf
        if heap:
            self._arm(heap[0][0])
