"""What an endpoint keeps of its regions, its peers and its transfers.  The rules are in `pdsim.fabric.sim_endpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdsim.transfer import Batch, Region

if TYPE_CHECKING:
    from pdsim.fabric.engine import Posting, SendQueue
    from pdsim.fabric.host_latency import HostLatency
    from pdsim.fabric.memory import Bytes, SimBuffer
    from pdsim.transfer import Notification, Transfer

__all__ = ["Connection", "Part", "Registration", "SimTransfer", "part_of"]


class Registration:
    """A region, its memory, and how many of the endpoint's own transfers over it have not settled.

    While there are any, the region cannot be withdrawn, and its memory is not handed out again.
    """

    __slots__ = ("buffer", "region", "unsettled")

    def __init__(self, region: Region, buffer: SimBuffer) -> None:
        self.region = region
        self.buffer = buffer
        self.unsettled = 0


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
    def host_latency(self) -> HostLatency:
        """When its rank acts upon what arrives."""

    def registration(self, region: Region) -> Registration | None:
        """Return what is registered there as *region*, if it still is."""

    def notify(self, notification: Notification) -> None:
        """Deliver *notification* when the rank acts upon what comes now."""

    def notify_at(self, at: float, notification: Notification) -> None:
        """Deliver *notification* at the time *at*, at once if that is not to come."""


class Connection:
    """From one endpoint to a peer: whose it is, the peer's endpoint, and the queue of what is posted to it."""

    __slots__ = ("owner", "remote", "send_queue")

    def __init__(self, owner: object, remote: Remote, send_queue: SendQueue) -> None:
        self.owner = owner
        self.remote = remote
        self.send_queue = send_queue


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
        there = connection.remote.registration(remote)
        self.held = None if there is None else there.buffer
        if self.held is not None:
            self.held.hold()
        local.unsettled += 1
        local.buffer.hold()

    def buffers(self) -> tuple[SimBuffer, SimBuffer] | None:
        """Return the memory of the source and of the target; None if the peer has withdrawn its own."""
        there = self.connection.remote.registration(self.remote)
        if there is None:
            return None
        return (self.local.buffer, there.buffer) if self.write else (there.buffer, self.local.buffer)

    def release(self) -> None:
        """Let go of the memory on both sides."""
        self.local.unsettled -= 1
        self.local.buffer.release()
        if self.held is not None:
            self.held.release()
