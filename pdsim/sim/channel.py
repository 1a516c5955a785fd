# SPDX-License-Identifier: Apache-2.0
"""Control messages on the model: a TCP socket from every rank to every other.

A message of *n* bytes leaves when those before it to the same receiver have left, takes ``n / tcp_rate`` to leave
and ``tcp_latency`` to arrive, the *delay* of the links between the nodes, and then as long as the receiver takes to
act on it (`pdsim.sim.host_latency`).  A message costs one event, or two where that takes time.
A faulty network holds messages up (`pdsim.sim.faults`), but never lets one overtake another on the same socket.
Not modelled: that control messages and data share the node's TCP link, and a sender that is slowed down by a
receiver that does not read.
"""

from __future__ import annotations

from math import inf, nextafter
from typing import TYPE_CHECKING, Any, Final

from pdsim.core.clock import Clock
from pdsim.core.mailbox import Mailbox
from pdsim.sim.host_latency import HostLatency
from pdsim.transfer import Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpy.events import Event

    from pdsim.hardware.machine import Host

__all__ = ["SimChannel"]

_new: Final[Any] = tuple.__new__  # of a named tuple, in half the time


class SimChannel:
    """One rank's sockets: the simulated `pdsim.transfer.Channel`.

    *ranks* maps every rank's name to its channel and is shared by all; *job* is the clock that messages travel on.
    *hold*, if given, is asked when a message arrives: with sender, receiver and the time at which it would without
    faults.  *watch* is told of every message, *delay* asked how long the links between sender and receiver take one
    way, and *host_latency* when the rank acts on a message.
    """

    def __init__(
        self,
        name: str,
        host: Host,
        job: Clock,
        clock: Clock,
        ranks: dict[str, SimChannel],
        hold: Callable[[str, str, float], float] | None = None,
        watch: Callable[[str, str, bytes], None] | None = None,
        delay: Callable[[str, str], float] | None = None,
        host_latency: HostLatency | None = None,
    ) -> None:
        self.name = name
        self._rate, self._latency = host.tcp_rate, host.tcp_latency
        self._job = job
        self._ranks = ranks
        self._clock = clock
        self._inbox = Mailbox(clock)
        self._free: dict[str, float] = {}  # by receiver: when its socket has sent everything
        self._hold = hold
        self._watch = watch
        self._delay = delay
        self._host_latency = host_latency or HostLatency()
        self._arrivals: dict[str, float] = {}  # by receiver, of the last message, where messages are held up
        self.dropped: set[SimChannel] = set()  # those of senders that were refused
        self.refused = 0
        self.closed = False
        ranks[name] = self

    def send(self, receiver: str, payload: bytes) -> None:
        """Send *payload* to rank *receiver* without waiting.

        Messages to one receiver arrive in the order in which they were sent. A message to a rank that is gone, or
        from a rank that has closed, is lost without a sign, as over a socket whose other end has died. Raise a
        `KeyError` for a rank that is not of this job.
        """
        channel = self._ranks.get(receiver)
        if channel is None:
            raise KeyError(f"no rank {receiver!r}; there are {', '.join(self._ranks)}")
        if self.closed or channel.closed or self in channel.dropped:
            return
        if self._watch is not None:
            self._watch(self.name, receiver, payload)
        job = self._job
        sent = max(job.now, self._free.get(receiver, 0.0)) + len(payload) / self._rate
        self._free[receiver] = sent
        message: Message = _new(Message, (self.name, payload))
        latency = self._latency
        if self._delay is not None:
            latency += self._delay(self.name, receiver)
        at = sent + latency
        if self._hold is not None:
            at = self._arrival(receiver, at, self._hold)
        job.call_at(at, channel.arrive, message)

    def receive(self) -> Event:
        """Return an event that succeeds with the next `Message`.  Yield it at once."""
        return self._inbox.get()

    def refuse(self, sender: str) -> None:
        """Count a message of *sender* as refused; what it sends from now on is lost."""
        self.refused += 1
        self.dropped.add(self._ranks[sender])

    def subscribe(self, handler: Callable[[Message], None]) -> None:
        """Call *handler* with every `Message` from now on, instead of `receive`."""
        self._inbox.listen(handler)

    def close(self) -> None:
        """Close the sockets: what has been sent still arrives at others, what arrives here is lost."""
        self.closed = True

    def _arrival(self, receiver: str, at: float, hold: Callable[[str, str, float], float]) -> float:
        """Return when a message arrives that would at *at*: later where *hold* says so, never before another."""
        after = nextafter(self._arrivals.get(receiver, 0.0), inf)
        at = self._arrivals[receiver] = max(hold(self.name, receiver, at), after)
        return at

    def arrive(self, message: Message) -> None:
        """Take *message*, which arrives now."""
        if self._host_latency.instant:
            self._deliver(message)
        elif not self.closed:
            self._job.call_at(self._host_latency.acts(self._job.now), self._deliver, message)

    def _deliver(self, message: Message) -> None:
        """Give *message* to its receiver, unless the channel is closed by now; later if the rank is paused."""
        if self.closed:
            return
        if self._clock.paused:
            self._clock.put_off(self._deliver, message)
        else:
            self._inbox.deliver(message)
