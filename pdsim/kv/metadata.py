# SPDX-License-Identifier: Apache-2.0
"""First-token metadata of a request: where its rows lie on a rank, and which way they go to the other side.

Over the data path the rows are descriptors like any others, from registered memory to registered memory.  Over the
control channel they are a message, which finds rows wherever they lie, and which every pair of ranks can fall back
to.

A row belongs to a room, not to a slot number: a message is stored in the slot that its room has *now*, so that what
comes late finds no slot, and any number can be a room's, 0 too.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdsim.kv.layout import AUX_BYTES, AUX_ROWS, KvLayout
from pdsim.kv.policy import Policy
from pdsim.transfer import Buffer

__all__ = ["HostRows", "load", "route", "store"]


class HostRows:
    """The metadata rows of a rank in host memory, at the offsets that they would have in its pool.

    It has the parts of a `pdsim.transfer.Buffer` that reading and writing need, and is never registered.
    """

    pool = "host"
    address = 0

    def __init__(self, layout: KvLayout) -> None:
        self._start = layout.kv_bytes
        self._bytes = bytearray(layout.slots * AUX_BYTES)
        self.size = self._start + len(self._bytes)

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of *size* bytes at *offset*.  Raise an `IndexError` outside the rows."""
        first = self._first(offset, size)
        return bytes(self._bytes[first : first + size])

    def write(self, offset: int, data: bytes) -> None:
        """Store *data* at *offset*; the errors of `read`."""
        first = self._first(offset, len(data))
        self._bytes[first : first + len(data)] = data

    def _first(self, offset: int, size: int) -> int:
        if size < 0 or offset < self._start or offset + size > self.size:
            raise IndexError(f"[{offset}, {offset + size}) is outside the rows, [{self._start}, {self.size})")
        return offset - self._start


def route(policy: Policy, mine: Sequence[int], theirs: Sequence[int]) -> tuple[str, str]:
    """Return the way of metadata between ranks whose rows have these sizes, and why it is not the policy's, or "".

    Descriptors pair row by row, so rows that are not the same in number and size go over the control channel.
    """
    way = policy.metadata_by
    if way == "control" or tuple(mine) == tuple(theirs):
        return way, ""
    return "control", f"{len(mine)} rows of {sum(mine)} B here, {len(theirs)} of {sum(theirs)} B there"


def load(rows: Buffer, layout: KvLayout, slot: int, contents: bool) -> tuple[bytes, ...]:
    """Return the rows of *slot*; zeros of the same sizes if the memory keeps no *contents*."""
    if not contents:
        return tuple(bytes(size) for size in AUX_ROWS)
    return tuple(rows.read(at, size) for at, size in zip(layout.aux_offsets(slot).tolist(), AUX_ROWS, strict=True))


def store(rows: Buffer, layout: KvLayout, slot: int, data: Sequence[bytes]) -> None:
    """Write *data* to the rows of *slot*: as many rows, and of each as many bytes, as both sides have.

    The rows are those of `load` on the other side.
    """
    for at, size, row in zip(layout.aux_offsets(slot).tolist(), AUX_ROWS, data, strict=False):
        rows.write(at, row[:size])
