# SPDX-License-Identifier: Apache-2.0
"""What a run leaves on disk while it goes on: records that then need no memory, and what is left if it is killed.

``transfers.journal`` has blocks of the records of a rank (`pdsim.transfer.transfer_log.LogBlock`),
``requests.journal`` rows of requests that are over, in the order in which they ended
(`pdsim.serving.requests.RowBlock`).  An entry is its length in eight bytes, lowest first, and msgpack; what a
process was killed over is the last, and cut short.  Files are made with the first entry, and go when the run is
complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["JOURNALS", "Journal", "JournalFile", "entries"]

JOURNALS = ("requests.journal", "transfers.journal")

_LENGTH = 8


class JournalFile:
    """Entries that are appended to *path*, and read again at any time by whoever appended them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._end = 0

    def append(self, payload: bytes) -> int:
        """Keep *payload*, and return where."""
        if self._file is None:
            self._file = self._path.open("w+b", buffering=0)
        position = self._end
        self._file.seek(position)
        self._file.write(len(payload).to_bytes(_LENGTH, "little") + payload)
        self._end += _LENGTH + len(payload)
        return position

    def read(self, position: int) -> bytes:
        """Return what was kept at *position*."""
        assert self._file is not None, "nothing was appended"
        self._file.seek(position)
        size = int.from_bytes(self._file.read(_LENGTH), "little")
        return self._file.read(size)

    def remove(self) -> None:
        """Delete the file, if there is one; who appended to it can read it as long as this object lives."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)


class Journal:
    """The journals of the run in *folder*; a `pdsim.sim.model.JobJournal`."""

    def __init__(self, folder: Path) -> None:
        self.requests, self.transfers = (JournalFile(folder / name) for name in JOURNALS)

    def remove(self) -> None:
        """Delete both, whose entries stay readable here."""
        self.requests.remove()
        self.transfers.remove()


def entries(path: Path) -> Iterator[bytes]:
    """Yield the entries of the journal at *path* that are whole; none if there is no such file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH)) == _LENGTH:
            size = int.from_bytes(head, "little")
            payload = file.read(size)
            if len(payload) < size:
                return
            yield payload
