# SPDX-License-Identifier: Apache-2.0
"""Threads that post to one GPU's copy engines: what they do at once, and what they do one at a time.

A thread that is alone posts as `EngineModel.posting` says.  The share *serial* of that work is done one at a time
by the threads of a process, the share *between* by those of all processes of the GPU.  Beside *a* other threads of
its process and *b* of others a thread goes on ``1 + a * serial + b * between`` times as slowly, so *k* threads of
one process are ``1 / (serial + (1 - serial) / k)`` times as fast as one (Amdahl's law).  Transfers of a rank wait
for one of its threads in the order in which they were posted.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.core.clock import Clock
    from pdsim.core.units import Seconds

__all__ = ["PostingShare", "PostingThreads"]


@dataclass(eq=False, slots=True)
class _Work:
    """What one thread is at: *left* seconds of it, as long as no other thread is at work."""

    threads: PostingThreads
    left: Seconds  # of a thread that is alone
    begin: Callable[[Any], None]
    done: Callable[[Any], None]
    tag: Any


class PostingShare:
    """What all threads on one GPU share, or, where there is none, those of one rank.

    It is a processor-sharing queue in closed form: one event stands for the next end, and is foreseen anew
    whenever a thread begins or ends something.  With *serial* of 0 the threads of a process do not slow each other,
    with 1 all of them together are as fast as one alone; *between* is the same of processes.
    """

    def __init__(self, clock: Clock, serial: float, between: float) -> None:
        self._clock = clock
        self._serial = serial
        self._between = between
        self._busy: list[_Work] = []
        self._since = clock.now
        self._turn = 0  # of the event that is to come: what was foreseen before does not hold any more

    def take(self, works: list[_Work]) -> None:
        """Let threads begin with *works* now."""
        self._advance()
        self._busy += works
        self._foresee()
        for work in works:
            work.begin(work.tag)

    def _slowness(self) -> dict[PostingThreads, float]:
        """Return for each process at work how many times as long as alone the work of its threads takes now."""
        own = Counter(work.threads for work in self._busy)
        every = len(self._busy)
        return {
            threads: 1.0 + (count - 1) * self._serial + (every - count) * self._between
            for threads, count in own.items()
        }

    def _advance(self) -> None:
        """Count what has been done since the last change, at the slowness that held all the time."""
        now = self._clock.now
        if self._busy:
            slowness = self._slowness()
            for work in self._busy:
                work.left -= (now - self._since) / slowness[work.threads]
        self._since = now

    def _foresee(self) -> None:
        self._turn += 1
        if self._busy:
            slowness = self._slowness()
            least = min(max(0.0, work.left) * slowness[work.threads] for work in self._busy)
            over = [work for work in self._busy if max(0.0, work.left) * slowness[work.threads] <= least]
            self._clock.call_at(self._clock.now + least, self._end, (self._turn, over))

    def _end(self, foreseen: tuple[int, list[_Work]]) -> None:
        """End what is over at the instant that was foreseen, and let the threads take up what waits.

        Works that end together are those that were foreseen together, not those with a remainder of 0, which
        rounding would miss.
        """
        turn, over = foreseen
        if turn != self._turn:
            return
        self._advance()
        self._busy = [work for work in self._busy if work not in over]
        following = [work.threads.next() for work in over]
        for work in over:
            work.done(work.tag)
        self.take([work for work in following if work is not None])


class PostingThreads:
    """The *threads* of one rank, which share with those of others what *share* says.

    Work is taken up in the order in which it was posted.  A rank with one thread that shares with nobody needs
    none of this: its poster is a sum (`pdsim.sim.engine`).
    """

    def __init__(self, share: PostingShare, threads: int) -> None:
        self._share = share
        self._free = threads
        self._waiting: deque[_Work] = deque()

    def post(self, seconds: Seconds, begin: Callable[[Any], None], done: Callable[[Any], None], tag: Any) -> None:
        """Post work of *seconds* on a thread that is alone.

        ``begin(tag)`` is called when a thread takes it up, perhaps now, and ``done(tag)`` at its end.
        """
        work = _Work(self, seconds, begin, done, tag)
        if self._free:
            self._free -= 1
            self._share.take([work])
        else:
            self._waiting.append(work)

    def next(self) -> _Work | None:
        """Return what the thread that has just ended something takes up; without that it is free."""
        if self._waiting:
            return self._waiting.popleft()
        self._free += 1
        return None

    def drop(self, tag: Any) -> None:
        """Forget what was posted with *tag* and waits for a thread; a thread that is at it goes on to its end."""
        self._waiting = deque(work for work in self._waiting if work.tag is not tag)
