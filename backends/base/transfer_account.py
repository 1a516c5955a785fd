# SPDX-License-Identifier: Apache-2.0
"""The account that an endpoint keeps of its transfers, from posting until nothing of them moves.

Three sets, and a transfer is in one of the first two at most: *under way* (neither complete nor failed),
*quarantine* (failed, but bytes may still move), and the counts of moving transfers that regions and peers carry
(`backends.base.endpoint_state`), which keep memory from being freed.  The account knows no engine: what ended and
whether bytes may still move is told by `backends.base.endpoint.RealEndpoint`, whose docstring draws the states.
"""

from __future__ import annotations

from collections.abc import Callable

from backends.base.endpoint_state import PeerState, PostedTransfer
from backends.base.transfer_deadlines import TransferDeadlines
from pdsim.core.clock import WallClock
from pdsim.core.errors import TransferError, TransferTimeout
from pdsim.transfer import Recorder, TransferRecord

__all__ = ["TransferAccount"]


class TransferAccount:
    """Where each transfer of one endpoint stands; the only place that ends one.

    Each transfer is recorded once, when it completes or fails, and let go once, when nothing of it moves any more:
    its event `Transfer.settled` fires then, and its regions no longer count it.  All calls are on the clock's
    thread.

    Attributes:
        engine: The engine as it reports itself, for the records; set when it has started.
        under_way: Transfers that are neither complete nor failed, in the order in which they were opened.
        quarantine: Transfers that failed and may still move bytes.
    """

    def __init__(self, clock: WallClock, recorder: Recorder, released: Callable[[PeerState], None]) -> None:
        """Call *released* with the peer of each transfer that is let go while the peer waits for a region."""
        self.engine = ""
        self.under_way: dict[PostedTransfer, None] = {}
        self.quarantine: dict[PostedTransfer, None] = {}
        self._clock = clock
        self._recorder = recorder
        self._released = released
        self._deadlines = TransferDeadlines(clock, self.under_way, self._time_out)

    def open(self, transfer: PostedTransfer) -> None:
        """Take *transfer*, which is to wait for its peer: its regions count it from now on."""
        self.under_way[transfer] = None
        transfer.local.moving += 1
        transfer.peer.moving[transfer.remote.name] += 1
        transfer.peer.waiting.append(transfer)

    def watch(self, transfer: PostedTransfer) -> None:
        """Fail *transfer* with a `TransferTimeout` at its deadline, unless it has ended by then."""
        self._deadlines.watch(transfer)

    def complete(self, transfer: PostedTransfer, at: float | None) -> bool:
        """Note that the engine reported *transfer* complete at the time *at*, None for now.

        Return True if that completes it: the caller then sends its notification and lets it go (`let_go`).  Return
        False if it had failed before or came after its deadline; then it has been let go.
        """
        seen = self._clock.now
        at = seen if at is None else at
        if transfer.triggered:
            self.quiesce(transfer)
            return False
        if at > transfer.deadline:
            self.fail(transfer, _too_late(transfer), moving=False, at=at)
            return False
        self._conclude(transfer, "ok", at, seen)
        return True

    def fail(self, transfer: PostedTransfer, error: TransferError, *, moving: bool, at: float | None = None) -> None:
        """Fail *transfer* with *error* unless it has ended; without *moving*, let it go as well.

        *at* is when the engine says that it ended, if that is known to be earlier than now.
        """
        if not transfer.triggered:
            seen = self._clock.now
            self._conclude(transfer, error, seen if at is None else at, seen)
            self.quarantine[transfer] = None
        if not moving:
            self.quiesce(transfer)

    def give_up(self, transfer: PostedTransfer, error: TransferError) -> None:
        """Fail *transfer* with *error*.

        Bytes may move only if the engine has got it, so those that wait are let go.
        """
        waiting = transfer.peer.waiting
        posted = transfer not in waiting
        if not posted:
            waiting.remove(transfer)
        self.fail(transfer, error, moving=posted)

    def quiesce(self, transfer: PostedTransfer) -> None:
        """Let a failed *transfer* go, of which no byte moves any more; without effect if that was known."""
        if transfer in self.quarantine:
            del self.quarantine[transfer]
            self.let_go(transfer)

    def let_go(self, transfer: PostedTransfer) -> None:
        """Settle *transfer*, which has ended and moves nothing: its regions are free of it."""
        transfer.settle()
        transfer.local.moving -= 1
        peer = transfer.peer
        peer.moving[transfer.remote.name] -= 1
        if peer.owed:
            self._released(peer)

    def _conclude(self, transfer: PostedTransfer, result: str | TransferError, at: float, seen: float) -> None:
        """Record *transfer* with its *result*, "ok" or an error, and fire its event."""
        del self.under_way[transfer]
        status = result if isinstance(result, str) else type(result).__name__
        batch = transfer.batch
        record = TransferRecord(  # by position: by name it takes three times as long
            self.engine,
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
            status,
            transfer.label,
        )
        self._recorder.transfer(record)
        if isinstance(result, str):
            transfer.succeed(record)
        else:
            transfer.fail(result)

    def _time_out(self, transfer: PostedTransfer) -> None:
        self.give_up(transfer, _too_late(transfer))


def _too_late(transfer: PostedTransfer) -> TransferTimeout:
    return TransferTimeout(
        f"{transfer.operation} of {transfer.batch.nbytes} bytes with {transfer.peer.name}: not complete after "
        f"{transfer.timeout:g} s; bytes may still move until Transfer.settled"
    )
