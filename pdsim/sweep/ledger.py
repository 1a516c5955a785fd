# SPDX-License-Identifier: Apache-2.0
"""The file of a sweep that rows are appended to, ``points.jsonl``, and the lock that keeps a second sweep out.

A process that is killed leaves at most half a line, which the next one takes away.  The last row of a point counts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdsim.core.errors import ConfigError

__all__ = ["FINAL", "LEDGER", "Ledger", "locked", "read"]

LEDGER = "points.jsonl"
FINAL = ("ok", "partial", "infeasible")
"""How a point ended that is not run again."""

_DEFINITION = "definitions"


class Ledger:
    """The rows of the sweep in *folder*, by the name of the point; `append` writes one.

    *rows* and *definitions* are what the file held when it was opened, and what was appended since.  Half a line at
    the end is cut off when it is opened.  The caller holds `locked` for as long as the ledger is open.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER
        self.rows, self.definitions = read(folder) if self._path.is_file() else ({}, {})
        _mend(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def append(self, row: Mapping[str, Any], definitions: Mapping[str, str]) -> None:
        """Write *row*, and those *definitions* of its metrics that no row before had.

        The line is flushed to the operating system at once, so it survives a killed process, though not a power
        failure.
        """
        if new := {name: text for name, text in definitions.items() if name not in self.definitions}:
            self.definitions |= new
            self._write({_DEFINITION: new})
        self.rows[str(row["point"])] = dict(row)
        self._write(row)

    def close(self) -> None:
        """Close the file; what was appended is on the disk then."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, content: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


def read(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the rows of the sweep in *folder* by the name of their point, and the definitions of metrics.

    Raise a `ConfigError` if the file is not what a sweep writes.
    """
    path = folder / LEDGER
    rows: dict[str, dict[str, Any]] = {}
    definitions: dict[str, str] = {}
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what does not end in a newline was never complete
        for line in lines:
            row = json.loads(line)
            if _DEFINITION in row:
                definitions |= row[_DEFINITION]
            else:
                rows[row["point"]] = row
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not what a sweep writes: {error}; it was changed since, so sweep again"
        ) from error
    return rows, definitions


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other sweep out of *folder*.  Raise a `ConfigError` if one is at work there."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{folder}: this sweep is being run already; wait for it, or change output") from None
        yield


def _mend(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
