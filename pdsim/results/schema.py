# SPDX-License-Identifier: Apache-2.0
"""What the files of a run hold, with type, unit and definition of each column, and reading them again.

Columns are part of the public interface (`docs/results.md`).  A change of a meaning or a type raises `VERSION`,
which every file carries (``pdsim.schema`` in Parquet, ``schema`` in JSON) and readers compare.  Units and
definitions are in the files, too, as metadata of each field, so that a folder of results explains itself.

Folders of results are copied, edited and cut short: the functions `read_...` raise a `ConfigError` that names the
file, what is wrong and the way out, so `show`, `compare`, `report` and `sweep` need not ask what a field is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdsim.core import files
from pdsim.core.errors import ConfigError
from pdsim.hardware.machine import EVIDENCE
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import SampleRow
from pdsim.transfer.log import ArrayColumn, logs

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1

ROW_GROUP = 1 << 17
"""Rows of requests or transfers that are made and written at a time."""


class Column(NamedTuple):
    """One column of a table of results."""

    name: str
    type: str  # of Arrow, by name
    unit: str  # of its values; empty for what has none
    definition: str  # what a value means, and when it is null


TRANSFERS = (
    Column("engine", "string", "", "transport"),
    Column("operation", "string", "", "write, read, all_gather or reserve"),
    Column("source", "string", "", "rank that sent"),
    Column("target", "string", "", "rank that received"),
    Column("label", "string", "", "its point or request"),
    Column("status", "string", "", "ok, or its error's class"),
    Column("nbytes", "int64", "B", "bytes of all descriptors"),
    Column("batch_size", "int64", "", "descriptors"),
    Column("block_size", "float64", "B", "nbytes / batch_size"),
    Column("submitted", "float64", "s", "the program called, on the initiator's clock"),
    Column("prepared", "float64", "s", "descriptor lists were built"),
    Column("posted", "float64", "s", "all descriptors were posted"),
    Column("completed", "float64", "s", "the bytes had arrived, by the engine"),
    Column("seen", "float64", "s", "the initiator saw the completion"),
    Column("prep_us", "float64", "us", "prepared - submitted"),
    Column("post_us", "float64", "us", "posted - prepared"),
    Column("tx_us", "float64", "us", "seen - posted, polling included"),
    Column("poll_us", "float64", "us", "seen - completed"),
    Column("latency_us", "float64", "us", "seen - submitted"),
    Column("bw_gbs", "float64", "GB/s", "nbytes / latency, if ok"),
)

REQUESTS = (
    Column("id", "int64", "", "place in the workload, from 0"),
    Column("arrival", "float64", "s", "since the start of the workload"),
    Column("input", "int64", "tokens", "length of the prompt"),
    Column("output", "int64", "tokens", "tokens wanted"),
    Column("patience", "float64", "s", "until its user leaves; null: stays"),
    Column("prefill", "string", "", "prefill instance"),
    Column("decode", "string", "", "decode instance"),
    Column("nbytes", "int64", "B", "KV and metadata transferred"),
    Column("status", "string", "", "ok, or why tokens are missing"),
    Column("path", "string", "", "grouped, sliced, staged, joined by +"),
    Column("ttft", "float64", "s", "arrival to first token at decode"),
    Column("tpot", "float64", "s", "first token to last, over output - 1"),
    Column("e2e", "float64", "s", "arrival to last token"),
    Column("queueing", "float64", "s", "waiting for decode pages, prefill, a place in the decode batch"),
    Column("compute", "float64", "s", "prefill forwards, and in the decode batch"),
    Column("handshake", "float64", "s", "decode pages reserved until prefill knows them"),
    Column("transfer", "float64", "s", "end of prefill until KV and metadata are in place"),
    Column("polling", "float64", "s", "from there until the decode scheduler looks"),
)

INSTANTS = (
    Column("reserved_at", "float64", "s", "decode has reserved its pages"),
    Column("noticed_at", "float64", "s", "prefill has their numbers"),
    Column("started_at", "float64", "s", "its first prefill forward begins"),
    Column("prefilled_at", "float64", "s", "its last prefill forward ends"),
    Column("asked_at", "float64", "s", "decode hears of it, if later"),
    Column("arrived_at", "float64", "s", "all its KV and metadata are at decode"),
    Column("polled_at", "float64", "s", "the decode scheduler looks"),
    Column("joined_at", "float64", "s", "it joins the decode batch"),
)
"""Columns of requests that only a run of our own schedulers has: what a timeline is drawn from."""

OPTIONAL = (
    Column("cached_prefill", "int64", "tokens", "of the prompt, cached at prefill"),
    Column("cached_decode", "int64", "tokens", "of the prompt, cached at decode"),
    Column("cached_host", "int64", "tokens", "of cached_prefill, from host memory"),
    Column("cached_ssd", "int64", "tokens", "of cached_prefill, from an SSD"),
    Column("cached_remote", "int64", "tokens", "of cached_prefill, from the remote store"),
    Column("load", "float64", "s", "of its first step, until those are in the GPU's memory"),
    Column("prefetch", "float64", "s", "of queueing, until a prefetch let it be queued"),
    Column("priority", "int64", "", "the higher goes first, and is not shed"),
    Column("tenant", "string", "", "who sent it"),
    Column("slo_ttft", "float64", "s", "most TTFT by its tenant's SLO"),
    Column("slo_tpot", "float64", "s", "most TPOT by its tenant's SLO"),
)
"""Columns of requests that only a run has with a prefix cache (the first seven), with priorities, or tenants."""

LIVE = (
    Column("sent", "float64", "s", "the client sends it"),
    Column("tokens", "int64", "tokens", "output tokens received"),
    Column("prefilled", "float64", "s", "arrival to the prefill server's answer"),
    Column("handoff", "float64", "s", "from there to the first token"),
    Column("itl_p50", "float64", "s", "median time between streamed chunks"),
    Column("itl_p99", "float64", "s", "99th percentile of that; needs 100 chunks"),
    Column("itl_max", "float64", "s", "longest of that"),
    Column("finish", "string", "", "why generation ended"),
    Column("reported", "string", "", "the servers' report: a JSON object"),
)
"""Columns of requests that only a run with `target=live` has."""


SAMPLES = (
    Column("kind", "string", "", "link, pool (memory), pages (KV, of an instance) or ring (staging)"),
    Column("name", "string", "", "its name"),
    Column("time", "float64", "s", "since the start of the job (workload: `start` in summary.json)"),
    Column("value", "float64", "", "share in use; of a link the mean since the last sample"),
)
"""Columns of ``samples.parquet``, which only a modelled run with ``samples`` has."""


@cache
def _schema(columns: tuple[Column, ...]) -> pa.Schema:
    import pyarrow as pa

    fields = [
        pa.field(c.name, pa.type_for_alias(c.type), metadata={"unit": c.unit, "definition": c.definition})
        for c in columns
    ]
    return pa.schema(fields, metadata={"pdsim.schema": str(VERSION)})


def transfers_table(records: Sequence[TransferRecord]) -> pa.Table:
    """Return *records* as an Arrow table of the columns `TRANSFERS`, in the order given."""
    import pyarrow as pa

    return pa.concat_tables(transfers_tables(records)).combine_chunks()


def transfers_tables(records: Sequence[TransferRecord], rows: int = ROW_GROUP) -> Iterator[pa.Table]:
    """Yield `transfers_table` in tables of about so many *rows*, at least one."""
    parts: list[Mapping[str, ArrayColumn]] = []
    size = 0
    for log in logs(records):
        for columns in log.columns(rows):
            parts.append(columns)
            size += len(columns["status"])
            if size >= rows:
                yield _transfers(_joined(parts))
                parts, size = [], 0
    if parts:
        yield _transfers(_joined(parts))
    elif not records:
        yield _schema(TRANSFERS).empty_table()


def _joined(parts: Sequence[Mapping[str, ArrayColumn]]) -> dict[str, ArrayColumn]:
    # A log of a rank is short in a short run, and Arrow takes as long for a short column as for a long one.
    columns = {}
    for name, first in parts[0].items():
        values, words = [part[name].values for part in parts], None
        if first.words is not None:
            words = [word for part in parts for word in part[name].words or ()]
            starts = accumulate((len(part[name].words or ()) for part in parts), initial=0)
            values = [own + start for own, start in zip(values, starts, strict=False)]
        columns[name] = ArrayColumn(np.concatenate(values), words)
    return columns


def _transfers(columns: Mapping[str, ArrayColumn]) -> pa.Table:
    # Divisions by 0 give infinities and NaN, as IEEE says: a transfer without descriptors has no block size. The
    # rate is null where a transfer failed or took no time.
    import pyarrow as pa

    status = columns["status"]
    ok = np.array([word == "ok" for word in status.words or ()])[status.values]
    values: dict[str, ArrayColumn | npt.NDArray[Any]] = {
        name: column if column.words is not None else column.values for name, column in columns.items()
    }
    submitted, prepared, posted, completed, seen = (
        columns[name].values for name in ("submitted", "prepared", "posted", "completed", "seen")
    )
    nbytes, batch = (columns[name].values.astype(np.float64) for name in ("nbytes", "descriptors"))
    with np.errstate(divide="ignore", invalid="ignore"):
        values |= {
            "batch_size": columns["descriptors"].values,
            "block_size": nbytes / batch,
            "prep_us": (prepared - submitted) * 1e6,
            "post_us": (posted - prepared) * 1e6,
            "tx_us": (seen - posted) * 1e6,
            "poll_us": (seen - completed) * 1e6,
            "latency_us": (seen - submitted) * 1e6,
            "bw_gbs": ArrayColumn(np.where(ok & (seen > submitted), nbytes / (seen - submitted) / 1e9, np.nan)),
        }
    schema = _schema(TRANSFERS)
    return pa.Table.from_arrays([arrow_array(values[f.name], f.type) for f in schema], schema=schema)


def samples_table(samples: Sequence[SampleRow]) -> pa.Table:
    """Return *samples* as an Arrow table of the columns `SAMPLES`, in the order given."""
    import pyarrow as pa

    columns = list(zip(*samples, strict=True)) or [()] * len(SAMPLES)
    schema = _schema(SAMPLES)
    return pa.table([arrow_array(values, f.type) for f, values in zip(schema, columns, strict=True)], schema=schema)


def requests_tables(requests: Mapping[str, Sequence[Any]], rows: int = ROW_GROUP) -> Iterator[pa.Table]:
    """Yield `requests_table` in tables of so many *rows*, at least one."""
    for first in range(0, max(map(len, requests.values()), default=0) or 1, rows):
        part = slice(first, first + rows)
        yield requests_table(
            {name: own.taken(part) if isinstance(own, ArrayColumn) else own[part] for name, own in requests.items()}
        )


def requests_table(requests: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Return *requests* as an Arrow table of the columns `REQUESTS`; a column that is left out is null.

    Raise a `ValueError` if a column is unknown, longer than another, or holds what its type cannot.
    """
    import pyarrow as pa

    extra = (*INSTANTS, *OPTIONAL, *LIVE)
    if unknown := sorted(set(requests) - {column.name for column in (*REQUESTS, *extra)}):
        raise ValueError(
            f"requests has columns {', '.join(unknown)} without type, unit and definition: "
            "add them to pdsim.results.schema.REQUESTS"
        )
    lengths = {name: len(values) for name, values in requests.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"requests has columns of different lengths: {lengths}")
    missing = [None] * next(iter(lengths.values()), 0)
    schema = _schema((*REQUESTS, *(column for column in extra if column.name in requests)))
    arrays = []
    for field in schema:
        try:
            arrays.append(arrow_array(requests.get(field.name, missing), field.type))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"requests column {field.name} does not hold {field.type}: {error}") from None
    return pa.table(arrays, schema=schema)


def packing(table: pa.Table) -> dict[str, Any]:
    """Return how a file packs the columns of *table*, as arguments of `pyarrow.parquet.ParquetWriter`.

    Seconds hardly repeat: their bytes are split by place.  All else has a dictionary.  zstd takes longer to begin
    than a short table takes to write, and packs a long one to nine tenths of what LZ4 does.
    """
    seconds = [field.name for field in table.schema if field.metadata[b"unit"] == b"s"]
    return {
        "compression": "zstd" if table.num_rows > 10_000 else "lz4",
        "column_encoding": dict.fromkeys(seconds, "BYTE_STREAM_SPLIT"),
        "use_dictionary": [name for name in table.schema.names if name not in seconds],
    }


_NUMBERS: dict[str, tuple[Any, set[type]]] = {"double": (np.float64, {float, int}), "int64": (np.int64, {int})}
"""By the name of Arrow's type, that of numpy and those of Python that it holds without loss."""


def arrow_array(values: Sequence[Any] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return *values* as an Arrow array of *kind*: text, floats or whole numbers of 64 bits; None is null.

    It does without `pyarrow.array`, which imports pandas where it is installed: a third of a second.  Raise a
    `ValueError` for values that *kind* does not hold.
    """
    number, types = _NUMBERS.get(str(kind), (None, {str}))
    own, places = values, np.arange(len(values))
    if isinstance(values, ArrayColumn) and values.words is not None:
        own, places = values.words, values.values
    elif isinstance(values, ArrayColumn) and values.values.dtype.kind == "f":
        known = ~np.isnan(values.values)
        return _of_buffers(kind, known, np.where(known, values.values, 0).astype(number))
    elif isinstance(values, ArrayColumn | np.ndarray):
        numbers = np.ascontiguousarray(values.values if isinstance(values, ArrayColumn) else values, number)
        return _of_buffers(kind, np.ones(len(numbers), np.bool_), numbers)
    if wrong := set(map(type, own)) - types - {NoneType}:
        raise ValueError(f"{wrong.pop().__name__} is not {kind}")
    known = np.array([value is not None for value in own], np.bool_)[places] if None in own else places >= 0
    if number is not None:
        return _of_buffers(kind, known, np.array([0 if value is None else value for value in own], number)[places])
    texts = [b"" if value is None else value.encode() for value in own]
    lengths = np.fromiter(map(len, texts), np.int32, len(texts))[places]
    ends = np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)))
    return _of_buffers(kind, known, ends, b"".join(map(texts.__getitem__, places.tolist())))


def _of_buffers(kind: pa.DataType, known: npt.NDArray[np.bool_], *data: Any) -> pa.Array:
    import pyarrow as pa

    valid = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little"))
    return pa.Array.from_buffers(kind, len(known), [valid, *(pa.py_buffer(each) for each in data)])


# --- reading the files again ---------------------------------------------------------------------------------------

# The structures have the fields that readers use; a file may have more.

_Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_AGAIN = "it was changed since, so run it again"
_COLUMNS = {"requests.parquet": REQUESTS, "transfers.parquet": TRANSFERS, "samples.parquet": SAMPLES}


class _HeldOut(msgspec.Struct):
    points: int
    how: str
    mean: float
    p95: float
    jobs: int = 1
    floor_p95: float | None = None


class _Calibration(msgspec.Struct):
    name: str
    source: str
    date: str
    held_out: _HeldOut | None


class _Evidence(msgspec.Struct):
    weakest: str
    sources: dict[str, str]
    calibration: _Calibration | None = None

    def __post_init__(self) -> None:
        for name, source in self.sources.items():
            if source.partition(":")[0].strip() not in EVIDENCE:
                raise ValueError(f"source {source!r} of {name} must begin with one of {', '.join(EVIDENCE)}")


class _Git(msgspec.Struct):
    commit: str | None = None
    dirty: bool | None = None


class _Begun(msgspec.Struct):  # run.json from the start of a run
    status: str


class _RunFile(_Begun):  # run.json of a run that ended
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
    command: list[str] = []


class _MetricEntry(msgspec.Struct):
    value: _Whole | float | None
    definition: str
    tabled: bool


class _Table(msgspec.Struct):
    title: str
    columns: dict[str, str]
    rows: list[list[bool | _Whole | float | str | None]]

    def __post_init__(self) -> None:
        if wrong := [len(row) for row in self.rows if len(row) != len(self.columns)]:
            raise ValueError(f"table {self.title!r} has {len(self.columns)} columns and a row of {wrong[0]}")
        if "utilisation" in self.columns:
            msgspec.convert(self.rows, list[tuple[str, float]])


class _Summary(msgspec.Struct):
    metrics: dict[str, _MetricEntry]
    tables: list[_Table]
    failures: list[str]
    notes: list[str]
    links: dict[str, _Whole | float]
    pools: dict[str, _Whole | float]


def read_about(path: Path, *, ended: bool = True) -> dict[str, Any]:
    """Return the ``run.json`` at *path*, of a run that *ended* or of any other.

    Raise a `ConfigError` if the file is not what this version writes.
    """
    return _read(path, _RunFile if ended else _Begun)


def read_summary(path: Path) -> dict[str, Any]:
    """Return the ``summary.json`` at *path*.  Raise a `ConfigError` if it is not what this version writes."""
    return _read(path, _Summary)


def _read(path: Path, shape: type[msgspec.Struct]) -> dict[str, Any]:
    try:
        content: dict[str, Any] = msgspec.json.decode(files.whole(path), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a folder that can be read") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {_one_line(error)}; {_AGAIN}") from error
    if content.get("schema") != VERSION:
        raise ConfigError(
            f"{path} has schema {content.get('schema')!r:.20}, and pdsim reads {VERSION}; run it again, or "
            f"read it with the version of pdsim that wrote it"
        )
    try:
        msgspec.convert(content, shape)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is not what pdsim writes: {_one_line(error)}; {_AGAIN}") from error
    return content


def read_configuration(path: Path) -> dict[str, Any]:
    """Return the ``config.yaml`` at *path* by dotted key, interpolations as they are written.

    Raise a `ConfigError` for a file that is not YAML, has no keys, or contains itself.
    """
    return dict(_flat(read_nested(path)))


def _flat(values: Mapping[Any, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def read_nested(path: Path) -> dict[str, Any]:
    """Return the ``config.yaml`` at *path* as it is written, nested; raise as `read_configuration`."""
    import yaml  # type: ignore[import-untyped]  # comes with OmegaConf, its stubs do not

    try:
        plain = _plain(files.yaml_text(path))
        if not isinstance(plain, dict):
            raise ConfigError(f"{path} has no keys; {_AGAIN}")
        return dict(plain)
    except (yaml.YAMLError, OSError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a configuration: {_one_line(error)}; {_AGAIN}") from error


@lru_cache(1)
def _plain(text: str) -> Any:
    import yaml

    plain = yaml.load(text, Loader=_loader())  # noqa: S506  # it is a safe one
    json.dumps(plain, default=str, skipkeys=True)  # a ValueError of what contains itself
    return plain


@cache
def _loader() -> Any:
    # dates stay text
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C it is eight times as fast
    resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
        for first, rules in base.yaml_implicit_resolvers.items()
    }
    return type("Loader", (base,), {"yaml_implicit_resolvers": resolvers})


_CELLS = 2_000_000_000
"""Values of a table: those of 20 million requests."""

_FEW = 100_000
"""Rows that any table may have; of more, requests and transfers take at least a byte each, for times differ."""


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the Parquet file at *path*, or *columns* of it.

    Raise a `ConfigError` for a file that is missing, cut short, no table, or that lacks columns which a file of its
    name has, or has them of other types: the table of something else under that name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        about = pq.read_metadata(path)
        most = _CELLS // about.num_columns if about.num_columns else 0
        if path.name in ("requests.parquet", "transfers.parquet"):
            most = min(most, max(_FEW, path.stat().st_size))
        if about.num_rows > most:  # as few bytes may hold: equal values are written once
            raise ConfigError(
                f"{path} has {about.num_rows} rows, more than {most} of a run in so many bytes; {_AGAIN}"
            )
        table = pq.read_table(path, columns=columns)
    except PermissionError:
        raise ConfigError(f"{path}: Permission denied; name a folder that can be read") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{path} is not a table: {_one_line(error)}; {_AGAIN}") from error
    known = _COLUMNS.get(path.name, ())
    expected = columns or [column.name for column in known]
    if missing := [name for name in expected if name not in table.column_names]:
        raise ConfigError(f"{path} has no column {missing[0]}: it is the table of something else; {_AGAIN}")
    more = (*INSTANTS, *OPTIONAL, *LIVE) if known is REQUESTS else ()
    types = {column.name: pa.type_for_alias(column.type) for column in (*known, *more)}
    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        if kind != types.get(name, kind):
            raise ConfigError(f"{path} has a column {name} of {kind}, not {types[name]}; {_AGAIN}")
    return table


def read_points(path: Path) -> pa.Table:
    """Return the ``points.parquet`` of a sweep at *path*.

    Metadata of a field are its *part* (override, metric and so on) and its *definition*, both bytes.  Raise a
    `ConfigError` for a file that is not such a table.
    """
    table = read_table(path)
    bare = [field.name for field in table.schema if not {b"part", b"definition"} <= set(field.metadata or ())]
    if bare or not {"status", "evidence"} <= set(table.column_names):
        raise ConfigError(f"{path} is not the table of a sweep: {bare[:1] or table.column_names[:3]}; {_AGAIN}")
    return table


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
