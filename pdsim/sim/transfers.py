# SPDX-License-Identifier: Apache-2.0
"""Transfers between their call and the instant at which nothing of them moves any more.

Each is a `SimTransfer`, which holds the memory of both sides.  `PostedTransfers` are those of one endpoint: their
states, those of `pdsim.transfer.Transfer`, with records and deadlines.  `Payload` moves their bytes: together at the
end or, as chance has it, in parts before.  Why a transfer fails is decided in `pdsim.sim.endpoint`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Container
from math import inf
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdsim.core.clock import Alarm, Clock, fire
from pdsim.sim.memory import copy_bytes, read_pieces, write_pieces
from pdsim.transfer import Batch, Region, TransferRecord
from pdsim.transfer.log import Kind, RecordRun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdsim.core.errors import TransferError
    from pdsim.sim.faults import Chance, Observer
    from pdsim.sim.hosts import NotificationInbox
    from pdsim.sim.memory import Bytes, RegionTable, Registration, SimBuffer, SimDevice
    from pdsim.sim.network import Times
    from pdsim.sim.posting import SendQueue
    from pdsim.sim.wire import Posting
    from pdsim.transfer import Transfer

__all__ = [
    "Connection",
    "Deadlines",
    "Part",
    "Payload",
    "PostedTransfers",
    "Remote",
    "SeriesRecorder",
    "SimTransfer",
    "part_of",
]


class SeriesRecorder(Protocol):
    """A `pdsim.transfer.Recorder` that takes many records at once."""

    def transfer(self, record: TransferRecord) -> None:
        """Keep *record*."""

    def series(self, run: RecordRun, *times: Times) -> None:
        """Keep the records of *run* with these *times*, in the order of `TransferRecord`."""


class PostedTransfers:
    """Those of one endpoint, by number.  ``time_out(number)`` is called for one that is here at its deadline."""

    def __init__(self, clock: Clock, engine: str, recorder: SeriesRecorder, time_out: Callable[[int], None]) -> None:
        self.moving: dict[int, SimTransfer] = {}
        self.quarantined = 0
        """How many of them have failed."""
        self._clock = clock
        self._engine = engine
        self._recorder = recorder
        self._keep = recorder.transfer
        self._number = 0
        self._kinds: dict[tuple[str, str], Kind] = {}  # of series, by source and target
        self._deadlines = Deadlines(clock, self.moving, time_out)

    def add(self, posted: SimTransfer) -> int:
        """Return the number of *posted* from now on."""
        self._number += 1
        self.moving[self._number] = posted
        return self._number

    def time_out_at(self, at: float, number: int) -> None:
        """Set the deadline of *number*."""
        self._deadlines.add(at, number)

    def quarantine(self, posted: SimTransfer, error: TransferError) -> None:
        """Fail *posted*, whose bytes may still move."""
        self.quarantined += 1
        self.record(posted, error)
        fire(posted.transfer, error, ok=False)

    def quiesce(self, number: int, error: TransferError | None) -> TransferRecord | None:
        """Let go of the memory of *number*, of which nothing moves any more.

        Return its record: it has completed or, with *error*, failed.  Return None if it was in quarantine.
        """
        posted = self.moving.pop(number)
        posted.release()
        if not posted.transfer.triggered:
            return self.record(posted, error)
        self.quarantined -= 1
        return None

    def conclude(self, posted: SimTransfer, record: TransferRecord | None, error: TransferError | None) -> None:
        """Tell whoever waits for *posted*, which is quiesced, or for its *record*."""
        posted.transfer.settle(now=True)
        if record is not None:
            fire(posted.transfer, record if error is None else error, ok=error is None)

    def fail(self, number: int, error: TransferError) -> None:
        """Fail *number*, of which nothing moves any more, and tell whoever waits."""
        posted = self.moving[number]
        self.conclude(posted, self.quiesce(number, error), error)

    def drop(self) -> list[SimTransfer]:
        """Forget all of them, and return them."""
        dropped = list(self.moving.values())
        self.moving.clear()
        self.quarantined = 0
        return dropped

    def record(self, posted: SimTransfer, error: TransferError | None) -> TransferRecord:
        """Record that *posted* ends now."""
        now, posting, batch = self._clock.now, posted.posting, posted.transfer.batch
        record = TransferRecord(
            self._engine,
            "write" if posted.write else "read",
            batch.source.owner,
            batch.target.owner,
            batch.nbytes,
            len(batch),
            posted.submitted,
            posted.submitted,  # descriptor lists cost nothing here: the engine's *descriptor* contains them
            now if posting is None or posting.posted is None else min(posting.posted, now),
            now,
            now,  # completions are seen at once: the engine's *latency* contains the polling
            "ok" if error is None else type(error).__name__,
            posted.transfer.label,
        )
        self._keep(record)
        return record

    def record_series(self, posted: SimTransfer, submitted: Times, at: Times, complete: Times) -> int:
        """Record writes like *posted* that were submitted, posted and complete at these times; return how many."""
        batch, count = posted.transfer.batch, len(complete)
        owners = batch.source.owner, batch.target.owner
        kind = self._kinds.get(owners)
        if kind is None:
            kind = self._kinds[owners] = Kind(self._engine, "write", *owners, "ok")
        run = RecordRun(kind, posted.transfer.label, batch.nbytes, len(batch), count)
        self._recorder.series(run, submitted, submitted, at, complete, complete)
        return count


class Part:
    """Those bytes of a transfer that are read at one instant and land at one: the descriptors of *batch*."""

    __slots__ = ("batch", "landed", "pieces")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.pieces: list[Bytes] | None = None  # what was read, once it was
        self.landed = False


def part_of(batch: Batch, first: int, end: int) -> Batch:
    """Return the descriptors of bytes *first* to *end* of *batch*, in its order; those at either end may be cut.

    Bytes are counted over the descriptors, from 0. Without a cut the batch itself is returned.
    """
    if first <= 0 and end >= batch.nbytes:
        return batch
    ends = np.cumsum(batch.size)
    starts = ends - batch.size
    low, high = np.maximum(starts, first), np.minimum(ends, end)
    inside = low < high
    skipped, size = (low - starts)[inside], (high - low)[inside]
    source, target = batch.source_offset[inside] + skipped, batch.target_offset[inside] + skipped
    return Batch(batch.source, batch.target, source, target, size)


class Remote(Protocol):
    """What the posting side asks of a peer's endpoint.

    It names what this module needs, which knows no endpoint.
    """

    @property
    def name(self) -> str:
        """The rank's."""

    @property
    def ended(self) -> float | None:
        """When it was closed or killed."""

    @property
    def inbox(self) -> NotificationInbox:
        """What its rank is told."""

    @property
    def regions(self) -> RegionTable:
        """What is registered there."""


class Connection:
    """From the initiator *owner* to a peer: the peer's endpoint, and the queue of what is posted to it.

    A connection is to one incarnation of the peer: one that is started again is another endpoint.
    """

    __slots__ = ("owner", "remote", "send_queue")

    def __init__(self, owner: object, remote: Remote, send_queue: SendQueue) -> None:
        self.owner = owner
        self.remote = remote
        self.send_queue = send_queue


class SimTransfer:
    """One transfer from its call until it has settled.  Until then it holds the memory on both sides.

    *local* is the poster's own registration, *remote* the region as the peer's address had it, *submitted* in
    seconds on the job's clock. A write moves from *local* to *remote*, a read the other way.
    """

    __slots__ = (
        "breaks_after",
        "connection",
        "held",
        "local",
        "notify",
        "parts",
        "posting",
        "remote",
        "submitted",
        "transfer",
        "write",
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
        self.write = write
        self.local = local
        self.remote = remote
        self.notify = notify
        self.submitted = submitted
        self.posting: Posting | None = None
        self.breaks_after: int | None = None  # bytes that move before the engine reports a failure, if it does
        self.parts: list[Part] = []  # that are read, or land, before the end
        there = connection.remote.regions.find(remote)
        self.held = None if there is None else there.buffer
        if self.held is not None:
            self.held.hold()
        local.unsettled += 1
        local.buffer.hold()

    def buffers(self) -> tuple[SimBuffer, SimBuffer] | None:
        """Return the memory of the source and of the target; None if the peer has withdrawn its own."""
        there = self.connection.remote.regions.find(self.remote)
        if there is None:
            return None
        return (self.local.buffer, there.buffer) if self.write else (there.buffer, self.local.buffer)

    def release(self) -> None:
        """Let go of the memory on both sides."""
        self.local.unsettled -= 1
        self.local.buffer.release()
        if self.held is not None:
            self.held.release()


class Payload:
    """Moves the bytes of the transfers *flights*, by number, that an endpoint on *device* posts.

    Without faults all bytes of a transfer are read and land at its completion. With them a transfer moves in parts,
    each read at one instant and landing at another, so that memory which is reused too early shows. *observer* is
    told of both.

    Where memory has no contents (``memory=timing``) nothing is copied, and the observer is told all the same.
    """

    def __init__(
        self, clock: Clock, device: SimDevice, observer: Observer | None, flights: Mapping[int, SimTransfer]
    ) -> None:
        self._clock = clock
        self._device = device
        self._observer = observer
        self._flights = flights

    def stray(self, flight: SimTransfer, number: int, chance: Chance, seconds: float) -> None:
        """Have the parts of *flight*, which takes about so many *seconds*, read and land when chance says.

        A part that is not read or has not landed by the transfer's completion does so then (`move`); one whose
        transfer is aborted before never does.
        """
        clock, batch = self._clock, flight.transfer.batch
        for first, end, read, land in chance.parts(batch.nbytes, seconds):
            part = Part(part_of(batch, first, end))
            flight.parts.append(part)
            clock.call_at(clock.now + read, self._read_early, (number, part))
            clock.call_at(clock.now + max(read, land), self._land_early, (number, part))

    def _read_early(self, what: tuple[int, Part]) -> None:
        number, part = what
        flight = self._moving(number)
        buffers = None if flight is None else flight.buffers()
        if flight is not None and buffers is not None:
            self._read(part, flight, buffers[0])

    def _land_early(self, what: tuple[int, Part]) -> None:
        number, part = what
        flight = self._moving(number)
        buffers = None if flight is None else flight.buffers()
        if flight is not None and buffers is not None and part.pieces is not None:
            self._put(part, flight, buffers[1])

    def _read(self, part: Part, flight: SimTransfer, source: SimBuffer) -> None:
        if self._observer is not None:
            self._observer.read(part.batch, flight.transfer.label)
        exact = self._device.holds_bytes
        part.pieces = [piece.copy() for piece in read_pieces(part.batch, source)] if exact else []

    def _put(self, part: Part, flight: SimTransfer, target: SimBuffer) -> None:
        if self._observer is not None:
            self._observer.landed(part.batch, flight.transfer.label)
        part.landed = True
        if self._device.holds_bytes:
            write_pieces(part.batch, target, part.pieces or [])

    def _moving(self, number: int) -> SimTransfer | None:
        flight = self._flights.get(number)
        stopped = flight is None or flight.posting is None or flight.posting.aborted
        return None if stopped else flight

    def move(self, flight: SimTransfer, source: SimBuffer, target: SimBuffer, end: int | None = None) -> None:
        """Move what has not moved yet from *source* to *target*, all at this instant.

        With *end*, of a transfer that has not begun, only the bytes before *end* move: the engine reports a
        failure then.  Of a transfer in parts, each part that was read already lands as it was read.
        """
        if end is not None:
            if end and not flight.parts:
                part = Part(part_of(flight.transfer.batch, 0, end))
                self._read(part, flight, source)
                self._put(part, flight, target)
            return
        for part in flight.parts:
            if part.pieces is None:
                self._read(part, flight, source)
            if not part.landed:
                self._put(part, flight, target)
        if flight.parts:
            return
        batch, label, observer = flight.transfer.batch, flight.transfer.label, self._observer
        if observer is not None:
            observer.read(batch, label)
            observer.landed(batch, label)
        if self._device.holds_bytes:
            copy_bytes(batch, source, target)


class Deadlines:
    """Calls ``expire(number)`` at the deadline of every number that is in *live* then.

    Nobody cancels a deadline: a number that is no longer in *live* is forgotten when it comes to the front.  So a
    transfer costs one append, for most have equal time, one pop, and an event only when it is the first.
    """

    def __init__(self, clock: Clock, live: Container[int], expire: Callable[[int], None]) -> None:
        self._clock = clock
        self._live = live
        self._expire = expire
        self._ahead: deque[tuple[float, int]] = deque()
        self._alarm = Alarm(clock, self._on_alarm)
        self._at = inf  # what the alarm is set to

    def add(self, at: float, number: int) -> None:
        """Let the deadline of *number* be *at*, in seconds on the clock.

        One that lies before the alarm sets it anew; the old one finds that it does not count any more.
        """
        ahead = self._ahead
        if not ahead or at >= ahead[-1][0]:
            ahead.append((at, number))
        else:
            insort(ahead, (at, number))
        if at < self._at:
            if self._alarm.armed:  # too late; it will find that it is not the alarm any more
                self._alarm = Alarm(self._clock, self._on_alarm)
            self._arm(at)

    def _arm(self, at: float) -> None:
        self._at = at
        self._alarm.arm(at)

    def _on_alarm(self, alarm: Alarm) -> None:
        if alarm is not self._alarm:
            return
        now, ahead = self._clock.now, self._ahead
        self._at = -inf  # `add` leaves the alarm alone meanwhile
        while ahead:
            at, number = ahead[0]
            live = number in self._live
            if at > now and live:
                break
            ahead.popleft()
            if live:
                self._expire(number)
        self._at = inf
        if ahead:
            self._arm(ahead[0][0])
