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

from pdsim.clock import Call, Clock, Mailbox
from pdsim.errors import (
    BackendUnavailable,
    InvalidBatch,
    PeerLost,
    RegistrationError,
    SendQueueFull,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.fabric.connections import Connection, Registration, SimTransfer
from pdsim.fabric.engine import CopyEngine, Posting, PostingThread, SendQueue
from pdsim.fabric.memory import SimBuffer
from pdsim.fabric.payload import Payload
from pdsim.fabric.posted import PostedTransfers, SeriesRecorder
from pdsim.fabric.series import SimSeries
from pdsim.fabric.shared import EndpointAddress, Fabric
from pdsim.transfer import Batch, Buffer, Notification, Peer, Region, Repeated, Transfer

if TYPE_CHECKING:
    from pdsim.fabric.engine import Stages, Times
    from pdsim.fabric.flows.network import Flow
    from pdsim.fabric.host_latency import HostLatency
    from pdsim.fabric.memory import SimDevice
    from pdsim.fabric.topology import Site

__all__ = ["DETECTION", "SimEndpoint"]

DETECTION = 0.1
"""Seconds from the end of a peer until the other side's engine notices.

Assumed: a reset TCP connection is noticed in under a millisecond, a queue pair whose retries must run out first
(seven at the usual ack timeout of 67 ms) after half a second.
"""


class SimEndpoint:
    """One rank's way to move bytes: the simulated `pdsim.transfer.Endpoint`.

    *clock* is the rank's own, *device* holds the buffers that it may register, *site* is where it is on the machine.
    It checks batches and peers, keeps account of what is under way, and decides what a poster is told; what posting
    costs is `SendQueue`'s, how bytes share links the network's, what lands `Payload`'s.
    """

    def __init__(
        self, fabric: Fabric, name: str, clock: Clock, device: SimDevice, site: Site, recorder: SeriesRecorder
    ) -> None:
        self.name = name
        self.site = site
        self.life = fabric.clock.now
        self.ended: float | None = None  # when it was closed or killed
        self._fabric = fabric
        self._clock = clock
        self._device = device
        self._engine = f"model:{fabric.engine.name}"
        self._notifications = Mailbox(clock)
        self._poster = PostingThread(fabric.threads(site))
        self._regions: dict[str, Registration] = {}
        self._connections: dict[str, Connection] = {}
        # lives of a rank that connected and whose end is not noticed
        self.visitors: dict[str, list[SimEndpoint]] = {}
        self._quiesced: dict[str, list[Event]] = {}  # by rank: who waits for the end of all of them
        self._posted = PostedTransfers(fabric.clock, self._engine, recorder, self._time_out)
        self._payload = Payload(fabric.clock, device, fabric.observer, self._posted.moving)
        self.series: SimSeries | None = None  # writes that are foreseen
        fabric.endpoints[name] = self

    @property
    def engine(self) -> str:
        """``"model:"`` and the engine's name."""
        return self._engine

    @property
    def slowness(self) -> float:
        """How many times as long as usual posting takes."""
        return self._poster.slowness

    @slowness.setter
    def slowness(self, factor: float) -> None:
        self._poster.slowness = factor

    @property
    def notifications(self) -> Mailbox:
        """The `Notification`s of peers, in order of arrival."""
        return self._notifications

    @property
    def host_latency(self) -> HostLatency:
        """When the rank acts upon what arrives."""
        return self._device.host_latency

    @property
    def quarantined(self) -> int:
        """Transfers of this endpoint that failed and have not settled."""
        return self._posted.quarantined

    def register(self, buffer: Buffer, name: str) -> Region:
        """Make *buffer* known to the engine as region *name*; the errors of `pdsim.transfer.Endpoint.register`."""
        if self.ended is not None:
            raise RegistrationError(f"{self.name} has closed its endpoint; register before close()")
        if name in self._regions:
            raise RegistrationError(f"{self.name} has a region {name!r} already; take another name")
        if not isinstance(buffer, SimBuffer) or not self._device.owns(buffer):
            raise RegistrationError(
                f"{buffer!r} is not allocated on {self._device.name}; register what allocate returns"
            )
        if buffer.registered:
            raise RegistrationError(f"{buffer!r} is registered already, as {buffer.registered!r}")
        region = Region(self.name, name, buffer.size, buffer.address, self._device.name)
        self._regions[name] = Registration(region, buffer)
        buffer.registered = name
        return region

    def deregister(self, region: Region) -> None:
        """Withdraw *region*; the errors of `pdsim.transfer.Endpoint.deregister`."""
        registration = self.registration(region)
        if registration is None:
            raise RegistrationError(f"region {region.owner}/{region.name} is not registered with {self.name}")
        if registration.unsettled:
            raise RegistrationError(
                f"{registration.unsettled} transfers over region {region.name!r} have not settled; wait for them first"
            )
        self._cut_series()
        registration.buffer.registered = ""
        del self._regions[region.name]

    def registration(self, region: Region) -> Registration | None:
        """Return what is registered here as *region*, if it still is."""
        found = self._regions.get(region.name)
        return found if found is not None and (found.region is region or found.region == region) else None

    def address(self) -> bytes:
        """Return JSON: this rank's name, its engine and the regions registered so far."""
        self._check_open()
        regions = [registration.region for registration in self._regions.values()]
        return msgspec.json.encode(EndpointAddress(self.name, self.engine, regions, self.life))

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
        remote = self._fabric.endpoints.get(there.rank)
        if remote is None or remote.ended is not None or remote.life != there.life:
            raise PeerLost(f"{there.rank} is gone: nothing answers at its address")
        self._fabric.columns.meet(self.name, there.rank)
        connection = self._connections.get(there.rank)
        if connection is None or connection.remote is not remote:
            connection = self._connections[there.rank] = Connection(self, remote, self._send_queue(remote))
            remote.visitors.setdefault(self.name, []).append(self)
        # the peer's own objects where they are equal: then comparing them later is one look
        known = [(remote.registration(region), region) for region in there.regions]
        regions = {region.name: region if mine is None else mine.region for mine, region in known}
        return Peer(there.rank, regions, connection)

    def write(
        self, peer: Peer, batch: Batch, notify: bytes = b"", *, timeout: float | None = None, label: str = ""
    ) -> Transfer:
        """Start to move *batch* to *peer*; the contract and errors of `pdsim.transfer.Endpoint.write`."""
        return self._start(peer, batch, True, notify, timeout, label)

    def read(self, peer: Peer, batch: Batch, *, timeout: float | None = None, label: str = "") -> Transfer:
        """Start to move *batch* from *peer*; the contract and errors of `pdsim.transfer.Endpoint.read`."""
        return self._start(peer, batch, False, b"", timeout, label)

    def foresee(
        self, peer: Peer, batch: Batch, count: int, notify: bytes = b"", *, label: str = ""
    ) -> SimSeries | None:
        """Begin *count* writes like that of *batch* if their times are known; see `pdsim.transfer.Endpoint.foresee`.

        They are where memory has no contents and nothing is left to chance or watched, while this endpoint does
        nothing else, and `SendQueue.foresee` and `Foreseen.add` say so.
        """
        fabric, connection = self._fabric, self._check_peer(peer, batch.target)
        local, there = self._check_local(batch.source), connection.remote
        watched = fabric.chance is not None or fabric.observer is not None or fabric.draws is not None
        watched = watched or self._device.holds_bytes
        if watched or self._posted.moving or self.series or there.ended is not None:
            return None
        way = connection.send_queue.foresee(batch.nbytes, len(batch), count)
        if way is None:
            return None
        path, size, steps = way
        flight = SimTransfer(Transfer(self._clock, batch, label), connection, True, local, batch.target, notify, 0.0)
        report, resume = partial(self._report, flight), partial(self._resume, flight)
        series = SimSeries(self._clock, fabric.network, steps, there.name, report, resume)
        if not series.begin(path, size, fabric.engine.timeout):
            flight.release()
            return None
        self.series = series
        if notify and not there.host_latency.instant:
            there.host_latency.expect(series)
        return series

    def quiesced(self, peer: str) -> Event:
        """Return an event that succeeds `DETECTION` after the end of all lives of *peer* that have connected here."""
        event = Event(self._clock)
        self._quiesced.setdefault(peer, []).append(event)
        self._part(peer)
        return event

    def close(self) -> None:
        """Break all connections and withdraw all regions.

        Transfers under way fail with a `TransferFailed` and settle: nothing of them moves any more.
        """
        flights = self._break()
        for flight in flights:
            error = TransferFailed(f"{self.name} closed its endpoint during the transfer")
            if not flight.transfer.triggered:
                self._posted.record(flight, error)
                flight.transfer.fail(error)
            flight.transfer.settled.succeed()

    def kill(self) -> None:
        """End with the process: as `close`, but nobody is left to be told."""
        self._break()

    # --- how a transfer goes ---

    def _start(
        self, peer: Peer, batch: Batch, write: bool, notify: bytes, timeout: float | None, label: str
    ) -> Transfer:
        """Post *batch*, or note at once why it cannot be, and return its transfer.

        A peer that has ended is not noticed before `DETECTION`; a full send queue that refuses is an error of the
        transfer.
        """
        if self.series is not None:
            self.series.cut()
        source, target = batch.source, batch.target
        local = self._check_local(source if write else target)
        remote = target if write else source
        connection = self._check_peer(peer, remote)
        limit = self._fabric.engine.timeout if timeout is None else timeout
        if not limit > 0:
            raise ValueError(f"timeout={limit} must be > 0")
        now = self._fabric.clock.now
        transfer = Transfer(self._clock, batch, label)
        flight = SimTransfer(transfer, connection, write, local, remote, notify, now)
        number = self._posted.add(flight)
        if connection.remote.ended is not None:
            self._lose(number, flight)
        else:
            try:
                flight.posting = self._post(flight, number)
            except SendQueueFull as error:
                self._refuse(number, flight, error)
                return transfer
            transfer.posting = max(0.0, self._poster.free - now)
        self._posted.time_out_at(now + limit, number)
        return transfer

    def _report(
        self, flight: SimTransfer, last: bool, submitted: Times, posted: Times, ended: Times, complete: Times
    ) -> None:
        """Report writes of a series like *flight* that are complete, *last* if no other of it is under way."""
        series, self.series = self.series, None
        assert series is not None
        count, there, now = (
            self._posted.record_series(flight, submitted, posted, complete),
            flight.connection.remote,
            0.0,
        )
        if count:
            flight.connection.send_queue.carried(max(ended[-1], posted[-1]))
        if last:
            flight.release()
        if flight.notify:
            if not there.host_latency.instant:
                now = there.host_latency.conclude(series, count, self._fabric.clock.now)
            if count:
                there.notify_at(now, Repeated(self.name, flight.notify, count))

    def _resume(self, flight: SimTransfer, stages: Stages, flow: Flow | None) -> Transfer:
        """Make *flight* the write of a series that is under way."""
        batch = flight.transfer.batch
        flight.submitted = stages[0]
        number = self._posted.add(flight)
        way = batch.nbytes, len(batch), stages, flow
        flight.posting = flight.connection.send_queue.resume(*way, self._on_complete, number)
        self._posted.time_out_at(flight.submitted + self._fabric.engine.timeout, number)
        return flight.transfer

    def _post(self, flight: SimTransfer, number: int) -> Posting:
        """Hand *flight* to the send queue, with what chance does to it where faults are injected."""
        fabric, batch, queue = self._fabric, flight.transfer.batch, flight.connection.send_queue
        if fabric.observer is not None:
            fabric.observer.posted(batch, flight.transfer.label)
        if fabric.chance is None:
            return queue.post(batch.nbytes, len(batch), not flight.write, self._on_complete, number)
        held = fabric.chance.transfer()
        if held and fabric.observer is not None:
            fabric.observer.held_up(flight.transfer.label)
        share = fabric.chance.breaks()
        if share is not None:
            flight.breaks_after = int(share * batch.nbytes)
            if fabric.observer is not None:
                fabric.observer.broken(flight.transfer.label)
        posting = queue.post(batch.nbytes, len(batch), not flight.write, self._on_complete, number, held)
        if fabric.chance.strays and posting.posted is not None:
            self._payload.stray(flight, number, fabric.chance, queue.seconds(posting))
        return posting

    def _on_complete(self, posting: Posting) -> None:
        """Bytes first, then the notification, then the event that the poster waits for."""
        flight = self._posted.moving[posting.tag]
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
            self._payload.move(flight, *buffers)
        record = self._posted.quiesce(posting.tag, error)
        if flight.notify and error is None:
            there.notify(Notification(self.name, flight.notify))
        self._posted.conclude(flight, record, error)

    def notify(self, notification: Notification) -> None:
        """Deliver *notification* when the rank acts upon what comes now."""
        clock, host_latency = self._fabric.clock, self._device.host_latency
        if host_latency.instant:
            self._wake_with(notification)
        else:
            clock.call_at(host_latency.acts(clock.now), self._wake_with, notification)

    def notify_at(self, at: float, notification: Notification) -> None:
        """Deliver *notification* at the time *at*, at once if that is not to come."""
        if at > self._fabric.clock.now:
            self._fabric.clock.call_at(at, self._wake_with, notification)
        else:
            self._notifications.deliver(notification)

    def _wake_with(self, notification: Notification) -> None:
        if self.ended is not None:
            return
        if self._clock.paused:
            self._clock.put_off(Call(self._clock, self._wake_with, notification))
        else:
            self._notifications.deliver(notification)

    def _time_out(self, number: int) -> None:
        """End the wait for transfer *number*: it fails, and its memory is held until it lands or is known not to."""
        flight = self._posted.moving[number]
        if flight.transfer.triggered:
            return
        batch, posting = flight.transfer.batch, flight.posting
        error = TransferTimeout(f"{batch!r} is not complete after {self._fabric.clock.now - flight.submitted:g} s")
        if posting is not None and posting.posted is None:  # never handed to the engine: it can never land
            flight.connection.send_queue.abort(posting)
            self._posted.fail(number, error)
        else:
            self._posted.quarantine(flight, error)

    def _lose(self, number: int, flight: SimTransfer) -> None:
        """Fail *flight* once the end of its peer is noticed."""
        clock, remote = self._fabric.clock, flight.connection.remote
        assert remote.ended is not None
        clock.call_at(max(clock.now, remote.ended + DETECTION), self._on_lost, number)

    def _on_lost(self, number: int) -> None:
        flight = self._posted.moving.get(number)
        if flight is not None:  # else this endpoint has ended meanwhile
            error = PeerLost(f"{flight.connection.remote.name} is gone")
            self._posted.fail(number, error)

    def _refuse(self, number: int, flight: SimTransfer, error: TransferError) -> None:
        self._posted.quiesce(number, error)
        flight.transfer.fail(error)
        flight.transfer.settled.succeed()

    def _break(self) -> list[SimTransfer]:
        """End: nothing arrives here or leaves here any more.  Return this endpoint's own flights."""
        if self.ended is not None:
            return []
        self._cut_series()
        self.ended = self._fabric.clock.now
        flights = self._posted.drop()
        for flight in flights:
            if flight.posting is not None:
                flight.connection.send_queue.abort(flight.posting)
            flight.release()
        for other in self._fabric.endpoints.values():
            other.disconnect(self)
        for registration in self._regions.values():
            registration.buffer.registered = ""
        self._regions.clear()
        self._connections.clear()
        return flights

    def _cut_series(self) -> None:
        """Cut the series to and from this endpoint."""
        for other in self._fabric.endpoints.values():
            series = other.series
            if series is not None and (other is self or series.peer == self.name):
                series.cut()

    def _part(self, peer: str) -> None:
        """Forget the lives of *peer* whose end is noticed by now; when none is left, tell whoever waits."""
        now = self._fabric.clock.now
        lives = [life for life in self.visitors.pop(peer, ()) if life.ended is None or now < life.ended + DETECTION]
        if lives:
            self.visitors[peer] = lives
            return
        for event in self._quiesced.pop(peer, ()):
            event.succeed()

    def disconnect(self, remote: SimEndpoint) -> None:
        """Stop what goes to *remote*, which has ended; its loss is noticed later."""
        if remote.name in self.visitors and remote.ended is not None:
            self._fabric.clock.call_at(remote.ended + DETECTION, self._part, remote.name)
        for number, flight in self._posted.moving.items():
            if flight.connection.remote is remote and flight.posting is not None:
                flight.connection.send_queue.abort(flight.posting)
                self._lose(number, flight)

    # --- checks ---

    def _check_open(self) -> None:
        """Raise a `TransferFailed` if this endpoint is closed."""
        if self.ended is not None:
            raise TransferFailed(f"the endpoint of {self.name} is closed; make no calls after close()")

    def _check_local(self, region: Region) -> Registration:
        if region.owner != self.name:
            raise InvalidBatch(
                f"region {region.owner}/{region.name} is not one of {self.name}, which posts the batch"
            )
        registration = self.registration(region)
        if registration is None:
            raise RegistrationError(
                f"region {region.owner}/{region.name} is not registered; register it and try again"
            )
        return registration

    def _check_peer(self, peer: Peer, region: Region) -> Connection:
        connection: Any = peer.handle
        if not isinstance(connection, Connection) or connection.owner is not self:
            raise InvalidBatch(f"peer {peer.name} is not connected to {self.name}; pass what its connect() returned")
        known = peer.regions.get(region.name)
        if known is not region and known != region:
            raise InvalidBatch(
                f"region {region.owner}/{region.name} is not in the address of {peer.name} that was connected; connect "
                f"again with a newer one"
            )
        return connection

    def _send_queue(self, remote: SimEndpoint) -> SendQueue:
        fabric, inside = self._fabric, remote.site.node == self.site.node
        model = fabric.engine.intra if inside else fabric.engine.inter
        if model is None:
            where, field_name = ("within a node", "intra") if inside else ("across nodes", "inter")
            raise BackendUnavailable(
                f"{self.name} to {remote.name}: backend {fabric.engine.name!r} does not work {where} "
                f"({field_name}: null); place the ranks otherwise or take another backend"
            )
        outward = fabric.topology.route(model.path, self.site, remote.site)
        inward = fabric.topology.route(model.path, remote.site, self.site)
        copier = None
        if model.in_order:
            copier = fabric.copiers.setdefault(self.site.name, CopyEngine(fabric.clock, fabric.gpu, fabric.draws))
            copier.posters.add(self._poster)
        name = f"{self.name}>{remote.name}"
        return SendQueue(fabric.network, self._poster, model, outward, inward, name, copier, fabric.draws)
