# SPDX-License-Identifier: Apache-2.0
"""Equal writes to one peer, one after the other, whose times are all known when the first is posted.

A chunk that goes in slices, or plane by plane, is up to hundreds of writes.  While nothing meets them they are one
`Series` and cost one event at the end of the last.  Whatever could change their times, or could see that they are
not reported yet (another post, the end of either side, a flow on their links), *cuts* the series first.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from simpy.events import NORMAL

from pdsim.core.clock import LAST, Alarm
from pdsim.sim.hosts import ScheduledArrivals
from pdsim.transfer import Notification, WriteSequence
from pdsim.transfer.log import Kind, RecordRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdsim.core.clock import Clock
    from pdsim.sim.links import Flow, Link, Path
    from pdsim.transfer import Batches, Peer, Transfer

    # their modules import this one
    Network: TypeAlias = Any
    SimEndpoint: TypeAlias = Any
    SimTransfer: TypeAlias = Any


Times = npt.NDArray[np.float64]

Stages = tuple[float, float, float, float, float]  # submitted, posted, on the wire, off the wire, complete

Pace = tuple["Path", float, float, bool, float]
"""Path and bytes of a flow, seconds of posting, whether the flow begins before those are over, and latency."""


class SimWriteSequence(WriteSequence):
    """A `pdsim.transfer.WriteSequence` that posts many writes as one `Series` where their times are known.

    A series that is refused, or cut, is asked for again after a pause, counted in writes, that doubles each time.
    """

    def __init__(
        self,
        clock: Clock,
        endpoint: SimEndpoint,
        peer: Peer,
        batches: Batches,
        notify: bytes,
        label: str,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        super().__init__(clock, endpoint, peer, batches, notify, label, progress)
        self._foresee = endpoint.foresee
        self._series: Series | None = None  # that is under way
        self._pause = 1
        self._ask = 0  # how many writes are done when a series is asked for again

    def stop(self) -> None:
        super().stop()
        if self._series is not None:
            self._series.cut()

    def _next(self) -> None:
        left = len(self._batches) - self.done
        if self.done >= self._ask and left > 1 and not self._stopped:
            batch = self._batches[self.done]
            self._series = self._foresee(self._peer, batch, left, self._notify, self._label, self._on_series)
            if self._series is not None:
                return
            self._back_off()
        super()._next()

    def _back_off(self) -> None:
        self._pause *= 2
        self._ask = self.done + self._pause

    def _on_series(self, count: int, nbytes: int, transfer: Transfer | None) -> None:
        self._series = None
        if count:
            self._count(count, nbytes)
        if transfer is None:
            super()._next()
            return
        if count >= self._pause:
            self._pause = 1
        self._back_off()
        self._follow(transfer)


class Series:
    """So many writes like *posted*, from now on; each is submitted when the one before is complete.

    Series in *group* began at the same instant, are alike and share links.  At the end ``over(writes, nbytes,
    transfer)`` is called with those that are complete and, if the series was cut, the write under way.
    """

    def __init__(
        self,
        endpoint: SimEndpoint,
        network: Network,
        posted: SimTransfer,
        count: int,
        pace: Pace,
        over: Callable[[int, int, Transfer | None], None],
    ) -> None:
        self.peer = posted.connection.remote.name
        self.path, self.size, self._posting, self._overlap, self._latency = pace
        self.count = count
        self.start = network.clock.now
        self.alike = count, self.start, pace[1:]  # what times depend on beside the rate
        self.group: list[Series] = [self]
        self.arrivals = ScheduledArrivals()
        self.stages: tuple[Times, ...] = ()
        self.begins = self.ends = np.empty(0)  # of the flows
        self.first = self.last = self.start  # when the first flow begins and the last one ends
        self._endpoint = endpoint
        self._clock: Clock = network.clock
        self._foreseen = network.foreseen
        self._posted = posted
        self._over = over
        self._alarm: Alarm | None = None

    def begin(self, limit: float) -> bool:
        """Return whether all times are known; the series has begun then.

        They are not if a write takes more than half of *limit*, so that it may time out once something meets it.
        """
        if not self._foreseen.add(self):
            return False
        self.expect()
        if self.arrivals.times[0] - self.start > limit / 2:
            self._foreseen.drop(self, 0)
            self._forget()
            return False
        return True

    def cut(self) -> None:
        """Report what is complete, and make the write under way a transfer of its own."""
        self._foreseen.cut([self])

    def hits(self, begin: float, end: float) -> bool:
        """Return whether a flow of it is on the wire at any time from *begin* to *end*."""
        if begin > self.last or end < self.first:
            return False
        first = int(self.ends.searchsorted(begin))
        return first < self.count and bool(self.begins[first] <= end)

    def set(self, level: float) -> None:
        """Let each flow have the rate *level*: the sums are those of `SendQueue`, in its order, bit for bit."""
        count, posting, seconds, latency = self.count, self._posting, self.size / level, self._latency
        stages = (max(posting, seconds), latency) if self._overlap else (posting, seconds, latency)
        each = len(stages)
        terms = np.empty(1 + each * count)
        terms[0] = self.start
        for place, stage in enumerate(stages):
            terms[1 + place :: each] = stage
        sums = np.add.accumulate(terms)
        submitted, complete = sums[:-1:each], sums[each::each]
        if self._overlap:
            self.stages = submitted, submitted + posting, submitted, submitted + seconds, complete
        else:
            self.stages = submitted, sums[1::each], sums[1::each], sums[2::each], complete
        _, _, self.begins, self.ends, _ = self.stages
        self.first, self.last = float(self.begins[0]), float(self.ends[-1])

    def expect(self) -> None:
        """Wait for the end of the last write."""
        self.arrivals.times = self.stages[-1].tolist()
        at = self.arrivals.times[-1]
        # without latency it completes with its flow, which is after all else of the instant
        self._alarm = Alarm(self._clock, self._on_end, LAST if at == self.last else NORMAL)
        self._alarm.arm(at)

    def _on_end(self, alarm: Alarm) -> None:
        if alarm is self._alarm:
            self._foreseen.drop(self, self.count)
            self._report(self.count)
            self._posted.release()
            over, nbytes = self._over, self.count * self._posted.transfer.batch.nbytes
            self._forget()
            over(self.count, nbytes, None)

    def on_cut(self, flow: Flow | None) -> None:
        """End before the last write; *flow* is that of the write under way, if it is on the wire."""
        count, posted, over = bisect_left(self.arrivals.times, self._clock.now), self._posted, self._over
        self._report(count)
        submitted, at, begin, end, complete = (float(column[count]) for column in self.stages)
        self._forget()
        transfer = self._endpoint.resume(posted, (submitted, at, begin, end, complete), flow)
        over(count, count * transfer.batch.nbytes, transfer)

    def _report(self, count: int) -> None:
        # Records of the first *count*; the peer's rank acts upon one `Notification` when it acts upon the last.
        endpoint, posted = self._endpoint, self._posted
        endpoint.series = None
        batch, inbox, acts = posted.transfer.batch, posted.connection.remote.inbox, 0.0
        submitted, at, _, ended, complete = (column[:count] for column in self.stages)
        kind = Kind(endpoint.engine, "write", batch.source.owner, batch.target.owner, "ok")
        run = RecordRun(kind, posted.transfer.label, batch.nbytes, len(batch), count)
        endpoint.recorder.series(run, submitted, submitted, at, complete, complete)
        if count:
            posted.connection.send_queue.carried(float(max(ended[-1], at[-1])))
        if posted.notify:
            if not inbox.host_latency.instant:
                acts = inbox.host_latency.conclude(self.arrivals, count, self._clock.now)
            if count:
                inbox.act_at(acts, Notification(endpoint.name, posted.notify, count))

    def _forget(self) -> None:
        self._alarm = None
        self.group = []  # no garbage in a circle


class Foreseen:
    """All series of a network.

    Invariant: no flow of a series is under way at the same time, on the same link, as a flow of the network or of a
    series outside its group.  Then rates are the same from flow to flow, and so are the times, bit for bit.  What is
    about to change that *cuts* the series first: its flow under way enters the network as of its begin.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._by_link: dict[Link, dict[Series, None]] = {}
        self._all: dict[Series, None] = {}
        self._guests: dict[Path, list[Series]] = {}  # paths whose one flow ends before it meets these series

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, series: Series) -> bool:
        """Keep *series*, which starts now; return False, and cut what is in its way, if its times are unknown."""
        path, level = series.path, _level([series])
        if len(set(path.links)) < len(path.links) or not 0.0 < level < inf:
            return False
        series.set(level)
        # flows that follow one another at once would go on with the counters of the path
        apart = bool((series.begins[1:] > series.ends[:-1]).all())
        if not apart or not self._network.is_idle(path.live, series.first):
            return False
        affected = [other for other in self.beside(path.live) if _overlap(series, other)]
        if affected:
            group = list(dict.fromkeys(member for other in affected for member in other.group))
            if not self._join(series, group):
                self.cut(affected)
                return False
        self._all[series] = None
        for link in path.live:
            self._by_link.setdefault(link, {})[series] = None
        return True

    def beside(self, links: Sequence[Link]) -> dict[Series, None]:
        """Return the series on any of *links*."""
        crossing: dict[Series, None] = {}
        for link in links:
            if series := self._by_link.get(link):
                crossing |= series
        return crossing

    def _join(self, series: Series, group: list[Series]) -> bool:
        members = [*group, series]
        level = _level(members)
        if any(other.alike != series.alike for other in group) or not 0.0 < level < inf:
            return False
        links = {link for member in members for link in member.path.live}
        if any(member in guests for guests in self._guests.values() for member in group):
            return False
        if any(other not in group for link in links for other in self._by_link.get(link, ())):
            return False
        for member in members:
            member.group = members
            member.set(level)
        for member in group:
            member.expect()
        return True

    def drop(self, series: Series, flows: int) -> None:
        """Forget *series*, of which *flows* have ended."""
        if series not in self._all:
            return
        del self._all[series]
        for link in series.path.live:
            others = self._by_link[link]
            others.pop(series, None)
            if not others:
                del self._by_link[link]
        for _ in range(flows):  # one by one: the sum of floats depends on the order
            series.path.ended += series.size

    def carried(self) -> dict[Link, float]:
        """Return the bytes that series have carried over each link until now, which the paths do not count yet."""
        now = self._network.clock.now
        demand: dict[Link, float] = {}
        for series in self._all:
            done = int(series.ends.searchsorted(now, side="right"))
            nbytes = done * series.size
            if done < series.count and series.begins[done] < now:
                begin, end = series.begins[done], series.ends[done]
                nbytes += series.size * float((now - begin) / (end - begin))
            for link in series.path.links:
                demand[link] = demand.get(link, 0.0) + nbytes
        return demand

    def interrupt(self, path: Path, size: float) -> None:
        """Cut the series that will share a link with a flow of *size* bytes that starts now over *path*."""
        links, now = path.live, self._network.clock.now
        affected: dict[Series, None] = {}
        for guest in [other for other in self._guests if not other.flows or not set(links).isdisjoint(other.live)]:
            affected |= dict.fromkeys(self._guests.pop(guest) if guest.flows else ())  # its rate changes
            self._guests.pop(guest, None)
        crossing = self.beside(links)
        if crossing:
            level = min((_free(path, link) for link in links), default=inf)
            alone = len(set(path.links)) == len(path.links) and self._network.is_idle(links, now)
            if not alone or not 0.0 < level < inf:
                affected |= crossing
            else:
                end = now + size / level
                affected |= {series: None for series in crossing if series.hits(now, end)}
                self._guests[path] = list(crossing)
        self.cut(affected)

    def cut(self, several: Iterable[Series] | None = None) -> None:
        """Cut *several* series, by default all, and those in a group with them."""
        now = self._network.clock.now
        for series in list(self._all if several is None else several):
            group = [member for member in series.group if member in self._all] if series in self._all else []
            for member in group:
                self.drop(member, int(member.ends.searchsorted(now, side="right")))
            first = int(series.ends.searchsorted(now, side="right"))
            flows: list[Flow | None] = [None] * len(group)
            if group and first < int(series.begins.searchsorted(now, side="left")):  # in a group: of all or none
                sizes = [(member.path, member.size) for member in group]
                flows = [*self._network.resume(sizes, float(series.begins[first]))]
            for member, flow in zip(group, flows, strict=True):
                member.on_cut(flow)


def _level(several: list[Series]) -> float:
    # The rate of each flow if all begin together; 0 if rates differ.
    counts: dict[Link, float] = {}
    for series in several:
        for link in series.path.live:
            counts[link] = counts.get(link, 0.0) + 1.0
    levels = {
        min((_free(series.path, link) / counts[link] for link in series.path.live), default=inf)
        for series in several
    }
    return levels.pop() if len(levels) == 1 else 0.0


def _free(path: Path, link: Link) -> float:
    return path.cap if link is path.own else link.capacity


def _overlap(series: Series, other: Series) -> bool:
    if series.first > other.last or series.last < other.first:
        return False
    # the first of the other's that does not end before; there is none for those that begin last
    after = other.ends.searchsorted(series.begins)
    inside = int(after.searchsorted(other.count))
    return bool((other.begins[after[:inside]] <= series.ends[:inside]).any())
