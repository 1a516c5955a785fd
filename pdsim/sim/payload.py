# SPDX-License-Identifier: Apache-2.0
"""How the bytes of simulated transfers move: together at the end or, as chance has it, in parts before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdsim.sim.connections import Part, part_of
from pdsim.sim.memory import copy_bytes, read_pieces, write_pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdsim.core.clock import Clock
    from pdsim.sim.connections import SimTransfer
    from pdsim.sim.faults import Chance, Observer
    from pdsim.sim.memory import SimBuffer, SimDevice

__all__ = ["Payload"]


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
        """Take a copy of what a part has at its source, if its transfer is still under way."""
        number, part = what
        flight = self._moving(number)
        buffers = None if flight is None else flight.buffers()
        if flight is not None and buffers is not None:
            self._read(part, flight, buffers[0])

    def _land_early(self, what: tuple[int, Part]) -> None:
        """Let what was read of a part land, if its transfer is still under way."""
        number, part = what
        flight = self._moving(number)
        buffers = None if flight is None else flight.buffers()
        if flight is not None and buffers is not None and part.pieces is not None:
            self._put(part, flight, buffers[1])

    def _read(self, part: Part, flight: SimTransfer, source: SimBuffer) -> None:
        """Keep a copy of what *part* covers at *source* now; where memory has no contents it counts as read."""
        if self._observer is not None:
            self._observer.read(part.batch, flight.transfer.label)
        exact = self._device.holds_bytes
        part.pieces = [piece.copy() for piece in read_pieces(part.batch, source)] if exact else []

    def _put(self, part: Part, flight: SimTransfer, target: SimBuffer) -> None:
        """Let *part* land at *target*."""
        if self._observer is not None:
            self._observer.landed(part.batch, flight.transfer.label)
        part.landed = True
        if self._device.holds_bytes:
            write_pieces(part.batch, target, part.pieces or [])

    def _moving(self, number: int) -> SimTransfer | None:
        """Return transfer *number* if its bytes can still move: it has not settled, and was not aborted."""
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
