# SPDX-License-Identifier: Apache-2.0
"""Gloo: groups on host memory, over TCP.  It comes with PyTorch, which is imported on the thread that connects."""

import ctypes
import datetime
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from backends.base.device import HostBuffer, host_buffer
from backends.collectives.base import Library, gather, store, translated, translating, without_pytorch
from pdsim.transfer.group import SYMMETRIC


class Gloo(Library):
    """Host memory over TCP.  Symmetric memory is an account here: it is as fast as plain memory.

    Its threads move the bytes; the clock polls, since Gloo has no descriptor to wait for.
    """

    engine = "gloo"
    memory = "host"
    _group: Any = None

    @classmethod
    def missing(cls) -> str:
        return without_pytorch()

    def connect(self, index: int, count: int, host: str, port: int, listener: socket.socket | None) -> None:
        import torch.distributed as dist

        with translating(self.engine):
            self._store = store(count, host, port, listener, self._timeout)
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = datetime.timedelta(seconds=self._timeout)
            self._group = dist.ProcessGroupGloo(self._store, index, count, options)

    def start(
        self,
        source: Any,
        target: Any,
        size: int,
        symmetric: bool,  # noqa: ARG002 all memory is alike
        places: Sequence[tuple[int, int]],
    ) -> Any:
        piece, whole, all_of = self._tensor(source), self._tensor(target), size * self._group.size()
        with translating(self.engine):
            operations = [
                gather(self._group, whole[end : end + all_of], piece[start : start + size]) for start, end in places
            ]
        return operations, time.monotonic()

    def poll(self, work: Any) -> float | None:
        operations, began = work
        if not all(operation.is_completed() for operation in operations):
            return None
        failure = None
        try:
            for operation in operations:
                operation.wait()
        except RuntimeError as error:  # which would keep the operation, and so the memory, in its traceback
            failure = translated(error, self.engine)
        if failure is not None:
            raise failure
        return time.monotonic() - float(began)

    def reserve(self, size: int) -> Callable[[], None]:
        whole = host_buffer(size, SYMMETRIC)

        def cut(offset: int, part: int, give_back: Callable[[], None]) -> HostBuffer:
            piece = whole.bytes[offset : offset + part]
            piece[:] = 0
            return HostBuffer(piece, SYMMETRIC, give_back)

        return lambda: self._device.symmetric.add(size, cut)

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:  # a gather under way fails at that
            group.abort()
            group.shutdown()

    def _tensor(self, buffer: HostBuffer) -> Any:
        # By its address: Gloo's threads let go of a tensor some time after the end, and must not keep the memory.
        import torch

        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * buffer.size).from_address(buffer.address)))
