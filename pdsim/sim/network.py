# SPDX-License-Identifier: Apache-2.0
"""Flows that share links max-min fairly, on the virtual clock; `pdsim.sim.links` solves their rates.

Nothing ticks: between two changes all rates are constant, so the end of a flow is known, and one alarm at the
earliest end serves the whole network.  A *plan* is a series of equal flows whose times are all known beforehand, so
that no event is spent on them.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from pdsim.core.clock import LAST, Alarm, Clock
from pdsim.sim.links import Flow, Link, Path, Waterfill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Flow", "Foreseen", "Link", "Network", "Path", "Plan", "Stages", "Steps", "Times"]

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
    links gets its rate at once, which gives the same times.
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
            if self.foreseen:  # with another path, a link may limit what it did not limit before
                self.foreseen.cut()
            path = self._by_links[key] = Path(self.clock, len(self.paths), key[0], float(cap))
            self.paths.append(path)
        return path

    def set_capacity(self, link: Link, capacity: float) -> None:
        """Let *link* carry *capacity* bytes/s from now on; at 0, its flows stall.  Errors as `link`."""
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
        if self._wake_at == inf or path.limit.eta < self._wake_at:  # else an end before that is waited for already
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
        ahead = self.foreseen.carried() if self.foreseen else {}
        return [link.carried + ahead.get(link, 0.0) for link in self.links]

    def alone_on(self, links: Sequence[Link], since: float) -> list[tuple[Path, float]] | None:
        """Return the paths with a flow on *links*, of which each is alone on its own, and when that flow ends.

        Return None if the end of one is not known, or if one ends now but will be off its links only after *since*.
        """
        if self._resized:
            return None
        now, limits = self.clock.now, []
        active: dict[Path, None] = {}
        for link in links:
            if link.active:
                active |= link.active
        for path in active:
            if not path.flows and since > now:
                continue
            if path.flows != 1 or not self.solver.is_alone(path):
                return None
            limits.append((path, path.limit.eta))
        for path in self._changed:
            if path.flows and not set(links).isdisjoint(path.live):
                return None
        return limits

    def resume(self, flows: Sequence[tuple[Path, float]], begin: float) -> list[Flow]:
        """Return flows of these sizes that began over these paths at *begin*, when their links were free, as now.

        None of them has ended; the caller sets their `Flow.done` and `Flow.tag`.
        """
        resumed = []
        for path, size in flows:
            flow = Flow(path, size, _nobody, None)
            self._flows += 1
            path.flows += 1
            heappush(path.ahead, (size, self._flows, flow))
            resumed.append(flow)
        self.solver.solve([path for path, _ in flows], (), begin)
        self._arm()
        return resumed

    def _change(self, path: Path) -> None:
        if self._alone:
            affected = [other for link in path.live for other in link.active if other in self._alone]
            if affected:
                self._take_back(affected)
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
        solver, moved, alone = self.solver, [], not self._resized
        for path in self._changed:
            if path.flows != path.count:
                moved.append(path)
            else:
                solver.expect(path.limit, now)
        for path in moved:
            alone = alone and not path.flows and solver.is_alone(path)
        if alone:
            for path in moved:
                solver.leave_alone(path)
        else:
            solver.solve(moved, self._resized, now)
        self._alone.clear()
        self._changed.clear()
        self._resized.clear()
        ends = self._ends
        if len(ends) > self._many:
            ends[:] = [entry for entry in ends if entry[0] == entry[2].queued]
            heapify(ends)
            self._many = 4 * len(ends) + 256

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


def _nobody(_: Any) -> None: ...


def _check_capacity(capacity: float) -> None:
    if not 0.0 <= capacity < inf:
        raise ValueError(f"capacity(={capacity}) must be >= 0 and finite")


Times = npt.NDArray[np.float64]

_NONE: Times = np.empty(0)

EXACT = 2.0**53
"""Up to here sums of whole numbers are exact as floats, in whatever order."""

ROUNDING = 1e-14
"""More than what a few sums of times may be off, in proportion to the time."""


Stages = tuple[float, float, float, float, float]  # submitted, posted, on the wire, off the wire, complete


class Steps:
    """When each of *count* equal transfers begins and ends, posted one after the other with nothing in their way.

    Each is posted when the one before is complete; with *overlap* its flow begins then, else when it is posted.
    Seconds on the clock; arrays are float64 of shape (count,).
    """

    def __init__(self, count: int, posting: float, overlap: bool, latency: float) -> None:
        self.key = count, posting, overlap, latency  # all that times depend on beside start and length
        self._known: tuple[float, float, tuple[Times, ...]] | None = None  # asked for by the plan and its owner

    def pause(self, seconds: float) -> float:
        """Return how long the wire rests after each flow of *seconds*, but for rounding."""
        _, posting, overlap, latency = self.key
        return max(posting - seconds, 0.0) + latency if overlap else latency + posting

    def stages(self, start: float, seconds: float) -> tuple[Times, ...]:
        """Return when each is submitted, posted, on the wire, off the wire and complete, its flow taking *seconds*.

        These are the sums that `SendQueue` makes, in its order: the same times, bit for bit.
        """
        known = self._known
        if known is None or known[0] != start or known[1] != seconds:
            known = self._known = (start, seconds, self._sums(start, seconds))
        return known[2]

    def _sums(self, start: float, seconds: float) -> tuple[Times, ...]:
        count, posting, overlap, latency = self.key
        stages = (max(posting, seconds), latency) if overlap else (posting, seconds, latency)
        each = len(stages)
        terms = np.empty(1 + each * count)
        terms[0] = start
        for place, stage in enumerate(stages):
            terms[1 + place :: each] = stage
        sums = np.add.accumulate(terms)
        submitted, complete = sums[:-1:each], sums[each::each]
        if not overlap:
            return submitted, sums[1::each], sums[1::each], sums[2::each], complete
        return submitted, submitted + posting, submitted, submitted + seconds, complete


class Plan:
    """Equal flows of *size* bytes over *path* with the times of *steps*, so far without an event.

    ``changed()`` is called when its times are other than before because of a plan in *lockstep*, one that began at
    the same instant with the same steps; ``cut(flow)`` when it is a plan no more, with its flow under way.
    """

    def __init__(
        self,
        path: Path,
        size: float,
        steps: Steps,
        start: float,
        changed: Callable[[], None],
        cut: Callable[[Flow | None], None],
    ) -> None:
        self.path = path
        self.size = size
        self.steps = steps
        self.start = start
        self.seconds = 0.0  # of each flow
        self.begins: Times = _NONE
        self.ends: Times = _NONE
        self.first = self.last = start  # when the first flow begins and the last one ends
        self.group: list[Plan] = [self]  # in lockstep
        self.changed = changed
        self.cut = cut

    def set(self, level: float) -> None:
        """Let each flow have the rate *level*."""
        self.seconds = self.size / level
        _, _, self.begins, self.ends, _ = self.steps.stages(self.start, self.seconds)
        self.first, self.last = float(self.begins[0]), float(self.ends[-1])

    def apart(self) -> bool:
        """Return whether each flow ends before the next begins, and not with it."""
        if self.steps.pause(self.seconds) > ROUNDING * self.last:
            return True
        return bool((self.begins[1:] > self.ends[:-1]).all())

    def forget(self) -> None:
        """Let go of the owner and of the plans in lockstep: the series is over, and no garbage in a circle."""
        self.group = []
        self.changed = self.cut = _nothing


class Foreseen:
    """All plans of a network.

    Invariant: no flow of a plan is under way at the same time, on the same link, as a flow of the network or of a
    plan that is not in lockstep with it.  Then rates are the same from flow to flow, and so are the times, bit for
    bit.  What is about to change that *cuts* the plan first: its flow under way enters the network as of its begin,
    and the rest is its owner's business again.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._plans: dict[Link, dict[Plan, None]] = {}
        self._all: dict[Plan, None] = {}
        self._guests: dict[Path, list[Plan]] = {}  # paths whose one flow ends before it meets these plans

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, plan: Plan) -> bool:
        """Keep *plan*, which starts now; return False, and cut what is in its way, if its times cannot be known."""
        path = plan.path
        links, level = path.live, inf
        for link in links:
            free = path.cap if link is path.own else link.capacity
            if free < level:
                level = free
        if path.repeats or not 0.0 < level < inf:
            return False
        plan.set(level)
        if not plan.apart():  # the network would go on with the counters of the path
            return False
        guests = self._network.alone_on(links, plan.first)
        if guests is None:
            return False
        for _, end in guests:
            if _hits(plan, end):
                return False
        affected = [other for other in self._beside(links) if _overlap(plan, other)]
        if affected:
            group = list(dict.fromkeys(member for other in affected for member in other.group))
            if guests or not self._join(plan, group):
                self.cut(affected)
                return False
        for path, _ in guests:
            self._guests.setdefault(path, []).append(plan)
        self._all[plan] = None
        for link in links:
            self._plans.setdefault(link, {})[plan] = None
        return True

    def _beside(self, links: Sequence[Link]) -> dict[Plan, None]:
        crossing: dict[Plan, None] = {}
        for link in links:
            if plans := self._plans.get(link):
                crossing |= plans
        return crossing

    def _join(self, plan: Plan, group: list[Plan]) -> bool:
        alike = all(
            (other.start, other.size, other.steps.key) == (plan.start, plan.size, plan.steps.key) for other in group
        )
        members = [*group, plan]
        level = _level(members)
        if not alike or not 0.0 < level < inf:
            return False
        links = {link for member in members for link in member.path.live}
        if any(member in plans for plans in self._guests.values() for member in group):
            return False
        if any(other not in group for link in links for other in self._plans.get(link, ())):
            return False
        for member in members:
            member.group = members
            member.set(level)
        for member in group:
            member.changed()
        return True

    def drop(self, plan: Plan, flows: int) -> None:
        """Forget *plan*, of which *flows* have ended."""
        if plan not in self._all:
            return
        del self._all[plan]
        for link in plan.path.live:
            plans = self._plans[link]
            plans.pop(plan, None)
            if not plans:
                del self._plans[link]
        path, size = plan.path, plan.size
        total = path.ended + flows * size
        if total < EXACT and size.is_integer() and path.ended.is_integer():
            path.ended = total
        else:
            for _ in range(flows):  # one by one: the sum of floats depends on the order
                path.ended += size

    def carried(self) -> dict[Link, float]:
        """Return the bytes that plans have carried over each link until now, which the paths do not count yet."""
        now = self._network.clock.now
        demand: dict[Link, float] = {}
        for plan in self._all:
            done = int(np.searchsorted(plan.ends, now, side="right"))
            nbytes = done * plan.size
            if done < len(plan.begins) and plan.begins[done] < now:
                nbytes += plan.size * float((now - plan.begins[done]) / (plan.ends[done] - plan.begins[done]))
            for link in plan.path.links:
                demand[link] = demand.get(link, 0.0) + nbytes
        return demand

    def interrupt(self, path: Path, size: float) -> None:
        """Cut the plans that will share a link with a flow of *size* bytes that starts now over *path*."""
        links, now = path.live, self._network.clock.now
        affected: dict[Plan, None] = {}
        if self._guests:
            for guest in {other for link in links for other in link.active if other in self._guests}:
                affected |= dict.fromkeys(self._guests.pop(guest))  # whatever its rate will be now
        plans = self._beside(links)
        if plans:
            level = min((_free(path, link) for link in links), default=inf)
            if path.repeats or self._network.alone_on(links, now) != [] or not 0.0 < level < inf:
                affected |= plans
            else:
                end = now + size / level
                affected |= {plan: None for plan in plans if _hits(plan, end, now)}
                self._guests = {other: flows for other, flows in self._guests.items() if other.flows}
                self._guests[path] = list(plans)
        self.cut(affected)

    def cut(self, plans: Iterable[Plan] | None = None) -> None:
        """Cut *plans*, by default all, and those in lockstep with them.

        Owners are called in the order of the plans, with the flow that is under way, or None if there is none.
        """
        for plan in list(self._all if plans is None else plans):
            group = [member for member in plan.group if member in self._all] if plan in self._all else []
            now = self._network.clock.now
            for member in group:
                self.drop(member, int(np.searchsorted(member.ends, now, side="right")))
            first = int(np.searchsorted(plan.ends, now, side="right"))
            flows: list[Flow | None] = [None] * len(group)
            if group and first < int(np.searchsorted(plan.begins, now, side="left")):  # in lockstep: of all or none
                sizes = [(member.path, member.size) for member in group]
                flows = [*self._network.resume(sizes, float(plan.begins[first]))]
            for member, flow in zip(group, flows, strict=True):
                member.cut(flow)


def _nothing(*_: Any) -> None: ...


def _level(plans: list[Plan]) -> float:
    counts: dict[Any, float] = {}
    for plan in plans:
        for link in plan.path.live:
            counts[link] = counts.get(link, 0.0) + 1.0
    levels = {min((_free(plan.path, link) / counts[link] for link in plan.path.live), default=inf) for plan in plans}
    return levels.pop() if len(levels) == 1 else 0.0


def _free(path: Path, link: Link) -> float:
    return path.cap if link is path.own else link.capacity


def _hits(plan: Plan, end: float, begin: float = -inf) -> bool:
    if begin > plan.last or end < plan.first:
        return False
    first = int(plan.ends.searchsorted(begin))
    return first < len(plan.begins) and bool(plan.begins[first] <= end)


def _overlap(plan: Plan, other: Plan) -> bool:
    if plan.first > other.last or plan.last < other.first:
        return False
    # the first of the other's that does not end before; there is none for those of the plan that begin last
    after = other.ends.searchsorted(plan.begins)
    inside = int(after.searchsorted(len(other.begins)))
    return bool(_any(other.begins[after[:inside]] <= plan.ends[:inside]))


_any = np.logical_or.reduce
"""As `ndarray.any`, which takes twice as long on a few hundred values."""
