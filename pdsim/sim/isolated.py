# SPDX-License-Identifier: Apache-2.0
"""Transfers that share nothing with another one while they last: one event each, at their end.

When a transfer is posted and its posting thread, its copy engine and its links serve no other, all its times are
known: it is in no queue and its flow is not in the network.  What is about to use one of these *meets* it first: it
becomes what it would have been at that time, with a flow in the network and events of its own.  So results do not
depend on which transfers are isolated.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

from simpy.events import NORMAL

from pdsim.core.clock import LAST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdsim.core.clock import Clock

    # their modules import this one
    Link: TypeAlias = Any
    Network: TypeAlias = Any
    Path: TypeAlias = Any
    Posting: TypeAlias = Any

Plan = tuple[float, float, float, float, float, float]
"""When its turn comes, it is on the wire, off it, off the copy engine, and complete; and bytes/s on the wire."""


class IsolatedTransfers:
    """The isolated transfers of *network*, by the links that limit them."""

    def __init__(self, network: Network) -> None:
        self.links: dict[Link, Posting] = {}
        self._network = network
        self._clock: Clock = network.clock
        self._ways: dict[Path, tuple[float, tuple[Link, ...]]] = {}

    def begin(self, posting: Posting, begin: float) -> bool:
        """Let *posting*, whose wire is due at the time *begin*, be isolated; return whether it is.

        Its thread has nothing else under way.
        """
        queue, wire = posting.queue, posting.wire
        path, copier, size = wire.path, queue.copier, posting.left
        on = begin if copier is None else copier.alone_at(posting, begin)
        if on is None or wire.streams is not None or not size or self._network.foreseen.series:
            return False
        known = self._ways.get(path)
        if known is None:
            known = self._ways[path] = self._way(path)
        rate, links = known
        for link in links:
            if link in self.links:
                self.go_on(self.links[link])
                return False
        if not (rate and self._network.is_idle(path.live)):
            return False
        off = on + size / rate
        if copier is not None and wire.occupancy:
            posting.least = on + (size + posting.descriptors * wire.occupancy) / wire.rate
        ended, over = queue.ends(posting, off)
        posting.plan = begin, on, off, ended, over, rate
        queue.poster.isolated = posting
        for link in links:
            self.links[link] = posting
        reported = queue.reported(posting, over)
        self._clock.call_at(reported, self._end, posting, NORMAL if reported > off else LAST)
        return True

    def _way(self, path: Path) -> tuple[float, tuple[Link, ...]]:
        # Bytes/s of a flow that is alone on *path*, 0.0 if that is not known, and the links that others may pass.
        rates = [path.cap if link is path.own else link.capacity / path.links.count(link) for link in path.live]
        rate = min(rates, default=inf)
        links = tuple(link for link in dict.fromkeys(path.live) if link is not path.own)
        return rate if 0.0 < rate < inf else 0.0, links or path.live

    def _end(self, posting: Posting) -> None:
        if posting.plan is None:
            return
        _, _, _, ended, _, _ = posting.plan
        self._forget(posting)
        posting.wire.path.ended += posting.left
        if posting.queue.copier is not None:
            posting.queue.copier.served(posting, ended)
        posting.queue.finish(posting)

    def _forget(self, posting: Posting) -> None:
        posting.plan = posting.queue.poster.isolated = None
        for link in self._ways[posting.wire.path][1]:
            del self.links[link]

    def meet(self, links: Iterable[Link]) -> None:
        """Have the isolated transfers on *links* go on as others do."""
        if self.links:
            for link in links:
                if link in self.links:
                    self.go_on(self.links[link])

    def cut(self) -> None:
        """Have all go on as others do: what a link can carry, or which links limit a path, is about to change."""
        self.meet(list(self.links))
        self._ways.clear()

    def go_on(self, posting: Posting) -> None:
        """Have *posting* go on as others do, from what has become of it by now."""
        begin, on, off, ended, over, rate = posting.plan
        clock, queue, path = self._clock, posting.queue, posting.wire.path
        now, copier = clock.now, queue.copier
        self._forget(posting)
        if begin > now:
            clock.call_at(begin, queue.begin, posting)
            return
        if copier is not None:
            if ended >= now:
                copier.resume(posting, on)
            else:
                copier.served(posting, ended)
        if on > now:
            clock.call_at(on, queue.carry, posting)
        elif on == now:
            queue.carry(posting)
        elif off >= now:  # its end comes after all else of its instant
            carried = rate * (now - on)
            path.ended += carried
            queue.start(posting, max(posting.left - carried, 0.0))
        else:
            path.ended += posting.left
            if copier is not None and ended >= now:
                clock.call_at(ended, copier.leave, posting)
            if over >= now:
                clock.call_at(over, queue.complete, posting)
            else:
                clock.call_at(queue.reported(posting, over), queue.ask, posting)

    def carried(self) -> dict[Link, float]:
        """Return the bytes that they have carried over each link until now."""
        demand: dict[Link, float] = {}
        now = self._clock.now
        for posting in dict.fromkeys(self.links.values()):
            _, on, _, _, _, rate = posting.plan
            nbytes = min(max(rate * (now - on), 0.0), posting.left)
            for link in posting.wire.path.links:
                demand[link] = demand.get(link, 0.0) + nbytes
        return demand
