"""Max-min fair rates, solved again only where a change reaches.

An allocation is max-min fair if and only if every flow has a *bottleneck*: its own cap, or a full link on which no
flow is faster (Bertsekas and Gallager, *Data Networks*, section 6.5.2).  So after a change it is enough to give new
rates to the paths that lost their bottleneck, and `Waterfill` finds them on the way: it fills in order of rising
rate, and a path whose old rate stands is never looked at.

Two more things keep it small.  Flows of one path are alike, so a `Path` is solved once, whatever their number.  And
most links of a real machine can never be the bottleneck, because other links let too little through to fill them
(the memory behind a NIC, a leaf switch that is not oversubscribed): those are *implied* and left out of the solution,
until a new path or another capacity makes them count.

This module knows rates, not time: starting and ending flows is the business of `pdsim.fabric.sharing`.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdsim.clock import Clock
    from pdsim.fabric.sharing import Flow

__all__ = ["Link", "Path", "Waterfill"]

SAME = 1e-12
"""Two rates closer than this, relatively, are the same rate with different rounding."""

REBASE = 1000
"""How many flows end on a busy path before its counter of service starts from zero again."""

UNSET = -1.0
"""The rate of a path that is being solved."""


class Link:
    """A capacity in bytes/s that flows share: a port, a bus, a memory.  Made by `Network.link`."""

    __slots__ = (
        "_active", "_capacity", "_cover", "_covers", "_free", "_key", "_level", "_live", "_paths", "_unset", "index",
        "name",
    )  # fmt: skip

    def __init__(self, name: str, index: int, capacity: float) -> None:
        self.name = name
        self.index = index
        """Position among the links of the network, in order of creation."""
        self._capacity = capacity
        self._paths: dict[Path, int] = {}  # how many times each passes here
        self._cover: dict[Link, int] = {}
        self._covers: dict[Link, None] = {}
        self._live = False
        self._active: dict[Path, None] = {}
        self._free = capacity
        self._level = UNSET
        self._unset = 0
        self._key = inf

    def __repr__(self) -> str:
        return f"<Link {self.name!r} {self._capacity:g} bytes/s>"

    @property
    def capacity(self) -> float:
        """Bytes/s.  Set with `Network.set_capacity`."""
        return self._capacity

    @property
    def carried(self) -> float:
        """Bytes carried until now; a path that passes twice counts twice.  Linear in the number of paths."""
        return sum(times * path.carried for path, times in self._paths.items())

    @property
    def load(self) -> float:
        """Bytes/s that flow now (after all events of this instant)."""
        return sum(times * path.flows * path.rate for path, times in self._paths.items() if path.flows)

    def _implied(self) -> bool:
        """Whether the links of the cover cannot let more through than this link can carry.

        Each link of a cover is smaller than what it covers, in the order of capacity and index, so that links never
        imply each other in a circle.
        """
        total = 0.0
        for link, times in self._cover.items():
            total += link._capacity * times
            if link._capacity == self._capacity and link.index > self.index:
                return False
        return total <= self._capacity

    def _pass(self, path: Path, times: int) -> bool:
        """Let *path* pass *times* times.  Return whether this link is implied still."""
        self._paths[path] = times
        if self._live:
            return False
        position = path.links.index(self)
        best: tuple[float, float, int, int] | None = None
        for at, link in enumerate(path.links):
            if link is self or link._capacity > self._capacity:
                continue
            ratio = -(-times // path.links.count(link))
            if self._cover.get(link, 0) >= ratio:
                return True
            rank = (abs(at - position), link._capacity, at, ratio)
            if best is None or rank < best:
                best = rank
        if best is None:
            return False
        chosen = path.links[best[2]]
        self._cover[chosen] = best[3]
        chosen._covers[self] = None
        return self._implied()

    def _resize(self, capacity: float) -> None:
        for path in self._active:
            path._release()
        self._free = self._capacity = capacity  # a sum would lose the digits of the smaller of two capacities
        for link in (self, *self._covers):
            if not link._live and not link._implied():
                link._promote()

    def _promote(self) -> None:
        """Take part in the solution from now on.  Until now the link was implied, so the rates of now suit it."""
        self._live = True
        for link in self._cover:
            del link._covers[self]
        self._cover.clear()
        self._free = self._capacity
        for path, times in self._paths.items():
            path._live = tuple(link for link in path.links if link._live)
            if path._active:
                self._active[path] = None
                self._free -= times * path._load


class Path:
    """The way of flows over *links*, each limited to *cap* bytes/s.  Made by `Network.path`.

    All flows of one path have the same rate, so one counter of service per flow, `_service`, times them all: a flow
    that starts at `_service` = v ends at `_service` = v + size.
    """

    __slots__ = (
        "_active", "_age", "_begun", "_clock", "_ended", "_eta", "_flows", "_limit", "_live", "_load", "_mark",
        "_queued", "_rate", "_service", "_since", "_was", "cap", "flows", "index", "links",
    )  # fmt: skip

    def __init__(self, clock: Clock, index: int, links: tuple[Link, ...], cap: float) -> None:
        self.links = links
        self.cap = cap
        self.index = index
        self.flows = 0
        """How many flows there are now."""
        self._clock = clock
        self._live: tuple[Link, ...] = ()
        self._active = False  # whether the links know of it
        self._rate = 0.0
        self._was = 0.0
        self._load = 0.0
        self._limit: Link | None = None
        self._mark = 0
        self._service = 0.0
        self._since = 0.0  # the time at which `_service` was right
        self._flows: list[tuple[float, int, Flow]] = []
        self._begun = 0.0  # the sum of `_service` at the start of each flow
        self._ended = 0.0  # bytes of flows that are no more
        self._age = 0  # flows ended since `_service` was last near 0
        self._eta = inf
        self._queued = inf

    def __repr__(self) -> str:
        return f"<Path {'-'.join(link.name for link in self.links)}>"

    @property
    def rate(self) -> float:
        """Bytes/s of each flow now (after all events of this instant); 0 if there is none."""
        return self._rate if self.flows else 0.0

    @property
    def carried(self) -> float:
        """Bytes carried until now, by all flows."""
        if not self.flows:
            return self._ended
        return self._ended + self.flows * self._served(self._clock.now) - self._begun

    def _served(self, now: float) -> float:
        return self._service + self._rate * (now - self._since)

    def _register(self) -> None:
        """Tell the links of this path, and find those that can limit it."""
        crowded = [link for link in dict.fromkeys(self.links) if not link._pass(self, self.links.count(link))]
        for link in crowded:
            if not link._live:
                link._promote()
        self._live = tuple(link for link in self.links if link._live)

    def _steady(self) -> bool:
        """Whether there are as many flows as when the rate was solved."""
        return self.flows > 0 and self._active and self.flows * self._rate == self._load

    def _release(self) -> None:
        """Take the load off the links, until the rate is solved again at this instant."""
        for link in self._live:
            link._free += self._load
        self._load = 0.0

    def _drop(self, begin: float, carried: float) -> None:
        """Count a flow out that began at *begin* and carried *carried* bytes."""
        self.flows -= 1
        self._ended += carried
        self._begun -= begin
        if not self.flows:
            self._service = self._begun = 0.0
            self._age = 0
            self._eta = inf

    def _finish(self, now: float, tolerance: float, due: list[tuple[int, Flow]]) -> None:
        """Move the flows that end now to *due*."""
        flows = self._flows
        self._service = flows[0][0]
        self._since = now
        limit = self._service * tolerance
        while flows and flows[0][0] <= limit:
            _, order, flow = heappop(flows)
            due.append((order, flow))
            self._drop(flow._begin, flow.size)
            self._age += 1
        if self._age > REBASE + 4 * len(flows):
            self._rebase()

    def _rebase(self) -> None:
        """Count service from zero again: on a path that never empties it would grow until small flows drown in it."""
        base = self._service
        self._flows = [(end - base, order, flow) for end, order, flow in self._flows]
        heapify(self._flows)
        for _, _, flow in self._flows:
            flow._begin -= base
        self._begun = sum(flow._begin for _, _, flow in self._flows)
        self._service = 0.0
        self._age = 0


class Waterfill:
    """The rates of all paths, kept max-min fair."""

    __slots__ = ("_fresh", "_heap", "_round", "_touched", "solves", "touched")

    def __init__(self) -> None:
        self.solves = 0
        """How many times rates were solved."""
        self.touched = 0
        """How many paths were given a rate, over all solves."""
        self._round = 0
        self._heap: list[tuple[float, int, Link]] = []
        self._fresh: list[Link] = []
        self._touched: list[Path] = []

    def solve(self, changed: Iterable[Path]) -> list[Path]:
        """Return the paths whose rate may be new, after the number of flows on *changed* is another.

        A returned path's former rate is `Path._was`.
        """
        self.solves += 1
        self._round += 1
        self._touched = touched = []
        for path in changed:
            if path.flows:
                self._enter(path)
            elif path._active:
                self._leave(path)
        for path in changed:
            for link in path._live:
                if link._level >= 0.0:
                    self._open(link)
        self._fill()
        self.touched += len(touched)
        return touched

    def _enter(self, path: Path) -> None:
        if not path._active:
            path._active = True
            path._rate = path._load = 0.0
            for link in path._live:
                link._active[path] = None
        self._join(path)

    def _leave(self, path: Path) -> None:
        path._active = False
        for link in path._live:
            link._active.pop(path, None)  # the second time that it passes there, it is gone already
            link._free = link._free + path._load if link._active else link._capacity
        path._load = path._rate = 0.0
        path._limit = None

    def _join(self, path: Path) -> None:
        """Take the rate of *path* back, to solve it anew."""
        path._mark = self._round
        path._was = path._rate
        path._rate = UNSET
        self._touched.append(path)
        if not path._live:
            path._rate = path.cap if path.cap < inf else 0.0  # without any limit it needs no rate to end at once
            path._load = path._rate * path.flows
            return
        flows, load = path.flows, path._load
        for link in path._live:
            link._free += load
            link._unset += flows
            self._fresh.append(link)

    def _open(self, link: Link) -> None:
        """Take back the rates of all paths that *link* limits."""
        link._level = UNSET
        mark = self._round
        for path in link._active:
            if path._limit is link and path._mark != mark:
                self._join(path)

    def _fill(self) -> None:
        """Set the rates taken back, the lowest first.  Links are met in the order of the rate that they can give."""
        heap = self._heap
        self._requeue()
        while heap:
            key, _, link = heappop(heap)
            if key != link._key:
                continue  # a lower key was found since
            link._key = inf
            if not link._unset:
                continue
            level = link._free / link._unset
            if level > key + abs(key) * 1e-13:
                link._key = level
                heappush(heap, (level, link.index, link))
                continue
            if not self._settle(link, max(level, 0.0)):
                self._fresh.append(link)
            self._requeue()

    def _requeue(self) -> None:
        for link in self._fresh:
            if link._unset:
                key = link._free / link._unset
                if key < link._key:
                    link._key = key
                    heappush(self._heap, (key, link.index, link))
        self._fresh.clear()

    def _settle(self, link: Link, level: float) -> bool:
        """Let *link* limit its paths to *level*.  Return False if others must be solved first."""
        if link._level >= 0.0:
            self._open(link)
            return False
        above = level * (1.0 + SAME)
        settled = True
        limited = []
        for path in link._active:
            rate = path._rate
            if rate > above:
                if path._mark != self._round:
                    self._join(path)
                    settled = False
            elif rate < 0.0:
                if path.cap < level:
                    self._fix(path, path.cap, None)
                    settled = False
                else:
                    limited.append(path)
        if settled:
            for path in limited:
                self._fix(path, level, link)
            link._level = level
        return settled

    def _fix(self, path: Path, rate: float, limit: Link | None) -> None:
        flows = path.flows
        load = rate * flows
        less = load < path._load * (1.0 - SAME)
        path._rate = rate
        path._load = load
        path._limit = limit
        for link in path._live:
            link._free -= load
            link._unset -= flows
            if less and link._level >= 0.0:
                self._open(link)
