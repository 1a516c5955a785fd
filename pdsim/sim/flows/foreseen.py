# SPDX-License-Identifier: Apache-2.0
"""Flows whose begins and ends are known beforehand, so that no event is spent on them while nobody meets them.

A *plan* is a series of equal flows over one path, one after the other.  It is kept apart from the network's flows
for as long as each of its flows has its links to itself, or shares them with those of plans in *lockstep*: plans
that began at the same instant with the same steps.  Then all rates are the same from flow to flow, and so are the
times, bit for bit.  Whatever else is about to change on a link of a plan *cuts* it first: the flow that is under way
is put into the network as of its begin, and the rest of the series is its owner's business again.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdsim.core.clock import Clock
    from pdsim.sim.flows.links import Flow, Link, Path

__all__ = ["Foreseen", "Plan", "Steps"]

Times = npt.NDArray[np.float64]

_NONE: Times = np.empty(0)

EXACT = 2.0**53
"""Up to here sums of whole numbers are exact as floats, in whatever order."""

ROUNDING = 1e-14
"""More than what a few sums of times may be off, in proportion to the time."""


class Steps(Protocol):
    """When the flows of a series begin and end, given how long each takes.

    `Times` are float64 of shape (flow,), in seconds on the clock.
    """

    def times(self, start: float, seconds: float) -> tuple[Times, Times]:
        """Return begin and end of each flow of a series that starts at *start*, *seconds* apart."""

    def alike(self, other: Steps) -> bool:
        """Return whether `times` of both are the same for the same arguments."""

    def pause(self, seconds: float) -> float:
        """Return how long it is from the end of each flow of *seconds* to the next one's begin, but for rounding."""


class Flows(Protocol):
    """What plans must know of a network: a `Network`."""

    clock: Clock

    def alone_on(self, links: Sequence[Link], since: float) -> list[tuple[Path, float]] | None:
        """Return the paths with a flow on *links*, each alone on its own, and its end; None if there are others."""

    def resume(self, flows: Sequence[tuple[Path, float]], begin: float) -> list[Flow]:
        """Return flows of these sizes that began over these paths at *begin*."""


class Plan:
    """Equal flows of *size* bytes over *path* with the times of *steps*.

    ``changed()`` is called when *begins* and *ends* are other than before because of a plan in lockstep, and
    ``cut(flow)`` when the plan is one no more, with its flow that is under way.

    Life: made by an endpoint that knows its times, given to `Foreseen.add`, and then either dropped by its owner at
    the end or cut.  *seconds*, *begins* and *ends* are set when it is added.
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
        self.seconds = 0.0
        """How long each flow takes."""
        self.begins: Times = _NONE
        self.ends: Times = _NONE
        self.first = self.last = start
        """When the first flow begins and the last one ends."""
        self.group: list[Plan] = [self]
        self.changed = changed
        self.cut = cut

    def set(self, level: float) -> None:
        """Let each flow have the rate *level*."""
        self.seconds = self.size / level
        self.begins, self.ends = self.steps.times(self.start, self.seconds)
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
    plan that is not in lockstep with it.
    """

    def __init__(self, network: Flows) -> None:
        self._network = network
        self._plans: dict[Link, dict[Plan, None]] = {}
        self._all: dict[Plan, None] = {}
        self._guests: dict[Path, list[Plan]] = {}  # paths whose one flow ends before it meets these plans

    def __bool__(self) -> bool:
        """Return whether there is any plan."""
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
        met = [other for other in self._beside(links) if _meet(plan, other)]
        if met:
            group = list(dict.fromkeys(member for other in met for member in other.group))
            if guests or not self._join(plan, group):
                self.cut(met)
                return False
        for path, _ in guests:
            self._guests.setdefault(path, []).append(plan)
        self._all[plan] = None
        for link in links:
            self._plans.setdefault(link, {})[plan] = None
        return True

    def _beside(self, links: Sequence[Link]) -> dict[Plan, None]:
        found: dict[Plan, None] = {}
        for link in links:
            if plans := self._plans.get(link):
                found |= plans
        return found

    def _join(self, plan: Plan, group: list[Plan]) -> bool:
        alike = all(
            other.start == plan.start and other.size == plan.size and other.steps.alike(plan.steps)
            for other in group
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
        found: dict[Link, float] = {}
        for plan in self._all:
            done = int(np.searchsorted(plan.ends, now, side="right"))
            nbytes = done * plan.size
            if done < len(plan.begins) and plan.begins[done] < now:
                nbytes += plan.size * float((now - plan.begins[done]) / (plan.ends[done] - plan.begins[done]))
            for link in plan.path.links:
                found[link] = found.get(link, 0.0) + nbytes
        return found

    def meet(self, path: Path, size: float) -> None:
        """Cut the plans that a flow of *size* bytes meets that is about to start over *path*."""
        links, now = path.live, self._network.clock.now
        met: dict[Plan, None] = {}
        if self._guests:
            for guest in {other for link in links for other in link.active if other in self._guests}:
                met |= dict.fromkeys(self._guests.pop(guest))  # whatever its rate will be now
        plans = self._beside(links)
        if plans:
            level = min((_free(path, link) for link in links), default=inf)
            if path.repeats or self._network.alone_on(links, now) != [] or not 0.0 < level < inf:
                met |= plans
            else:
                end = now + size / level
                met |= {plan: None for plan in plans if _hits(plan, end, now)}
                self._guests = {other: found for other, found in self._guests.items() if other.flows}
                self._guests[path] = list(plans)
        self.cut(met)

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


def _meet(plan: Plan, other: Plan) -> bool:
    if plan.first > other.last or plan.last < other.first:
        return False
    # the first of the other's that does not end before; there is none for those of the plan that begin last
    after = other.ends.searchsorted(plan.begins)
    inside = int(after.searchsorted(len(other.begins)))
    return bool(_any(other.begins[after[:inside]] <= plan.ends[:inside]))


_any = np.logical_or.reduce
"""As `ndarray.any`, which takes twice as long on a few hundred values."""
