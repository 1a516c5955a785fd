# SPDX-License-Identifier: Apache-2.0
"""What a real endpoint keeps account of: addresses, regions, peers and transfers."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends.base.control import Card, PeerLine
from backends.base.device import RealBuffer
from pdsim.core.clock import WallClock
from pdsim.transfer import Batch, Region, Transfer

__all__ = ["FORMAT", "Address", "Entry", "PeerState", "PostedTransfer"]

FORMAT = "pdsim/1"


class Address(msgspec.Struct, frozen=True, array_like=True):
    """What `RealEndpoint.address` encodes.  *epoch* counts registrations and deregistrations.

    Encoded as msgpack.  *kind* keeps endpoints of different engines apart; *engine* is what
    `EngineHooks.engine_address` returned.
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
