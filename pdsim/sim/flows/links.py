# SPDX-License-Identifier: Apache-2.0
"""Links and paths: what they hold while their flows come and go.

A link that limits flows allows each of them the same rate, its *level*.  So it has one counter of service, the bytes
that each flow limited here has received, and that times the flows of all paths that it limits.

Most links of a real machine can never limit anybody, because other links let too little through to fill them (the
memory behind a NIC, a leaf switch that is not oversubscribed).  Those are *implied* by the others; they are left out
of the solution, until a new path or another capacity makes them count and they are *live*.

Rates are found in `pdsim.sim.flows.waterfill`, flows start and end in `pdsim.sim.flows.network`, which also
has the public names; users make links and paths there.
"""

from __future__ import annotations

from heapq import heapify, heappop
from math import inf
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.core.clock import Clock

__all__ = ["NOBODY", "OPEN", "Flow", "Link", "Path"]

ENDED: Final = 1.0 + 1e-14
"""Ends within a few roundings of one another, in service, are one end."""

REBASE: Final = 1000
"""How many flows end on a busy link before its counter of service starts from zero again."""

OPEN: Final = -1.0
"""The level of a link that limits nobody, or whose level is being found."""


class Flow:
    """Bytes on their way.  Made by `Network.start`.

    Life: it starts when it is made, and ends when its service is used up or it is aborted; *tag* is what its end is
    reported with.  *size* is in bytes.
    """

    __slots__ = ("begin", "done", "path", "size", "tag")

    def __init__(self, path: Path, size: float, done: Callable[[Any], None], tag: Any) -> None:
        self.path = path
        self.size = size
        self.tag = tag
        self.done: Callable[[Any], None] | None = done  # None: called or aborted
        self.begin = 0.0

    def __repr__(self) -> str:
        return f"<Flow of {self.size:g} bytes over {self.path!r}>"


class Link:
    """A capacity in bytes/s that flows share: a port, a bus, a memory.  Made by `Network.link`.

    Made for the life of its network.  Public: *name*, `capacity`, `carried` and `load`; the rest belongs to the
    solver.
    """

    __slots__ = (
        "_cover",
        "_paths",
        "active",
        "age",
        "bound",
        "capacity",
        "covers",
        "eta",
        "first_end",
        "free",
        "index",
        "key",
        "level",
        "live",
        "name",
        "nominal",
        "queued",
        "service",
        "since",
        "unset",
        "was",
    )  # fmt: skip

    def __init__(self, name: str, index: int, capacity: float) -> None:
        self.name = name
        self.index = index
        """Position among the links of the network, in order of creation."""
        self.nominal = capacity
        """Bytes/s that it was made with, whatever `Network.set_capacity` has made of it since."""
        self.capacity = capacity
        """Bytes/s.  Set with `Network.set_capacity`."""
        self._paths: dict[Path, int] = {}  # how many times each passes here
        self._cover: dict[Link, int] = {}  # the links that imply this one, and how often what they carry passes here
        self.covers: dict[Link, None] = {}  # the links that this one helps to imply
        self.live = False  # not implied
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
        self.queued = inf  # the time for which the network was told

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
        """Whether the links of the cover cannot let more through than this link can carry.

        Each link of a cover is smaller than what it covers, in the order of capacity and index, so that links never
        imply each other in a circle.
        """
        total = 0.0
        for link, times in self._cover.items():
            total += link.capacity * times
            if link.capacity == self.capacity and link.index > self.index:
                return False
        return total <= self.capacity

    def let_pass(self, path: Path, times: int) -> bool:
        """Let *path* pass *times* times.  Return whether this link is implied still."""
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
        """Take part in the solution from now on.  Until now the link was implied, so the rates of now suit it."""
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
        """Have another *capacity*, and take part in the solution those that may limit others because of it."""
        self.capacity = capacity
        for link in (self, *self.covers):
            if not link.live and not link.is_implied():
                link.promote()

    def finish(self, now: float) -> list[tuple[int, Flow]]:
        """Take the flows that end now off their paths."""
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
            self.rebase()
        return ended

    def rebase(self) -> None:
        """Count service from zero again: where flows never cease it would grow until small flows drown in it."""
        for path in self.bound:
            path.rebase(self.service + path.offset)
        self.service = 0.0
        self.age = 0


NOBODY = Link("nobody", -1, 0.0)
"""What limits a path without flows."""

NEVER: tuple[float, int, Any] = (inf, 0, None)
"""The end after the last one of a path."""


class Path:
    """The way of flows over *links*, each limited to *cap* bytes/s.  Made by `Network.path`.

    All its flows have the same rate, so one counter of service times them all: a flow that starts at v ends at
    v + size.  The counter is that of the link that limits the path now, plus an offset.
    """

    __slots__ = (
        "_clock",
        "ahead",
        "begun",
        "cap",
        "count",
        "ended",
        "flows",
        "index",
        "limit",
        "links",
        "live",
        "offset",
        "own",
        "repeats",
        "rest",
        "unlimited",
    )  # fmt: skip

    def __init__(self, clock: Clock, index: int, links: tuple[Link, ...], cap: float) -> None:
        self.links = links
        self.cap = cap
        self.index = index
        self.flows = 0
        """How many flows there are now."""
        self._clock = clock
        self.count = 0.0  # how many there were when the rate was solved
        # a cap is a link of the path's own that grows with the number of flows
        self.own = Link(f"cap of path {index}", -2 - index, 0.0) if cap < inf else None
        self.unlimited = not links and cap == inf
        self.repeats = len(set(links)) < len(links)
        self.live: tuple[Link, ...] = ()
        self.rest: tuple[Link, ...] = ()
        self.limit = NOBODY
        self.offset = 0.0
        self.ahead: list[tuple[float, int, Any]] = [NEVER]  # the last has no flow
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
        """Find the links that can limit this path."""
        own = () if self.own is None else (self.own,)
        self.live = (*(link for link in self.links if link.live), *own)
        self.find_rest()

    def find_rest(self) -> None:
        """Find the links that can limit this path but do not, counting a link that it passes twice once less."""
        rest, found = [], False
        for link in self.live:
            if link is self.limit and not found:
                found = True
            else:
                rest.append(link)
        self.rest = tuple(rest)

    def served(self, now: float) -> float:
        """Return the bytes that each flow of the path would have received by *now*.

        They are counted from the path's own zero, whichever link limits it.
        """
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
