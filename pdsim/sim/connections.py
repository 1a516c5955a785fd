# SPDX-License-Identifier: Apache-2.0
"""What an endpoint keeps of its peers and its transfers.

A `Connection` is to one life of a peer, a `SimTransfer` holds the memory of both sides until it has settled, and
`Visitors` know which lives of peers may still write here.  The rules are in `pdsim.sim.initiator` and
`pdsim.sim.sim_endpoint`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from simpy.events import Event

from pdsim.transfer import Batch, Region

if TYPE_CHECKING:
    from pdsim.core.clock import Clock
    from pdsim.sim.engine import SendQueue
    from pdsim.sim.inbox import NotificationInbox
    from pdsim.sim.memory import Bytes, SimBuffer
    from pdsim.sim.posting import Posting
    from pdsim.sim.regions import RegionTable, Registration
    from pdsim.transfer import Transfer

__all__ = ["Connection", "Part", "Remote", "SimTransfer", "Visitors", "part_of"]


class Remote(Protocol):
    """What the posting side asks of a peer's endpoint.

    It is a protocol, so that connections know no endpoint class and the two modules do not import each other.
    """

    @property
    def name(self) -> str:
        """The rank's."""

    @property
    def ended(self) -> float | None:
        """When it was closed or killed."""

    @property
    def inbox(self) -> NotificationInbox:
        """What its rank is told."""

    @property
    def regions(self) -> RegionTable:
        """What is registered there."""


class Connection:
    """From the initiator *owner* to a peer: the peer's endpoint, and the queue of what is posted to it.

    A connection is to one life of the peer: one that is started again is another endpoint, to be connected anew.
    """

    __slots__ = ("owner", "remote", "send_queue")

    def __init__(self, owner: object, remote: Remote, send_queue: SendQueue) -> None:
        self.owner = owner
        self.remote = remote
        self.send_queue = send_queue


class Visitors:
    """The lives of peers that have connected to one endpoint and whose end it has not noticed.

    Their ends happen on the job's clock *hardware* and are noticed *detection* seconds later; who waits for them
    waits on *clock*, the rank's own.
    """

    def __init__(self, hardware: Clock, clock: Clock, detection: float) -> None:
        self._hardware = hardware
        self._clock = clock
        self._detection = detection
        self._lives: dict[str, list[Remote]] = {}  # by rank
        self._waiting: dict[str, list[Event]] = {}  # by rank: who waits for the end of all of them

    def add(self, remote: Remote) -> None:
        """Take note that *remote* has connected here."""
        self._lives.setdefault(remote.name, []).append(remote)

    def end(self, remote: Remote) -> None:
        """Notice the end of *remote* later, if it has connected here."""
        if remote.name in self._lives and remote.ended is not None:
            self._hardware.call_at(remote.ended + self._detection, self._part, remote.name)

    def quiesced(self, peer: str) -> Event:
        """Return an event that succeeds when the end of all lives of *peer* is noticed, at once if there is none."""
        event = self._clock.event()
        self._waiting.setdefault(peer, []).append(event)
        self._part(peer)
        return event

    def _part(self, peer: str) -> None:
        """Forget the lives of *peer* whose end is noticed by now; when none is left, tell whoever waits."""
        now = self._hardware.now
        lives = [
            life for life in self._lives.pop(peer, ()) if life.ended is None or now < life.ended + self._detection
        ]
        if lives:
            self._lives[peer] = lives
            return
        for event in self._waiting.pop(peer, ()):
            event.succeed()


class Part:
    """Those bytes of a transfer that are read at one instant and land at one: the descriptors of *batch*."""

    __slots__ = ("batch", "landed", "pieces")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.pieces: list[Bytes] | None = None  # what was read, once it was
        self.landed = False


def part_of(batch: Batch, first: int, end: int) -> Batch:
    """Return the descriptors of bytes *first* to *end* of *batch*, in its order; those at either end may be cut.

    Bytes are counted over the descriptors, from 0. Without a cut the batch itself is returned.
    """
    if first <= 0 and end >= batch.nbytes:
        return batch
    ends = np.cumsum(batch.size)
    starts = ends - batch.size
    low, high = np.maximum(starts, first), np.minimum(ends, end)
    inside = low < high
    skipped, size = (low - starts)[inside], (high - low)[inside]
    source, target = batch.source_offset[inside] + skipped, batch.target_offset[inside] + skipped
    return Batch(batch.source, batch.target, source, target, size)


class SimTransfer:
    """One transfer from its call until it has settled.  Until then it holds the memory on both sides.

    *local* is the poster's own registration, *remote* the region as the peer's address had it, *submitted* in
    seconds on the job's clock. A write moves from *local* to *remote*, a read the other way.
    """

    __slots__ = (
        "breaks_after",
        "connection",
        "held",
        "local",
        "notify",
        "parts",
        "posting",
        "remote",
        "submitted",
        "transfer",
        "write",
    )

    def __init__(
        self,
        transfer: Transfer,
        connection: Connection,
        write: bool,
        local: Registration,
        remote: Region,
        notify: bytes,
        submitted: float,
    ) -> None:
        self.transfer = transfer
        self.connection = connection
        self.write = write
        self.local = local
        self.remote = remote
        self.notify = notify
        self.submitted = submitted
        self.posting: Posting | None = None
        self.breaks_after: int | None = None  # bytes that move before the engine reports a failure, if it does
        self.parts: list[Part] = []  # that are read, or land, before the end
        there = connection.remote.regions.find(remote)
        self.held = None if there is None else there.buffer
        if self.held is not None:
            self.held.hold()
        local.unsettled += 1
        local.buffer.hold()

    def buffers(self) -> tuple[SimBuffer, SimBuffer] | None:
        """Return the memory of the source and of the target; None if the peer has withdrawn its own."""
        there = self.connection.remote.regions.find(self.remote)
        if there is None:
            return None
        return (self.local.buffer, there.buffer) if self.write else (there.buffer, self.local.buffer)

    def release(self) -> None:
        """Let go of the memory on both sides."""
        self.local.unsettled -= 1
        self.local.buffer.release()
        if self.held is not None:
            self.held.release()
