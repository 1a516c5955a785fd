# SPDX-License-Identifier: Apache-2.0
"""Gloo: groups on host memory, over TCP.  It comes with PyTorch, which is imported on the thread that connects."""

from __future__ import annotations

import ctypes
import datetime
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from backends.base.device import HostBuffer, HostDevice, HostPiece
from backends.collectives import pytorch
from backends.collectives.base import Library

__all__ = ["Gloo"]


class Gloo(Library):
    """Host memory over TCP.  Symmetric memory is an account here: it is as fast as plain memory.

    Its threads move the bytes; the clock polls, since Gloo has no descriptor to wait for.
    """

    engine = "gloo"
    memory = "host"

    @classmethod
    def missing(cls) -> str:
        """Return what to install; see `Library.missing`."""
        return pytorch.missing()

    def __init__(self, device: HostDevice, timeout: float) -> None:
        super().__init__(device, timeout)
        self._group: Any = None
        self._store: Any = None

    def connect(self, index: int, count: int, host: str, port: int, listener: socket.socket | None) -> None:
        """Meet; see `Library.connect`."""
        import torch.distributed as dist

        try:
            self._store = pytorch.store(count, host, port, listener, self._timeout)
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = datetime.timedelta(seconds=self._timeout)
            self._group = dist.ProcessGroupGloo(self._store, index, count, options)
        except RuntimeError as error:
            raise pytorch.translated(error, self.engine) from error

    def start(
        self,
        source: Any,
        target: Any,
        size: int,
        symmetric: bool,  # noqa: ARG002 all memory is alike
        places: Sequence[tuple[int, int]],
    ) -> Any:
        """Begin; see `Library.start`."""
        piece, whole, all_of = self._tensor(source), self._tensor(target), size * self._group.size()
        try:
            operations = [
                pytorch.gather(self._group, whole[end : end + all_of], piece[start : start + size])
                for start, end in places
            ]
            return operations, time.monotonic()
        except RuntimeError as error:
            raise pytorch.translated(error, self.engine) from error

    def poll(self, work: Any) -> float | None:
        """Return the seconds since the begin, once *work* is over."""
        operations, began = work
        if not all(operation.is_completed() for operation in operations):
            return None
        failure = None
        try:
            for operation in operations:
                operation.wait()
        except RuntimeError as error:  # which would keep the operation, and so the memory, in its traceback
            failure = pytorch.translated(error, self.engine)
        if failure is not None:
            raise failure
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
        # By its address: Gloo's threads let go of a tensor some time after the end, and must not keep the memory.
        import torch

        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * buffer.size).from_address(buffer.address)))
