# SPDX-License-Identifier: Apache-2.0
"""Writes to one peer, one after the other, whose times are known before they happen.

A chunk that goes in slices, plane by plane, or layer by layer as it is computed, is up to hundreds of writes.  They
are one `Series` and cost an event where it begins and ends, and where one ends that it shares threads or links with
(`pdsim.sim.crossing`).  What could change their times otherwise, or could see that they are not reported yet (the
end of either side, a flow of another kind on their links), *cuts* the series first.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import chain
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from simpy.events import NORMAL

from pdsim.core.clock import LAST, Alarm
from pdsim.sim.crossing import MOVES, RESTS, WAITS, Crossing, Lane, Row, State, fold
from pdsim.sim.hosts import PostingThread, ScheduledArrivals
from pdsim.transfer import Notification, WriteSequence
from pdsim.transfer.log import Kind, RecordRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdsim.core.clock import Clock
    from pdsim.transfer import Peer, Transfer, Writes

    # their modules import this one
    Flow: TypeAlias = Any
    Link: TypeAlias = Any
    Network: TypeAlias = Any
    Path: TypeAlias = Any
    SimEndpoint: TypeAlias = Any
    SimTransfer: TypeAlias = Any
    SendQueue: TypeAlias = Any


Times = npt.NDArray[np.float64]

Stages = tuple[float, float, float, float, float]  # submitted, posted, on the wire, off the wire, complete

Sleep = tuple[float, float, float]
"""Since when a copy engine rests, seconds until it sleeps, and seconds that it then takes to wake up."""

AWAKE: Final[Sleep] = (0.0, inf, 0.0)

Pace = tuple["Path", float, float, bool, float, Sleep]
"""Path and bytes of a flow, seconds of posting, whether the flow begins before those are over, latency, and rest."""


class SimWriteSequence(WriteSequence):
    """A `pdsim.transfer.WriteSequence` that posts many writes as one `Series` where their times are known.

    A series that is refused, or cut, is asked for again after a pause, counted in writes, that doubles each time.
    """

    def __init__(
        self, clock: Clock, endpoint: SimEndpoint, peer: Peer, parts: Sequence[Writes], times: Sequence[float]
    ) -> None:
        super().__init__(clock, endpoint, peer, parts, times)
        self._foresee = endpoint.foresee
        self._series: Series | None = None  # that is under way
        self._numbers: Sequence[int] = ()  # of its writes
        self._pause = 1
        self._ask = 0  # how many writes are done when a series is asked for again

    def stop(self, part: int = 0) -> None:
        super().stop(part)
        if self._series is not None:
            self._series.cut()

    def retime(self, times: Sequence[float]) -> None:
        super().retime(times)
        if self._series is not None:
            self._series.cut()

    def _next(self) -> None:
        if self.done >= self._ask and self._left:
            count, times = len(self._parts), self._times
            end = self._total if count == 1 else self._total - count  # else the last of each is acted upon too late
            numbers: Sequence[int] = range(self.done, end)
            if len(self._left) < count:
                numbers = [number for number in numbers if number % count in self._left]
            if len(numbers) > 1:
                first = self.done // count
                kinds = [0] * len(numbers) if count == 1 else [number % count for number in numbers]
                earliest: Sequence[float] = times[first:end] if count == 1 else ()
                if times and count > 1:
                    earliest = [times[number // count] for number in numbers]
                self._numbers = numbers
                self._series = self._foresee(self._peer, self._parts, first, kinds, earliest, self._on_series)
                if self._series is not None:
                    return
                self._back_off()
        super()._next()

    def _back_off(self) -> None:
        self._pause *= 2
        self._ask = self.done + self._pause

    def _on_series(self, count: int, sizes: Sequence[int], transfer: Transfer | None) -> None:
        # *sizes* are the bytes of a write of each part
        self._series = None
        over, parts = self._numbers[:count], len(self._parts)
        self._numbers = self._numbers[count:]
        if over:
            self.done = over[-1] + 1
        for part, nbytes in enumerate(sizes):
            if parts == 1:
                self._count(part, len(over), len(over) * nbytes)
            elif writes := len([number for number in over if number % parts == part]):
                self._count(part, writes, writes * nbytes)
        if count >= self._pause:
            self._pause = 1
        if transfer is not None:
            self.done = self._numbers[0]
            self._back_off()
            self._follow(transfer)
        elif not self._numbers:
            super()._next()
        else:  # cut between two writes
            self._back_off()
            self._wait_until(self._clock.now)


class Series:
    """Writes like those *posted*, each of *kinds* a place there; each is submitted when the one before is complete.

    With *times* none is submitted before its own.  At the end ``over(writes, sizes, transfer)`` is called with how
    many are complete, the bytes of each kind and, if the series was cut, the write under way.  With a *number* it is
    the one transfer of that number, which somebody waits for.
    """

    def __init__(
        self,
        endpoint: SimEndpoint,
        foreseen: Foreseen,
        posted: Sequence[SimTransfer],
        kinds: Sequence[int],
        paces: Sequence[Pace],
        over: Callable[[int, Sequence[int], Transfer | None], None] | None,
        times: Sequence[float],
        number: int | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        self.peer = posted[0].connection.remote.name
        self.number = number
        self.path, _, _, self.overlap, self.latency, self.sleep = paces[0]
        self.kinds, self.times = kinds, times
        self.sizes, self.postings = [pace[1] for pace in paces], [pace[2] for pace in paces]
        self.limit = endpoint.limit / 2  # of a write: it may time out once something meets it
        queue: SendQueue = posted[0].connection.send_queue
        self.thread = queue.poster
        self.alone = queue.copier is not None  # what its thread posts beside it would wait for the same copy engine
        self.resources = (self.thread, *(link for link in self.path.live if link is not self.path.own))
        self.arrivals = ScheduledArrivals()
        self.rows: list[Row] = []  # stages of writes that are complete
        self.state: State = (0, WAITS, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, self.sleep[0])
        self.most = inf  # the rate of a flow that shares no link
        self.alike = 0  # equal for series that differ in their state and resources alone
        self.lane: Lane | None = None  # that knows more of it, in the crossing
        self.crossing: Crossing | None = None
        self._endpoint = endpoint
        self._foreseen = foreseen
        self._clock = foreseen.clock
        self._posted = posted
        self._over = over
        self._labels = labels

    def cut(self) -> None:
        """Report what is complete, and make the write under way a transfer of its own."""
        self._foreseen.cut([self])

    @property
    def is_over(self) -> bool:
        """Whether all writes are complete."""
        return self.state[0] == len(self.kinds)

    def hits(self, end: float) -> bool:
        """Return whether a flow of it is, or may be, on the wire at any time from now until *end*."""
        lane, now = self.lane, self._clock.now
        if lane is None or self.crossing is None or end > self.crossing.until:
            return True
        first = bisect_left(lane.rows, now, key=itemgetter(3))
        if first < len(lane.rows):
            return lane.rows[first][2] <= end
        return lane.phase != WAITS and lane.begin <= end

    def keep(self, rows: list[Row], state: State) -> None:
        """Set *state*, after all writes of *rows*, also those before; forget the arrivals foreseen beyond them."""
        sizes, ended = self.sizes, self.path.ended
        for kind in self.kinds[len(self.rows) : len(rows)]:  # the sum depends on the order
            ended += sizes[kind]
        self.path.ended = ended
        self.rows = rows
        del self.arrivals.times[len(rows) :]
        self.state = state
        self.lane = self.crossing = None

    def carried(self, now: float) -> float:
        """Return the bytes of the write under way that have been carried."""
        number, phase, _, _, _, _, _, left, rate, since, _ = self.state
        if phase == WAITS:
            return 0.0
        size = self.sizes[self.kinds[number]]
        return size if phase == RESTS else size - left + rate * (now - since) if phase == MOVES else 0.0

    def end(self, stages: Times) -> None:
        """Report all writes, which are complete, with their *stages*."""
        count, posted = len(self.rows), self._posted
        if self._over is None:
            self._endpoint.complete(posted[0], self.number, self.rows[0][1])
            return
        self._report(count, stages)
        for one in posted:
            one.release()
        self._over(count, [one.transfer.batch.nbytes for one in posted], None)

    def resume(self, flow: Flow | None) -> None:
        """End before the last write; *flow* is that of the write under way, if it is on the wire."""
        count, posted, begun = len(self.rows), self._posted, self.state[1] != WAITS
        number, phase, at, submitted, ready, begin, end, *_ = self.state
        stages = submitted, ready, begin, end if phase == RESTS else inf, at
        if self._over is None:
            self._endpoint.resume(posted[0], stages, flow, self.number)
            return
        self._report(count, _table(self.rows))
        for kind, one in enumerate(posted):
            if not begun or kind != self.kinds[number]:
                one.release()
        transfer = None
        if begun:
            one = posted[self.kinds[number]]
            if self._labels:
                one.transfer.label = self._labels[number]
            transfer = self._endpoint.resume(one, stages, flow)
        self._over(count, [one.transfer.batch.nbytes for one in posted], transfer)

    def _report(self, count: int, stages: Times) -> None:
        # Records of the first *count*; the peer's rank acts upon one `Notification` when it acts upon the last.
        endpoint, first, acts = self._endpoint, self._posted[0], 0.0
        inbox, host = first.connection.remote.inbox, first.connection.remote.inbox.host_latency
        if count:
            last = self.rows[-1]
            first.connection.send_queue.carried(max(last[3], last[1]))
        if first.notify and not host.instant:
            acts = host.conclude(self.arrivals, count, self._clock.now)
        alone, kinds = len(self._posted) == 1, self.kinds[:count]
        for kind, posted in enumerate(self._posted):
            batch = posted.transfer.batch
            own = stages if alone else stages[:, np.array(kinds) == kind]
            submitted, posts, complete = own[0], own[1], own[4]
            name = Kind(endpoint.engine, "write", batch.source.owner, batch.target.owner, "ok")
            labels = self._labels[:count] if self._labels else ()
            run = RecordRun(name, posted.transfer.label, batch.nbytes, len(batch), len(posts))
            endpoint.recorder.series(run, (submitted, submitted, posts, complete, complete), labels)
            if len(posts) and posted.notify:
                inbox.act_at(acts, Notification(endpoint.name, posted.notify, len(posts)))


class Foreseen:
    """All series of a network, which are worked out together where they share posting threads or links.

    Invariant: no flow of a series is under way at the same time, on the same link, as a flow of the network.  What
    is about to change that *cuts* the series first: its flow under way enters the network.  Series that join, end or
    are cut change what others do; those are worked out anew after all else of the instant.
    """

    def __init__(self, network: Network) -> None:
        self.series: dict[Series, None] = {}
        self.clock: Clock = network.clock
        self._network = network
        self._users: dict[Any, dict[Series, None]] = {}  # by posting thread and link
        self._changed: dict[Series, None] = {}  # that are to be worked out, each in its `Series.state`
        self._alike: dict[Any, int] = {}
        self._guests: dict[Path, float] = {}  # those whose one flow ends then, before it meets a series
        self._on_changes = Alarm(self.clock, self._on_change, LAST)

    def join(self, series: Series) -> bool:
        """Keep *series*, which starts now, unless something is in its way; return whether it does."""
        path, now = series.path, self.clock.now
        series.most = min([path.cap, *(link.capacity for link in series.resources[1:])])
        if len(set(path.links)) < len(path.links) or not 0.0 < series.most < inf:
            return False
        self._network.isolated.meet(path.live)
        if not self._network.is_idle(path.live):
            return False
        for other in list(self._users.get(series.thread, ())):
            self._rest(other)
        costs = (path.cap, *series.postings, *series.sizes, series.overlap, series.latency, *series.sleep[1:])
        key = costs, tuple(series.kinds), tuple(series.times)
        series.alike = self._alike.setdefault(key, len(self._alike))
        self.series[series] = None
        for resource in series.resources:
            self._users.setdefault(resource, {})[series] = None
        lane, free = Lane([series]), [series.thread.free]
        lane.go_on(now, free)
        series.thread.free = free[0]
        series.state = lane.state
        self._changed[series] = None
        self._wait()
        return True

    def _wait(self) -> None:
        if self._changed and not self._on_changes.armed:
            self._on_changes.arm(self.clock.now)

    def _rest(self, series: Series) -> None:
        # Let what *series* and those in its crossing do be known until now, and no further.
        crossing = series.crossing
        if crossing is None:
            return
        crossing.stop(self.clock.now)
        for lane in crossing.lanes:
            state = lane.state
            joined: dict[int, list[Row]] = {}  # of those that had one list before, which get one
            for member in lane.members:
                if member in self.series:
                    before = id(member.rows) if member.rows else 0
                    if before not in joined:
                        joined[before] = [*member.rows, *lane.rows]
                    member.keep(joined[before], state)
                    self._changed[member] = None

    def _on_change(self, _: Alarm) -> None:
        now, ahead = self.clock.now, list(self._changed)
        looked = set[Any]()
        while ahead:  # and those that share anything with them
            for resource in ahead.pop().resources:
                if resource not in looked:
                    looked.add(resource)
                    for other in list(self._users[resource]):
                        if other.crossing is not None:
                            before = len(self._changed)
                            self._rest(other)
                            ahead += list(self._changed)[before:]
        self._end([series for series in self._changed if series.is_over])
        changed = list(self._changed)
        self._changed.clear()
        self._guests = {path: end for path, end in self._guests.items() if path.flows}
        for crossing in fold(changed, self._users, now) if changed else ():
            self._foresee(crossing)

    def _foresee(self, crossing: Crossing) -> None:
        for lane in crossing.lanes:
            for member in lane.members:
                member.crossing, member.lane = crossing, lane
        known = crossing.foresee()
        met = []
        for lane in crossing.lanes:
            arrivals = [row[4] for row in lane.rows]
            for member in lane.members:
                member.arrivals.times += arrivals
                if self._guests and any(not set(guest.live).isdisjoint(member.path.live) for guest in self._guests):
                    met += [member] * member.hits(max(self._guests.values()))
        if met:
            self.cut(met)
            return
        late = any(lane.latency == 0.0 for lane in crossing.lanes)  # it completes with its flow, after all else
        then = self._on_end if known else self._on_late
        self.clock.call_at(crossing.until, then, crossing, LAST if late else NORMAL)

    def _on_end(self, crossing: Crossing) -> None:
        for lane in crossing.lanes:
            for member in lane.members:
                if member.crossing is crossing:
                    self._rest(member)
        self._end([series for series in self._changed if series.is_over])
        self._wait()

    def _end(self, over: Sequence[Series]) -> None:
        stages: dict[int, Times] = {}  # of those that are alike, which have one list
        for series in over:
            self._drop(series)
            if id(series.rows) not in stages:
                stages[id(series.rows)] = _table(series.rows)
        for series in over:
            series.end(stages[id(series.rows)])

    def _on_late(self, crossing: Crossing) -> None:
        self.cut([member for lane in crossing.lanes for member in lane.members if member.crossing is crossing])

    def _drop(self, series: Series) -> None:
        if series not in self.series:
            return
        del self.series[series]
        self._changed.pop(series, None)
        for resource in series.resources:
            users = self._users[resource]
            users.pop(series, None)
            if not users:
                del self._users[resource]
        if not self.series:
            self._alike.clear()

    def carried(self) -> dict[Link, float]:
        """Return the bytes that series have carried over each link until now, which the paths do not count yet."""
        demand: dict[Link, float] = {}
        for series in self.series:
            self._rest(series)
            nbytes = series.carried(self.clock.now)
            for link in series.path.links:
                demand[link] = demand.get(link, 0.0) + nbytes
        self._wait()
        return demand

    def interrupt(self, path: Path, size: float) -> None:
        """Cut the series that will share a link with a flow of *size* bytes that starts now over *path*."""
        affected = self._beside(path)
        for guest in [other for other in self._guests if not set(path.live).isdisjoint(other.live)]:
            affected |= self._beside(guest)  # its rate changes
            del self._guests[guest]
        if affected and len(set(path.links)) == len(path.links) and self._network.is_idle(path.live):
            level = min([_free(path, link) for link in path.live])
            end = self.clock.now + size / level if level > 0.0 else inf
            if not any(series.hits(end) for series in affected):
                self._guests[path] = end
                return
        self.cut(affected)

    def _beside(self, path: Path) -> dict[Series, None]:
        beside: dict[Series, None] = {}
        for link in path.live:
            beside |= self._users.get(link, {})
        return beside

    def cut(self, several: Iterable[Series] | None = None) -> None:
        """Cut *several* series, by default all."""
        now = self.clock.now
        chosen = [series for series in (self.series if several is None else several) if series in self.series]
        for series in chosen:
            self._rest(series)
        for series in chosen:
            self._drop(series)
        self._wait()
        self._end([series for series in chosen if series.is_over])
        cut = [series for series in chosen if not series.is_over]
        flows: list[Flow | None] = [None] * len(cut)
        for place, series in enumerate(cut):
            nbytes, path = series.carried(now), series.path
            path.ended += nbytes
            if series.state[1] == MOVES:
                left = max(series.sizes[series.kinds[series.state[0]]] - nbytes, 0.0)
                flows[place] = self._network.start(path, left, _nobody)
        for series, flow in zip(cut, flows, strict=True):
            series.resume(flow)

    def of(self, thread: PostingThread) -> dict[Series, None]:
        """Return the series that *thread* posts."""
        return self._users.get(thread, {})


def _table(rows: list[Row]) -> Times:
    return np.ascontiguousarray(np.fromiter(chain.from_iterable(rows), np.float64, 5 * len(rows)).reshape(-1, 5).T)


def _free(path: Path, link: Link) -> float:
    free: float = path.cap if link is path.own else link.capacity
    return free


def _nobody(_: Any) -> None: ...
