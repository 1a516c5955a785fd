# SPDX-License-Identifier: Apache-2.0
"""Memory of a device, and the name that it has among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Buffer", "Region"]


class Buffer(Protocol):
    """Memory that a `Device` allocated.

    A buffer is valid until `Device.free`; regions over it must be deregistered first.
    """

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def pool(self) -> str:
        """The pool it came from."""

    @property
    def address(self) -> int:
        """Where it starts, in the address space of its device."""

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of *size* bytes at *offset*.

        Raise an `IndexError` outside the buffer and a `TypeError` if the device keeps no contents.
        """

    def write(self, offset: int, data: bytes) -> None:
        """Store *data* at *offset*; the errors of `read`."""


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory as either side names it.

    Plain data that may be sent: `Endpoint.address` contains the regions of an endpoint, `Peer.regions` those of a
    peer.
    """

    owner: str  # the rank that registered it
    name: str  # unique among the regions of its owner
    size: int
    address: int  # in the owner's address space
    device: str  # the owner's name for the device it lies on

    @classmethod
    def local(cls, owner: str, device: str, buffer: Buffer) -> Region:
        """Return a name for *buffer*, of *device*, that only `Device.copy` understands; no engine knows of it."""
        return cls(owner, f"local:{buffer.address:#x}", buffer.size, buffer.address, device)
