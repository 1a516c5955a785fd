# SPDX-License-Identifier: Apache-2.0
"""What the arrays of a `pdsim.transfer.Batch` must be: int64, inside their regions, targets apart."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from pdsim.errors import InvalidBatch
from pdsim.region import Region

__all__ = ["Bytes", "Int64s", "check_disjoint", "check_inside", "int64s", "move"]

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def int64s(values: npt.ArrayLike, name: str) -> Int64s:
    """Return *values* as int64, shape (n,).  Raise an `InvalidBatch` that names *name* for anything else.

    Unsigned and narrower integers are converted; floats are refused, even whole ones.  An empty array may have any
    type.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidBatch(f"{name} must be a one-dimensional array of integers, got {array.dtype} of {array.shape}")
    return np.ascontiguousarray(array, dtype=np.int64)


def check_inside(region: Region, offset: Int64s, size: Int64s, side: str) -> None:
    """Raise an `InvalidBatch` that names the first descriptor of which *region*, on *side*, does not hold all bytes.

    Offsets and sizes are int64 of shape (n,) with n > 0 and positive sizes.  *side* is "source" or "target".
    """
    if offset.min() >= 0 and offset.max() <= region.size - int(size.max()):  # sufficient, and makes no arrays
        return
    # offset > region.size - size rather than offset + size > region.size: the sum may overflow
    outside = (offset < 0) | (offset > region.size - size)
    if outside.any():
        index = int(np.argmax(outside))
        raise InvalidBatch(
            f"{side} descriptor {index} covers [{offset[index]}, {int(offset[index]) + int(size[index])}) of region "
            f"{region.owner}/{region.name}, which has {region.size} bytes"
        )


_PART = 1 << 13
"""Descriptors compared at a time: few enough for the arrays to stay in the processor's cache."""


def _ascending(offset: Int64s, size: Int64s) -> bool:
    """Return whether each piece ends before the next begins."""
    for first in range(0, len(offset) - 1, _PART):
        step = np.diff(offset[first : first + _PART + 1])
        if (step < size[first : first + len(step)]).any():
            return False
    return True


def check_disjoint(offset: Int64s, size: Int64s) -> None:
    """Raise an `InvalidBatch` that names two descriptors if their targets overlap.

    *offset* and *size* are int64 of shape (n,), sizes positive.  Pieces in ascending order, as most batches have
    them, are not sorted.
    """
    if _ascending(offset, size):  # as batches mostly are: no need to sort
        return
    order = np.argsort(offset, kind="stable")
    overlap = np.diff(offset[order]) < size[order][:-1]
    if overlap.any():
        first = int(np.argmax(overlap))
        one, other = int(order[first]), int(order[first + 1])
        raise InvalidBatch(
            f"targets of descriptors {one} and {other} overlap: engines keep no order among descriptors"
        )


_SMALL = 4096
"""Bytes of a piece up to which a loop over pieces takes longer than its bytes do."""
_CACHED = 1 << 18
"""Bytes moved at a time: they are read and written while they are in the cache."""


def move(source: Bytes, target: Bytes, source_offset: Int64s, target_offset: Int64s, size: Int64s) -> None:
    """Copy descriptors between two arrays of bytes of which neither has a part of the other.

    *source* and *target* are uint8 of any length; offsets and sizes are int64 of shape (n,), inside their arrays
    (`check_inside`) and with targets apart (`check_disjoint`), which is not checked again.

    Small pieces of equal sizes, as the heads of tokens are, go many at a time: a tenth to a third of a loop's time.
    """
    each = int(size[0])
    if each > _SMALL or len(size) == 1 or int(size.min()) != int(size.max()):
        rows = zip(source_offset.tolist(), target_offset.tolist(), size.tolist(), strict=True)
        for start, to, count in rows:
            target[to : to + count] = source[start : start + count]
        return
    ours, theirs = sliding_window_view(source, each), sliding_window_view(target, each, writeable=True)
    step = max(1, _CACHED // each)
    for first in range(0, len(size), step):
        theirs[target_offset[first : first + step]] = ours[source_offset[first : first + step]]
