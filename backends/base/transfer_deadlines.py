# SPDX-License-Identifier: Apache-2.0
"""One wake-up for the deadlines of many transfers, instead of a scheduled event for each.

Nearly all transfers end long before their deadline, so an event for each would be made and
scheduled in vain, on the path on which real transfers are timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from simpy.events import Event

from backends.base.endpoint_state import PostedTransfer
from pdsim.core.clock import WallClock

__all__ = ["TransferDeadlines"]


class TransferDeadlines:
    """Calls *expire* with each of *transfers*, which are neither complete nor failed, when its time is over.

    *transfers* is the endpoint's own mapping of those under way, in the order of posting; it may change at any time
    between checks.  One event is scheduled at most, for the earliest deadline that was known when it was.
    """

    def __init__(
        self, clock: WallClock, transfers: Mapping[PostedTransfer, None], expire: Callable[[PostedTransfer], None]
    ) -> None:
        self._clock = clock
        self._transfers = transfers
        self._time_out = expire
        self._next = math.inf  # the earliest time for which a check is scheduled

    def watch(self, transfer: PostedTransfer) -> None:
        """Look at *transfer* when its timeout has passed; free if an earlier check is scheduled already."""
        if transfer.deadline < self._next:
            self._schedule(transfer.deadline)

    def _schedule(self, at: float) -> None:
        self._next = at
        event = self._clock.at(at)
        assert event.callbacks is not None
        event.callbacks.append(self._check)

    def _check(self, _: Event) -> None:
        """Expire what is due, and wait for the next deadline.

        Transfers seldom last until a check, so there are few to ask.
        """
        self._next, now = math.inf, self._clock.now
        due = [transfer for transfer in self._transfers if transfer.deadline <= now]
        for transfer in sorted(due, key=lambda transfer: transfer.deadline):
            self._time_out(transfer)
        if self._transfers:
            self._schedule(min(transfer.deadline for transfer in self._transfers))
