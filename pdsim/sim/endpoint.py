# SPDX-License-Identifier: Apache-2.0
"""The simulated `pdsim.transfer.Endpoint`.

Bytes are read at the source and written at the target at the instant of completion.  That is the latest moment at
which a real engine may still read its source, so a sender that reuses memory before the end is caught (as is a
receiver that reads before it was told to).  With `Faults.stray` both happen at any instant since the call, and with
`Faults.torn` each of several parts is read and lands at instants of its own.

Nothing recalls a transfer: after a `TransferTimeout` its flow goes on, its bytes and its notification may still
arrive, and `Transfer.settled` says when that is over.  Only a transfer that still waited for room in the send queue
is withdrawn, and the end of either side (a killed rank, `close`) breaks the connection: what is on the way is lost,
at once, and the side that is left learns of it `DETECTION` later.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from simpy.events import Event

from pdsim.core.errors import (
    InvalidBatch,
    PeerLost,
    RegistrationError,
    SendQueueFull,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.sim.hosts import NotificationInbox
from pdsim.sim.memory import RegionTable
from pdsim.sim.posting import Fabric, PostingThread
from pdsim.sim.sequence import Series, SimWriteSequence
from pdsim.sim.topology import EndpointAddress
from pdsim.sim.transfers import Connection, Payload, PostedTransfers, SeriesRecorder, SimTransfer
from pdsim.transfer import Batch, Buffer, Notification, Peer, Region, Transfer, WriteSequence
from pdsim.transfer.transfer import check_sides

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.core.clock import Clock, Mailbox
    from pdsim.sim.memory import SimDevice
    from pdsim.sim.network import Flow, Times
    from pdsim.sim.sequence import Stages
    from pdsim.sim.topology import Site
    from pdsim.sim.wire import Posting
    from pdsim.transfer import Batches

__all__ = [
    "DETECTION",
    "InboundPeers",
    "Initiator",
    "SimEndpoint",
]


class SimEndpoint:
    """One rank's way to move bytes: the simulated `pdsim.transfer.Endpoint`.

    *clock* is the rank's own, *device* holds the buffers that it may register, *site* is where it is on the machine.
    It knows whom it is connected to and how long it lives.  What it posts is its `Initiator`'s, what it has
    registered its `RegionTable`'s, what its rank is told its `NotificationInbox`'s.
    """

    def __init__(
        self, fabric: Fabric, name: str, clock: Clock, device: SimDevice, site: Site, recorder: SeriesRecorder
    ) -> None:
        self.name = name
        self.site = site
        self.born = fabric.clock.now
        self.ended: float | None = None  # when it was closed or killed
        self.inbox = NotificationInbox(fabric.clock, clock, device.host_latency)
        self.inbound_peers = InboundPeers(fabric.clock, clock, DETECTION)
        self._fabric = fabric
        self._clock = clock
        self._poster = PostingThread(fabric.threads(site))
        self.regions = RegionTable(name, device)
        self._connections: dict[str, Connection] = {}
        self._initiator = Initiator(fabric, name, clock, device, self.regions, self._poster, recorder)
        fabric.endpoints[name] = self

    @property
    def engine(self) -> str:
        """``"model:"`` and the engine's name."""
        return self._initiator.engine

    @property
    def slowness(self) -> float:
        """How many times as long as usual posting takes; a fault may set it."""
        return self._poster.slowness

    @slowness.setter
    def slowness(self, factor: float) -> None:
        self._poster.slowness = factor

    @property
    def notifications(self) -> Mailbox:
        """The `Notification`s of peers, in order of arrival."""
        return self.inbox.mailbox

    @property
    def quarantined(self) -> int:
        """Transfers of this endpoint that failed and have not settled."""
        return self._initiator.posted.quarantined

    @property
    def series(self) -> Series | None:
        """The writes of this endpoint that are foreseen, if any are under way."""
        return self._initiator.series

    def register(self, buffer: Buffer, name: str) -> Region:
        """Make *buffer* known to the engine as region *name*; the errors of `pdsim.transfer.Endpoint.register`."""
        if self.ended is not None:
            raise RegistrationError(f"{self.name} has closed its endpoint; register before close()")
        return self.regions.add(buffer, name)

    def deregister(self, region: Region) -> None:
        """Withdraw *region*; the errors of `pdsim.transfer.Endpoint.deregister`."""
        self.regions.remove(region, self._cut_series)

    def address(self) -> bytes:
        """Return JSON: this rank's name, its engine and the regions registered so far."""
        self._check_open()
        return msgspec.json.encode(EndpointAddress(self.name, self.engine, list(self.regions), self.born))

    def connect(self, address: bytes) -> Peer:
        """Return the peer at *address*; the errors of `pdsim.transfer.Endpoint.connect`.

        Raise a `BackendUnavailable` if the engine cannot reach that place, a `ConfigError` if the machine has no
        way.
        """
        self._check_open()
        try:
            there = msgspec.json.decode(address, type=EndpointAddress)
        except (msgspec.MsgspecError, ValueError) as error:  # msgspec leaves text that is not UTF-8 to the codec's
            raise TransferFailed(f"{address[:40]!r} is not an address of {self.engine}: {error}") from None
        remote: SimEndpoint | None = self._fabric.endpoints.get(there.rank)
        if remote is None or remote.ended is not None or remote.born != there.born:
            raise PeerLost(f"{there.rank} is gone: nothing answers at its address")
        connection = self._connections.get(there.rank)
        if connection is None or connection.remote is not remote:
            name = f"{self.name}>{remote.name}"
            queue = self._fabric.send_queue(name, self._poster, self.site, remote.site)
            connection = self._connections[there.rank] = Connection(self._initiator, remote, queue)
            remote.inbound_peers.add(self)
        # the peer's own objects where they are equal: then comparing them later is one look
        known = [(remote.regions.find(region), region) for region in there.regions]
        regions = {region.name: region if mine is None else mine.region for mine, region in known}
        return Peer(there.rank, regions, connection)

    def write(
        self, peer: Peer, batch: Batch, notify: bytes = b"", *, timeout: float | None = None, label: str = ""
    ) -> Transfer:
        """Start to move *batch* to *peer*; the contract and errors of `pdsim.transfer.Endpoint.write`."""
        return self._initiator.start(peer, batch, True, notify, timeout, label)

    def read(self, peer: Peer, batch: Batch, *, timeout: float | None = None, label: str = "") -> Transfer:
        """Start to move *batch* from *peer*; the contract and errors of `pdsim.transfer.Endpoint.read`."""
        return self._initiator.start(peer, batch, False, b"", timeout, label)

    def write_sequence(
        self,
        peer: Peer,
        batches: Batches,
        notify: bytes = b"",
        *,
        label: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> WriteSequence:
        """Write *batches* one after the other; see `pdsim.transfer.Endpoint.write_sequence`."""
        foresee = self._initiator.foresee
        return SimWriteSequence(self._clock, self, foresee, peer, batches, notify, label, progress).start()

    def quiesced(self, peer: str) -> Event:
        """Return an event that succeeds when no connected incarnation of *peer* can move bytes any more.

        That is `DETECTION` after the end of the last of them; at once if none has connected, or all are over that
        long.
        """
        return self.inbound_peers.quiesced(peer)

    def close(self) -> None:
        """Break all connections and withdraw all regions.

        Transfers under way fail with a `TransferFailed` and settle: nothing of them moves any more.
        """
        flights = self._break()
        for flight in flights:
            error = TransferFailed(f"{self.name} closed its endpoint during the transfer")
            if not flight.transfer.triggered:
                self._initiator.posted.record(flight, error)
                flight.transfer.fail(error)
            flight.transfer.settled.succeed()

    def kill(self) -> None:
        """End with the process: as `close`, but nobody is left to be told."""
        self._break()

    def _break(self) -> list[SimTransfer]:
        if self.ended is not None:
            return []
        self._cut_series()
        self.ended = self._fabric.clock.now
        self.inbox.close()
        flights = self._initiator.end()
        for other in self._fabric.endpoints.values():
            other.disconnect(self)
        self.regions.clear()
        self._connections.clear()
        return flights

    def _cut_series(self) -> None:
        # What is complete of them is reported, and the write under way becomes a transfer, which can fail.
        for other in self._fabric.endpoints.values():
            series = other.series
            if series is not None and (other is self or series.peer == self.name):
                series.cut()

    def disconnect(self, remote: SimEndpoint) -> None:
        """Stop what goes to *remote*, which has ended; its loss is noticed later.

        Flows end at once, because the wire is cut; what posts them fails with `PeerLost` only `DETECTION` later.
        """
        self.inbound_peers.end(remote)
        self._initiator.disconnect(remote)

    def _check_open(self) -> None:
        if self.ended is not None:
            raise TransferFailed(f"the endpoint of {self.name} is closed; make no calls after close()")


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
        connection = self._connection(peer)
        own, remote = check_sides(self.name, peer, batch, write=write)
        local = self._regions.local(own)
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
        fabric, connection = self._fabric, self._connection(peer)
        own, remote = check_sides(self.name, peer, batch, write=True)
        local, there = self._regions.local(own), connection.remote
        watched = self._chance is not None or self._observer is not None or fabric.draws is not None
        watched = watched or self._device.holds_bytes
        if watched or self.posted.moving or self.series or there.ended is not None:
            return None
        way = connection.send_queue.foresee(batch.nbytes, len(batch), count)
        if way is None:
            return None
        path, size, steps = way
        flight = SimTransfer(Transfer(self._clock, batch, label), connection, True, local, remote, notify, 0.0)
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

    def disconnect(self, remote: SimEndpoint) -> None:
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
        # So whoever is told finds the bytes.  A region that its owner has withdrawn meanwhile fails the transfer,
        # and so does a fault that breaks it, after some of its bytes.
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
        clock, remote = self._hardware, flight.connection.remote
        assert remote.ended is not None
        clock.call_at(max(clock.now, remote.ended + DETECTION), self._on_lost, number)

    def _on_lost(self, number: int) -> None:
        flight = self.posted.moving.get(number)
        if flight is not None:  # else this endpoint has ended meanwhile
            error = PeerLost(f"{flight.connection.remote.name} is gone")
            self.posted.fail(number, error)

    def _refuse(self, number: int, flight: SimTransfer, error: TransferError) -> None:
        self.posted.quiesce(number, error)
        flight.transfer.fail(error)
        flight.transfer.settled.succeed()

    def _report(
        self, flight: SimTransfer, last: bool, submitted: Times, posted: Times, ended: Times, complete: Times
    ) -> None:
        # *last* says that no other of it is under way; times are those of `Series`.  The peer's rank is told of
        # all of them, as one `Notification`, when it has acted upon the last.
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
        # It goes on as if it had been posted by `start` at its time.
        batch = flight.transfer.batch
        flight.submitted = stages[0]
        number = self.posted.add(flight)
        way = batch.nbytes, len(batch), stages, flow
        flight.posting = flight.connection.send_queue.resume(*way, self._on_complete, number)
        self.posted.time_out_at(flight.submitted + self._timeout, number)
        return flight.transfer

    def _connection(self, peer: Peer) -> Connection:
        connection: Any = peer.handle
        if not isinstance(connection, Connection) or connection.owner is not self:
            raise InvalidBatch(f"peer {peer.name} is not connected to {self.name}; pass what its connect() returned")
        return connection


class InboundPeers:
    """The incarnations of peers that have connected to one endpoint and whose end it has not noticed.

    Their ends happen on the job's clock *hardware* and are noticed *detection* seconds later; who waits for them
    waits on *clock*, the rank's own.
    """

    def __init__(self, hardware: Clock, clock: Clock, detection: float) -> None:
        self._hardware = hardware
        self._clock = clock
        self._detection = detection
        self._incarnations: dict[str, list[SimEndpoint]] = {}  # by rank
        self._waiting: dict[str, list[Event]] = {}  # by rank: who waits for the end of all of them

    def add(self, remote: SimEndpoint) -> None:
        """Take note that *remote* has connected here."""
        self._incarnations.setdefault(remote.name, []).append(remote)

    def end(self, remote: SimEndpoint) -> None:
        """Notice the end of *remote* later, if it has connected here."""
        if remote.name in self._incarnations and remote.ended is not None:
            self._hardware.call_at(remote.ended + self._detection, self._part, remote.name)

    def quiesced(self, peer: str) -> Event:
        """Return an event that succeeds when the ends of all incarnations of *peer* are noticed, at once if none."""
        event = self._clock.event()
        self._waiting.setdefault(peer, []).append(event)
        self._part(peer)
        return event

    def _part(self, peer: str) -> None:
        now = self._hardware.now
        incarnations = [
            endpoint
            for endpoint in self._incarnations.pop(peer, ())
            if endpoint.ended is None or now < endpoint.ended + self._detection
        ]
        if incarnations:
            self._incarnations[peer] = incarnations
            return
        for event in self._waiting.pop(peer, ()):
            event.succeed()
