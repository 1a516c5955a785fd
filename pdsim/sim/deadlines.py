# SPDX-License-Identifier: Apache-2.0
"""Deadlines of many things at the cost of few events.

Nearly all transfers complete before their deadline, so a timer for each would be nothing but load on the clock.
Deadlines are kept in order, with one alarm at the first that may still matter.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Container
from math import inf

from pdsim.core.clock import Alarm, Clock

__all__ = ["Deadlines"]


class Deadlines:
    """Calls ``expire(number)`` at the deadline of every number that is in *live* then.

    Nobody cancels a deadline: a number that is no longer in *live* is forgotten when it comes to the front.  So a
    transfer costs one append, for most have equal time, one pop, and an event only when it is the first.
    """

    def __init__(self, clock: Clock, live: Container[int], expire: Callable[[int], None]) -> None:
        self._clock = clock
        self._live = live
        self._expire = expire
        self._ahead: deque[tuple[float, int]] = deque()
        self._alarm = Alarm(clock, self._on_alarm)
        self._at = inf  # what the alarm is set to

    def add(self, at: float, number: int) -> None:
        """Let the deadline of *number* be *at*, in seconds on the clock.

        One that lies before the alarm sets it anew; the old one finds that it does not count any more.
        """
        ahead = self._ahead
        if not ahead or at >= ahead[-1][0]:
            ahead.append((at, number))
        else:
            insort(ahead, (at, number))
        if at < self._at:
            if self._alarm.armed:  # too late; it will find that it is not the alarm any more
                self._alarm = Alarm(self._clock, self._on_alarm)
            self._arm(at)

    def _arm(self, at: float) -> None:
        self._at = at
        self._alarm.arm(at)

    def _on_alarm(self, alarm: Alarm) -> None:
        """Expire what is due, and set the alarm to the first that may still matter."""
        if alarm is not self._alarm:
            return
        now, ahead = self._clock.now, self._ahead
        self._at = -inf  # `add` leaves the alarm alone meanwhile
        while ahead:
            at, number = ahead[0]
            live = number in self._live
            if at > now and live:
                break
            ahead.popleft()
            if live:
                self._expire(number)
        self._at = inf
        if ahead:
            self._arm(ahead[0][0])
