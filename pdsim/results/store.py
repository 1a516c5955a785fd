# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: ``<experiment>-<hw>-<backend>-<target>-<YYYYmmdd-HHMMSS>[-n]``.

Its files are those of docs/results.md.  The folder is called ``<name>.incomplete`` until all of it is on disk, so a
process that is killed at any moment leaves a complete folder or one that says it is not.  On the model two runs of
one configuration, command line and source tree leave the same bytes: the date is in the folder's name only.

`Run` writes a folder, `load` reads one; `pdsim.results.schema` types what is in the files.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from pdsim.config import Config, config_yaml, plain
from pdsim.core.errors import ConfigError
from pdsim.results import evidence, schema
from pdsim.results.record import Result, environment
from pdsim.transfer.job import Outcome
from pdsim.transfer.log import shapes

if TYPE_CHECKING:
    import pyarrow as pa

FILES = ("config.yaml", "requests.parquet", "run.json", "summary.json", "transfers.parquet")
INCOMPLETE = ".incomplete"


class Run:
    """The folder of a run, from its start: *folder* is where it is now, marked incomplete until `finish`.

    Use it as a context manager: what ends the block early is written to ``run.json`` as the run's error, and the
    folder stays marked.

    Args:
        config: Of the run; ``config.output`` is where its folder is made.
        command: The command line.
        overrides: The ``key=value`` of this point of a sweep, or of the command.
        name: Of the folder, if it is not to be the usual one.
        durable: Whether files are on disk when this says so; else the system decides when: a sweep
            runs again what a loss of power took.
        left: The folder of a run whose process has ended, for `write_partial`.

    Raises:
        ConfigError: *config.output* cannot be written to.
    """

    def __init__(
        self,
        config: Config,
        *,
        command: Sequence[str] = (),
        overrides: Sequence[str] = (),
        name: str = "",
        durable: bool = True,
        left: Path | None = None,
    ) -> None:
        self._about: dict[str, Any]
        self.config = config
        self._durable = durable
        if left is not None:
            self.folder = self._final = left
            self._about = schema.read_about(left / "run.json", ended=False)
            return
        stem = "-".join((config.experiment.name, config.hw.name, config.backend.name, config.target))
        self.folder, self._final = _reserve(Path(config.output), name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        self.journal = Journal(self.folder)
        self._began = time.monotonic()
        self._about = {
            "schema": schema.VERSION,
            "status": "running",
            "error": "",
            "experiment": config.experiment.name,
            "hw": config.hw.name,
            "backend": config.backend.name,
            "target": config.target,
            "seed": config.seed,
            "command": list(command),
            "overrides": list(overrides),
            **environment(),
        }
        if config.target != "model":
            self._about["started"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._write("config.yaml", config_yaml(config).encode())
        if durable:  # a point of a sweep that is killed is taken away, whatever it says
            self._write_about()

    def finish(self, result: Result) -> Path:
        """Write *result*, remove the mark from the folder's name and return its path.

        A result with failures makes the run ``partial``: its numbers are those of what succeeded.
        """
        status, error = ("partial", result.failures[0]) if result.failures else ("ok", "")
        if self.config.target != "model":
            self._about["wall_seconds"] = round(time.monotonic() - self._began, 3)
        self._keep(result, status, error)
        self.journal.remove()
        self._sync_folder(self.folder)
        self.folder.rename(self._final)
        self._sync_folder(self._final.parent)
        self.folder = self._final
        return self.folder

    def write_partial(self, result: Result) -> None:
        """Write the partial *result* of a killed run; its folder and its journals stay as they are."""
        status = "interrupted" if self._about["status"] == "running" else self._about["status"]
        self._keep(result, status, result.failures[0])

    def _keep(self, result: Result, status: str, error: str) -> None:
        # run.json is last: a reader of it finds the other files
        moved = shapes(result.transfers)
        gathering = any(shape.operation == "all_gather" for shape in moved)
        sources = evidence.gather(self.config, serving=bool(result.requests) or result.served, gathering=gathering)
        proof: dict[str, Any] = {"weakest": evidence.weakest(sources), "sources": sources}
        if sources and self.config.target == "model" and self.config.calibration is not None:
            proof["calibration"] = asdict(self.config.calibration)
        if spread := evidence.host_spread(self.config, result.transfers):
            proof["hosts"] = asdict(spread)
        if sources and result.requests and (servers := evidence.of_servers(self.config)):
            proof["servers"] = asdict(servers)
        ranks = result.outcome.ranks.values() if result.outcome else ()
        engines = {rank.engine for rank in ranks if rank.engine} | {shape.engine for shape in moved}
        self._about |= {"status": status, "error": error, "engine": sorted(engines), "evidence": proof}
        if result.offered_load is not None:
            self._about["offered_load"] = dict(result.offered_load)
        self._write_tables("requests.parquet", schema.requests_tables(result.requests))
        self._write_tables("transfers.parquet", schema.transfers_tables(result.transfers))
        if result.outcome is not None and result.outcome.samples:
            self._write_tables("samples.parquet", [schema.samples_table(result.outcome.samples)])
        self._write("summary.json", _json(summary(result)))
        self._write_about()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self.folder == self._final:
            return
        self._about["status"] = "failed" if isinstance(error, Exception) else "interrupted"
        self._about["error"] = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
        self._write_about()

    def _write_about(self) -> None:
        self._write("run.json.part", _json(self._about))
        (self.folder / "run.json.part").replace(self.folder / "run.json")

    @contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        with (self.folder / name).open("wb") as file:
            yield file
            if self._durable:
                file.flush()
                os.fsync(file.fileno())

    def _write(self, name: str, content: bytes) -> None:
        with self._opened(name) as file:
            file.write(content)

    def _write_tables(self, name: str, tables: Iterable[pa.Table]) -> None:
        import pyarrow.parquet as pq

        with self._opened(name) as file:
            writer = None
            for table in tables:
                writer = writer or pq.ParquetWriter(file, table.schema, **schema.packing(table))
                writer.write_table(table)
            assert writer is not None
            writer.close()

    def _sync_folder(self, folder: Path) -> None:
        if not self._durable:
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def summary(result: Result) -> dict[str, Any]:
    """Return what ``summary.json`` holds: metrics, tables and failures of *result*, and how its ranks ended."""
    outcome = result.outcome or Outcome({}, seconds=0.0)
    refused = {name: rank.refused for name, rank in outcome.ranks.items() if rank.refused}
    by = ", ".join(f"{name} {count}" for name, count in refused.items())
    note = f"{sum(refused.values())} messages and connections refused, of other processes or of no meaning: {by}"
    return {
        "schema": schema.VERSION,
        "metrics": {
            m.name: {"value": m.value, "definition": m.definition, "tabled": m.tabled} for m in result.summary
        },
        "tables": [
            {"title": table.title, "columns": dict(table.columns), "rows": [list(row) for row in table.rows]}
            for table in result.tables
        ],
        "failures": list(result.failures),
        "notes": [*result.notes, *([note] if refused else [])],
        "ranks": {
            name: {"engine": rank.engine, "error": rank.error, "refused": rank.refused}
            for name, rank in outcome.ranks.items()
        },
        "seconds": outcome.seconds if result.outcome else None,
        "start": result.start,
        "events": outcome.events if result.outcome else None,
        "links": dict(outcome.links),
        "pools": dict(outcome.pools),
    }


def load(folder: Path) -> dict[str, Any]:
    """Return ``run.json`` and ``summary.json`` of *folder* as one mapping, with the key ``folder``.

    Raise a `ConfigError` if *folder* is not a complete run, or if its files are not what this version writes.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name the folder of a run, such as one in results")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing or (folder.name.endswith(INCOMPLETE) and not any((folder / name).is_file() for name in JOURNALS)):
        runs = sorted(folder.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
        if runs:
            raise ConfigError(f"{folder} has runs within; name one of them, such as the newest, {runs[-1].parent}")
        what = "is marked incomplete" if not missing else f"has no {', '.join(missing)}"
        raise ConfigError(f"{folder} {what}: a complete run is needed, such as any folder without {INCOMPLETE}")
    about, summary = schema.read_about(folder / "run.json"), schema.read_summary(folder / "summary.json")
    return {"folder": str(folder), **about, **summary}


def make(folder: Path, named: str) -> Path:
    """Create *folder* unless it is there, and return it.

    Raise a `ConfigError` that begins with *named*, as in ``"output="``, if it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"{named}{folder}: {error.strerror}; name a folder that can be written to") from None
    return folder


def _reserve(output: Path, stem: str) -> tuple[Path, Path]:
    make(output, "output=")
    n = 1
    while True:
        final = output / (stem if n == 1 else f"{stem}-{n}")
        marked = final.with_name(final.name + INCOMPLETE)
        n += 1
        try:
            marked.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"output={output}: {error.strerror}; name a folder that can be written to") from None
        # Only who made the marked folder renames it, so a free name stays free from here on.
        if not final.exists():
            return marked, final
        marked.rmdir()


def _json(value: Any) -> bytes:
    import msgspec

    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=plain)
    except ValueError:  # a number that is not finite, which `plain` looks for in Python
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    # json indents in Python, a tenth as fast
    return msgspec.json.format(text.encode(), indent=2) + b"\n"


# ``transfers.journal`` has blocks of the records of a rank (`pdsim.transfer.log.LogBlock`), ``requests.journal``
# rows of requests in the order in which they ended (`pdsim.serving.request_log.RowBlock`).  An entry is its length
# in eight bytes, lowest first, and msgpack; what a process was killed over is the last, and cut short.

JOURNALS = ("requests.journal", "transfers.journal")
_LENGTH = 8


class JournalFile:
    """Entries that are appended to *path*, and read again at any time by whoever appended them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._end = 0

    def append(self, payload: bytes) -> int:
        """Append *payload*, and return its position."""
        if self._file is None:
            self._file = self._path.open("w+b", buffering=0)
        position = self._end
        self._file.seek(position)
        self._file.write(len(payload).to_bytes(_LENGTH, "little") + payload)
        self._end += _LENGTH + len(payload)
        return position

    def read(self, position: int) -> bytes:
        """Return the payload at *position*."""
        assert self._file is not None, "nothing was appended"
        self._file.seek(position)
        return self._file.read(int.from_bytes(self._file.read(_LENGTH), "little"))

    def remove(self) -> None:
        """Delete the file, if there is one; who appended to it can read it as long as this object lives."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


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
