"""Host memory as a `Device`: real bytes, a limit, and quarantine.  Computation is emulated by waiting.

It knows nothing of engines: they mark buffers as *registered* while they know their addresses, and *hold* buffers that
bytes may still move in or out of.  Memory that is held is not given back to the system, and not handed out again.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
from simpy.events import Event

from pdsim.clock import WallClock
from pdsim.errors import OutOfMemory, RegistrationError
from pdsim.transfer import Batch, Buffer, Region

__all__ = ["POOLS", "HostBuffer", "HostDevice"]

POOLS = ("default", "symmetric", "nvlink")
"""The pools that `pdsim.transfer.Device` names; in host memory they differ in nothing but their accounts."""


class HostBuffer:
    """Anonymous memory of this process, zeroed and page-aligned."""

    def __init__(self, size: int, pool: str) -> None:
        self.size = size
        self.pool = pool
        self.registered = False
        self.holds = 0  # reasons for which bytes may still move here
        self.freed = False
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)  # shape (size,)
        self.address = int(self.bytes.ctypes.data)

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of *size* bytes at *offset*; an `IndexError` outside the buffer."""
        self._check(offset, size)
        return self.bytes[offset : offset + size].tobytes()

    def write(self, offset: int, data: bytes) -> None:
        """Store *data* at *offset*; an `IndexError` outside the buffer."""
        self._check(offset, len(data))
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def _check(self, offset: int, size: int) -> None:
        if self.freed:
            raise IndexError("this buffer was freed")
        if offset < 0 or size < 0 or offset + size > self.size:
            raise IndexError(f"[{offset}, {offset + size}) is outside a buffer of {self.size} bytes")

    def unmap(self) -> None:
        """Give the memory back to the system.  Nothing may know its address any more."""
        self.bytes = np.empty(0, np.uint8)
        self._map.close()


class HostDevice:
    """Host memory of limited capacity, and one queue of emulated work."""

    holds_bytes = True

    def __init__(self, clock: WallClock, capacity: int, name: str = "cpu") -> None:
        if capacity <= 0:
            raise ValueError(f"capacity must be > 0 bytes, got {capacity}")
        self.clock = clock
        self.name = name
        self.capacity = capacity
        self.peak = dict.fromkeys(POOLS, 0)  # bytes
        self._used = dict.fromkeys(POOLS, 0)
        self._buffers: dict[int, HostBuffer] = {}  # by address
        self._free_at = 0.0  # when the queue of work is empty

    @property
    def used(self) -> int:
        """Bytes that are allocated or held."""
        return sum(self._used.values())

    def allocate(self, size: int, pool: str = "default") -> HostBuffer:
        """Return a zeroed buffer of *size* bytes.

        Raise a `ValueError` for a size that is not positive or an unknown pool, and `OutOfMemory` beyond the capacity.
        """
        if size <= 0:
            raise ValueError(f"size must be > 0 bytes, got {size}")
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
        if self.used + size > self.capacity:
            raise OutOfMemory(
                f"{self.name}: {size} bytes asked for, {self.capacity - self.used} of {self.capacity} left; "
                f"free something, or give the rank more memory"
            )
        buffer = HostBuffer(size, pool)
        self._buffers[buffer.address] = buffer
        self._used[pool] += size
        self.peak[pool] = max(self.peak[pool], self._used[pool])
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give *buffer* back, at once or, if bytes may still move in it, when they have stopped.

        Raise a `RegistrationError` while it is registered, and a `ValueError` if it is not a buffer of this device.
        """
        own = self._buffers.get(buffer.address)
        if own is not buffer or own.freed:
            raise ValueError(f"{buffer!r} is not allocated on {self.name}")
        if own.registered:
            raise RegistrationError("the buffer is registered with an endpoint; deregister its region first")
        own.freed = True
        self._reclaim(own)

    def hold(self, buffer: HostBuffer) -> None:
        """Keep *buffer*'s memory, freed or not, until `release`."""
        buffer.holds += 1

    def release(self, buffer: HostBuffer) -> None:
        """End one `hold`."""
        buffer.holds -= 1
        self._reclaim(buffer)

    def _reclaim(self, buffer: HostBuffer) -> None:
        if not buffer.freed or buffer.holds:
            return
        del self._buffers[buffer.address]
        self._used[buffer.pool] -= buffer.size
        buffer.unmap()

    def buffer_of(self, region: Region) -> HostBuffer:
        """Return the buffer behind *region*; a `RegistrationError` if there is none on this device."""
        buffer = self._buffers.get(region.address)
        if buffer is None or buffer.freed or buffer.size < region.size:
            raise RegistrationError(
                f"region {region.owner}/{region.name} is not memory of {self.name}, or not any more"
            )
        return buffer

    def copy(self, batch: Batch) -> Event:
        """Copy within host memory, after the work that was asked for before."""
        source, target = self.buffer_of(batch.source).bytes, self.buffer_of(batch.target).bytes

        def run(_: Event) -> None:
            for start, end, size in zip(
                batch.source_offset.tolist(), batch.target_offset.tolist(), batch.size.tolist(), strict=True
            ):
                target[end : end + size] = source[start : start + size]

        return self._enqueue(0.0, run)

    def compute(self, seconds: float) -> Event:
        """Occupy the device for *seconds* of real time, without using a processor."""
        if seconds < 0:
            raise ValueError(f"seconds must be >= 0, got {seconds}")
        return self._enqueue(seconds)

    def _enqueue(self, seconds: float, run: object = None) -> Event:
        self._free_at = max(self._free_at, self.clock.now) + seconds
        done = self.clock.at(self._free_at)
        if callable(run) and done.callbacks is not None:
            done.callbacks.append(run)
        return done
