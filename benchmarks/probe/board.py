# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a point meet: a page that all of them have mapped, and the processors that they run on.

Pipes wake a process, and whoever has slept for a millisecond posts its first transfer with cold caches: two to four
times as slow as the next one.  What is asked here is what a transfer costs in a program that moves KV all the time,
so ranks meet on memory, without sleeping.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

AHEAD_NS = 30_000
"""From the arrival of the last rank until the start."""

PATIENCE_NS = 20_000_000_000
SLOW = 1.2
"""A processor that takes so many times as long as the quickest has a busy neighbour, and is left."""


class Board:
    """A file of one page: when each of *names* arrived last, and when it all starts."""

    def __init__(self, path: Path, name: str, names: Sequence[str]) -> None:
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("q")
        self._index = {other: index for index, other in enumerate(names)}
        self._mine = self._index[name]

    def meet(self, number: int, crew: Sequence[str], meanwhile: Callable[[], object]) -> int:
        """Return the instant of the monotonic clock, in ns, at which all of *crew* start turn *number*, above 0.

        *meanwhile* is called again and again.  Raise `TimeoutError` if somebody does not come.
        """
        cells, start, said = self._cells, len(self._index), len(self._index) + 1
        limit = time.monotonic_ns() + PATIENCE_NS
        cells[self._mine] = number
        if self._mine == self._index[crew[0]]:
            others = [self._index[name] for name in crew]
            while min(cells[other] for other in others) < number:
                meanwhile()
                _check(limit, number)
            cells[start] = time.monotonic_ns() + AHEAD_NS
            cells[said] = number
        while cells[said] < number:
            meanwhile()
            _check(limit, number)
        return cells[start]


def _check(limit: int, number: int) -> None:
    if time.monotonic_ns() > limit:
        raise TimeoutError(f"turn {number}: a rank did not come within {PATIENCE_NS / 1e9:.0f} s")


class Processors:
    """The processors of one rank: neighbours, so that no two ranks share one or the two threads of a core."""

    def __init__(self, rank: int, ranks: int) -> None:
        found = list(range(os.cpu_count() or 1))
        self.enough = len(found) >= 4 * ranks
        each = len(found) // ranks
        self.all = found[rank * each : (rank + 1) * each] if self.enough else found
        self._mine = list(self.all)
        self._best = min(_piece() for _ in range(20))

    def take(self) -> None:
        """Keep the calling thread on these processors."""
        if self.enough:
            os.sched_setaffinity(0, self.all)

    def bind(self, threads: Iterable[int], step: int) -> None:
        """Bind the calling thread to the first of these for good, and *threads* to the processor *step* after it."""
        if not self.enough:
            return
        os.sched_setaffinity(0, {self.all[0]})
        for thread in threads:
            os.sched_setaffinity(thread, {(self.all[0] + step) % (os.cpu_count() or 1)})
        self._mine = []

    def settle(self) -> None:
        """Let the calling thread run where a piece of Python takes about as long as it ever did."""
        if not self.enough:
            return
        for number in self._mine:
            took = min(_piece() for _ in range(3))
            self._best = min(self._best, took)
            if took <= SLOW * self._best:
                return
            os.sched_setaffinity(0, {number})
            self._mine = [*self._mine[1:], self._mine[0]]


def _piece() -> int:
    """Return the nanoseconds that a fixed piece of work takes."""
    begin, total = time.perf_counter_ns(), 0
    for index in range(2000):
        total += index & 3
    return time.perf_counter_ns() - begin
