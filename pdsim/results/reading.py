# SPDX-License-Identifier: Apache-2.0
"""What `pdsim.results.store` wrote, read again: a file holds what it should, or is refused.

Folders of results are copied, edited and cut short; a `ConfigError` names the file, what is wrong
and the way out.  So `show`, `compare`, `report` and `sweep` need not ask what a field is.  The
structures here have the fields that those use; a file may have more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from pdsim.core.errors import ConfigError
from pdsim.hardware.machine import EVIDENCE
from pdsim.results import schema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "MetricEntry",
    "RunFile",
    "about",
    "configuration",
    "metrics",
    "nested",
    "points",
    "run_file",
    "summary",
    "table",
]

_Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Number = _Whole | float | None
_Shape = TypeVar("_Shape", "RunFile", "_Summary")
_AGAIN = "it was changed since, so run it again"
_COLUMNS = {
    "requests.parquet": schema.REQUESTS,
    "transfers.parquet": schema.TRANSFERS,
    "samples.parquet": schema.SAMPLES,
}


class _HeldOut(msgspec.Struct):
    """Errors on samples that the fit of a calibration has not seen.

    Shares: the mean, the 95th percentile, and the floor that jobs leave.
    """

    points: int
    how: str
    mean: float
    p95: float
    jobs: int = 1
    floor_p95: float | None = None


class _Calibration(msgspec.Struct):
    """The calibration that a run used, as far as its report names it."""

    name: str
    source: str
    date: str
    held_out: _HeldOut | None


class _Evidence(msgspec.Struct):
    """The source of each number of a run, which begins with its kind, and the weakest kind among them."""

    weakest: str
    sources: dict[str, str]
    calibration: _Calibration | None = None

    def __post_init__(self) -> None:
        for name, source in self.sources.items():
            if source.partition(":")[0].strip() not in EVIDENCE:
                raise ValueError(f"source {source!r} of {name} must begin with one of {', '.join(EVIDENCE)}")


class _Begun(msgspec.Struct):
    """``run.json`` of a run that did not end: what a sweep shows of it.

    Only the first two are there from the start; the others once the configuration was known.
    """

    status: str
    overrides: list[str]
    error: str = ""
    experiment: str | None = None
    hw: str | None = None
    backend: str | None = None
    target: str | None = None
    seed: _Whole | None = None
    evidence: _Evidence | None = None


class _Git(msgspec.Struct):
    """The commit of the source tree, and whether it had changes; both unknown where there is no repository."""

    commit: str | None = None
    dirty: bool | None = None


class RunFile(msgspec.Struct):
    """``run.json`` of a run that ended."""

    schema: int
    status: str
    error: str
    experiment: str
    hw: str
    backend: str
    target: str
    seed: _Whole
    overrides: list[str]
    engine: list[str]
    evidence: _Evidence
    pdsim: str
    git: _Git | None = None


class MetricEntry(msgspec.Struct):
    """One number of ``summary.json``; *tabled* if a table shows it too."""

    value: _Number
    definition: str
    tabled: bool


class _Table(msgspec.Struct):
    """One table of ``summary.json``: headings with their definitions, and rows of as many cells."""

    title: str
    columns: dict[str, str]
    rows: list[list[bool | _Whole | float | str | None]]

    def __post_init__(self) -> None:
        if wrong := [len(row) for row in self.rows if len(row) != len(self.columns)]:
            raise ValueError(f"table {self.title!r} has {len(self.columns)} columns and a row of {wrong[0]}")
        if "utilisation" in self.columns and not all(_is_use(row) for row in self.rows):
            raise ValueError(f"table {self.title!r} must have rows of a name and a number")


def _is_use(row: list[Any]) -> bool:
    """Return whether *row* is a name and the share of something that is used."""
    return [type(value) in kinds for value, kinds in zip(row, ((str,), (int, float)), strict=False)] == [True, True]


class _Summary(msgspec.Struct):
    """``summary.json``."""

    schema: int
    metrics: dict[str, MetricEntry]
    tables: list[_Table]
    failures: list[str]
    notes: list[str]
    links: dict[str, _Whole | float]
    pools: dict[str, _Whole | float]


def about(path: Path, *, ended: bool = True) -> dict[str, Any]:
    """Return the ``run.json`` at *path*, of a run that *ended* or of any other.

    A run that was killed has written less of it. Raise a `ConfigError` if the file is not what this version writes.
    """
    return _read(path, RunFile if ended else _Begun)


def summary(path: Path) -> dict[str, Any]:
    """Return the ``summary.json`` at *path*.  Raise a `ConfigError` if it is not what this version writes."""
    return _read(path, _Summary)


def run_file(path: Path) -> RunFile:
    """Return what pdsim itself reads of the ``run.json`` at *path*, of a run that ended.

    Raise a `ConfigError` as `about` does.
    """
    return _decoded(path, RunFile)


def metrics(path: Path) -> Mapping[str, MetricEntry]:
    """Return the metrics of the ``summary.json`` at *path*, which is refused where `summary` refuses it."""
    return _decoded(path, _Summary).metrics


def configuration(path: Path) -> dict[str, Any]:
    """Return the ``config.yaml`` at *path* by dotted key, interpolations as they are written.

    Raise a `ConfigError` for a file that is not YAML, has no keys, or contains itself.
    """
    return dict(_flat(nested(path)))


def nested(path: Path) -> dict[str, Any]:
    """Return the ``config.yaml`` at *path* as it is written, nested; raise as `configuration`."""
    import yaml  # type: ignore[import-untyped]  # comes with OmegaConf, its stubs do not

    try:
        plain = yaml.load(path.read_bytes(), Loader=_loader())  # noqa: S506  # it is a safe one
        if not isinstance(plain, dict):
            raise ConfigError(f"{path} has no keys; {_AGAIN}")
        json.dumps(plain, default=str, skipkeys=True)  # a ValueError of what contains itself
        return plain
    except (yaml.YAMLError, OSError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a configuration: {_line(error)}; {_AGAIN}") from error


@cache
def _loader() -> Any:
    """Return what reads YAML as OmegaConf does, dates as text; libyaml is ended by deep nesting."""
    import yaml

    base: Any = yaml.SafeLoader
    resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for first, found in base.yaml_implicit_resolvers.items()
    }
    return type("Loader", (base,), {"yaml_implicit_resolvers": resolvers})


def points(path: Path) -> pa.Table:
    """Return the ``points.parquet`` of a sweep at *path*: every column says in its metadata what it is.

    Metadata of a field are its *part* (override, metric and so on) and its *definition*, both
    bytes.  Raise a `ConfigError` for a file that is not such a table.
    """
    found = table(path)
    bare = [field.name for field in found.schema if not {b"part", b"definition"} <= set(field.metadata or ())]
    if bare or not {"status", "evidence"} <= set(found.column_names):
        raise ConfigError(f"{path} is not the table of a sweep: {bare[:1] or found.column_names[:3]}; {_AGAIN}")
    return found


def table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the Parquet file at *path*, or *columns* of it.

    Raise a `ConfigError` for a file that is missing, cut short, no table, or that lacks columns which a file of its
    name has: the table of something else under that name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = pq.read_table(path, columns=columns)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{path} is not a table: {_line(error)}; {_AGAIN}") from error
    expected = columns or [column.name for column in _COLUMNS.get(path.name, ())]
    missing = [name for name in expected if name not in found.column_names]
    if missing:
        raise ConfigError(f"{path} has no column {missing[0]}: it is the table of something else; {_AGAIN}")
    return found


def _read(path: Path, shape: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON object at *path*, which has the fields of *shape*; fields that *shape* does not name are kept.

    Raise a `ConfigError` for a file that is not JSON, of another schema, or with fields of other types.
    """
    try:
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {_line(error)}; {_AGAIN}") from error
    if found.get("schema") != schema.VERSION:
        raise ConfigError(
            f"{path} has schema {found.get('schema')!r:.20}, and pdsim reads {schema.VERSION}; run it again, or "
            f"read it with the version of pdsim that wrote it"
        )
    try:
        msgspec.convert(found, shape)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is not what pdsim writes: {_line(error)}; {_AGAIN}") from error
    return found


def _decoded(path: Path, shape: type[_Shape]) -> _Shape:
    """Return the file at *path* as a *shape*; raise as `_read` does, by which it is read again for its words."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=shape)
    except (msgspec.MsgspecError, OSError, ValueError, RecursionError):
        _read(path, shape)
        raise
    if found.schema != schema.VERSION:
        _read(path, shape)
    return found


def _flat(values: Mapping[Any, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of *values* and of the mappings within, by dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _line(error: BaseException) -> str:
    """Return what *error* says, in one line that is not too long."""
    return " ".join(str(error).split())[:200] or type(error).__name__
