"""When the program of a rank acts upon what it waits for: a message, a notification, the end of a computation.

That is *wake* later (`pdsim.hardware.Host`), and *idle_wake* more if it has had nothing to act upon for longer than
*idle_after*: its thread sleeps by then, the processor with it, and other work has taken the caches.  Nothing overtakes
what came before it.  A rank's own timers, the steps of decode among them, do not keep it from going idle here.
"""

from __future__ import annotations

from math import inf, nextafter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdsim.hardware import Host

__all__ = ["HostLatency"]


class HostLatency:
    """One life of one rank; a rank that has just started is not idle."""

    __slots__ = ("_idle_after", "_idle_wake", "_last", "_wake", "instant")

    def __init__(self, host: Host | None = None, now: float = 0.0) -> None:
        self._wake, self._idle_wake, self._idle_after = (
            (host.wake, host.idle_wake, host.idle_after) if host is not None else (0.0, 0.0, 0.0)
        )
        self._last = now  # when it acted, or will have acted, upon all that has come
        self.instant = not (self._wake or self._idle_wake)
        """Whether it acts upon everything at once."""

    def acts(self, now: float) -> float:
        """Return when it acts upon what comes at *now*; calls are in the order of time."""
        late = self._idle_wake if now - self._last > self._idle_after else 0.0
        self._last = max(now + self._wake + late, nextafter(self._last, inf))
        return self._last
