# SPDX-License-Identifier: Apache-2.0
"""The simulated `pdsim.transfer.Endpoint`, its transfers, and what becomes of them when a peer ends.

Bytes are read and written at the instant of completion, the latest at which a real engine may still read its source,
so a sender that reuses memory too early is caught.  Nothing recalls a transfer: after a `TransferTimeout` its flow
goes on.  The end of either side breaks the connection: what is on the way is lost, and the other side notices later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from simpy.events import Event

from pdsim.core.clock import Clock, fire
from pdsim.core.errors import (
    InvalidBatch,
    PeerLost,
    RegistrationError,
    SendQueueFull,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.sim.hosts import Deadlines, Inbox
from pdsim.sim.memory import SimBuffer, copy_bytes, part_of, read_pieces, write_pieces
from pdsim.sim.posting import Fabric
from pdsim.sim.sequence import Series, SimWriteSequence
from pdsim.sim.topology import EndpointAddress
from pdsim.transfer import Notification, Peer, Transfer, TransferRecord, Writes, WriteSequence, check_sides
from pdsim.transfer.batch import Batch, Buffer, Region

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdsim.sim.faults import Chance, Observer
    from pdsim.sim.memory import Bytes, SimDevice
    from pdsim.sim.network import Flow
    from pdsim.sim.posting import Posting, SendQueue
    from pdsim.sim.sequence import Stages, Times
    from pdsim.sim.topology import Site
    from pdsim.transfer.log import RecordRun


DETECTION = 0.1
"""Seconds from the end of a peer until the other side's engine notices.

Assumed: a reset TCP connection is noticed in under a millisecond, a queue pair whose retries must run out first
(seven at the usual ack timeout of 67 ms) after half a second.
"""


class SeriesRecorder(Protocol):
    """A `pdsim.transfer.Recorder` that takes many records at once."""

    def transfer(self, record: TransferRecord) -> None: ...

    def series(self, run: RecordRun, times: Sequence[Times], labels: Sequence[str] = ()) -> None:
        """Keep the records of *run* with these *times*, in the order of `TransferRecord`; *labels*: one for each."""


class SimEndpoint:
    """One rank's way to move bytes: the simulated `pdsim.transfer.Endpoint`.

    *clock* is the rank's own, on which its transfers are events; *device* holds the buffers that it may register,
    *site* is where it is on the machine, and *recorder* is given the record of each transfer when it ends.
    """

    def __init__(
        self, fabric: Fabric, name: str, clock: Clock, device: SimDevice, site: Site, recorder: SeriesRecorder
    ) -> None:
        self.name = name
        self.engine = f"model:{fabric.engine.name}"
        self.site = site
        self.recorder = recorder
        self.born = fabric.clock.now
        self.ended: float | None = None  # when it was closed or killed
        self.inbox = Inbox(fabric.clock, clock, device.host_latency)
        self.notifications = self.inbox.mailbox
        self.inbound: dict[str, list[SimEndpoint]] = {}  # by rank: incarnations that connected; until noticed to end
        self.regions: dict[str, Registration] = {}  # by name
        self.poster = fabric.poster(site)
        self.moving: dict[int, SimTransfer] = {}  # that are not quiesced, by number
        self.quarantined = 0  # how many of them have failed
        self._fabric = fabric
        self._hardware: Clock = fabric.clock
        self._chance, self._observer = fabric.chance, fabric.observer
        self.limit = fabric.engine.timeout
        self.singles = 0  # transfers under way that are a `Series` of their own
        self._foreseen = fabric.network.foreseen
        self._clock = clock
        self._device = device
        self._keep = recorder.transfer
        self._deadlines = Deadlines(fabric.clock, self.moving, self._time_out)
        self._payload = Payload(fabric.clock, device, fabric.observer, self.moving)
        # whether anybody sees what bytes a transfer moves, and when
        self._moves = device.holds_bytes or fabric.observer is not None or fabric.chance is not None
        self._number = 0
        self._connections: dict[str, Connection] = {}
        self._waiting: dict[str, list[Event]] = {}  # by rank: who waits for the end of all its incarnations
        self._proofs = 0  # that were asked for, the number of addresses from now on
        self.void: dict[str, int] = {}  # by rank: addresses up to this number do not let it connect any more
        before = fabric.endpoints.get(name)
        self.place: int = len(fabric.endpoints) if before is None else before.place  # among the job's ranks
        fabric.endpoints[name] = self

    def register(self, buffer: Buffer, name: str) -> Region:
        if self.ended is not None:
            raise RegistrationError(f"{self.name} has closed its endpoint; register before close()")
        if name in self.regions:
            raise RegistrationError(f"{self.name} has a region {name!r} already; take another name")
        if not isinstance(buffer, SimBuffer) or not self._device.owns(buffer):
            raise RegistrationError(
                f"{buffer!r} is not allocated on {self._device.name}; register what allocate returns"
            )
        if buffer.registered:
            raise RegistrationError(f"{buffer!r} is registered already, as {buffer.registered!r}")
        region = Region(self.name, name, buffer.size, buffer.address, self._device.name)
        self.regions[name] = Registration(region, buffer)
        buffer.registered = name
        return region

    def deregister(self, region: Region) -> None:
        registration = self._registered(region)
        if registration.unsettled:
            raise RegistrationError(
                f"{registration.unsettled} transfers over region {region.name!r} have not settled; wait for them"
            )
        self._cut_series()
        registration.buffer.registered = ""
        del self.regions[region.name]

    def find(self, region: Region) -> Registration | None:
        """Return what is registered here as *region*; None if nothing is, or another region of that name."""
        known = self.regions.get(region.name)
        return known if known is not None and (known.region is region or known.region == region) else None

    def _registered(self, region: Region) -> Registration:
        registration = self.find(region)
        if registration is None:
            raise RegistrationError(
                f"region {region.owner}/{region.name} is not registered; register it and try again"
            )
        return registration

    def address(self) -> bytes:
        """Return JSON: this rank's name, its engine and the regions registered so far."""
        self._check_open()
        regions, issue = [known.region for known in self.regions.values()], self._proofs or msgspec.UNSET
        return msgspec.json.encode(EndpointAddress(self.name, self.engine, regions, self.born, issue))

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
        if connection is None or connection.remote is not remote or connection.void:
            name = f"{self.name}>{remote.name}"
            queue = self._fabric.send_queue(name, self.poster, self.site, remote.site)
            void = (there.issue or 0) <= remote.void.get(self.name, -1)
            connection = self._connections[there.rank] = Connection(self, remote, queue, queue, void)
            self._choose_cards(connection)
            if not void:
                remote.inbound.setdefault(self.name, []).append(self)
        # the peer's own objects where they are equal: then comparing them later is one look
        known = [(remote.find(region), region) for region in there.regions]
        regions = {region.name: region if mine is None else mine.region for mine, region in known}
        return Peer(there.rank, regions, connection)

    def write(
        self, peer: Peer, batch: Batch, notify: bytes = b"", *, timeout: float | None = None, label: str = ""
    ) -> Transfer:
        return self._start(peer, batch, True, notify, timeout, label)

    def read(self, peer: Peer, batch: Batch, *, timeout: float | None = None, label: str = "") -> Transfer:
        return self._start(peer, batch, False, b"", timeout, label)

    def write_sequence(self, peer: Peer, parts: Sequence[Writes], times: Sequence[float] = ()) -> WriteSequence:
        return SimWriteSequence(self._clock, self, peer, parts, times).start()

    def quiesced(self, peer: str) -> Event:
        event = self._clock.event()
        self.void[peer], self._proofs = self._proofs, self._proofs + 1
        self._waiting.setdefault(peer, []).append(event)
        self._notice_ends(peer)
        return event

    def _notice_ends(self, peer: str) -> None:
        now = self._hardware.now
        left = [one for one in self.inbound.pop(peer, ()) if one.ended is None or now < one.ended + DETECTION]
        if left:
            self.inbound[peer] = left
            return
        for event in self._waiting.pop(peer, ()):
            event.succeed()

    def close(self) -> None:
        """Break all connections and withdraw all regions; transfers under way fail and settle."""
        for posted in self._break():
            error = TransferFailed(f"{self.name} closed its endpoint during the transfer")
            if not posted.transfer.triggered:
                self._record(posted, error)
                posted.transfer.fail(error)
            posted.transfer.settled.succeed()

    def kill(self) -> None:
        """End with the process: as `close`, but fail no transfer, as nobody is left to hear of it."""
        self._break()

    def disconnect(self, remote: SimEndpoint) -> None:
        """Stop what goes to *remote*, which has ended.

        Flows end at once, because the wire is cut; what posts them fails with `PeerLost` only `DETECTION` later.
        """
        assert remote.ended is not None
        if remote.name in self.inbound:
            self._hardware.call_at(remote.ended + DETECTION, self._notice_ends, remote.name)
        for number, posted in self.moving.items():
            if posted.connection.remote is remote and posted.posting is not None:
                posted.posting.queue.abort(posted.posting)
                self._lose(number, posted)

    def leave(self, card: tuple[int, int]) -> None:
        """Stop what goes over *card*, a node and its number there, which has failed.

        Its flows end at once.  `DETECTION` later what has not arrived goes on over other cards, if
        `Engine.failover` and there are any, or the transfer fails; so does what is posted meanwhile.
        """
        self.choose_cards()
        for number, posted in self.moving.items():
            if posted.posting is not None and card in posted.posting.queue.cards:
                self._lose_card(number, posted.posting)

    def choose_cards(self) -> None:
        """Have what is posted from now on take cards that work."""
        for connection in self._connections.values():
            self._choose_cards(connection)

    def _choose_cards(self, connection: Connection) -> None:
        fabric, home = self._fabric, connection.home
        connection.send_queue = home
        if fabric.engine.failover and not home.cards.isdisjoint(fabric.failed):
            here, there = (fabric.topology.around(one.site, fabric.failed) for one in (self, connection.remote))
            name = f"{home.name} over nic{here.card} and nic{there.card}"
            connection.send_queue = fabric.send_queue(name, self.poster, here, there)

    def _lose_card(self, number: int, posting: Posting) -> None:
        if not posting.aborted:
            left = posting.queue.recall(posting)
            self._hardware.call_at(self._hardware.now + DETECTION, self._on_card_lost, (number, posting, left))

    def _on_card_lost(self, what: tuple[int, Posting, tuple[int, int]]) -> None:
        number, posting, left = what
        posted, fabric = self.moving.get(number), self._fabric
        if posted is None or posted.posting is not posting or posted.connection.remote.ended is not None:
            return
        queue = posted.connection.send_queue
        if fabric.engine.failover and queue.cards.isdisjoint(fabric.failed):
            posted.posting = queue.post(*left, not posted.write, self._on_complete, number)
            return
        error = TransferFailed(f"a NIC between {self.name} and {posted.connection.remote.name} has failed")
        self._conclude(posted, self._quiesce(number, error), error)

    def _break(self) -> list[SimTransfer]:
        if self.ended is not None:
            return []
        self._cut_series()
        self.ended = self._hardware.now
        self.inbox.closed = True
        dropped = list(self.moving.values())
        self.moving.clear()
        self.quarantined = 0
        for posted in dropped:
            if posted.posting is not None:
                posted.posting.queue.abort(posted.posting)
            posted.release()
        known = {connection.remote for connection in self._connections.values()}.union(*self.inbound.values())
        for other in sorted(known, key=lambda one: one.place):
            if self._fabric.endpoints[other.name] is other:
                other.disconnect(self)
        for registration in self.regions.values():
            registration.buffer.registered = ""
        self.regions.clear()
        self._connections.clear()
        return dropped

    def _cut_series(self) -> None:
        series = self._foreseen.series
        self._foreseen.cut([one for one in series if one.peer == self.name or one.thread is self.poster])

    def _check_open(self) -> None:
        if self.ended is not None:
            raise TransferFailed(f"the endpoint of {self.name} is closed; make no calls after close()")

    def _connection(self, peer: Peer) -> Connection:
        connection: Any = peer.handle
        if not isinstance(connection, Connection) or connection.owner is not self:
            raise InvalidBatch(f"peer {peer.name} is not connected to {self.name}; pass what its connect() returned")
        return connection

    # --- transfers: the states are those of `pdsim.transfer.Transfer` ---

    def _start(
        self, peer: Peer, batch: Batch, write: bool, notify: bytes, timeout: float | None, label: str
    ) -> Transfer:
        connection = self._connection(peer)
        own, remote = check_sides(self.name, peer, batch, write=write)
        local = self._registered(own)
        limit = self.limit if timeout is None else timeout
        if not limit > 0:
            raise ValueError(f"timeout={limit} must be > 0")
        now = called = self._hardware.queue.now
        if self._foreseen.series:
            self._foreseen.cut([one for one in self._foreseen.of(self.poster) if one.alone or timeout is not None])
        transfer = Transfer(self._clock, batch, label)
        if connection.send_queue.blocks and self.poster.free > now:
            called = self.poster.free
        posted = SimTransfer(transfer, connection, write, local, remote, notify, called)
        number = self._add(posted)
        if connection.void:
            return self._refuse(number, transfer, TransferFailed(f"{peer.name} has withdrawn this address"))
        if connection.remote.ended is not None:  # not noticed before `DETECTION`
            self._lose(number, posted)
        elif self._foreseen.series and self._join(posted, number):
            transfer.posted = max(now, self.poster.free)
        else:
            try:
                posted.posting = self._post(posted, number)
            except SendQueueFull as error:
                return self._refuse(number, transfer, error)
            transfer.posted = max(now, self.poster.free)
            if self._fabric.failed and not posted.posting.queue.cards.isdisjoint(self._fabric.failed):
                self._lose_card(number, posted.posting)
        self._deadlines.add(called + limit, number)
        return transfer

    def _refuse(self, number: int, transfer: Transfer, error: TransferError) -> Transfer:
        self._quiesce(number, error)
        transfer.fail(error)
        transfer.settled.succeed()
        return transfer

    def _add(self, posted: SimTransfer) -> int:
        self._number += 1
        self.moving[self._number] = posted
        return self._number

    def _post(self, posted: SimTransfer, number: int) -> Posting:
        batch, queue, label = posted.transfer.batch, posted.connection.send_queue, posted.transfer.label
        chance, observer = self._chance, self._observer
        if observer is not None:
            observer.posted(batch, label)
        if chance is None:
            return queue.post(batch.nbytes, len(batch), not posted.write, self._on_complete, number)
        held = chance.transfer()
        if held and observer is not None:
            observer.held_up(label)
        share = chance.breaks()
        if share is not None:
            posted.breaks_after = int(share * batch.nbytes)
            if observer is not None:
                observer.broken(label)
        posting = queue.post(batch.nbytes, len(batch), not posted.write, self._on_complete, number, held)
        if chance.strays and posting.posted is not None:
            self._payload.stray(posted, number, chance, queue.seconds(posting))
        return posting

    def _on_complete(self, posting: Posting) -> None:
        # So whoever is told finds the bytes.  A region that its owner has withdrawn meanwhile fails the transfer,
        # and so does a fault that breaks it, after some of its bytes.
        posted = self.moving[posting.tag]
        buffers, error = posted.buffers(), None
        if buffers is None:
            name = f"{posted.remote.owner}/{posted.remote.name}"
            error = TransferFailed(
                f"region {name} is no longer registered; its owner withdrew it during the transfer"
            )
        elif self._moves:
            self._payload.move(posted, *buffers, posted.breaks_after)
            if posted.breaks_after is not None:
                error = TransferFailed(f"{self.engine} reports an error of {posted.transfer.batch!r}, as asked")
        record = self._quiesce(posting.tag, error)
        if posted.notify and error is None:
            held = 0.0 if self._chance is None else self._chance.notification()
            posted.connection.remote.inbox.notify(Notification(self.name, posted.notify), held)
        self._conclude(posted, record, error)

    def _time_out(self, number: int) -> None:
        posted = self.moving[number]
        if posted.transfer.triggered:
            return
        batch, posting = posted.transfer.batch, posted.posting
        error = TransferTimeout(f"{batch!r} is not complete after {self._hardware.now - posted.submitted:g} s")
        if posting is not None and posting.posted is None:  # never handed to the engine: it can never land
            posting.queue.abort(posting)
            self._conclude(posted, self._quiesce(number, error), error)
        else:
            self.quarantined += 1
            self._record(posted, error)
            fire(posted.transfer, error, ok=False)

    def _lose(self, number: int, posted: SimTransfer) -> None:
        clock, remote = self._hardware, posted.connection.remote
        assert remote.ended is not None
        clock.call_at(max(clock.now, remote.ended + DETECTION), self._on_lost, number)

    def _on_lost(self, number: int) -> None:
        posted = self.moving.get(number)
        if posted is not None:  # else this endpoint has ended meanwhile
            error = PeerLost(f"{posted.connection.remote.name} is gone")
            self._conclude(posted, self._quiesce(number, error), error)

    def _quiesce(self, number: int, error: TransferError | None) -> TransferRecord | None:
        # Let go of the memory of *number*, of which nothing moves any more.  Return its record: it has completed or,
        # with *error*, failed.  Return None if it was in quarantine.
        posted = self.moving.pop(number)
        posted.release()
        if not posted.transfer.triggered:
            return self._record(posted, error)
        self.quarantined -= 1
        return None

    def _conclude(self, posted: SimTransfer, record: TransferRecord | None, error: TransferError | None) -> None:
        posted.transfer.settle(now=True)
        if record is not None:
            fire(posted.transfer, record if error is None else error, ok=error is None)

    def _record(self, posted: SimTransfer, error: TransferError | None) -> TransferRecord:
        now, posting, batch = self._hardware.queue.now, posted.posting, posted.transfer.batch
        if posting is not None and posting.called is not None:
            posted.submitted = posting.called
        submitted = min(posted.submitted, now)  # or it has failed before its thread took it up
        record = TransferRecord(
            self.engine,
            "write" if posted.write else "read",
            batch.source.owner,
            batch.target.owner,
            batch.nbytes,
            len(batch),
            submitted,
            submitted,  # descriptor lists cost nothing here: the engine's *descriptor* contains them
            now if posting is None or posting.posted is None else min(posting.posted, now),
            now,
            now,  # completions are seen at once: the engine's *latency* contains the polling
            "ok" if error is None else type(error).__name__,
            posted.transfer.label,
        )
        self._keep(record)
        return record

    # --- series: `pdsim.sim.sequence` ---

    def foresee(
        self,
        peer: Peer,
        parts: Sequence[Writes],
        number: int,
        kinds: Sequence[int],
        times: Sequence[float],
        over: Callable[[int, Sequence[int], Transfer | None], None],
    ) -> Series | None:
        """Begin writes of *parts*, from the *number*-th on, if their times are known; the rest as in `Series`.

        They are where memory has no contents, nothing is left to chance or watched, and this endpoint does nothing
        else.
        """
        connection = self._connection(peer)
        there, queue, beside = connection.remote, connection.send_queue, self._foreseen.of(self.poster)
        watched = self._chance is not None or self._observer is not None or self._fabric.draws is not None
        watched = watched or bool(self._fabric.failed)
        alone = watched or self._device.holds_bytes or len(self.moving) > self.singles or there.ended is not None
        alone = alone or connection.void
        if alone or any(one.alone for one in beside):
            return None
        paces, posted = [], []
        batches = [part.batches[number] for part in parts]
        for batch in batches:
            check_sides(self.name, peer, batch, write=True)
            pace = queue.foresee(batch.nbytes, len(batch), bool(times), bool(beside))
            if pace is None:
                return None
            paces.append(pace)
        for batch, part in zip(batches, parts, strict=True):
            transfer, local = Transfer(self._clock, batch, part.label), self._registered(batch.source)
            posted.append(SimTransfer(transfer, connection, True, local, batch.target, part.notify, 0.0))
        series = Series(self, self._foreseen, posted, kinds, paces, over, times, None, parts[0].labels[number:])
        if not self._foreseen.join(series):
            for one in posted:
                one.release()
            return None
        if parts[0].notify and not there.inbox.host_latency.instant:
            there.inbox.host_latency.expect(series.arrivals)
        return series

    def _join(self, posted: SimTransfer, number: int) -> bool:
        # Let the one write *posted* be a series of its own, beside those of its thread; else end them.
        beside, queue, batch = self._foreseen.of(self.poster), posted.connection.send_queue, posted.transfer.batch
        if not beside:
            return False
        if posted.write and len(self.moving) == self.singles + 1:
            pace = queue.foresee(batch.nbytes, len(batch), apart=False, beside=True)
            if pace is not None and self._foreseen.join(
                Series(self, self._foreseen, [posted], [0], [pace], None, (), number)
            ):
                self.singles += 1
                return True
        self._foreseen.cut(list(beside))
        return False

    def complete(self, posted: SimTransfer, number: int, at: float) -> None:
        """Report *posted*, the one write of a series: it has been posted since the time *at*, and is complete."""
        self.singles -= 1
        batch = posted.transfer.batch
        posted.posting = posted.connection.send_queue.over(batch.nbytes, len(batch), at, number)
        self._on_complete(posted.posting)

    def resume(self, posted: SimTransfer, stages: Stages, flow: Flow | None, number: int | None = None) -> Transfer:
        """Go on with *posted*, a write of a series, as if it had been posted by itself, with its *number* if any."""
        batch, queue = posted.transfer.batch, posted.connection.send_queue
        if number is None:
            posted.submitted = stages[0]
            number = self._add(posted)
            self._deadlines.add(posted.submitted + self.limit, number)
        else:
            self.singles -= 1
        posted.posting = queue.resume(batch.nbytes, len(batch), stages, flow, self._on_complete, number)
        return posted.transfer


@dataclass(eq=False, slots=True)
class Connection:
    """From the endpoint *owner* to one incarnation of a peer, and the queue of what is posted to it."""

    owner: SimEndpoint
    remote: SimEndpoint
    home: SendQueue  # over the cards of both ranks
    send_queue: SendQueue  # over those that work: the same, unless one has failed
    void: bool = False  # the address was given out before a proof about this rank: nothing is moved


@dataclass(eq=False, slots=True)
class Registration:
    """A region, its memory, and how many of the endpoint's own transfers over it have not settled."""

    region: Region
    buffer: SimBuffer
    unsettled: int = 0


class SimTransfer:
    """One transfer from its call until it is quiesced.  Until then it holds the memory on both sides."""

    # no dataclass: this is made for each transfer
    __slots__ = (
        *("breaks_after", "connection", "held", "local", "notify", "parts"),
        *("posting", "remote", "submitted", "transfer", "write"),
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
        self.write = write  # from *local* to *remote*; a read moves the other way
        self.local = local  # the poster's own
        self.remote = remote  # as the peer's address had it
        self.notify = notify
        self.submitted = submitted  # in seconds on the job's clock
        self.posting: Posting | None = None
        self.breaks_after: int | None = None  # bytes that move before the engine reports a failure, if it does
        self.parts: list[Part] | None = None  # that are read, or land, before the end
        there = connection.remote.find(remote)
        self.held = None if there is None else there.buffer
        if self.held is not None:
            self.held.hold()
        local.unsettled += 1
        local.buffer.hold()

    def buffers(self) -> tuple[SimBuffer, SimBuffer] | None:
        """Return the memory of the source and of the target; None if the peer has withdrawn its own."""
        there = self.connection.remote.find(self.remote)
        if there is None:
            return None
        return (self.local.buffer, there.buffer) if self.write else (there.buffer, self.local.buffer)

    def release(self) -> None:
        self.local.unsettled -= 1
        self.local.buffer.release()
        if self.held is not None:
            self.held.release()


@dataclass(eq=False, slots=True)
class Part:
    """Those bytes of a transfer that are read at one instant and land at one: the descriptors of *batch*."""

    batch: Batch
    pieces: list[Bytes] | None = None  # what was read, once it was
    landed: bool = False


class Payload:
    """Moves the bytes of the transfers *moving*, by number, that an endpoint on *device* posts.

    Without faults all bytes of a transfer are read and land at its completion.  With them a transfer moves in parts,
    each read at one instant and landing at another, so that memory reused too early shows.  *observer* hears of
    both, even where memory has no contents.
    """

    def __init__(
        self, clock: Clock, device: SimDevice, observer: Observer | None, moving: Mapping[int, SimTransfer]
    ) -> None:
        self._clock = clock
        self._device = device
        self._observer = observer
        self._moving = moving

    def stray(self, posted: SimTransfer, number: int, chance: Chance, seconds: float) -> None:
        """Have the parts of *posted*, which takes about so many *seconds*, read and land when chance says.

        A part that is not read or has not landed by the transfer's completion does so then (`move`); one whose
        transfer is aborted before never does.
        """
        clock, batch = self._clock, posted.transfer.batch
        for first, end, read, land in chance.parts(batch.nbytes, seconds):
            part = Part(part_of(batch, first, end))
            posted.parts = [*(posted.parts or ()), part]
            clock.call_at(clock.now + read, self._early, (number, part, False))
            clock.call_at(clock.now + max(read, land), self._early, (number, part, True))

    def _early(self, what: tuple[int, Part, bool]) -> None:
        number, part, land = what
        posted = self._moving.get(number)
        if posted is None or posted.posting is None or posted.posting.aborted:
            return
        buffers = posted.buffers()
        if buffers is None:
            return
        if not land:
            self._read(part, posted, buffers[0])
        elif part.pieces is not None:
            self._put(part, posted, buffers[1])

    def _read(self, part: Part, posted: SimTransfer, source: SimBuffer) -> None:
        if self._observer is not None:
            self._observer.read(part.batch, posted.transfer.label)
        exact = self._device.holds_bytes
        part.pieces = [piece.copy() for piece in read_pieces(part.batch, source)] if exact else []

    def _put(self, part: Part, posted: SimTransfer, target: SimBuffer) -> None:
        if self._observer is not None:
            self._observer.landed(part.batch, posted.transfer.label)
        part.landed = True
        if self._device.holds_bytes:
            write_pieces(part.batch, target, part.pieces or [])

    def move(self, posted: SimTransfer, source: SimBuffer, target: SimBuffer, end: int | None) -> None:
        """Move what has not moved yet from *source* to *target*, all at this instant.

        With *end*, only the bytes before *end* move, unless it is in parts.
        """
        if end is not None:
            if end and not posted.parts:
                part = Part(part_of(posted.transfer.batch, 0, end))
                self._read(part, posted, source)
                self._put(part, posted, target)
            return
        for part in posted.parts or ():
            if part.pieces is None:
                self._read(part, posted, source)
            if not part.landed:
                self._put(part, posted, target)
        if posted.parts:
            return
        batch, label, observer = posted.transfer.batch, posted.transfer.label, self._observer
        if observer is not None:
            observer.read(batch, label)
            observer.landed(batch, label)
        if self._device.holds_bytes:
            copy_bytes(batch, source, target)
