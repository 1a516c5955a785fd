# SPDX-License-Identifier: Apache-2.0
"""The virtual clock of a job, and what each rank sees of it.

All ranks of a modelled job live in one process and on one queue of events.  Each gets a `RankClock`: the same time
and the same queue, but its events can be told from those of others.  So an exception that nobody handles ends the
rank whose event it was, and to end a rank by force is to drop its events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from heapq import heappop
from itertools import count
from typing import TYPE_CHECKING, Any

from simpy.core import BoundClass, EmptySchedule
from simpy.events import NORMAL, URGENT

from pdsim.clock import Call, Clock, push
from pdsim.fabric.faults import Ties

if TYPE_CHECKING:
    from simpy.events import Event, Process

__all__ = ["JobClock", "RankClock"]


class RankClock(Clock):
    """What the rank *name* sees of *job*'s clock."""

    def __init__(self, job: JobClock, name: str) -> None:
        self.name = name
        self.job = job
        self._put_off: list[Event | Call] = []
        # Environment.__init__ would make a queue and a time of its own
        self._queue = self.queue = job.queue
        self._eid = job._eid if job.ties is None else Ties(job, job.ties, job.numbers)  # type: ignore[assignment]
        self.order: Iterator[Any] = self._eid
        self._active_proc: Process | None = None
        BoundClass.bind_early(self)

    @property
    def _now(self) -> float:  # type: ignore[override]  # SimPy's own methods read it too
        return self.job.now

    @property
    def now(self) -> float:
        """Seconds since the start of the job."""
        return self.job.now

    def call_at(self, when: float, function: Callable[[Any], None], argument: Any) -> None:
        """As `Clock.call_at`, in one step: most of what is scheduled comes this way."""
        if when < self.job.now:
            raise ValueError(f"at(={when}) must not be before now(={self.job.now})")
        push(self.queue, (when, NORMAL, next(self.order), Call(self, function, argument)))

    def stop(self) -> None:
        """Drop every event of this rank from now on: nothing that it waits for happens, nothing of it runs."""
        self.stopped = self.halted = True

    def pause(self, end: float) -> None:
        """Process no event of this rank until the time *end*, as if its process were stopped and went on.

        What comes meanwhile happens then, in the order in which it came.  What the hardware does for it goes on.
        """
        if not self.halted:
            self.paused = self.halted = True
            push(self._queue, (end, URGENT, next(self._eid), Call(self.job, self._resume, None)))

    def put_off(self, event: Event | Call) -> None:
        """Keep *event*, which is due, until the end of the pause; drop it if the rank has ended."""
        if self.stopped:
            event.callbacks = None  # "processed"
        else:
            self._put_off.append(event)

    def _resume(self, _: Any) -> None:
        self.paused, self.halted = False, self.stopped
        events, self._put_off = self._put_off, []
        for event in events:
            push(self._queue, (self.now, NORMAL, next(self._eid), event))


class JobClock(Clock):
    """The clock that owns the queue.  Its own events, those of the hardware, outlive every rank."""

    now: float = 0  # as SimPy begins; not its property, which takes three times as long, dozens of times a request

    def __init__(self, ties: Iterator[float] | None = None) -> None:
        super().__init__()
        self.queue: list[Any] = self._queue
        """SimPy's own, as an attribute that a compiled clock finds at once; so is `order`."""
        self.ties = ties
        """Draws, if what is due at one instant on several ranks is to happen in any order."""
        self.numbers = count()
        if ties is not None:
            self._eid = Ties(self, ties, self.numbers, each=True)  # type: ignore[assignment]
        self.order: Iterator[Any] = self._eid
        self.events = 0
        """Events processed until now."""

    def call_at(self, when: float, function: Callable[[Any], None], argument: Any) -> None:
        """As `Clock.call_at`, in one step: most of what is scheduled comes this way."""
        if when < self.now:
            raise ValueError(f"at(={when}) must not be before now(={self.now})")
        push(self.queue, (when, NORMAL, next(self.order), Call(self, function, argument)))

    @property
    def _now(self) -> float:  # what SimPy's own methods read and set
        return self.now

    @_now.setter
    def _now(self, now: float) -> None:
        self.now = now

    def turn(self, limit: int, live: Sized, crashed: Callable[[RankClock, BaseException], None]) -> None:
        """Process at most *limit* events, until *live* is empty.

        Call ``crashed(clock, exception)`` where a rank leaves an exception unhandled; one of the model itself is
        raised.  Raise `EmptySchedule` if nothing is scheduled any more.
        """
        queue, pop = self.queue, heappop
        for _ in range(limit):
            if not live:
                return
            if not queue:
                raise EmptySchedule
            entry: tuple[Any, ...] = pop(queue)
            self.now = entry[0]
            self.events += 1
            if type(entry[3]) is Call:  # more than half of them
                call: Call = entry[3]
                if not call.env.halted:
                    call.function(call.argument)
                else:
                    call.env.put_off(call)
                continue
            event = entry[3]
            clock: Clock = event.env
            if clock.halted:
                clock.put_off(event)
                continue
            callbacks, event.callbacks = event.callbacks, None
            for callback in callbacks:
                callback(event)
            if not event.ok and not hasattr(event, "_defused"):
                if not isinstance(clock, RankClock):
                    raise event.value
                crashed(clock, event.value)
