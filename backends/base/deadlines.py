"""One wake-up for the deadlines of many transfers, instead of a scheduled event for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from simpy.events import Event

from backends.base.state import Flight
from pdsim.clock import WallClock

__all__ = ["Deadlines"]


class Deadlines:
    """Calls *expire* with each of *flights*, which are neither complete nor failed, when its time is over."""

    def __init__(self, clock: WallClock, flights: Mapping[Flight, None], expire: Callable[[Flight], None]) -> None:
        self._clock = clock
        self._flights = flights
        self._expire = expire
        self._next = math.inf  # the earliest time for which a check is scheduled

    def watch(self, flight: Flight) -> None:
        """Look at *flight* when its timeout has passed."""
        if flight.deadline < self._next:
            self._schedule(flight.deadline)

    def _schedule(self, at: float) -> None:
        self._next = at
        event = self._clock.at(at)
        assert event.callbacks is not None
        event.callbacks.append(self._check)

    def _check(self, _: Event) -> None:
        """Expire what is due, and wait for the next: transfers seldom last until a check, so there are few to ask."""
        self._next, now = math.inf, self._clock.now
        due = [flight for flight in self._flights if flight.deadline <= now]
        for flight in sorted(due, key=lambda flight: flight.deadline):
            self._expire(flight)
        if self._flights:
            self._schedule(min(flight.deadline for flight in self._flights))
