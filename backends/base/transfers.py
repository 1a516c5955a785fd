# SPDX-License-Identifier: Apache-2.0
"""The peers, regions and transfers of a real endpoint.

`TransferAccount` keeps a transfer from its post until none of its bytes moves.  A transfer is *under way* (neither
complete nor failed) or in *quarantine* (failed, but bytes may still move).  Regions and peers count their moving
transfers, and memory with such a count is not freed.

`ConnectedPeers` are the endpoints that an endpoint knows: what their addresses said, and what they have withdrawn
since.  An address is a snapshot, counted by its epoch.  Whoever connects says `CONNECTED` with that epoch; the owner
answers `WITHDRAWN` with the names that it withdrew since, and from then on tells of each further one with
`WITHDRAW`, to which a borrower answers `RETURN` once none of its transfers moves there.  Until the first answer has
come, transfers to the peer wait.

`Withdrawal` is the owner's side: an owner that deregisters a region tells every endpoint that knows it, and holds
the memory until each has returned it.

Nothing here knows an engine: `backends.base.endpoint.RealEndpoint` reports what ended and what may still move.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from simpy.events import Event

from backends.base.control import Card, Control, PeerLine, fields
from backends.base.device import RealBuffer, RealDevice
from backends.base.processes import is_dead
from pdsim.core.clock import WallClock
from pdsim.core.errors import (
    InvalidBatch,
    MessageError,
    PeerLost,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.transfer import Batch, Peer, Recorder, Region, Transfer, TransferRecord

__all__ = [
    "FORMAT",
    "Address",
    "ConnectedPeers",
    "Entry",
    "PeerState",
    "PostedTransfer",
    "TransferAccount",
    "TransferDeadlines",
    "Withdrawal",
]


FORMAT = "pdsim/1"


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The address of an endpoint, before encoding.  *epoch* counts registrations and deregistrations.

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

    Regions in *withdrawn* must not be addressed any more.  While *answered* is false, transfers wait in *waiting*:
    the peer has yet to say what it withdrew since the address that it was connected by.
    """

    line: PeerLine
    handle: Any  # the engine's own
    epoch: int
    withdrawn: set[str] = field(default_factory=set)  # regions
    moving: Counter[str] = field(default_factory=Counter)  # transfers that have not settled, by region
    owed: list[tuple[str, int]] = field(default_factory=list)  # withdrawn regions to be returned: name, epoch
    answered: bool = False  # whether the peer has said what it withdrew since the address that we have
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
        while peer.waiting and (peer.answered or peer.line.lost):
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


CONNECT_TIMEOUT = 10.0
"""Seconds that `connect` waits for an answer.  On one host it comes in milliseconds or not at all."""


class ConnectedPeers:
    """All peers of one endpoint, by the token of their incarnation.

    Another incarnation of a rank has another token and so another state. The state of the first stays, because
    its transfers may still be moving.  All calls are on the clock's thread.
    """

    def __init__(
        self,
        kind: str,
        connect: Callable[[bytes], Any],
        forget: Callable[[PeerState, str], None],
        control: Control,
        dispatch: Callable[[PeerState], None],
    ) -> None:
        """Connect to endpoints of *kind* by the engine's *connect*; *forget* releases a region of a peer.

        *dispatch* is called with each peer whose waiting transfers may go.
        """
        self.by_token: dict[bytes, PeerState] = {}
        self._kind, self._connect, self._forget = kind, connect, forget
        self._control = control
        self._dispatch = dispatch

    def connect(self, address: bytes) -> Peer:
        """Return the peer at *address*; a newer address of a known one adds the regions that it names.

        Raises:
            TransferFailed: *address* is none, or of another kind of engine or format.
            PeerLost: nobody answers within `CONNECT_TIMEOUT`, or the endpoint there is known to be gone.
        """
        kind = self._kind
        try:
            where = msgspec.msgpack.decode(address, type=Address)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferFailed(f"{len(address)} bytes that are not the address of an endpoint: {error}") from None
        if (where.format, where.kind) != (FORMAT, kind):
            raise TransferFailed(
                f"the address is of a {where.format} {where.kind} endpoint; this one is {FORMAT} {kind}"
            )
        line = self._control.reach(where.card, CONNECT_TIMEOUT)
        state = self.by_token.get(where.card.token)
        if state is None:
            state = PeerState(line, self._handle(where.engine), where.epoch)
            self.by_token[where.card.token] = state
            self._control.send(line, CONNECTED, str(where.epoch).encode())
        elif where.epoch > state.epoch:
            state.handle, state.epoch = self._handle(where.engine), where.epoch
            state.withdrawn.difference_update(name for name, *_ in where.regions)
        regions = {name: Region(state.name, name, size, at, device) for name, size, at, device in where.regions}
        return Peer(state.name, MappingProxyType(regions), state)

    def _handle(self, description: bytes) -> Any:
        try:
            return self._connect(description)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferFailed(f"no description of a {self._kind} endpoint: {error}") from None

    def state(self, peer: Peer) -> PeerState:
        """Return the state of *peer*.  Raise `InvalidBatch` if it was not connected by this endpoint."""
        state = peer.handle
        if not isinstance(state, PeerState) or self.by_token.get(state.line.card.token) is not state:
            raise InvalidBatch(f"{peer.name} was not connected by this endpoint of {self._control.card.name}")
        return state

    def is_quiesced(self, name: str, drained: Callable[[], bool]) -> bool:
        """Return whether it is proven that no incarnation of rank *name* can write here any more.

        Each has said goodbye with nothing under way, or its process is dead and *drained* says that nothing that
        dead processes sent is still to be taken in.
        """
        self._control.poll()
        unclean = [line for line in self._control.known(name) if not line.closed]
        return not unclean or (all(line.lost and is_dead(line.card.process) for line in unclean) and drained())

    def on_withdrawn(self, line: PeerLine, body: list[bytes]) -> None:
        """Take the names that *line*'s endpoint withdrew since the address that we have, and let transfers go."""
        state = self.by_token.get(line.card.token)
        if state is None:
            raise MessageError("an answer to no question")
        state.answered = True
        state.withdrawn.update(fields(body, *[str] * len(body)))
        self._dispatch(state)

    def on_withdraw(self, line: PeerLine, body: list[bytes]) -> None:
        """Address the withdrawn region no more, and return it.

        At once, or when the last transfer there has settled.
        """
        name, epoch = withdrawn(body)
        state = self.by_token.get(line.card.token)
        if state is None:
            self._control.send(line, RETURN, *body)
            return
        if epoch > state.epoch:
            state.withdrawn.add(name)
        state.owed.append((name, epoch))
        self.return_regions(state)

    def return_regions(self, state: PeerState) -> None:
        """Return to *state*'s endpoint what it has withdrawn and nothing of ours moves in."""
        for name, epoch in tuple(state.owed):
            if not state.moving[name]:
                state.owed.remove((name, epoch))
                self._forget(state, name)
                self._control.send(state.line, RETURN, name.encode(), str(epoch).encode())


WITHDRAW, RETURN, CONNECTED, WITHDRAWN = b"withdraw", b"return", b"connected", b"withdrawn"


class Withdrawal:
    """The owner's side: who may still write to what was withdrawn.

    Invariant: the device holds the memory of a region exactly while some endpoint has not returned it.  An endpoint
    that is lost without a goodbye never returns anything, so that memory stays held until `close`.
    """

    def __init__(self, device: RealDevice) -> None:
        self._device = device
        self._withdrawn: dict[str, int] = {}  # the epoch in which a region was last withdrawn, by name
        self._lent: dict[tuple[str, int], tuple[RealBuffer, set[bytes]]] = {}  # by name and epoch: memory, tokens

    def withdraw(self, control: Control, name: str, epoch: int, buffer: RealBuffer) -> None:
        """Tell all who know it that region *name* is gone since *epoch*, and hold its memory until they return it.

        With nobody connected there is nothing to hold; endpoints that connect later learn of it from the answer to
        `CONNECTED`.
        """
        self._withdrawn[name] = epoch
        lines = control.lines
        if not lines:
            return
        self._lent[name, epoch] = (buffer, {line.card.token for line in lines})
        self._device.hold(buffer)
        for line in lines:
            control.send(line, WITHDRAW, name.encode(), str(epoch).encode())

    def on_connected(self, control: Control, line: PeerLine, body: list[bytes]) -> None:
        """Answer an endpoint that has connected with an address of some epoch: what was withdrawn after it."""
        (epoch,) = fields(body, int)
        names = [name.encode() for name, when in self._withdrawn.items() if when > epoch]
        control.send(line, WITHDRAWN, *names)

    def on_return(self, line: PeerLine, body: list[bytes]) -> None:
        """Note that *line* returns a region."""
        self._take_back(withdrawn(body), line)

    def on_lost(self, line: PeerLine) -> None:
        """Note that *line* is gone; if it left in order, nothing of its transfers is under way."""
        for key in tuple(self._lent) if line.closed else ():
            self._take_back(key, line)

    def close(self) -> None:
        """Release everything: the engine is gone, and nobody can write through it any more."""
        for buffer, _ in self._lent.values():
            self._device.release(buffer)
        self._lent.clear()

    def _take_back(self, key: tuple[str, int], line: PeerLine) -> None:
        buffer, holders = self._lent.get(key, (None, set()))
        holders.discard(line.card.token)
        if buffer is not None and not holders:
            del self._lent[key]
            self._device.release(buffer)


def withdrawn(body: list[bytes]) -> tuple[str, int]:
    """Return the region and the epoch in a note of `WITHDRAW` or `RETURN`.

    Raise a `MessageError` if it has none.
    """
    name, epoch = fields(body[:1], str), fields(body[1:], int)
    return name[0], epoch[0]
