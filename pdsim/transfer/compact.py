# SPDX-License-Identifier: Apache-2.0
"""Tables in little memory: columns of numbers and words that read as the lists of rows that they stand for.

A run of a million requests keeps a few hundred bytes of each in columns; as rows of Python objects they would be
kilobytes.  Nothing here knows what a row means.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

__all__ = ["ArrayColumn", "Compact", "plain"]

Floats = npt.NDArray[np.float64]


class Compact:
    """Data of columns that a program is given or returns: it stays as it is where ranks share a process.

    Across the boundary of a process it goes as `plain`.  Nobody changes it once it has been passed on.
    """

    @abstractmethod
    def plain(self) -> Any:
        """Return the same as lists, numbers and text."""


def plain(value: object) -> Any:
    """Return what msgspec is to encode of *value*, which it does not know.  Raise a `TypeError` if nobody does."""
    if isinstance(value, Compact):
        return value.plain()
    raise TypeError(f"{type(value).__name__} is not plain data, which can cross a process boundary")


class ArrayColumn(Sequence[Any]):
    """Values of one column in an array: integers, floats with NaN for None, or numbers of *words*.

    It reads as a sequence of `int`, `float` or None, or `str` or None, and equals any sequence of equal values.

    >>> list(ArrayColumn(np.array([1.5, np.nan]))), ArrayColumn(np.array([1, 0, 1]), ("a", "b")) == ["b", "a", "b"]
    ([1.5, None], True)
    """

    __slots__ = ("values", "words")

    def __init__(self, values: npt.NDArray[Any], words: Sequence[str | None] | None = None) -> None:
        self.values = values
        self.words = words

    @classmethod
    def of(cls, values: Iterable[float | None]) -> ArrayColumn:
        """Return the column of *values*, seconds or the like; None where there is none."""
        return cls(np.array([np.nan if value is None else value for value in values], dtype=np.float64))

    @classmethod
    def joined(cls, parts: Sequence[ArrayColumn]) -> ArrayColumn:
        """Return the values of *parts*, all of them with words or none, one part after the other."""
        if parts[0].words is None:
            return cls(np.concatenate([part.values for part in parts]))
        words: list[str | None] = []
        codes = []
        for part in parts:
            codes.append(part.values + len(words))
            words += part.words or ()
        return cls(np.concatenate(codes), words)

    def known(self) -> Floats:
        """Return the numbers of the column without those that are None."""
        if self.values.dtype.kind == "f":
            return np.asarray(self.values[~np.isnan(self.values)], dtype=np.float64)
        return self.values.astype(np.float64)

    def taken(self, which: npt.NDArray[Any]) -> ArrayColumn:
        """Return the values in these places, or those for which *which* is true."""
        return ArrayColumn(self.values[which], self.words)

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        """Yield the values as Python objects."""
        numbers = self.values.tolist()
        if self.words is not None:
            return map(self.words.__getitem__, numbers)
        return (None if one != one else one for one in numbers) if self.values.dtype.kind == "f" else iter(numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return a value, or a list of them."""
        if isinstance(index, slice):
            return list(ArrayColumn(self.values[index], self.words))
        one = self.values[index].item()
        if self.words is not None:
            return self.words[one]
        return None if one != one else one

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence, value by value."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_equal, self, other))

    __hash__ = None  # type: ignore[assignment]  # an array can change

    def __repr__(self) -> str:
        return f"<ArrayColumn of {len(self)} values>"


def _equal(one: object, other: object) -> bool:
    return one == other


def rows(columns: Mapping[str, Sequence[Any]], which: npt.NDArray[np.bool_]) -> dict[str, Sequence[Any]]:
    """Return the rows of *columns* for which *which* is true."""
    places = np.flatnonzero(which)
    return {
        name: values.taken(places)
        if isinstance(values, ArrayColumn)
        else [values[place] for place in places.tolist()]
        for name, values in columns.items()
    }
