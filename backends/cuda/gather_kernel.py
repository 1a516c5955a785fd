# SPDX-License-Identifier: Apache-2.0
"""The kernel of `backends.cuda.gather`, imported at the first copy; Triton's compiler needs module names."""

import torch
import triton
import triton.language as tl


class DeviceAddress:
    """A pointer to bytes, as Triton takes tensors."""

    dtype = torch.uint8

    def __init__(self, value: int) -> None:
        self._value = value

    def data_ptr(self) -> int:
        return self._value


def _copy_tiles(
    source: tl.tensor,
    target: tl.tensor,
    table: tl.tensor,
    WIDE: tl.constexpr,  # noqa: N803
    NARROW: tl.constexpr,  # noqa: N803
) -> None:
    # *table* is int64 of shape (tile, 3): source offset, target offset, bytes.  One program for each row; *WIDE* and
    # *NARROW* are elements that it moves at a time, of 8 bytes and of one.
    row = table + tl.program_id(0).to(tl.int64) * 3
    start, end, size = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    if (start | end | size) % 16 == 0:
        word = tl.pointer_type(tl.int64)
        words_from = source.to(word) + tl.multiple_of(start // 8, 2)
        words_to = target.to(word) + tl.multiple_of(end // 8, 2)
        count = tl.multiple_of(size // 8, 2)
        for first in range(0, count, WIDE):
            index = first + tl.arange(0, WIDE)
            tl.store(words_to + index, tl.load(words_from + index, mask=index < count), mask=index < count)
    else:
        for first in range(0, size, NARROW):
            index = first + tl.arange(0, NARROW)
            tl.store(target + end + index, tl.load(source + start + index, mask=index < size), mask=index < size)


copy_tiles = triton.jit(_copy_tiles)
