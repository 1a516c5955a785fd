# SPDX-License-Identifier: Apache-2.0
"""The bare libraries: Mooncake's TransferEngine and NIXL, and memory from CUDA's runtime or the host.

No wrapper of the project is used, and nothing here is used by one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.probe.plan import Variant

HOST_NAME = "127.0.0.1"


class Memory:
    """One allocation of *size* bytes: on GPU *gpu*, or on the host where it is None."""

    def __init__(self, size: int, gpu: int | None) -> None:
        self.size, self.gpu = size, gpu
        if gpu is None:
            self._map = mmap.mmap(-1, size)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
            return
        self._cuda = _cudart()
        self.select()
        pointer = ctypes.c_void_p()
        self._check(self._cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)), "cudaMalloc")
        assert pointer.value is not None
        self.address = pointer.value

    def select(self) -> None:
        """Make the calling thread work on this GPU."""
        if self.gpu is not None:
            self._check(self._cuda.cudaSetDevice(self.gpu), "cudaSetDevice")

    def fill(self, offset: int, size: int, value: int) -> None:
        """Set *size* bytes to *value*."""
        if self.gpu is None:
            ctypes.memset(self.address + offset, value, size)
            return
        where = ctypes.c_void_p(self.address + offset)
        self._check(self._cuda.cudaMemset(where, value, ctypes.c_size_t(size)), "cudaMemset")
        self._check(self._cuda.cudaDeviceSynchronize(), "cudaDeviceSynchronize")

    def peek(self, offset: int) -> int:
        """Return one byte."""
        if self.gpu is None:
            return ctypes.string_at(self.address + offset, 1)[0]
        byte = ctypes.c_ubyte()
        where = ctypes.c_void_p(self.address + offset)
        self._check(self._cuda.cudaMemcpy(ctypes.byref(byte), where, ctypes.c_size_t(1), 2), "cudaMemcpy")
        return byte.value

    def launch_ns(self, clock: Callable[[], int], count: int = 500) -> float:
        """Return the nanoseconds that the host takes to launch one small copy within the GPU."""
        here, there = ctypes.c_void_p(self.address), ctypes.c_void_p(self.address + 4096)
        size, none = ctypes.c_size_t(4096), ctypes.c_void_p(0)
        begin = clock()
        for _ in range(count):
            self._cuda.cudaMemcpyAsync(there, here, size, 3, none)
        end = clock()
        self._check(self._cuda.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
        return (end - begin) / count

    def _check(self, code: int, call: str) -> None:
        if code:
            raise RuntimeError(f"{call} on GPU {self.gpu} returned {code}")


def _cudart() -> Any:
    """Load CUDA's runtime so that libraries which need it find it."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = [file for folder in folders for file in sorted(folder.glob("*/lib/libcudart.so.13"))]
    cuda = ctypes.CDLL(str(found[0]) if found else "libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
    cuda.cudaGetErrorString.restype = ctypes.c_char_p
    return cuda


class Mooncake:
    """``mooncake.engine.TransferEngine``: intra-node NVLink on GPUs, TCP on the host."""

    def __init__(self, name: str, variant: Variant, memory: Memory) -> None:  # noqa: ARG002 as `Nixl`
        if memory.gpu is None:
            os.environ["MC_FORCE_TCP"] = "1"
            os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] = "65535"
        else:
            os.environ["MC_INTRANODE_NVLINK"] = "1"
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.engine import TransferEngine

        self.memory, self.blocking = memory, variant.blocking
        self.engine = TransferEngine()
        protocol = "tcp" if memory.gpu is None else "rdma"
        if self.engine.initialize(HOST_NAME, "P2PHANDSHAKE", protocol, ""):
            raise RuntimeError("TransferEngine.initialize failed")
        if self.engine.register_memory(memory.address, memory.size):
            raise RuntimeError(f"register_memory of {memory.size} bytes failed")

    def describe(self) -> tuple[Any, int]:
        """Return what peers need: the session, and the address of the memory."""
        return f"{HOST_NAME}:{self.engine.get_rpc_port()}", self.memory.address

    def meet(self, description: tuple[Any, int]) -> tuple[Any, int]:
        """Return the peer: Mooncake connects at the first transfer."""
        return description

    def prepare(self, peer: tuple[Any, int], operation: str, near: Any, far: Any, size: int) -> Any:
        """Return a call for pieces of *size* bytes at the offsets *near*, here, and *far*, there, as arrays."""
        session, base = peer
        buffers = (near + self.memory.address).tolist()
        addresses = (far + base).tolist()
        way = "sync" if self.blocking else "async"
        call = getattr(self.engine, f"batch_transfer_{way}_{operation}")
        return call, session, buffers, addresses, [size] * len(near)

    def post(self, prepared: Any) -> Any:
        """Post, or, if blocking, transfer."""
        call, *arguments = prepared
        answer = call(*arguments)
        if (self.blocking and answer) or (not self.blocking and not answer):
            raise RuntimeError(f"Mooncake returned {answer}")
        return answer

    def done(self, posted: Any) -> bool:
        """Wait for the end: Mooncake's own call blocks."""
        if not self.blocking and self.engine.get_batch_transfer_status([posted]):
            raise RuntimeError("Mooncake: a transfer failed")
        return True

    def release(self, posted: Any) -> None:
        """Do nothing: a batch is freed with its status."""

    def progress(self) -> None:
        """Do nothing: the engine has threads."""


class Nixl:
    """``nixl_cu13``'s agent with UCX: cuda_ipc between GPUs, TCP on the host."""

    def __init__(self, name: str, variant: Variant, memory: Memory) -> None:
        tls = "tcp,self" if memory.gpu is None else "cuda_ipc,cuda_copy,tcp,self"
        os.environ.update(UCX_TLS=tls, UCX_NET_DEVICES="lo", UCX_MODULES="^ib", UCX_LOG_LEVEL="error")
        logging.getLogger("nixl").setLevel(logging.WARNING)
        from nixl_cu13 import _api

        self.memory = memory
        self.kind = "DRAM" if memory.gpu is None else "VRAM"
        config = _api.nixl_agent_config(enable_prog_thread=variant.progress, num_threads=variant.workers)
        self.agent = _api.nixl_agent(name, config)
        self.agent.register_memory([(memory.address, memory.size, memory.gpu or 0, "")], self.kind)

    def describe(self) -> tuple[Any, int, int]:
        """Return what peers need: metadata, the address of the memory and its GPU."""
        return self.agent.get_agent_metadata(), self.memory.address, self.memory.gpu or 0

    def meet(self, description: tuple[Any, int, int]) -> tuple[Any, int, int]:
        """Return the peer."""
        metadata, address, gpu = description
        return self.agent.add_remote_agent(metadata), address, gpu

    def prepare(self, peer: tuple[Any, int, int], operation: str, near: Any, far: Any, size: int) -> Any:
        """Return a handle for pieces of *size* bytes at the offsets *near*, here, and *far*, there."""
        agent, base, gpu = peer
        own = self.memory.gpu or 0
        here = self.agent.get_xfer_descs(_rows(self.memory.address, near, size, own), self.kind)
        there = self.agent.get_xfer_descs(_rows(base, far, size, gpu), self.kind)
        return self.agent.initialize_xfer(operation.upper(), here, there, agent)

    def post(self, prepared: Any) -> Any:
        """Post."""
        if self.agent.transfer(prepared) == "ERR":
            raise RuntimeError("NIXL: transfer failed")
        return prepared

    def done(self, posted: Any) -> bool:
        """Return whether it has ended."""
        state = self.agent.check_xfer_state(posted)
        if state == "ERR":
            raise RuntimeError("NIXL: a transfer failed")
        return bool(state == "DONE")

    def release(self, posted: Any) -> None:
        """Give the handle back."""
        self.agent.release_xfer_handle(posted)

    def progress(self) -> None:
        """Let UCX work for peers."""
        self.agent.get_new_notifs()


def _rows(address: int, offsets: Any, size: int, device: int) -> Any:
    import numpy as np

    rows = np.empty((len(offsets), 3), np.uint64)
    rows[:, 0] = offsets + np.uint64(address)
    rows[:, 1] = size
    rows[:, 2] = device
    return rows


LIBRARIES: dict[str, Any] = {"mooncake": Mooncake, "nixl": Nixl}
