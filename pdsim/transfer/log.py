# SPDX-License-Identifier: Apache-2.0
"""Many `TransferRecord`s, and other tables, in little memory: columns that make rows when they are read.

A record as an object takes 330 bytes, in a block 40 and a share of its run, and nothing where a log may leave its
blocks in a file (`Spill`).  Blocks are msgpack: Arrow's IPC stream cannot be read while it is written.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby
from operator import eq
from struct import pack
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdsim.transfer import Spill, TransferRecord

Floats = npt.NDArray[np.float64]


class Compact:
    """Columns that a program gets or returns; sent to other processes as `plain`."""

    @abstractmethod
    def plain(self) -> Any:
        """Return the same as lists, numbers and text."""


def plain(value: object) -> Any:
    """Return *value*, which msgspec cannot encode, as plain data.  Raise a `TypeError` if it is no `Compact`."""
    if isinstance(value, Compact):
        return value.plain()
    raise TypeError(f"{type(value).__name__} is not plain data, which can cross a process boundary")


class _Equal(Sequence[Any]):
    # equal to any sequence of equal values, of which there is one line to print

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"


class ArrayColumn(_Equal):
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

    def known(self) -> Floats:
        """Return the numbers of the column without those that are None."""
        if self.values.dtype.kind == "f":
            return np.asarray(self.values[~np.isnan(self.values)], dtype=np.float64)
        return self.values.astype(np.float64)

    def taken(self, which: npt.NDArray[Any] | slice) -> ArrayColumn:
        """Return the values in these places, or those for which *which* is true."""
        return ArrayColumn(self.values[which], self.words)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        numbers = self.values.tolist()
        if self.words is not None:
            return map(self.words.__getitem__, numbers)
        return (None if one != one else one for one in numbers) if self.values.dtype.kind == "f" else iter(numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(ArrayColumn(self.values[index], self.words))
        one = self.values[index].item()
        if self.words is not None:
            return self.words[one]
        return None if one != one else one


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
    """Fields that repeat over the records of a rank; a log keeps each kind once, and runs refer to it by a code."""

    engine: str
    operation: str
    source: str
    target: str
    status: str


class RecordRun(NamedTuple):
    """Consecutive records that differ only in their times."""

    kind: Kind
    label: str
    nbytes: int
    descriptors: int
    count: int  # type: ignore[assignment]  # hides a method of tuples that nobody calls


class TransferShape(NamedTuple):
    """What a transfer looks like to its engine; calibrations cover shapes."""

    engine: str
    operation: str
    descriptors: int
    nbytes: int


class LogBlock(msgspec.Struct, array_like=True, gc=False):
    """Consecutive records of *rank*: runs, and the times of each record, as bytes in the order of this machine."""

    rank: str
    kinds: list[Kind]
    codes: bytes  # by run: uint16, its kind
    labels: list[str]
    nbytes: bytes  # int64
    descriptors: bytes  # int64
    counts: bytes  # int64: records of the run
    times: list[bytes]  # of `TIMES`: float64

    def runs(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield the kind's code, label, bytes, descriptors and number of records of each run."""
        numbers = (array("q", part) for part in (self.nbytes, self.descriptors, self.counts))
        return zip(array("H", self.codes), self.labels, *numbers, strict=True)

    def columns(self, kinds: Sequence[Kind], rows: int) -> Iterator[dict[str, ArrayColumn]]:
        """Yield the columns of the records, of at most so many *rows* at a time; *kinds* are those of the log."""
        codes, counts = np.frombuffer(self.codes, np.uint16), np.frombuffer(self.counts, np.int64)
        numbers = {name: np.frombuffer(getattr(self, name), np.int64) for name in ("nbytes", "descriptors")}
        times = {name: np.frombuffer(part, np.float64) for name, part in zip(TIMES, self.times, strict=True)}
        run_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        for first in range(0, len(run_of), rows):
            at = run_of[first : first + rows]
            words = codes[at].astype(np.int32)
            codings = {name: ArrayColumn(words, [kind[n] for kind in kinds]) for n, name in enumerate(Kind._fields)}
            codings["label"] = ArrayColumn(at - at[0], self.labels[at[0] : at[-1] + 1])
            codings |= {name: ArrayColumn(column[at]) for name, column in numbers.items()}
            yield codings | {name: ArrayColumn(column[first : first + rows]) for name, column in times.items()}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LogBlock).decode


KEPT = 2048
"""Records, or runs of them, from which on a log puts them into a block."""


class _RecordSequence(_Equal):
    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]  # records are made as they are read: a place takes all before it


class TransferLog(_RecordSequence):
    """Records of *rank* in the order in which they were appended; equal to any sequence of equal records.

    Reading it as a sequence makes a record a time; `runs` and `columns` read it without.  With *spill*,
    blocks are left there and read again when they are needed.
    """

    def __init__(
        self, records: Iterable[TransferRecord] = (), *, rank: str = "", spill: Spill | None = None
    ) -> None:
        self._rank = rank
        self._spill = spill
        self._codes: dict[tuple[str, ...], int] = {}  # by `Kind`, which equals a plain tuple of the same
        self._new: list[TransferRecord | tuple[RecordRun, list[bytes], Sequence[str]]] = []  # in no block yet
        self._waiting = 0  # how many records the runs among them have
        self._blocks: list[LogBlock | int] = []  # or where in *spill* it is
        self._count = 0  # records in blocks
        for record in records:
            self.append(record)

    @classmethod
    def by_rank(cls, journal: Iterable[bytes]) -> dict[str, TransferLog]:
        """Return the records of each rank; *journal* has `payloads`, or what a killed run gave to `Spill.append`."""
        logs: dict[str, TransferLog] = {}
        for payload in journal:
            block = _decode(payload)
            log = logs.setdefault(block.rank, cls(rank=block.rank))
            log._blocks.append(block)
            log._count += sum(array("q", block.counts))
            log._codes = {kind: code for code, kind in enumerate(block.kinds)}  # a later block has those before it
        return logs

    def append(self, record: TransferRecord) -> None:
        """Add *record*."""
        self._new.append(record)
        if len(self._new) >= KEPT:
            self._put_away(self._spill)

    def extend_run(self, run: RecordRun, times: Sequence[Floats], labels: Sequence[str] = ()) -> None:
        """Add the records of *run*, with *times* in the order of `TransferRecord`, and *labels* if they differ."""
        if not run.count:
            return
        self._new.append((run, [values.tobytes() for values in times], labels))
        self._waiting += run.count
        if self._waiting >= KEPT:
            self._put_away(self._spill)

    def renamed(self, names: Mapping[str, str]) -> TransferLog:
        """Return the same records of other ranks: those that *names* has have other names."""
        log = TransferLog(rank=names.get(self._rank, self._rank), spill=self._spill)
        len(self)  # puts away what is in no block yet
        for own, block in zip(self._blocks, self._read(), strict=True):
            kinds = [
                kind._replace(source=names.get(kind.source, kind.source), target=names.get(kind.target, kind.target))
                for kind in block.kinds
            ]
            copy = msgspec.structs.replace(block, rank=log._rank, kinds=kinds)
            # one in memory shares its times and labels
            log._blocks.append(copy if own is block or log._spill is None else log._spill.append(_encode(copy)))
            log._codes = {kind: code for code, kind in enumerate(kinds)}
        log._count = self._count
        return log

    def _put_away(self, spill: Spill | None) -> None:
        # Without *spill* the block stays in memory.
        codes, counts, nbytes, descriptors = array("H"), array("q"), array("q"), array("q")
        labels: list[str] = []
        times: list[list[bytes]] = [[] for _ in TIMES]
        for alike, group in groupby(self._new, type):
            if alike is tuple:
                for (kind, label, size, number, count), parts, each in group:  # type: ignore[misc]
                    runs = len(each) or 1
                    codes.extend([self._codes.setdefault(kind, len(self._codes))] * runs)
                    labels += each or (label,)
                    nbytes.extend([size] * runs)
                    descriptors.extend([number] * runs)
                    counts.extend([count // runs] * runs)
                    for column, data in zip(times, parts, strict=True):
                        column.append(data)
                continue
            engine, operation, source, target, sizes, numbers, *stamps, status, names = zip(*group, strict=True)
            for own in zip(engine, operation, source, target, status, strict=True):
                codes.append(self._codes.setdefault(own, len(self._codes)))
            labels += names
            nbytes.extend(sizes)
            descriptors.extend(numbers)
            counts.extend([1] * len(names))
            for column, values in zip(times, stamps, strict=True):
                column.append(pack(f"{len(values)}d", *values))
        self._new, self._waiting = [], 0
        numbers_of = nbytes.tobytes(), descriptors.tobytes(), counts.tobytes()
        block = LogBlock(
            self._rank, self._kinds(), codes.tobytes(), labels, *numbers_of, [b"".join(part) for part in times]
        )
        self._blocks.append(block if spill is None else spill.append(_encode(block)))
        self._count += sum(counts)

    def _read(self) -> Iterator[LogBlock]:
        if self._new:
            self._put_away(None)
        for block in self._blocks:
            if isinstance(block, LogBlock):
                yield block
            else:
                assert self._spill is not None
                yield _decode(self._spill.read(block))

    def payloads(self) -> Iterator[bytes]:
        """Yield all records as bytes, for `by_rank` in another process."""
        return map(_encode, self._read())

    def runs(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield the place in `kinds`, label, bytes, descriptors and number of records of each run."""
        return chain.from_iterable(block.runs() for block in self._read())

    def columns(self, rows: int = 1 << 19) -> Iterator[dict[str, ArrayColumn]]:
        """Yield the columns of `TransferRecord`, of at most so many *rows*, or those of a block, at a time."""
        kinds = self.kinds
        return chain.from_iterable(block.columns(kinds, rows) for block in self._read())

    @property
    def kinds(self) -> Sequence[Kind]:
        """What the records have in common: every kind that occurs."""
        if self._new:
            self._put_away(None)
        return self._kinds()

    def _kinds(self) -> list[Kind]:
        return [Kind(*kind) for kind in self._codes]

    def __len__(self) -> int:
        if self._new:
            self._put_away(None)
        return self._count

    def __iter__(self) -> Iterator[TransferRecord]:
        for block in self._read():
            stamps = zip(*(array("d", part) for part in block.times), strict=True)
            for code, label, nbytes, descriptors, count in block.runs():
                *who, status = block.kinds[code]
                for _ in range(count):
                    values: tuple[Any, ...] = (*who, nbytes, descriptors, *next(stamps), status, label)
                    yield TransferRecord(*values)


class _Joined(_RecordSequence):
    def __init__(self, logs: Sequence[TransferLog]) -> None:
        self.logs = logs

    @cached_property
    def shapes(self) -> Counter[TransferShape]:
        counts: dict[tuple[tuple[str, str], int, int], int] = {}
        for log in self.logs:
            moves = [(kind.engine, kind.operation) for kind in log.kinds]
            for code, _, nbytes, descriptors, count in log.runs():
                shape = moves[code], descriptors, nbytes
                counts[shape] = counts.get(shape, 0) + count
        return Counter({TransferShape(*move, count, nbytes): n for (move, count, nbytes), n in counts.items()})

    def __len__(self) -> int:
        return sum(map(len, self.logs))

    def __iter__(self) -> Iterator[TransferRecord]:
        return chain.from_iterable(self.logs)


def joined(parts: Iterable[Sequence[TransferRecord]]) -> Sequence[TransferRecord]:
    """Return the records of all *parts*, one part after the other, without a copy of those that are logs."""
    return _Joined([log for part in parts for log in logs(part)])


def logs(records: Sequence[TransferRecord]) -> Sequence[TransferLog]:
    """Return *records* as logs, one after the other."""
    if isinstance(records, _Joined):
        return records.logs
    return [records if isinstance(records, TransferLog) else TransferLog(records)]


def endpoints(records: Sequence[TransferRecord]) -> set[str]:
    """Return the names of the sources and targets of *records*."""
    kinds = (kind for log in logs(records) for kind in log.kinds)
    return {name for kind in kinds for name in (kind.source, kind.target)}


def shapes(records: Sequence[TransferRecord]) -> Counter[TransferShape]:
    """Return the number of *records* of each `TransferShape`."""
    return records.shapes if isinstance(records, _Joined) else _Joined(logs(records)).shapes
