# SPDX-License-Identifier: Apache-2.0
"""The columns of the files of a run, each with its type, unit and definition: what `docs/results.md` explains.

Columns are part of the public interface.  A change of a meaning or a type raises `VERSION`, which
every file carries (``pdsim.schema`` in Parquet, ``schema`` in JSON) and `pdsim.results.reading`
compares.  Units and definitions are in the files, too, as metadata of each field, so that a folder
of results explains itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pdsim.results.columns import array
from pdsim.transfer import TransferRecord
from pdsim.transfer.compact import ArrayColumn
from pdsim.transfer.job import SampleRow
from pdsim.transfer.transfer_log import logs

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

__all__ = [
    *("INSTANTS", "LIVE", "OPTIONAL", "REQUESTS", "SAMPLES", "TRANSFERS"),
    *("VERSION", "Column", "requests_table", "samples_table", "transfers_table", "transfers_tables"),
]

VERSION = 1

ROW_GROUP = 1 << 17
"""Rows of transfers that are made and written at a time."""


class Column(NamedTuple):
    """One column of a table of results.

    Attributes:
        name: As it is in the file.
        type: Name of an Arrow type.
        unit: Of its values; empty for what has none.
        definition: What a value means, and when it is null.
    """

    name: str
    type: str
    unit: str
    definition: str


TRANSFERS = (
    Column("engine", "string", "", "what moved the bytes, as the engine reports it"),
    Column("operation", "string", "", "write, read, all_gather or reserve"),
    Column("source", "string", "", "rank whose memory the bytes came from"),
    Column("target", "string", "", "rank whose memory the bytes went to"),
    Column("label", "string", "", "the caller's name for the transfer, such as its point or its request"),
    Column("status", "string", "", "ok, or the class of the error that it failed with"),
    Column("nbytes", "int64", "B", "bytes of all descriptors"),
    Column("batch_size", "int64", "", "descriptors of the transfer"),
    Column("block_size", "float64", "B", "mean bytes of a descriptor: nbytes / batch_size"),
    Column("submitted", "float64", "s", "when the program asked for it, on the poster's clock"),
    Column("prepared", "float64", "s", "when the engine's descriptor lists were built"),
    Column("posted", "float64", "s", "when the engine had taken all descriptors"),
    Column("completed", "float64", "s", "when the bytes were at the target, as far as the engine can tell"),
    Column("seen", "float64", "s", "when the poster's poller saw the completion"),
    Column("prep_us", "float64", "us", "prepared - submitted"),
    Column("post_us", "float64", "us", "posted - prepared"),
    Column("tx_us", "float64", "us", "seen - posted: as in nixlbench, polling included"),
    Column("poll_us", "float64", "us", "seen - completed: the part of tx_us that the poller added"),
    Column("latency_us", "float64", "us", "seen - submitted = prep_us + post_us + tx_us, of the whole batch"),
    Column("bw_gbs", "float64", "GB/s", "nbytes / latency, 1 GB = 1e9 bytes; null unless status is ok"),
)

REQUESTS = (
    Column("id", "int64", "", "its place in the workload, from 0"),
    Column("arrival", "float64", "s", "when it arrived, from the start of the workload"),
    Column("input", "int64", "tokens", "length of the prompt"),
    Column("output", "int64", "tokens", "tokens that were asked for"),
    Column(
        "patience", "float64", "s", "from its arrival until its user leaves, as workload.aborts says; null: stays"
    ),
    Column("prefill", "string", "", "prefill instance that it was sent to"),
    Column("decode", "string", "", "decode instance that it was sent to"),
    Column("nbytes", "int64", "B", "KV cache and metadata handed over, to all decode ranks"),
    Column("status", "string", "", "ok, or why it did not get all its tokens"),
    Column("path", "string", "", "how its KV went: grouped, sliced, staged, or several joined by +"),
    Column(
        "ttft", "float64", "s", "from arrival to the decode engine having the first token, which it then streams"
    ),
    Column("tpot", "float64", "s", "from the first token to the last, over output - 1; null for one token"),
    Column("e2e", "float64", "s", "from arrival to the last token"),
    Column(
        "queueing", "float64", "s", "waiting for decode pages, the prefill engine, and a place in the decode batch"
    ),
    Column("compute", "float64", "s", "in prefill forwards, from the first to the last, and in the decode batch"),
    Column("handshake", "float64", "s", "from decode pages reserved to the prefill scheduler having their numbers"),
    Column("transfer", "float64", "s", "from the end of its last prefill forward to its KV and metadata in place"),
    Column("polling", "float64", "s", "from there until the decode scheduler looks, between two steps"),
)

INSTANTS = (
    Column("reserved_at", "float64", "s", "when decode had reserved its pages, from the start of the workload"),
    Column("noticed_at", "float64", "s", "when the prefill scheduler had the numbers of those pages"),
    Column("started_at", "float64", "s", "when its first prefill forward began"),
    Column("prefilled_at", "float64", "s", "when its last prefill forward ended"),
    Column("asked_at", "float64", "s", "when decode heard of it; null where it hears at once"),
    Column("arrived_at", "float64", "s", "when all its KV and metadata were at decode"),
    Column("polled_at", "float64", "s", "when the decode scheduler looked"),
    Column("joined_at", "float64", "s", "when it joined the decode batch"),
)
"""Columns of requests that only a run of our own schedulers has: what a timeline is drawn from."""

OPTIONAL = (
    Column("cached_prefill", "int64", "tokens", "of the prompt, that its prefill instance had cached"),
    Column("cached_decode", "int64", "tokens", "of the prompt, that its decode instance had cached"),
    Column("cached_host", "int64", "tokens", "of cached_prefill, those that came back from host memory"),
    Column("priority", "int64", "", "the higher goes first, and is not shed"),
)
"""Columns of requests that only a run has with a prefix cache (the first three), or with priorities."""

LIVE = (
    Column("sent", "float64", "s", "when the client sent it, from the start of the workload"),
    Column("tokens", "int64", "tokens", "output tokens that the client got"),
    Column("prefilled", "float64", "s", "from arrival to the prefill server's answer, as a proxy sees it"),
    Column("handoff", "float64", "s", "from the prefill server's answer to the first token from decode"),
    Column("itl_p50", "float64", "s", "median time from one streamed chunk with tokens to the next"),
    Column("itl_p99", "float64", "s", "99th percentile of that; needs 100 chunks"),
    Column("itl_max", "float64", "s", "longest of that"),
    Column("finish", "string", "", "why generation ended, as the server says"),
    Column("reported", "string", "", "what the servers reported of it: a JSON object of numbers"),
)
"""Columns of requests that only a run with `target=live` has."""


SAMPLES = (
    Column(
        "kind", "string", "", "link, pool (a memory), pages (KV pages of an instance) or ring (staging, of a rank)"
    ),
    Column("name", "string", "", "which of them"),
    Column("time", "float64", "s", "since the start of the job; `start` in summary.json is that of the workload"),
    Column("value", "float64", "", "share in use, 0 to 1; of a link the mean since the sample before"),
)
"""Columns of ``samples.parquet``, which only a modelled run with ``samples`` has."""


@cache
def _schema(columns: tuple[Column, ...]) -> pa.Schema:
    """Return the Arrow schema of *columns*, with units and definitions as metadata of the fields, and `VERSION`."""
    import pyarrow as pa

    fields = [
        pa.field(c.name, pa.type_for_alias(c.type), metadata={"unit": c.unit, "definition": c.definition})
        for c in columns
    ]
    return pa.schema(fields, metadata={"pdsim.schema": str(VERSION)})


def transfers_table(records: Sequence[TransferRecord]) -> pa.Table:
    """Return *records* as an Arrow table of the columns `TRANSFERS`, in the order given.

    It is made from the columns of `pdsim.transfer.transfer_log` where records are kept in logs, without an object
    for each.
    """
    import pyarrow as pa

    return pa.concat_tables(transfers_tables(records)).combine_chunks()


def transfers_tables(records: Sequence[TransferRecord], rows: int = ROW_GROUP) -> Iterator[pa.Table]:
    """Yield `transfers_table` in tables of about so many *rows*, at least one.

    So a file of millions of transfers is written while no more than a part of it is in memory. The rows and their
    order are those of one table.
    """
    found: list[Mapping[str, ArrayColumn]] = []
    size = 0
    for log in logs(records):
        for columns in log.columns(rows):
            found.append(columns)
            size += len(columns["submitted"])
            if size >= rows:
                yield _transfers(_one_after_the_other(found))
                found, size = [], 0
    if found or not records:
        yield _transfers(_one_after_the_other(found)) if found else _schema(TRANSFERS).empty_table()


def _one_after_the_other(parts: Sequence[Mapping[str, ArrayColumn]]) -> Mapping[str, ArrayColumn]:
    """Return the columns of *parts*, which have the same ones, joined: a job has many logs, most of them short."""
    return (
        parts[0]
        if len(parts) == 1
        else {name: ArrayColumn.joined([part[name] for part in parts]) for name in parts[0]}
    )


def _transfers(columns: Mapping[str, ArrayColumn]) -> pa.Table:
    """Return *columns* of a log with those that are computed from them, in microseconds and GB/s.

    Divisions by 0 give infinities and NaN, as IEEE says: a transfer without descriptors has no block size. The rate
    is null where a transfer failed or took no time.
    """
    import numpy as np
    import pyarrow as pa

    numbers = {name: column.values for name, column in columns.items() if column.words is None}
    words = columns["status"].words or ()
    ok = np.array([word == "ok" for word in words])[columns["status"].values]
    nbytes, batch = (numbers[name].astype(np.float64) for name in ("nbytes", "descriptors"))
    submitted, prepared, posted, completed, seen = (
        numbers[name] for name in ("submitted", "prepared", "posted", "completed", "seen")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers |= {
            "batch_size": numbers["descriptors"],
            "block_size": nbytes / batch,
            "prep_us": (prepared - submitted) * 1e6,
            "post_us": (posted - prepared) * 1e6,
            "tx_us": (seen - posted) * 1e6,
            "poll_us": (seen - completed) * 1e6,
            "latency_us": (seen - submitted) * 1e6,
        }
        rate = np.where(ok & (seen > submitted), nbytes / (seen - submitted) / 1e9, np.nan)
    schema = _schema(TRANSFERS)
    found: Mapping[str, ArrayColumn | npt.NDArray[Any]] = {**columns, **numbers, "bw_gbs": ArrayColumn(rate)}
    arrays = [array(found[f.name], f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def samples_table(samples: Sequence[SampleRow]) -> pa.Table:
    """Return *samples* as an Arrow table of the columns `SAMPLES`, in the order given.

    Without any it has no rows.
    """
    import pyarrow as pa

    columns = list(zip(*samples, strict=True)) or [()] * len(SAMPLES)
    schema = _schema(SAMPLES)
    return pa.table([array(values, f.type) for f, values in zip(schema, columns, strict=True)], schema=schema)


def requests_table(requests: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Return *requests* as an Arrow table of the columns `REQUESTS`; a column that is left out is null.

    Columns of `INSTANTS`, `OPTIONAL` and `LIVE` follow if they are given. Values are lists of equal length, one item
    a request, None where it has none.

    Raise a `ValueError` if a column is unknown, longer than another, or holds what its type cannot.
    """
    import pyarrow as pa

    unknown = sorted(set(requests) - {column.name for column in (*REQUESTS, *INSTANTS, *OPTIONAL, *LIVE)})
    if unknown:
        raise ValueError(
            f"requests has columns {', '.join(unknown)} without type, unit and definition: "
            "add them to pdsim.results.schema.REQUESTS"
        )
    lengths = {name: len(values) for name, values in requests.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"requests has columns of different lengths: {lengths}")
    rows = next(iter(lengths.values()), 0)
    given = [column for column in (*INSTANTS, *OPTIONAL, *LIVE) if column.name in requests]
    schema = _schema((*REQUESTS, *given))
    arrays = []
    for field in schema:
        try:
            arrays.append(array(requests.get(field.name, [None] * rows), field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"requests column {field.name} does not hold {field.type}: {error}") from None
    return pa.table(arrays, schema=schema)
