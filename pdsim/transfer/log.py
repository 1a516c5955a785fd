# SPDX-License-Identifier: Apache-2.0
"""Many `TransferRecord`s, and other tables, in little memory: columns that make rows when they are read.

What equal transfers one after the other have in common (who, what, how many bytes) is kept once for all of them:
they are a *run* (`RecordRun`).  Times are kept as 8-byte floats.  A simulated run of a million requests has tens of
millions of transfers; as objects each takes 330 bytes, here 40 and a share of its run, and nothing where a log may
leave them in a file (`Spill`), as blocks of runs (`LogBlock`).
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import eq
from struct import pack
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
import numpy.typing as npt

from pdsim.transfer import Spill, TransferRecord

__all__ = [
    "TIMES",
    "ArrayColumn",
    "Compact",
    "Kind",
    "LogBlock",
    "RecordRun",
    "Runs",
    "TransferLog",
    "TransferShape",
    "joined",
    "logs",
    "plain",
    "shapes",
]


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
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # an array can change

    def __repr__(self) -> str:
        return f"<ArrayColumn of {len(self)} values>"


def rows(columns: Mapping[str, Sequence[Any]], which: npt.NDArray[np.bool_]) -> dict[str, Sequence[Any]]:
    """Return the rows of *columns* for which *which* is true."""
    places = np.flatnonzero(which)
    return {
        name: values.taken(places)
        if isinstance(values, ArrayColumn)
        else [values[place] for place in places.tolist()]
        for name, values in columns.items()
    }


TIMES = ("submitted", "prepared", "posted", "completed", "seen")
"""Fields of `pdsim.transfer.TransferRecord` that are times."""


class Kind(NamedTuple):
    """What few values of a `TransferRecord` are the same in nearly all of a rank.

    A rank has a handful of them, and a log keeps each once: its runs have their numbers, in 16 bits.
    """

    engine: str
    operation: str
    source: str
    target: str
    status: str


class RecordRun(NamedTuple):
    """So many records, one after the other, that differ in nothing but their times.

    A chunk that goes plane by plane is one run of as many writes as it has planes (`pdsim.sim.sequence`).
    """

    kind: Kind
    label: str
    nbytes: int
    descriptors: int
    count: int  # type: ignore[assignment]  # hides a method of tuples that nobody calls


class TransferShape(NamedTuple):
    """What a transfer looks like to its engine.

    Calibrations cover shapes, so results say how many of theirs lie outside.
    """

    engine: str
    operation: str
    descriptors: int
    nbytes: int


class LogBlock(msgspec.Struct, array_like=True, gc=False):
    """Records of *rank* that are kept together: arrays as bytes, in the order of this machine."""

    rank: str
    kinds: list[Kind]
    of: bytes  # by run: uint16, its kind
    labels: list[str]
    nbytes: bytes  # int64
    descriptors: bytes  # int64
    ends: bytes  # int64: how many records of the block there are up to its end
    times: list[bytes]  # of `TIMES`: float64

    @classmethod
    def unpack(cls, payload: bytes) -> LogBlock:
        """Return what `pack` was made of."""
        return _decode(payload)

    def pack(self) -> bytes:
        """Return the block as bytes."""
        return _encode(self)


class Runs(NamedTuple):
    """Records one after the other, as arrays: runs, and the times of each record."""

    of: Sequence[int]
    labels: Sequence[str]
    nbytes: Sequence[int]
    descriptors: Sequence[int]
    ends: Sequence[int]
    times: Sequence[Sequence[float]]

    @classmethod
    def read(cls, payload: bytes) -> Runs:
        """Return those of a packed block."""
        return cls.of_block(LogBlock.unpack(payload))

    @classmethod
    def of_block(cls, block: LogBlock) -> Runs:
        """Return those of *block*."""
        nbytes, descriptors, ends = (_array("q", part) for part in (block.nbytes, block.descriptors, block.ends))
        times = [_array("d", part) for part in block.times]
        return cls(_array("H", block.of), block.labels, nbytes, descriptors, ends, times)

    def columns(self, kinds: Sequence[Kind], first: int, end: int) -> dict[str, ArrayColumn]:
        """Return the columns of the records from *first* to before *end*; *kinds* are those of the log.

        Columns that few values fill are codes and their words, as Arrow's dictionaries, so that no string is made
        for a record.
        """
        low = bisect_right(self.ends, first)
        high = bisect_left(self.ends, end) + 1
        ends = np.clip(np.array(self.ends[low:high], np.int64), first, end)
        counts = ends - np.concatenate(([first], ends[:-1]))
        codes = np.repeat(np.array(self.of[low:high], np.int32), counts)
        columns = {name: ArrayColumn(codes, [kind[at] for kind in kinds]) for at, name in enumerate(Kind._fields)}
        columns["label"] = ArrayColumn(
            np.repeat(np.arange(len(counts), dtype=np.int32), counts), self.labels[low:high]
        )
        columns["nbytes"] = ArrayColumn(np.repeat(np.array(self.nbytes[low:high], np.int64), counts))
        columns["descriptors"] = ArrayColumn(np.repeat(np.array(self.descriptors[low:high], np.int64), counts))
        times = zip(TIMES, self.times, strict=True)
        return columns | {name: ArrayColumn(np.array(column[first:end], np.float64)) for name, column in times}


def _array(kind: str, content: bytes) -> array[Any]:
    values: array[Any] = array(kind)
    values.frombytes(content)
    return values


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LogBlock).decode


NEW = 64
"""Records that are appended before they are put into columns."""

KEPT = 4096
"""Records in memory of a log that leaves the others elsewhere."""


class _RecordSequence(Sequence[TransferRecord]):
    """What sequences of records have in common: places from the end, slices, and that equal ones compare equal.

    A subclass says how many records there are, yields them, and returns the one at a place.
    """

    @abstractmethod
    def record(self, number: int) -> TransferRecord: ...

    @overload
    def __getitem__(self, index: int) -> TransferRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[TransferRecord]: ...
    def __getitem__(self, index: int | slice) -> TransferRecord | list[TransferRecord]:
        if isinstance(index, slice):
            return [self.record(i) for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"record {index} is not one of {len(self)}")
        return self.record(number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # records are appended


class TransferLog(_RecordSequence):
    """Records in the order in which they were appended; equal to any sequence of equal records.

    With *spill*, at most `KEPT` records and one run more are in memory: those before are read from there when they
    are needed.  *rank* is who made them.

    A log is a `pdsim.transfer.Recorder`'s list: `append` takes a record, `extend_run` many at once.  Reading it
    as a sequence makes a record a time; `runs`, `columns` and `shapes` read it without.  A place in the log is
    found by bisection, once over the parts and once over the runs.
    """

    def __init__(
        self, records: Iterable[TransferRecord] = (), *, rank: str = "", spill: Spill | None = None
    ) -> None:
        self._kinds: list[Kind] = []
        self._codes: dict[tuple[str, ...], int] = {}  # by `Kind`, which equals a plain tuple of the same
        self._rank = rank
        self._spill = spill
        self._new: list[TransferRecord] = []  # appended, not in the columns yet
        self._parts: list[int] = []  # where records are that are not in memory
        self._before: list[int] = [0]  # how many there are before each part, and before those in memory
        self._clear()
        for record in records:
            self.append(record)

    @classmethod
    def by_rank(cls, journal: Iterable[bytes]) -> dict[str, TransferLog]:
        """Return what *journal* has of the records of each rank, all in memory.

        *journal* yields what `Spill.append` was given, in that order; records of a rank keep theirs.  Used for a
        run that was killed.
        """
        logs: dict[str, TransferLog] = {}
        for payload in journal:
            block = LogBlock.unpack(payload)
            log = logs.setdefault(block.rank, cls(rank=block.rank))
            runs = Runs.of_block(block)
            before = 0
            times = [np.frombuffer(part, np.float64) for part in block.times]
            for code, label, nbytes, descriptors, end in zip(*runs[:5], strict=True):
                run = RecordRun(Kind(*block.kinds[code]), label, nbytes, descriptors, end - before)
                log.extend_run(run, *(column[before:end] for column in times))
                before = end
        return logs

    def _clear(self) -> None:
        self._of: array[int] = array("H")  # by run: its kind
        self._labels: list[str] = []
        self._nbytes: array[int] = array("q")
        self._descriptors: array[int] = array("q")
        self._ends: array[int] = array("q")  # by run: how many records in memory there are up to its end
        self._times: tuple[array[float], ...] = tuple(array("d") for _ in TIMES)

    def append(self, record: TransferRecord) -> None:
        """Add *record*."""
        self._new.append(record)
        if len(self._new) >= NEW:
            self._sort_in()

    def _sort_in(self) -> None:
        while self._new:
            before = self._room()
            new = self._new if self._spill is None else self._new[: KEPT - before]
            self._new = self._new[len(new) :]
            engine, operation, source, target, nbytes, descriptors, *times, status, labels = zip(*new, strict=True)
            kinds = zip(engine, operation, source, target, status, strict=True)
            self._labels.extend(labels)
            _extend(self._of, [self._code(kind) for kind in kinds])
            _extend(self._nbytes, nbytes)
            _extend(self._descriptors, descriptors)
            _extend(self._ends, range(before + 1, before + len(new) + 1))
            for column, values in zip(self._times, times, strict=True):
                _extend(column, values)

    def _room(self) -> int:
        before = self._ends[-1] if self._ends else 0
        if before >= KEPT and self._spill is not None:
            self._put_away(self._spill)
            return 0
        return before

    def _code(self, kind: tuple[str, str, str, str, str]) -> int:
        code = self._codes.get(kind)
        if code is None:
            code = len(self._kinds)
            self._kinds.append(Kind(*kind))
            self._codes[self._kinds[code]] = code
        return code

    def extend_run(self, run: RecordRun, *times: npt.NDArray[np.float64]) -> None:
        """Add the records of *run*, whose *times* are those of `TransferRecord`, in its order."""
        if not run.count:
            return
        self._sort_in()
        before = self._room()
        self._of.append(self._code(run.kind))
        self._labels.append(run.label)
        self._nbytes.append(run.nbytes)
        self._descriptors.append(run.descriptors)
        self._ends.append(before + run.count)
        last, data = None, b""
        for column, values in zip(self._times, times, strict=True):
            if values is not last:  # what is prepared when it is submitted, and seen when it is complete
                last, data = values, values.tobytes()
            column.frombytes(data)

    def _put_away(self, spill: Spill) -> None:
        block = LogBlock(
            self._rank,
            self._kinds,
            self._of.tobytes(),
            self._labels,
            self._nbytes.tobytes(),
            self._descriptors.tobytes(),
            self._ends.tobytes(),
            [column.tobytes() for column in self._times],
        )
        self._parts.append(spill.append(block.pack()))
        self._before.append(self._before[-1] + self._ends[-1])
        self._clear()

    def _stretches(self) -> Iterator[Runs]:
        self._sort_in()
        for number in range(len(self._parts) + 1):
            yield self._stretch(number)

    def _stretch(self, number: int) -> Runs:
        if number < len(self._parts):
            assert self._spill is not None
            return Runs.read(self._spill.read(self._parts[number]))
        return Runs(self._of, self._labels, self._nbytes, self._descriptors, self._ends, self._times)

    def runs(self) -> Iterator[RecordRun]:
        """Yield what the records have in common, run by run."""
        kinds = self._kinds
        for stretch in self._stretches():
            before = 0
            for code, label, nbytes, descriptors, end in zip(*stretch[:5], strict=True):
                yield RecordRun(kinds[code], label, nbytes, descriptors, end - before)
                before = end

    def columns(self, rows: int = 1 << 19) -> Iterator[dict[str, ArrayColumn]]:
        """Yield the columns of `TransferRecord`, of at most so many *rows* at a time.

        Nothing is yielded if there are no records.  No part is ever joined with the next, so memory is bounded by
        the larger of *rows* and what a log keeps.
        """
        for stretch in self._stretches():
            count = stretch.ends[-1] if stretch.ends else 0
            for first in range(0, count, rows):
                yield stretch.columns(self._kinds, first, min(first + rows, count))

    def shapes(self) -> Counter[TransferShape]:
        """Return how many records have which engine, operation, descriptors and bytes.

        It costs a step for each run, not for each record.
        """
        totals = Counter[tuple[int, int, int]]()
        for stretch in self._stretches():
            if stretch.ends and len(stretch.ends) == stretch.ends[-1]:  # one record a run, as where flows meet
                totals.update(zip(stretch.of, stretch.descriptors, stretch.nbytes, strict=True))
                continue
            counts = np.diff(np.array(stretch.ends, np.int64), prepend=0).tolist()
            for code, descriptors, nbytes, count in zip(
                stretch.of, stretch.descriptors, stretch.nbytes, counts, strict=True
            ):
                totals[code, descriptors, nbytes] += count
        of = Counter[TransferShape]()
        for (code, descriptors, nbytes), count in totals.items():
            of[TransferShape(self._kinds[code].engine, self._kinds[code].operation, descriptors, nbytes)] += count
        return of

    @property
    def kinds(self) -> Sequence[Kind]:
        """What the records have in common: every kind that occurs."""
        self._sort_in()
        return self._kinds

    def __len__(self) -> int:
        """Return the number of records."""
        return self._before[-1] + (self._ends[-1] if self._ends else 0) + len(self._new)

    def __iter__(self) -> Iterator[TransferRecord]:
        """Yield the records, made as they are read."""
        for stretch in self._stretches():
            rows = zip(*stretch.times, strict=True)
            before = 0
            for code, label, nbytes, descriptors, end in zip(*stretch[:5], strict=True):
                engine, operation, source, target, status = self._kinds[code]
                for _ in range(end - before):
                    values: tuple[Any, ...] = (nbytes, descriptors, *next(rows), status, label)
                    yield TransferRecord(engine, operation, source, target, *values)
                before = end

    def record(self, number: int) -> TransferRecord:
        """Return the record at the place *number*; see `_RecordSequence`."""
        self._sort_in()
        part = bisect_right(self._before, number) - 1
        number -= self._before[part]
        stretch = self._stretch(part)
        run = bisect_right(stretch.ends, number)
        kind = self._kinds[stretch.of[run]]
        times = (column[number] for column in stretch.times)
        first = (*kind[:4], stretch.nbytes[run], stretch.descriptors[run])
        values: tuple[Any, ...] = (*first, *times, kind.status, stretch.labels[run])
        return TransferRecord(*values)

    def __repr__(self) -> str:
        return f"<TransferLog of {len(self)} records>"


class _Joined(_RecordSequence):
    """Logs one after the other, as one sequence; none of their records is copied.

    What `joined` returns: the records of all ranks of a job, by rank.
    """

    def __init__(self, logs: Sequence[TransferLog]) -> None:
        self.logs = logs

    @cached_property
    def shapes(self) -> Counter[TransferShape]:
        counts = Counter[TransferShape]()
        for log in self.logs:
            counts.update(log.shapes())
        return counts

    def __len__(self) -> int:
        return sum(map(len, self.logs))

    def __iter__(self) -> Iterator[TransferRecord]:
        return chain.from_iterable(self.logs)

    def record(self, number: int) -> TransferRecord:
        for log in self.logs:
            if number < len(log):
                return log.record(number)
            number -= len(log)
        raise IndexError(f"there are {len(self)} records")

    def __repr__(self) -> str:
        return f"<{len(self)} records of {len(self.logs)} logs>"


def _extend(column: array[Any], values: Collection[float]) -> None:
    column.frombytes(pack(f"{len(values)}{column.typecode}", *values))


def joined(parts: Iterable[Sequence[TransferRecord]]) -> Sequence[TransferRecord]:
    """Return the records of all *parts*, one part after the other, without a copy of those that are logs."""
    return _Joined([log for part in parts for log in logs(part)])


def logs(records: Sequence[TransferRecord]) -> Sequence[TransferLog]:
    """Return *records* as logs, one after the other."""
    if isinstance(records, _Joined):
        return records.logs
    return [records if isinstance(records, TransferLog) else TransferLog(records)]


def endpoints(records: Sequence[TransferRecord]) -> set[str]:
    """Return the names of all that *records* go from or to."""
    kinds = (kind for log in logs(records) for kind in log.kinds)
    return {name for kind in kinds for name in (kind.source, kind.target)}


def shapes(records: Sequence[TransferRecord]) -> Counter[TransferShape]:
    """Return how many of *records* have which engine, operation, descriptors and bytes.

    Kept with records that were `joined`, so the second question is free.
    """
    return records.shapes if isinstance(records, _Joined) else _Joined(logs(records)).shapes
