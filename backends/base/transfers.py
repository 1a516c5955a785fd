# SPDX-License-Identifier: Apache-2.0
"""What a real endpoint keeps of its regions, peers and transfers, and the threads that post transfers."""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends.base.control import Card, PeerLine
from backends.base.device import RealBuffer
from pdsim.core.clock import WallClock
from pdsim.transfer import Batch, Region, Transfer

FORMAT = "pdsim/1"


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The address of an endpoint, encoded as msgpack; *epoch* counts registrations and deregistrations."""

    format: str
    kind: str  # keeps endpoints of different engines apart
    card: Card
    epoch: int
    regions: list[tuple[str, int, int, str]]  # name, size, address, device
    engine: bytes  # what `RealEndpoint.engine_address` returned


@dataclass(eq=False)
class Entry:
    """A region of this endpoint, from `register` to `deregister`."""

    region: Region
    buffer: RealBuffer
    moving: int = 0  # transfers that have not settled; `deregister` waits for 0
    handle: Any = None  # what the engine's `pin` returned


@dataclass(eq=False)
class PeerState:
    """All that is known of one other endpoint; what `Peer.handle` holds."""

    line: PeerLine
    handle: Any  # the engine's own
    epoch: int
    withdrawn: set[str] = field(default_factory=set)  # regions that must not be addressed any more
    moving: Counter[str] = field(default_factory=Counter)  # transfers that have not settled, by region
    owed: list[tuple[str, int]] = field(default_factory=list)  # withdrawn regions to be returned: name, epoch
    answered: bool = False  # whether the peer has said what it withdrew since the address that we have
    waiting: deque[PostedTransfer] = field(default_factory=deque)  # transfers that were started before

    @property
    def name(self) -> str:
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
        """Return where each block starts here and there, and its bytes: three lists of equal length.

        Addresses are those of either process; "here" is the initiator, whichever way bytes flow.
        """
        batch, here, there = self.batch, self.local.region.address, self.remote.address
        near, far = self.sides()
        if len(batch.size) == 1:  # arrays would take ten times as long
            return [near.item() + here], [far.item() + there], [batch.nbytes]
        return (near + here).tolist(), (far + there).tolist(), batch.size.tolist()

    def sides(self) -> tuple[Any, Any]:
        """Return the offsets here and those there, as arrays."""
        offsets = self.batch.source_offset, self.batch.target_offset
        return offsets if self.operation == "write" else offsets[::-1]


class PostingThreads:
    """Daemons that call *serve* with transfers, in order: *shared* for all peers or, if that is 0, *each* for each.

    They start with the first transfer, and each calls *begin* once.  Not `concurrent.futures`: its futures cost
    microseconds a transfer.
    """

    def __init__(
        self, shared: int, each: int, begin: Callable[[], object], serve: Callable[[PostedTransfer], None]
    ) -> None:
        self._shared, self._each = shared, each
        self._begin, self._serve = begin, serve
        self._queues: dict[PeerState | None, queue.SimpleQueue[PostedTransfer | None]] = {}
        self._threads: dict[threading.Thread, queue.SimpleQueue[PostedTransfer | None]] = {}

    def put(self, transfer: PostedTransfer) -> None:
        owner, count = (None, self._shared) if self._shared else (transfer.peer, self._each)
        if owner not in self._queues:
            work = self._queues[owner] = queue.SimpleQueue()
            for _ in range(count):
                thread = threading.Thread(target=self._run, args=[work], name="posting", daemon=True)
                self._threads[thread] = work
                thread.start()
        self._queues[owner].put(transfer)

    def leave(self, peer: PeerState) -> None:
        """Let the threads of *peer* alone, which is lost, end after what is queued."""
        work = self._queues.pop(peer, None)
        for thread in [thread for thread, its in self._threads.items() if its is work]:
            self._threads.pop(thread).put(None)

    def stop(self, wait: bool) -> None:
        """Let the threads end after what is queued, and, to *wait*, wait for them."""
        for work in self._threads.values():
            work.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self, work: queue.SimpleQueue[PostedTransfer | None]) -> None:
        self._begin()
        while (transfer := work.get()) is not None:
            self._serve(transfer)
