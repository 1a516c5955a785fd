# SPDX-License-Identifier: Apache-2.0
"""Flows that share links max-min fairly, on the virtual clock; `pdsim.sim.links` solves their rates.

Nothing ticks: between two changes all rates are constant, so the end of a flow is known, and one alarm at the
earliest end serves the whole network.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, Final

from pdsim.core.clock import LAST, Alarm, Clock
from pdsim.sim.links import Flow, Link, Path, Waterfill
from pdsim.sim.sequence import Foreseen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Flow", "Link", "Network", "Path"]

NOW: Final = 1.0 + 1e-15
"""Ends within a few roundings of now are now, so that flows alike end in one event and not in two."""


class Network:
    """All links, paths and flows that can influence one another; used on the thread of *clock* only.

    Equal calls in equal order give equal times, bit for bit.  Links and paths are made once and stay; flows come and
    go.  Sizes are bytes, capacities and rates bytes/s, times seconds::

        network = Network(Clock())
        path = network.path([network.link("port", 100.0)])
        network.start(path, 100.0, print, "a")  # at t=2: half of the port each
        network.start(path, 200.0, print, "b")  # at t=3: the port for itself since t=2

    All changes of one instant are solved together, after the last event of the instant.  A flow that is alone on its
    links gets its rate at once, which gives the same times (1.07 times as fast on `benchmarks.serve`).
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.links: list[Link] = []
        self.paths: list[Path] = []
        self.events = 0
        """Events of the clock that the network has used."""
        self.solver = Waterfill()
        self.foreseen = Foreseen(self)
        """Flows that are not in the network until something meets them."""
        self._by_links: dict[tuple[tuple[Link, ...], float], Path] = {}
        self._ends = self.solver.ends
        self._changed: dict[Path, None] = {}
        self._resized: dict[Link, None] = {}
        self._alone: dict[Path, bool] = {}  # what got its rate at once at `_alone_at`, and whether it was taken back
        self._alone_at = -inf
        self._instant: list[tuple[int, Flow]] = []  # flows that take no time
        self._many = 256
        self._flows = 0
        self._on_changes = Alarm(clock, self._on_change, LAST)
        self._waker = Alarm(clock, self._on_end, LAST)
        self._wake_at = inf

    def link(self, name: str, capacity: float) -> Link:
        """Return a new link of *capacity* bytes/s.  Raise a `ValueError` unless that is finite and >= 0."""
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
            for link in key[0]:
                if link.index >= len(self.links) or self.links[link.index] is not link:
                    raise ValueError(f"links must be of this network, {link} is not")
            self.foreseen.cut()  # with another path, a link may limit what it did not limit before
            path = self._by_links[key] = Path(self.clock, len(self.paths), key[0], float(cap))
            self.paths.append(path)
        return path

    def set_capacity(self, link: Link, capacity: float) -> None:
        """Let *link* carry *capacity* bytes/s from now on; at 0, its flows stall.  Errors as `link`."""
        _check_capacity(capacity)
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
        if path.count or self._changed or self._resized or not self.solver.enter_alone(path, now):
            self._change(path)
            return flow
        if now != self._alone_at:
            self._alone_at = now
            self._alone.clear()
        self._alone[path] = False
        if path.limit.eta < self._wake_at:  # else an end before that is waited for already
            self._arm()
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
        ahead = self.foreseen.carried()
        return [link.carried + ahead.get(link, 0.0) for link in self.links]

    def is_idle(self, links: Sequence[Link]) -> bool:
        """Return whether no flow is on *links*."""
        if self._resized or any(path.flows for link in links for path in link.active):
            return False
        return not any(path.flows and not set(links).isdisjoint(path.live) for path in self._changed)

    def _change(self, path: Path) -> None:
        if self._alone:
            self._take_back([other for link in path.live for other in link.active if other in self._alone])
        self._changed[path] = None
        self._wait()

    def _take_back(self, paths: Iterable[Path]) -> None:
        # So all changes of an instant are solved from the state before it, in their order, and times do not depend
        # on how many of them the network took to be alone.
        if self.clock.now != self._alone_at:
            self._alone.clear()
            return
        for path in paths:
            if not self._alone[path]:
                self._alone[path] = True
                self.solver.leave_alone(path)
        back = [path for path, taken in self._alone.items() if taken]
        self._changed = dict.fromkeys(back) | self._changed
        if back:
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

    def _solve(self, now: float) -> None:
        moved = []
        for path in self._changed:
            if path.flows != path.count:
                moved.append(path)
            else:
                self.solver.expect(path.limit, now)
        if self._resized or not all(not path.flows and self.solver.is_alone(path) for path in moved):
            self.solver.solve(moved, self._resized, now)
        else:
            for path in moved:
                self.solver.leave_alone(path)
        self._alone.clear()
        self._changed.clear()
        self._resized.clear()
        ends = self._ends
        if len(ends) > self._many:
            ends[:] = {entry for entry in ends if entry[0] == entry[2].eta}
            heapify(ends)
            self._many = 4 * len(ends) + 256

    def _next_end(self) -> float:
        ends = self._ends
        while ends and ends[0][0] != ends[0][2].eta:
            heappop(ends)
        return ends[0][0] if ends else inf


def _check_capacity(capacity: float) -> None:
    if not 0.0 <= capacity < inf:
        raise ValueError(f"capacity(={capacity}) must be >= 0 and finite")
