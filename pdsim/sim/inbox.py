# SPDX-License-Identifier: Apache-2.0
"""When a simulated rank is told what its peers' transfers have brought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdsim.core.clock import Clock
from pdsim.core.mailbox import Mailbox

if TYPE_CHECKING:
    from pdsim.sim.host_latency import HostLatency
    from pdsim.transfer import Notification

__all__ = ["NotificationInbox"]


class NotificationInbox:
    """The notifications of one rank, in order of arrival, delivered when its host acts upon them.

    *hardware* is the job's clock, on which they arrive; *clock* is the rank's own, which may be paused: then they
    are put off until it goes on.  *host_latency* says how long after its arrival the rank acts upon one.  Once the
    inbox is closed, because the endpoint has ended, what still arrives is dropped.
    """

    def __init__(self, hardware: Clock, clock: Clock, host_latency: HostLatency) -> None:
        self.mailbox = Mailbox(clock)
        self.host_latency = host_latency
        self._hardware = hardware
        self._clock = clock
        self._closed = False

    def notify(self, notification: Notification) -> None:
        """Deliver *notification*, which arrives now, when the rank acts upon it."""
        if self.host_latency.instant:
            self._wake_with(notification)
        else:
            self._hardware.call_at(self.host_latency.acts(self._hardware.now), self._wake_with, notification)

    def notify_at(self, at: float, notification: Notification) -> None:
        """Deliver *notification* at the time *at* in seconds, when the rank acts upon it; now if that is past."""
        if at > self._hardware.now:
            self._hardware.call_at(at, self._wake_with, notification)
        else:
            self.mailbox.deliver(notification)

    def close(self) -> None:
        """Drop whatever is not delivered yet, and all that comes."""
        self._closed = True

    def _wake_with(self, notification: Notification) -> None:
        if self._closed:
            return
        if self._clock.paused:
            self._clock.put_off(self._wake_with, notification)
        else:
            self.mailbox.deliver(notification)
