# SPDX-License-Identifier: Apache-2.0
"""The base of all real endpoints; an engine adds seven methods (`RealEndpoint`, below).

Deadlines, quarantine, withdrawal of memory and loss of peers are decided here, once, because engines leave them out
or get them wrong: no engine's time-out or cancel stops the data, NIXL has no time-out at all and goes on writing
into memory that its owner deregistered, and neither tells a rejected transfer from a dead peer.

The rules:

- A transfer is *moving* until the engine itself says that it is complete, or that it never started.
- The regions of a moving transfer cannot be deregistered, so their memory cannot be freed.
- An owner that deregisters a region tells all who know it.  They refuse new transfers to it, and return it when none
  is moving; until all have, the owner holds the memory.  So even where an engine would still write, nothing else is
  there.
- The first transfers to a peer wait until it has said what it withdrew since it gave out its address.
- A write to a process that is proven dead has nowhere to land, and settles as soon as the engine has let go of it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec
from simpy.events import Event

from backends.base.control import Control, PeerLine
from backends.base.device import RealBuffer, RealDevice
from backends.base.processes import half_open, when_dead
from backends.base.transfers import (
    CONNECTED,
    FORMAT,
    RETURN,
    WITHDRAW,
    WITHDRAWN,
    Address,
    ConnectedPeers,
    Entry,
    PeerState,
    PostedTransfer,
    TransferAccount,
    Withdrawal,
)
from backends.base.zmq_channel import Keys
from pdsim.core.clock import Mailbox, WallClock
from pdsim.core.errors import MessageError, PeerLost, RegistrationError, TransferError, TransferFailed
from pdsim.hardware.costs import Engine
from pdsim.transfer import (
    Batch,
    Batches,
    Buffer,
    Notification,
    Peer,
    Recorder,
    Region,
    Transfer,
    WriteSequence,
    check_sides,
)

__all__ = ["RealEndpoint"]

_ABANDONED: list[RealEndpoint] = []
"""Endpoints closed while bytes were moving: their engines must not be destroyed before the process ends."""

GRACE = 0.25
"""Seconds to wait, after an engine reported a failure, for the news that the peer is gone: the kernel closes the
engine's connections and ours at the same time, but they are looked at by different threads."""

WATCH = 0.02
"""Seconds between two looks for the proof that a peer is quiesced."""

_NOTIFY = b"notify"


class RealEndpoint(ABC):
    """Base of each `Endpoint` on a real engine, in pdsim and in other packages.

    An engine is a library that registers memory, reaches a peer and moves blocks.  It adds seven methods, which are
    short and never wait.  They are called on the clock's thread, in this order: `start_engine` once; `pin` and
    `unpin` for each region; `engine_address` whenever an address is asked for; `connect_engine` for each address of
    a peer; `post` for each transfer; `stop_engine` once.

    Its constructor takes what this class takes.  *keys* say which rank this is and who may speak to it, *device* is
    the memory that buffers come from, *bind* the address that sockets listen on.  The states of a transfer, and the
    method that an engine calls as it passes from state to state::

                         post() raises
        prepared ───────────────────────────────┐
            │ post()                            │
            ▼          fail(), engine_failed()  ▼
         posted ────────────────────────────► failed
            │         deadline, peer lost       │
            │ complete()                        ├─ bytes may still move ──► quarantined
            ▼                                   │                                │
        completed                               │ nothing moves                  │ quiesce(), complete()
            │                                   ▼                                ▼
            └──────────────────────────────► quiesced ◄──────────────────────────┘

    `Transfer` fires when it is completed or failed, and once more when it is quiesced: then its regions are free.
    The engine calls these on the clock's thread.  It learns of an end by polling as a source of the clock
    (`pdsim.core.clock.WallClock.watch`) or from a thread that calls `WallClock.call`.

    Attributes:
        kind: Names what can talk to each other: endpoints of different kinds cannot connect.
        options: Those of `Engine.options` that are no environment variables; `pdsim doctor` and the
            checks of a run know them by this.
        variants: A `backends.capabilities.Variant` for each backend that this class serves.
        entries: The regions of this endpoint, by name.
        control: Notes to and from the endpoints of peers, beside the engine.
        peers: What is known of each peer, by the token of its incarnation.
    """

    kind = ""
    options: tuple[str, ...] = ()
    variants: ClassVar[tuple[Any, ...]] = ()  # `Variant`s, or records of an engine's own that extend it

    def __init__(
        self,
        *,
        keys: Keys,
        clock: WallClock,
        device: RealDevice,
        engine: Engine,
        recorder: Recorder,
        bind: str = "127.0.0.1",
    ) -> None:
        self.rank = keys.name
        self.clock = clock
        self.device = device
        self.settings = engine
        self.recorder = recorder
        self.bind = bind
        self.notifications = Mailbox(clock)
        self.entries: dict[str, Entry] = {}
        self._transfers = TransferAccount(
            clock, recorder, self.post, lambda peer: self._connected.return_regions(peer)
        )
        self._epoch = 0
        self._withdrawal = Withdrawal(device)
        self.closed = False
        self._pid = os.getpid()
        handlers: dict[bytes, Any] = {}  # filled below, before the first note is taken in
        self.control = Control(clock, keys, bind, handlers, self.on_lost)
        self._connected = ConnectedPeers(
            self.kind, self.connect_engine, self.forget_region, self.control, self._transfers.dispatch
        )
        self.peers = self._connected.by_token
        handlers.update(self.handlers())
        try:
            self.engine = self._transfers.engine = self.start_engine()
        except BaseException:
            self.control.close(clean=True)
            raise

    # --- what an engine adds ---------------------------------------------------------------------------------------

    @abstractmethod
    def start_engine(self) -> str:
        """Start the engine; return what it is, as it reports itself.

        Raise `BackendUnavailable` if it cannot work.
        """

    @abstractmethod
    def pin(self, buffer: RealBuffer) -> Any:
        """Register *buffer* with the engine; return the engine's handle.  Raise a `RegistrationError`.

        The handle is kept in `Entry.handle`, and opaque to everybody else.
        """

    @abstractmethod
    def unpin(self, entry: Entry) -> None:
        """Undo `pin`, with nothing of this rank's moving over *entry* any more.

        A peer may not have heard yet that the region is gone; the memory itself stays held until
        all have returned it.
        """

    @abstractmethod
    def engine_address(self) -> bytes:
        """Return what the engine's side of a peer needs to know of this one.

        Opaque bytes for `connect_engine` of the same kind.  Asked for anew with each address, since
        some engines describe the regions that are registered by then.
        """

    @abstractmethod
    def connect_engine(self, description: bytes) -> Any:
        """Return the engine's handle of the peer that *description* describes, whether it was met before or not.

        It is kept in `PeerState.handle`.  Raise a `ValueError` for bytes that are no description,
        and a `TransferError` if the peer cannot be reached.
        """

    @abstractmethod
    def post(self, transfer: PostedTransfer) -> None:
        """Hand *transfer* to the engine.  Raise a `TransferError` if it was not taken and nothing moves.

        Set `prepared` and `posted` of the transfer, in seconds on the clock, where the engine's
        call has stages; keep what it takes to recognise the transfer in `handle`.  Must not block:
        the clock's thread serves all transfers.
        """

    @abstractmethod
    def stop_engine(self, idle: bool) -> None:
        """Stop the engine.  Unless *idle*, transfers are moving and what they use must be left alone."""

    def forget_region(self, peer: PeerState, region: str) -> None:  # noqa: B027 most engines keep nothing of it
        """Give up what the engine keeps of *region*, which *peer* has withdrawn and nothing of ours moves in."""

    # --- what some engines do otherwise ----------------------------------------------------------------------------

    def inbound_drained(self) -> bool:
        """Return whether it is proven that nothing that dead processes have sent is still to be taken in."""
        return not half_open()

    def handlers(self) -> dict[bytes, Any]:
        """Return what is called with notes of peers, by their kind; an engine may add its own."""
        return {
            _NOTIFY: partial(_on_notify, self.notifications),
            CONNECTED: partial(self._withdrawal.on_connected, self.control),
            WITHDRAWN: self._connected.on_withdrawn,
            WITHDRAW: self._connected.on_withdraw,
            RETURN: self._withdrawal.on_return,
        }

    # --- Endpoint: memory ------------------------------------------------------------------------------------------

    @property
    def quarantined(self) -> int:
        """Transfers that failed and may still move bytes."""
        return len(self._transfers.quarantine)

    def register(self, buffer: Buffer, name: str) -> Region:
        """Make *buffer* known to the engine; see `pdsim.transfer.Endpoint.register`."""
        self._check_open()
        if name in self.entries:
            raise RegistrationError(f"region name {name!r} is taken on {self.rank}; deregister it or choose another")
        if not isinstance(buffer, RealBuffer) or buffer.freed:
            raise RegistrationError(f"region {name!r}: {buffer!r} is not allocated memory of {self.rank}")
        if buffer.registered:
            raise RegistrationError(f"region {name!r}: the buffer is registered already under another name")
        region = Region(self.rank, name, buffer.size, buffer.address, self.device.name)
        self.entries[name] = Entry(region, buffer, handle=self.pin(buffer))
        buffer.registered = True
        self._epoch += 1
        return region

    def deregister(self, region: Region) -> None:
        """Withdraw *region*, here and from everybody who knows it; see `pdsim.transfer.Endpoint.deregister`.

        The engine forgets it at once; its memory stays held by the device until every endpoint that
        knew it has returned it (`backends.base.transfers`).  Raise a `RegistrationError` while
        transfers over it have not settled.
        """
        self._check_open()
        entry = _entry(self.entries, region, self.rank)
        if entry.moving:
            raise RegistrationError(
                f"region {region.name!r} of {self.rank}: {entry.moving} transfers over it have not settled; "
                f"wait for Transfer.settled"
            )
        self.unpin(entry)
        del self.entries[region.name]
        entry.buffer.registered = False
        self._epoch += 1
        self._withdrawal.withdraw(self.control, region.name, self._epoch, entry.buffer)

    def _check_open(self) -> None:
        if self.closed:
            raise RegistrationError(f"the endpoint of {self.rank} is closed")
        if os.getpid() != self._pid:
            raise RegistrationError(
                f"the endpoint of {self.rank} belongs to process {self._pid}; engines do not survive a fork, so "
                f"make another in the child"
            )

    # --- Endpoint: peers -------------------------------------------------------------------------------------------

    def address(self) -> bytes:
        """Return what a peer needs to reach this endpoint and the regions registered so far."""
        self._check_open()
        regions = [entry.region for entry in self.entries.values()]
        rows = [(region.name, region.size, region.address, region.device) for region in regions]
        return msgspec.msgpack.encode(
            Address(FORMAT, self.kind, self.control.card, self._epoch, rows, self.engine_address())
        )

    def connect(self, address: bytes) -> Peer:
        """Return the peer at *address*; see `pdsim.transfer.Endpoint.connect`."""
        self._check_open()
        return self._connected.connect(address)

    # --- Endpoint: transfers ---------------------------------------------------------------------------------------

    def write(
        self, peer: Peer, batch: Batch, notify: bytes = b"", *, timeout: float | None = None, label: str = ""
    ) -> Transfer:
        """Start to move *batch* to *peer*; see `pdsim.transfer.Endpoint.write`."""
        return self._start("write", peer, batch, notify, timeout, label)

    def read(self, peer: Peer, batch: Batch, *, timeout: float | None = None, label: str = "") -> Transfer:
        """Start to move *batch* from *peer*; see `pdsim.transfer.Endpoint.read`."""
        return self._start("read", peer, batch, b"", timeout, label)

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
        return WriteSequence(self.clock, self, peer, batches, notify, label, progress).start()

    def _start(
        self,
        operation: str,
        peer: Peer,
        batch: Batch,
        notify: bytes,
        timeout: float | None,
        label: str,
    ) -> PostedTransfer:
        # What `write` and `read` have in common.  Everything that a caller can have wrong is refused
        # before the transfer exists.
        self._check_open()
        state = self._connected.state(peer)
        local, remote = check_sides(self.rank, peer, batch, write=operation == "write")
        entry = _entry(self.entries, local, self.rank)
        seconds = self.settings.timeout if timeout is None else timeout
        if seconds <= 0:
            raise ValueError(f"timeout must be > 0 seconds, got {timeout}")
        transfer = PostedTransfer(self.clock, batch, label, operation, state, entry, remote, notify, seconds)
        self._transfers.open(transfer)
        self.control.poll()  # a withdrawal or a loss that is known already must not be missed
        self._transfers.dispatch(state)
        if not transfer.triggered:
            self._transfers.watch(transfer)  # last, for the engine is at work by now
        return transfer

    def quiesced(self, peer: str) -> Event:
        """Return an event that succeeds once *peer* cannot write here; see `pdsim.transfer.Endpoint.quiesced`.

        A dead process starts nothing; what the kernel still has of it has been taken in once none of this process's
        connections has a dead end.
        """
        event = self.clock.event()

        def look(_: None) -> None:
            if self.closed:
                return
            if self._connected.is_quiesced(peer, self.inbound_drained):
                event.succeed()
            else:
                self.clock.call_at(self.clock.now + WATCH, look, None)

        look(None)
        return event

    # --- how transfers end -----------------------------------------------------------------------------------------

    def complete(self, transfer: PostedTransfer, at: float | None = None) -> None:
        """Note that the engine reported *transfer* complete, at the time *at* or, if it was asked for, now.

        The engine's word is the only one that counts: a transfer that has failed before, by its
        deadline or the loss of its peer, is quiesced by it, and one that ended after its deadline
        fails.
        """
        if self._transfers.complete(transfer, at):
            if transfer.notify:
                self.notify(transfer)
            self._transfers.settle(transfer)

    def fail(self, transfer: PostedTransfer, error: TransferError, *, moving: bool) -> None:
        """Fail *transfer* with *error*, unless it has failed already; *moving* says whether bytes may still move."""
        self._transfers.fail(transfer, error, moving=moving)

    def engine_failed(self, transfer: PostedTransfer, text: str, *, moving: bool = True) -> None:
        """Fail *transfer*, which the engine has let go of with *text*.

        *moving* says whether bytes may still move.  The news that the peer is gone may come a
        moment later than the engine's error, so the endpoint waits `GRACE` seconds before it
        decides between `PeerLost` and `TransferFailed`.
        """
        line = transfer.peer.line

        def decide(_: None) -> None:
            error = PeerLost(f"{line.name} {line.lost}; {text}") if line.lost else TransferFailed(text)
            self.fail(transfer, error, moving=moving)
            if transfer.operation == "write":
                when_dead(self.clock, line.card.process, lambda: self.quiesce(transfer))

        if line.lost:
            decide(None)
        else:
            self.clock.call_at(self.clock.now + GRACE, decide, None)

    def quiesce(self, transfer: PostedTransfer) -> None:
        """Note that no byte of a failed *transfer* moves any more."""
        self._transfers.quiesce(transfer)

    def notify(self, transfer: PostedTransfer) -> None:
        """Deliver the notification of a complete transfer; engines with notifications of their own override this."""
        self.control.send(transfer.peer.line, _NOTIFY, transfer.notify)

    def on_lost(self, line: PeerLine) -> None:
        """Fail what is under way with the peer of *line*, which is gone; an engine may do more."""
        self._withdrawal.on_lost(line)
        for transfer in tuple(self._transfers.under_way):
            if transfer.peer.line is line:
                self._transfers.give_up(transfer, PeerLost(f"{line.name} {line.lost}"))

    # --- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back; see `pdsim.transfer.Endpoint.close`.

        Memory of transfers that have not settled is never given back: the engine may still use it.
        """
        if self.closed:
            return
        for transfer in tuple(self._transfers.under_way):
            self._transfers.give_up(transfer, TransferFailed(f"the endpoint of {self.rank} was closed"))
        idle = not self._transfers.quarantine
        for entry in self.entries.values():
            if entry.moving:
                self.device.hold(entry.buffer)
            else:
                self.unpin(entry)
            entry.buffer.registered = False
        self.closed = True
        self.entries.clear()
        self.stop_engine(idle)
        if not idle:
            _ABANDONED.append(self)
        self.control.close(clean=idle)
        if idle:
            self._withdrawal.close()


def _entry(entries: Mapping[str, Entry], region: Region, rank: str) -> Entry:
    entry = entries.get(region.name)
    if entry is None or (entry.region is not region and entry.region != region):
        raise RegistrationError(f"region {region.owner}/{region.name} is not registered with {rank}")
    return entry


def _on_notify(notifications: Mailbox, line: PeerLine, body: list[bytes]) -> None:
    if len(body) != 1:
        raise MessageError(f"{len(body)} fields in a notification, need one")
    notifications.put(Notification(line.name, body[0]))
