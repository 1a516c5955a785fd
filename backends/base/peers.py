# SPDX-License-Identifier: Apache-2.0
"""The endpoints that an endpoint knows: what their addresses said, and what they have withdrawn since.

This is the borrower's side of `backends.base.peers`.  An address is a snapshot, counted by its epoch.  Whoever
connects says `MEET` with that epoch; the owner answers `WELCOME` with the names that it withdrew since, and from
then on tells of each further one with `WITHDRAW`, to which a borrower answers `RETURN` once none of its transfers
moves there.  Until the welcome has come, transfers to the peer wait.

Memory that its owner has withdrawn, but that others may still be writing to.

An owner that deregisters a region tells every endpoint that knows it, and holds the memory until each has said that
none of its transfers moves there any more.  Endpoints that connect later with an older address ask first.

The notes: `WITHDRAW` and `RETURN` carry a region's name and epoch, `MEET` the epoch of the address that somebody has
connected with, and `WELCOME` the names that were withdrawn since.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from backends.base.control import Control, PeerLine, fields
from backends.base.device import RealBuffer, RealDevice
from backends.base.processes import is_dead
from backends.base.transfers import FORMAT, Address, PeerState
from pdsim.core.errors import InvalidBatch, MessageError, TransferFailed
from pdsim.transfer import Peer, Region

__all__ = [
    "CONNECT_TIMEOUT",
    "MEET",
    "RETURN",
    "WELCOME",
    "WITHDRAW",
    "ConnectedPeers",
    "Withdrawal",
    "return_regions",
    "withdrawn",
]


CONNECT_TIMEOUT = 10.0
"""Seconds that `connect` waits for an answer.  On one host it comes in milliseconds or not at all."""


class PeerEngine(Protocol):
    """What `ConnectedPeers` asks of a `backends.base.endpoint.RealEndpoint`, which documents it."""

    kind: str

    def connect_engine(self, description: bytes) -> Any:
        """Return the engine's handle of a peer."""

    def forget_region(self, peer: PeerState, region: str) -> None:
        """Give up what the engine keeps of *region*."""


class ConnectedPeers:
    """All peers of one endpoint, by the token of their life.

    Another life of a rank has another token and so another state: what was known of the first stays, because its
    transfers may still be moving.  All calls are on the clock's thread.
    """

    def __init__(self, engine: PeerEngine, control: Control, dispatch: Callable[[PeerState], None]) -> None:
        """Connect with *engine*; *dispatch* is called with each peer whose waiting transfers may go."""
        self.by_token: dict[bytes, PeerState] = {}
        self._engine = engine
        self._control = control
        self._dispatch = dispatch

    def connect(self, address: bytes) -> Peer:
        """Return the peer at *address*; a newer address of a known one adds the regions that it names.

        Raises:
            TransferFailed: *address* is none, or of another kind of engine or format.
            PeerLost: nobody answers within `CONNECT_TIMEOUT`, or the endpoint there is known to be gone.
        """
        kind = self._engine.kind
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
            self._control.send(line, MEET, str(where.epoch).encode())
        elif where.epoch > state.epoch:
            state.handle, state.epoch = self._handle(where.engine), where.epoch
            state.withdrawn.difference_update(name for name, *_ in where.regions)
        regions = {name: Region(state.name, name, size, at, device) for name, size, at, device in where.regions}
        return Peer(state.name, MappingProxyType(regions), state)

    def _handle(self, description: bytes) -> Any:
        try:
            return self._engine.connect_engine(description)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferFailed(f"no description of a {self._engine.kind} endpoint: {error}") from None

    def checked(self, operation: str, peer: Peer, local: Region, remote: Region) -> PeerState:
        """Return what is known of *peer*.

        Raises:
            InvalidBatch: *peer* is another endpoint's, *local* is not a region of this rank, or *remote* is not one
                that the peer's address named.  Whether it has been withdrawn since is seen when the transfer is
                posted.
        """
        state, rank = peer.handle, self._control.card.name
        if not isinstance(state, PeerState) or self.by_token.get(state.line.card.token) is not state:
            raise InvalidBatch(f"{peer.name} was not connected by this endpoint of {rank}")
        if local.owner != rank:
            side = "source" if operation == "write" else "target"
            raise InvalidBatch(f"a {operation}'s {side} must be a region of {rank}, got one of {local.owner}")
        known = peer.regions.get(remote.name)
        if known is not remote and known != remote:
            raise InvalidBatch(
                f"region {remote.owner}/{remote.name} is not one of peer {peer.name}, which has "
                f"{', '.join(sorted(peer.regions)) or 'none'}; a region registered later needs a newer address"
            )
        return state

    def is_quiesced(self, name: str, drained: Callable[[], bool]) -> bool:
        """Return whether it is proven that no life of rank *name* can write here any more.

        Each has said goodbye with nothing under way, or its process is dead and *drained* says that nothing that
        dead processes sent is still to be taken in.
        """
        self._control.poll()
        unclean = [line for line in self._control.known(name) if not line.closed]
        return not unclean or (all(line.lost and is_dead(line.card.process) for line in unclean) and drained())

    def on_welcome(self, line: PeerLine, body: list[bytes]) -> None:
        """Take the names that *line*'s endpoint withdrew since the address that we have, and let transfers go."""
        state = self.by_token.get(line.card.token)
        if state is None:
            raise MessageError("a welcome that nobody asked for")
        state.welcome = True
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
        return_regions(self._control, state, self._engine.forget_region)


WITHDRAW, RETURN, MEET, WELCOME = b"withdraw", b"return", b"meet", b"welcome"


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
        `MEET`.
        """
        self._withdrawn[name] = epoch
        lines = control.lines
        if not lines:
            return
        self._lent[name, epoch] = (buffer, {line.card.token for line in lines})
        self._device.hold(buffer)
        for line in lines:
            control.send(line, WITHDRAW, name.encode(), str(epoch).encode())

    def on_meet(self, control: Control, line: PeerLine, body: list[bytes]) -> None:
        """Answer an endpoint that has connected with an address of some epoch: what was withdrawn after it."""
        (epoch,) = fields(body, int)
        names = [name.encode() for name, when in self._withdrawn.items() if when > epoch]
        control.send(line, WELCOME, *names)

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


def return_regions(control: Control, state: PeerState, forget: Callable[[PeerState, str], None]) -> None:
    """Return to *state*'s endpoint what it has withdrawn and nothing of ours moves in; the borrower's side.

    *forget* is called before, with each region that goes back.
    """
    for name, epoch in tuple(state.owed):
        if not state.moving[name]:
            state.owed.remove((name, epoch))
            forget(state, name)
            control.send(state.line, RETURN, name.encode(), str(epoch).encode())
