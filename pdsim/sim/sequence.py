# SPDX-License-Identifier: Apache-2.0
"""Equal writes to one peer, one after the other, whose times are all known when the first is posted.

A chunk that goes in slices, plane by plane, or layer by layer as it is computed, is up to hundreds of writes.  While
nothing meets them they are one `Series` and cost one event at the end of the last.  Whatever could change their
times, or could see that they are not reported yet (another post, the end of either side, a flow on their links),
*cuts* the series first.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

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
    from pdsim.transfer import Peer, Transfer, Writes

    # their modules import this one
    Network: TypeAlias = Any
    SimEndpoint: TypeAlias = Any
    SimTransfer: TypeAlias = Any


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

    def _next(self) -> None:
        if self.done >= self._ask and self._left:
            count, times = len(self._parts), self._times
            end = self._total if count == 1 else self._total - count  # else the last of each is acted upon too late
            numbers = [number for number in range(self.done, end) if number % count in self._left]
            if len(numbers) > 1:
                first = self.done // count
                kinds = [number % count for number in numbers]
                earliest = [times[number // count] for number in numbers] if times else ()
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
            if writes := len([number for number in over if number % parts == part]):
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

    With *times* none is submitted before its own.  Series in *group* began at the same instant, are alike and share
    links.  At the end ``over(writes, sizes, transfer)`` is called with how many are complete, the bytes of each kind
    and, if the series was cut, the write under way.
    """

    def __init__(
        self,
        endpoint: SimEndpoint,
        network: Network,
        posted: Sequence[SimTransfer],
        kinds: Sequence[int],
        paces: Sequence[Pace],
        over: Callable[[int, Sequence[int], Transfer | None], None],
        times: Sequence[float],
    ) -> None:
        self.peer = posted[0].connection.remote.name
        self.path, _, _, self._overlap, self._latency, self._sleep = paces[0]
        self.count = len(kinds)
        self.start = network.clock.now
        # what times depend on beside the rate
        self.alike = self.start, [pace[1:] for pace in paces], kinds, times
        self.group: list[Series] = [self]
        self.arrivals = ScheduledArrivals()
        self.sizes = [paces[kind][1] for kind in kinds]  # of the flows
        self.stages: tuple[Times, ...] = ()
        self.begins = self.ends = np.empty(0)  # of the flows
        self.first = self.last = self.start  # when the first flow begins and the last one ends
        self._endpoint = endpoint
        self._clock: Clock = network.clock
        self._foreseen = network.foreseen
        self._posted = posted
        self._kinds = kinds
        self._paces = paces
        self._over = over
        self._times = times
        self._alarm: Alarm | None = None

    def begin(self, limit: float) -> bool:
        """Return whether all times are known; the series has begun then.

        They are not if a write takes more than half of *limit*, so that it may time out once something meets it.
        """
        if not self._foreseen.add(self):
            return False
        self.expect()
        submitted, complete = self.stages[0], self.stages[-1]
        if float((complete - submitted).max()) > limit / 2:
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
        if self._times or len(self._paces) > 1:
            self._set_apart(level)
            return
        _, size, posting, _, latency, _ = self._paces[0]
        count, seconds = self.count, size / level
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
        self._keep()

    def _set_apart(self, level: float) -> None:
        # As `set`, write by write, with pauses in which the copy engine may go to sleep.
        (idle, after, wake), now, rows = self._sleep, self.start, []
        for kind, time in zip(self._kinds, self._times or [now] * self.count, strict=True):
            _, size, posting, overlap, latency, _ = self._paces[kind]
            submitted = max(now, time)
            posted = submitted + posting
            begin = submitted if overlap else posted
            if begin - idle > after:
                begin += wake
            end = begin + size / level
            idle = max(end, posted)
            now = idle + latency
            rows.append((submitted, posted, begin, end, now))
        self.stages = tuple(np.array(rows).T)
        self._keep()

    def share(self, other: Series) -> None:
        """Take the times of *other*, which is alike and has the same rate."""
        self.stages = other.stages
        self._keep()

    def _keep(self) -> None:
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
            over, posted = self._over, self._posted
            for one in posted:
                one.release()
            self._forget()
            over(self.count, [one.transfer.batch.nbytes for one in posted], None)

    def on_cut(self, flow: Flow | None) -> None:
        """End before the last write; *flow* is that of the write under way, if it is on the wire."""
        count, posted, over = bisect_left(self.arrivals.times, self._clock.now), self._posted, self._over
        self._report(count)
        submitted, at, begin, end, complete = (float(column[count]) for column in self.stages)
        self._forget()
        begun = submitted <= self._clock.now
        for kind, one in enumerate(posted):
            if not begun or kind != self._kinds[count]:
                one.release()
        sizes, transfer = [one.transfer.batch.nbytes for one in posted], None
        if begun:
            stages = submitted, at, begin, end, complete
            transfer = self._endpoint.resume(posted[self._kinds[count]], stages, flow)
        over(count, sizes, transfer)

    def _report(self, count: int) -> None:
        # Records of the first *count*; the peer's rank acts upon one `Notification` when it acts upon the last.
        endpoint, first, acts = self._endpoint, self._posted[0], 0.0
        endpoint.series = None
        inbox, host = first.connection.remote.inbox, first.connection.remote.inbox.host_latency
        if count:
            _, at, _, ended, _ = self.stages
            first.connection.send_queue.carried(float(max(ended[count - 1], at[count - 1])))
        if first.notify and not host.instant:
            acts = host.conclude(self.arrivals, count, self._clock.now)
        kinds = np.array(self._kinds[:count])
        for kind, posted in enumerate(self._posted):
            batch, own = posted.transfer.batch, kinds == kind
            submitted, at, _, _, complete = (column[:count][own] for column in self.stages)
            name = Kind(endpoint.engine, "write", batch.source.owner, batch.target.owner, "ok")
            run = RecordRun(name, posted.transfer.label, batch.nbytes, len(batch), len(at))
            endpoint.recorder.series(run, submitted, submitted, at, complete, complete)
            if len(at) and posted.notify:
                inbox.act_at(acts, Notification(endpoint.name, posted.notify, len(at)))

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
        self.series: dict[Series, None] = {}
        self._guests: dict[Path, list[Series]] = {}  # paths whose one flow ends before it meets these series

    def add(self, series: Series) -> bool:
        """Keep *series*, which starts now; return False, and cut what is in its way, if its times are unknown."""
        path, level = series.path, _level([series])
        if len(set(path.links)) < len(path.links) or not 0.0 < level < inf:
            return False
        series.set(level)
        # flows that follow one another at once go on with the counter of the path, which rounds all but whole bytes
        at_once = bool((series.begins[1:] <= series.ends[:-1]).any())
        if at_once and not all(size.is_integer() for size in series.sizes):
            return False
        if not self._network.is_idle(path.live, series.first):
            return False
        affected = [other for other in self.beside(path.live) if _overlap(series, other)]
        if affected:
            group = list(dict.fromkeys(member for other in affected for member in other.group))
            if not self._join(series, group):
                self.cut(affected)
                return False
        self.series[series] = None
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
        series.set(level)
        for member in members:
            member.group = members
            member.share(series)
        for member in group:
            member.expect()
        return True

    def drop(self, series: Series, flows: int) -> None:
        """Forget *series* after so many *flows* have ended."""
        if series not in self.series:
            return
        del self.series[series]
        for link in series.path.live:
            others = self._by_link[link]
            others.pop(series, None)
            if not others:
                del self._by_link[link]
        for size in series.sizes[:flows]:  # one by one: the sum of floats depends on the order
            series.path.ended += size

    def carried(self) -> dict[Link, float]:
        """Return the bytes that series have carried over each link until now, which the paths do not count yet."""
        now = self._network.clock.now
        demand: dict[Link, float] = {}
        for series in self.series:
            done = int(series.ends.searchsorted(now, side="right"))
            nbytes = sum(series.sizes[:done])
            if done < series.count and series.begins[done] < now:
                begin, end = series.begins[done], series.ends[done]
                nbytes += series.sizes[done] * float((now - begin) / (end - begin))
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
        for series in list(self.series if several is None else several):
            group = [member for member in series.group if member in self.series] if series in self.series else []
            for member in group:
                self.drop(member, int(member.ends.searchsorted(now, side="right")))
            first = int(series.ends.searchsorted(now, side="right"))
            flows: list[Flow | None] = [None] * len(group)
            if group and first < int(series.begins.searchsorted(now, side="left")):  # in a group: of all or none
                sizes = [(member.path, member.sizes[first]) for member in group]
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
