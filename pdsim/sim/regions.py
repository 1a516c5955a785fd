# SPDX-License-Identifier: Apache-2.0
"""The memory that an endpoint has made known to its engine: which region is which buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdsim.core.errors import InvalidBatch, RegistrationError
from pdsim.sim.memory import SimBuffer
from pdsim.transfer import Buffer, Region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdsim.sim.memory import SimDevice

__all__ = ["RegionTable", "Registration"]


class Registration:
    """A region, its memory, and how many of the endpoint's own transfers over it have not settled.

    While there are any, the region cannot be withdrawn, and its memory is not handed out again.
    """

    __slots__ = ("buffer", "region", "unsettled")

    def __init__(self, region: Region, buffer: SimBuffer) -> None:
        self.region = region
        self.buffer = buffer
        self.unsettled = 0


class RegionTable:
    """The regions of the endpoint of rank *owner*, by name, all of them in the memory of *device*.

    A buffer is registered at most once at a time, and under one name.  Errors are those that
    `pdsim.transfer.Endpoint` promises for `register`, `deregister` and for the local side of a batch.
    """

    def __init__(self, owner: str, device: SimDevice) -> None:
        self._owner = owner
        self._device = device
        self._by_name: dict[str, Registration] = {}

    def __len__(self) -> int:
        """Return how many regions are registered."""
        return len(self._by_name)

    def __iter__(self) -> Iterator[Region]:
        """Yield the regions in the order in which they were registered."""
        return (registration.region for registration in self._by_name.values())

    def add(self, buffer: Buffer, name: str) -> Region:
        """Register *buffer* as region *name*.

        Raises:
            RegistrationError: the name is taken, or the buffer is not of this device or registered already.
        """
        if name in self._by_name:
            raise RegistrationError(f"{self._owner} has a region {name!r} already; take another name")
        if not isinstance(buffer, SimBuffer) or not self._device.owns(buffer):
            raise RegistrationError(
                f"{buffer!r} is not allocated on {self._device.name}; register what allocate returns"
            )
        if buffer.registered:
            raise RegistrationError(f"{buffer!r} is registered already, as {buffer.registered!r}")
        region = Region(self._owner, name, buffer.size, buffer.address, self._device.name)
        self._by_name[name] = Registration(region, buffer)
        buffer.registered = name
        return region

    def remove(self, region: Region, before: Callable[[], None]) -> None:
        """Withdraw *region*, over which no transfer of this endpoint may be unsettled; call *before* just before.

        Raises:
            RegistrationError: it is not registered, or a transfer over it has not settled.
        """
        registration = self.find(region)
        if registration is None:
            raise RegistrationError(f"region {region.owner}/{region.name} is not registered with {self._owner}")
        if registration.unsettled:
            raise RegistrationError(
                f"{registration.unsettled} transfers over region {region.name!r} have not settled; wait for them"
            )
        before()
        registration.buffer.registered = ""
        del self._by_name[region.name]

    def clear(self) -> None:
        """Withdraw all regions, whatever moves over them: the endpoint has ended."""
        for registration in self._by_name.values():
            registration.buffer.registered = ""
        self._by_name.clear()

    def find(self, region: Region) -> Registration | None:
        """Return what is registered here as *region*; None if nothing is, or another region of that name."""
        found = self._by_name.get(region.name)
        return found if found is not None and (found.region is region or found.region == region) else None

    def local(self, region: Region) -> Registration:
        """Return what is registered as *region*, the poster's own side of a batch.

        Raises:
            InvalidBatch: the region is another rank's.
            RegistrationError: it is not registered, or not any more.
        """
        if region.owner != self._owner:
            raise InvalidBatch(
                f"region {region.owner}/{region.name} is not one of {self._owner}, which posts the batch"
            )
        registration = self.find(region)
        if registration is None:
            raise RegistrationError(
                f"region {region.owner}/{region.name} is not registered; register it and try again"
            )
        return registration
