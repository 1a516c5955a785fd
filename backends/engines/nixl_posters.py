# SPDX-License-Identifier: Apache-2.0
"""Threads of a rank that make and start NIXL's handles, behind the lock of its agent.

What becomes of a transfer then is `backends.engines.nixl`'s affair, on the clock's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from backends.base.transfers import PostedTransfer
from pdsim.core.clock import WallClock
from pdsim.core.errors import TransferFailed

__all__ = ["Posters", "Started"]


class Started(NamedTuple):
    """What a thread did with a transfer; without a *handle* nothing of it has moved, nor will.

    Attributes:
        handle: NIXL's, or None: it was refused, or had failed while it waited.
        prepared: When the handle was made, in seconds of the clock.
        posted: When NIXL's call returned.
        answer: The state that it returned, or what it raised.
    """

    handle: Any
    prepared: float
    posted: float
    answer: str | Exception

    def state(self, _: Any) -> str:
        """Return the state, or raise what the call raised."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Posters:
    """*count* threads that take transfers from one queue, in order, each one at a time.

    ``make(transfer)`` returns a handle or raises `TransferFailed`, ``start(handle)`` returns a state; both, and
    ``enter()`` at its start, are called on a thread of these.  ``took(transfer, started)`` is called on the clock's.
    Threads are daemons, started with the first transfer.
    """

    def __init__(
        self,
        clock: WallClock,
        count: int,
        enter: Callable[[], object],
        make: Callable[[PostedTransfer], Any],
        start: Callable[[Any], str],
        took: Callable[[PostedTransfer, Started], None],
    ) -> None:
        self._clock = clock
        self._count = count
        self._enter, self._make, self._start, self._took = enter, make, start, took
        self._work: queue.SimpleQueue[PostedTransfer | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def put(self, transfer: PostedTransfer) -> None:
        """Have *transfer* made and started."""
        while len(self._threads) < self._count:
            name = f"nixl poster {len(self._threads)}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()
        self._work.put(transfer)

    def stop(self, wait: bool) -> None:
        """Let the threads end after what is queued, and, to *wait*, wait for them."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _serve(self) -> None:
        self._enter()
        while (transfer := self._work.get()) is not None:
            self._clock.call(partial(self._took, transfer, self._begun(transfer)))

    def _begun(self, transfer: PostedTransfer) -> Started:
        handle, prepared = None, self._clock.now
        try:
            if transfer.triggered:
                raise TransferFailed("it failed before it was posted")
            handle = self._make(transfer)
            prepared = self._clock.now
            answer: str | Exception = self._start(handle)
        except Exception as error:
            answer = error
        return Started(handle, prepared, self._clock.now, answer)
