# SPDX-License-Identifier: Apache-2.0
"""Real memory as a `Device`: accounts, quarantine, and a queue of emulated work.

`HostDevice` is memory that the processor copies.  Engines mark buffers as *registered* while they know their
addresses, and *hold* those that bytes may still move in or out of: held memory is neither given back nor used again.
"""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from simpy.events import Event

from pdsim.core.clock import WallClock
from pdsim.core.errors import OutOfMemory, RegistrationError
from pdsim.core.units import format_size
from pdsim.transfer import Batch, Buffer, Region
from pdsim.transfer.batch import Arena, move
from pdsim.transfer.group import SYMMETRIC

POOLS = ("default", SYMMETRIC, "nvlink")
"""The pools that `pdsim.transfer.Device` names; here they differ in nothing but their accounts."""


class RealBuffer(ABC):
    """Zeroed memory at *address*, a pointer of this process; it goes back when it is freed and nothing holds it."""

    def __init__(self, address: int, size: int, pool: str) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.registered = False  # whether an engine knows the address; set by endpoints
        self.holds = 0  # reasons for which bytes may still move here, counted by who moves them
        self.freed = False  # whether its owner has given it back

    def read(self, offset: int, size: int) -> bytes:
        self._check(offset, size)
        return self._load(offset, size)

    def write(self, offset: int, data: bytes) -> None:
        self._check(offset, len(data))
        self._store(offset, data)

    @abstractmethod
    def unmap(self) -> None:
        """Give the memory back to the system.  Nothing may know its address any more."""

    @abstractmethod
    def _load(self, offset: int, size: int) -> bytes: ...

    @abstractmethod
    def _store(self, offset: int, data: bytes) -> None: ...

    def _check(self, offset: int, size: int) -> None:
        if self.freed:
            raise IndexError("this buffer was freed")
        if offset < 0 or size < 0 or offset + size > self.size:
            raise IndexError(f"[{offset}, {offset + size}) is outside a buffer of {self.size} bytes")


class RealDevice(ABC):
    """Memory of limited capacity, and one queue of emulated work; subclasses provide memory (`_make`) and copies.

    Used on the clock's thread, but for `enter`, which every thread of an engine calls for itself.
    """

    holds_bytes = True  # contents can be read, and compared

    def __init__(self, clock: WallClock, capacity: int, name: str = "cpu") -> None:
        if capacity <= 0:
            raise ValueError(f"capacity must be > 0 bytes, got {capacity}")
        self.clock = clock
        self.name = name  # such as "cpu" or "cuda:0"
        self.capacity = capacity  # bytes that may be allocated, held ones included
        self.symmetric = ReservedPool(name)  # that groups reserve
        self.peak = dict.fromkeys(POOLS, 0)  # most bytes of each pool so far
        self._used = dict.fromkeys(POOLS, 0)
        self._buffers: dict[int, RealBuffer] = {}  # by address
        self._free_at = 0.0  # when the queue of work is empty

    @abstractmethod
    def copy(self, batch: Batch) -> Event: ...

    @abstractmethod
    def _make(self, size: int, pool: str) -> RealBuffer: ...

    def enter(self) -> None:  # noqa: B027 most devices are every thread's
        """Make the calling thread work on this device, as engines expect of threads that call them."""

    def close(self) -> None:  # noqa: B027 most devices hold nothing but memory
        """Give back all but memory, which the end of the process gives back."""

    @property
    def used(self) -> int:
        return sum(self._used.values())

    def allocate(self, size: int, pool: str = "default") -> RealBuffer:
        """As `pdsim.transfer.Device.allocate`; a size below 1 and an unknown pool are a `ValueError`."""
        if size <= 0:
            raise ValueError(f"size must be > 0 bytes, got {size}")
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
        if pool == SYMMETRIC:
            buffer: RealBuffer = self.symmetric.allocate(size)
        else:
            self._check_room(size)
            buffer = self._make(size, pool)
            self.account(size, pool)
        self._buffers[buffer.address] = buffer
        return buffer

    def account(self, size: int, pool: str) -> None:
        """Note that *pool* takes *size* bytes more, or gives them back.  Raise `OutOfMemory` beyond the capacity."""
        self._check_room(size)
        self._used[pool] += size
        self.peak[pool] = max(self.peak[pool], self._used[pool])

    def _check_room(self, size: int) -> None:
        if self.used + size > self.capacity:
            raise OutOfMemory(
                f"{self.name}: {size} bytes asked for, {self.capacity - self.used} of {self.capacity} left; "
                f"free something, or give the rank more memory"
            )

    def free(self, buffer: Buffer) -> None:
        """As `pdsim.transfer.Device.free`; if bytes may still move in it, it goes back when they have stopped."""
        own = self._buffers.get(buffer.address)
        if own is not buffer or own.freed:
            raise ValueError(f"{buffer!r} is not allocated on {self.name}")
        if own.registered:
            raise RegistrationError("the buffer is registered with an endpoint; deregister its region first")
        own.freed = True
        self._reclaim(own)

    def hold(self, buffer: RealBuffer) -> None:
        """Keep *buffer*'s memory, even if it is freed, until `release` was called as often."""
        buffer.holds += 1

    def release(self, buffer: RealBuffer) -> None:
        buffer.holds -= 1
        self._reclaim(buffer)

    def _reclaim(self, buffer: RealBuffer) -> None:
        if not buffer.freed or buffer.holds:
            return
        del self._buffers[buffer.address]
        if buffer.pool != SYMMETRIC:  # whose memory was accounted when it was reserved
            self.account(-buffer.size, buffer.pool)
        buffer.unmap()

    def buffer_of(self, region: Region) -> RealBuffer:
        """Return the buffer behind *region*; a `RegistrationError` if there is none on this device."""
        buffer = self._buffers.get(region.address)
        if buffer is None or buffer.freed or buffer.size < region.size:
            raise RegistrationError(
                f"region {region.owner}/{region.name} is not memory of {self.name}, or not any more"
            )
        return buffer

    def compute(self, seconds: float) -> Event:
        if seconds < 0:
            raise ValueError(f"seconds must be >= 0, got {seconds}")
        self._free_at = max(self._free_at, self.clock.now) + seconds
        return self.clock.at(self._free_at)


Cut = Callable[[int, int, Callable[[], None]], Any]
"""``cut(offset, size, give_back)`` returns a buffer of a part of a segment, which calls *give_back* at its end."""


class ReservedPool:
    """Segments that `Group.reserve` has added; they stay until the process ends."""

    def __init__(self, device: str) -> None:
        self.owner: object = None  # the one group whose gathers may use it: that which reserved it
        self.reserved = 0  # bytes
        self._device = device
        self._segments: list[tuple[Arena, Cut]] = []

    def add(self, size: int, cut: Cut) -> None:
        """Add a segment of *size* bytes, whose buffers *cut* makes."""
        self._segments.append((Arena(size), cut))
        self.reserved += size

    def allocate(self, size: int) -> Any:
        """Return a buffer of *size* bytes.  Raise `OutOfMemory` if no segment has that much in one piece."""
        for arena, cut in self._segments:
            offset = arena.take(size)
            if offset is not None:
                return cut(offset, size, partial(arena.give, offset, size))
        used = self.reserved - sum(arena.free for arena, _ in self._segments)
        raise OutOfMemory(
            f"{format_size(size)} do not fit into the symmetric pool of {self._device}: {format_size(used)} of "
            f"{format_size(self.reserved)} are in use; have all ranks reserve more with Group.reserve"
        )


class HostBuffer(RealBuffer):
    """Host memory: *bytes*, shape (size,), which goes back by *give_back*."""

    def __init__(self, view: npt.NDArray[np.uint8], pool: str, give_back: Callable[[], object]) -> None:
        self.bytes = view
        self._give_back = give_back
        super().__init__(int(view.ctypes.data), len(view), pool)

    def _load(self, offset: int, size: int) -> bytes:
        return self.bytes[offset : offset + size].tobytes()

    def _store(self, offset: int, data: bytes) -> None:
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def unmap(self) -> None:
        """Give the memory back; a `BufferError` while somebody else still has a view of a whole mapping."""
        self.bytes = np.empty(0, np.uint8)
        self._give_back()


def host_buffer(size: int, pool: str) -> HostBuffer:
    """Return anonymous memory of this process, zeroed and page-aligned."""
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return HostBuffer(np.frombuffer(mapping, np.uint8), pool, mapping.close)


class HostDevice(RealDevice):
    """Host memory of limited capacity.  The processor copies, at once, within the turn of the clock that is due."""

    def _make(self, size: int, pool: str) -> HostBuffer:
        return host_buffer(size, pool)

    def copy(self, batch: Batch) -> Event:
        views = [self._bytes(batch.source), self._bytes(batch.target)]

        def run(_: Event) -> None:
            source, target = views
            views.clear()  # a program that waits for this may free the memory, which must have no users then
            move(source, target, batch.source_offset, batch.target_offset, batch.size)

        done = self.compute(0.0)
        assert done.callbacks is not None
        done.callbacks.append(run)
        return done

    def _bytes(self, region: Region) -> npt.NDArray[np.uint8]:
        buffer = self.buffer_of(region)
        assert isinstance(buffer, HostBuffer)
        return buffer.bytes
