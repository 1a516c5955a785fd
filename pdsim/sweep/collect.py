"""One file and one table over all points of a sweep, whatever process each of them ran in.

A point is a folder with a ``run.json``.  Points that failed, or that were killed, are rows with their error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdsim.errors import ConfigError
from pdsim.results import reading, schema
from pdsim.results.record import Table
from pdsim.results.schema import Column
from pdsim.results.store import INCOMPLETE, load

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["POINTS", "collect", "table"]

POINTS = "points.parquet"

_ABOUT = (
    Column("folder", "string", "", "where the point's files are, seen from the folder of the sweep"),
    Column("status", "string", "", "ok; partial: numbers and failures; failed or interrupted; killed: ended unheard"),
    Column("error", "string", "", "the first failure, or empty"),
    Column("experiment", "string", "", "what was run"),
    Column("hw", "string", "", "the machine"),
    Column("backend", "string", "", "the engine that was asked for"),
    Column("target", "string", "", "model or real"),
    Column("seed", "int64", "", "of every random stream"),
    Column("evidence", "string", "", "weakest kind of source that the point's numbers rest on; none: not to be used"),
)


def collect(folder: Path) -> Path:
    """Write ``points.parquet`` over the runs anywhere below *folder* and return its path; may be called again.

    One row a point: who it is, how it ended, the overrides that set it apart, its metrics.  Raise a `ConfigError` if
    there is no run below *folder*.
    """
    import pyarrow.parquet as pq

    path = folder / POINTS
    temporary = path.with_name(f"{POINTS}.{os.getpid()}.part")
    with temporary.open("wb") as file:
        pq.write_table(_arrow(_points(folder)), file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def table(path: Path) -> Table:
    """Return ``points.parquet`` at *path* as a table for people.

    Columns that all points share are left out, and so are the metrics of a point without evidence.
    """
    points = reading.points(path)
    proven = [kind != "none" for kind in points["evidence"].to_pylist()]
    columns, values = {}, []
    for field in points.schema:
        metric = field.metadata[b"part"] == b"metric"
        found = points[field.name].to_pylist()
        if metric:
            found = [value if proof else None for value, proof in zip(found, proven, strict=True)]
        if field.name in ("status", "evidence") or _varies(found) or (metric and len(found) == 1):
            columns[field.name] = field.metadata[b"definition"].decode()
            values.append(found)
    return Table(f"{points.num_rows} points in {path.parent}", columns, list(zip(*values, strict=True)))


def _points(folder: Path) -> list[dict[str, Any]]:
    runs = {path.parent for path in folder.rglob("run.json")} | set(folder.rglob(f"*{INCOMPLETE}"))
    if not runs:
        raise ConfigError(f"{folder} holds no run.json below it: name the folder of a sweep, such as results/sweep-...")
    return [_point(run, folder) for run in sorted(runs, key=lambda run: _natural(str(run.relative_to(folder))))]


def _point(run: Path, sweep: Path) -> dict[str, Any]:
    """Return the values of `_ABOUT`, the overrides and, if the run is complete, the metrics."""
    whole = not run.name.endswith(INCOMPLETE)
    about = load(run) if whole else _about(run)
    about["folder"] = str(run.relative_to(sweep))
    if not whole and about["status"] not in ("failed", "interrupted"):
        about |= {"status": "killed", "error": "ended without a word: killed, or still running"}
    point = {column.name: about.get(column.name) for column in _ABOUT}
    point["evidence"] = about.get("evidence", {}).get("weakest")
    point["overrides"] = dict(_override(text) for text in about["overrides"])
    point["metrics"] = about.get("metrics", {})
    return point


def _about(run: Path) -> dict[str, Any]:
    """Return what an incomplete run says of itself: nothing, if it was killed in its first millisecond."""
    path = run / "run.json"
    return reading.about(path, ended=False) if path.is_file() else {"status": "running", "overrides": []}


def _override(text: str) -> tuple[str, Any]:
    """Return the key and the value of ``+key=value``, the value as YAML reads it."""
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


def _arrow(points: Sequence[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    reserved = {column.name for column in _ABOUT}
    fields, arrays = [], []

    def add(part: str, column: Column, values: Sequence[Any]) -> None:
        metadata = {"unit": column.unit, "definition": column.definition, "part": part}
        fields.append(pa.field(column.name, pa.type_for_alias(column.type), metadata=metadata))
        arrays.append(pa.array(values, type=fields[-1].type))

    for column in _ABOUT:
        add("about", column, [point[column.name] for point in points])
    for key in _keys(points, "overrides"):
        if key in reserved:
            continue
        kind, values = _typed([point["overrides"].get(key) for point in points])
        add("override", Column(key, kind, "", f"override of {key}"), values)
    for name in _keys(points, "metrics"):
        metrics = [point["metrics"].get(name, {}) for point in points]
        definition = next(metric["definition"] for metric in metrics if metric)
        add("metric", Column(name, "float64", "", definition), [metric.get("value") for metric in metrics])
    return pa.table(arrays, schema=pa.schema(fields, metadata={"pdsim.schema": str(schema.VERSION)}))


def _keys(points: Sequence[dict[str, Any]], part: str) -> list[str]:
    """Return the keys of all points in the order in which they first occur."""
    return list(dict.fromkeys(key for point in points for key in point[part]))


def _typed(values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the narrowest of bool, int64, float64 and string that holds all *values*, and the values as that."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {bool}:
        return "bool", list(values)
    if kinds <= {int}:
        return "int64", list(values)
    if kinds <= {int, float}:
        return "float64", [None if value is None else float(value) for value in values]
    return "string", [None if value is None else str(value) for value in values]


def _varies(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``9`` before ``10``."""
    return [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", text)]
