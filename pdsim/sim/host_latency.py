# SPDX-License-Identifier: Apache-2.0
"""When the program of a rank acts upon what it waits for: a message, a notification, the end of a computation.

That is *wake* later (`pdsim.hardware.machine.Host`), and *idle_wake* more if it has had nothing to act upon for
longer than *idle_after*: its thread sleeps by then, the processor with it, and other work has taken the caches.
Nothing overtakes what came before it.  A rank's own timers, the steps of decode among them, do not keep it from
going idle here.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf, nextafter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdsim.hardware.machine import Host

__all__ = ["Coming", "HostLatency"]

MANY = 8
"""How many have to have come before it pays to look for those that leave no trace."""

APART = 1e-9
"""Seconds between two that come one after the other and not, but for rounding, together."""


class Coming:
    """What comes at times that are known, without an event for each."""

    __slots__ = ("acted", "met", "times")

    def __init__(self) -> None:
        self.times: list[float] = []
        """When, in order."""
        self.met = 0
        """How many of them the rank has acted upon, or will."""
        self.acted = 0.0
        """When it acts upon the last of those."""


class HostLatency:
    """One life of one rank; a rank that has just started is not idle."""

    __slots__ = ("_coming", "_idle_after", "_idle_wake", "_last", "_wake", "instant")

    def __init__(self, host: Host | None = None, now: float = 0.0) -> None:
        self._wake, self._idle_wake, self._idle_after = (
            (host.wake, host.idle_wake, host.idle_after) if host is not None else (0.0, 0.0, 0.0)
        )
        self._last = now  # when it acted, or will have acted, upon all that has come
        self._coming: list[Coming] = []
        self.instant = not (self._wake or self._idle_wake)
        """Whether it acts upon everything at once."""

    def acts(self, now: float) -> float:
        """Return when it acts upon what comes at *now*; calls are in the order of time."""
        if self._coming:
            self._meet(now)
        return self._acts_at(now)

    def _acts_at(self, now: float) -> float:
        """Act upon what comes at *now*, all before being done."""
        last = self._last
        late = self._idle_wake if now - last > self._idle_after else 0.0
        at = now + self._wake + late
        self._last = at = at if at > last else nextafter(last, inf)
        return at

    def expect(self, series: Coming) -> None:
        """Act upon what *series* says at its times, until `conclude`."""
        self._coming.append(series)

    def conclude(self, series: Coming, count: int, now: float) -> float:
        """Take note that no more of *series* comes than the first *count*, none after *now*; return when it acts."""
        self._meet(now)
        self._coming.remove(series)
        while series.met < count:
            self._act(series)
        return series.acted

    def _meet(self, now: float) -> None:
        """Act upon all that has come before *now*, in the order of time."""
        waiting, many = [], 0
        for series in self._coming:
            end, met = bisect_left(series.times, now, series.met), series.met
            if end > met:
                waiting.append((series, end))
                many += end - met
        if many > MANY:
            self._skip(waiting)
        if len(waiting) == 1:
            series, end = waiting[0]
            while series.met < end:
                self._act(series)
            return
        while waiting:
            first, at = None, now
            for series, _ in waiting:
                if series.met < len(series.times) and series.times[series.met] < at:
                    first, at = series, series.times[series.met]
            if first is None:
                return
            self._act(first)

    def _skip(self, waiting: Sequence[tuple[Coming, int]]) -> None:
        """Skip what leaves no trace: all but the last few of each series, if none of it finds the rank asleep.

        *waiting* is how far each has come.  When the rank acts depends on what comes just before, and, for as long
        as it takes to wake from the cold, on the first.
        """
        kept, ends, last = inf, [], -inf  # *last*: of those skipped
        for series, end in waiting:
            kept = min(kept, series.times[max(end - 2, series.met)])
        for series, end in waiting:
            skipped = bisect_left(series.times, kept, series.met, end)
            ends.append((series, skipped))
            if skipped > series.met:
                last = max(last, series.times[skipped - 1])
        if kept - last < APART or last == -inf:
            return
        if self._idle_wake:
            begun = waiting[0][0]
            for series, _ in waiting:
                if series.times[series.met] < begun.times[begun.met]:
                    begun = series
            pause = begun.times[1] - begun.times[0] if len(begun.times) > 1 else inf
            if pause > self._idle_after or kept - begun.times[begun.met] < self._idle_wake + APART:
                return
        for series, end in ends:
            series.met = end
        self._last = max(self._last, last + self._wake)

    def _act(self, series: Coming) -> None:
        series.acted = self._acts_at(series.times[series.met])
        series.met += 1
