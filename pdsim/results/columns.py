# SPDX-License-Identifier: Apache-2.0
"""Arrow arrays of what results are made of, without pandas.

`pyarrow.array` imports pandas, if it is installed, to ask whether it was given some of it: a third of a second in
every process that keeps a run.  Buffers need no such question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pdsim.transfer.compact import ArrayColumn

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["array"]

_NUMBERS: dict[str, tuple[Any, set[type]]] = {"double": (np.float64, {float, int}), "int64": (np.int64, {int})}
"""By the name of Arrow's type, that of numpy and those of Python that it holds without loss."""

_SMALL = 1 << 14
"""Values below which Arrow's functions on arrays are not worth their import, some 60 ms."""


def array(values: Sequence[Any] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return *values* as an Arrow array of the type *kind*, as `pyarrow.array` does.

    None and what is masked is null.

    Raise what that raises for values that *kind* does not hold.
    """
    import pyarrow as pa

    if isinstance(values, ArrayColumn):
        if values.words is not None and len(values) < _SMALL:
            return _of_words(values, kind)
        if values.words is not None:
            return array(values.words, kind).take(array(values.values.astype(np.int64), pa.int64()))
        numbers = values.values
        if str(kind) == "double" and numbers.dtype == np.float64:
            known = ~np.isnan(numbers)
            return _of_buffers(kind, len(numbers), known, np.ascontiguousarray(numbers))
        values = np.ma.array(numbers, mask=np.isnan(numbers)) if numbers.dtype.kind == "f" else numbers
    if isinstance(values, np.ndarray) and str(kind) in _NUMBERS and values.dtype == _NUMBERS[str(kind)][0]:
        if type(values) is np.ndarray:
            return _of_buffers(kind, len(values), None, np.ascontiguousarray(values))
        shown = ~np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
        return _of_buffers(kind, len(values), shown, np.ascontiguousarray(np.ma.getdata(values)))
    found = values.tolist() if isinstance(values, np.ndarray) else values
    types = set(map(type, found))
    present = None if type(None) not in types else np.fromiter((v is not None for v in found), np.bool_, len(found))
    types.discard(type(None))
    if str(kind) in _NUMBERS and types <= _NUMBERS[str(kind)][1]:
        filled = found if present is None else [0 if value is None else value for value in found]
        try:
            return _of_buffers(kind, len(found), present, np.array(filled, dtype=_NUMBERS[str(kind)][0]))
        except OverflowError:  # of integers beyond 64 bits: Arrow says so in its own words
            return pa.array(values, type=kind)
    if str(kind) == "string" and types <= {str}:
        texts = [b"" if value is None else value.encode() for value in found]
        ends: npt.NDArray[np.int64] = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        if ends[-1] < 1 << 31:
            return _of_buffers(kind, len(found), present, ends.astype(np.int32), b"".join(texts))
    return pa.array(values, type=kind)


def _of_words(column: ArrayColumn, kind: pa.DataType) -> pa.Array:
    """Return the words of *column*, each turned into bytes once however often it occurs."""
    if str(kind) != "string" or None in column.words:  # type: ignore[operator]  # the caller knows that it has words
        return array(list(column), kind)
    texts = [word.encode() for word in column.words]  # type: ignore[union-attr]
    lengths = np.fromiter(map(len, texts), np.int32, len(texts))
    ends = np.zeros(len(column) + 1, np.int32)
    np.cumsum(lengths[column.values], out=ends[1:])
    return _of_buffers(kind, len(column), None, ends, b"".join(map(texts.__getitem__, column.values.tolist())))


def _of_buffers(kind: pa.DataType, length: int, present: npt.NDArray[np.bool_] | None, *data: Any) -> pa.Array:
    import pyarrow as pa

    valid = None if present is None else pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(kind, length, [valid, *(pa.py_buffer(each) for each in data)])
