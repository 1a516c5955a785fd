"""Several threads of one process that post: what they do at once, and what they do one at a time.

A thread that is alone posts as `EngineModel.posting` says.  The share *serial* of that work is done under a lock, or by
a driver that takes one caller at a time: with *k* threads at work each of them goes on ``k * serial + 1 - serial``
times as slowly, so all together are ``1 / (serial + (1 - serial) / k)`` times as fast as one (Amdahl's law).  Transfers
wait for a thread in the order in which they were posted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.clock import Clock
    from pdsim.units import Seconds

__all__ = ["PostingThreads"]


@dataclass(eq=False, slots=True)
class _Work:
    left: Seconds  # of a thread that is alone
    done: Callable[[Any], None]
    tag: Any


class PostingThreads:
    """*threads* of one rank."""

    def __init__(self, clock: Clock, threads: int, serial: float) -> None:
        self._clock = clock
        self._threads = threads
        self._serial = serial
        self._busy: list[_Work] = []
        self._waiting: deque[tuple[_Work, Callable[[Any], None]]] = deque()
        self._since = clock.now
        self._turn = 0  # of the event that is to come: what was foreseen before does not hold any more

    def post(self, seconds: Seconds, begin: Callable[[Any], None], done: Callable[[Any], None], tag: Any) -> None:
        """Call ``begin(tag)`` when a thread takes up work of *seconds*, perhaps now, and ``done(tag)`` at its end."""
        work = _Work(seconds, done, tag)
        if len(self._busy) < self._threads:
            self._advance()
            self._busy.append(work)
            self._foresee()
            begin(tag)
        else:
            self._waiting.append((work, begin))

    def drop(self, tag: Any) -> None:
        """Forget what was posted with *tag* and waits for a thread; a thread that is at it goes on to its end."""
        self._waiting = deque(entry for entry in self._waiting if entry[0].tag is not tag)

    def _slowness(self) -> float:
        return len(self._busy) * self._serial + 1.0 - self._serial

    def _advance(self) -> None:
        now = self._clock.now
        if self._busy:
            gone = (now - self._since) / self._slowness()
            for work in self._busy:
                work.left -= gone
        self._since = now

    def _foresee(self) -> None:
        self._turn += 1
        if self._busy:
            least = min(work.left for work in self._busy)
            at = self._clock.now + max(0.0, least) * self._slowness()
            self._clock.call_at(at, self._end, (self._turn, least))

    def _end(self, foreseen: tuple[int, Seconds]) -> None:
        turn, least = foreseen
        if turn != self._turn:
            return
        over = [work for work in self._busy if work.left <= least]  # those of this instant, without rounding
        self._advance()
        self._busy = [work for work in self._busy if work not in over]
        begun = []
        while self._waiting and len(self._busy) < self._threads:
            work, begin = self._waiting.popleft()
            self._busy.append(work)
            begun.append((begin, work.tag))
        self._foresee()
        for work in over:
            work.done(work.tag)
        for begin, tag in begun:
            begin(tag)
