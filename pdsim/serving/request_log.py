# SPDX-License-Identifier: Apache-2.0
"""What became of each request, in columns: what the router keeps instead of the requests that are over.

A row has the two instances, the bytes moved, the status and the stamps of `Finished`; of an engine that streams its
first token later, or whose decode has to ask, those of `Streamed` too.  `columns` makes of them what the result
files
have: latencies and phases, in seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import msgspec
import numpy as np
import numpy.typing as npt

from pdsim.kv.messages import Finished, Streamed
from pdsim.serving.requests import Request, RequestTable
from pdsim.transfer.compact import ArrayColumn, Compact
from pdsim.transfer.record_runs import Spill

__all__ = ["PHASES", "STAMPS", "RequestLog", "RowBlock", "columns"]

Floats = npt.NDArray[np.float64]

STAMPS = (
    *("reserved", "noticed", "started", "prefilled", "arrived", "polled", "joined", "finished"),
    *("first", "asked"),
)
"""Fields of `Finished`, and of `Streamed` the last two."""

PHASES = ("queueing", "compute", "handshake", "transfer", "polling")
"""The parts of the end-to-end time of a request, which they add up to."""

_INSTANTS = (*(f"{name}_at" for name in STAMPS[:7]), "asked_at")
_OWN = len(STAMPS) - 2

BLOCK = 1024
"""Requests that end between two entries of a journal."""


class RowBlock(msgspec.Struct, array_like=True):
    """Rows of a log of *count* requests, each after its number, and the *start* of the workload."""

    start: float
    count: int
    rows: list[list[Any]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RowBlock).decode


class RequestLog(Sequence[list[Any]], Compact):
    """Rows of *count* requests: prefill instance, decode instance, bytes, status, and 8 or 10 stamps or None.

    It takes about 110 bytes a request.  Rows are those of requests that have not ended, until they are `put`.  With
    *journal*, those that have a status are left there, too, `BLOCK` at a time; *start* is that of the workload.
    """

    def __init__(self, count: int, journal: Spill | None = None) -> None:
        self.start = 0.0
        self._journal = journal
        self._ended: list[int] = []  # of which the journal has no row yet
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
        found = cls(len(rows))
        for number, (prefill, decode, nbytes, status, *stamps) in enumerate(rows):
            found.put_row(number, prefill, decode, nbytes, status, len(stamps) > _OWN, stamps)
        return found

    @classmethod
    def read(cls, journal: Iterable[bytes]) -> RequestLog:
        """Return what *journal* has of a log; one of no requests if that is nothing."""
        found = cls(0)
        for payload in journal:
            block = _decode(payload)
            if len(found) != block.count:
                found = cls(block.count)
            found.start = block.start
            for number, prefill, decode, nbytes, status, *stamps in block.rows:
                found.put_row(number, prefill, decode, nbytes, status, len(stamps) > _OWN, stamps)
        return found

    def put(self, number: int, prefill: str, decode: str, nbytes: int, status: str, ended: Finished | None) -> None:
        """Set the row of request *number*, which *ended* like that; None for one that never got its tokens."""
        stamps: Iterable[float | None] = ()
        if ended is not None:
            stamps = [getattr(ended, name) for name in STAMPS[:_OWN]]
        streamed = isinstance(ended, Streamed)
        if isinstance(ended, Streamed):
            stamps = [*stamps, ended.first, ended.asked]
        self.put_row(number, prefill, decode, nbytes, status, streamed, stamps)
        if self._journal is not None and status:
            self._ended.append(number)
            if len(self._ended) == BLOCK:
                rows = [[number, *self[number]] for number in self._ended]
                self._journal.append(_encode(RowBlock(self.start, len(self), rows)))
                self._ended.clear()

    def put_row(
        self, number: int, prefill: str, decode: str, nbytes: int, status: str, streamed: bool, stamps: Iterable[Any]
    ) -> None:
        """Set the row of request *number* to these values."""
        self._prefill[number] = self._code(prefill)
        self._decode[number] = self._code(decode)
        self._status[number] = self._code(status)
        self._nbytes[number] = nbytes
        self._streamed[number] = streamed
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
        """Return the number of requests."""
        return len(self._nbytes)

    @overload
    def __getitem__(self, index: int) -> list[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Any]]: ...
    def __getitem__(self, index: int | slice) -> list[Any]:
        """Return a row, or a list of them."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        words = [self._words[codes[number]] for codes in (self._prefill, self._decode, self._status)]
        stamps = [column[number] for column in self._stamps[: None if self._streamed[number] else _OWN]]
        times = [None if stamp != stamp else stamp for stamp in stamps]
        return [words[0], words[1], self._nbytes[number], words[2], *times]

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence of rows."""
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it is filled

    def __repr__(self) -> str:
        return f"<RequestLog of {len(self)} requests>"


def columns(requests: Sequence[Request], value: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return one row a request, in columns, from the router's *value*; times of a failed request are None.

    Durations are seconds, instants seconds after ``start`` of *value*.  *value* is what the router's rank returned:
    ``rows`` of instances, bytes, status and stamps, and where users wait for their answers the actual ``arrivals``.
    """
    table, log, start = RequestTable.of(requests), RequestLog.of(value["rows"]), float(value["start"])
    if "arrivals" in value:
        table = table.but(arrival=np.array(value["arrivals"], np.float64))
    none = np.full(len(table), np.nan)
    found: dict[str, Sequence[Any]] = {
        "id": ArrayColumn(np.arange(len(table))),
        "arrival": ArrayColumn(table.arrival),
        "input": ArrayColumn(table.input),
        "output": ArrayColumn(table.output),
        "patience": ArrayColumn(none if table.patience is None else table.patience),
        **{name: log.column(name) for name in ("prefill", "decode", "nbytes", "status")},
    }
    stamps = {name: log.column(name).values for name in STAMPS}
    found |= {
        name: ArrayColumn(values) for name, values in _durations(start + table.arrival, table.output, stamps).items()
    }
    return found | {name: ArrayColumn(stamps[name.removesuffix("_at")] - start) for name in _INSTANTS}


def _durations(arrival: Floats, output: npt.NDArray[np.int64], stamps: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return latencies and `PHASES` of requests, in seconds, from the stamps of `Finished`.

    Phases add up to the end-to-end time; where decode pulls, it waits for pages after the prefill and not before.
    """
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
