# SPDX-License-Identifier: Apache-2.0
"""The wire: what carries a transfer's bytes, and the copy engines of a GPU that take transfers in turn.

The engines of a GPU that copy to others belong to one process at a time.  As long as it has something for them,
others wait, but no longer than a slice (`Gpu.slice`); then the driver takes the engines away from it, in the middle
of a copy if need be, and the next process has them.  Measured on 2 x H200: of two processes with two copies of
16 MiB queued each, most copies take as long as alone, and those that a slice interrupts 1.1 ms longer
(`data/benchmarks/field-crossing-2xh200.csv`).  Of two streams of a process with copies queued, one is served until
it is empty: 2 and 4 of 16 MiB to each of two GPUs take 82 and 173 us each, as those to one GPU do
(`data/benchmarks/crossing-4xh200.parquet`).
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.core.clock import Clock
    from pdsim.hardware.machine import Gpu
    from pdsim.sim.faults import Draws
    from pdsim.sim.network import Flow, Network, Path
    from pdsim.sim.tcp import Streams

__all__ = ["CopyEngine", "Posting", "WireStage"]


class Posting:
    """One transfer in the hands of the engine.  Made by `SendQueue.post`."""

    __slots__ = (
        *("done", "flow", "held", "least", "wire"),
        *("aborted", "at_once", "carried", "descriptors", "nbytes", "posted", "tag"),
    )

    def __init__(
        self, wire: WireStage, nbytes: int, descriptors: int, done: Callable[[Posting], None], tag: Any, held: float
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


class WireStage:
    """One direction between two endpoints: what a poster writes, or what it reads."""

    __slots__ = ("latency", "occupancy", "path", "rate", "streams")

    def __init__(self, path: Path, latency: float, rate: float) -> None:
        self.path = path
        self.latency = latency  # from the end of posting and wire to completion
        self.rate = rate  # of a transfer that is alone, and no fault on the way
        self.occupancy = 0.0  # bytes that each descriptor keeps it from carrying
        self.streams: Streams | None = None  # of TCP, where the way takes time

    def tail(self, posting: Posting) -> float:
        """Return how long the last descriptor of *posting* takes on the wire, when it is alone there."""
        return (posting.nbytes / posting.descriptors + self.occupancy) / self.rate


class CopyEngine:
    """Carries the transfers that the ranks of one GPU post: of each rank one at a time, in the order of their wires.

    So do the copies of a GPU over NVLink, whatever streams of a process they are in: of two transfers of 1 GiB to
    two GPUs, the first is there after 2.8 ms and the second after 5.6 (three engines on 4 x H200,
    `docs/validation.md`). Sources that begin with the same sink share its port and leave the other sinks idle, again
    and again.  With *streams*, one for each peer, it stays with a stream until that is empty.

    Ranks are processes, and have it in turns of `Gpu.slice` seconds at most; with 0 their copies go on side by side.
    A series of writes that was foreseen is not interrupted (`pdsim.sim.sequence`).

    Copies *within* a GPU are kernels, which have a copy engine of their own here, and wait for `Gpu.process_switch`
    when the turn is another process'.

    After `Gpu.idle_after` seconds without a transfer it sleeps, and takes `Gpu.idle_wake` to begin with the next.
    """

    __slots__ = (
        *("_busy", "_clock", "_draws", "_idle", "_idle_after", "_idle_wake", "_waiting", "posters"),
        *(
            "_number",
            "_over",
            "_owner",
            "_served",
            "_since",
            "_slice",
            "_stalled",
            "_streams",
            "_last",
            "_switch",
            "within",
        ),
    )

    def __init__(
        self,
        clock: Clock,
        gpu: Gpu | None = None,
        draws: Draws | None = None,
        *,
        streams: bool = False,
        within: bool = False,
    ) -> None:
        self._clock = clock
        self._draws = draws
        self._idle_after, self._idle_wake = (gpu.idle_after, gpu.idle_wake) if gpu is not None else (0.0, 0.0)
        self._idle = clock.now  # since when, or when it will be awake
        self._busy: dict[object, Posting] = {}
        self._waiting: dict[object, deque[tuple[Callable[[Posting], None], Posting]]] = {}
        self._streams = streams
        self.within = within  # the GPU
        self._switch = gpu.process_switch if within and gpu is not None else 0.0
        self._last: object | None = None  # who had it before
        self._slice = gpu.slice if gpu is not None else 0.0
        self._owner: object | None = None  # of the engine, since `_since`
        self._since = 0.0
        self._over = False  # whether its slice is, and others wait
        self._number = 0  # of the owner's turn: an alarm of an earlier one says nothing
        self._served: _Stalled | None = None  # what of the owner's is on the wire
        self._stalled: dict[object, _Stalled] = {}  # in the order in which they get their turns
        self.posters: set[object] = set()
        """Those of the ranks that post through it."""

    def take(self, start: Callable[[Posting], None], posting: Posting, poster: object) -> None:
        """Call ``start(posting)`` when its turn has come among those of *poster*."""
        if poster in self._busy:
            self._waiting.setdefault(poster, deque()).append((start, posting))
        else:
            self._begin(start, posting, poster)

    def _begin(self, start: Callable[[Posting], None], posting: Posting, poster: object) -> None:
        now = self._clock.now
        if not self._busy and now - self._idle > self._idle_after:
            self._idle = now + self._idle_wake
        self._busy[poster] = posting
        at = self._idle if self._draws is None else max(now, self._idle) + self._draws.copy()
        if at > now:
            self._clock.call_at(at, start, posting)
        else:
            start(posting)

    @property
    def sleeps(self) -> bool:
        """Whether it takes time to begin after it was idle."""
        return self._idle_wake > 0.0

    def stays_awake(self, at: float, pause: float) -> bool:
        """Return whether it is idle and needs no rousing for a transfer at *at*, nor after *pause* seconds without.

        It is not known where several ranks post: then its rest depends on all of them.
        """
        now = self._clock.now
        idle = not self._busy and len(self.posters) == 1 and self._idle <= now
        return idle and at - self._idle <= self._idle_after and pause < self._idle_after / 2

    def rests_since(self, at: float) -> None:
        """Take note that a transfer that was not shown to it ended at *at*."""
        self._idle = max(self._idle, at)

    def hold(self, posting: Posting, poster: object) -> None:
        """Carry *posting*, which has begun before."""
        self._busy[poster] = posting

    def leave(self, posting: Posting, poster: object) -> None:
        """Go on to the next of *poster*, if it was *posting* that was carried."""
        if self._busy.get(poster) is not posting:
            return
        del self._busy[poster]
        stalled = self._stalled.get(poster)
        if stalled is not None and stalled.posting is posting:
            del self._stalled[poster]
        self._idle = max(self._idle, self._clock.now)
        waiting, wire, at = self._waiting.get(poster), posting.wire, 0
        while waiting:
            if self._streams:
                at = next((index for index, (_, other) in enumerate(waiting) if other.wire is wire), 0)
            start, posting = waiting[at]
            del waiting[at]
            if not posting.aborted:
                self._begin(start, posting, poster)
                return

    @property
    def shared(self) -> bool:
        """Whether ranks have it in turns."""
        return self._slice > 0.0 and len(self.posters) > 1

    def carry(
        self,
        network: Network,
        posting: Posting,
        poster: object,
        size: float,
        done: Callable[[Posting], None],
    ) -> None:
        """Put *size* bytes of *posting* on the wire, now or in the turn of *poster*; call ``done(posting)`` then."""
        if not self.shared:
            posting.flow = network.start(posting.wire.path, size, done, posting)
            return
        way = _Stalled(network, posting, size, done)
        if self._owner is None:
            self._own(poster)
        if self._owner is poster and not self._over:
            self._serve(way)
            return
        self._stalled[poster] = way
        if len(self._stalled) == 1:
            self._limit()

    def rest(self, posting: Posting, poster: object) -> None:
        """Give the engine to the next rank unless *poster*, whose *posting* is off the wire, goes on at once."""
        if self._served is not None and self._served.posting is posting:
            self._served = None
        if self._owner is poster and self._served is None:
            self._pass()

    def _own(self, poster: object) -> None:
        self._owner, self._since, self._over = poster, self._clock.now, False
        self._number += 1

    def _serve(self, way: _Stalled) -> None:
        self._served, before, self._last = way, self._last, self._owner
        if self._switch and before is not None and before is not self._owner:
            self._clock.call_at(self._clock.now + self._switch, self._start, way)
        else:
            self._start(way)

    def _start(self, way: _Stalled) -> None:
        if self._served is way:
            way.posting.flow = way.network.start(way.posting.wire.path, way.left, way.done, way.posting)

    def _pass(self) -> None:
        self._owner = None
        if self._stalled:
            poster = next(iter(self._stalled))
            way = self._stalled.pop(poster)
            self._own(poster)
            if self._stalled:
                self._limit()
            self._serve(way)

    def _limit(self) -> None:
        gone = ceil((self._clock.now - self._since) / self._slice)
        self._clock.call_at(self._since + max(1, gone) * self._slice, self._end_slice, self._number)

    def _end_slice(self, number: int) -> None:
        way = self._served
        if number != self._number or not self._stalled or way is None:
            return
        if way.posting.flow is None:  # it has hardly come to it
            self._over = True
            return
        left = way.network.abort(way.posting.flow)
        if left < 1.0:  # it ends at this very instant
            way.left, self._over = 0.0, True
            self._serve(way)
            return
        way.left, way.posting.flow, self._served = left, None, None
        assert self._owner is not None
        self._stalled[self._owner] = way
        self._pass()


class _Stalled:
    """What a rank has for the wire: *left* bytes of *posting* on *network*."""

    __slots__ = ("done", "left", "network", "posting")

    def __init__(self, network: Network, posting: Posting, left: float, done: Callable[[Posting], None]) -> None:
        self.network = network
        self.posting = posting
        self.left = left
        self.done = done
