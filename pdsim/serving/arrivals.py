# SPDX-License-Identifier: Apache-2.0
"""When requests arrive at a router: by the clock, or when the answer that a user waits for has come.

Open loops give times, and a request comes whatever happens; in closed loops a user thinks after an answer, so the
offered load follows from how fast requests are served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simpy.events import Event

from pdsim.core.native_class import mypyc_attr
from pdsim.serving.rank_process import RankProcess
from pdsim.serving.routed_requests import RoutedRequest

__all__ = ["Arrivals"]


@mypyc_attr(allow_interpreted_subclasses=True)
class Arrivals:
    """Calls *arrive* with each of *requests* when it comes, and *idle* whenever no further one is due by itself.

    *after* has, for each request, the number of the one whose end its user waits for, -1 for none; it is empty if
    nobody waits.  The arrival of a request that waits is its think time, in seconds after that end (`follow`), that
    of any other seconds after `begin`.  Nothing arrives once *process*, the router, has ended.  One event is set at
    a time, so *requests* may be any number, and those without *after* must be in order of arrival.
    """

    def __init__(
        self,
        process: RankProcess,
        requests: Sequence[RoutedRequest],
        after: Sequence[int],
        arrive: Callable[[RoutedRequest], None],
        idle: Callable[[], None],
    ) -> None:
        self.start = 0.0  # when the first could have arrived, in seconds on the clock
        self._process = process
        self._requests = requests
        self._arrive = arrive
        self._idle = idle
        self._next = 0  # the request that arrives next
        self._waiting: dict[int, list[int]] = {}  # by the number of the one whose end they come after
        self._open: list[int] | None = None  # those that wait for no other
        if after:
            for number, earlier in enumerate(after):
                if earlier >= 0:
                    self._waiting.setdefault(earlier, []).append(number)
            self._open = [number for number, earlier in enumerate(after) if earlier < 0]
        self._later = sum(map(len, self._waiting.values()))  # requests whose users wait for an answer, or think
        self.times = [float(request.arrival) for request in requests] if after else None
        """Seconds after `start` at which each has arrived, where users wait; until then its think time."""

    @property
    def over(self) -> bool:
        """Whether no further request can arrive: all that come by themselves have, and nobody waits or thinks."""
        return self._next == self._count and not self._later

    @property
    def _count(self) -> int:
        """How many requests arrive by themselves."""
        return len(self._requests) if self._open is None else len(self._open)

    def begin(self, start: float) -> None:
        """Let requests arrive, whose times count from *start*, which is now.

        *arrive* is called for all that are due at once, before this returns.
        """
        self.start = start
        self._advance(None)

    def follow(self, request: RoutedRequest) -> None:
        """Let the requests arrive that come after *request*, which is over, each after its think time.

        It counts from when the answer had reached the user, which may be later than now on the way from the
        server, or earlier where the router hears of it late; a request never arrives in the past.
        """
        clock = self._process.clock
        for number in self._waiting.pop(request.number, ()):
            follower = self._requests[number]
            ended = request.finished.finished if request.finished is not None else clock.now
            arrival = max(clock.now, ended + follower.arrival)
            assert self.times is not None
            follower.arrival = self.times[number] = arrival - self.start
            clock.call_at(arrival, lambda request: self._process.guard(self._come_later, request), follower)

    def _advance(self, _: Event | None) -> None:
        """Let all arrive that are due, and wake when the next is; call *idle* once none is left."""
        clock = self._process.clock
        while self._next < self._count and not self._process.has_ended:
            request = self._requests[self._next if self._open is None else self._open[self._next]]
            arrival = self.start + request.arrival
            if arrival > clock.now:
                event = clock.at(arrival)
                assert event.callbacks is not None
                event.callbacks.append(self._advance)
                return
            self._next += 1
            self._arrive(request)
        self._idle()

    def _come_later(self, request: RoutedRequest) -> None:
        self._later -= 1
        self._arrive(request)
