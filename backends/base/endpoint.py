# SPDX-License-Identifier: Apache-2.0
"""The base of all real endpoints; an engine adds seven methods (`RealEndpoint`, below).

Deadlines, quarantine, withdrawal of memory and loss of peers are decided here, because engines leave them out or get
them wrong: no time-out or cancel of an engine stops the data, NIXL goes on writing into deregistered memory, and
neither it nor Mooncake tells a rejected transfer from a dead peer.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
from simpy.events import Event

from backends.base.control import Control, Handler, PeerLine, fields
from backends.base.device import RealBuffer, RealDevice
from backends.base.processes import half_open, is_dead, when_dead
from backends.base.transfers import FORMAT, Address, Entry, PeerState, PostedTransfer
from backends.base.zmq_channel import Keys
from pdsim.core.clock import Mailbox, WallClock
from pdsim.core.errors import (
    InvalidBatch,
    MessageError,
    PeerLost,
    RegistrationError,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.hardware.costs import Engine
from pdsim.transfer import (
    Batch,
    Buffer,
    Notification,
    Peer,
    Recorder,
    Region,
    Transfer,
    TransferRecord,
    Writes,
    WriteSequence,
    check_sides,
)

_ABANDONED: list[RealEndpoint] = []  # closed while bytes moved: their engines must live as long as the process

GRACE = 0.25
"""Seconds to wait, after an engine reported a failure, for the news that the peer is gone: the kernel closes both
connections at the same time, but different threads look at them."""
WATCH = 0.02  # seconds between two looks for the proof that a peer is quiesced
CONNECT_TIMEOUT = 10.0  # seconds that `connect` waits for an answer, which on one host takes milliseconds

_NOTIFY, _WITHDRAW, _RETURN, _CONNECTED, _WITHDRAWN = b"notify", b"withdraw", b"return", b"connected", b"withdrawn"


class _TransferAccount:
    """Where each transfer of *endpoint* stands.

    A transfer is recorded once, when it completes or fails, and settled once, when nothing of it moves any more: its
    regions and its peer count it until then, and memory with such a count is not freed.
    """

    def __init__(self, endpoint: RealEndpoint) -> None:
        self.under_way: dict[PostedTransfer, None] = {}  # neither complete nor failed, in the order of their start
        self.quarantine: dict[PostedTransfer, None] = {}  # failed, and bytes may still move
        self._endpoint, self._clock = endpoint, endpoint.clock
        self._next_check = math.inf  # the earliest deadline for which a check is scheduled

    def open(self, transfer: PostedTransfer) -> None:
        self.under_way[transfer] = None
        transfer.local.moving += 1
        transfer.peer.moving[transfer.remote.name] += 1
        transfer.peer.waiting.append(transfer)

    def dispatch(self, peer: PeerState) -> None:
        """Post the transfers that wait for *peer*, or fail them."""
        while peer.waiting and (peer.answered or peer.line.lost):
            transfer = peer.waiting.popleft()
            try:
                if peer.line.lost:
                    raise PeerLost(f"{peer.name} {peer.line.lost}")
                if transfer.remote.name in peer.withdrawn:
                    raise TransferFailed(
                        f"{peer.name} has withdrawn region {transfer.remote.name!r}; connect to a newer address"
                    )
                self._endpoint.post(transfer)
            except TransferError as error:
                self.fail(transfer, error, moving=False)

    def complete(self, transfer: PostedTransfer, at: float | None) -> None:
        seen = self._clock.now
        at = seen if at is None else at
        if transfer.triggered:
            self.quiesce(transfer)
        elif at > transfer.deadline:
            self.fail(transfer, _too_late(transfer), moving=False, at=at)
        else:
            self._conclude(transfer, "ok", at, seen)
            if transfer.notify:
                self._endpoint.notify(transfer)
            self._settle(transfer)

    def fail(self, transfer: PostedTransfer, error: TransferError, *, moving: bool, at: float | None = None) -> None:
        if not transfer.triggered:
            seen = self._clock.now
            self._conclude(transfer, error, seen if at is None else at, seen)
            self.quarantine[transfer] = None
        if not moving:
            self.quiesce(transfer)

    def give_up(self, transfer: PostedTransfer, error: TransferError) -> None:
        """Fail *transfer*; if it was posted, its bytes may still move."""
        waiting = transfer.peer.waiting
        posted = transfer not in waiting
        if not posted:
            waiting.remove(transfer)
        self.fail(transfer, error, moving=posted)

    def quiesce(self, transfer: PostedTransfer) -> None:
        if transfer in self.quarantine:
            del self.quarantine[transfer]
            self._settle(transfer)

    def watch(self, deadline: float) -> None:
        """Have transfers checked at *deadline*; free if an earlier check is scheduled already."""
        if deadline < self._next_check:
            self._next_check = deadline
            self._clock.call_at(deadline, self._check, None)

    def _check(self, _: None) -> None:
        # Transfers seldom last until a check, so there are few to ask.
        self._next_check, now = math.inf, self._clock.now
        due = [transfer for transfer in self.under_way if transfer.deadline <= now]
        for transfer in sorted(due, key=lambda transfer: transfer.deadline):
            self.give_up(transfer, _too_late(transfer))
        if self.under_way:
            self.watch(min(transfer.deadline for transfer in self.under_way))

    def _settle(self, transfer: PostedTransfer) -> None:
        transfer.settle()
        transfer.local.moving -= 1
        transfer.peer.moving[transfer.remote.name] -= 1
        if transfer.peer.owed:
            self._endpoint.known.return_regions(transfer.peer)

    def _conclude(self, transfer: PostedTransfer, result: str | TransferError, at: float, seen: float) -> None:
        del self.under_way[transfer]
        batch = transfer.batch
        record = TransferRecord(  # by position: by name it takes three times as long
            self._endpoint.engine,
            transfer.operation,
            batch.source.owner,
            batch.target.owner,
            batch.nbytes,
            len(batch.size),
            transfer.submitted,
            transfer.prepared,
            transfer.posted,
            max(at, transfer.posted),  # completed
            max(seen, at),
            result if isinstance(result, str) else type(result).__name__,
            transfer.label,
        )
        self._endpoint.recorder.transfer(record)
        if isinstance(result, str):
            transfer.succeed(record)
        else:
            transfer.fail(result)


def _too_late(transfer: PostedTransfer) -> TransferTimeout:
    return TransferTimeout(
        f"{transfer.operation} of {transfer.batch.nbytes} bytes with {transfer.peer.name}: not complete after "
        f"{transfer.timeout:g} s; bytes may still move until Transfer.settled"
    )


class _KnownPeers:
    """The peers of *endpoint*, by the token of their incarnation, and who may still write to withdrawn memory.

    An address is a snapshot, counted by its epoch.  Whoever connects says `_CONNECTED` with that epoch; the owner
    answers `_WITHDRAWN` with the names that it withdrew since, with all if that address is `void` for the peer.
    Until that has come, transfers to the peer wait.
    From then on the owner tells of each further one with `_WITHDRAW`, and a borrower answers `_RETURN` once none of
    its transfers moves there.  The device holds the memory until all have.  One that is lost without a goodbye never
    returns anything, so that memory stays held until `close`.
    """

    def __init__(self, endpoint: RealEndpoint) -> None:
        self.by_token: dict[bytes, PeerState] = {}
        self._endpoint = endpoint
        self._withdrawn: dict[str, int] = {}  # the epoch in which a region was last withdrawn, by name
        self._lent: dict[tuple[str, int], tuple[RealBuffer, set[bytes]]] = {}  # by name and epoch: memory, tokens
        self._void: dict[str, int] = {}  # by rank: addresses up to this epoch do not let it connect any more

    def connect(self, address: bytes) -> Peer:
        endpoint, kind = self._endpoint, self._endpoint.kind
        try:
            where = msgspec.msgpack.decode(address, type=Address)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferFailed(f"{len(address)} bytes that are not the address of an endpoint: {error}") from None
        if (where.format, where.kind) != (FORMAT, kind):
            raise TransferFailed(
                f"the address is of a {where.format} {where.kind} endpoint; this one is {FORMAT} {kind}"
            )
        line = endpoint.control.reach(where.card, CONNECT_TIMEOUT)
        state = self.by_token.get(where.card.token)
        if state is None or where.epoch > state.epoch:
            try:
                handle = endpoint.connect_engine(where.engine)
            except (msgspec.MsgspecError, ValueError) as error:
                raise TransferFailed(f"no description of a {kind} endpoint: {error}") from None
            if state is None:
                state = self.by_token[where.card.token] = PeerState(line, handle, where.epoch)
                endpoint.control.send(line, _CONNECTED, str(where.epoch).encode())
            else:
                state.handle, state.epoch = handle, where.epoch
                state.withdrawn.difference_update(name for name, *_ in where.regions)
        regions = {name: Region(state.name, name, size, at, device) for name, size, at, device in where.regions}
        return Peer(state.name, MappingProxyType(regions), state)

    def state(self, peer: Peer) -> PeerState:
        state = peer.handle
        if not isinstance(state, PeerState) or self.by_token.get(state.line.card.token) is not state:
            raise InvalidBatch(f"{peer.name} was not connected by this endpoint of {self._endpoint.rank}")
        return state

    def void(self, name: str, epoch: int) -> None:
        """Refuse rank *name* up to *epoch*, and tell it that all regions are withdrawn."""
        self._void[name] = epoch

    def is_quiesced(self, name: str) -> bool:
        """Return whether it is proven that no incarnation of rank *name* can write here any more.

        Each has said goodbye with nothing under way, or its process is dead and nothing of it is still to come.
        """
        self._endpoint.control.poll()
        unclean = [line for line in self._endpoint.control.known(name) if not line.closed]
        dead = all(line.lost and is_dead(line.card.process) for line in unclean)
        return not unclean or (dead and self._endpoint.inbound_drained())

    def withdraw(self, name: str, epoch: int, buffer: RealBuffer) -> None:
        """Tell all who know region *name* that it is gone since *epoch*; hold its memory until they return it."""
        self._withdrawn[name] = epoch
        if lines := self._endpoint.control.lines:
            self._lent[name, epoch] = (buffer, {line.card.token for line in lines})
            self._endpoint.device.hold(buffer)
        for line in lines:
            self._endpoint.control.send(line, _WITHDRAW, name.encode(), str(epoch).encode())

    def return_regions(self, state: PeerState) -> None:
        """Return to *state*'s endpoint the withdrawn regions that no transfer of ours uses."""
        for name, epoch in tuple(state.owed):
            if not state.moving[name]:
                state.owed.remove((name, epoch))
                self._endpoint.forget_region(state, name)
                self._endpoint.control.send(state.line, _RETURN, name.encode(), str(epoch).encode())

    def close(self) -> None:
        """Release everything: the engine is gone, and nobody can write through it any more."""
        for buffer, _ in self._lent.values():
            self._endpoint.device.release(buffer)
        self._lent.clear()

    # --- notes of peers --------------------------------------------------------------------------------------------

    def on_notify(self, line: PeerLine, body: list[bytes]) -> None:
        if len(body) != 1:
            raise MessageError(f"{len(body)} fields in a notification, need one")
        self._endpoint.notifications.put(Notification(line.name, body[0]))

    def on_connected(self, line: PeerLine, body: list[bytes]) -> None:
        (epoch,) = fields(body, int)
        withdrawn = [name for name, when in self._withdrawn.items() if when > epoch]
        if epoch <= self._void.get(line.name, -1):
            withdrawn += self._endpoint.entries
        names = [name.encode() for name in withdrawn]
        self._endpoint.control.send(line, _WITHDRAWN, *names)

    def on_withdrawn(self, line: PeerLine, body: list[bytes]) -> None:
        state = self.by_token.get(line.card.token)
        if state is None:
            raise MessageError("an answer to no question")
        state.answered = True
        state.withdrawn.update(fields(body, *[str] * len(body)))
        self._endpoint.transfers.dispatch(state)

    def on_withdraw(self, line: PeerLine, body: list[bytes]) -> None:
        name, epoch = fields(body, str, int)
        state = self.by_token.get(line.card.token)
        if state is None:
            self._endpoint.control.send(line, _RETURN, *body)
            return
        if epoch > state.epoch:
            state.withdrawn.add(name)
        state.owed.append((name, epoch))
        self.return_regions(state)

    def on_return(self, line: PeerLine, body: list[bytes]) -> None:
        name, epoch = fields(body, str, int)
        self._take_back((name, epoch), line)

    def on_lost(self, line: PeerLine) -> None:
        for key in tuple(self._lent) if line.closed else ():  # it left in order: nothing of it is under way
            self._take_back(key, line)

    def _take_back(self, key: tuple[str, int], line: PeerLine) -> None:
        buffer, holders = self._lent.get(key, (None, set()))
        holders.discard(line.card.token)
        if buffer is not None and not holders:
            del self._lent[key]
            self._endpoint.device.release(buffer)


class RealEndpoint(ABC):
    """Base of each `Endpoint` on a real engine, in pdsim and in other packages.

    An engine is a library that registers memory, reaches a peer and moves blocks.  It adds seven methods, which are
    short and never wait.  They are called on the clock's thread, in this order: `start_engine` once; `pin` and
    `unpin` for each region; `engine_address` whenever an address is asked for; `connect_engine` for each address of
    a peer; `post` for each transfer; `stop_engine` once.

    *keys* say which rank this is and who may speak to it, *device* is the memory that buffers come from, *bind* the
    address that sockets listen on, *posting* that of `pdsim.transfer.job.RankSpec`.

    As a transfer passes through the states of `pdsim.transfer.Transfer`, the engine calls `complete`, `fail` or
    `engine_failed`, and `quiesce`, on the clock's thread.  It learns of an end by polling as a source of the clock
    (`pdsim.core.clock.WallClock.watch`) or from a thread that calls `WallClock.call`.
    """

    kind = ""  # endpoints of different kinds cannot connect
    proves_quiescence = True  # nobody can see into a network card or shared memory: False there
    options: tuple[str, ...] = ()  # those of `Engine.options` that are no environment variables
    variants: ClassVar[tuple[Any, ...]] = ()  # a `backends.capabilities.Variant` for each backend

    def __init__(
        self,
        *,
        keys: Keys,
        clock: WallClock,
        device: RealDevice,
        engine: Engine,
        recorder: Recorder,
        bind: str = "127.0.0.1",
        posting: int | None = None,
    ) -> None:
        self.rank = keys.name
        self.posting = posting
        self.clock = clock
        self.device = device
        self.settings = engine
        self.recorder = recorder
        self.bind = bind
        self.engine = ""
        self.notifications = Mailbox(clock)
        self.entries: dict[str, Entry] = {}  # the regions, by name
        self.closed = False
        self.transfers = _TransferAccount(self)
        self.known = _KnownPeers(self)
        self.handlers: dict[bytes, Handler] = {  # of notes of peers, by kind; `start_engine` may add some
            _NOTIFY: self.known.on_notify,
            _CONNECTED: self.known.on_connected,
            _WITHDRAWN: self.known.on_withdrawn,
            _WITHDRAW: self.known.on_withdraw,
            _RETURN: self.known.on_return,
        }
        self._epoch = 0
        self._pid = os.getpid()
        self.control = Control(clock, keys, bind, self.handlers, self.on_lost)
        try:
            self.engine = self.start_engine()
        except BaseException:
            self.control.close(clean=True)
            raise

    # --- what an engine adds ---------------------------------------------------------------------------------------

    @abstractmethod
    def start_engine(self) -> str:
        """Start the engine; return what it reports itself to be.  Raise `BackendUnavailable` if it cannot work."""

    @abstractmethod
    def pin(self, buffer: RealBuffer) -> Any:
        """Register *buffer* with the engine; return its handle, for `Entry.handle`.  Raise a `RegistrationError`."""

    @abstractmethod
    def unpin(self, entry: Entry) -> None:
        """Undo `pin`; no transfer of this rank uses *entry* any more.

        A peer may not have heard yet that the region is gone; the memory stays held until all have returned it.
        """

    @abstractmethod
    def engine_address(self) -> bytes:
        """Return what the engine of a peer needs to know of this one, for its `connect_engine`.

        Asked for anew with each address, since some engines describe the regions that are registered by then.
        """

    @abstractmethod
    def connect_engine(self, description: bytes) -> Any:
        """Return the engine's handle, for `PeerState.handle`, of the peer that *description* describes.

        The peer may be known already.  Raise a `ValueError` for bytes that are no description, and a `TransferError`
        if the peer cannot be reached.
        """

    @abstractmethod
    def post(self, transfer: PostedTransfer) -> None:
        """Hand *transfer* to the engine.  Raise a `TransferError` if it was not taken and nothing moves.

        Set `prepared` and `posted` of the transfer, in seconds on the clock, where the engine's call has stages;
        keep what it takes to recognise it in `handle`.  Must not block: the clock's thread serves all transfers.
        """

    @abstractmethod
    def stop_engine(self, idle: bool) -> None:
        """Stop the engine.  Unless *idle*, transfers are moving and what they use must be left alone."""

    # --- what some engines do otherwise ----------------------------------------------------------------------------

    def forget_region(self, peer: PeerState, region: str) -> None:  # noqa: B027 most engines keep nothing of it
        """Drop what the engine keeps of *region*, which *peer* has withdrawn and no transfer of ours uses."""

    def inbound_drained(self) -> bool:
        """Return whether it is proven that no data of dead processes is still to be received."""
        return self.proves_quiescence and not half_open()

    def fileno(self) -> int | None:
        return None  # an engine that is a source of the clock has no descriptor, and is polled

    def notify(self, transfer: PostedTransfer) -> None:
        """Deliver the notification of a complete transfer; engines with notifications of their own override this."""
        self.control.send(transfer.peer.line, _NOTIFY, transfer.notify)

    def on_lost(self, line: PeerLine) -> None:
        """Fail what is under way with the peer of *line*, which is gone; an engine may do more."""
        self.known.on_lost(line)
        for transfer in tuple(self.transfers.under_way):
            if transfer.peer.line is line:
                self.transfers.give_up(transfer, PeerLost(f"{line.name} {line.lost}"))

    # --- how transfers end -----------------------------------------------------------------------------------------

    def complete(self, transfer: PostedTransfer, at: float | None = None) -> None:
        """Note that the engine reported *transfer* complete, at the time *at* or, if it was asked for, now.

        A transfer that has failed before, by its deadline or the loss of its peer, is quiesced by it; one that ended
        after its deadline fails.
        """
        self.transfers.complete(transfer, at)

    def fail(self, transfer: PostedTransfer, error: TransferError, *, moving: bool) -> None:
        """Fail *transfer* with *error*, unless it has failed already; *moving* says whether bytes may still move."""
        self.transfers.fail(transfer, error, moving=moving)

    def quiesce(self, transfer: PostedTransfer) -> None:
        """Note that no byte of a failed *transfer* moves any more."""
        self.transfers.quiesce(transfer)

    def engine_failed(self, transfer: PostedTransfer, text: str, *, moving: bool = True) -> None:
        """Fail *transfer*, which the engine has let go of with *text*; *moving* says whether bytes may still move.

        Waits `GRACE` seconds for the news that the peer is gone, to decide between `PeerLost` and `TransferFailed`.
        A write to a process that is proven dead has nowhere to land, and is quiesced by that.
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

    # --- Endpoint: see `pdsim.transfer.Endpoint` -------------------------------------------------------------------

    @property
    def quarantined(self) -> int:
        return len(self.transfers.quarantine)

    def register(self, buffer: Buffer, name: str) -> Region:
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
        self._check_open()
        entry = self._entry(region)
        if entry.moving:
            raise RegistrationError(
                f"region {region.name!r} of {self.rank}: {entry.moving} transfers over it have not settled; "
                f"wait for Transfer.settled"
            )
        self.unpin(entry)
        del self.entries[region.name]
        entry.buffer.registered = False
        self._epoch += 1
        self.known.withdraw(region.name, self._epoch, entry.buffer)

    def _entry(self, region: Region) -> Entry:
        entry = self.entries.get(region.name)
        if entry is None or (entry.region is not region and entry.region != region):
            raise RegistrationError(f"region {region.owner}/{region.name} is not registered with {self.rank}")
        return entry

    def _check_open(self) -> None:
        if self.closed:
            raise RegistrationError(f"the endpoint of {self.rank} is closed")
        if os.getpid() != self._pid:
            raise RegistrationError(
                f"the endpoint of {self.rank} belongs to process {self._pid}; engines do not survive a fork, so "
                f"make another in the child"
            )

    def address(self) -> bytes:
        self._check_open()
        regions = [entry.region for entry in self.entries.values()]
        rows = [(region.name, region.size, region.address, region.device) for region in regions]
        return msgspec.msgpack.encode(
            Address(FORMAT, self.kind, self.control.card, self._epoch, rows, self.engine_address())
        )

    def connect(self, address: bytes) -> Peer:
        self._check_open()
        return self.known.connect(address)

    def write(
        self, peer: Peer, batch: Batch, notify: bytes = b"", *, timeout: float | None = None, label: str = ""
    ) -> Transfer:
        return self._start("write", peer, batch, notify, timeout, label)

    def read(self, peer: Peer, batch: Batch, *, timeout: float | None = None, label: str = "") -> Transfer:
        return self._start("read", peer, batch, b"", timeout, label)

    def write_sequence(self, peer: Peer, parts: Sequence[Writes], times: Sequence[float] = ()) -> WriteSequence:
        return WriteSequence(self.clock, self, peer, parts, times).start()

    def _start(
        self, operation: str, peer: Peer, batch: Batch, notify: bytes, timeout: float | None, label: str
    ) -> PostedTransfer:
        # Everything that a caller can have wrong is refused before the transfer exists.
        self._check_open()
        state = self.known.state(peer)
        local, remote = check_sides(self.rank, peer, batch, write=operation == "write")
        entry = self._entry(local)
        seconds = self.settings.timeout if timeout is None else timeout
        if seconds <= 0:
            raise ValueError(f"timeout must be > 0 seconds, got {timeout}")
        transfer = PostedTransfer(self.clock, batch, label, operation, state, entry, remote, notify, seconds)
        self.transfers.open(transfer)
        self.control.poll()  # a withdrawal or a loss that is known already must not be missed
        self.transfers.dispatch(state)
        if not transfer.triggered:
            self.transfers.watch(transfer.deadline)  # last, for the engine is at work by now
        return transfer

    def quiesced(self, peer: str) -> Event:
        event = self.clock.event()
        self.known.void(peer, self._epoch)
        self._epoch += 1

        def look(_: None) -> None:
            if self.closed:
                return
            if self.known.is_quiesced(peer):
                event.succeed()
            else:
                self.clock.call_at(self.clock.now + WATCH, look, None)

        look(None)
        return event

    def close(self) -> None:
        """Give everything back.

        Memory of transfers that have not settled is never given back: the engine may still use it.
        """
        if self.closed:
            return
        for transfer in tuple(self.transfers.under_way):
            self.transfers.give_up(transfer, TransferFailed(f"the endpoint of {self.rank} was closed"))
        idle = not self.transfers.quarantine
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
            self.known.close()
