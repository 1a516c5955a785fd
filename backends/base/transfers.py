# SPDX-License-Identifier: Apache-2.0
"""The addresses, regions, peers and transfers of a real endpoint.

The account keeps a transfer from its post until none of its bytes moves.  A transfer is *under way* (neither
complete nor failed) or in *quarantine* (failed, but bytes may still move).  Regions and peers count their moving
transfers, and memory with such a count is not freed.  The account knows no engine:
`backends.base.endpoint.RealEndpoint` reports what ended and what may still move; its docstring draws the states.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from simpy.events import Event

from backends.base.control import Card, PeerLine
from backends.base.device import RealBuffer
from pdsim.core.clock import WallClock
from pdsim.core.errors import PeerLost, TransferError, TransferFailed, TransferTimeout
from pdsim.transfer import Batch, Recorder, Region, Transfer, TransferRecord

__all__ = ["FORMAT", "Address", "Entry", "PeerState", "PostedTransfer", "TransferAccount", "TransferDeadlines"]


FORMAT = "pdsim/1"


class Address(msgspec.Struct, frozen=True, array_like=True):
    """What `RealEndpoint.address` encodes.  *epoch* counts registrations and deregistrations.

    Encoded as msgpack.  *kind* keeps endpoints of different engines apart; *engine* is what
    `RealEndpoint.engine_address` returned.
    """

    format: str
    kind: str
    card: Card
    epoch: int
    regions: list[tuple[str, int, int, str]]  # name, size, address, device
    engine: bytes


@dataclass(eq=False)
class Entry:
    """A region of this endpoint, from `register` to `deregister`.

    *moving* counts transfers that have not settled; at 0, which `deregister` waits for, the buffer
    is free of them.  *handle* is what the engine's `pin` returned.
    """

    region: Region
    buffer: RealBuffer
    moving: int = 0  # transfers that have not settled
    handle: Any = None  # the engine's own


@dataclass(eq=False)
class PeerState:
    """All that is known of one other endpoint; what `Peer.handle` holds.

    Regions in *withdrawn* must not be addressed any more.  While *welcome* is false, transfers wait in *waiting*:
    the peer has yet to say what it withdrew since the address that it was connected by.
    """

    line: PeerLine
    handle: Any  # the engine's own
    epoch: int
    withdrawn: set[str] = field(default_factory=set)  # regions
    moving: Counter[str] = field(default_factory=Counter)  # transfers that have not settled, by region
    owed: list[tuple[str, int]] = field(default_factory=list)  # withdrawn regions to be returned: name, epoch
    welcome: bool = False  # whether the peer has said what it withdrew since the address that we have
    waiting: deque[PostedTransfer] = field(default_factory=deque)  # transfers that were started before

    @property
    def name(self) -> str:
        """The peer's rank."""
        return self.line.name


class PostedTransfer(Transfer):
    """A transfer and where it stands.

    Times are seconds on the rank's clock; `submitted`, `prepared` and `posted` are equal until the engine sets them.
    *remote* is the region as the peer's address had it.
    """

    def __init__(
        self,
        clock: WallClock,
        batch: Batch,
        label: str,
        operation: str,
        peer: PeerState,
        local: Entry,
        remote: Region,
        notify: bytes,
        timeout: float,
    ) -> None:
        super().__init__(clock, batch, label)
        self.operation = operation
        self.peer = peer
        self.local = local
        self.remote = remote
        self.notify = notify
        self.timeout = timeout
        self.submitted = self.prepared = self.posted = now = clock.now
        self.deadline = now + timeout
        self.handle: Any = None  # the engine's own

    def blocks(self) -> tuple[list[int], list[int], list[int]]:
        """Return where each block starts here and, as the peer says, there, and its bytes.

        Three lists of equal length, addresses in either process's own space; "here" is the initiator, whichever way
        bytes flow.
        """
        batch, here, there = self.batch, self.local.region.address, self.remote.address
        near, far = batch.source_offset, batch.target_offset
        if self.operation == "read":
            near, far = far, near
        if len(batch.size) == 1:  # arrays would take ten times as long
            return [near.item() + here], [far.item() + there], [batch.nbytes]
        return (near + here).tolist(), (far + there).tolist(), batch.size.tolist()


class TransferAccount:
    """Where each transfer of one endpoint stands; the only place that posts and ends one.

    Each transfer is recorded once, when it completes or fails, and settled once, when nothing of it moves any more:
    its event `Transfer.settled` fires then, and its regions no longer count it.  All calls are on the clock's
    thread.

    Attributes:
        engine: The engine as it reports itself, for the records; set when it has started.
        under_way: Transfers that are neither complete nor failed, in the order in which they were opened.
        quarantine: Transfers that failed and may still move bytes.
    """

    def __init__(
        self,
        clock: WallClock,
        recorder: Recorder,
        post: Callable[[PostedTransfer], None],
        released: Callable[[PeerState], None],
    ) -> None:
        """Post by *post*; call *released* with the peer of a transfer that settles while it waits for a region."""
        self.engine = ""
        self.under_way: dict[PostedTransfer, None] = {}
        self.quarantine: dict[PostedTransfer, None] = {}
        self._clock = clock
        self._recorder = recorder
        self._post = post
        self._released = released
        self._deadlines = TransferDeadlines(clock, self.under_way, self._time_out)

    def open(self, transfer: PostedTransfer) -> None:
        """Take *transfer*, which is to wait for its peer: its regions count it from now on."""
        self.under_way[transfer] = None
        transfer.local.moving += 1
        transfer.peer.moving[transfer.remote.name] += 1
        transfer.peer.waiting.append(transfer)

    def dispatch(self, peer: PeerState) -> None:
        """Hand the transfers that wait for *peer* to the engine, or fail them."""
        while peer.waiting and (peer.welcome or peer.line.lost):
            transfer = peer.waiting.popleft()
            try:
                if peer.line.lost:
                    raise PeerLost(f"{peer.name} {peer.line.lost}")
                if transfer.remote.name in peer.withdrawn:
                    raise TransferFailed(
                        f"{peer.name} has withdrawn region {transfer.remote.name!r}; connect to a newer address"
                    )
                self._post(transfer)
            except TransferError as error:
                self.fail(transfer, error, moving=False)

    def watch(self, transfer: PostedTransfer) -> None:
        """Fail *transfer* with a `TransferTimeout` at its deadline, unless it has ended by then."""
        self._deadlines.watch(transfer)

    def complete(self, transfer: PostedTransfer, at: float | None) -> bool:
        """Note that the engine reported *transfer* complete at the time *at*, None for now.

        Return True if that completes it: the caller then sends its notification and settles it (`settle`).  Return
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
        """Settle a failed *transfer* once none of its bytes moves; without effect if it is settled."""
        if transfer in self.quarantine:
            del self.quarantine[transfer]
            self.settle(transfer)

    def settle(self, transfer: PostedTransfer) -> None:
        """Settle *transfer*, which has ended and moves nothing: its regions are free of it."""
        transfer.settle()
        transfer.local.moving -= 1
        peer = transfer.peer
        peer.moving[transfer.remote.name] -= 1
        if peer.owed:
            self._released(peer)

    def _conclude(self, transfer: PostedTransfer, result: str | TransferError, at: float, seen: float) -> None:
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


class TransferDeadlines:
    """Calls *expire* with each of *transfers*, which are neither complete nor failed, when its time is over.

    *transfers* is the endpoint's own mapping of those under way, in the order of posting; it may change at any time
    between checks.  One event is scheduled at most, for the earliest deadline that was known when it was.
    """

    def __init__(
        self, clock: WallClock, transfers: Mapping[PostedTransfer, None], expire: Callable[[PostedTransfer], None]
    ) -> None:
        self._clock = clock
        self._transfers = transfers
        self._time_out = expire
        self._next = math.inf  # the earliest time for which a check is scheduled

    def watch(self, transfer: PostedTransfer) -> None:
        """Look at *transfer* when its timeout has passed; free if an earlier check is scheduled already."""
        if transfer.deadline < self._next:
            self._schedule(transfer.deadline)

    def _schedule(self, at: float) -> None:
        self._next = at
        event = self._clock.at(at)
        assert event.callbacks is not None
        event.callbacks.append(self._check)

    def _check(self, _: Event) -> None:
        # Transfers seldom last until a check, so there are few to ask.
        self._next, now = math.inf, self._clock.now
        due = [transfer for transfer in self._transfers if transfer.deadline <= now]
        for transfer in sorted(due, key=lambda transfer: transfer.deadline):
            self._time_out(transfer)
        if self._transfers:
            self._schedule(min(transfer.deadline for transfer in self._transfers))
