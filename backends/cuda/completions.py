# SPDX-License-Identifier: Apache-2.0
"""Learning that a GPU's work is done without waiting for it: events, which the wall clock polls.

Waiting for a stream would block the clock's thread, and with it every other transfer of the rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from backends.cuda.runtime import Cudart
from pdsim.core.clock import WallClock
from pdsim.core.errors import TransferFailed

__all__ = ["Completions"]

Done = Callable[[TransferFailed | None], None]


class Completions:
    """A `Source`.  Work of one stream ends in order, so only the oldest of each is asked for.

    CUDA events are made as they are needed and used again.  *done* is called on the clock's thread, in the order of
    the stream.
    """

    def __init__(self, clock: WallClock, cuda: Cudart) -> None:
        self._clock = clock
        self._cuda = cuda
        self._waiting: dict[int, deque[tuple[int, Done]]] = {}  # by stream: events, oldest first
        self._queues: tuple[deque[tuple[int, Done]], ...] = ()  # the same: replaced, never changed, for `poll`
        self._spare: list[int] = []  # events that nobody waits for
        clock.watch(self)

    def when_done(self, stream: int, done: Done) -> None:
        """Call *done* once all that *stream* has been given so far has ended, with the error if it failed."""
        event = self._spare.pop() if self._spare else self._cuda.event()
        self._cuda.record(event, stream)
        waiting = self._waiting.get(stream)
        if waiting is None:
            waiting = self._waiting[stream] = deque()
            self._queues = (*self._queues, waiting)
        waiting.append((event, done))

    def poll(self) -> bool:
        """Call what is due, of every stream in order; return whether anything was."""
        progressed = False
        for waiting in self._queues:
            while waiting:
                event, done = waiting[0]
                error = None
                try:
                    if not self._cuda.happened(event):
                        break
                except TransferFailed as failure:
                    error = failure.with_traceback(None)  # or it would hold this frame, which holds it
                waiting.popleft()
                self._spare.append(event)
                done(error)
                progressed = True
        return progressed

    def fileno(self) -> None:
        """Return None: the driver has no descriptor for it."""
        return

    def busy(self) -> bool:
        """Return whether anything is waited for."""
        return any(self._queues)

    def close(self) -> None:
        """Wait for nothing any more."""
        self._clock.unwatch(self)
        self._waiting.clear()
        self._queues = ()
