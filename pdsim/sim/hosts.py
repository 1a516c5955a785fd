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
from typing import TYPE_CHECKING, Any, Protocol

from simpy.core import EmptySchedule
from simpy.events import URGENT

from pdsim.core.clock import Alarm, Clock, Mailbox, process_event
from pdsim.sim.faults import Ties
from pdsim.transfer import Message, Notification

if TYPE_CHECKING:
    from simpy.events import Event

    from pdsim.hardware.machine import Host


class SimChannel:
    """One rank's TCP sockets to all others: the simulated `pdsim.transfer.Channel`.

    A message of *n* bytes leaves when those before it to the same receiver have left, takes ``n / tcp_rate`` to
    leave and ``tcp_latency`` to arrive, and the *delay* of the links between the nodes; *host_latency* says when the
    rank acts upon it.  Faults *hold* it up (given sender, receiver and the time of its arrival without them) but
    never let one overtake another on the same socket; it may meet the receiver's next process.  *watch* is called
    with every message.  *ranks* has all channels.
    """

    def __init__(
        self,
        name: str,
        host: Host,
        job: Clock,
        clock: Clock,
        ranks: dict[str, SimChannel],
        hold: Callable[[str, str, bytes, float], float] | None = None,
        watch: Callable[[str, str, bytes], None] | None = None,
        delay: Callable[[str, str], float] | None = None,
        host_latency: HostLatency | None = None,
    ) -> None:
        self.name = name
        self._rate, self._latency = host.tcp_rate, host.tcp_latency
        self._job = job
        self._ranks = ranks
        self._inbox = Inbox(job, clock, host_latency or HostLatency(job))
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
        sent = max(self._job.queue.now, self._free.get(receiver, 0.0)) + len(payload) / self._rate
        self._free[receiver] = sent
        at, message = sent + channel.latency_from(self.name), Message(self.name, payload)
        if self._hold is not None:
            after = nextafter(self._arrivals.get(receiver, 0.0), inf)
            held = self._arrivals[receiver] = max(self._hold(self.name, receiver, payload, at), after)
            if held > at:
                self._job.call_at(held, self._deliver, (receiver, message))
                return
        channel._inbox.arrive_at(at, message)

    def _deliver(self, late: tuple[str, Message]) -> None:
        # To the process that has the receiver's address by now, as a socket that connects again does.
        channel = self._ranks[late[0]]
        if self not in channel.dropped:
            channel._inbox.arrive(late[1])

    def latency_from(self, sender: str) -> float:
        """Return the seconds that the last byte of a message of *sender* takes."""
        return self._latency if self._delay is None else self._latency + self._delay(sender, self.name)

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
        self.follow: Callable[[float], None] | None = None  # told when it acts upon what has come between, if given


class Coming:
    """*item*, which comes at the time *at* and is acted upon with *function* at the time *acts*.

    *others* are functions and items that came at the same time after it, and are acted upon with it.
    """

    __slots__ = ("acts", "at", "function", "item", "others")

    def __init__(self, at: float, acts: float, function: Callable[[Any], None], item: Any) -> None:
        self.at = at
        self.acts = acts  # infinity while that is not known
        self.function = function
        self.item = item
        self.others: tuple[tuple[Callable[[Any], None], Any], ...] = ()


class HostLatency:
    """When one incarnation of a rank acts upon a message, a notification or the end of a computation.

    *wake* later (`pdsim.hardware.machine.Host`), and *idle_wake* more if it has had nothing to act upon for longer
    than *idle_after*; a rank that has just started is not idle, and its own timers do not keep it from going idle.
    Nothing overtakes what came before it; what comes at one instant is acted upon at one.

    What comes at times that are known costs one event an instant, when the rank acts upon it: what comes earlier,
    and is heard of later, moves that.
    """

    def __init__(self, clock: Clock, host: Host | None = None) -> None:
        self._wake, self._idle_wake, self._idle_after = (
            (host.wake, host.idle_wake, host.idle_after) if host is not None else (0.0, 0.0, 0.0)
        )
        self._clock = clock
        self._queue = clock.queue
        self._before = clock.now  # when it acted upon what is not ahead any more
        self._ahead: deque[Coming] = deque()  # what it has not acted upon, in the order in which that comes
        self._last = clock.now  # when it acts upon the last of that, and when that comes
        self._latest = clock.now
        self._series: list[ScheduledArrivals] = []
        self._latest_of_series: Coming | None = None  # the last that came during a series
        self.instant = not (self._wake or self._idle_wake)
        """Whether it acts upon everything at once."""
        self.constant = inf if self._idle_wake else self._wake
        """Seconds until it acts upon what comes, if that does not depend on what came before."""

    def arrive(self, at: float, function: Callable[[Any], None], item: Any) -> None:
        """Call ``function(item)`` when it acts upon *item*, which comes at the time *at*, not before now."""
        if self.instant:
            self._clock.call_at(at, function, item)
            return
        if self._series or at < self._latest:
            self._arrive_between(Coming(at, inf, function, item))
            return
        if at == self._latest and self._ahead:
            self._ahead[-1].others += ((function, item),)
            return
        last = self._last
        acts = at + self._wake  # as `acts_at`
        if at - last > self._idle_after:
            acts += self._idle_wake
        if acts <= last:
            acts = nextafter(last, inf)
        self._last, self._latest = acts, at
        coming = Coming(at, acts, function, item)
        self._ahead.append(coming)
        self._clock.call_at(acts, self._act, coming)

    def _act(self, coming: Coming) -> None:
        now, acts = self._queue.now, coming.acts
        if acts == now:
            coming.acts = -inf
            if self._ahead and self._ahead[0] is coming:
                self._ahead.popleft()
                self._before = acts
            coming.function(coming.item)
            for function, item in coming.others:
                function(item)
        elif now < acts < inf:  # it was moved
            self._clock.call_at(acts, self._act, coming)

    def _arrive_between(self, coming: Coming) -> None:
        clock, ahead, at = self._clock, self._ahead, coming.at
        if self._series:
            if at > clock.now:  # what a series brings before is known then
                clock.call_at(at, self._arrive_between, coming)
                return
            with_it = self._latest_of_series
            if with_it is not None and with_it.at == at and with_it.acts > at:
                with_it.others += ((coming.function, coming.item), *coming.others)
                return
            self._last = coming.acts = self.acts_at(at, self.catch_up(at))
            self._latest_of_series = coming
            clock.call_at(coming.acts, self._act, coming)
            for series in self._series:
                if series.follow is not None:
                    series.follow(self._last)
            return
        place = len(ahead)
        while place and ahead[place - 1].at > at:
            place -= 1
        if place and ahead[place - 1].at == at:
            ahead[place - 1].others += ((coming.function, coming.item),)
            return
        ahead.insert(place, coming)
        last = ahead[place - 1].acts if place else self._before
        for number in range(place, len(ahead)):
            other = ahead[number]
            last = self.acts_at(other.at, last)
            if last < other.acts:
                clock.call_at(last, self._act, other)
            other.acts = last
        self._last, self._latest = last, ahead[-1].at

    def acts_at(self, at: float, last: float) -> float:
        """Return when it acts upon what comes at the time *at*, having acted *last* upon what came before."""
        acts = at + self._wake
        if at - last > self._idle_after:
            acts += self._idle_wake
        return acts if acts > last else nextafter(last, inf)

    def expect(self, series: ScheduledArrivals) -> None:
        """Act upon what *series* says at its times, until `conclude`."""
        now = self._clock.now
        for coming in self._ahead:
            if coming.at > now:
                coming.acts = inf
                self._clock.call_at(coming.at, self._arrive_between, coming)
            else:
                self._before = coming.acts
        if not self._series:
            self._last = self._before
        self._ahead.clear()
        self._series.append(series)

    def conclude(self, series: ScheduledArrivals, count: int, now: float) -> float:
        """Take note that no more of *series* comes than the first *count*, none after *now*; return when it acts."""
        self.catch_up(now)
        self._series.remove(series)
        self._take(series, count)
        self._before, self._latest = self._last, now
        return series.acted

    def catch_up(self, now: float) -> float:
        """Return when it acts upon the last of what comes before *now*, also of the series."""
        if len(self._series) == 1:
            (series,) = self._series
            self._take(series, bisect_left(series.times, now, series.passed))
            return self._last
        due: list[tuple[float, int]] = []
        for place, series in enumerate(self._series):
            end = bisect_left(series.times, now, series.passed)
            due += [(at, place) for at in series.times[series.passed : end]]
            series.passed = end
        due.sort()
        for at, place in due:
            self._last = self._series[place].acted = self.acts_at(at, self._last)
        return self._last

    def _take(self, series: ScheduledArrivals, end: int) -> None:
        # Act upon what *series* says until its *end*-th.
        last, wake, after, idle_wake = self._last, self._wake, self._idle_after, self._idle_wake
        for at in series.times[series.passed : end]:  # as `acts_at`
            acts = at + wake
            if at - last > after:
                acts += idle_wake
            last = series.acted = acts if acts > last else nextafter(last, inf)
        self._last = last
        series.passed = max(series.passed, end)


class ComputationPlan(Protocol):
    """What decides how long each of some computations takes, once the end of the one before is known."""

    def catch_up(self) -> None:
        """Take note of what has happened by now: that does not change any more."""

    def after(self, computations: ScheduledComputations, number: int) -> float:
        """Return the seconds of the one after *number*; anything if that is the last."""


class ScheduledComputations:
    """Computations of one rank that take *seconds*, one after the other, without an event for each.

    The first begins at the time *begin*, others when the rank acts upon the end of the one before; *launches* may
    make them longer.  Beside a *leader* they are those of another rank: where hosts sleep, each but the first begins
    when a message is acted upon, which *leader* sends as it begins its own, and which takes *latency*.

    What else comes to either rank can change times ahead: *changed* is called then.  There must be nothing else on
    this host whose times are known.
    """

    def __init__(
        self,
        host: HostLatency,
        clock: Clock,
        seconds: Sequence[float],
        begin: float,
        changed: Callable[[], None],
        launches: ComputationPlan | None = None,
        leader: ScheduledComputations | None = None,
        latency: float = 0.0,
    ) -> None:
        self.seconds: list[float] = list(seconds) if leader is None else leader.seconds
        self.begins = [begin]
        self.ends: list[float] = []  # when the rank acts upon the end of each
        self._host, self._clock, self._changed, self._launches = host, clock, changed, launches
        self._leader, self._latency = leader, latency
        self._followers: list[ScheduledComputations] = []
        self._over: list[float] = []  # when each ends
        self._acts: list[float] = []  # when the rank acts upon each of the arrivals: ends and messages
        self._arrivals = ScheduledArrivals()
        self._sleeps = host.constant == inf
        if self._sleeps:
            self._arrivals.follow = self._follow
            host.expect(self._arrivals)
        if leader is not None:
            leader._followers.append(self)
        self._foresee()

    def _foresee(self) -> None:
        # Work out anew what has not come yet.
        leader, host, launches, last = self._leader, self._host, self._launches, -inf
        seconds, begins, ends, over = self.seconds, self.begins, self.ends, self._over
        times, acts = self._arrivals.times, self._acts
        if launches is not None:
            launches.catch_up()
        if self._sleeps:
            last = host.catch_up(self._clock.now)
        passed, ended = self._arrivals.passed, bisect_left(over, self._clock.now)
        messages = leader is not None and self._sleeps
        begun = passed - ended if messages else ended
        count = len(seconds) if leader is None else len(leader.ends)
        del times[passed:], acts[passed:], over[ended:], ends[ended:], begins[begun + 1 :]
        while ended < count:
            if launches is not None and ended:
                seconds[ended] = launches.after(self, ended - 1)
            end = begins[ended] + seconds[ended] if ended <= begun else inf
            message = inf
            if leader is not None and messages and begun + 1 < count:
                message = leader.ends[begun] + self._latency
            arrives = min(end, message)
            last = host.acts_at(arrives, last)
            if self._sleeps:
                times.append(arrives)
                acts.append(last)
            if end <= message:
                over.append(end)
                ends.append(last)
                ended += 1
            if (end > message or not messages) and begun + 1 < count:
                begins.append(max(last, begins[begun] + seconds[begun]))
                begun += 1
        if launches is not None:
            launches.after(self, count - 1)

    def _follow(self, last: float) -> None:
        place = self._arrivals.passed
        if place < len(self._acts) and self._host.acts_at(self._arrivals.times[place], last) != self._acts[place]:
            self.move()

    def move(self) -> None:
        """Work out anew what is ahead."""
        before = self.ends[:]
        self._foresee()
        self._changed()
        if self.ends != before:
            for follower in self._followers:
                follower.move()

    def stop(self, begun: int) -> None:
        """Let the last of so many that have *begun* be the last."""
        del self.seconds[begun:]
        self.move()

    @property
    def free(self) -> float:
        """When the last ends."""
        return self._over[-1]

    def conclude(self) -> None:
        """Take note that all have ended, and that the rank acts upon the last end now."""
        if self._sleeps:
            self._host.conclude(self._arrivals, len(self._arrivals.times), self._clock.now)
        if self._leader is not None:
            self._leader._followers.remove(self)


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
        self._held: dict[str, float] = {}  # by sender, until when its notifications are held up

    def notify(self, notification: Notification, held: float) -> None:
        """Take *notification* in *held* seconds, and after those of its sender that are held up."""
        sender, now = notification.sender, self._hardware.now
        if held or sender in self._held:
            at = max(now + held, nextafter(self._held.get(sender, 0.0), inf))
            if at > now:
                self._held[sender] = at
                self._hardware.call_at(at, self.arrive, notification)
                return
        self.arrive(notification)

    def arrive(self, item: Any) -> None:
        """Take *item*, which comes now."""
        if self.host_latency.instant:
            self._act_upon(item)
        elif not self.closed:
            self.host_latency.arrive(self._hardware.queue.now, self._act_upon, item)

    def arrive_at(self, at: float, item: Any) -> None:
        """Take *item*, which comes at the time *at*."""
        self.host_latency.arrive(at, self._act_upon, item)

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
            self.job.call_at(end, self._resume, None, URGENT)

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
        queue, ahead = self.queue, self.queue.ahead
        for _ in range(limit):
            if not live:
                return
            if not ahead:
                raise EmptySchedule
            clock: Clock
            queue.now, _, _, clock, function, argument = heappop(ahead)  # as `EventQueue.take`
            self.events += 1
            if clock.halted:
                clock.defer(function, argument)
            elif function is not None:  # nearly all of them
                function(argument)
            elif (error := process_event(argument)) is not None:
                if not isinstance(clock, RankClock):
                    raise error
                crashed(clock, error)


class PostingThread:
    """The thread, or the copy engine's launch, that issues descriptors; one transfer after the other.

    With *share* it is so many *threads* of one rank instead, which take up work in the order in which it was posted.
    """

    def __init__(self, share: PostingShare | None = None, threads: int = 1) -> None:
        self.share = share
        self.threads = threads
        # when it has done everything that it was given; with *share*, when it takes up what comes next
        self.free = 0.0
        self.slowness = 1.0  # how many times as long as usual its work takes
        self.under_way = 0  # transfers, but those that are done in the call that posts them
        self.isolated: Any = None  # the `Posting` under way that shares nothing (`pdsim.sim.posting`)
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
        for work in over:
            work.done(work.tag)
        self._go_on([work.poster for work in over])

    def _go_on(self, posters: list[PostingThread]) -> None:
        following = []
        for poster in posters:
            if poster.free > self._clock.now:
                self._clock.call_at(poster.free, self._go_on, [poster])
            elif (work := poster.next()) is not None:
                following.append(work)
        self.take(following)


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
