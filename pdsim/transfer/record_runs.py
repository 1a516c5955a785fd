# SPDX-License-Identifier: Apache-2.0
"""Records of transfers that have much in common: runs of them, and blocks of runs that are kept elsewhere.

What equal transfers one after the other have in common is said once for all of them (`RecordRun`).  `Runs` are many
of those as arrays, `LogBlock` the same as bytes, which `Spill` keeps.  `pdsim.transfer.transfer_log` makes and
reads them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from pdsim.transfer.compact import ArrayColumn

__all__ = ["TIMES", "Kind", "LogBlock", "RecordRun", "Runs", "Spill", "TransferShape"]

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


class Spill(Protocol):
    """Where logs leave what they do not keep in memory: see `pdsim.results.store`.

    It is append-only, so a run that is killed leaves what it had written so far.
    """

    def append(self, payload: bytes) -> int:
        """Keep *payload*, and return where."""

    def read(self, position: int) -> bytes:
        """Return what was kept at *position*."""


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
        found = {name: ArrayColumn(codes, [kind[at] for kind in kinds]) for at, name in enumerate(Kind._fields)}
        found["label"] = ArrayColumn(
            np.repeat(np.arange(len(counts), dtype=np.int32), counts), self.labels[low:high]
        )
        found["nbytes"] = ArrayColumn(np.repeat(np.array(self.nbytes[low:high], np.int64), counts))
        found["descriptors"] = ArrayColumn(np.repeat(np.array(self.descriptors[low:high], np.int64), counts))
        times = zip(TIMES, self.times, strict=True)
        return found | {name: ArrayColumn(np.array(column[first:end], np.float64)) for name, column in times}


def _array(kind: str, content: bytes) -> array[Any]:
    found: array[Any] = array(kind)
    found.frombytes(content)
    return found


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LogBlock).decode
