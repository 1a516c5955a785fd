# SPDX-License-Identifier: Apache-2.0
"""One transfer in the hands of an engine, the thread that posts it, and the wire that carries it.

What happens to them, and when, is `pdsim.sim.engine`'s and `pdsim.sim.copy_engine`'s.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.hardware.costs import EngineModel
    from pdsim.sim.flows.network import Flow, Path
    from pdsim.sim.posting_threads import PostingThreads
    from pdsim.sim.tcp import Streams
    from pdsim.sim.topology import Route

__all__ = ["Posting", "PostingThread", "Wire"]


class PostingThread:
    """The thread, or the copy engine's launch, that hands descriptors over; one transfer after the other."""

    __slots__ = ("free", "slowness", "threads", "under_way")

    def __init__(self, threads: PostingThreads | None = None) -> None:
        self.threads = threads  # that share the work; None: there is this one
        self.free = 0.0  # when it has done everything that it was given
        self.slowness = 1.0  # how many times as long as usual its work takes
        self.under_way = 0  # transfers, but those that are done in the call that posts them


class Posting:
    """One transfer in the hands of the engine.  Made by `SendQueue.post`."""

    __slots__ = (
        *("done", "flow", "held", "least", "wire"),
        *("aborted", "at_once", "carried", "descriptors", "nbytes", "posted", "tag"),
    )

    def __init__(
        self, wire: Wire, nbytes: int, descriptors: int, done: Callable[[Posting], None], tag: Any, held: float
    ) -> None:
        self.nbytes = nbytes
        self.descriptors = descriptors
        self.posted: float | None = None  # when posting ends or has ended; None while it waits for room
        self.aborted = False
        self.at_once = False  # done in the call that posts it
        self.tag = tag
        self.wire = wire
        self.done = done
        self.held = held
        self.least = 0.0  # when its bytes are there at the earliest
        self.flow: Flow | None = None
        self.carried = False  # by the wire, while a thread is still posting it


class Wire:
    """One direction between two endpoints: what a poster writes, or what it reads."""

    __slots__ = ("latency", "occupancy", "path", "rate", "streams")

    def __init__(self, path: Path, model: EngineModel, route: Route, cap: float, *, read: bool) -> None:
        self.path = path
        self.latency = model.latency + route.latency + (model.read if read else 0.0)
        narrowest = min((link.nominal / path.links.count(link) for link in path.links), default=inf)
        self.rate = min(cap, narrowest)  # of a transfer that is alone, and no fault on the way
        self.occupancy = model.held_up(narrowest, read=read)
        self.streams: Streams | None = None  # of TCP, where the way takes time
        if route.chain is not None:
            answer = model.lanes * model.descriptor  # the engine's own latency is that of the last one only
            self.streams = route.chain.streams(route.latency, answer, self.rate, model.lanes)

    def tail(self, posting: Posting) -> float:
        """Return how long the last descriptor of *posting* takes on the wire, when it is alone there."""
        return (posting.nbytes / posting.descriptors + self.occupancy) / self.rate
