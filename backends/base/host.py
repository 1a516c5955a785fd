# SPDX-License-Identifier: Apache-2.0
"""Host memory as a `Device`: real bytes that the processor copies.  Computation is emulated by waiting.

It serves ranks without a GPU: `target=real hw=loopback` moves real bytes of such memory on any
machine.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from simpy.events import Event

from backends.base.device import RealBuffer, RealDevice
from pdsim.core.clock import WallClock
from pdsim.transfer import Batch, Region
from pdsim.transfer.batch import move
from pdsim.transfer.group import SYMMETRIC

__all__ = ["HostBuffer", "HostDevice", "HostPiece"]


class HostBuffer(RealBuffer):
    """Anonymous memory of this process, zeroed and page-aligned.

    *bytes* is a view of shape (size,), which `unmap` replaces by an empty one.  `unmap` fails with a `BufferError`
    while somebody else still has a view of the memory.
    """

    def __init__(self, size: int, pool: str) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)  # shape (size,)
        super().__init__(int(self.bytes.ctypes.data), size, pool)

    def _load(self, offset: int, size: int) -> bytes:
        return self.bytes[offset : offset + size].tobytes()

    def _store(self, offset: int, data: bytes) -> None:
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def unmap(self) -> None:
        """Give the memory back to the system.  Nothing may know its address any more."""
        self.bytes = np.empty(0, np.uint8)
        self._map.close()


class HostPiece(HostBuffer):
    """Part of a buffer that a group has reserved."""

    def __init__(self, whole: HostBuffer, offset: int, size: int, give_back: Callable[[], None]) -> None:
        self.bytes = whole.bytes[offset : offset + size]
        self.bytes[:] = 0
        self._give_back = give_back
        RealBuffer.__init__(self, int(self.bytes.ctypes.data), size, SYMMETRIC)

    def unmap(self) -> None:
        """Give the memory back to the pool."""
        self.bytes = np.empty(0, np.uint8)
        self._give_back()


class HostDevice(RealDevice):
    """Host memory of limited capacity.

    Ranks on hosts use it; copies are made by the processor, at once, within the turn of the clock that they are due
    in.
    """

    def __init__(self, clock: WallClock, capacity: int, name: str = "cpu") -> None:
        super().__init__(clock, capacity, name)

    def _make(self, size: int, pool: str) -> HostBuffer:
        return HostBuffer(size, pool)

    def copy(self, batch: Batch) -> Event:
        """Copy within host memory, after the work that was asked for before."""
        views = [self._bytes(batch.source), self._bytes(batch.target)]

        def run(_: Event) -> None:
            source, target = views
            views.clear()  # a program that waits for this may free the memory, which must have no users then
            move(source, target, batch.source_offset, batch.target_offset, batch.size)

        done = self._enqueue(0.0)
        assert done.callbacks is not None
        done.callbacks.append(run)
        return done

    def _bytes(self, region: Region) -> npt.NDArray[np.uint8]:
        buffer = self.buffer_of(region)
        assert isinstance(buffer, HostBuffer)
        return buffer.bytes
