# SPDX-License-Identifier: Apache-2.0
"""The virtual clock of a job, and what each rank sees of it.

All ranks of a modelled job live in one process and on one queue of events.  Each gets a `RankClock`: the same time
and the same queue, but its events can be told from those of others.  So an exception that nobody handles ends the
rank whose event it was, and to end a rank by force is to drop its events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from itertools import count
from typing import Any

from simpy.events import URGENT

from pdsim.core.clock import Clock, process_event
from pdsim.sim.faults import Ties

__all__ = ["JobClock", "RankClock"]


class RankClock(Clock):
    """What the rank *name* sees of *job*'s clock."""

    def __init__(self, job: JobClock, name: str) -> None:
        super().__init__(job.queue)
        self.name = name
        self.job = job
        self._put_off: list[tuple[Callable[[Any], None] | None, Any]] = []
        if job.ties is not None:
            self.numbers = Ties(job, job.ties, job.counted)

    def stop(self) -> None:
        """Drop every event of this rank from now on: nothing that it waits for happens, nothing of it runs."""
        self.stopped = self.halted = True

    def pause(self, end: float) -> None:
        """Process no event of this rank until the time *end*, as if its process were stopped and went on.

        What comes meanwhile happens then, in the order in which it came.  What the hardware does for it goes on.
        """
        if not self.halted:
            self.paused = self.halted = True
            self._queue.add(end, URGENT, self.numbers, self.job, self._resume, None)

    def put_off(self, function: Callable[[Any], None] | None, argument: Any) -> None:
        """Keep a call or an event, which is due, until the end of the pause; drop it if the rank has ended."""
        if not self.stopped:
            self._put_off.append((function, argument))
        elif function is None:
            argument.callbacks = None  # "processed"

    def _resume(self, _: Any) -> None:
        self.paused, self.halted = False, self.stopped
        put_off, self._put_off = self._put_off, []
        for function, argument in put_off:
            self.call_at(self.now, function, argument)


class JobClock(Clock):
    """The clock that owns the queue.  Its own events, those of the hardware, outlive every rank."""

    def __init__(self, ties: Iterator[float] | None = None) -> None:
        super().__init__()
        self.queue = self._queue
        """Shared with the clocks of the ranks."""
        self.ties = ties
        """Draws, if what is due at one instant on several ranks is to happen in any order."""
        self.counted = count()
        if ties is not None:
            self.numbers = Ties(self, ties, self.counted, each=True)
        self.events = 0
        """Events processed until now."""

    def turn(self, limit: int, live: Sized, crashed: Callable[[RankClock, BaseException], None]) -> None:
        """Process at most *limit* events, until *live* is empty.

        Call ``crashed(clock, exception)`` where a rank leaves an exception unhandled; one of the model itself is
        raised.  Raise `EmptySchedule` if nothing is scheduled any more.
        """
        queue = self._queue
        for _ in range(limit):
            if not live:
                return
            due = queue.take()
            self.events += 1
            clock: Clock = due[3]
            function = due[4]
            if clock.halted:
                clock.put_off(function, due[5])
            elif function is not None:  # more than half of them
                function(due[5])
            elif (error := process_event(due[5])) is not None:
                if not isinstance(clock, RankClock):
                    raise error
                crashed(clock, error)
