# SPDX-License-Identifier: Apache-2.0
"""Groups on GPU memory: NCCL, and PyTorch's symmetric memory read by the copy engines.

A group is a communicator of its own, which the ranks make at a store that the first of them opens.  PyTorch's
default process group is made only where its symmetric memory needs one.
"""

import datetime
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from backends.collectives.base import Library, gather, store, translating, without_pytorch
from backends.cuda.gather import area
from pdsim.core.errors import BackendUnavailable
from pdsim.transfer.group import SYMMETRIC

# keeps libraries from NVLink multicast, which needs rights on the switch that a rank may not have
SWITCHES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

BUSY = 1_500_000
"""Cycles that a stream is kept busy with, some 0.8 ms, where the device alone is timed: launches fall into them."""

SEGMENT = 2 << 20  # bytes that reservations are rounded up to: the granularity of CUDA's virtual memory


class Nccl(Library):
    """NCCL.  Symmetric memory is allocated by it (`ncclMemAlloc`) and registered as buffers of the user's.

    Gathers go to one stream in the order of the calls.  Times are those between two CUDA events around each, in
    seconds, so they contain no polling.  With ``timing="device"`` they contain neither launch nor waiting for the
    others: the stream is kept busy until both events and the gather are queued, and a gather of a few bytes before
    the first event lets the streams of all ranks go on together.
    """

    engine = "nccl"
    memory = "gpu"
    window: ClassVar[dict[str, bool]] = {}  # how symmetric memory is registered
    times_device = True
    _stream: Any = None
    _group: Any = None

    @classmethod
    def missing(cls) -> str:
        return without_pytorch()

    def __init__(self, device: Any, timeout: float) -> None:
        super().__init__(device, timeout)
        for name, value in SWITCHES.items():
            if os.environ.setdefault(name, value) != value:
                raise BackendUnavailable(
                    f"{name}={os.environ[name]} switches NVLink multicast on; set it to {value}"
                )
        self._kept: list[Any] = []  # what reserved memory lives in
        self._tensors: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # views, as long as their buffers live

    def connect(self, index: int, count: int, host: str, port: int, listener: socket.socket | None) -> None:
        import torch
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(self._device.gpu)
        self._index, self._count = index, count
        self._stream = torch.cuda.Stream()
        with translating(self.engine):
            self._store = store(count, host, port, listener, self._timeout)
            options = ProcessGroupNCCL.Options()
            options._timeout = datetime.timedelta(seconds=self._timeout)
            self._group = ProcessGroupNCCL(self._store, index, count, options)
            with torch.cuda.stream(self._stream):
                one = torch.zeros(16, dtype=torch.uint8, device="cuda")
                every = torch.zeros(16 * count, dtype=torch.uint8, device="cuda")
                self._few = one, every  # bytes that streams go on together with
                self._gather(one, every, symmetric=False)
            self._stream.synchronize()

    def start(self, source: Any, target: Any, size: int, symmetric: bool, places: Sequence[tuple[int, int]]) -> Any:
        # Nothing here waits: the gathers are queued on the stream, and *end* happens when they are over.
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with translating(self.engine), torch.cuda.stream(self._stream):
            if self.timing == "device":
                torch.cuda._sleep(BUSY)
                self._gather(*self._few, symmetric=False)
            begin.record(self._stream)
            piece, whole, all_of = self._tensor(source), self._tensor(target), size * self._count
            for start, place in places:
                self._gather(piece[start : start + size], whole[place : place + all_of], symmetric)
            end.record(self._stream)
        return begin, end

    def _gather(self, piece: Any, whole: Any, symmetric: bool) -> None:  # noqa: ARG002 NCCL knows what is registered
        gather(self._group, whole, piece).wait()  # the stream waits, not this thread

    def poll(self, work: Any) -> float | None:
        begin, end = work
        with translating(self.engine):
            return float(begin.elapsed_time(end)) / 1e3 if end.query() else None

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
        if self._stream is not None:
            self._stream.synchronize()

    def reserve(self, size: int) -> Callable[[], None]:
        import torch

        torch.cuda.set_device(self._device.gpu)
        with translating(self.engine):
            pool = torch.cuda.MemPool(self._group.mem_allocator)
            with torch.cuda.use_mem_pool(pool):
                whole = torch.empty(-(-size // SEGMENT) * SEGMENT, dtype=torch.uint8, device="cuda")
            self._group.register_mem_pool(pool, **self.window)
            torch.cuda.synchronize()
        self._kept.append(pool)
        return self._add(whole, size)

    def _add(self, whole: Any, size: int) -> Callable[[], None]:
        # Buffers that are cut from it are zeroed first, which waits for the stream.
        import torch

        self._kept.append(whole)
        stream, base, device = self._stream, int(whole.data_ptr()), self._device

        def cut(offset: int, part: int, give_back: Callable[[], None]) -> Any:
            from backends.cuda.cuda_device import CudaBuffer

            with torch.cuda.stream(stream):
                whole[offset : offset + part].zero_()
            stream.synchronize()
            piece: Any = CudaBuffer(device, base + offset, part, SYMMETRIC)
            piece.unmap = give_back
            return piece

        return lambda: self._device.symmetric.add(size, cut)

    def _tensor(self, buffer: Any) -> Any:
        if buffer not in self._tensors:
            self._tensors[buffer] = area(buffer.address, buffer.size, f"cuda:{self._device.gpu}")
        return self._tensors[buffer]


class NcclWindow(Nccl):
    """NCCL with symmetric memory registered as windows (``ncclCommWindowRegister``), for its symmetric kernels.

    Those take half the time of the others for pieces of 1 to 4 MiB, and a third more than registered memory from
    64 MiB on (2 x H200, `data/benchmarks`).
    """

    window: ClassVar[dict[str, bool]] = {"symm": True}


class SymmetricMemory(Nccl):
    """PyTorch's symmetric memory: every rank reads the pieces of the others with its copy engines.

    Where only the targets are symmetric it writes its own piece to them instead.  A barrier before sees to it that
    the pieces are there, one after that nobody writes to one that is still read.  Plain memory goes through NCCL.
    """

    engine = "symm_mem"

    def __init__(self, device: Any, timeout: float) -> None:
        super().__init__(device, timeout)
        self._handles: list[tuple[int, int, Any]] = []  # address, size, and what maps the others' segments

    def reserve(self, size: int) -> Callable[[], None]:
        import torch
        import torch.distributed._symmetric_memory as symmetric
        from torch.distributed import distributed_c10d as c10d

        torch.cuda.set_device(self._device.gpu)
        with translating(self.engine):
            if not c10d.is_initialized():  # rendezvous needs PyTorch's default process group
                store = c10d.PrefixStore("symm_mem", self._store)
                c10d.init_process_group("nccl", store=store, rank=self._index, world_size=self._count)
            whole = symmetric.empty(-(-size // SEGMENT) * SEGMENT, dtype=torch.uint8, device="cuda")
            handle = symmetric.rendezvous(whole, c10d.group.WORLD.group_name)
            torch.cuda.synchronize()
        self._handles.append((int(whole.data_ptr()), whole.numel(), handle))
        return self._add(whole, size)

    def _gather(self, piece: Any, whole: Any, symmetric: bool) -> None:
        if not symmetric:
            super()._gather(piece, whole, symmetric)
            return
        import torch

        size, read = piece.numel(), self._handle(piece) is not None
        shared = piece if read else whole
        base, handle = self._handle(shared) or (0, None)
        assert handle is not None
        handle.barrier(channel=0)
        for step in range(self._count):  # each begins with another peer, so that no port is everybody's first
            peer = (self._index + step) % self._count
            theirs = shared
            if peer != self._index:
                theirs = handle.get_buffer(peer, (shared.numel(),), torch.uint8, shared.data_ptr() - base)
            if read:
                whole[peer * size : (peer + 1) * size].copy_(theirs)
            else:
                theirs[self._index * size : (self._index + 1) * size].copy_(piece)
        handle.barrier(channel=1)

    def _handle(self, tensor: Any) -> tuple[int, Any] | None:
        address = tensor.data_ptr()
        return next(((base, one) for base, size, one in self._handles if base <= address < base + size), None)
