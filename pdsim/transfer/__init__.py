# SPDX-License-Identifier: Apache-2.0
"""The common transfer interface: the waist of pdsim, below it a SimPy model (`pdsim.sim`) and real engines.

A rank's program is a generator that is given a `pdsim.transfer.job.Rank` and yields events.  Times are seconds on
the rank's clock, sizes bytes, offsets bytes from the start of a region.  Nothing here knows of requests, rooms,
pages or layers, which engine runs, or whether time is virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, cast

from simpy.events import Event

from pdsim.core.clock import Clock, Mailbox, fire
from pdsim.transfer.batch import Batch, Buffer, Peer, Region, Transfer, TransferRecord, check_sides

__all__ = [
    "Batch", "Batches", "Buffer", "Channel", "Device", "Endpoint", "Message", "Notification", "Peer", "Program",
    "Recorder", "Region", "Spill", "Transfer", "TransferRecord", "WriteSequence", "Writes", "check_sides",
]  # fmt: skip

Program = Generator[Event, Any, Any]


class Device(Protocol):
    """One GPU, or the host: memory of limited capacity, and the time that work on it takes."""

    @property
    def name(self) -> str:
        """Such as ``"cpu"``, ``"cuda:0"`` or, on the model, ``"node0/gpu3"``."""

    @property
    def capacity(self) -> int:
        """Bytes that can be allocated in all."""

    @property
    def used(self) -> int:
        """Bytes that are allocated now, those in quarantine included."""

    @property
    def holds_bytes(self) -> bool:
        """Whether buffers have contents; on the model only with ``memory=tracked``."""

    def allocate(self, size: int, pool: str = "default") -> Buffer:
        """Return a buffer of *size* > 0 bytes, zeroed.  Raise `OutOfMemory` if the device or the pool is full.

        Pool ``"symmetric"`` has the memory that `Group.reserve` gave it, and none before.
        """

    def free(self, buffer: Buffer) -> None:
        """Give *buffer* back.  Raise a `RegistrationError` while it is registered with an endpoint."""

    def copy(self, batch: Batch) -> Event:
        """Copy within the device, as a gather or scatter kernel does; both regions of *batch* lie on it.

        They need not be registered: see `Region.local`.  The event succeeds when the bytes are there; copies may end
        in any order.  Raise `InvalidBatch` if a region is not on this device, a `RegistrationError` if its buffer
        was freed.
        """

    def compute(self, seconds: float) -> Event:
        """Occupy the device for *seconds*, after all work asked for before; return an event for its end.

        On real targets it is a wait: computation is emulated, and transfers go on meanwhile.
        """


class Batches(Protocol):
    """Batches by number, from 0: a list of them, or what makes each when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Batch: ...


class Writes(NamedTuple):
    """Part of a `WriteSequence`: batches of as many descriptors and bytes each, each written with *notify*.

    *labels* has one for each batch, if they differ.
    ``progress(writes, nbytes)`` is called with those that have completed since the last call, and their bytes.
    """

    batches: Batches
    notify: bytes = b""
    label: str = ""
    progress: Callable[[int, int], None] | None = None
    labels: Sequence[str] = ()


class WriteSequence(Event):
    """Writes to one peer, each posted when the one before is complete: the event of `Endpoint.write_sequence`.

    They are those of *parts*, which have equally many batches and take turns.  With *times*, in seconds on *clock*,
    one for each turn, none is posted before its own.  Succeeds with how many writes are complete: all, or fewer
    after `stop`.  Fails with the error of the first write that fails, and posts no more; *failed* is that write,
    whose `Transfer.settled` says when nothing of it moves any more, or None if it could not be posted.  *done* says
    how many are over so far: complete, or left out.

    This class is a loop over `Endpoint.write`.  An endpoint that knows more about its writes may derive from it.
    """

    def __init__(
        self, clock: Clock, endpoint: Endpoint, peer: Peer, parts: Sequence[Writes], times: Sequence[float] = ()
    ) -> None:
        super().__init__(cast(Any, clock))
        self._defused = True  # as a `Transfer`: a failure that nobody waits for does not end the run
        self._clock = clock
        self.done = 0
        self.failed: Transfer | None = None
        self._complete = 0
        self._endpoint = endpoint
        self._peer = peer
        self._parts = parts
        self._times = times
        self._total = len(parts) * len(parts[0].batches)
        self._left = dict.fromkeys(range(len(parts)))  # parts that have not been stopped
        self._waits = False  # for the time of the next write

    def start(self) -> WriteSequence:
        """Post the first write, and return this; for endpoints.  Raise what `Endpoint.write` raises."""
        self._next()
        return self

    def stop(self, part: int = 0) -> None:
        """Stop *part* after the write that is under way."""
        self._left.pop(part, None)
        if self._waits:
            self._wait_until(self._clock.now)

    def retime(self, times: Sequence[float]) -> None:
        """Post the remaining writes at *times*; those that have been posted or are beyond *times* keep theirs."""
        self._times = [*times, *self._times[len(times) :]]
        if self._waits:
            self._wait_until(self._clock.now)

    def _wait_until(self, at: float) -> None:
        self._waits = True
        self._clock.call_at(at, self._on_time, self.done)

    def _on_time(self, done: int) -> None:
        if self._waits and done == self.done:  # else it was stopped before
            self._waits = False
            self._go_on()

    def _go_on(self) -> None:
        try:
            self._next()
        except Exception as error:  # what `write` refuses
            fire(self, error, ok=False)

    def _next(self) -> None:
        parts, left = self._parts, self._left
        while left and self.done < self._total and self.done % len(parts) not in left:
            self.done += 1
        if not left or self.done == self._total:
            fire(self, self._complete)
            return
        number, part = divmod(self.done, len(parts))
        if self._times and self._times[number] > self._clock.now:
            self._wait_until(self._times[number])
            return
        batches, notify, label, _, labels = parts[part]
        label = labels[number] if labels else label
        self._follow(self._endpoint.write(self._peer, batches[number], notify, label=label))

    def _follow(self, transfer: Transfer) -> None:
        if transfer.callbacks is None:  # it has ended at once
            self._on_end(transfer)
        else:
            transfer.callbacks.append(self._on_end)

    def _on_end(self, transfer: Event) -> None:
        assert isinstance(transfer, Transfer)
        if not transfer.ok:
            self.failed = transfer
            fire(self, transfer.value, ok=False)
            return
        part = self.done % len(self._parts)
        self.done += 1
        self._count(part, 1, transfer.batch.nbytes)
        self._go_on()

    def _count(self, part: int, writes: int, nbytes: int) -> None:
        self._complete += writes
        progress = self._parts[part].progress
        if progress is not None:
            progress(writes, nbytes)


class Notification(NamedTuple):
    """What a writer attached to a transfer.  Arrives exactly once, after the transfer's bytes.

    Equal notifications of one sender that follow each other may arrive as one, for as many *times* transfers.
    """

    sender: str  # rank
    payload: bytes
    times: int = 1


class Endpoint(Protocol):
    """One rank's way to move bytes.

    In this order: `register` buffers, send `address` to peers over the channel, `connect` to theirs, then `write`
    and `read` as often as wanted, and `close`.  Only the side that posts connects; its peer learns of what it does
    by notifications.  Transfers to one peer may overlap and complete in any order; notifications of transfers that
    were posted one after the other's completion arrive in that order, and no other order is promised.
    """

    @property
    def engine(self) -> str:
        """The engine's name of the transport in use, which may differ from the one asked for."""

    @property
    def notifications(self) -> Mailbox:
        """The `Notification`s of peers, in order of arrival."""

    @property
    def quarantined(self) -> int:
        """Transfers of this endpoint that failed and have not settled."""

    def register(self, buffer: Buffer, name: str) -> Region:
        """Make *buffer* known to the engine as region *name*.

        Raise a `RegistrationError` if the name is taken, the buffer registered already, or the engine refuses it.
        """

    def deregister(self, region: Region) -> None:
        """Withdraw *region*.

        Raise a `RegistrationError` if it is not registered or if a transfer over it has not settled.
        """

    def address(self) -> bytes:
        """Return what a peer needs to reach this endpoint and the regions registered so far; opaque.

        Send it over the channel.  Regions registered later need a new one.
        """

    def connect(self, address: bytes) -> Peer:
        """Return the peer at *address*; again with a newer address, to learn of regions registered since.

        Raise `PeerLost` if nothing answers there and a `TransferFailed` if *address* is not an address.
        """

    def write(
        self, peer: Peer, batch: Batch, notify: bytes = b"", *, timeout: float | None = None, label: str = ""
    ) -> Transfer:
        """Start to move *batch* from a region of this endpoint to one of *peer*'s, then deliver *notify* there.

        *timeout* in seconds replaces the endpoint's default deadline.  Raise `InvalidBatch` if a region is not this
        endpoint's or not *peer*'s, a `RegistrationError` if the local one is no longer registered.

        The event fails with `TransferTimeout` after the deadline and with `PeerLost` if the peer is gone; how it
        then settles is `Transfer.settled`.  *label* goes into the record and means nothing to the engine.
        """

    def read(self, peer: Peer, batch: Batch, *, timeout: float | None = None, label: str = "") -> Transfer:
        """Start to move *batch* from a region of *peer*'s to one of this endpoint; otherwise as `write`.

        The peer's program has no part in it and gets no notification.
        """

    def write_sequence(self, peer: Peer, parts: Sequence[Writes], times: Sequence[float] = ()) -> WriteSequence:
        """Write *parts* in turns, one batch of each, every write posted when the one before is complete.

        With *times*, in seconds on the rank's clock, no turn begins before its own.  Raise what `write` raises of
        the first; the sequence fails with what it raises of another.
        """

    def quiesced(self, peer: str) -> Event:
        """Return an event that succeeds once it is proven that nothing of rank *peer* moves bytes here any more.

        Every incarnation of that rank that has connected to this endpoint has ended, or has closed its endpoint with
        nothing under way, and what it sent has landed or is lost.  With none it succeeds at once: from this call
        on *peer* connects by none of the addresses given out before, and transfers by those fail with
        `TransferFailed`.

        Where a writer is gone and cannot say `Transfer.settled`, this is the owner's only proof that memory may be
        handed out again.  It may never come: silence is no proof.  So wait for it with a deadline.
        """

    def close(self) -> None:
        """Release connections, registrations, threads and descriptors.  May be called twice."""


class Message(NamedTuple):
    """A control message: who sent it, and its bytes."""

    sender: str  # rank
    payload: bytes


class Channel(Protocol):
    """Control messages between ranks.  Those of one sender to one receiver keep their order; others do not.

    The payload is bytes; `pdsim.kv.messages` gives them type, schema and version.
    """

    @property
    def refused(self) -> int:
        """Messages and connections that were dropped: not of this job's ranks, or not of the schema."""

    def send(self, receiver: str, payload: bytes) -> None:
        """Send without waiting.  A message to a rank that is gone is lost; a `KeyError` names an unknown rank."""

    def receive(self) -> Event:
        """Return an event that succeeds with the next `Message`.  Yield it at once."""

    def refuse(self, sender: str) -> None:
        """Count a message of *sender* as refused and drop its connection: no more of its messages is received."""

    def subscribe(self, handler: Callable[[Message], None]) -> None:
        """Call *handler*, which must not raise, with every `Message` from now on, instead of `receive`.

        Raise a `RuntimeError` if there is a handler already.
        """

    def close(self) -> None:
        """Close the sockets.  May be called twice."""


class Spill(Protocol):
    """An append-only store of rows that need not stay in memory; a killed run leaves what it wrote."""

    def append(self, payload: bytes) -> int:
        """Append *payload*, and return its position."""

    def read(self, position: int) -> bytes:
        """Return the payload at *position*."""


class Recorder(Protocol):
    """Where a rank's measurements go."""

    @property
    def spill(self) -> Spill | None:
        """Where a program may append rows that it no longer needs; None keeps them in memory."""

    def transfer(self, record: TransferRecord) -> None:
        """Keep *record*.  Endpoints call this for every transfer, failed ones included."""

    def gauge(self, kind: str, name: str, read: Callable[[], float]) -> None:
        """Sample ``read()``, a share from 0 to 1, as *name* if samples are kept; *kind* says what it is of."""

    def inspect(self, program: object) -> None:
        """Give *program*, the object that a rank runs, to the checkers of a running job."""
