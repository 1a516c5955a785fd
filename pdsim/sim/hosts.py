# SPDX-License-Identifier: Apache-2.0
"""What hosts of ranks do on the model: clocks, sockets, threads that post, and when a program acts on what comes.

Not modelled: that control messages and data share the node's TCP link, and a sender that is slowed down by a
receiver that does not read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence, Sized
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf, nextafter
from typing import TYPE_CHECKING, Any

from simpy.events import URGENT

from pdsim.core.clock import Alarm, Clock, Mailbox, process_event
from pdsim.sim.faults import Ties
from pdsim.transfer import Message

if TYPE_CHECKING:
    from simpy.events import Event

    from pdsim.hardware.machine import Host


class SimChannel:
    """One rank's TCP sockets to all others: the simulated `pdsim.transfer.Channel`.

    A message of *n* bytes leaves when those before it to the same receiver have left, takes ``n / tcp_rate`` to
    leave and ``tcp_latency`` to arrive, and the *delay* of the links between the nodes; *host_latency* says when the
    rank acts upon it.  Faults *hold* it up (given sender, receiver and the time of its arrival without them) but
    never let one overtake another on the same socket.  *watch* is called with every message.  *ranks* has all
    channels.
    """

    def __init__(
        self,
        name: str,
        host: Host,
        job: Clock,
        clock: Clock,
        ranks: dict[str, SimChannel],
        hold: Callable[[str, str, float], float] | None = None,
        watch: Callable[[str, str, bytes], None] | None = None,
        delay: Callable[[str, str], float] | None = None,
        host_latency: HostLatency | None = None,
    ) -> None:
        self.name = name
        self._rate, self._latency = host.tcp_rate, host.tcp_latency
        self._job = job
        self._ranks = ranks
        self._inbox = Inbox(job, clock, host_latency or HostLatency())
        self._free: dict[str, float] = {}  # by receiver: when its socket has sent everything
        self._hold = hold
        self._watch = watch
        self._delay = delay
        self._arrivals: dict[str, float] = {}  # by receiver, of the last message, where messages are held up
        self.dropped: set[SimChannel] = set()  # those of senders that were refused
        self.refused = 0
        ranks[name] = self

    def send(self, receiver: str, payload: bytes) -> None:
        channel = self._ranks.get(receiver)
        if channel is None:
            raise KeyError(f"no rank {receiver!r}; there are {', '.join(self._ranks)}")
        if self._inbox.closed or channel._inbox.closed or self in channel.dropped:
            return
        if self._watch is not None:
            self._watch(self.name, receiver, payload)
        job = self._job
        sent = max(job.now, self._free.get(receiver, 0.0)) + len(payload) / self._rate
        self._free[receiver] = sent
        latency = self._latency
        if self._delay is not None:
            latency += self._delay(self.name, receiver)
        at = sent + latency
        if self._hold is not None:
            after = nextafter(self._arrivals.get(receiver, 0.0), inf)
            at = self._arrivals[receiver] = max(self._hold(self.name, receiver, at), after)
        job.call_at(at, channel._inbox.arrive, Message(self.name, payload))

    def receive(self) -> Event:
        return self._inbox.mailbox.get()

    def refuse(self, sender: str) -> None:
        self.refused += 1
        self.dropped.add(self._ranks[sender])

    def subscribe(self, handler: Callable[[Message], None]) -> None:
        self._inbox.mailbox.listen(handler)

    def close(self) -> None:
        """Close the sockets: what has been sent still arrives at others, what arrives here is lost."""
        self._inbox.closed = True


class ScheduledArrivals:
    """What comes at times that are known, without an event for each."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.passed = 0  # how many of them have come
        self.acted = 0.0  # when it acts upon the last of those


class HostLatency:
    """When one incarnation of a rank acts upon a message, a notification or the end of a computation.

    *wake* later (`pdsim.hardware.machine.Host`), and *idle_wake* more if it has had nothing to act upon for longer
    than *idle_after*; a rank that has just started is not idle, and its own timers do not keep it from going idle.
    Nothing overtakes what came before it.
    """

    def __init__(self, host: Host | None = None, now: float = 0.0) -> None:
        self._wake, self._idle_wake, self._idle_after = (
            (host.wake, host.idle_wake, host.idle_after) if host is not None else (0.0, 0.0, 0.0)
        )
        self._last = now  # when it acted, or will have acted, upon all that has come
        self._coming: list[ScheduledArrivals] = []
        self.instant = not (self._wake or self._idle_wake)
        """Whether it acts upon everything at once."""
        self.constant = inf if self._idle_wake else self._wake
        """Seconds until it acts upon what comes, if that does not depend on what came before."""

    def acts(self, now: float) -> float:
        """Return when it acts upon what comes at *now*; calls are in the order of time."""
        if self._coming:
            self._catch_up(now)
        return self._acts_at((now,))

    def _acts_at(self, times: Sequence[float]) -> float:
        # Return when it acts upon the last of what comes at *times*.
        last, wake, idle_wake, after = self._last, self._wake, self._idle_wake, self._idle_after
        for now in times:
            at = now + wake + (idle_wake if now - last > after else 0.0)
            last = at if at > last else nextafter(last, inf)
        self._last = last
        return last

    def expect(self, series: ScheduledArrivals) -> None:
        """Act upon what *series* says at its times, until `conclude`."""
        self._coming.append(series)

    def conclude(self, series: ScheduledArrivals, count: int, now: float) -> float:
        """Take note that no more of *series* comes than the first *count*, none after *now*; return when it acts."""
        self._catch_up(now)
        self._coming.remove(series)
        if series.passed < count:
            series.acted = self._acts_at(series.times[series.passed : count])
        return series.acted

    def _catch_up(self, now: float) -> None:
        due: list[tuple[float, int]] = []
        for place, series in enumerate(self._coming):
            end = bisect_left(series.times, now, series.passed)
            times, series.passed = series.times[series.passed : end], end
            if len(self._coming) == 1 and times:
                series.acted = self._acts_at(times)
                return
            due += [(at, place) for at in times]
        due.sort()
        for at, place in due:
            self._coming[place].acted = self._acts_at((at,))


class Inbox:
    """Messages or notifications for one rank, which come on the clock *hardware*, until its host acts upon them.

    While the rank's own *clock* is paused they are deferred; after `close` they are dropped.
    """

    def __init__(self, hardware: Clock, clock: Clock, host_latency: HostLatency) -> None:
        self.mailbox = Mailbox(clock)
        self.host_latency = host_latency
        self.closed = False
        self._hardware = hardware
        self._clock = clock

    def arrive(self, item: Any) -> None:
        """Take *item*, which comes now."""
        if self.host_latency.instant:
            self._act_upon(item)
        elif not self.closed:
            self._hardware.call_at(self.host_latency.acts(self._hardware.now), self._act_upon, item)

    def act_at(self, at: float, item: Any) -> None:
        """Have the rank act upon *item* at the time *at*; now if that is past."""
        if at > self._hardware.now:
            self._hardware.call_at(at, self._act_upon, item)
        else:
            self.mailbox.deliver(item)

    def _act_upon(self, item: Any) -> None:
        if self.closed:
            return
        if self._clock.paused:
            self._clock.defer(self._act_upon, item)
        else:
            self.mailbox.deliver(item)


class RankClock(Clock):
    """What the rank *name* sees of *job*'s clock: the same time and queue, with events that are known to be its own.

    So an exception that nobody handles ends the rank whose event it was, and a rank ends by force with its events.
    """

    def __init__(self, job: JobClock, name: str) -> None:
        super().__init__(job.queue)
        self.name = name
        self.job = job
        self._deferred: list[tuple[Callable[[Any], None] | None, Any]] = []
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

    def defer(self, function: Callable[[Any], None] | None, argument: Any) -> None:
        """Keep a call or an event, which is due, until the end of the pause; drop it if the rank has ended."""
        if not self.stopped:
            self._deferred.append((function, argument))
        elif function is None:
            argument.callbacks = None  # "processed"

    def _resume(self, _: Any) -> None:
        self.paused, self.halted = False, self.stopped
        deferred, self._deferred = self._deferred, []
        for function, argument in deferred:
            self.call_at(self.now, function, argument)


class JobClock(Clock):
    """The clock that owns the queue.  Its own events, those of the hardware, outlive every rank."""

    def __init__(self, ties: Iterator[float] | None = None) -> None:
        super().__init__()
        self.queue = self._queue  # shared with the clocks of the ranks
        self.ties = ties  # draws, if what is due at one instant on several ranks is to happen in any order
        self.counted = count()
        if ties is not None:
            self.numbers = Ties(self, ties, self.counted, each=True)
        self.events = 0  # processed until now

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
                clock.defer(function, due[5])
            elif function is not None:  # more than half of them
                function(due[5])
            elif (error := process_event(due[5])) is not None:
                if not isinstance(clock, RankClock):
                    raise error
                crashed(clock, error)


class PostingThread:
    """The thread, or the copy engine's launch, that issues descriptors; one transfer after the other.

    With *share* it is so many *threads* of one rank instead, which take up work in the order in which it was posted.
    """

    def __init__(self, share: PostingShare | None = None, threads: int = 1) -> None:
        self.share = share
        self.free = 0.0  # when it has done everything that it was given, without *share*
        self.slowness = 1.0  # how many times as long as usual its work takes
        self.under_way = 0  # transfers, but those that are done in the call that posts them
        self._idle = threads
        self._waiting: deque[_Work] = deque()

    def post(self, seconds: float, begin: Callable[[Any], None], done: Callable[[Any], None], tag: Any) -> None:
        """Post work of *seconds* on a thread that is alone.

        ``begin(tag)`` is called when a thread takes it up, perhaps now, and ``done(tag)`` at its end.
        """
        assert self.share is not None
        work = _Work(self, seconds, begin, done, tag)
        if self._idle:
            self._idle -= 1
            self.share.take([work])
        else:
            self._waiting.append(work)

    def next(self) -> _Work | None:
        """Return what the thread that has just ended something takes up; without that it is free."""
        if self._waiting:
            return self._waiting.popleft()
        self._idle += 1
        return None

    def drop(self, tag: Any) -> None:
        """Forget what was posted with *tag* and waits for a thread; a thread that is at it goes on to its end."""
        self._waiting = deque(work for work in self._waiting if work.tag is not tag)


@dataclass(eq=False, slots=True)
class _Work:
    poster: PostingThread
    left: float  # seconds, of a thread that is alone
    begin: Callable[[Any], None]
    done: Callable[[Any], None]
    tag: Any


class PostingShare:
    """What all posting threads on one GPU share, or, where there is none, those of one rank.

    Beside *a* threads of its process and *b* of others a thread is ``1 + a * serial + b * between`` times as slow
    (Amdahl's law).  One event stands for the next end; it is set anew whenever a thread begins or ends something.
    """

    def __init__(self, clock: Clock, serial: float, between: float) -> None:
        self._clock = clock
        self._serial = serial
        self._between = between
        self._busy: list[_Work] = []
        self._since = clock.now
        self._turn = 0  # of the event that is to come: an earlier one does not hold any more

    def take(self, works: list[_Work]) -> None:
        self._advance()
        self._busy += works
        self._turn += 1
        if self._busy:
            slowness = self._slowness()
            ends = [max(0.0, work.left) * slowness[work.poster] for work in self._busy]
            least = min(ends)
            over = [work for work, end in zip(self._busy, ends, strict=True) if end <= least]
            self._clock.call_at(self._clock.now + least, self._end, (self._turn, over))
        for work in works:
            work.begin(work.tag)

    def _slowness(self) -> dict[PostingThread, float]:
        own = Counter(work.poster for work in self._busy)
        every = len(self._busy)
        serial, between = self._serial, self._between
        return {one: 1.0 + (count - 1) * serial + (every - count) * between for one, count in own.items()}

    def _advance(self) -> None:
        now = self._clock.now
        if self._busy:
            slowness = self._slowness()
            for work in self._busy:
                work.left -= (now - self._since) / slowness[work.poster]
        self._since = now

    def _end(self, expected: tuple[int, list[_Work]]) -> None:
        # *over* rather than those with a remainder of 0, which rounding would miss
        turn, over = expected
        if turn != self._turn:
            return
        self._advance()
        self._busy = [work for work in self._busy if work not in over]
        following = [work.poster.next() for work in over]
        for work in over:
            work.done(work.tag)
        self.take([work for work in following if work is not None])


class Deadlines:
    """Calls ``expire(number)`` at the deadline of every number that is in *live* then.

    Nobody cancels a deadline: a number that is no longer in *live* is forgotten when it comes to the front.  So a
    transfer costs an event only when it is the first.
    """

    def __init__(self, clock: Clock, live: Container[int], expire: Callable[[int], None]) -> None:
        self._clock = clock
        self._live = live
        self._expire = expire
        self._ahead: list[tuple[float, int]] = []  # a heap
        self._alarm: Alarm | None = None
        self._at = inf  # what the alarm is set to

    def add(self, at: float, number: int) -> None:
        """Let the deadline of *number* be *at*, in seconds on the clock."""
        heappush(self._ahead, (at, number))
        if at < self._at:
            self._arm(at)

    def _arm(self, at: float) -> None:
        self._at = at
        self._alarm = Alarm(self._clock, self._on_alarm)
        self._alarm.arm(at)

    def _on_alarm(self, alarm: Alarm) -> None:
        if alarm is not self._alarm:
            return
        now, ahead = self._clock.now, self._ahead
        self._at = -inf  # `add` leaves the alarm alone meanwhile
        while ahead and (ahead[0][0] <= now or ahead[0][1] not in self._live):
            number = heappop(ahead)[1]
            if number in self._live:
                self._expire(number)
        self._at = inf
        if ahead:
            self._arm(ahead[0][0])
