# SPDX-License-Identifier: Apache-2.0
"""Read the use of links, memories, pages and rings now and then, on the clock of a modelled job.

Reading changes nothing: the times of the job are the same, bit for bit, with and without.  How long a job takes is
not known beforehand, so samples begin close together and, whenever there are too many, every other one goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdsim.core.clock import Clock
    from pdsim.sim.flows.network import Network
    from pdsim.sim.memory import DeviceMemory
    from pdsim.transfer.job import SampleRow

__all__ = ["Sampling"]

FIRST = 1e-4
"""Seconds between samples at first."""


class Sampling:
    """Keeps *count* to twice as many instants of a job, evenly spread.

    *clock* is the job's.  Links are sampled by what they have carried, so a sample is the mean since the one
    before and no burst is missed between two; gauges (the share of a memory, a pool of pages, a ring in use) are
    read at the instant.  Halving keeps every sample before it exact: bytes carried are sums since the start.
    """

    def __init__(self, clock: Clock, network: Network, count: int) -> None:
        self._clock = clock
        self._network = network
        self._most = 2 * count
        self._interval = FIRST
        self._times: list[float] = []
        self._carried: list[list[float]] = []  # by instant, of every link: bytes until then
        self._gauges: dict[tuple[str, str], Callable[[], float]] = {}
        self._values: dict[tuple[str, str], list[float | None]] = {}
        self._tick(None)

    def gauge(self, kind: str, name: str, read: Callable[[], float]) -> None:
        """Sample what *read* returns, a share from 0 to 1; a later one of the same *kind* and *name* replaces it."""
        self._gauges[kind, name] = read

    def memory(self, memory: DeviceMemory) -> None:
        """Sample the use of *memory*, all pools together."""
        self.gauge("pool", memory.name, lambda: memory.used / memory.capacity)

    def _tick(self, _: object) -> None:
        """Read everything, halve what is kept if there is too much of it, and come back an interval later.

        Once nothing else is scheduled it does not come back: its own events must not keep a job alive.
        """
        self._read()
        if len(self._times) >= self._most:
            self._interval *= 2.0
            for kept in (self._times, self._carried, *self._values.values()):
                del kept[1::2]  # type: ignore[attr-defined]
        if self._clock.peek() < inf or len(self._times) == 1:  # else nothing happens any more, which must be noticed
            self._clock.call_at(self._clock.now + self._interval, self._tick, None)

    def _read(self) -> None:
        for key, read in self._gauges.items():
            self._values.setdefault(key, [None] * len(self._times)).append(read())
        self._times.append(self._clock.now)
        self._carried.append(self._network.carried())

    def rows(self) -> Iterator[SampleRow]:
        """Yield kind, name, time and value of every sample; of a link the mean since the one before.

        Kinds are ``link`` and those of gauges; times are seconds on the job's clock, values shares of capacity
        from 0 to 1.  Links that carried nothing have no rows, gauges none from before they were made.
        """
        if self._clock.now > self._times[-1]:
            self._read()
        for index, link in enumerate(self._network.links):
            carried = [each[index] if index < len(each) else 0.0 for each in self._carried]
            if carried[-1] and link.nominal:
                yield from self._of_link(link.name, link.nominal, carried)
        for (kind, name), values in self._values.items():
            missing = len(self._times) - len(values)
            for time, value in zip(self._times, [*values, *[None] * missing], strict=True):
                if value is not None:
                    yield kind, name, time, value

    def _of_link(self, name: str, capacity: float, carried: Iterable[float]) -> Iterator[SampleRow]:
        """Yield the samples of a link, whose bytes *carried* until each instant are given.

        The share is of the nominal *capacity* in bytes/s, also while a fault has the link squeezed.
        """
        before, last = 0.0, 0.0
        for time, total in zip(self._times, carried, strict=True):
            share = (total - last) / (capacity * (time - before)) if time > before else 0.0
            yield "link", name, time, max(share, 0.0)
            before, last = time, total
