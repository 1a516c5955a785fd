"""Control messages on the model: a TCP socket from every rank to every other.

A message of *n* bytes leaves when those before it to the same receiver have left, takes ``n / tcp_rate`` to leave and
``tcp_latency`` to arrive, the *delay* of the links between the nodes, and then as long as the receiver takes to act on
it (`pdsim.fabric.host_latency`).  A message costs one event, or two where that takes time.
A faulty network holds messages up (`pdsim.fabric.faults`), but never lets one overtake another on the same socket.
Not modelled: that control messages and data share the node's TCP link, and a sender that is slowed down by a receiver
that does not read.
"""

from __future__ import annotations

from math import inf, nextafter
from typing import TYPE_CHECKING

from pdsim.clock import Clock, Mailbox
from pdsim.fabric.host_latency import HostLatency
from pdsim.transfer import Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpy.events import Event

    from pdsim.hardware import Host

__all__ = ["SimChannel"]


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
        self._host = host
        self._job = job
        self._ranks = ranks
        self._inbox = Mailbox(clock)
        self._free: dict[str, float] = {}  # by receiver: when its socket has sent everything
        self._hold = hold
        self._watch = watch
        self._delay = delay
        self._host_latency = host_latency or HostLatency()
        self._arrivals: dict[str, float] = {}  # by receiver, of the last message, where messages are held up
        self._dropped: set[SimChannel] = set()  # those of senders that were refused
        self.refused = 0
        self._closed = False
        ranks[name] = self

    def send(self, receiver: str, payload: bytes) -> None:
        """Send without waiting.  A message to a rank that is gone is lost; a `KeyError` names an unknown rank."""
        channel = self._ranks.get(receiver)
        if channel is None:
            raise KeyError(f"no rank {receiver!r}; there are {', '.join(self._ranks)}")
        if self._closed or channel._closed or self in channel._dropped:
            return
        if self._watch is not None:
            self._watch(self.name, receiver, payload)
        host, job = self._host, self._job
        sent = max(job.now, self._free.get(receiver, 0.0)) + len(payload) / host.tcp_rate
        self._free[receiver] = sent
        message = Message(self.name, payload)
        latency = host.tcp_latency
        if self._delay is not None:
            latency += self._delay(self.name, receiver)
        job.call_at(self._arrival(receiver, sent + latency), channel._arrive, message)

    def receive(self) -> Event:
        """Return an event that succeeds with the next `Message`.  Yield it at once."""
        return self._inbox.get()

    def refuse(self, sender: str) -> None:
        """Count a message of *sender* as refused; what it sends from now on is lost."""
        self.refused += 1
        self._dropped.add(self._ranks[sender])

    def subscribe(self, handler: Callable[[Message], None]) -> None:
        """Call *handler* with every `Message` from now on, instead of `receive`."""
        self._inbox.listen(handler)

    def close(self) -> None:
        """Close the sockets: what has been sent still arrives at others, what arrives here is lost."""
        self._closed = True

    def _arrival(self, receiver: str, at: float) -> float:
        if self._hold is None:
            return at
        after = nextafter(self._arrivals.get(receiver, 0.0), inf)
        at = self._arrivals[receiver] = max(self._hold(self.name, receiver, at), after)
        return at

    def _arrive(self, message: Message) -> None:
        if self._host_latency.instant:
            self._deliver(message)
        elif not self._closed:
            self._job.call_at(self._host_latency.acts(self._job.now), self._deliver, message)

    def _deliver(self, message: Message) -> None:
        if not self._closed:
            self._inbox.deliver(message)
