"""One wake-up for the deadlines of many transfers, instead of a scheduled event for each."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

from simpy.events import Event

from backends.state import Flight
from pdsim.clock import WallClock

__all__ = ["Deadlines"]


class Deadlines:
    """Calls *expire* with each transfer that is neither complete nor failed when its time is over."""

    def __init__(self, clock: WallClock, expire: Callable[[Flight], None]) -> None:
        self._clock = clock
        self._expire = expire
        self._heap: list[tuple[float, int, Flight]] = []
        self._sequence = count()
        self._next = math.inf  # the earliest time for which a check is scheduled

    def watch(self, flight: Flight) -> None:
        """Look at *flight* when its timeout has passed."""
        at = flight.submitted + flight.timeout
        heapq.heappush(self._heap, (at, next(self._sequence), flight))
        if at < self._next:
            self._schedule(at)

    def _schedule(self, at: float) -> None:
        self._next = at
        event = self._clock.at(at)
        assert event.callbacks is not None
        event.callbacks.append(self._check)

    def _check(self, _: Event) -> None:
        self._next = math.inf
        while self._heap:
            at, _sequence, flight = self._heap[0]
            if not flight.triggered and at > self._clock.now:
                self._schedule(at)
                return
            heapq.heappop(self._heap)
            if not flight.triggered:
                self._expire(flight)
