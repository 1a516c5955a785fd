# SPDX-License-Identifier: Apache-2.0
"""Requests and their outcomes, one by one and in columns.

A workload makes a `RequestTable` (`pdsim.serving.workload`, `traces`), the router serves it and fills a
`RequestLog`, and results have a row for each request, in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import eq
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
import numpy.typing as npt

from pdsim.kv.messages import Finished
from pdsim.transfer import Spill
from pdsim.transfer.log import ArrayColumn, Compact

Floats = npt.NDArray[np.float64]

HASHED = 512
"""Tokens of a block that one of a Mooncake trace's `hash_ids` names."""

_BLOCK = 1 << 14
"""Rows that are made at a time where all are read."""


class Request(NamedTuple):
    """One request.  A closed loop has *after*: the request comes *arrival* seconds after that one has ended."""

    arrival: float  # seconds after the first could arrive
    input: int  # tokens
    output: int  # tokens, the first included
    patience: float | None = None  # seconds after its arrival at which its user leaves; None stays to the end
    hash_ids: tuple[int, ...] = ()  # of its prompt's blocks of `HASHED` tokens: equal ids are equal tokens
    after: int = -1  # the request whose end its user waits for; *arrival* is then the think time from there on
    priority: int = 0  # the higher goes first


class RequestTable(Sequence[Request], Compact):
    """Requests in columns, 24 bytes each where tuples take 100 and more; equal to a list of them.

    Arrays of one length: *arrival* and *patience* (seconds; NaN: stays), *input* and *output* (tokens), *after*,
    *priority*, *tenant* (its place in `Workload.tenants`, which rows lack); None where all have `Request`'s default.
    *ends* and *hash_ids* are how many hashes there are up to the end of each request, and all of them.
    """

    def __init__(
        self,
        arrival: npt.NDArray[np.float64],
        input: npt.NDArray[np.int64],  # noqa: A002 as `Request` has it
        output: npt.NDArray[np.int64],
        *,
        patience: npt.NDArray[np.float64] | None = None,
        after: npt.NDArray[np.int64] | None = None,
        priority: npt.NDArray[np.int64] | None = None,
        tenant: npt.NDArray[np.int64] | None = None,
        ends: npt.NDArray[np.int64] | None = None,
        hash_ids: npt.NDArray[Any] | None = None,
    ) -> None:
        self.arrival = arrival
        self.input = input
        self.output = output
        self.patience = patience
        self.after = after
        self.priority = priority
        self.tenant = tenant
        self.ends = ends
        self.hash_ids = hash_ids

    @classmethod
    def of(cls, requests: Iterable[Sequence[Any]]) -> RequestTable:
        """Return *requests*, or rows of their fields, read one by one; themselves if they are a table."""
        if isinstance(requests, RequestTable):
            return requests
        arrival, patience = array("d"), array("d")
        given, wanted, after, priority, ends = (array("q") for _ in range(5))
        hashes: list[int] | array[int] = array("q")
        for row in requests:
            one = Request(*row)
            arrival.append(one.arrival)
            given.append(one.input)
            wanted.append(one.output)
            patience.append(np.nan if one.patience is None else one.patience)
            after.append(one.after)
            priority.append(one.priority)
            try:
                hashes.extend(one.hash_ids)
            except OverflowError:  # a trace may have names of more than 63 bits
                hashes = [*hashes[: ends[-1] if ends else 0], *one.hash_ids]
            ends.append(len(hashes))
        names = np.array(hashes, object if isinstance(hashes, list) else np.int64)
        waits, ranks, follows = np.array(patience), np.array(priority), np.array(after)
        return cls(
            np.array(arrival),
            np.array(given),
            np.array(wanted),
            patience=None if np.isnan(waits).all() else waits,
            after=follows if (follows >= 0).any() else None,
            priority=ranks if ranks.any() else None,
            ends=np.array(ends) if len(names) else None,
            hash_ids=names if len(names) else None,
        )

    def but(self, **columns: npt.NDArray[Any] | None) -> RequestTable:
        """Return the same requests with other *columns*, named as the attributes; the other arrays are shared."""
        return RequestTable(**(vars(self) | columns))

    def taken(self, which: npt.NDArray[Any]) -> RequestTable:
        """Return the requests that *which*, a mask or places, chooses; ``after`` still counts in the old order."""
        places = np.arange(len(self))[which]
        own: dict[str, Any] = {
            name: None if column is None else column[places]
            for name, column in vars(self).items()
            if name not in ("ends", "hash_ids")
        }
        if self.ends is not None and self.hash_ids is not None:
            counts = np.diff(self.ends, prepend=0)[places]
            own["ends"] = ends = np.cumsum(counts, dtype=np.int64)
            shift = np.repeat(self.ends[places] - ends, counts)  # from a hash's place there to its place here
            own["hash_ids"] = self.hash_ids[np.arange(len(shift)) + shift]
        return RequestTable(**own)

    def blocks(self, number: int) -> tuple[int, ...]:
        """Return the hashes of the blocks of request *number*."""
        return () if self.ends is None else self._spans(number, number + 1)[0]

    def _spans(self, first: int, end: int) -> list[tuple[int, ...]]:
        assert self.ends is not None
        assert self.hash_ids is not None
        before = int(self.ends[first - 1]) if first else 0
        ends = (self.ends[first:end] - before).tolist()
        hashes = tuple(self.hash_ids[before : before + ends[-1]].tolist())
        return [hashes[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]

    def plain(self) -> list[list[Any]]:
        """Return a row of each request's fields; `of` makes the same table of them."""
        return [list(one) for one in self]

    def __len__(self) -> int:
        return len(self.arrival)

    def __iter__(self) -> Iterator[Request]:
        for first in range(0, len(self), _BLOCK):
            yield from self._rows(first, min(first + _BLOCK, len(self)))

    def _rows(self, first: int, end: int) -> Iterator[Request]:
        part, size = slice(first, end), end - first
        patience = [None] * size if self.patience is None else map(_or_none, self.patience[part].tolist())
        after = [-1] * size if self.after is None else self.after[part].tolist()
        priority = [0] * size if self.priority is None else self.priority[part].tolist()
        blocks = [()] * size if self.ends is None else self._spans(first, end)
        numbers = (column[part].tolist() for column in (self.arrival, self.input, self.output))
        return map(Request, *numbers, patience, blocks, after, priority)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> RequestTable: ...
    def __getitem__(self, index: int | slice) -> Request | RequestTable:
        if isinstance(index, int):
            number = range(len(self))[index]
            return next(self._rows(number, number + 1))
        return self.taken(np.arange(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # an array can change

    def __repr__(self) -> str:
        return f"<RequestTable of {len(self)} requests>"


def _or_none(value: float) -> float | None:
    return None if value != value else value


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the stream of random numbers called *name*: the same for one seed and name, whatever else is drawn.

    >>> stream(0, "a").random() == stream(0, "a").random(), stream(0, "a").random() == stream(0, "b").random()
    (True, False)
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])))


STAMPS = (
    *("reserved", "noticed", "started", "prefilled", "arrived", "polled", "joined", "finished"),
    *("first", "asked"),
)
"""Fields of `Finished`."""

PHASES = ("queueing", "compute", "handshake", "transfer", "polling")
"""The parts of the end-to-end time of a request, which they add up to."""

_INSTANTS = (*(f"{name}_at" for name in STAMPS[:7]), "asked_at")
_OWN = len(STAMPS) - 2

JOURNAL_BLOCK = 1024
"""Requests that end between two entries of a journal."""


class RowBlock(msgspec.Struct, array_like=True):
    """Rows of a log of *count* requests, each after its number, and the *start* of the workload."""

    start: float
    count: int
    rows: list[list[Any]]


_encode_block = msgspec.msgpack.Encoder().encode
_decode_block = msgspec.msgpack.Decoder(RowBlock).decode


class RequestLog(Sequence[list[Any]], Compact):
    """The outcome of *count* requests in columns: a row is prefill, decode, bytes, status, and 8 or 10 stamps.

    It has the row of a request that has not ended until its own is `put`.  Rows with a status are also written to
    *journal*, if there is one, `JOURNAL_BLOCK` at a time.  *start* is that of the workload.
    """

    def __init__(self, count: int, journal: Spill | None = None) -> None:
        self.start = 0.0
        self._journal = journal
        self._ended: list[list[Any]] = []  # not yet in the journal
        self._words: list[str] = [""]
        self._codes = {"": 0}
        self._prefill, self._decode, self._status = (array("i", bytes(4 * count)) for _ in range(3))
        self._nbytes = array("q", bytes(8 * count))
        self._streamed = bytearray(count)
        self._stamps = tuple(array("d", np.full(count, np.nan).tobytes()) for _ in STAMPS)

    @classmethod
    def of(cls, rows: Sequence[Sequence[Any]]) -> RequestLog:
        """Return *rows*, such as those of a router in another process; themselves if they are a log."""
        if isinstance(rows, RequestLog):
            return rows
        log = cls(len(rows))
        for number, row in enumerate(rows):
            log._set(number, *row)
        return log

    @classmethod
    def read(cls, journal: Iterable[bytes]) -> RequestLog:
        """Return the log that *journal* has; one of no requests if it is empty."""
        log = cls(0)
        for payload in journal:
            block = _decode_block(payload)
            if len(log) != block.count:
                log = cls(block.count)
            log.start = block.start
            for row in block.rows:
                log._set(*row)
        return log

    def put(self, number: int, prefill: str, decode: str, nbytes: int, status: str, ended: Finished | None) -> None:
        """Set the row of request *number*, which *ended* like that; None for one that never got its tokens."""
        names = () if ended is None else STAMPS[:_OWN] if ended.first is None else STAMPS
        row = [number, prefill, decode, nbytes, status, *[getattr(ended, name) for name in names]]
        self._set(*row)
        if self._journal is not None and status:
            self._ended.append(row)
            if len(self._ended) == JOURNAL_BLOCK:
                self._journal.append(_encode_block(RowBlock(self.start, len(self), self._ended)))
                self._ended = []

    def _set(self, number: int, prefill: str, decode: str, nbytes: int, status: str, *stamps: float | None) -> None:
        self._prefill[number] = self._code(prefill)
        self._decode[number] = self._code(decode)
        self._status[number] = self._code(status)
        self._nbytes[number] = nbytes
        self._streamed[number] = len(stamps) > _OWN
        for column, stamp in zip(self._stamps, stamps, strict=False):
            if stamp is not None:
                column[number] = stamp

    def _code(self, word: str) -> int:
        code = self._codes.get(word)
        if code is None:
            code = self._codes[word] = len(self._words)
            self._words.append(word)
        return code

    def column(self, name: str) -> ArrayColumn:
        """Return one of ``prefill``, ``decode``, ``nbytes``, ``status`` and `STAMPS`."""
        if name in STAMPS:
            return ArrayColumn(np.array(self._stamps[STAMPS.index(name)], np.float64))
        if name == "nbytes":
            return ArrayColumn(np.array(self._nbytes, np.int64))
        codes = {"prefill": self._prefill, "decode": self._decode, "status": self._status}[name]
        return ArrayColumn(np.array(codes, np.int32), tuple(self._words))

    def plain(self) -> list[list[Any]]:
        """Return the rows as lists."""
        return list(self)

    def __len__(self) -> int:
        return len(self._nbytes)

    @overload
    def __getitem__(self, index: int) -> list[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Any]]: ...
    def __getitem__(self, index: int | slice) -> list[Any]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        words = [self._words[codes[number]] for codes in (self._prefill, self._decode, self._status)]
        stamps = [column[number] for column in self._stamps[: None if self._streamed[number] else _OWN]]
        times = [None if stamp != stamp else stamp for stamp in stamps]
        return [words[0], words[1], self._nbytes[number], words[2], *times]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it is filled

    def __repr__(self) -> str:
        return f"<RequestLog of {len(self)} requests>"


def request_columns(requests: Sequence[Request], value: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return the result columns of *requests* from the router's *value*; times of a failed request are None.

    Durations are seconds, instants seconds after ``start`` of *value*.  *value* is what the router's rank returned:
    ``rows`` of instances, bytes, status and stamps, and where users wait for their answers the actual ``arrivals``.
    """
    table, log, start = RequestTable.of(requests), RequestLog.of(value["rows"]), float(value["start"])
    if "arrivals" in value:
        table = table.but(arrival=np.array(value["arrivals"], np.float64))
    none = np.full(len(table), np.nan)
    columns: dict[str, Sequence[Any]] = {
        "id": ArrayColumn(np.arange(len(table))),
        "arrival": ArrayColumn(table.arrival),
        "input": ArrayColumn(table.input),
        "output": ArrayColumn(table.output),
        "patience": ArrayColumn(none if table.patience is None else table.patience),
        **{name: log.column(name) for name in ("prefill", "decode", "nbytes", "status")},
    }
    stamps = {name: log.column(name).values for name in STAMPS}
    durations = _durations(start + table.arrival, table.output, stamps)
    columns |= {name: ArrayColumn(values) for name, values in durations.items()}
    return columns | {name: ArrayColumn(stamps[name.removesuffix("_at")] - start) for name in _INSTANTS}


def _durations(arrival: Floats, output: npt.NDArray[np.int64], stamps: Mapping[str, Floats]) -> dict[str, Floats]:
    # Phases add up to the end-to-end time; where decode pulls, it waits for pages after the prefill and not before.
    reserved, noticed, started, prefilled, arrived, polled, joined, finished, first, asked = stamps.values()
    first = np.where(np.isnan(first), polled, first)
    pulled = ~np.isnan(asked)  # decode heard of it after prefill had answered
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(output > 1, (finished - first) / (output - 1), np.nan)
    own = joined - polled
    before = (started - arrival) + (reserved - asked) + own
    return {
        "ttft": first - arrival,
        "tpot": tpot,
        "e2e": finished - arrival,
        "queueing": np.where(pulled, before, (reserved - arrival) + (started - noticed) + own),
        "compute": (prefilled - started) + (finished - joined),
        "handshake": np.where(pulled, asked - prefilled, noticed - reserved),
        "transfer": np.where(pulled, arrived - reserved, arrived - prefilled),
        "polling": polled - arrived,
    }
