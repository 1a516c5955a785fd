"""What every real endpoint has in common; an engine adds seven methods (`RealEndpoint`, below).

Deadlines, quarantine, withdrawal of memory and loss of peers are decided here, once, because engines leave them out or
get them wrong: no engine's time-out or cancel stops the data, NIXL has no time-out at all and goes on writing into
memory that its owner deregistered, and neither tells a rejected transfer from a dead peer.

The rules:

- A transfer is *moving* until the engine itself says that it is complete, or that it never started.
- The regions of a moving transfer cannot be deregistered, so their memory cannot be freed.
- An owner that deregisters a region tells all who know it.  They refuse new transfers to it, and return it when none is
  moving; until all have, the owner holds the memory.  So even where an engine would still write, nothing else is there.
- The first transfers to a peer wait until it has said what it withdrew since it gave out its address.
- A write to a process that is proven dead has nowhere to land, and settles as soon as the engine has let go of it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
from simpy.events import Event

from backends.base.authentication import Keys
from backends.base.control import Line, Link, fields
from backends.base.deadlines import Deadlines
from backends.base.device import RealBuffer, RealDevice
from backends.base.process_identity import is_dead
from backends.base.state import FORMAT, Address, Entry, Flight, PeerState
from backends.base.tcp_drain import half_open
from backends.base.withdrawal import MEET, RETURN, WELCOME, WITHDRAW, Lending, give_back, withdrawn
from pdsim.clock import Mailbox, WallClock
from pdsim.costs import Engine
from pdsim.errors import (
    InvalidBatch,
    MessageError,
    PeerLost,
    RegistrationError,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.transfer import Batch, Buffer, Notification, Peer, Recorder, Region, Transfer, TransferRecord

__all__ = ["RealEndpoint"]

CONNECT_TIMEOUT = 10.0
"""Seconds that `connect` waits for an answer.  On one host it comes in milliseconds or not at all."""

_ABANDONED: list[RealEndpoint] = []
"""Endpoints closed while bytes were moving: their engines must not be destroyed before the process ends."""

GRACE = 0.25
"""Seconds to wait, after an engine reported a failure, for the news that the peer is gone: the kernel closes the
engine's connections and ours at the same time, but they are looked at by different threads."""

WATCH = 0.02
"""Seconds between two looks for the proof that a peer is quiesced."""

_NOTIFY = b"notify"


class RealEndpoint(ABC):
    """The engine-independent part of an `Endpoint`.

    An engine implements `_attach`, `_pin`, `_unpin`, `_describe`, `_meet`, `_post` and `_detach`, and calls
    `_complete`, `_break`, `_refused` and `_stopped` as its transfers end, on the clock's thread.  Its constructor takes
    what this class takes.  *keys* say which rank this is and who may speak to it, *device* is the memory that buffers
    come from, *bind* the address that sockets listen on.
    """

    kind = ""  # endpoints of different kinds cannot connect
    options: tuple[str, ...] = ()  # of `Engine.options`, those that are no environment variables
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
        self._entries: dict[str, Entry] = {}
        self._peers: dict[bytes, PeerState] = {}  # by token
        self._flights: dict[Flight, None] = {}  # neither complete nor failed
        self._quarantine: dict[Flight, None] = {}  # failed and moving
        self._deadlines = Deadlines(clock, self._flights, self._expire)
        self._epoch = 0
        self._lending = Lending(device)
        self._closed = False
        self._pid = os.getpid()
        self.link = Link(clock, keys, bind, self._handlers(), self._on_lost)
        try:
            self.engine = self._attach()
        except BaseException:
            self.link.close(clean=True)
            raise

    # --- for engines ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _attach(self) -> str:
        """Start the engine; return what it is, as it reports itself.  Raise `BackendUnavailable` if it cannot work."""

    @abstractmethod
    def _pin(self, buffer: RealBuffer) -> Any:
        """Register *buffer* with the engine; return the engine's handle.  Raise a `RegistrationError`."""

    @abstractmethod
    def _unpin(self, entry: Entry) -> None:
        """Undo `_pin`."""

    @abstractmethod
    def _describe(self) -> bytes:
        """Return what the engine's side of a peer needs to know of this one."""

    @abstractmethod
    def _meet(self, description: bytes) -> Any:
        """Return the engine's handle of the peer that *description* describes, whether it was met before or not."""

    @abstractmethod
    def _post(self, flight: Flight) -> None:
        """Hand *flight* to the engine.  Raise a `TransferError` if it was not taken and nothing moves."""

    @abstractmethod
    def _detach(self, idle: bool) -> None:
        """Stop the engine.  Unless *idle*, transfers are moving and what they use must be left alone."""

    def _forget(self, peer: PeerState, region: str) -> None:  # noqa: B027 most engines keep nothing of it
        """Give up what the engine keeps of *region*, which *peer* has withdrawn and nothing of ours moves in."""

    def _drained(self) -> bool:
        """Return whether it is proven that nothing that dead processes have sent is still to be taken in."""
        return not half_open()

    def _handlers(self) -> dict[bytes, Any]:
        return {
            _NOTIFY: self._on_notify,
            MEET: self._on_meet,
            WELCOME: self._on_welcome,
            WITHDRAW: self._on_withdraw,
            RETURN: self._lending.on_return,
        }

    # --- Endpoint: memory -------------------------------------------------------------------------------------------

    @property
    def quarantined(self) -> int:
        """Transfers that failed and may still move bytes."""
        return len(self._quarantine)

    def register(self, buffer: Buffer, name: str) -> Region:
        """Make *buffer* known to the engine; see `pdsim.transfer.Endpoint.register`."""
        self._check_open()
        if name in self._entries:
            raise RegistrationError(f"region name {name!r} is taken on {self.rank}; deregister it or choose another")
        if not isinstance(buffer, RealBuffer) or buffer.freed:
            raise RegistrationError(f"region {name!r}: {buffer!r} is not allocated memory of {self.rank}")
        if buffer.registered:
            raise RegistrationError(f"region {name!r}: the buffer is registered already under another name")
        region = Region(self.rank, name, buffer.size, buffer.address, self.device.name)
        self._entries[name] = Entry(region, buffer, handle=self._pin(buffer))
        buffer.registered = True
        self._epoch += 1
        return region

    def deregister(self, region: Region) -> None:
        """Withdraw *region*, here and from everybody who knows it; see `pdsim.transfer.Endpoint.deregister`."""
        self._check_open()
        entry = self._own(region)
        if entry.moving:
            raise RegistrationError(
                f"region {region.name!r} of {self.rank}: {entry.moving} transfers over it have not settled; "
                f"wait for Transfer.settled"
            )
        self._unpin(entry)
        del self._entries[region.name]
        entry.buffer.registered = False
        self._epoch += 1
        self._lending.withdraw(self.link, region.name, self._epoch, entry.buffer)

    def _own(self, region: Region) -> Entry:
        entry = self._entries.get(region.name)
        if entry is None or (entry.region is not region and entry.region != region):
            raise RegistrationError(f"region {region.owner}/{region.name} is not registered with {self.rank}")
        return entry

    def _check_open(self) -> None:
        if self._closed:
            raise RegistrationError(f"the endpoint of {self.rank} is closed")
        if os.getpid() != self._pid:
            raise RegistrationError(
                f"the endpoint of {self.rank} belongs to process {self._pid}; engines do not survive a fork, so make "
                f"another in the child"
            )

    # --- Endpoint: peers --------------------------------------------------------------------------------------------

    def address(self) -> bytes:
        """Return what a peer needs to reach this endpoint and the regions registered so far."""
        self._check_open()
        regions = [entry.region for entry in self._entries.values()]
        rows = [(region.name, region.size, region.address, region.device) for region in regions]
        return msgspec.msgpack.encode(Address(FORMAT, self.kind, self.link.card, self._epoch, rows, self._describe()))

    def connect(self, address: bytes) -> Peer:
        """Return the peer at *address*; see `pdsim.transfer.Endpoint.connect`."""
        self._check_open()
        try:
            where = msgspec.msgpack.decode(address, type=Address)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferFailed(f"{len(address)} bytes that are not the address of an endpoint: {error}") from None
        if (where.format, where.kind) != (FORMAT, self.kind):
            raise TransferFailed(
                f"the address is of a {where.format} {where.kind} endpoint; this one is {FORMAT} {self.kind}"
            )
        line = self.link.reach(where.card, CONNECT_TIMEOUT)
        state = self._peers.get(where.card.token)
        if state is None:
            state = PeerState(line, self._handle(where.engine), where.epoch)
            self._peers[where.card.token] = state
            self.link.send(line, MEET, str(where.epoch).encode())
        elif where.epoch > state.epoch:
            state.handle, state.epoch = self._handle(where.engine), where.epoch
            state.withdrawn.difference_update(name for name, *_ in where.regions)
        regions = {name: Region(state.name, name, size, at, device) for name, size, at, device in where.regions}
        return Peer(state.name, MappingProxyType(regions), state)

    def _handle(self, description: bytes) -> Any:
        """Do as `_meet` does, with one error for a description that the engine cannot read."""
        try:
            return self._meet(description)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferFailed(f"no description of a {self.kind} endpoint: {error}") from None

    # --- Endpoint: transfers ----------------------------------------------------------------------------------------

    def write(
        self, peer: Peer, batch: Batch, notify: bytes = b"", *, timeout: float | None = None, label: str = ""
    ) -> Transfer:
        """Start to move *batch* to *peer*; see `pdsim.transfer.Endpoint.write`."""
        return self._start("write", peer, batch, batch.source, batch.target, notify, timeout, label)

    def read(self, peer: Peer, batch: Batch, *, timeout: float | None = None, label: str = "") -> Transfer:
        """Start to move *batch* from *peer*; see `pdsim.transfer.Endpoint.read`."""
        return self._start("read", peer, batch, batch.target, batch.source, b"", timeout, label)

    def _start(
        self,
        operation: str,
        peer: Peer,
        batch: Batch,
        local: Region,
        remote: Region,
        notify: bytes,
        timeout: float | None,
        label: str,
    ) -> Flight:
        self._check_open()
        state, entry = self._checked(operation, peer, local, remote), self._own(local)
        seconds = self.settings.timeout if timeout is None else timeout
        if seconds <= 0:
            raise ValueError(f"timeout must be > 0 seconds, got {timeout}")
        flight = Flight(self.clock, batch, label, operation, state, entry, remote, notify, seconds)
        self._flights[flight] = None
        flight.local.moving += 1
        state.moving[remote.name] += 1
        state.waiting.append(flight)
        self.link.poll()  # a withdrawal or a loss that is known already must not be missed
        self._dispatch(state)
        if not flight.triggered:
            self._deadlines.watch(flight)  # last, for the engine is at work by now
        return flight

    def _dispatch(self, state: PeerState) -> None:
        """Hand the transfers that wait for *state* to the engine, or fail them."""
        while state.waiting and (state.welcome or state.line.lost):
            flight = state.waiting.popleft()
            try:
                if state.line.lost:
                    raise PeerLost(f"{state.name} {state.line.lost}")
                if flight.remote.name in state.withdrawn:
                    raise TransferFailed(
                        f"{state.name} has withdrawn region {flight.remote.name!r}; connect to a newer address"
                    )
                self._post(flight)
            except TransferError as error:
                self._break(flight, error, moving=False)

    def _checked(self, operation: str, peer: Peer, local: Region, remote: Region) -> PeerState:
        state = peer.handle
        if not isinstance(state, PeerState) or self._peers.get(state.line.card.token) is not state:
            raise InvalidBatch(f"{peer.name} was not connected by this endpoint of {self.rank}")
        if local.owner != self.rank:
            side = "source" if operation == "write" else "target"
            raise InvalidBatch(f"a {operation}'s {side} must be a region of {self.rank}, got one of {local.owner}")
        known = peer.regions.get(remote.name)
        if known is not remote and known != remote:
            raise InvalidBatch(
                f"region {remote.owner}/{remote.name} is not one of peer {peer.name}, which has "
                f"{', '.join(sorted(peer.regions)) or 'none'}; a region registered later needs a newer address"
            )
        return state

    def quiesced(self, peer: str) -> Event:
        """Return an event that succeeds once *peer* cannot write here; see `pdsim.transfer.Endpoint.quiesced`.

        A dead process starts nothing; what the kernel still has of it has been taken in once none of this process's
        connections has a dead end.
        """
        event = Event(self.clock)
        self._look(peer, event)
        return event

    def _look(self, peer: str, event: Event) -> None:
        if self._closed:
            return
        if self._is_quiesced(peer):
            event.succeed()
        else:
            self._call_at(self.clock.now + WATCH, lambda _: self._look(peer, event))

    def _is_quiesced(self, peer: str) -> bool:
        self.link.poll()
        unclean = [line for line in self.link.known(peer) if not line.closed]
        return not unclean or (all(line.lost and is_dead(line.card.process) for line in unclean) and self._drained())

    # --- how transfers end ------------------------------------------------------------------------------------------

    def _complete(self, flight: Flight, at: float | None = None) -> None:
        """Note that the engine reported *flight* complete, at the time *at* or, if it was asked for, now."""
        seen = self.clock.now
        at = seen if at is None else at
        if flight.triggered:
            self._stopped(flight)
        elif at > flight.deadline:
            self._break(flight, self._too_late(flight), moving=False, at=at)
        else:
            self._end(flight, "ok", at, seen)
            if flight.notify:
                self._announce(flight)
            self._settle(flight)

    def _break(self, flight: Flight, error: TransferError, *, moving: bool, at: float | None = None) -> None:
        """Fail *flight* with *error*, unless it has failed already; *moving* says whether bytes may still move."""
        if not flight.triggered:
            seen = self.clock.now
            self._end(flight, error, seen if at is None else at, seen)
            self._quarantine[flight] = None
        if not moving:
            self._stopped(flight)

    def _refused(self, flight: Flight, text: str, *, moving: bool = True) -> None:
        """Note that the engine has let go of *flight*, failed for whatever reason, and may still be *moving* bytes."""
        line = flight.peer.line

        def decide(_: Event) -> None:
            error = PeerLost(f"{line.name} {line.lost}; {text}") if line.lost else TransferFailed(text)
            gone = bool(line.lost) and flight.operation == "write" and is_dead(line.card.process)
            self._break(flight, error, moving=moving and not gone)

        if line.lost:
            decide(flight)
        else:
            self._call_at(self.clock.now + GRACE, decide)

    def _stopped(self, flight: Flight) -> None:
        """Note that no byte of a failed *flight* moves any more."""
        if flight in self._quarantine:
            del self._quarantine[flight]
            self._settle(flight)

    def _end(self, flight: Flight, result: str | TransferError, at: float, seen: float) -> None:
        del self._flights[flight]
        status = result if isinstance(result, str) else type(result).__name__
        batch = flight.batch
        record = TransferRecord(  # by position: by name it takes three times as long
            self.engine,
            flight.operation,
            batch.source.owner,
            batch.target.owner,
            batch.nbytes,
            len(batch.size),
            flight.submitted,
            flight.prepared,
            flight.posted,
            max(at, flight.posted),  # completed
            max(seen, at),
            status,
            flight.label,
        )
        self.recorder.transfer(record)
        if isinstance(result, str):
            flight.succeed(record)
        else:
            flight.fail(result)

    def _settle(self, flight: Flight) -> None:
        flight.settle()
        flight.local.moving -= 1
        peer = flight.peer
        peer.moving[flight.remote.name] -= 1
        if peer.owed:
            give_back(self.link, peer, self._forget)

    def _announce(self, flight: Flight) -> None:
        """Deliver the notification of a complete transfer; engines with notifications of their own override this."""
        self.link.send(flight.peer.line, _NOTIFY, flight.notify)

    # --- deadlines --------------------------------------------------------------------------------------------------

    def _expire(self, flight: Flight) -> None:
        self._break(flight, self._too_late(flight), moving=not self._recalled(flight))

    def _recalled(self, flight: Flight) -> bool:
        """Return whether *flight* was still waiting, and take it out of the queue."""
        if flight not in flight.peer.waiting:
            return False
        flight.peer.waiting.remove(flight)
        return True

    def _too_late(self, flight: Flight) -> TransferTimeout:
        return TransferTimeout(
            f"{flight.operation} of {flight.batch.nbytes} bytes with {flight.peer.name}: not complete after "
            f"{flight.timeout:g} s; bytes may still move until Transfer.settled"
        )

    def _call_at(self, at: float, function: Any) -> None:
        event = self.clock.at(at)
        assert event.callbacks is not None
        event.callbacks.append(function)

    # --- what peers say ---------------------------------------------------------------------------------------------

    def _on_notify(self, line: Line, body: list[bytes]) -> None:
        if len(body) != 1:
            raise MessageError(f"{len(body)} fields in a notification, need one")
        self.notifications.put(Notification(line.name, body[0]))

    def _on_meet(self, line: Line, body: list[bytes]) -> None:
        self.link.send(line, WELCOME, *self._lending.since(*fields(body, int)))

    def _on_welcome(self, line: Line, body: list[bytes]) -> None:
        state = self._peers.get(line.card.token)
        if state is None:
            raise MessageError("a welcome that nobody asked for")
        state.welcome = True
        state.withdrawn.update(fields(body, *[str] * len(body)))
        self._dispatch(state)

    def _on_withdraw(self, line: Line, body: list[bytes]) -> None:
        name, epoch = withdrawn(body)
        state = self._peers.get(line.card.token)
        if state is None:
            self.link.send(line, RETURN, *body)
            return
        if epoch > state.epoch:
            state.withdrawn.add(name)
        state.owed.append((name, epoch))
        give_back(self.link, state, self._forget)

    def _on_lost(self, line: Line) -> None:
        self._lending.on_lost(line)
        for flight in tuple(self._flights):
            if flight.peer.line is line:
                self._break(flight, PeerLost(f"{line.name} {line.lost}"), moving=not self._recalled(flight))

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back; see `pdsim.transfer.Endpoint.close`.

        Memory of transfers that have not settled is never given back: the engine may still use it.
        """
        if self._closed:
            return
        for flight in tuple(self._flights):
            error = TransferFailed(f"the endpoint of {self.rank} was closed")
            self._break(flight, error, moving=not self._recalled(flight))
        idle = not self._quarantine
        for entry in self._entries.values():
            if entry.moving:
                self.device.hold(entry.buffer)
            else:
                self._unpin(entry)
            entry.buffer.registered = False
        self._closed = True
        self._entries.clear()
        self._detach(idle)
        if not idle:
            _ABANDONED.append(self)
        self.link.close(clean=idle)
        if idle:
            self._lending.close()
