# SPDX-License-Identifier: Apache-2.0
"""The files of a sweep, and one table over all of its points.

Rows are appended to ``points.jsonl`` as they come; a process that is killed leaves at most half a line, which the
next one takes away, and the last row of a point counts.  ``points.parquet`` is written when the sweep ends.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from json import dumps, loads
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pdsim.core import files
from pdsim.core.errors import ConfigError
from pdsim.results import schema, terminal
from pdsim.results.record import Table
from pdsim.results.schema import Column

if TYPE_CHECKING:
    import pyarrow as pa

POINTS = "points.parquet"
LEDGER = "points.jsonl"
FINAL = ("ok", "partial", "infeasible")
"""How a point ended that is not run again."""

_ABOUT = (
    Column("point", "string", "", "name of the point: a hash of its configuration"),
    Column("folder", "string", "", "where the point's files are, seen from the folder of the sweep"),
    Column(
        "status", "string", "", "ok; partial: numbers and failures; infeasible: cannot be run; failed: no numbers"
    ),
    Column("error", "string", "", "the first failure or the reason, or empty"),
    Column("experiment", "string", "", "what was run"),
    Column("hw", "string", "", "the machine"),
    Column("backend", "string", "", "the engine that was asked for"),
    Column("target", "string", "", "model or real"),
    Column("seed", "int64", "", "of every random stream"),
    Column("gpus", "int64", "", "of prefill and decode together"),
    Column(
        "evidence", "string", "", "weakest kind of source that the point's numbers rest on; none: not to be used"
    ),
)

_CHOSEN = ("experiment", "hw", "backend", "target", "seed")
"""Of `_ABOUT`, what may have been swept: it comes first."""
_FIRST = (
    *("goodput", "slo_attainment", "gpu_hours", "gpu_hours_fixed", "ttft_p99_s", "tpot_p99_s", "e2e_p99_s"),
    *("ttft_p50_s", "tpot_p50_s", "e2e_p50_s", "transfer_p50_s", "output_tokens_per_s", "bw_gbs"),
)
"""Metrics that come before the others where there are any; the table for people has these, or the first eight."""
_LEAST = 8


def write(folder: Path, rows: Sequence[Mapping[str, Any]], definitions: Mapping[str, str]) -> Path:
    """Write *rows*, of `Ledger`, to ``points.parquet`` in *folder* and return its path."""
    import pyarrow.parquet as pq

    with files.whole_file(folder / POINTS, "output=") as file:
        pq.write_table(_arrow(rows, definitions), file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    return folder / POINTS


def points(folder: Path) -> pa.Table:
    """Return the table of the sweep in *folder*: ``points.parquet``, or what a sweep that was killed has appended.

    Columns: those of `_ABOUT`, then one for each override, then one for each metric.  Raise a `ConfigError` if
    *folder* has neither file.
    """
    if (folder / POINTS).is_file():
        return schema.read_points(folder / POINTS)
    rows, definitions = read_ledger(folder)
    return _arrow(list(rows.values()), definitions)


def _arrow(rows: Sequence[Mapping[str, Any]], definitions: Mapping[str, str]) -> pa.Table:
    # The metadata of each column has its unit, its definition and its part.
    import pyarrow as pa

    fields, arrays = [], []

    def add(part: str, column: Column, values: Sequence[Any]) -> None:
        metadata = {"unit": column.unit, "definition": column.definition, "part": part}
        fields.append(pa.field(column.name, pa.type_for_alias(column.type), metadata=metadata))
        arrays.append(pa.array(values, type=fields[-1].type))

    for column in _ABOUT:
        add("about", column, [row.get(column.name) for row in rows])
    about = {column.name for column in _ABOUT}
    overrides = [dict(_override(f"{key}={value}") for key, value in row["overrides"].items()) for row in rows]
    for key in dict.fromkeys(key for each in overrides for key in each if key not in about):
        kind, values = _typed([each.get(key) for each in overrides])
        add("override", Column(key, kind, "", f"override of {key}"), values)
    metrics = [row.get("metrics", {}) for row in rows]
    for name in dict.fromkeys(name for each in metrics for name in each):
        add("metric", Column(name, "float64", "", definitions.get(name, "")), [each.get(name) for each in metrics])
    return pa.table(arrays, schema=pa.schema(fields, metadata={"pdsim.schema": str(schema.VERSION)}))


@cache
def _override(text: str) -> tuple[str, Any]:
    # "+workload.rate=2" is ("workload.rate", 2)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    key, _, value = text.partition("=")
    key = key.lstrip("+~")
    try:
        parsed = OmegaConf.to_container(OmegaConf.create(f"value: {value}"), resolve=False)
    except (OmegaConfBaseException, YAMLError, TypeError, ValueError, RecursionError):
        return key, value
    assert isinstance(parsed, dict)
    return key, parsed["value"]


def _typed(values: Sequence[Any]) -> tuple[str, list[Any]]:
    # [1, None, 2.5] are float64, [True, "auto"] texts
    kinds = {type(value) for value in values if value is not None}
    fitting = (("bool", {bool}), ("int64", {int}), ("float64", {int, float}))
    name = next((name for name, types in fitting if kinds <= types), "string")
    convert = {"float64": float, "string": str}.get(name)
    return name, [value if value is None or convert is None else convert(value) for value in values]


def table(folder: Path) -> Table:
    """Return the table of the sweep in *folder* for people: what was swept, the status, then metrics."""
    return _table(points(folder), folder)


def _table(table: pa.Table, folder: Path) -> Table:
    proven = [kind not in (None, "none") for kind in table["evidence"].to_pylist()]
    columns: list[tuple[int, str, str, list[Any]]] = []  # place, name, definition, values
    for field in table.schema:
        name, part, values = field.name, field.metadata[b"part"], table[field.name].to_pylist()
        if part == b"metric":
            values = [value if proof else None for value, proof in zip(values, proven, strict=True)]
        known = values if part != b"about" else [value for value in values if value is not None]
        varies = any(value != known[0] for value in known)
        if name in ("folder", "point") or not (varies or name == "status" or (part, len(values)) == (b"metric", 1)):
            continue
        place = 0 if part == b"override" or name in _CHOSEN else 1
        if part == b"metric":
            place = 2 + (_FIRST.index(name) if name in _FIRST else len(_FIRST))
        columns.append((place, name, field.metadata[b"definition"].decode(), values))
    columns.sort(key=lambda each: each[0])
    rows = list(zip(*(values for *_, values in columns), strict=True))
    return Table(
        f"{table.num_rows} point{'s' * (table.num_rows != 1)} in {folder}",
        {name: text for _, name, text, _ in columns},
        rows,
    )


def swept(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> list[str]:
    """Return the keys whose value differs among *rows* of the table `points`, which has *schema*."""
    keys = []
    for field in schema:
        override = field.metadata[b"part"] == b"override"
        if override or field.name in ("hw", "backend", "target", "seed"):
            values = [row[field.name] for row in rows]
            # only a point that cannot be run has no hw, backend, target or seed
            if len({str(value) for value in values if override or value is not None}) > 1:
                keys.append(field.name)
    return keys


def short(keys: Iterable[str]) -> list[str]:
    """Return the shortest ends of dotted *keys* that tell them apart.

    >>> short(["parallel.prefill.tp", "parallel.decode.tp", "hw"])
    ['prefill.tp', 'decode.tp', 'hw']
    """
    parts = [key.split(".") for key in keys]
    names = []
    for own in parts:
        lengths = range(1, len(own) + 1)
        alone = (n for n in lengths if sum(other[-n:] == own[-n:] for other in parts) == 1)
        names.append(".".join(own[-next(alone, len(own)) :]))
    return names


def _brief(whole: Table, metrics: set[str]) -> Table:
    # Without points that cannot be run, unless all are such; without columns that no row fills.
    names = list(whole.columns)
    at = names.index("status")
    rows = [row for row in whole.rows if row[at] != "infeasible"] or list(whole.rows)
    filled = [n for n, name in enumerate(names) if n == at or any(row[n] not in (None, "") for row in rows)]
    most = max(_LEAST, sum(names[n] in _FIRST for n in filled))
    shown = [n for n in filled if names[n] in metrics][:most]
    kept = [n for n in filled if names[n] not in metrics or n in shown]
    titles = short(names)
    columns = {titles[n]: whole.columns[names[n]] for n in kept}
    return Table(whole.title, columns, [[row[n] for n in kept] for row in rows])


def show(folder: Path, file: IO[str] | None = None, *, json: bool = False, verbose: bool = False) -> None:
    """Print the table over all points of the sweep in *folder*, or one JSON object with its rows."""
    table = points(folder)
    if json:
        rows = {"points": str(folder / POINTS), "rows": table.to_pylist()}
        (sys.stdout if file is None else file).write(dumps(rows, default=str) + "\n")
        return
    whole = _table(table, folder)
    metrics = {field.name for field in table.schema if field.metadata[b"part"] == b"metric"}
    brief = whole if verbose else _brief(whole, metrics)
    terminal.show_table(brief, file, definitions=verbose)
    if left := len(metrics & set(whole.columns)) - len(metrics & set(brief.columns)):
        terminal.show_lines(f"{left} more metrics: pdsim show -v {folder}", file=file)
    if left := len(whole.rows) - len(brief.rows):
        reason = next((row["error"] for row in table.to_pylist() if row["status"] == "infeasible"), "")
        such = f", such as: {reason.splitlines()[0]}" if reason else ""
        terminal.show_lines(f"{left} more cannot be run (pdsim show -v {folder}){such}", file=file)
    command = "best" if "goodput" in table.column_names else "report"
    terminal.show_lines(f"next: {terminal.program()} {command} {folder}", file=file)


class Ledger:
    """The *rows* of the sweep in *folder* by the name of the point, and *definitions* of metrics; `append` adds one.

    The caller holds `locked` for as long as the ledger is open.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER
        self.rows, self.definitions = read_ledger(folder) if self._path.is_file() else ({}, {})
        if self._path.is_file():  # what a killed process began is cut off
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
        self._file = self._path.open("a", encoding="utf-8")

    def append(self, row: Mapping[str, Any], definitions: Mapping[str, str]) -> None:
        """Write *row*, and those *definitions* of its metrics that no row before had."""
        if new := {name: text for name, text in definitions.items() if name not in self.definitions}:
            self.definitions |= new
            self._write({"definitions": new})
        self.rows[str(row["point"])] = dict(row)
        self._write(row)

    def close(self) -> None:
        """Close the file, with all rows on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, content: Mapping[str, Any]) -> None:
        self._file.write(dumps(content, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


def read_ledger(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the rows of the sweep in *folder* by the name of their point, and the definitions of metrics.

    Raise a `ConfigError` if the file is not what a sweep writes.
    """
    path = folder / LEDGER
    rows: dict[str, dict[str, Any]] = {}
    definitions: dict[str, str] = {}
    try:
        lines = files.whole(path).split(b"\n")[:-1]  # what does not end in a newline was never complete
        for line in lines:
            row = loads(line)
            if "definitions" in row:
                definitions |= row["definitions"]
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
