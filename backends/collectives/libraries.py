"""The libraries that groups of real ranks gather with: Gloo on host memory, NCCL and symmetric memory on GPUs.

All come with PyTorch, which is imported on the thread that connects a group: a rank in no group never loads it.
NVLink multicast is not used by any of them here: `connect` refuses to run with it switched on.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.util
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from backends.base.host import HostBuffer, HostDevice, HostPiece
from backends.collectives.base import Library, Settings
from pdsim.errors import (
    BackendUnavailable,
    ConfigError,
    OutOfMemory,
    PeerLost,
    TransferError,
    TransferFailed,
    TransferTimeout,
)

__all__ = ["Gloo", "library"]


def library(settings: Settings, device: Any) -> Library:
    """Return what *settings* choose, for the memory of *device*.

    Raise `BackendUnavailable` without PyTorch, and a `ConfigError` if the library cannot move that memory.
    """
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable(f"collective={settings.name} needs PyTorch; pip install 'pdsim[torch]'")
    on_host = isinstance(device, HostDevice)
    if on_host != (settings.implementation == "gloo"):
        way = "collective=gloo" if on_host else "collective=nccl"
        raise ConfigError(f"collective={settings.name} does not gather memory of {device.name}; choose {way}")
    if on_host:
        return Gloo(device, settings.timeout)
    from backends.collectives.nccl import Nccl, SymmetricMemory

    return (Nccl if settings.implementation == "nccl" else SymmetricMemory)(device, settings.timeout)


def store(count: int, host: str, port: int, listener: socket.socket | None, seconds: float) -> Any:
    """Return the store at which the ranks of a group meet; the first serves it on *listener*."""
    import torch.distributed as dist

    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=seconds), "wait_for_workers": False}
    if listener is not None:
        options["master_listen_fd"] = os.dup(listener.fileno())  # which is the store's from here on
    return dist.TCPStore(host, port, count, is_master=listener is not None, **options)


def translated(error: Exception, engine: str) -> TransferError:
    """Return what PyTorch's *error*, which has no classes of its own, means."""
    if isinstance(error, TransferError):
        return error
    text = " ".join(str(error).split())[:300]
    lowered = text.lower()
    if "out of memory" in lowered:
        return OutOfMemory(f"{engine}: {text}")
    if any(words in lowered for words in ("closed by peer", "connection reset", "broken pipe", "connection refused")):
        return PeerLost(f"{engine}: {text}")
    if "timed out" in lowered or "timeout" in lowered:
        return TransferTimeout(f"{engine}: {text}")
    return TransferFailed(f"{engine}: {text}")


class Gloo(Library):
    """Host memory over TCP.  Symmetric memory is an account here: it is as fast as plain memory."""

    engine = "gloo"

    def __init__(self, device: HostDevice, timeout: float) -> None:
        self._device = device
        self._timeout = timeout
        self._group: Any = None
        self._store: Any = None

    def connect(self, index: int, count: int, host: str, port: int, listener: socket.socket | None) -> None:
        """Meet; see `Library.connect`."""
        import torch.distributed as dist

        try:
            self._store = store(count, host, port, listener, self._timeout)
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = datetime.timedelta(seconds=self._timeout)
            self._group = dist.ProcessGroupGloo(self._store, index, count, options)
        except RuntimeError as error:
            raise translated(error, self.engine) from error

    def start(self, source: Any, target: Any, size: int, symmetric: bool) -> Any:  # noqa: ARG002 all memory is alike
        """Begin; see `Library.start`."""
        whole = self._tensor(target)[: size * self._group.size()]
        try:
            return self._group._allgather_base(whole, self._tensor(source)[:size]), time.monotonic()
        except RuntimeError as error:
            raise translated(error, self.engine) from error

    def poll(self, work: Any) -> float | None:
        """Return the seconds since the begin, once *work* is over."""
        operation, began = work
        if not operation.is_completed():
            return None
        found = None
        try:
            operation.wait()
        except RuntimeError as error:  # which would keep the operation, and so the memory, in its traceback
            found = translated(error, self.engine)
        if found is not None:
            raise found
        return time.monotonic() - float(began)

    def reserve(self, size: int) -> Callable[[], None]:
        """Allocate; host memory needs no registration."""
        whole = HostBuffer(size, "symmetric")

        def cut(offset: int, part: int, give_back: Callable[[], None]) -> HostPiece:
            return HostPiece(whole, offset, part, give_back)

        return lambda: self._device.symmetric.add(size, cut)

    def abort(self) -> None:
        """Close all connections; a gather under way fails at that."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
            group.shutdown()

    def _tensor(self, buffer: HostBuffer) -> Any:
        """Return *buffer* as a tensor.

        By its address: Gloo's threads let go of a tensor some time after the end, and must not keep the memory.
        """
        import torch

        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * buffer.size).from_address(buffer.address)))
