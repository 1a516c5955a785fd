# SPDX-License-Identifier: Apache-2.0
"""CUDA's runtime library through ctypes: the few calls that engines and `backends.cuda.cuda_device` need.

PyTorch's pool has memory that other processes cannot map piece by piece, and no call for a batch of copies; so these
are asked for from the library that PyTorch uses too. Addresses, streams and events are integers. Structures and
constants are those of CUDA 13 (driver_types.h).
"""

import ctypes
import importlib.util
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.core.errors import BackendUnavailable, OutOfMemory, TransferFailed

HANDLE_BYTES = 64  # of what another process needs to map memory: CUDA_IPC_HANDLE_SIZE
SEGMENT = 2 << 20
"""Bytes that memory is allocated in.  CUDA shares whole segments of 2 MiB with other processes, so smaller pieces
would be shared with their neighbours (CUDA C++ Programming Guide, Interprocess Communication)."""

_NAMES = ("libcudart.so.13", "libcudart.so.12")
_BATCHES_SINCE = 13000  # the version with this signature of cudaMemcpyBatchAsync; that of 12.8 has another
_OUT_OF_MEMORY, _NOT_READY = 2, 600
_DEFAULT_KIND = 4  # cudaMemcpyDefault: the addresses tell
_NON_BLOCKING, _NO_TIMING, _LAZY_PEER_ACCESS, _STREAM_ORDER = 1, 2, 1, 1

_Int64s = npt.NDArray[np.int64]


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("kind", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", c_int), ("source", _Location), ("target", _Location), ("flags", c_uint))


class Cudart:
    """The library; one object for the process (`cudart`), on the GPU that the calling thread has chosen.

    Every method raises `TransferFailed` with CUDA's own words if CUDA refuses. Where the library has no call for a
    batch, `copy_batch` makes single copies.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._function: dict[str, Any] = {}
        for name, types in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = types, c_int
                self._function[name] = function
        self._copy = self._function["cudaMemcpyAsync"]  # called for every transfer, or over and over
        self._record, self._query = self._function["cudaEventRecord"], self._function["cudaEventQuery"]
        library.cudaGetErrorString.restype = c_char_p
        version = c_int()
        self._call("cudaRuntimeGetVersion", byref(version))
        self.version = f"{version.value // 1000}.{version.value % 1000 // 10}"
        self._batches = version.value >= _BATCHES_SINCE and "cudaMemcpyBatchAsync" in self._function
        self._order = _Attributes(order=_STREAM_ORDER)

    def devices(self) -> int:
        count = c_int()
        self._call("cudaGetDeviceCount", byref(count))
        return count.value

    def use(self, device: int) -> None:
        self._call("cudaSetDevice", device)

    def memory(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call("cudaMemGetInfo", byref(free), byref(total))
        return total.value

    def allocate(self, size: int) -> int:
        address = c_void_p()
        code = self._function["cudaMalloc"](byref(address), size)
        if code == _OUT_OF_MEMORY:
            self._library.cudaGetLastError()
            raise OutOfMemory(f"the GPU has no {size} bytes left; free something, or put fewer ranks on it")
        self._check("cudaMalloc", code)
        return int(address.value or 0)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def zero(self, address: int, size: int, stream: int) -> None:
        self._call("cudaMemsetAsync", address, 0, size, stream)
        self.wait(stream)

    def load(self, address: int, size: int, stream: int) -> bytes:
        data = np.empty(size, np.uint8)
        self.copy(data.ctypes.data, address, size, stream)
        self.wait(stream)
        return data.tobytes()

    def store(self, address: int, data: bytes, stream: int) -> None:
        source = np.frombuffer(data, np.uint8)
        self.copy(address, source.ctypes.data, len(data), stream)
        self.wait(stream)

    def share(self, address: int) -> bytes:
        """Return what another process needs to map the memory that begins at *address*: `HANDLE_BYTES`.

        *address* must be the beginning of an allocation: CUDA shares it whole.
        """
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        """Return where the memory that another process has shared begins in this one; `unmap` undoes it."""
        address = c_void_p()
        self._call("cudaIpcOpenMemHandle", byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return int(address.value or 0)

    def unmap(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def stream(self) -> int:
        """Return a new stream on the current GPU, which waits for no other."""
        stream = c_void_p()
        self._call("cudaStreamCreateWithFlags", byref(stream), _NON_BLOCKING)
        return int(stream.value or 0)

    def end_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def wait(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", stream)

    def event(self) -> int:
        event = c_void_p()
        self._call("cudaEventCreateWithFlags", byref(event), _NO_TIMING)
        return int(event.value or 0)

    def record(self, event: int, stream: int) -> None:
        """Have *event* happen after the work that *stream* has been given so far; an event can be used again."""
        if code := self._record(event, stream):
            self._check("cudaEventRecord", code)

    def happened(self, event: int) -> bool:
        """Return whether *event* has happened.  Raise `TransferFailed` if work before it has failed."""
        code = self._query(event)
        if code == _NOT_READY:
            return False
        if code:
            self._check("cudaEventQuery", code)
        return True

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Give *stream* one copy, wherever the addresses are."""
        if code := self._copy(target, source, size, _DEFAULT_KIND, stream):
            self._check("cudaMemcpyAsync", code)

    def copy_batch(self, targets: _Int64s, sources: _Int64s, sizes: _Int64s, stream: int) -> None:
        """Give *stream* a copy for each *i*, in one call where the library has it; they may be done in any order.

        Contiguous int64 arrays of shape (n,).
        """
        if not self._batches:
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                self.copy(target, source, size, stream)
            return
        first = c_size_t(0)
        arrays = [array.ctypes.data for array in (targets, sources, sizes)]
        order = byref(self._order)
        self._call("cudaMemcpyBatchAsync", *arrays, len(sizes), order, byref(first), 1, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, self._function[name](*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            self._library.cudaGetLastError()  # or the next call would report it again
            raise TransferFailed(f"{name} failed: {self._library.cudaGetErrorString(code).decode()} (code {code})")


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaRuntimeGetVersion": (POINTER(c_int),),
    "cudaGetDeviceCount": (POINTER(c_int),),
    "cudaSetDevice": (c_int,),
    "cudaMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaFree": (c_void_p,),
    "cudaMemsetAsync": (c_void_p, c_int, c_size_t, c_void_p),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaMemcpyBatchAsync": (*[c_void_p] * 3, c_size_t, c_void_p, POINTER(c_size_t), c_size_t, c_void_p),
    "cudaIpcGetMemHandle": (POINTER(_Handle), c_void_p),
    "cudaIpcOpenMemHandle": (POINTER(c_void_p), _Handle, c_uint),
    "cudaIpcCloseMemHandle": (c_void_p,),
    "cudaStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaEventCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaEventQuery": (c_void_p,),
}


@cache
def cudart() -> Cudart:
    """Return the library.  Raise `BackendUnavailable` if there is none, or no driver behind it."""
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        return Cudart(library)
    raise BackendUnavailable(
        f"CUDA's runtime library ({' or '.join(_NAMES)}) is not on this machine; pip install 'pdsim[gpu]', whose "
        f"PyTorch brings it, or install the CUDA toolkit"
    )


def _candidates() -> Iterator[str]:
    yield from _NAMES
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    for name in _NAMES:
        for folder in folders:
            yield from map(str, sorted(folder.glob(f"*/lib/{name}")))
        yield f"/usr/local/cuda/lib64/{name}"
