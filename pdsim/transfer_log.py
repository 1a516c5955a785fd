"""Many `TransferRecord`s in little memory: a sequence of them that keeps columns, and makes records when they are read.

What equal transfers one after the other have in common (who, what, how many bytes) is kept once for all of them: they
are a *run*.  Times are kept as 8-byte floats.  A simulated run of a million requests has tens of millions of transfers;
as objects each takes 330 bytes, here 40 and a share of its run.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from pdsim.transfer import TransferRecord

__all__ = ["Kind", "RecordRun", "TransferLog", "joined", "logs", "runs"]

TIMES = ("submitted", "prepared", "posted", "completed", "seen")


class Kind(NamedTuple):
    """What few values of a `TransferRecord` are the same in nearly all of a rank."""

    engine: str
    operation: str
    source: str
    target: str
    status: str


class RecordRun(NamedTuple):
    """So many records, one after the other, that differ in nothing but their times."""

    kind: Kind
    label: str
    nbytes: int
    descriptors: int
    count: int  # type: ignore[assignment]  # hides a method of tuples that nobody calls


class TransferLog(Sequence[TransferRecord]):
    """Records in the order in which they were appended; equal to any sequence of equal records."""

    def __init__(self, records: Iterable[TransferRecord] = ()) -> None:
        self._kinds: list[Kind] = []
        self._codes: dict[Kind, int] = {}
        self._of: array[int] = array("H")  # by run: its kind
        self._labels: list[str] = []
        self._nbytes: array[int] = array("q")
        self._descriptors: array[int] = array("q")
        self._ends: array[int] = array("q")  # by run: how many records there are up to its end
        self._times: tuple[array[float], ...] = tuple(array("d") for _ in TIMES)
        for record in records:
            self.append(record)

    def append(self, record: TransferRecord) -> None:
        """Add *record*."""
        engine, operation, source, target, nbytes, descriptors, *times, status, label = record
        self._begin(Kind(engine, operation, source, target, status), label, nbytes, descriptors, 1)
        for column, time in zip(self._times, times, strict=True):
            column.append(time)

    def extend_run(self, run: RecordRun, *times: npt.NDArray[np.float64]) -> None:
        """Add the records of *run*, whose *times* are those of `TransferRecord`, in its order."""
        if not run.count:
            return
        self._begin(*run)
        for column, values in zip(self._times, times, strict=True):
            column.frombytes(np.ascontiguousarray(values, np.float64).tobytes())

    def _begin(self, kind: Kind, label: str, nbytes: int, descriptors: int, count: int) -> None:
        code = self._codes.get(kind)
        if code is None:
            code = self._codes[kind] = len(self._kinds)
            self._kinds.append(kind)
        self._of.append(code)
        self._labels.append(label)
        self._nbytes.append(nbytes)
        self._descriptors.append(descriptors)
        self._ends.append((self._ends[-1] if self._ends else 0) + count)

    def renamed(self, names: Mapping[str, str]) -> TransferLog:
        """Return the same records with other *names* of source and target; they share their columns."""
        other = copy(self)
        vars(other)["_kinds"] = [
            Kind(
                kind.engine,
                kind.operation,
                names.get(kind.source, kind.source),
                names.get(kind.target, kind.target),
                kind.status,
            )
            for kind in self._kinds
        ]
        return other

    def runs(self) -> Iterator[RecordRun]:
        """Yield what the records have in common, run by run."""
        kinds, before = self._kinds, 0
        for code, label, nbytes, descriptors, end in zip(
            self._of, self._labels, self._nbytes, self._descriptors, self._ends, strict=True
        ):
            yield RecordRun(kinds[code], label, nbytes, descriptors, end - before)
            before = end

    def columns(self, first: int = 0, end: int | None = None) -> dict[str, Any]:
        """Return the columns of `TransferRecord`, of the records from *first* to before *end*, as arrays."""
        end = len(self) if end is None else min(end, len(self))
        low = bisect_right(self._ends, first)
        high = bisect_left(self._ends, end) + 1
        ends = np.clip(np.array(self._ends[low:high], np.int64), first, end)
        counts = np.diff(ends, prepend=first)
        codes = np.array(self._of[low:high], np.int64)
        found: dict[str, Any] = {}
        for at, name in enumerate(Kind._fields):
            words = np.array([kind[at] for kind in self._kinds], object)
            found[name] = np.repeat(words[codes], counts) if len(words) else words
        found["label"] = np.repeat(np.array(self._labels[low:high], object), counts)
        found["nbytes"] = np.repeat(np.array(self._nbytes[low:high], np.int64), counts)
        found["descriptors"] = np.repeat(np.array(self._descriptors[low:high], np.int64), counts)
        times = zip(TIMES, self._times, strict=True)
        return found | {name: np.array(column[first:end], np.float64) for name, column in times}

    def __len__(self) -> int:
        """Return the number of records."""
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[TransferRecord]:
        """Yield the records, made as they are read."""
        rows = zip(*self._times, strict=True)
        for kind, label, nbytes, descriptors, count in self.runs():
            engine, operation, source, target, status = kind
            for _ in range(count):
                values: tuple[Any, ...] = (nbytes, descriptors, *next(rows), status, label)
                yield TransferRecord(engine, operation, source, target, *values)

    @overload
    def __getitem__(self, index: int) -> TransferRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[TransferRecord]: ...
    def __getitem__(self, index: int | slice) -> TransferRecord | list[TransferRecord]:
        """Return a record, or a list of them."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"record {index} is not one of {len(self)}")
        run = bisect_right(self._ends, number)
        kind = self._kinds[self._of[run]]
        times = (column[number] for column in self._times)
        first = (*kind[:4], self._nbytes[run], self._descriptors[run])
        values: tuple[Any, ...] = (*first, *times, kind.status, self._labels[run])
        return TransferRecord(*values)

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence, record by record."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_equal, self, other))

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"<TransferLog of {len(self)} records>"


class _Joined(Sequence[TransferRecord]):
    """Logs one after the other."""

    def __init__(self, logs: Sequence[TransferLog]) -> None:
        self.logs = logs

    def __len__(self) -> int:
        return sum(map(len, self.logs))

    def __iter__(self) -> Iterator[TransferRecord]:
        return chain.from_iterable(self.logs)

    @overload
    def __getitem__(self, index: int) -> TransferRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[TransferRecord]: ...
    def __getitem__(self, index: int | slice) -> TransferRecord | list[TransferRecord]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        for log in self.logs:
            if 0 <= number < len(log):
                return log[number]
            number -= len(log)
        raise IndexError(f"record {index} is not one of {len(self)}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_equal, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} records of {len(self.logs)} logs>"


def _equal(one: TransferRecord, other: object) -> bool:
    return one == other


def joined(parts: Iterable[Sequence[TransferRecord]]) -> Sequence[TransferRecord]:
    """Return the records of all *parts*, one part after the other, without a copy of those that are logs."""
    return _Joined([log for part in parts for log in logs(part)])


def logs(records: Sequence[TransferRecord]) -> Sequence[TransferLog]:
    """Return *records* as logs, one after the other."""
    if isinstance(records, _Joined):
        return records.logs
    return [records if isinstance(records, TransferLog) else TransferLog(records)]


def runs(records: Sequence[TransferRecord]) -> Iterator[RecordRun]:
    """Yield what *records* have in common, run by run."""
    return chain.from_iterable(log.runs() for log in logs(records))
