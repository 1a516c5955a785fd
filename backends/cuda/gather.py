# SPDX-License-Identifier: Apache-2.0
"""Copies of many pieces between two areas that one GPU reaches: gather, scatter, or straight into a peer's memory.

One kernel moves all descriptors of a batch: `backends.cuda.gather_kernel`, in Triton, which PyTorch for CUDA brings.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.core.errors import BackendUnavailable
from pdsim.transfer import Batch

Int64s = npt.NDArray[np.int64]

TILES = 2048
"""About how many programs a large batch is divided into: 132 multiprocessors of an H200, each with 16 at a time."""
LEAST = 4096  # bytes below which a piece is not divided
WIDE = 2048  # elements of 8 bytes that a program moves at a time: 4 loads of 16 bytes for each of its 256 threads
NARROW = 1024  # the same for single bytes, where a piece is not aligned to 16
_SHAPE = {"WIDE": WIDE, "NARROW": NARROW, "num_warps": 8}


def tiles(batch: Batch) -> tuple[Int64s, Int64s, Int64s]:
    """Return source offset, target offset and bytes of the pieces of *batch*, large ones divided.

    Three int64 arrays.  Pieces are of about ``nbytes / TILES`` bytes, a power of two and `LEAST` or more, so
    that alignment is kept.
    """
    piece = max(LEAST, 1 << max(0, batch.nbytes // TILES - 1).bit_length())
    if batch.size.max() <= piece:
        return batch.source_offset, batch.target_offset, batch.size
    count = -(-batch.size // piece)
    index = np.repeat(np.arange(len(batch)), count)
    done = (np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)) * piece
    left = np.minimum(batch.size[index] - done, piece)
    return batch.source_offset[index] + done, batch.target_offset[index] + done, left


class Gather:
    """Copies on GPU number *gpu*; `prepare` imports and compiles before the first copy."""

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu

    def prepare(self) -> None:
        """Import and compile now. Raise `BackendUnavailable` without PyTorch and Triton."""
        torch, kernel = _libraries()
        with torch.cuda.device(self.gpu):
            table = torch.zeros((1, 3), dtype=torch.int64, device=f"cuda:{self.gpu}")
            somewhere = kernel.DeviceAddress(1 << 20)
            kernel.copy_tiles.warmup(somewhere, somewhere, table, grid=(1,), **_SHAPE)

    def copy(self, source: int, target: int, batch: Batch, stream: int) -> None:
        """Give *stream* the copies of *batch* between the areas at addresses *source* and *target*."""
        torch, kernel = _libraries()
        columns = tiles(batch)
        shape = len(columns[0]), len(columns)
        with torch.cuda.device(self.gpu), torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            # or it would wait for what the stream has to do
            rows = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            np.stack(columns, axis=1, out=rows.numpy())
            table = rows.to(f"cuda:{self.gpu}", non_blocking=True)
            ends = kernel.DeviceAddress(source), kernel.DeviceAddress(target)
            kernel.copy_tiles[(len(rows),)](*ends, table, **_SHAPE)


@cache
def _libraries() -> tuple[Any, Any]:
    try:
        import torch

        from backends.cuda import gather_kernel
    except ImportError as error:
        raise BackendUnavailable(
            f"copies within a GPU need PyTorch and Triton, which cannot be imported ({error}); "
            "pip install 'pdsim[gpu]'"
        ) from error
    return torch, gather_kernel


class _Area:
    """Memory at *address*, as PyTorch may look at it without copying: CUDA's array interface, version 3."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def area(address: int, size: int, device: str) -> Any:
    """Return the memory at *address* as a tensor of bytes, which leaves it where it is."""
    import torch

    return torch.as_tensor(_Area(address, size), device=device)
