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

from typing import TYPE_CHECKING

import msgspec
from simpy.events import Event

from pdsim.core.errors import BackendUnavailable, PeerLost, RegistrationError, TransferFailed
from pdsim.sim.connections import Connection, Visitors
from pdsim.sim.copy_engine import CopyEngine
from pdsim.sim.engine import SendQueue
from pdsim.sim.inbox import NotificationInbox
from pdsim.sim.initiator import DETECTION, Initiator
from pdsim.sim.posting import PostingThread
from pdsim.sim.regions import RegionTable
from pdsim.sim.sequence import Series, SimWriteSequence
from pdsim.sim.shared import EndpointAddress, Fabric
from pdsim.transfer import Batch, Buffer, Peer, Region, Transfer, WriteSequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.core.clock import Clock
    from pdsim.core.mailbox import Mailbox
    from pdsim.sim.connections import SimTransfer
    from pdsim.sim.memory import SimDevice
    from pdsim.sim.posted import SeriesRecorder
    from pdsim.sim.topology import Site
    from pdsim.transfer import Batches

__all__ = ["DETECTION", "SimEndpoint"]


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
        self.life = fabric.clock.now
        self.ended: float | None = None  # when it was closed or killed
        self.inbox = NotificationInbox(fabric.clock, clock, device.host_latency)
        self.visitors = Visitors(fabric.clock, clock, DETECTION)
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
        return msgspec.json.encode(EndpointAddress(self.name, self.engine, list(self.regions), self.life))

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
        connection = self._connections.get(there.rank)
        if connection is None or connection.remote is not remote:
            connection = self._connections[there.rank] = Connection(
                self._initiator, remote, self._send_queue(remote)
            )
            remote.visitors.add(self)
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
        """Return an event that succeeds when no life of *peer* that has connected here can move bytes any more.

        That is `DETECTION` after the end of the last of them; at once if none has connected, or all are over that
        long.
        """
        return self.visitors.quiesced(peer)

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
        """End: nothing arrives here or leaves here any more.  Return this endpoint's own flights."""
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
        """Cut the series to and from this endpoint.

        What is complete of them is reported, and the write under way becomes a transfer, which can fail.
        """
        for other in self._fabric.endpoints.values():
            series = other.series
            if series is not None and (other is self or series.peer == self.name):
                series.cut()

    def disconnect(self, remote: SimEndpoint) -> None:
        """Stop what goes to *remote*, which has ended; its loss is noticed later.

        Flows end at once, because the wire is cut; what posts them fails with `PeerLost` only `DETECTION` later.
        """
        self.visitors.end(remote)
        self._initiator.disconnect(remote)

    def _check_open(self) -> None:
        """Raise a `TransferFailed` if this endpoint is closed."""
        if self.ended is not None:
            raise TransferFailed(f"the endpoint of {self.name} is closed; make no calls after close()")

    def _send_queue(self, remote: SimEndpoint) -> SendQueue:
        """Return a queue for what is posted to *remote*: the engine's model within a node or across, and the routes.

        A copy engine that works in order is one for all ranks of its GPU.  Raise a `BackendUnavailable` if the
        engine has no model for that way, and what `Topology.route` raises.
        """
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
            within = self.site == remote.site
            made = CopyEngine(fabric.clock, fabric.gpu, fabric.draws, streams=model.streams, within=within)
            copier = fabric.copiers.setdefault(self.site.name + "/within" * within, made)
            copier.posters.add(self._poster)
        name = f"{self.name}>{remote.name}"
        return SendQueue(fabric.network, self._poster, model, outward, inward, name, copier, fabric.draws)
