# SPDX-License-Identifier: Apache-2.0
"""The transfers that an endpoint has posted and that are not quiesced: their states, records and deadlines.

States and transitions are those of `pdsim.transfer.Transfer`.  Why a transfer fails is decided in
`pdsim.sim.sim_endpoint`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from pdsim.core.clock import fire
from pdsim.sim.deadlines import Deadlines
from pdsim.transfer import TransferRecord
from pdsim.transfer.record_runs import Kind, RecordRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.core.clock import Clock
    from pdsim.core.errors import TransferError
    from pdsim.sim.connections import SimTransfer
    from pdsim.sim.engine import Times

__all__ = ["PostedTransfers", "SeriesRecorder"]


_new: Final[Any] = tuple.__new__  # of a named tuple, in half the time


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
        fields = (
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
        record: TransferRecord = _new(TransferRecord, fields)
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
