# SPDX-License-Identifier: Apache-2.0
"""The two clocks.  A rank's program is a SimPy process and cannot tell which of them it runs on.

`Clock` is virtual: it jumps from event to event, and equal inputs give equal times, bit for bit.  `WallClock` waits:
for real time to reach the next event, and for the completions of real engines, which it learns from *sources*.

Neither knows what is transferred or computed.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Container
from heapq import heappush as _heappush
from typing import Any, Protocol

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, PENDING, Event

from pdsim.errors import NeverPaused

push: Callable[[list[Any], Any], None] = _heappush  # SimPy types its queue's entries by their event class

__all__ = ["LAST", "Alarm", "Clock", "Mailbox", "Source", "WallClock", "fire"]

LAST = NORMAL + 1
"""Priority of an event that comes after all other events of its instant."""


def fire(event: Any, value: Any = None, ok: bool = True) -> None:
    """Trigger *event* and run its callbacks here and now, where `Event.succeed` would take a turn of the queue.

    Only a callback may use it, never a process: what waits for *event* goes on before `fire` returns.
    With ``ok=False``, *value* is the exception that the event fails with; the event must be defused.
    What a rank waits for that is paused runs its callbacks at the end of the pause.
    """
    if event._value is not PENDING:
        raise RuntimeError(f"{event} has been triggered already")
    event._ok = ok
    event._value = value
    if (clock := event.env).paused:
        clock.put_off(event)
        return
    callbacks, event.callbacks = event.callbacks, None
    for callback in callbacks:
        callback(event)


class Clock(simpy.Environment):
    """Virtual time in seconds, from 0.

    One clock for each job on the model, whose ranks share it.  Events of one instant are processed in the order of
    their priority, and then of their being scheduled, so a run depends on nothing but its inputs.
    """

    virtual = True
    stopped = False  # the rank that lives on this clock has ended, and its events are dropped
    paused = False  # it stands still, and its events are put off
    halted = False  # one of the two

    def schedule_at(self, event: Event | Call, at: float, priority: int = NORMAL) -> None:
        """Schedule *event* at the absolute time *at*, which ``schedule(delay=at - now)`` would miss by a rounding.

        Raise a `ValueError` if *at* lies in the past.
        """
        if at < self._now:
            raise ValueError(f"at(={at}) must not be before now(={self._now})")
        push(self._queue, (at, priority, next(self._eid), event))

    def at(self, when: float, value: Any = None) -> Event:
        """Return an event that succeeds with *value* at the absolute time *when*.

        The event counts as triggered from now on, as SimPy's `Timeout` does; a past time is a `ValueError`.
        """
        event = Event(self)
        event._ok = True
        event._value = value
        self.schedule_at(event, when)
        return event

    def call_at(self, when: float, function: Callable[[Any], None], argument: Any) -> None:
        """Call ``function(argument)`` at the absolute time *when*; errors as `schedule_at`."""
        self.schedule_at(Call(self, function, argument), when)

    def put_off(self, event: Event | Call) -> None:
        """Process *event*, which is due, at the end of a pause.

        Raise a `NeverPaused`: of all clocks, only those of a modelled job's ranks are ever paused.
        """
        raise NeverPaused(
            f"{type(event).__name__} put off by {type(self).__name__}, paused={self.paused}, halted={self.halted}: "
            "it has no pauses that could end; set neither of them, and pause a modelled rank with RankClock.pause"
        )

    def settle(self) -> None:
        """Get ready for something that is timed; what a wall clock does for it takes real time, and now is it."""


class Call:
    """A function to be called: what the clock needs of an event, and nothing that anybody could wait for.

    Cheaper than an `Event` with a callback: nobody can wait for it, fail it, or take it back.
    """

    __slots__ = ("argument", "callbacks", "env", "function")
    _ok = True

    def __init__(self, clock: Clock, function: Callable[[Any], None], argument: Any) -> None:
        self.env = clock
        self.callbacks: Any = _CALLING  # not a method of its own, which would make a cycle of each
        self.function = function
        self.argument = argument


def _call(call: Any) -> None:
    """Make *call*."""
    call.function(call.argument)


_CALLING = (_call,)


class Alarm(Event):
    """A wake-up that may be armed again and again, without a new object each time.

    The *wake* callback is called with the alarm.  An alarm must not be armed while it is armed.

    Life: made once; `arm` schedules it; it fires, and may be armed again, also from its own callback.  It cannot be
    taken back: who needs it earlier makes another one and ignores the old.  Arming an armed one is a `RuntimeError`.
    """

    def __init__(self, clock: Clock, wake: Callable[[Event], None], priority: int = NORMAL) -> None:
        self.env = clock
        self.clock = clock
        self.priority = priority
        self._wake = [wake]
        self._ok = True
        self._value = None
        as_event: Any = self  # of which SimPy says that `callbacks` is a list
        as_event.callbacks = None  # "processed": nothing waits in the queue

    @property
    def armed(self) -> bool:
        """Whether the alarm waits to fire."""
        as_event: Any = self
        return as_event.callbacks is not None

    def arm(self, at: float) -> None:
        """Fire at the absolute time *at*."""
        if self.armed:
            raise RuntimeError("this alarm is armed already; let it fire first")
        self.callbacks = self._wake
        self.clock.schedule_at(self, at, self.priority)


class _Getter(Event):
    """A wait for one item.  Its first callback, *unclaimed*, sees to it that no item is lost with its waiter."""

    def __init__(self, clock: Clock, unclaimed: Callable[[Event], None]) -> None:
        super().__init__(clock)
        self.callbacks.append(unclaimed)
        self.waiters = self.callbacks  # SimPy takes the list away before it calls what is in it

    @property
    def given_up(self) -> bool:
        """Whether nobody waits: its process was interrupted, or waited in a condition that came true otherwise."""
        return len(self.waiters) == 1


class Mailbox:
    """Items in the order in which they were put, for one or more processes that wait for them.

    Where `simpy.Store` costs two events an item and a linear `pop(0)`, this costs one event and constant time.  With
    `listen`, a function gets the items instead.

    Invariant: no item is lost and none is given twice, whatever happens to the processes that wait.
    """

    __slots__ = ("_clock", "_items", "_listener", "_waiting")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: deque[Any] = deque()
        self._waiting: deque[_Getter] = deque()
        self._listener: Callable[[Any], None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any) -> None:
        """Hand *item* to the listener or the longest-waiting getter, in a turn of its own, or keep it."""
        if self._listener is not None:
            self._clock.call_at(self._clock.now, self._listener, item)
            return
        getter = self._getter()
        if getter is None:
            self._items.append(item)
        else:
            getter.succeed(item)

    def deliver(self, item: Any) -> None:
        """Do as `put` does, without an event of its own.  Like `fire`, only for callbacks."""
        if self._listener is not None:
            self._listener(item)
            return
        getter = self._getter()
        if getter is None:
            self._items.append(item)
        else:
            fire(getter, item)

    def listen(self, listener: Callable[[Any], None]) -> None:
        """Call *listener*, which must not raise, with every item from now on, those that are kept first.

        What `get` returned before gets nothing any more.  Raise a `RuntimeError` if there is a listener already.
        """
        if self._listener is not None:
            raise RuntimeError("this mailbox has a listener already")
        self._listener = listener
        for item in self.drain():
            self.put(item)

    def get(self) -> Event:
        """Return an event that succeeds with the next item.

        Yield it at once, alone or in a condition: a getter that nobody waits for counts as given up, and the item
        goes to the next.
        """
        getter = _Getter(self._clock, self._unclaimed)
        if self._items:
            getter.succeed(self._items.popleft())
        else:
            while self._waiting and self._waiting[0].given_up:  # lest a poll with a deadline piles them up
                self._waiting.popleft()
            self._waiting.append(getter)
        return getter

    def _getter(self) -> _Getter | None:
        while self._waiting:
            getter = self._waiting.popleft()
            if not getter.given_up:
                return getter
        return None

    def _unclaimed(self, event: Event) -> None:
        """Keep the item of a getter that was given up between its trigger and now."""
        assert isinstance(event, _Getter)
        if not event.given_up:
            return
        getter = self._getter()
        if getter is None:
            self._items.appendleft(event.value)
        else:
            getter.succeed(event.value)

    def drain(self) -> list[Any]:
        """Return all items that are here now, without waiting."""
        items = list(self._items)
        self._items.clear()
        return items


class Source(Protocol):
    """Something outside the process that the wall clock must look at: a socket, an engine's completion queue.

    A source is looked at on the clock's thread.  It must not block, and must not raise.
    """

    def poll(self) -> bool:
        """Trigger the events whose time has come, without blocking; return whether there were any."""

    def fileno(self) -> int | None:
        """Return a descriptor that becomes readable when `poll` has work, or None if only polling can tell.

        The clock asks once, when it is told to watch.
        """

    def busy(self) -> bool:
        """Return whether a source without a descriptor has anything outstanding, so that it must be polled often."""


class WallClock(Clock):
    """Real time in seconds since *origin* (a value of `time.monotonic`), the same for every process of one host.

    Between events it looks at its sources, and sleeps until the next event or until a source's descriptor is
    readable. Sources that can only be polled are looked at every *nap* seconds while they are busy, and without a
    pause for the first *spin* seconds, because a completion is most often near.  Meanwhile the kernel is asked for
    readable descriptors every *nap* seconds: it takes as long to answer as an engine, which would have to wait.

    `idle`, if it is set, is called ahead of a sleep of a millisecond or more, and by `settle`.  It returns in how
    many seconds it has something to do again, which is 0 if it has not finished.
    """

    virtual = False

    def __init__(self, origin: float | None = None, spin: float = 50e-6, nap: float = 20e-6) -> None:
        super().__init__()
        self.origin = time.monotonic() if origin is None else origin
        self.spin = spin
        self.nap = nap
        # both are replaced, never changed: a poll may watch and unwatch
        self._polled: tuple[Source, ...] = ()  # sources without a descriptor
        self._told: dict[Source, int] = {}  # the others' descriptors
        self._listen_at = 0.0  # when to ask the kernel again, on the system's clock
        self._calls: deque[Callable[[], None]] = deque()
        self.idle: Callable[[], float] | None = None
        self._idle_due = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._now = self.now

    @property
    def now(self) -> float:
        """Seconds since the origin, read from the system's monotonic clock."""
        return time.monotonic() - self.origin

    def watch(self, source: Source) -> None:
        """Look at *source* between events from now on.

        Watching it again changes nothing.  Sources with a descriptor cost nothing until that is readable.
        """
        fd = source.fileno()
        if fd is None:
            if source not in self._polled:
                self._polled = (*self._polled, source)
        elif source not in self._told:
            self._epoll.register(fd, select.EPOLLIN)
            self._told = {**self._told, source: fd}

    def unwatch(self, source: Source) -> None:
        """Stop looking at *source*, before its descriptor is closed.  Not an error if it is not watched."""
        self._polled = tuple(other for other in self._polled if other is not source)
        if source in self._told:
            self._epoll.unregister(self._told[source])
            self._told = {other: fd for other, fd in self._told.items() if other is not source}

    def call(self, function: Callable[[], None]) -> None:
        """Run *function* on the clock's thread.  The only method that other threads may use.

        It wakes the clock if that sleeps; functions are called in the order of the calls, before sources are looked
        at.
        """
        self._calls.append(function)
        os.eventfd_write(self._wake, 1)

    def settle(self) -> None:
        """Do what is for idle times, if it is due, until it has finished."""
        while self.idle is not None and (now := self.now) >= self._idle_due:
            self._idle_due = now + self.idle()

    def scheduled(self) -> int:
        """Return how many events have been scheduled on this clock so far, calls of this method included."""
        return next(self._eid)

    def close(self) -> None:
        """Give the clock's descriptors back."""
        self._epoll.close()
        os.close(self._wake)

    def schedule(self, event: Event, priority: int = NORMAL, delay: float = 0) -> None:
        """Schedule *event* *delay* seconds from real now; a zero delay keeps SimPy's order within the instant."""
        at = self.now + delay if delay else self._now
        push(self._queue, (at, priority, next(self._eid), event))

    def schedule_at(self, event: Event | Call, at: float, priority: int = NORMAL) -> None:
        """Schedule *event* at *at*; a time that has passed meanwhile means at once."""
        push(self._queue, (max(at, self._now), priority, next(self._eid), event))

    def step(self) -> None:
        """Wait for the next event and process it.

        Raise `EmptySchedule` if nothing is scheduled and no source is left that could schedule anything.
        """
        self._look()
        idle_since = self._now
        while not self._queue or self._queue[0][0] > self._now:
            if not (self._queue or self._polled or self._told):
                raise EmptySchedule
            if self._now - idle_since > self.spin or not self._busy():
                self._sleep()
            if self._look():
                idle_since = self._now
        super().step()

    def _busy(self) -> bool:
        """Return whether only polling can tell when something ends; else to spin only keeps others waiting."""
        for source in self._polled:  # noqa: SIM110 a generator takes as long as all of a turn
            if source.busy():
                return True
        return False

    def _look(self) -> bool:
        """Let all sources act; return whether any had something to tell."""
        now = time.monotonic()
        self._now = now - self.origin
        found = False
        while self._calls:
            self._calls.popleft()()
            found = True
        for source in self._polled:
            found |= source.poll()
        if now >= self._listen_at:
            self._listen_at = now + self.nap
            if ready := self._epoll.poll(0):
                found |= self._hear({fd for fd, _ in ready})
        return found

    def _hear(self, readable: Container[int]) -> bool:
        """Let the sources act whose descriptors are *readable*, in the order in which they are watched."""
        found = False
        for source, fd in self._told.items():
            if fd in readable:
                found |= source.poll()
        return found

    def _sleep(self) -> None:
        """Sleep until a descriptor is readable or the next event is due.

        Whole milliseconds are slept in ``epoll``, which a descriptor ends; shorter times in naps.
        """
        until = self._queue[0][0] - self.now if self._queue else 1.0
        if self._busy():
            until = min(until, self.nap)
        if until >= 1e-3 and self.idle is not None:
            if self.now >= self._idle_due:
                self._idle_due = self.now + self.idle()
            left = self._idle_due - self.now
            until = min(until, max(left, 2e-3)) if left > 0 else 0.0
        if until >= 1e-3:
            ready = self._epoll.poll(until - 1e-3)  # which rounds up to whole milliseconds
            if any(fd == self._wake for fd, _ in ready):
                os.eventfd_read(self._wake)  # here and nowhere else: what is to be called is called before all else
        elif until > 0:
            time.sleep(min(until, self.nap))
        self._listen_at = 0.0
