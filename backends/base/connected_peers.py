# SPDX-License-Identifier: Apache-2.0
"""The endpoints that an endpoint knows: what their addresses said, and what they have withdrawn since.

This is the borrower's side of `backends.base.withdrawal`.  An address is a snapshot, counted by its epoch.  Whoever
connects says `MEET` with that epoch; the owner answers `WELCOME` with the names that it withdrew since, and from
then on tells of each further one with `WITHDRAW`, to which a borrower answers `RETURN` once none of its transfers
moves there.  Until the welcome has come, transfers to the peer wait.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import msgspec

from backends.base.control import Control, PeerLine, fields
from backends.base.endpoint_state import FORMAT, Address, PeerState
from backends.base.hooks import EngineHooks
from backends.base.process_identity import is_dead
from backends.base.withdrawal import MEET, RETURN, return_regions, withdrawn
from pdsim.core.errors import InvalidBatch, MessageError, TransferFailed
from pdsim.transfer import Peer, Region

__all__ = ["CONNECT_TIMEOUT", "ConnectedPeers"]

CONNECT_TIMEOUT = 10.0
"""Seconds that `connect` waits for an answer.  On one host it comes in milliseconds or not at all."""


class ConnectedPeers:
    """All peers of one endpoint, by the token of their life.

    Another life of a rank has another token and so another state: what was known of the first stays, because its
    transfers may still be moving.  All calls are on the clock's thread.
    """

    def __init__(self, engine: EngineHooks, control: Control, dispatch: Callable[[PeerState], None]) -> None:
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
        """Do as `connect_engine` does, with one error for a description that the engine cannot read."""
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
