# SPDX-License-Identifier: Apache-2.0
"""Links, paths and the max-min fair rates of their flows, solved again only where a change reaches.

A *flow* carries bytes over a *path* of links as a fluid.  Rates are max-min fair: every flow has a *bottleneck*, a
full link or its own cap, where no flow is faster (Bertsekas and Gallager, *Data Networks*, section 6.5.2).  Levels
and capacities are in bytes/s.  Flows start and end in `pdsim.sim.network`, where links and paths are made.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdsim.core.clock import Clock


ENDED: Final = 1.0 + 1e-14
"""Ends within a few roundings of one another, in service, are one end."""

SAME: Final = 1e-12
"""Two rates closer than this, relatively, are the same rate with different rounding."""

REBASE: Final = 1000
"""How many flows end on a busy link before its counter of service starts from zero again."""

OPEN: Final = -1.0
"""The level of a link that limits nobody, or whose level is being determined."""

FEW: Final = 12
"""Up to so many links it is faster to look at all of them than to keep them in order."""


class Flow:
    """*size* bytes on their way since `Network.start`, reported with *tag* when they have arrived."""

    __slots__ = ("begin", "done", "path", "size", "tag")

    def __init__(self, path: Path, size: float, done: Callable[[Any], None], tag: Any) -> None:
        self.path = path
        self.size = size
        self.tag = tag
        self.done: Callable[[Any], None] | None = done  # None: called or aborted
        self.begin = 0.0  # service of the path

    def __repr__(self) -> str:
        return f"<Flow of {self.size:g} bytes over {self.path!r}>"


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
        return sum(times * path.carried for path, times in self._paths.items())

    @property
    def load(self) -> float:
        """Bytes/s that flow now (after all events of this instant)."""
        return sum(times * path.flows * path.rate for path, times in self._paths.items() if path.flows)

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
        best: tuple[float, float, int, int] | None = None
        for at, link in enumerate(path.links):
            if link is self or link.capacity > self.capacity:
                continue
            ratio = -(-times // path.links.count(link))
            if self._cover.get(link, 0) >= ratio:
                return True
            rank = (abs(at - position), link.capacity, at, ratio)
            if best is None or rank < best:
                best = rank
        if best is None:
            return False
        chosen = path.links[best[2]]
        self._cover[chosen] = best[3]
        chosen.covers[self] = None
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
        """Set the *capacity*, and promote the links that may limit flows because of it."""
        self.capacity = capacity
        for link in (self, *self.covers):
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


NOBODY = Link("nobody", -1, 0.0)
"""What limits a path without flows."""

NEVER: tuple[float, int, Any] = (inf, 0, None)
"""The end after the last one of a path."""


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
        crowded = [link for link in dict.fromkeys(links) if not link.let_pass(self, links.count(link))]
        for link in crowded:
            if not link.live:
                link.promote()
        self.find_live()

    def __repr__(self) -> str:
        return f"<Path {'-'.join(link.name for link in self.links)}>"

    @property
    def rate(self) -> float:
        """Bytes/s of each flow now (after all events of this instant); 0 if there is none."""
        return max(self.limit.level, 0.0) if self.flows else 0.0

    @property
    def carried(self) -> float:
        """Bytes carried until now, by all flows."""
        if not self.flows:
            return self.ended
        return self.ended + self.flows * self.served(self._clock.now) - self.begun

    def find_live(self) -> None:
        own = () if self.own is None else (self.own,)
        self.live = (*(link for link in self.links if link.live), *own)
        self.find_rest()

    def find_rest(self) -> None:
        rest, passed = [], False
        for link in self.live:
            if link is self.limit and not passed:
                passed = True
            else:
                rest.append(link)
        self.rest = tuple(rest)

    def served(self, now: float) -> float:
        """Return the service that each flow of the path would have received by *now*, from the path's own zero."""
        limit = self.limit
        return limit.service + max(limit.level, 0.0) * (now - limit.since) + self.offset

    def drop(self, flow: Flow, carried: float) -> None:
        """Count *flow* out, which has carried *carried* bytes."""
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
        """Let *link* be the limit from now on."""
        limit = self.limit
        self.offset += limit.service + limit.was * (now - limit.since) - link.service
        self.unbind()
        self.limit = link
        link.bound[self] = None
        self.find_rest()

    def unbind(self) -> None:
        """Take the path off the link that limits it; a link that limits nobody any more forgets its service."""
        limit = self.limit
        limit.bound.pop(self, None)
        if not limit.bound:
            limit.service = limit.was = 0.0
            limit.age = 0
            limit.eta = inf

    def release(self) -> None:
        """Forget the limit, for there is no flow any more."""
        self.unbind()
        self.limit = NOBODY
        self.offset = 0.0


class Waterfill:
    """The levels of all links, kept max-min fair, and the ends of flows that follow from them.

    Invariant between calls: every path with flows has a limit, a link that is full or the path's own cap, where none
    is faster.  Only levels that a change reaches are solved again: links are settled in the order of rising level,
    and a path whose limit still holds is never looked at.  `Network` gathers all changes of one instant and calls
    `solve` once; where one flow meets nobody, `enter_alone` and `leave_alone` do the same in constant time.
    """

    def __init__(self) -> None:
        self.ends: list[tuple[float, int, Link]] = []
        """A heap of (time, index, link): the `Link.eta` of every link that limits flows, and times that were one."""
        self.solves = 0
        """How many times rates were solved; a flow that is alone needs none of it."""
        self.touched = 0
        """How many paths were given a rate, over all solves."""
        self._now = 0.0
        self._near: list[Link] = []  # links with flows whose rate is to be determined
        self._opened: list[Link] = []  # links whose level was taken back
        self._rising = 0  # paths whose rate is to be determined

    def solve(self, changed: Iterable[Path], resized: Iterable[Link], now: float) -> None:
        """Set rates and ends at the time *now*, after *changed* gained or lost flows and links were *resized*."""
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

    def enter_alone(self, path: Path, now: float) -> bool:
        """Give the first flow of *path* its rate if no link of the path has others; return whether that was so."""
        live, own, lowest, tightest = path.live, path.own, inf, NOBODY
        for link in live:
            if link.active:
                return False
            free = path.cap if link is own else link.free / path.links.count(link)
            if free < lowest:
                lowest, tightest = free, link
        if not 0.0 < lowest < inf:
            return False
        if own is not None:
            own.free = own.capacity = path.cap
        for link in live:
            link.active[path] = None
            link.free -= lowest
        path.count = 1.0
        path.limit = tightest
        path.offset = 0.0
        path.find_rest()
        tightest.bound[path] = None
        tightest.free = tightest.service = 0.0
        tightest.since = self._now = now
        tightest.level = tightest.was = lowest
        tightest.first_end = path.ahead[0][0]
        self.touched += 1
        self._announce(tightest)
        return True

    def is_alone(self, path: Path) -> bool:
        """Return whether *path* has one flow with a rate, and its links have no other path."""
        if path.count != 1.0:
            return False
        for link in path.live:  # noqa: SIM110 a generator takes longer than the loop
            if len(link.active) != 1:
                return False
        return True

    def leave_alone(self, path: Path) -> None:
        """Take *path*, which `is_alone`, off its links, as `solve` would after the end of its flow."""
        if path.own is not None:
            path.own.capacity = 0.0
        for link in path.live:
            link.active.clear()
            link.free = link.capacity
        path.limit.level = OPEN
        path.count = 0.0
        path.release()

    def expect(self, link: Link, now: float) -> None:
        """Announce the next end of a flow that *link* limits, without new rates."""
        self._now = now
        link.first_end = min((path.ahead[0][0] - path.offset for path in link.bound), default=inf)
        self._announce(link)

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
            heappush(self.ends, (eta, link.index, link))
        link.eta = eta
