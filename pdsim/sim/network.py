# SPDX-License-Identifier: Apache-2.0
"""Flows that share links max-min fairly, on the virtual clock: links, paths, and the network of all of them.

A *flow* carries bytes over a *path* of links as a fluid.  Rates are max-min fair: every flow has a *bottleneck*, a
full link or its own cap, where no flow is faster (Bertsekas and Gallager, *Data Networks*, section 6.5.2).  Levels
and capacities are in bytes/s.  Nothing ticks: between two changes all rates are constant, so the end of a flow is
known, and one alarm at the earliest end serves the whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import fsum, inf
from typing import Any, Final

from pdsim.core.clock import LAST, Alarm, Clock
from pdsim.sim.sequence import Foreseen

NOW: Final = 1.0 + 1e-15  # ends within a few roundings of now are now: flows alike end in one event, not in two
ENDED: Final = 1.0 + 1e-14  # ends within a few roundings of one another, in service, are one end
SAME: Final = 1e-12  # two rates closer than this, relatively, are the same rate with different rounding
REBASE: Final = 1000  # flows that end on a busy link before its counter of service starts from zero again
OPEN: Final = -1.0  # the level of a link that limits nobody, or whose level is being determined
FEW: Final = 12  # up to so many links it is faster to look at all of them than to keep them in order


class Flow:
    """*size* bytes on their way since `Network.start`, reported with *tag* when they have arrived."""

    __slots__ = ("begin", "done", "path", "size", "tag")

    def __init__(self, path: Path, size: float, done: Callable[[Any], None], tag: Any) -> None:
        self.path = path
        self.size = size
        self.tag = tag
        self.done: Callable[[Any], None] | None = done  # None: called or aborted
        self.begin = 0.0  # service of the path


class Link:
    """A capacity in bytes/s that flows share: a port, a bus, a memory.  Made by `Network.link`.

    A link that limits flows allows each of them the same rate, its *level*, so one counter of *service*, the bytes
    that each has received, times them all.  Links that others let too little through to fill are *implied* by a
    *cover* of others and left out until a new path or capacity makes them *live* (1.5 times as fast on 512 GPUs).
    *free* and *unset* are sums, which start anew where a link is resized or empties: rounding is bounded.
    """

    def __init__(self, name: str, index: int, capacity: float) -> None:
        self.name = name
        self.index = index  # in order of creation
        self.nominal = capacity  # that it was made with
        self.capacity = capacity  # see `Network.set_capacity`
        self._paths: dict[Path, int] = {}  # how many times each passes here
        self._cover: dict[Link, int] = {}  # the links that imply this one, and how often what they carry passes here
        self.covers: dict[Link, None] = {}  # the links that this one helps to imply
        self.live = False
        self.active: dict[Path, None] = {}  # the paths with flows, if live
        self.bound: dict[Path, None] = {}  # those that this link limits
        self.free = capacity  # what flows with a rate leave
        self.unset = 0.0  # flows without a rate, while solving
        self.level = OPEN
        self.key = inf  # the level with which it waits to be settled
        self.was = 0.0  # the level before the solution under way
        self.service = 0.0  # bytes that each flow limited here has received at the time `since`
        self.since = 0.0
        self.age = 0  # flows ended since `service` was 0
        self.first_end = inf  # the service at which the next flow ends
        self.eta = inf  # and its time

    def __repr__(self) -> str:
        return f"<Link {self.name!r} {self.capacity:g} bytes/s>"

    @property
    def carried(self) -> float:
        """Bytes carried until now; a path that passes twice counts twice.  Linear in the number of paths."""
        return fsum(times * path.carried for path, times in self._paths.items())

    def is_implied(self) -> bool:
        # Each link of a cover is smaller than what it covers, in the order of capacity and index, so that links
        # never imply each other in a circle.
        total = 0.0
        for link, times in self._cover.items():
            total += link.capacity * times
            if link.capacity == self.capacity and link.index > self.index:
                return False
        return total <= self.capacity

    def let_pass(self, path: Path, times: int) -> bool:
        """Let *path* pass *times* times; return whether this link is still implied."""
        self._paths[path] = times
        if self.live:
            return False
        position = path.links.index(self)
        ranks = [
            (abs(at - position), link.capacity, at, -(-times // path.links.count(link)))
            for at, link in enumerate(path.links)
            if link is not self and link.capacity <= self.capacity
        ]
        if any(self._cover.get(path.links[at], 0) >= ratio for _, _, at, ratio in ranks):
            return True
        if not ranks:
            return False
        _, _, at, ratio = min(ranks)
        self._cover[path.links[at]] = ratio
        path.links[at].covers[self] = None
        return self.is_implied()

    def promote(self) -> None:
        """Take part in the solution from now on.  Until now the link was implied, so the present rates suit it."""
        self.live = True
        for link in self._cover:
            del link.covers[self]
        self._cover.clear()
        self.free = self.capacity
        for path, times in self._paths.items():
            path.find_live()
            if path.count:
                self.active[path] = None
                self.free -= times * path.count * path.limit.level

    def resize(self, capacity: float) -> None:
        self.capacity = capacity
        for link in (self, *self.covers):  # which may limit flows because of it
            if not link.live and not link.is_implied():
                link.promote()

    def finish(self, now: float) -> list[tuple[int, Flow]]:
        """Take the flows that end now off their paths; return them with their numbers."""
        self.service = self.first_end
        self.since = now
        limit = self.service * ENDED
        ended = []
        for path in self.bound:
            flows = path.ahead
            while flows[0][0] - path.offset <= limit:
                _, order, flow = heappop(flows)
                path.drop(flow, flow.size)
                ended.append((order, flow))
        self.age += len(ended)
        if self.age > REBASE and self.age > sum(path.flows for path in self.bound):
            # where flows never cease service would grow until small flows drown in it
            for path in self.bound:
                path.rebase(self.service + path.offset)
            self.service = 0.0
            self.age = 0
        return ended


NOBODY = Link("nobody", -1, 0.0)  # what limits a path without flows
NEVER: tuple[float, int, Any] = (inf, 0, None)  # the end after the last one of a path


class Path:
    """The way of flows over *links*, each limited to *cap* bytes/s.  Made by `Network.path`.

    Flows of one path have the same rate, so one counter of service times them all: a flow that starts at v ends at
    v + size.  The counter is that of the link that limits the path now, plus an offset.
    """

    def __init__(self, clock: Clock, index: int, links: tuple[Link, ...], cap: float) -> None:
        self.links = links
        self.cap = cap
        self.index = index
        self.flows = 0  # how many there are now
        self._clock = clock
        self.count = 0.0  # how many there were when the rate was solved
        # a cap is a link of the path's own that grows with the number of flows
        self.own = Link(f"cap of path {index}", -2 - index, 0.0) if cap < inf else None
        self.unlimited = not links and cap == inf
        self.live: tuple[Link, ...] = ()  # the links that can limit this path
        self.rest: tuple[Link, ...] = ()  # and do not; a link that limits it and is passed twice is here once
        self.limit = NOBODY
        self.offset = 0.0
        self.ahead: list[tuple[float, int, Any]] = [NEVER]  # ends by service: a heap, the last has no flow
        self.begun = 0.0  # the sum of the service at the start of each flow
        self.ended = 0.0  # bytes of flows that are no more
        for link in [each for each in dict.fromkeys(links) if not each.let_pass(self, links.count(each))]:
            if not link.live:
                link.promote()
        self.find_live()

    @property
    def carried(self) -> float:
        return self.ended + self.flows * self.served(self._clock.now) - self.begun if self.flows else self.ended

    def find_live(self) -> None:
        own = () if self.own is None else (self.own,)
        self.live = (*(link for link in self.links if link.live), *own)
        self.find_rest()

    def find_rest(self) -> None:
        rest = list(self.live)
        if self.limit in rest:
            rest.remove(self.limit)
        self.rest = tuple(rest)

    def served(self, now: float) -> float:
        """Return the service that each flow of the path would have received by *now*, from the path's own zero."""
        limit = self.limit
        return limit.service + max(limit.level, 0.0) * (now - limit.since) + self.offset

    def drop(self, flow: Flow, carried: float) -> None:
        self.flows -= 1
        self.ended += carried
        self.begun = self.begun - flow.begin if self.flows else 0.0

    def rebase(self, base: float) -> None:
        """Count service from *base* on, so that its digits do not run out."""
        self.ahead = [(end - base, order, flow) for end, order, flow in self.ahead if end < inf]
        heapify(self.ahead)
        self.begun = 0.0
        for _, _, flow in self.ahead:
            flow.begin -= base
            self.begun += flow.begin
        self.ahead.append(NEVER)
        self.offset = 0.0

    def bind(self, link: Link, now: float) -> None:
        limit = self.limit
        self.offset += limit.service + limit.was * (now - limit.since) - link.service
        self.unbind()
        self.limit = link
        link.bound[self] = None
        self.find_rest()

    def unbind(self) -> None:
        limit = self.limit
        limit.bound.pop(self, None)
        if not limit.bound:  # it forgets its service
            limit.service = limit.was = 0.0
            limit.age = 0
            limit.eta = inf

    def release(self) -> None:
        self.unbind()
        self.limit = NOBODY
        self.offset = 0.0


class Network:
    """All links, paths and flows that can influence one another; used on the thread of *clock* only.

    Equal calls in equal order give equal times, bit for bit.  Links and paths stay, flows come and go.  Sizes are
    bytes, capacities and rates bytes/s, times seconds.  All changes of an instant are solved together, after the
    last event of it::

        network = Network(Clock())
        path = network.path([network.link("port", 100.0)])
        network.start(path, 100.0, print, "a")  # at t=2: half of the port each
        network.start(path, 200.0, print, "b")  # at t=3: the port for itself since t=2
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.links: list[Link] = []
        self.paths: list[Path] = []
        self.events = 0  # of the clock, that the network has used
        self.foreseen = Foreseen(self)  # flows that are not in the network until something meets them
        self.isolated: Any = None  # and transfers: `pdsim.sim.posting.IsolatedTransfers`, once something is posted
        self._by_links: dict[tuple[tuple[Link, ...], float], Path] = {}
        self.solves = 0  # how many times rates were solved
        self.touched = 0  # how many paths were given a rate
        self._ends: list[tuple[float, int, Link]] = []  # a heap of `Link.eta`, by index, and times that were one
        self._now = 0.0
        self._near: list[Link] = []  # links with flows whose rate is to be determined
        self._opened: list[Link] = []  # links whose level was taken back
        self._rising = 0  # paths whose rate is to be determined
        self._changed: dict[Path, None] = {}
        self._resized: dict[Link, None] = {}
        self._instant: list[tuple[int, Flow]] = []  # flows that take no time
        self._flows = 0
        self._on_changes = Alarm(clock, self._on_change, LAST)
        self._waker = Alarm(clock, self._on_end, LAST)
        self._wake_at = inf

    def link(self, name: str, capacity: float) -> Link:
        """Return a new link of *capacity* bytes/s.  Raise a `ValueError` unless that is finite and >= 0."""
        link = Link(name, len(self.links), _checked(capacity))
        self.links.append(link)
        return link

    def path(self, links: Sequence[Link], cap: float = inf) -> Path:
        """Return the path over *links* whose flows get at most *cap* bytes/s each; equal arguments give one path.

        A link that stands twice carries every byte twice.  The order has no influence on rates; the physical order
        lets the network see best which links can never limit a flow.  A path without links and cap takes no time.
        Raise a `ValueError` if *cap* is not positive or a link is of another network.
        """
        if not cap > 0.0:
            raise ValueError(f"cap(={cap}) must be > 0")
        key = (tuple(links), cap)
        if (path := self._by_links.get(key)) is None:
            for link in key[0]:
                if link.index >= len(self.links) or self.links[link.index] is not link:
                    raise ValueError(f"links must be of this network, {link} is not")
            self._cut()  # with another path, a link may limit what it did not limit before
            path = self._by_links[key] = Path(self.clock, len(self.paths), key[0], float(cap))
            self.paths.append(path)
        return path

    def set_capacity(self, link: Link, capacity: float) -> None:
        """Let *link* carry *capacity* bytes/s from now on; at 0, its flows stall.  Errors as `link`."""
        capacity = _checked(capacity)
        self._cut()
        link.resize(capacity)
        self._resized[link] = None
        self._wait()

    def start(self, path: Path, size: float, done: Callable[[Any], None], tag: Any = None) -> Flow:
        """Start a flow of *size* bytes over *path* now; ``done(tag)`` is called when the last byte has arrived.

        Flows that end at the same instant are reported in the order in which they started, after all else that
        happens at that instant.  A flow of no bytes ends at once, even where others stall.  Raise a `ValueError` if
        *size* is negative or not finite.
        """
        if not 0.0 <= size < inf:
            raise ValueError(f"size(={size}) must be >= 0 and finite")
        if self.isolated is not None:
            self.isolated.meet(path.live)
        if self.foreseen.series:
            self.foreseen.interrupt(path, size)
        flow = Flow(path, size, done, tag)
        self._flows += 1
        if size == 0.0 or path.unlimited:
            self._instant.append((self._flows, flow))
            self._wait()
            return flow
        now = self.clock.now
        flow.begin = begin = path.served(now)
        path.flows += 1
        path.begun += begin
        heappush(path.ahead, (begin + size, self._flows, flow))
        self._change(path)
        return flow

    def abort(self, flow: Flow) -> float:
        """Take *flow* off its path, unreported; return the bytes still to be carried, 0.0 if it is over already."""
        path = flow.path
        flow.done = None
        for entry in path.ahead:
            if entry[2] is flow:
                left: float = max(flow.size - (path.served(self.clock.now) - flow.begin), 0.0)
                path.ahead.remove(entry)
                heapify(path.ahead)
                path.drop(flow, flow.size - left)
                self._change(path)
                return left
        for instant in self._instant:
            if instant[1] is flow:
                self._instant.remove(instant)
                return flow.size
        return 0.0

    def carried(self) -> list[float]:
        """Return the bytes that each of `links` has carried until now, flows that are foreseen included."""
        ahead, isolated = self.foreseen.carried(), self.isolated.carried() if self.isolated is not None else {}
        return [link.carried + ahead.get(link, 0.0) + isolated.get(link, 0.0) for link in self.links]

    def _cut(self) -> None:
        if self.isolated is not None:
            self.isolated.cut()
        self.foreseen.cut()

    def is_idle(self, links: Sequence[Link]) -> bool:
        """Return whether no flow is on *links*."""
        for link in links:
            if link.active and any(path.flows for path in link.active):
                return False
        if not self._changed:
            return not self._resized
        changed = any(path.flows and not set(links).isdisjoint(path.live) for path in self._changed)
        return not (self._resized or changed)

    def _change(self, path: Path) -> None:
        self._changed[path] = None
        self._wait()

    def _wait(self) -> None:
        if not self._on_changes.armed:
            self._on_changes.arm(self.clock.now)

    def _on_change(self, _: Alarm) -> None:
        self.events += 1
        now = self.clock.now
        if self._instant or self._wake_at <= now * NOW:
            self._finish(now)
        self._renew(now)

    def _on_end(self, alarm: Alarm) -> None:
        self.events += 1
        if alarm is self._waker:
            now = self.clock.now
            self._wake_at = inf
            self._finish(now)
            self._renew(now)

    def _renew(self, now: float) -> None:
        if self._changed or self._resized:
            if self.clock.peek() <= now:
                self._wait()
                return
            self._settle_all(now)
        self._arm()

    def _arm(self) -> None:
        at = self._next_end()
        if at < self._wake_at:
            self._wake_at = at
            if self._waker.armed:  # too late; it will find that it is not the waker any more
                self._waker = Alarm(self.clock, self._on_end, LAST)
            self._waker.arm(at)

    def _finish(self, now: float) -> None:
        due, self._instant = self._instant, []
        for _, flow in due:
            flow.path.ended += flow.size
        while self._next_end() <= now * NOW:
            link = heappop(self._ends)[2]
            link.eta = inf
            for order, flow in link.finish(now):
                due.append((order, flow))
                self._changed[flow.path] = None
        due.sort()
        for _, flow in due:
            done = flow.done
            if done is not None:
                flow.done = None
                done(flow.tag)

    def _settle_all(self, now: float) -> None:
        moved = []
        for path in self._changed:
            if path.flows != path.count:
                moved.append(path)
            else:  # the same rates, another next end
                link, self._now = path.limit, now
                link.first_end = min((each.ahead[0][0] - each.offset for each in link.bound), default=inf)
                self._announce(link)
        self._solve(moved, self._resized, now)
        self._changed.clear()
        self._resized.clear()
        if len(self._ends) > 4 * (len(self.links) + len(self.paths)) + 256:  # most are out of date
            self._ends = list({entry for entry in self._ends if entry[0] == entry[2].eta})
            heapify(self._ends)

    def _next_end(self) -> float:
        ends = self._ends
        while ends and ends[0][0] != ends[0][2].eta:
            heappop(ends)
        return ends[0][0] if ends else inf

    def _solve(self, changed: Iterable[Path], resized: Iterable[Link], now: float) -> None:
        # Before and after, every path with flows has a limit, a link that is full or its own cap, where none is
        # faster.  Only levels that a change reaches are solved again: links are settled in the order of rising
        # level, and a path whose limit still holds is never looked at.
        self.solves += 1
        self._now = now
        for link in resized:
            for path in link.active:
                if path.limit.level >= 0.0:
                    self._open(path.limit)
            link.free = link.capacity  # as none of them has a rate: a sum would lose digits
        for path in changed:
            if self._rising and not any(link.unset for link in path.live):
                self._fill()  # what comes now is far from what came before, so that apart both are smaller
            self._recount(path)
        self._fill()
        self._opened.clear()

    def _recount(self, path: Path) -> None:
        if path.limit.level >= 0.0:
            self._open(path.limit)
        flows = float(path.flows)
        gained = flows - path.count
        if path.own is not None:
            path.own.free += path.cap * gained
            path.own.capacity = path.cap * path.flows
        for link in path.live:
            if link.level >= 0.0:
                self._open(link)
            if not link.unset:
                self._near.append(link)
            link.unset += gained
        if not path.count:
            self._rising += 1
            for link in path.live:
                link.active[path] = None
        path.count = flows
        if path.count:
            return
        self._rising -= 1
        path.release()
        for link in path.live:
            link.active.pop(path, None)  # where it passes twice, it is gone already
            if not link.active:
                link.free = link.capacity

    def _open(self, link: Link) -> None:
        # Its paths have no rate until they are settled again, and leave to their other links what they took.
        # *was* keeps the level, by which service is counted until now.
        near = self._near
        self._opened.append(link)
        link.was = level = link.level
        link.level = OPEN
        self._rising += len(link.bound)
        total = 0.0
        for path in link.bound:
            flows = path.count
            total += flows
            for other in path.rest:
                other.free += flows * level
                if other.unset:
                    other.unset += flows
                else:
                    other.unset = flows
                    near.append(other)
        link.free += total * level
        if not link.unset:
            near.append(link)
        link.unset += total

    def _fill(self) -> None:
        near = self._near
        while self._rising:
            if len(near) > FEW:
                near[:] = [link for link in near if link.unset]
                if len(near) > FEW:
                    self._fill_many()
                    return
            lowest = inf
            for link in near:
                flows = link.unset
                if flows:
                    level = link.free / flows
                    if level < lowest:
                        lowest = level
                        tightest = link
            self._settle(tightest, max(lowest, 0.0))
        near.clear()

    def _fill_many(self) -> None:
        # A link's level can only rise as others settle below it, unless a level is taken back; so an entry is
        # checked when it comes up, and put back if it is out of date.  This takes logarithmic time a link.
        heap: list[tuple[float, int, Link]] = []
        fresh = self._near
        while self._rising:
            for link in fresh:
                flows = link.unset
                if flows:
                    level = link.free / flows
                    if level < link.key:
                        link.key = level
                        heappush(heap, (level, link.index, link))
            fresh.clear()
            key, index, link = heappop(heap)
            if key != link.key:
                continue
            link.key = inf
            flows = link.unset
            if not flows:
                continue
            level = link.free / flows
            if level > key + abs(key) * SAME:  # others were settled since
                link.key = level
                heappush(heap, (level, index, link))
                continue
            self._opened.clear()
            self._settle(link, max(level, 0.0))
            for other in self._opened:  # only this can let a level sink
                for path in other.bound:
                    fresh += path.live
        for _, _, link in heap:
            link.key = inf
        fresh.clear()

    def _settle(self, link: Link, level: float) -> None:
        # A path that another link allows more than *level* is limited here from now on, so that link is opened
        # first and this one comes up again.  A path that gets less than before leaves more to its other links, so
        # those of them that were settled are opened, too.
        if link.level >= 0.0:
            self._open(link)
            return
        above = level * (1.0 + SAME)
        limited = []
        fair = True
        for path in link.active:
            rate = path.limit.level
            if rate < 0.0:
                limited.append(path)
            elif rate > above:
                self._open(path.limit)
                fair = False
        if not fair:
            return
        now = self._now
        link.service += link.was * (now - link.since)
        link.since = now
        first = inf
        for path in limited:
            limit = path.limit
            slower = limit.was > above
            if limit is not link:
                path.bind(link, now)
            end = path.ahead[0][0] - path.offset
            if end < first:
                first = end
            flows = path.count
            for other in path.rest:
                other.free -= flows * level
                other.unset -= flows
                if slower and other.level >= 0.0:
                    self._open(other)
        link.free = link.unset = 0.0
        link.level = link.was = level
        link.first_end = first
        self._rising -= len(limited)
        self.touched += len(limited)
        self._announce(link)

    def _announce(self, link: Link) -> None:
        ahead, level, eta = link.first_end - link.service, link.level, inf
        if ahead <= 0.0:
            eta = self._now
        elif level > 0.0:
            eta = max(link.since + ahead / level, self._now)
        if link.eta != eta < inf:
            heappush(self._ends, (eta, link.index, link))
        link.eta = eta


def _checked(capacity: float) -> float:
    if not 0.0 <= capacity < inf:
        raise ValueError(f"capacity(={capacity}) must be >= 0 and finite")
    return float(capacity)
