"""The simulated `pdsim.transfer.Endpoint`.

Bytes are read at the source and written at the target at the instant of completion.  That is the latest moment at
which a real engine may still read its source, so a sender that reuses memory before the end is caught (as is a
receiver that reads before it was told to).  With `Faults.stray` both happen at any instant since the call, and with
`Faults.torn` each of several parts is read and lands at instants of its own.

Nothing recalls a transfer: after a `TransferTimeout` its flow goes on, its bytes and its notification may still
arrive, and `Transfer.settled` says when that is over.  Only a transfer that still waited for room in the send queue
is withdrawn, and the end of either side (a killed rank, `close`) breaks the connection: what is on the way is lost, at
once, and the side that is left learns of it `DETECTION` later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from simpy.events import Event

from pdsim.clock import Clock, Mailbox, fire
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
from pdsim.fabric.connections import Connection, Flight, Part, Registration, part_of
from pdsim.fabric.deadlines import Deadlines
from pdsim.fabric.engine import CopyEngine, Lane, Poster, Posting
from pdsim.fabric.memory import SimBuffer, copy_bytes, read_pieces, write_pieces
from pdsim.transfer import Batch, Buffer, Notification, Peer, Recorder, Region, Transfer, TransferRecord

if TYPE_CHECKING:
    from pdsim.costs import Engine
    from pdsim.fabric.faults import Chance, Observer
    from pdsim.fabric.flows.network import Network
    from pdsim.fabric.jitter import Draws
    from pdsim.fabric.memory import SimDevice
    from pdsim.fabric.topology import Site, Topology
    from pdsim.hardware import Gpu

__all__ = ["DETECTION", "Fabric", "SimEndpoint"]

DETECTION = 0.1
"""Seconds from the end of a peer until the other side's engine notices.

Assumed: a reset TCP connection is noticed in under a millisecond, a queue pair whose retries must run out first (seven
at the usual ack timeout of 67 ms) after half a second.
"""


@dataclass(frozen=True)
class Fabric:
    """What all endpoints of a job share.  *clock* is the job's, on which the hardware lives."""

    clock: Clock
    network: Network
    topology: Topology
    engine: Engine
    chance: Chance | None = None
    observer: Observer | None = None
    gpu: Gpu | None = None  # the machine's
    draws: Draws | None = None  # of what jitters
    endpoints: dict[str, SimEndpoint] = field(default_factory=dict)
    copiers: dict[str, CopyEngine] = field(default_factory=dict)  # by the site whose ranks they serve


class _Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `SimEndpoint.address` says, as JSON."""

    rank: str
    engine: str
    regions: list[Region]
    life: float = 0.0  # when the endpoint was made: a rank that is started again has another


class SimEndpoint:
    """One rank's way to move bytes.  *clock* is the rank's own, *device* holds the buffers that it may register."""

    def __init__(
        self, fabric: Fabric, name: str, clock: Clock, device: SimDevice, site: Site, recorder: Recorder
    ) -> None:
        self.name = name
        self.site = site
        self.life = fabric.clock.now
        self.ended: float | None = None  # when it was closed or killed
        self._fabric = fabric
        self._clock = clock
        self._device = device
        self._recorder = recorder
        self._engine = f"model:{fabric.engine.name}"
        self._notifications = Mailbox(clock)
        self._poster = Poster()
        self._regions: dict[str, Registration] = {}
        self._connections: dict[str, Connection] = {}
        self._visitors: dict[str, list[SimEndpoint]] = {}  # lives of a rank that connected and whose end is not noticed
        self._quiesced: dict[str, list[Event]] = {}  # by rank: who waits for the end of all of them
        self._flights: dict[int, Flight] = {}  # by number; those that have not settled
        self._number = 0
        self._quarantined = 0
        self._deadlines = Deadlines(fabric.clock, self._flights, self._expire)
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
    def quarantined(self) -> int:
        """Transfers of this endpoint that failed and have not settled."""
        return self._quarantined

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
        return msgspec.json.encode(_Address(self.name, self.engine, regions, self.life))

    def connect(self, address: bytes) -> Peer:
        """Return the peer at *address*; the errors of `pdsim.transfer.Endpoint.connect`.

        Raise a `BackendUnavailable` if the engine cannot reach that place, a `ConfigError` if the machine has no way.
        """
        self._check_open()
        try:
            there = msgspec.json.decode(address, type=_Address)
        except msgspec.DecodeError as error:
            raise TransferFailed(f"{address[:40]!r} is not an address of {self.engine}: {error}") from None
        remote = self._fabric.endpoints.get(there.rank)
        if remote is None or remote.ended is not None or remote.life != there.life:
            raise PeerLost(f"{there.rank} is gone: nothing answers at its address")
        connection = self._connections.get(there.rank)
        if connection is None or connection.remote is not remote:
            connection = self._connections[there.rank] = Connection(self, remote, self._lane(remote))
            remote._visitors.setdefault(self.name, []).append(self)
        return Peer(there.rank, {region.name: region for region in there.regions}, connection)

    def write(
        self, peer: Peer, batch: Batch, notify: bytes = b"", *, timeout: float | None = None, label: str = ""
    ) -> Transfer:
        """Start to move *batch* to *peer*; the contract and errors of `pdsim.transfer.Endpoint.write`."""
        return self._start(peer, batch, True, notify, timeout, label)

    def read(self, peer: Peer, batch: Batch, *, timeout: float | None = None, label: str = "") -> Transfer:
        """Start to move *batch* from *peer*; the contract and errors of `pdsim.transfer.Endpoint.read`."""
        return self._start(peer, batch, False, b"", timeout, label)

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
                self._record(flight, error)
                flight.transfer.fail(error)
            flight.transfer.settled.succeed()

    def kill(self) -> None:
        """End with the process: as `close`, but nobody is left to be told."""
        self._break()

    # --- how a transfer goes ---

    def _start(
        self, peer: Peer, batch: Batch, write: bool, notify: bytes, timeout: float | None, label: str
    ) -> Transfer:
        source, target = batch.source, batch.target
        local = self._check_local(source if write else target)
        remote = target if write else source
        connection = self._check_peer(peer, remote)
        limit = self._fabric.engine.timeout if timeout is None else timeout
        if not limit > 0:
            raise ValueError(f"timeout={limit} must be > 0")
        now = self._fabric.clock.now
        transfer = Transfer(self._clock, batch, label)
        flight = Flight(transfer, connection, write, local, remote, notify, now)
        self._number += 1
        self._flights[self._number] = flight
        if connection.remote.ended is not None:
            self._lose(self._number, flight)
        else:
            try:
                flight.posting = self._post(flight, self._number)
            except SendQueueFull as error:
                self._refuse(self._number, flight, error)
                return transfer
        self._deadlines.add(now + limit, self._number)
        return transfer

    def _post(self, flight: Flight, number: int) -> Posting:
        fabric, batch, lane = self._fabric, flight.transfer.batch, flight.connection.lane
        if fabric.observer is not None:
            fabric.observer.posted(batch, flight.transfer.label)
        if fabric.chance is None:
            return lane.post(batch.nbytes, len(batch.size), not flight.write, self._on_complete, number)
        held = fabric.chance.transfer()
        if held and fabric.observer is not None:
            fabric.observer.held_up(flight.transfer.label)
        posting = lane.post(batch.nbytes, len(batch.size), not flight.write, self._on_complete, number, held)
        if fabric.chance.strays and posting.posted is not None:
            self._stray(flight, number, fabric.chance, lane.seconds(posting))
        return posting

    def _stray(self, flight: Flight, number: int, chance: Chance, seconds: float) -> None:
        """Have the parts of *flight*, which takes about so many *seconds*, read and land when chance says."""
        clock, batch = self._fabric.clock, flight.transfer.batch
        for first, end, read, land in chance.parts(batch.nbytes, seconds):
            part = Part(part_of(batch, first, end))
            flight.parts.append(part)
            clock.call_at(clock.now + read, self._read_early, (number, part))
            clock.call_at(clock.now + max(read, land), self._land_early, (number, part))

    def _read_early(self, what: tuple[int, Part]) -> None:
        """Take a copy of what a part has at its source, if its transfer is still under way."""
        number, part = what
        flight = self._moving(number)
        buffers = None if flight is None else flight.buffers()
        if flight is not None and buffers is not None:
            self._read(part, flight, buffers[0])

    def _land_early(self, what: tuple[int, Part]) -> None:
        """Let what was read of a part land, if its transfer is still under way."""
        number, part = what
        flight = self._moving(number)
        buffers = None if flight is None else flight.buffers()
        if flight is not None and buffers is not None and part.pieces is not None:
            self._put(part, flight, buffers[1])

    def _read(self, part: Part, flight: Flight, source: SimBuffer) -> None:
        if self._fabric.observer is not None:
            self._fabric.observer.read(part.batch, flight.transfer.label)
        exact = self._device.holds_bytes
        part.pieces = [piece.copy() for piece in read_pieces(part.batch, source)] if exact else []

    def _put(self, part: Part, flight: Flight, target: SimBuffer) -> None:
        if self._fabric.observer is not None:
            self._fabric.observer.landed(part.batch, flight.transfer.label)
        part.landed = True
        if self._device.holds_bytes:
            write_pieces(part.batch, target, part.pieces or [])

    def _moving(self, number: int) -> Flight | None:
        flight = self._flights.get(number)
        stopped = flight is None or flight.posting is None or flight.posting.aborted
        return None if stopped else flight

    def _move(self, flight: Flight, source: SimBuffer, target: SimBuffer) -> None:
        """Move what has not moved yet."""
        for part in flight.parts:
            if part.pieces is None:
                self._read(part, flight, source)
            if not part.landed:
                self._put(part, flight, target)
        if flight.parts:
            return
        batch, label, observer = flight.transfer.batch, flight.transfer.label, self._fabric.observer
        if observer is not None:
            observer.read(batch, label)
            observer.landed(batch, label)
        if self._device.holds_bytes:
            copy_bytes(batch, source, target)

    def _on_complete(self, posting: Posting) -> None:
        """Bytes first, then the notification, then the event that the poster waits for."""
        flight = self._flights[posting.tag]
        there = flight.connection.remote
        buffers = flight.buffers()
        error = None
        if buffers is None:
            name = f"{flight.remote.owner}/{flight.remote.name}"
            error = TransferFailed(f"region {name} is no longer registered; its owner withdrew it during the transfer")
        else:
            self._move(flight, *buffers)
        record = self._land(posting.tag, flight, error)
        if flight.notify and error is None:
            self._notify(there, Notification(self.name, flight.notify))
        self._end(flight, record, error)

    def _notify(self, there: SimEndpoint, notification: Notification) -> None:
        clock, waking = self._fabric.clock, there._device.waking
        if waking.instant:
            there._notifications.deliver(notification)
        else:
            clock.call_at(waking.acts(clock.now), there._wake_with, notification)

    def _wake_with(self, notification: Notification) -> None:
        if self.ended is None:
            self._notifications.deliver(notification)

    def _expire(self, number: int) -> None:
        flight = self._flights[number]
        if flight.transfer.triggered:
            return
        batch, posting = flight.transfer.batch, flight.posting
        error = TransferTimeout(f"{batch!r} is not complete after {self._fabric.clock.now - flight.submitted:g} s")
        if posting is not None and posting.posted is None:  # never handed to the engine: it can never land
            flight.connection.lane.abort(posting)
            self._end(flight, self._land(number, flight, error), error)
        else:
            self._quarantined += 1
            self._record(flight, error)
            fire(flight.transfer, error, ok=False)

    def _lose(self, number: int, flight: Flight) -> None:
        """Fail *flight* once the end of its peer is noticed."""
        clock, remote = self._fabric.clock, flight.connection.remote
        assert remote.ended is not None
        clock.call_at(max(clock.now, remote.ended + DETECTION), self._on_lost, number)

    def _on_lost(self, number: int) -> None:
        flight = self._flights.get(number)
        if flight is not None:  # else this endpoint has ended meanwhile
            error = PeerLost(f"{flight.connection.remote.name} is gone")
            self._end(flight, self._land(number, flight, error), error)

    def _refuse(self, number: int, flight: Flight, error: TransferError) -> None:
        self._land(number, flight, error)
        flight.transfer.fail(error)
        flight.transfer.settled.succeed()

    def _land(self, number: int, flight: Flight, error: TransferError | None) -> TransferRecord | None:
        """Nothing of *flight* moves any more: forget it.  Return its record, or None if it had failed before."""
        del self._flights[number]
        flight.release()
        if not flight.transfer.triggered:
            return self._record(flight, error)
        self._quarantined -= 1
        return None

    def _end(self, flight: Flight, record: TransferRecord | None, error: TransferError | None) -> None:
        """Tell whoever waits."""
        fire(flight.transfer.settled)
        if record is not None:
            fire(flight.transfer, record if error is None else error, ok=error is None)

    def _record(self, flight: Flight, error: TransferError | None) -> TransferRecord:
        now, posting, batch = self._fabric.clock.now, flight.posting, flight.transfer.batch
        posted = now if posting is None or posting.posted is None else min(posting.posted, now)
        record = TransferRecord(
            self._engine,
            "write" if flight.write else "read",
            batch.source.owner,
            batch.target.owner,
            batch.nbytes,
            len(batch.size),
            flight.submitted,
            flight.submitted,  # descriptor lists cost nothing here: the engine's *descriptor* contains them
            posted,
            now,
            now,  # completions are seen at once: the engine's *latency* contains the polling
            "ok" if error is None else type(error).__name__,
            flight.transfer.label,
        )
        self._recorder.transfer(record)
        return record

    def _break(self) -> list[Flight]:
        """End: nothing arrives here or leaves here any more.  Return this endpoint's own flights."""
        if self.ended is not None:
            return []
        self.ended = self._fabric.clock.now
        flights = list(self._flights.values())
        for flight in flights:
            if flight.posting is not None:
                flight.connection.lane.abort(flight.posting)
            flight.release()
        self._flights.clear()
        self._quarantined = 0
        for other in self._fabric.endpoints.values():
            other._disconnect(self)
        for registration in self._regions.values():
            registration.buffer.registered = ""
        self._regions.clear()
        self._connections.clear()
        return flights

    def _part(self, peer: str) -> None:
        """Forget the lives of *peer* whose end is noticed by now; when none is left, tell whoever waits."""
        now = self._fabric.clock.now
        lives = [life for life in self._visitors.pop(peer, ()) if life.ended is None or now < life.ended + DETECTION]
        if lives:
            self._visitors[peer] = lives
            return
        for event in self._quiesced.pop(peer, ()):
            event.succeed()

    def _disconnect(self, remote: SimEndpoint) -> None:
        if remote.name in self._visitors and remote.ended is not None:
            self._fabric.clock.call_at(remote.ended + DETECTION, self._part, remote.name)
        for number, flight in self._flights.items():
            if flight.connection.remote is remote and flight.posting is not None:
                flight.connection.lane.abort(flight.posting)
                self._lose(number, flight)

    # --- checks ---

    def _check_open(self) -> None:
        if self.ended is not None:
            raise TransferFailed(f"the endpoint of {self.name} is closed; make no calls after close()")

    def _check_local(self, region: Region) -> Registration:
        if region.owner != self.name:
            raise InvalidBatch(f"region {region.owner}/{region.name} is not one of {self.name}, which posts the batch")
        registration = self.registration(region)
        if registration is None:
            raise RegistrationError(f"region {region.owner}/{region.name} is not registered; register it and try again")
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

    def _lane(self, remote: SimEndpoint) -> Lane:
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
        name = f"{self.name}>{remote.name}"
        return Lane(fabric.network, self._poster, model, outward, inward, name, copier, fabric.draws)
