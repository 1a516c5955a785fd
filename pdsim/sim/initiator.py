# SPDX-License-Identifier: Apache-2.0
"""The side of a simulated endpoint that posts: each transfer of its own, from the call until nothing of it moves.

It checks batches and peers, posts to the send queue, and decides why a transfer fails; states and records are
`pdsim.sim.posted`'s, what posting costs `pdsim.sim.engine`'s, what lands `pdsim.sim.payload`'s.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pdsim.core.errors import (
    InvalidBatch,
    PeerLost,
    SendQueueFull,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.sim.connections import Connection, Remote, SimTransfer
from pdsim.sim.payload import Payload
from pdsim.sim.posted import PostedTransfers, SeriesRecorder
from pdsim.sim.sequence import Series
from pdsim.transfer import Batch, Notification, Peer, Region, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.core.clock import Clock
    from pdsim.sim.engine import Stages, Times
    from pdsim.sim.flows.network import Flow
    from pdsim.sim.memory import SimDevice
    from pdsim.sim.posting import Posting, PostingThread
    from pdsim.sim.regions import RegionTable
    from pdsim.sim.shared import Fabric

__all__ = ["DETECTION", "Initiator"]

DETECTION = 0.1
"""Seconds from the end of a peer until the other side's engine notices.

Assumed: a reset TCP connection is noticed in under a millisecond, a queue pair whose retries must run out first
(seven at the usual ack timeout of 67 ms) after half a second.
"""


class Initiator:
    """What rank *name* posts from its *regions* to its peers, on the thread *poster*.

    *clock* is the rank's own, on which its transfers are events; *device* holds its memory, and *recorder* is given
    the record of each transfer when it ends.  The states of a transfer are those of `pdsim.transfer.Transfer`:
    `start` posts, the end of its flow completes it, and a deadline, a peer that ends or a full send queue fail it.
    At most one `Series` is under way, and any other post cuts it first.
    """

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        clock: Clock,
        device: SimDevice,
        regions: RegionTable,
        poster: PostingThread,
        recorder: SeriesRecorder,
    ) -> None:
        self.name = name
        self.engine = f"model:{fabric.engine.name}"
        self.series: Series | None = None  # writes that are foreseen
        self.posted = PostedTransfers(fabric.clock, self.engine, recorder, self._time_out)
        self._fabric = fabric
        self._hardware = fabric.clock
        self._timeout = fabric.engine.timeout
        self._chance, self._observer = fabric.chance, fabric.observer
        self._clock = clock
        self._device = device
        self._regions = regions
        self._poster = poster
        self._payload = Payload(fabric.clock, device, fabric.observer, self.posted.moving)

    def start(
        self, peer: Peer, batch: Batch, write: bool, notify: bytes, timeout: float | None, label: str
    ) -> Transfer:
        """Post *batch*, or note at once why it cannot be, and return its transfer.

        A peer that has ended is not noticed before `DETECTION`; a full send queue that refuses is an error of the
        transfer.
        """
        if self.series is not None:
            self.series.cut()
        source, target = batch.source, batch.target
        local = self._regions.local(source if write else target)
        remote = target if write else source
        connection = self._check_peer(peer, remote)
        limit = self._timeout if timeout is None else timeout
        if not limit > 0:
            raise ValueError(f"timeout={limit} must be > 0")
        now = self._hardware.now
        transfer = Transfer(self._clock, batch, label)
        flight = SimTransfer(transfer, connection, write, local, remote, notify, now)
        number = self.posted.add(flight)
        if connection.remote.ended is not None:
            self._lose(number, flight)
        else:
            try:
                flight.posting = self._post(flight, number)
            except SendQueueFull as error:
                self._refuse(number, flight, error)
                return transfer
            transfer.posted = max(now, self._poster.free)
        self.posted.time_out_at(now + limit, number)
        return transfer

    def foresee(
        self,
        peer: Peer,
        batch: Batch,
        count: int,
        notify: bytes,
        label: str,
        over: Callable[[int, int, Transfer | None], None],
    ) -> Series | None:
        """Begin *count* writes like that of *batch*, if their times are known, and call *over* at their end.

        *over* is given how many are complete, their bytes, and the transfer under way if the series was cut.
        Times are known where memory has no contents and nothing is left to chance or watched, while this endpoint
        does nothing else, and `SendQueue.foresee` and `Foreseen.add` say so.  Otherwise return None, having changed
        nothing.
        """
        fabric, connection = self._fabric, self._check_peer(peer, batch.target)
        local, there = self._regions.local(batch.source), connection.remote
        watched = self._chance is not None or self._observer is not None or fabric.draws is not None
        watched = watched or self._device.holds_bytes
        if watched or self.posted.moving or self.series or there.ended is not None:
            return None
        way = connection.send_queue.foresee(batch.nbytes, len(batch), count)
        if way is None:
            return None
        path, size, steps = way
        flight = SimTransfer(Transfer(self._clock, batch, label), connection, True, local, batch.target, notify, 0.0)
        report, resume = partial(self._report, flight), partial(self._resume, flight)
        series = Series(
            fabric.network, steps, there.name, report, resume, lambda n, moving: over(n, n * batch.nbytes, moving)
        )
        if not series.begin(path, size, self._timeout):
            flight.release()
            return None
        self.series = series
        if notify and not there.inbox.host_latency.instant:
            there.inbox.host_latency.expect(series.notifications)
        return series

    def disconnect(self, remote: Remote) -> None:
        """Abort what is posted to *remote*, which has ended; its transfers fail when that is noticed.

        Their flows leave the links at once: no byte lands after the end of its target.
        """
        for number, flight in self.posted.moving.items():
            if flight.connection.remote is remote and flight.posting is not None:
                flight.connection.send_queue.abort(flight.posting)
                self._lose(number, flight)

    def end(self) -> list[SimTransfer]:
        """Abort everything and let go of its memory, with the endpoint; return the transfers that were under way."""
        flights = self.posted.drop()
        for flight in flights:
            if flight.posting is not None:
                flight.connection.send_queue.abort(flight.posting)
            flight.release()
        return flights

    def _post(self, flight: SimTransfer, number: int) -> Posting:
        """Hand *flight* to the send queue, with what chance does to it where faults are injected."""
        batch, queue = flight.transfer.batch, flight.connection.send_queue
        chance, observer = self._chance, self._observer
        if observer is not None:
            observer.posted(batch, flight.transfer.label)
        if chance is None:
            return queue.post(batch.nbytes, len(batch), not flight.write, self._on_complete, number)
        held = chance.transfer()
        if held and observer is not None:
            observer.held_up(flight.transfer.label)
        share = chance.breaks()
        if share is not None:
            flight.breaks_after = int(share * batch.nbytes)
            if observer is not None:
                observer.broken(flight.transfer.label)
        posting = queue.post(batch.nbytes, len(batch), not flight.write, self._on_complete, number, held)
        if chance.strays and posting.posted is not None:
            self._payload.stray(flight, number, chance, queue.seconds(posting))
        return posting

    def _on_complete(self, posting: Posting) -> None:
        """Complete the transfer of *posting*: bytes first, then the notification, then the poster's event.

        So whoever is told finds the bytes.  A region that its owner has withdrawn meanwhile fails the transfer,
        and so does a fault that breaks it, after some of its bytes.
        """
        flight = self.posted.moving[posting.tag]
        there = flight.connection.remote
        buffers = flight.buffers()
        error = None
        if flight.breaks_after is not None and buffers is not None:
            self._payload.move(flight, *buffers, end=flight.breaks_after)
            error = TransferFailed(f"{self.engine} reports an error of {flight.transfer.batch!r}, as asked")
        elif buffers is None:
            name = f"{flight.remote.owner}/{flight.remote.name}"
            error = TransferFailed(
                f"region {name} is no longer registered; its owner withdrew it during the transfer"
            )
        else:
            source, target = buffers
            self._payload.move(flight, source, target)
        record = self.posted.quiesce(posting.tag, error)
        if flight.notify and error is None:
            there.inbox.notify(Notification(self.name, flight.notify))
        self.posted.conclude(flight, record, error)

    def _time_out(self, number: int) -> None:
        """End the wait for transfer *number*: it fails, and its memory is held until it lands or is known not to."""
        flight = self.posted.moving[number]
        if flight.transfer.triggered:
            return
        batch, posting = flight.transfer.batch, flight.posting
        error = TransferTimeout(f"{batch!r} is not complete after {self._hardware.now - flight.submitted:g} s")
        if posting is not None and posting.posted is None:  # never handed to the engine: it can never land
            flight.connection.send_queue.abort(posting)
            self.posted.fail(number, error)
        else:
            self.posted.quarantine(flight, error)

    def _lose(self, number: int, flight: SimTransfer) -> None:
        """Fail *flight* once the end of its peer is noticed."""
        clock, remote = self._hardware, flight.connection.remote
        assert remote.ended is not None
        clock.call_at(max(clock.now, remote.ended + DETECTION), self._on_lost, number)

    def _on_lost(self, number: int) -> None:
        """Fail transfer *number*, whose peer has ended, unless this endpoint has ended meanwhile."""
        flight = self.posted.moving.get(number)
        if flight is not None:  # else this endpoint has ended meanwhile
            error = PeerLost(f"{flight.connection.remote.name} is gone")
            self.posted.fail(number, error)

    def _refuse(self, number: int, flight: SimTransfer, error: TransferError) -> None:
        """Fail *flight* at once with *error*: the send queue is full, and nothing of it was posted."""
        self.posted.quiesce(number, error)
        flight.transfer.fail(error)
        flight.transfer.settled.succeed()

    def _report(
        self, flight: SimTransfer, last: bool, submitted: Times, posted: Times, ended: Times, complete: Times
    ) -> None:
        """Report writes of a series like *flight* that are complete.

        *last* says that no other of it is under way; times are those of `Series`.  The peer's rank is told of
        all of them, as one `Notification`, when it has acted upon the last.
        """
        series, self.series = self.series, None
        assert series is not None
        count = self.posted.record_series(flight, submitted, posted, complete)
        inbox, now = flight.connection.remote.inbox, 0.0
        if count:
            flight.connection.send_queue.carried(float(max(ended[-1], posted[-1])))
        if last:
            flight.release()
        if flight.notify:
            if not inbox.host_latency.instant:
                now = inbox.host_latency.conclude(series.notifications, count, self._hardware.now)
            if count:
                inbox.notify_at(now, Notification(self.name, flight.notify, count))

    def _resume(self, flight: SimTransfer, stages: Stages, flow: Flow | None) -> Transfer:
        """Make *flight* the write of a series that is under way, with the times of its *stages*; return it.

        It goes on as if it had been posted by `start` at its time.
        """
        batch = flight.transfer.batch
        flight.submitted = stages[0]
        number = self.posted.add(flight)
        way = batch.nbytes, len(batch), stages, flow
        flight.posting = flight.connection.send_queue.resume(*way, self._on_complete, number)
        self.posted.time_out_at(flight.submitted + self._timeout, number)
        return flight.transfer

    def _check_peer(self, peer: Peer, region: Region) -> Connection:
        """Return the connection of *peer*.

        Raise an `InvalidBatch` if the peer was not connected here, or *region* was not in the address it was
        connected with.
        """
        connection: Any = peer.handle
        if not isinstance(connection, Connection) or connection.owner is not self:
            raise InvalidBatch(f"peer {peer.name} is not connected to {self.name}; pass what its connect() returned")
        known = peer.regions.get(region.name)
        if known is not region and known != region:
            raise InvalidBatch(
                f"region {region.owner}/{region.name} is not in the address of {peer.name} that was connected; "
                f"connect again with a newer one"
            )
        return connection
