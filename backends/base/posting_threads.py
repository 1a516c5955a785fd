# SPDX-License-Identifier: Apache-2.0
"""Threads of a rank that post transfers, for engines whose calls block or take a lock."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from backends.base.transfers import PostedTransfer

__all__ = ["PostingThreads"]


class PostingThreads:
    """*count* daemons that take transfers from one queue, in order; each calls *begin* once, and *serve* with each.

    Started with the first transfer.  Not `concurrent.futures`: its futures cost microseconds a transfer.
    """

    def __init__(
        self, name: str, count: int, begin: Callable[[], object], serve: Callable[[PostedTransfer], None]
    ) -> None:
        self._name, self._count = name, count
        self._begin, self._serve = begin, serve
        self._work: queue.SimpleQueue[PostedTransfer | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def put(self, transfer: PostedTransfer) -> None:
        """Have *transfer* served."""
        while len(self._threads) < self._count:
            name = f"{self._name} {len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()
        self._work.put(transfer)

    def stop(self, wait: bool) -> None:
        """Let the threads end after what is queued, and, to *wait*, wait for them."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        self._begin()
        while (transfer := self._work.get()) is not None:
            self._serve(transfer)
