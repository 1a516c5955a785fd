# SPDX-License-Identifier: Apache-2.0
"""Memory that its owner has withdrawn, but that others may still be writing to.

An owner that deregisters a region tells every endpoint that knows it, and holds the memory until each has said that
none of its transfers moves there any more.  Endpoints that connect later with an older address ask first.

The notes: `WITHDRAW` and `RETURN` carry a region's name and epoch, `MEET` the epoch of the address that somebody has
connected with, and `WELCOME` the names that were withdrawn since.
"""

from __future__ import annotations

from collections.abc import Callable

from backends.base.control import Control, PeerLine, fields
from backends.base.device import RealBuffer, RealDevice
from backends.base.endpoint_state import PeerState

__all__ = ["MEET", "RETURN", "WELCOME", "WITHDRAW", "Withdrawal", "return_regions", "withdrawn"]

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
