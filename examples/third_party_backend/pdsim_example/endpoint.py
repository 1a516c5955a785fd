# SPDX-License-Identifier: Apache-2.0
"""Copies between processes of one machine by the kernel: ``process_vm_writev`` and ``process_vm_readv``.

What there is to know of it:

- A copy is a system call of whoever posts it, which returns when it is done.  The target's process has no part in
  it, and a peer that is stopped does not keep a copy from ending.
- A process that is dead copies nothing more, so what it wrote is over with it.
- The kernel takes at most 1024 descriptors a call and may stop early; then the rest is asked for again.
- Any process of the same user may be written to unless Yama forbids it; ours allow it (``PR_SET_PTRACER``).
"""

import ctypes
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.base.device import HostBuffer, RealBuffer
from backends.base.endpoint import RealEndpoint
from backends.base.transfers import Entry, PostedTransfer
from backends.capabilities import Variant
from pdsim.core.errors import BackendUnavailable, ConfigError, RegistrationError, TransferFailed

MOST = 1024
"""Descriptors of one call: the kernel's ``UIO_MAXIOV``."""

_PR_SET_PTRACER, _ANY = 0x59616D61, -1


class ExampleEndpoint(RealEndpoint):
    """An `Endpoint` on cross-memory attach.  Option ``batch``: descriptors of a call, at most `MOST`."""

    kind = "example"
    options = ("batch",)
    variants = (Variant(backend="example", device="cma", one_sided=True),)

    def start_engine(self) -> str:
        """Look whether the kernel lets this process copy; see `RealEndpoint.start_engine`."""
        text = self.settings.options.get("batch", str(MOST))
        if not text.isdecimal() or not 1 <= int(text) <= MOST:
            raise ConfigError(f"backend.options.batch must be a whole number from 1 to {MOST}, got {text!r}")
        self._most = int(text)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._calls = {"write": self._libc.process_vm_writev, "read": self._libc.process_vm_readv}
        for call in self._calls.values():
            call.restype = ctypes.c_ssize_t
        self._libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANY), 0, 0, 0)  # fails where nothing forbids it
        probe = np.zeros(1, np.uint64)
        piece = self._vector(np.array([probe.ctypes.data]), np.array([probe.nbytes]))
        if error := self._copy("read", os.getpid(), piece, piece.copy()):
            reason = os.strerror(error)
            raise BackendUnavailable(f"cross-memory attach does not work here: {reason}; use backend=mooncake_tcp")
        return "example cma"

    def stop_engine(self, idle: bool) -> None:
        """Do nothing: the kernel holds nothing of this endpoint."""

    def inbound_drained(self) -> bool:
        """Return True: a copy ends with the process that makes it."""
        return True

    def pin(self, buffer: RealBuffer) -> None:
        """Take host memory; see `RealEndpoint.pin`."""
        if not isinstance(buffer, HostBuffer):
            raise RegistrationError(
                f"backend=example moves host memory only, got {buffer!r}; place ranks on the host"
            )

    def unpin(self, entry: Entry) -> None:
        """Do nothing: the kernel knows no registration."""

    def engine_address(self) -> bytes:
        """Return the number of this process."""
        return str(os.getpid()).encode()

    def connect_engine(self, description: bytes) -> int:
        """Return the number of the peer's process."""
        if not description.isdigit():
            raise TransferFailed(f"{description!r} is no number of a process")
        return int(description)

    def post(self, transfer: PostedTransfer) -> None:
        """Copy; all is over when this returns."""
        near, far, size = (np.asarray(part, np.int64) for part in transfer.blocks())
        here, there = self._vector(near, size), self._vector(far, size)
        transfer.prepared = self.clock.now
        error = self._copy(transfer.operation, transfer.peer.handle, here, there)
        transfer.posted = self.clock.now
        if error:
            text = f"the kernel failed a {transfer.operation} of {transfer.batch.nbytes} bytes: {os.strerror(error)}"
            self.engine_failed(transfer, text, moving=False)
        else:
            self.complete(transfer)

    def _copy(
        self, operation: str, process: int, here: npt.NDArray[np.uint64], there: npt.NDArray[np.uint64]
    ) -> int:
        done = 0
        while done < len(here):
            rows = min(self._most, len(here) - done)
            moved = self._calls[operation](process, *_pieces(here, done, rows), *_pieces(there, done, rows), 0)
            if moved < 0:
                return ctypes.get_errno()
            while done < len(here) and moved >= here[done, 1]:  # those that are whole
                moved -= int(here[done, 1])
                done += 1
            if moved:  # the kernel stopped within one
                for side in (here, there):
                    side[done] += np.array([moved, -moved], np.int64).astype(np.uint64)
        return 0

    @staticmethod
    def _vector(address: npt.NDArray[Any], size: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        return np.ascontiguousarray(np.stack([address, size], axis=1).astype(np.uint64))


def _pieces(vector: npt.NDArray[np.uint64], first: int, count: int) -> tuple[ctypes.c_void_p, ctypes.c_ulong]:
    return ctypes.c_void_p(vector.ctypes.data + first * vector.strides[0]), ctypes.c_ulong(count)
