# SPDX-License-Identifier: Apache-2.0
"""A GPU's memory as a `Device`: cudaMalloc, one segment a buffer, so that engines can share it with other processes.

Computation is emulated by waiting; copies are kernels on a stream of their own, and do not wait for computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from simpy.events import Event

from backends.base.device import RealBuffer, RealDevice
from backends.cuda.gather import Gather
from backends.cuda.runtime import SEGMENT, Cudart, cudart
from pdsim.core.clock import WallClock
from pdsim.core.errors import BackendUnavailable, TransferFailed
from pdsim.transfer import Batch


class CudaBuffer(RealBuffer):
    """One allocation of a `CudaDevice`."""

    def __init__(self, device: CudaDevice, address: int, size: int, pool: str) -> None:
        super().__init__(address, size, pool)
        self.kept = False  # peers may have it mapped for ever: it is used again, never given back to the driver
        self._device = device

    def _load(self, offset: int, size: int) -> bytes:
        return self._device.cuda.load(self.address + offset, size, self._device.stream)

    def _store(self, offset: int, data: bytes) -> None:
        self._device.cuda.store(self.address + offset, data, self._device.stream)

    def unmap(self) -> None:
        self._device.reuse(self)


class CudaDevice(RealDevice):
    """GPU number *gpu* as this process counts them; *capacity* bytes of it, or all that it has if that is less.

    Raise `BackendUnavailable` if there is no such GPU. Memory is allocated in whole segments (`SEGMENT`), zeroed,
    and used again where peers may have it mapped.
    """

    def __init__(self, clock: WallClock, gpu: int, capacity: int) -> None:
        self.cuda: Cudart = cudart()
        try:
            count = self.cuda.devices()
        except TransferFailed as error:
            raise BackendUnavailable(f"no GPU works on this machine: {error}; check the NVIDIA driver") from error
        if gpu >= count:
            raise BackendUnavailable(
                f"a rank is placed on GPU {gpu}, but this process sees {count}; choose a machine (hw) with as many, "
                f"or look at CUDA_VISIBLE_DEVICES"
            )
        self.gpu = gpu
        self.enter()
        super().__init__(clock, min(capacity, self.cuda.memory()), f"cuda:{gpu}")
        self.stream = self.cuda.stream()
        self.completions = Completions(clock, self.cuda)
        self._gather = Gather(gpu)
        self._spare: dict[int, list[int]] = {}  # segments that peers may have mapped, by size: addresses

    def enter(self) -> None:
        self.cuda.use(self.gpu)

    def close(self) -> None:
        self.completions.close()

    def _make(self, size: int, pool: str) -> CudaBuffer:
        segment = _segment(size)
        spare = self._spare.get(segment)
        address = spare.pop() if spare else self.cuda.allocate(segment)
        self.cuda.zero(address, size, self.stream)
        return CudaBuffer(self, address, size, pool)

    def reuse(self, buffer: CudaBuffer) -> None:
        if buffer.kept:
            self._spare.setdefault(_segment(buffer.size), []).append(buffer.address)
        else:
            self.cuda.free(buffer.address)

    def copy(self, batch: Batch) -> Event:
        """Copy within the GPU by one kernel over all descriptors; both buffers are held until it is over.

        The event fails with a `TransferFailed` if the GPU does.
        """
        buffers = self.buffer_of(batch.source), self.buffer_of(batch.target)
        done = self.clock.event()

        def finish(error: TransferFailed | None) -> None:
            for buffer in buffers:
                self.release(buffer)
            if error is None:
                done.succeed()
            else:
                done.fail(error)

        self._gather.copy(batch.source.address, batch.target.address, batch, self.stream)
        for buffer in buffers:
            self.hold(buffer)
        self.completions.when_done(self.stream, finish)
        return done


def _segment(size: int) -> int:
    return -(-size // SEGMENT) * SEGMENT


Done = Callable[[TransferFailed | None], None]


class Completions:
    """A `Source`.  Work of one stream ends in order, so only the oldest of each is asked for."""

    def __init__(self, clock: WallClock, cuda: Cudart) -> None:
        self._clock = clock
        self._cuda = cuda
        self._waiting: dict[int, deque[tuple[int, Done]]] = {}  # by stream: events, oldest first
        self._queues: tuple[deque[tuple[int, Done]], ...] = ()  # the same: replaced, never changed, for `poll`
        self._spare: list[int] = []  # events that nobody waits for
        clock.watch(self)

    def when_done(self, stream: int, done: Done) -> None:
        """Call *done* once all that *stream* has been given so far has ended, with the error if it failed.

        On the clock's thread, in the order of the stream.
        """
        event = self._spare.pop() if self._spare else self._cuda.event()
        self._cuda.record(event, stream)
        waiting = self._waiting.get(stream)
        if waiting is None:
            waiting = self._waiting[stream] = deque()
            self._queues = (*self._queues, waiting)
        waiting.append((event, done))

    def poll(self) -> bool:
        progressed = False
        for waiting in self._queues:
            while waiting:
                event, done = waiting[0]
                error = None
                try:
                    if not self._cuda.happened(event):
                        break
                except TransferFailed as failure:
                    error = failure.with_traceback(None)  # or it would hold this frame, which holds it
                waiting.popleft()
                self._spare.append(event)
                done(error)
                progressed = True
        return progressed

    def fileno(self) -> None:
        return  # the driver has no descriptor for it

    def busy(self) -> bool:
        return any(self._queues)

    def close(self) -> None:
        self._clock.unwatch(self)
        self._waiting.clear()
        self._queues = ()
