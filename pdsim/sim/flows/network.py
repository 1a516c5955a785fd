# SPDX-License-Identifier: Apache-2.0
"""Links that flows share max-min fairly, on the virtual clock.

A *flow* carries a number of bytes over a *path* of links, as a fluid: at every instant each flow has a rate, and the
rates are max-min fair.  Nothing ticks: between two changes all rates are constant, so the end of a flow is known,
and one wake-up at the earliest end serves the whole network.

::

    clock = Clock()
    network = Network(clock)
    port = network.link("port", 100.0)
    path = network.path([port])
    network.start(path, 100.0, print, "a")  # at t=2: half of the port each
    network.start(path, 200.0, print, "b")  # at t=3: the port for itself since t=2
    clock.run()

All changes of one instant are solved together, after the last event of the instant.  A flow that is alone on its
links gets its rate at once, which gives the same times, bit for bit.  Latency, posting and queues are
not known here: see `pdsim.sim.engine`.  How rates are found: `pdsim.sim.flows.waterfill`.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import TYPE_CHECKING, Any, Final

from pdsim.core.clock import LAST, Alarm, Clock
from pdsim.sim.flows.foreseen import Foreseen
from pdsim.sim.flows.links import Flow, Link, Path
from pdsim.sim.flows.waterfill import Waterfill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Flow", "Link", "Network", "Path"]

NOW: Final = 1.0 + 1e-15
"""Ends within a few roundings of now are now, so that flows alike end in one event and not in two."""


class Network:
    """All links, paths and flows that can influence one another.

    Equal calls in equal order give equal times, bit for bit.

    Life: links and paths are made once and stay; flows come and go.  Sizes are bytes, capacities and rates bytes/s,
    times seconds on *clock*.  Used on the clock's thread only.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.links: list[Link] = []
        self.paths: list[Path] = []
        self.events = 0
        """Events of the clock that the network has used."""
        self._by_links: dict[tuple[tuple[Link, ...], float], Path] = {}
        self._waterfill = Waterfill()
        self._ends = self._waterfill.ends
        self._changed: dict[Path, None] = {}
        self._resized: dict[Link, None] = {}
        self._alone: dict[Path, bool] = {}  # what got its rate at once at `_alone_at`, and whether it was taken back
        self._alone_at = -inf
        self.foreseen = Foreseen(self)
        """Flows that are not in the network until something meets them."""
        self._instant: list[tuple[int, Flow]] = []  # flows that take no time
        self._many = 256
        self._flows = 0
        self._solver = Alarm(clock, self._on_change, LAST)
        self._waker = Alarm(clock, self._on_end, LAST)
        self._wake_at = inf

    @property
    def solves(self) -> int:
        """How many times rates were solved; a flow that is alone needs none of it."""
        return self._waterfill.solves

    @property
    def touched(self) -> int:
        """How many paths were given a rate, over all solves: what the work is proportional to."""
        return self._waterfill.touched

    def link(self, name: str, capacity: float) -> Link:
        """Return a new link that carries *capacity* bytes/s.

        Raise a `ValueError` unless *capacity* is finite and not negative.
        """
        _check_capacity(capacity)
        link = Link(name, len(self.links), float(capacity))
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
        path = self._by_links.get(key)
        if path is None:
            path = self._by_links[key] = self._new_path(key[0], float(cap))
        return path

    def set_capacity(self, link: Link, capacity: float) -> None:
        """Let *link* carry *capacity* bytes/s from now on.  At 0, its flows stall until it is set again.

        Raise a `ValueError` unless *capacity* is finite and not negative.
        """
        _check_capacity(capacity)
        if self.foreseen:
            self.foreseen.cut()
        self._take_back(list(self._alone))
        link.resize(float(capacity))
        self._resized[link] = None
        self._wait()

    def start(self, path: Path, size: float, done: Callable[[Any], None], tag: Any = None) -> Flow:
        """Start a flow of *size* bytes over *path* now; ``done(tag)`` is called when the last byte has arrived.

        Flows that end at the same instant are reported in the order in which they started, after all else that
        happens at that instant.  A flow of no bytes ends at once, even where others stall.

        Raise a `ValueError` if *size* is negative or not finite.
        """
        if not 0.0 <= size < inf:
            raise ValueError(f"size(={size}) must be >= 0 and finite")
        if self.foreseen:
            self.foreseen.meet(path, size)
        flow = Flow(path, size, done, tag)
        self._flows += 1
        if size == 0.0 or path.unlimited:
            self._instant.append((self._flows, flow))
            self._wait()
            return flow
        flow.begin = begin = path.served(self.clock.now)
        path.flows += 1
        path.begun += begin
        heappush(path.ahead, (begin + size, self._flows, flow))
        if path.count or self._changed or self._resized or not self._waterfill.enter_alone(path, self.clock.now):
            self._change(path)
        else:
            self._entered_alone(path)
        return flow

    def abort(self, flow: Flow) -> float:
        """Take *flow* off its path now and return the bytes still to be carried; it is never reported done.

        Return 0.0 if it has ended or was aborted before.
        """
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
        ahead = self.foreseen.carried() if self.foreseen else {}
        return [link.carried + ahead.get(link, 0.0) for link in self.links]

    def alone_on(self, links: Sequence[Link], since: float) -> list[tuple[Path, float]] | None:
        """Return the paths with a flow on *links*, of which each is alone on its own, and when that flow ends.

        Return None if the end of one is not known, or if one ends now but will be off its links only after *since*.
        """
        if self._resized:
            return None
        now, found = self.clock.now, []
        active: dict[Path, None] = {}
        for link in links:
            if link.active:
                active |= link.active
        for path in active:
            if not path.flows and since > now:
                continue
            if path.flows != 1 or not self._waterfill.is_alone(path):
                return None
            found.append((path, path.limit.eta))
        for path in self._changed:
            if path.flows and not set(links).isdisjoint(path.live):
                return None
        return found

    def resume(self, flows: Sequence[tuple[Path, float]], begin: float) -> list[Flow]:
        """Return flows of these sizes that began over these paths at *begin*, when their links were free, as now.

        `on_end` says who is told of their ends.  None of them has ended by now.
        """
        found = []
        for path, size in flows:
            flow = Flow(path, size, _nobody, None)
            self._flows += 1
            path.flows += 1
            heappush(path.ahead, (size, self._flows, flow))
            found.append(flow)
        self._waterfill.solve([path for path, _ in flows], (), begin)
        self._arm()
        return found

    def on_end(self, flow: Flow, done: Callable[[Any], None], tag: Any) -> None:
        """Have ``done(tag)`` called at the end of *flow*."""
        flow.done, flow.tag = done, tag

    def _new_path(self, links: tuple[Link, ...], cap: float) -> Path:
        for link in links:
            if link.index >= len(self.links) or self.links[link.index] is not link:
                raise ValueError(f"links must be of this network, {link} is not")
        if self.foreseen:  # with another path, a link may limit what it did not limit before
            self.foreseen.cut()
        path = Path(self.clock, len(self.paths), links, cap)
        self.paths.append(path)
        return path

    def _change(self, path: Path) -> None:
        if self._alone:
            met = [other for link in path.live for other in link.active if other in self._alone]
            if met:
                self._take_back(met)
        self._changed[path] = None
        self._wait()

    def _entered_alone(self, path: Path) -> None:
        now = self.clock.now
        if now != self._alone_at:
            self._alone_at = now
            self._alone.clear()
        self._alone[path] = False
        if self._wake_at == inf or path.limit.eta < self._wake_at:  # else an end before that is waited for already
            self._arm()

    def _take_back(self, paths: Iterable[Path]) -> None:
        # So all changes of an instant are solved from the state before it, in their order, and times do not depend
        # on how many of them the network took to be alone.
        if self.clock.now != self._alone_at:
            self._alone.clear()
            return
        for path in paths:
            if not self._alone[path]:
                self._alone[path] = True
                self._waterfill.leave_alone(path)
        back = [path for path, taken in self._alone.items() if taken]
        self._changed = dict.fromkeys(back) | self._changed
        if back:
            self._wait()

    def _wait(self) -> None:
        if not self._solver.armed:
            self._solver.arm(self.clock.now)

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
            self._solve(now)
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
            link.queued = link.eta = inf
            for order, flow in link.finish(now):
                due.append((order, flow))
                self._changed[flow.path] = None
        due.sort()
        for _, flow in due:
            done = flow.done
            if done is not None:
                flow.done = None
                done(flow.tag)

    def _solve(self, now: float) -> None:
        moved = []
        for path in self._changed:
            if path.flows != path.count:
                moved.append(path)
            else:
                self._waterfill.expect(path.limit, now)
        waterfill = self._waterfill
        alone = not self._resized
        for path in moved:
            alone = alone and not path.flows and waterfill.is_alone(path)
        if alone:
            for path in moved:
                waterfill.leave_alone(path)
        else:
            waterfill.solve(moved, self._resized, now)
        self._alone.clear()
        self._changed.clear()
        self._resized.clear()
        if len(self._ends) > self._many:
            self._compact()

    def _next_end(self) -> float:
        ends = self._ends
        while ends:
            at, index, link = ends[0]
            if at == link.eta:
                return at
            if at == link.queued and link.eta < inf:
                link.queued = link.eta
                heapreplace(ends, (link.eta, index, link))
            else:
                heappop(ends)
                if at == link.queued:
                    link.queued = inf
        return inf

    def _compact(self) -> None:
        ends = self._ends
        ends[:] = [entry for entry in ends if entry[0] == entry[2].queued]
        heapify(ends)
        self._many = 4 * len(ends) + 256


def _nobody(_: Any) -> None: ...


def _check_capacity(capacity: float) -> None:
    if not 0.0 <= capacity < inf:
        raise ValueError(f"capacity(={capacity}) must be >= 0 and finite")
