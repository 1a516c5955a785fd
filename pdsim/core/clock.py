# SPDX-License-Identifier: Apache-2.0
"""The two clocks.  A rank's program is a SimPy process and cannot tell which of them it runs on.

`Clock` is virtual: it jumps from event to event, and equal inputs give equal times, bit for bit.  `WallClock` waits,
for real time and for the completions of real engines.  Both are environments of SimPy's events, conditions and
processes; they do not derive from `simpy.Environment`, so that they can be compiled as a whole.  `Timers` and
`ExpiringMap` give many keys a limit of time at the cost of one event.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from heapq import heappop, heappush
from itertools import takewhile
from math import inf
from typing import Any, Generic, Protocol, TypeVar, cast

from simpy.core import EmptySchedule
from simpy.events import NORMAL, PENDING, URGENT, AllOf, AnyOf, Event, Process, Timeout

from pdsim.core.errors import NeverPaused

Value = TypeVar("Value")

LAST = NORMAL + 1
"""Priority of an event that comes after all other events of its instant."""


def fire(event: Any, value: Any = None, ok: bool = True) -> None:
    """Trigger *event* and run its callbacks now; `Event.succeed` would take a turn of the queue.

    Only a callback may call it, never a process.  With ``ok=False``, *value* is the exception that the event, which
    must be defused, fails with.  On a paused rank the callbacks run at the end of the pause.
    """
    if event._value is not PENDING:
        raise RuntimeError(f"{event} has been triggered already")
    event._ok = ok
    event._value = value
    clock: Clock = event.env
    if clock.paused:
        clock.defer(None, event)
        return
    callbacks, event.callbacks = event.callbacks, None
    for callback in callbacks:
        callback(event)


Due = tuple[Any, ...]
"""Time, priority and number; the clock whose it is; a function, or None, and its argument, or an event."""


class EventQueue:
    """The events of a clock, or of the clocks of one job, by time, priority and number; and the current time."""

    __slots__ = ("ahead", "now", "number")

    def __init__(self) -> None:
        self.now = 0.0  # the time of what was taken last
        self.number = 0  # of what was added last, where things are numbered as they come
        self.ahead: list[Due] = []  # a heap

    def peek(self) -> float:
        """Return the time of the next event; infinity if there is none."""
        if not self.ahead:
            return inf
        at: float = self.ahead[0][0]
        return at

    def take(self) -> Due:
        """Remove the next event, and set the time to its own.  Raise an `EmptySchedule` if there is none."""
        if not self.ahead:
            raise EmptySchedule
        due = heappop(self.ahead)
        self.now = due[0]
        return due


class Clock:
    """Virtual time in seconds, from 0; methods that `simpy.Environment` has too are as there.

    Events of one instant are processed in the order of their priority, and then of their being scheduled.
    """

    def __init__(self, queue: EventQueue | None = None) -> None:
        self.virtual = True
        self.stopped = False  # the rank that lives on this clock has ended, and its events are dropped
        self.paused = False  # it stands still, and its events are deferred
        self.halted = False  # one of the two
        self.queue = EventQueue() if queue is None else queue
        self.numbers: Iterator[int] | None = None  # of what is scheduled, if not as it comes; all are different
        self._active_proc: Process | None = None

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self.queue.now

    @property
    def active_process(self) -> Process | None:
        """The process that runs now, if one does."""
        return self._active_proc

    def event(self) -> Event:
        """Return a new event, to be triggered with its `succeed` or `fail`, or with `fire`."""
        return Event(cast(Any, self))

    def timeout(self, delay: float = 0, value: Any = None) -> Timeout:
        """Return an event that succeeds with *value* in *delay* seconds."""
        return Timeout(cast(Any, self), delay, value)

    def process(self, generator: Generator[Event, Any, Any]) -> Process:
        """Start a process, and return the event of its end."""
        return Process(cast(Any, self), generator)

    def any_of(self, events: Iterable[Event]) -> AnyOf:
        """Return an event that succeeds when one of *events* does."""
        return AnyOf(cast(Any, self), events)

    def all_of(self, events: Iterable[Event]) -> AllOf:
        """Return an event that succeeds when all of *events* have."""
        return AllOf(cast(Any, self), events)

    def schedule(self, event: Event, priority: int = NORMAL, delay: float = 0) -> None:
        """Process *event*, which is triggered, in *delay* seconds."""
        self.call_at(self.now + delay, None, event, priority)

    def at(self, when: float, value: Any = None) -> Event:
        """Return an event that succeeds with *value* at the absolute time *when*; a past time is a `ValueError`."""
        event = _Moment(self, value)
        self.call_at(when, None, event)
        return event

    def call_at(
        self, when: float, function: Callable[[Any], None] | None, argument: Any, priority: int = NORMAL
    ) -> None:
        """Call ``function(argument)`` at the absolute time *when*; a past time is a `ValueError`.

        Cheaper than an `Event`: nobody can wait for it or take it back.  Without a function, *argument* is an event.
        """
        queue = self.queue
        if when < queue.now:
            raise ValueError(f"at(={when}) must not be before now(={queue.now})")
        if self.numbers is None:
            queue.number = number = queue.number + 1
        else:
            number = next(self.numbers)
        heappush(queue.ahead, (when, priority, number, self, function, argument))

    def scheduled(self) -> int:
        """Return how many events have been scheduled so far."""
        return self.queue.number

    def peek(self) -> float:
        """Return the time of the next event; infinity if there is none."""
        return self.queue.peek()

    def step(self) -> None:
        """Process the next event.

        Raise `EmptySchedule` if there is none, and what an event failed with that nobody has handled.
        """
        _, _, _, _, function, argument = self.queue.take()
        if function is not None:
            function(argument)
        elif (error := process_event(argument)) is not None:
            raise error

    def run(self, until: float | Event | None = None) -> Any:
        """Process events *until* that time, or that event, whose value is returned; by default until none is left.

        Raise a `ValueError` if the time is not in the future, a `RuntimeError` if the event cannot happen any more.
        """
        while until is None:
            try:
                self.step()
            except EmptySchedule:
                return None
        # anything, for SimPy says that `callbacks` is a list, which compiled code would insist on
        end: Any = until if isinstance(until, Event) else self._end(until)
        end.defused = True
        while end.callbacks is not None:
            try:
                self.step()
            except EmptySchedule:
                raise RuntimeError(f"nothing is scheduled any more, and {end} has not happened") from None
        if not end.ok:
            raise end.value
        return end.value

    def _end(self, at: float) -> Event:
        if at <= self.now:
            raise ValueError(f"until(={at}) must be greater than now(={self.now})")
        end = _Moment(self, None)
        self.call_at(float(at), None, end, URGENT)
        return end

    def defer(self, function: Callable[[Any], None] | None, argument: Any) -> None:
        """Call *function*, or process the event *argument*, at the end of a pause; here a `NeverPaused`."""
        what = type(argument).__name__ if function is None else "call"
        raise NeverPaused(
            f"{what} deferred by {type(self).__name__}, paused={self.paused}, halted={self.halted}: "
            "it has no pauses that could end; set neither of them, and pause a modelled rank with RankClock.pause"
        )

    def settle(self) -> None:
        """Run deferred housekeeping before a timed section; only a wall clock has any."""


class _Moment(Event):
    """An event that has been triggered, with *value*, and is to be processed at a given time; as `Timeout` is."""

    def __init__(self, environment: Any, value: Any) -> None:
        self.env = environment
        self.callbacks = []
        self._ok = True
        self._value = value


def process_event(event: Any) -> BaseException | None:
    """Call the callbacks of *event*; return its exception if nobody has handled that."""
    callbacks, event.callbacks = event.callbacks, None
    for callback in callbacks:
        callback(event)
    failed = not event._ok and not hasattr(event, "_defused")
    return event._value if failed else None


class Alarm:
    """A wake-up that may be armed again and again; ``wake(alarm)`` is called when it fires.

    It cannot be taken back: who needs it earlier makes another one and ignores the old.
    """

    __slots__ = ("_clock", "_priority", "_wake", "armed")

    def __init__(self, clock: Clock, wake: Callable[[Alarm], None], priority: int = NORMAL) -> None:
        self.armed = False  # whether it waits to fire
        self._clock = clock
        self._wake = wake
        self._priority = priority

    def arm(self, at: float) -> None:
        """Fire at the absolute time *at*.  Raise a `RuntimeError` if it is armed."""
        if self.armed:
            raise RuntimeError("this alarm is armed already; let it fire first")
        self.armed = True
        self._clock.call_at(at, self._ring, None, self._priority)

    def _ring(self, _: None) -> None:
        self.armed = False
        self._wake(self)


class _Getter(Event):
    # its first callback, *unclaimed*, sees to it that no item is lost with its waiter
    def __init__(self, clock: Any, unclaimed: Callable[[Event], None]) -> None:
        super().__init__(clock)
        self.callbacks.append(unclaimed)
        self.waiters = self.callbacks  # SimPy takes the list away before it calls what is in it

    @property
    def given_up(self) -> bool:
        return len(self.waiters) == 1


class Mailbox:
    """Items in the order in which they were put, for the processes that wait for them, or for a listener.

    No item is lost and none is given twice, whatever happens to the processes.  Where `simpy.Store` costs two events
    an item and a linear `pop(0)`, this costs one event and constant time.
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

        Raise a `RuntimeError` if there is a listener already.
        """
        if self._listener is not None:
            raise RuntimeError("this mailbox has a listener already")
        self._listener = listener
        for item in self.drain():
            self.put(item)

    def get(self) -> Event:
        """Return an event that succeeds with the next item.  Yield it at once, or it counts as given up."""
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
    """What the wall clock must look at, on its thread: a socket, a completion queue.  It must not raise."""

    def poll(self) -> bool:
        """Trigger the events whose time has come, without blocking; return whether there were any."""

    def fileno(self) -> int | None:
        """Return a descriptor that becomes readable when `poll` has work, or None if only polling can tell."""

    def busy(self) -> bool:
        """Return whether a source without a descriptor has anything outstanding, so that it must be polled often."""


class WallClock(Clock):
    """Real time in seconds since *origin* (a value of `time.monotonic`), the same for every process of one host.

    Between events it sleeps until the next event or until a source's descriptor is readable.  Sources that can only
    be polled are looked at every *nap* seconds while they are busy, and without a pause for the first *spin*
    seconds, because a completion is most often near; meanwhile the kernel is asked for descriptors every *nap*
    seconds.

    `idle`, if it is set, is called ahead of a sleep of a millisecond or more, and by `settle`.  It returns in how
    many seconds it has something to do again, which is 0 if it has not finished.
    """

    def __init__(self, origin: float | None = None, spin: float = 50e-6, nap: float = 20e-6) -> None:
        super().__init__()
        self.virtual = False
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
        self.queue.now = self.now

    @property
    def now(self) -> float:
        """Seconds since the origin, read from the system's monotonic clock."""
        return time.monotonic() - self.origin

    def watch(self, source: Source) -> None:
        """Look at *source* between events from now on; watching it again changes nothing."""
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
        """Run *function* on the clock's thread, which it wakes.  The only method that other threads may use."""
        self._calls.append(function)
        os.eventfd_write(self._wake, 1)

    def settle(self) -> None:
        """Run deferred housekeeping, if it is due, to its end."""
        while self.idle is not None and (now := self.now) >= self._idle_due:
            self._idle_due = now + self.idle()

    def close(self) -> None:
        """Close the clock's descriptors."""
        self._epoll.close()
        os.close(self._wake)

    def schedule(self, event: Event, priority: int = NORMAL, delay: float = 0) -> None:
        """Schedule *event* *delay* seconds from real now; a zero delay keeps SimPy's order within the instant."""
        self.call_at(self.now + delay if delay else self.queue.now, None, event, priority)

    def call_at(
        self, when: float, function: Callable[[Any], None] | None, argument: Any, priority: int = NORMAL
    ) -> None:
        """As `Clock.call_at`; a time that has passed meanwhile means at once."""
        super().call_at(max(when, self.queue.now), function, argument, priority)

    def step(self) -> None:
        """Wait for the next event and process it.

        Raise `EmptySchedule` if nothing is scheduled and no source is left that could schedule anything.
        """
        queue = self.queue
        self._look()
        idle_since = queue.now
        while (at := queue.peek()) > queue.now:
            if at == inf and not (self._polled or self._told):
                raise EmptySchedule
            if queue.now - idle_since > self.spin or not self._busy():
                self._sleep()
            if self._look():
                idle_since = queue.now
        super().step()

    def _busy(self) -> bool:
        for source in self._polled:  # noqa: SIM110 a generator takes as long as all of a turn
            if source.busy():
                return True
        return False

    def _look(self) -> bool:
        now = time.monotonic()
        self.queue.now = now - self.origin
        progressed = False
        while self._calls:
            self._calls.popleft()()
            progressed = True
        for source in self._polled:
            progressed |= source.poll()
        if now >= self._listen_at:
            self._listen_at = now + self.nap
            if ready := self._epoll.poll(0):
                progressed |= self._hear({fd for fd, _ in ready})
        return progressed

    def _hear(self, readable: Container[int]) -> bool:
        progressed = False
        for source, fd in self._told.items():
            if fd in readable:
                progressed |= source.poll()
        return progressed

    def _sleep(self) -> None:
        # Whole milliseconds are slept in ``epoll``, which a descriptor ends; shorter times in naps.
        at = self.queue.peek()
        until = at - self.now if at < inf else 1.0
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


# --- limits of time for many keys --------------------------------------------------------------------------------


class Timers:
    """A time limit of *seconds* for each of many keys; *expire* is called with one that reaches it.

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
        """Return how many keys have a limit."""
        return len(self._limits)

    def add(self, key: int) -> None:
        """Begin the time of *key*."""
        if self._seconds:
            self._limits[key] = self._clock.now + self._seconds
            self._arm()

    def drop(self, key: int) -> None:
        """End the time of *key*, if it has begun."""
        self._limits.pop(key, None)

    def _arm(self) -> None:
        if self._limits and not self._armed:
            self._armed = True
            self._clock.call_at(next(iter(self._limits.values())), self._ring, None)

    def _ring(self, _: Any) -> None:
        self._armed = False
        now = self._clock.now
        for key, _limit in list(takewhile(lambda entry: entry[1] <= now, self._limits.items())):
            if self._limits.pop(key, None) is not None:  # or *expire* of another one has dropped it
                self._expire(key)
        self._arm()


class ExpiringMap(Generic[Value]):
    """Values by key that are forgotten *seconds* after they were set.

    What is too old is dropped when the next value is set, at a cost that does not grow with the number of keys.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._values: dict[int, tuple[float, Value]] = {}

    def __len__(self) -> int:
        """Return the number of values, expired ones that are still here included."""
        return len(self._values)

    def __contains__(self, key: int) -> bool:
        """Return whether *key* is remembered."""
        entry = self._values.get(key)
        return entry is not None and self._clock.now < entry[0]

    def set(self, key: int, value: Value) -> None:
        """Remember *value* for *key* from now on, and forget what is too old."""
        self._values.pop(key, None)  # to the end: in order of time
        self._values[key] = (self._clock.now + self._seconds, value)
        while (oldest := next(iter(self._values))) not in self:
            del self._values[oldest]

    def get(self, key: int) -> Value | None:
        """Return the value of *key*, or None."""
        return self._values[key][1] if key in self else None

    def pop(self, key: int) -> Value | None:
        """Return the value of *key*, or None, and forget it."""
        value = self.get(key)
        self._values.pop(key, None)
        return value
