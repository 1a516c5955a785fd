# SPDX-License-Identifier: Apache-2.0
"""Max-min fair rates, solved again only where a change reaches.

An allocation is max-min fair if and only if every flow has a *bottleneck*: a full link (or its own cap) where no
flow is faster (Bertsekas and Gallager, *Data Networks*, section 6.5.2).  So the state is, for each link that is a
bottleneck, the *level* that it allows its flows, and for each path, the link that limits it.  After a change only
levels that no longer hold are found anew.  `Waterfill` meets them on the way, because it fills in the order of
rising level: a link is looked at when it lost or gained load, and a path whose limit still holds is never looked
at.

Flows of one path are alike, so a path is solved once, whatever their number.

Levels and capacities are in bytes/s.  A level of `OPEN` says that a link limits nobody at present; *free* is what
is left of a link's capacity by the paths that have a rate, and *unset* the number of flows on it that have none
yet.  All three are kept up to date by sums, never counted anew, but for a link that is resized or that has nobody
left: there the sum is set right, so that rounding cannot grow.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Final

from pdsim.sim.flows.links import NOBODY, OPEN, Link, Path

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Waterfill"]

SAME: Final = 1e-12
"""Two rates closer than this, relatively, are the same rate with different rounding."""

FEW: Final = 12
"""Up to so many links it is faster to look at all of them than to keep them in order."""


class Waterfill:
    """The levels of all links, kept max-min fair, and the ends of flows that follow from them.

    Invariant between calls: every path with flows has a limit, a link that is full or the path's own cap, where none
    is faster; so rates are max-min fair.  The work of a call is in proportion to the paths whose limit changes.

    The caller (`pdsim.sim.flows.network.Network`) gathers all changes of one instant and calls `solve` once;
    where one flow meets nobody, `enter_alone` and `leave_alone` do the same in constant time.
    """

    __slots__ = ("_near", "_now", "_opened", "_rising", "ends", "solves", "touched")

    def __init__(self) -> None:
        self.ends: list[tuple[float, int, Link]] = []
        """A heap with an entry, not too late, for every link that limits flows: (time, index, link)."""
        self.solves = 0
        """How many times rates were solved; a flow that is alone needs none of it."""
        self.touched = 0
        """How many paths were given a rate, over all solves."""
        self._now = 0.0
        self._near: list[Link] = []  # links with flows whose rate is to be found
        self._opened: list[Link] = []  # links whose level was taken back
        self._rising = 0  # paths whose rate is to be found

    def solve(self, changed: Iterable[Path], resized: Iterable[Link], now: float) -> None:
        """Find rates and ends at the time *now*, after paths gained or lost flows and links were resized.

        Each of *changed* says by `Path.flows` how many it has now; *resized* have their new capacity.  Afterwards
        `ends` has an entry for each link whose next end may have changed.
        """
        self.solves += 1
        self._now = now
        for link in resized:
            self._refit(link)
        for path in changed:
            if self._rising and not any(link.unset for link in path.live):
                self._fill()  # what comes now is far from what came before, so that apart both are smaller
            self._recount(path)
        self._fill()
        self._opened.clear()

    def enter_alone(self, path: Path, now: float) -> bool:
        """Give the first flow of *path* its rate if no link of the path has others; return whether that was so.

        What `solve` would do, for the most frequent case by far.  Nothing else may have changed at this instant.
        """
        live = path.live
        lowest = inf
        tightest = None
        own = path.own
        for link in live:
            if link.active:
                return False
            free = link.free if link is not own else path.cap
            if path.repeats and link is not own:
                free /= path.links.count(link)
            if free < lowest:
                lowest = free
                tightest = link
        if tightest is None or lowest <= 0.0:
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
        tightest.since = now
        tightest.level = tightest.was = lowest
        tightest.first_end = first = path.ahead[0][0]
        self.touched += 1
        tightest.eta = eta = now + first / lowest
        if eta < tightest.queued:
            tightest.queued = eta
            heappush(self.ends, (eta, tightest.index, tightest))
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
        path.unbind()
        path.limit = NOBODY
        path.offset = 0.0

    def expect(self, link: Link, now: float) -> None:
        """Find the next end of a flow that *link* limits, without new rates."""
        self._now = now
        link.first_end = min((path.ahead[0][0] - path.offset for path in link.bound), default=inf)
        self._announce(link)

    def _refit(self, link: Link) -> None:
        for path in link.active:
            if path.limit.level >= 0.0:
                self._open(path.limit)
        link.free = link.capacity  # as none of them has a rate: a sum would lose digits

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
        if not path.count:
            self._retire(path)

    def _retire(self, path: Path) -> None:
        self._rising -= 1
        path.unbind()
        path.limit = NOBODY
        path.offset = 0.0
        for link in path.live:
            link.active.pop(path, None)  # where it passes twice, it is gone already
            if not link.active:
                link.free = link.capacity

    def _open(self, link: Link) -> None:
        # Their other links get back what those paths took, and are to be looked at.  *was* keeps the level, by
        # which service is counted until now.
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
        # checked when it comes up, and put back if it is out of date.  This takes logarithmic time a link where
        # `_fill` looks at all.
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
        #
        # Half of all time is spent here, so it is one function, and no loop makes a call that is not rare.
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
        link.service = service = link.service + link.was * (now - link.since)
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
        count = len(limited)
        self._rising -= count
        self.touched += count
        if first > service and level > 0.0:
            link.eta = eta = now + (first - service) / level
            if eta < link.queued:
                link.queued = eta
                heappush(self.ends, (eta, link.index, link))
        else:
            self._announce(link)

    def _announce(self, link: Link) -> None:
        # An earlier time that is queued stays, and is corrected when it comes: so a link has few entries in the
        # heap, however often its rate changes.
        ahead = link.first_end - link.service
        level = link.level
        if ahead <= 0.0:
            eta = self._now
        elif level > 0.0:
            eta = max(link.since + ahead / level, self._now)
        else:
            eta = inf
        link.eta = eta
        if eta < link.queued:
            link.queued = eta
            heappush(self.ends, (eta, link.index, link))
