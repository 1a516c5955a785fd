# SPDX-License-Identifier: Apache-2.0
"""The experiment `serve` on a live deployment: from the client's rows to columns, metrics, tables and notes.

All latencies count from the arrival that the workload asked for, so that a client which is late is seen in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from experiments.serve import tables as report
from pdsim.config import Config
from pdsim.core.progress import ShowProgress
from pdsim.core.units import format_time
from pdsim.results.record import Metric, Result, Table, distribution, percentile
from pdsim.serving.workload import Request
from pdsim.transfer.job import Outcome, RankResult
from pdsim.transfer.log import rows as rows_of

if TYPE_CHECKING:
    from backends.live.live_deployment import LiveDeployment, Served
    from backends.live.routes import RequestRow

LATENCIES = {
    "ttft": "from arrival to the client having the first token",
    "tpot": "from the first token to the last, over output tokens - 1; requests of one token have none",
    "itl": "from one streamed chunk with tokens to the next, at the client, over all requests",
    "e2e": "from arrival to the client having the last token",
    "prefilled": "from arrival to the prefill server's answer, as a proxy sees it",
    "handoff": "from the prefill server's answer to the first token from decode",
}

REPORTED = {
    "queueing": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "decode": ("vllm:request_decode_time_seconds",),
    "transfer": ("vllm:nixl_xfer_time_seconds", "sglang:kv_transfer_latency_ms"),
    "transfer_post": ("vllm:nixl_post_time_seconds",),
    "bootstrap": ("sglang:kv_transfer_bootstrap_ms",),
    "reserve": ("sglang:kv_transfer_alloc_ms",),
}
"""What servers report under which name, in its unit; a metric of the summary for each that a server has."""

LATE = 0.01
"""Seconds that the client may be late at the 99th percentile before a note says so."""


def run(
    config: Config, deployment: LiveDeployment, requests: Sequence[Request], policy: str, progress: ShowProgress
) -> Result:
    """Send *requests* to *deployment* and return the outcome of each, as `experiments.serve.run` does."""
    return result(config, requests, deployment.serve(requests, progress, policy=policy))


def partial(config: Config, requests: Sequence[Request], journal: Iterable[bytes]) -> Result | None:
    """Return the partial result of *requests* from the *journal* of a killed run; None if it is empty."""
    served = next(journalled([requests], journal), None)
    return None if served is None else result(config, requests, served)


def journalled(calls: Iterable[Sequence[Request]], journal: Iterable[bytes]) -> Iterator[Served]:
    """Yield the results in the *journal* of a run of each of *calls*, the requests of one `serve`.

    Requests of a call have a start of their own in the journal, and come after those of the call before.
    """
    from backends.live.live_deployment import Ended, Served
    from backends.live.routes import RequestRow

    ended = map(msgspec.msgpack.Decoder(Ended).decode, journal)
    for requests, (start, own) in zip(calls, groupby(ended, lambda each: each.start), strict=False):
        rows = [RequestRow() for _ in requests]
        for each in own:
            rows[each.number] = each.row
        yield Served(start, rows, {}, {})


def result(config: Config, requests: Sequence[Request], served: Served) -> Result:
    """Return the result of *requests*, a row each in the same order, from *served*.

    A request whose row has no status has not ended, and is left out.
    """
    columns = _columns(requests, served)
    columns = rows_of(columns, report.with_status(columns, bool))
    ends = [row.last for row in served.rows if row.last is not None]
    outcome = Outcome(
        {name: RankResult(name, engine=engine) for name, engine in served.servers.items()},
        max(ends, default=served.start) - served.start,
    )
    gaps = np.array([gap for row in served.rows if row.status == "ok" for gap in row.gaps], dtype=np.float64)
    spread = {name: gaps if name == "itl" else report.values(columns, name) for name in LATENCIES}
    summary = report.totals(columns, config.slo)
    for name, definition in LATENCIES.items():
        summary += distribution(name, "s", spread[name], definition, (50.0, 90.0, 99.0), tabled=True)
    return Result(
        summary=summary + _reported_metrics(served),
        tables=_tables(columns, spread, served),
        requests=columns,
        failures=report.failed(columns),
        notes=[*served.notes, *_notes(columns)],
        outcome=outcome,
    )


def _columns(requests: Sequence[Request], served: Served) -> dict[str, Sequence[Any]]:
    # Times of a failed request are None but what was seen before it failed.
    rows: list[dict[str, Any]] = [
        {"id": number, "arrival": request.arrival, "input": request.input, "output": request.output}
        | {"patience": request.patience, "prefill": row.prefill, "decode": row.decode, "status": row.status}
        | {"sent": None if row.sent is None else row.sent - served.start, "tokens": row.tokens, "finish": row.finish}
        | {"reported": json.dumps(row.reported, sort_keys=True) if row.reported else None}
        | _durations(served.start + request.arrival, row)
        for number, (request, row) in enumerate(zip(requests, served.rows, strict=True))
    ]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _durations(arrival: float, row: RequestRow) -> dict[str, float | None]:
    # *arrival* is when the workload asked for it, on the client's clock.  TPOT is the mean over all
    # tokens but the first, *itl_...* are percentiles of single gaps, and *queueing* is what the
    # server itself reports of its queues.
    durations: dict[str, float | None] = dict.fromkeys(
        ("ttft", "tpot", "e2e", "queueing", "prefilled", "handoff", "itl_p50", "itl_p99", "itl_max")
    )
    if row.prefilled is not None:
        durations["prefilled"] = row.prefilled - arrival
    if row.status != "ok" or row.first is None or row.last is None:
        return durations
    durations |= {"ttft": row.first - arrival, "e2e": row.last - arrival}
    if row.tokens > 1:
        durations["tpot"] = (row.last - row.first) / (row.tokens - 1)
    if row.prefilled is not None:
        durations["handoff"] = row.first - row.prefilled
    if row.gaps:
        gaps = np.array(row.gaps)
        durations |= {"itl_p50": percentile(gaps, 50.0), "itl_p99": percentile(gaps, 99.0), "itl_max": max(row.gaps)}
    waits = [row.reported.get(name) for name in ("queue_time", "prefill_queue_time")]
    if any(wait is not None for wait in waits):
        durations["queueing"] = sum(wait or 0.0 for wait in waits)
    return durations


def _reported_metrics(served: Served) -> list[Metric]:
    metrics = []
    for server, page in served.reported.items():
        for what, names in REPORTED.items():
            for name in names:
                histogram = page.histograms.get(name)
                if histogram is not None and histogram.count > 0:
                    rule = f"{name} of {server}, {histogram.count:.0f} observations"
                    scale = 1e-3 if name.endswith("_ms") else 1.0
                    for kind, value in (("mean", histogram.mean), ("p50", histogram.quantile(0.5))):
                        meaning = f"{'arithmetic mean' if kind == 'mean' else 'median'} of {rule}"
                        seconds = None if value is None else scale * value
                        metrics.append(Metric(f"{server}_{what}_{kind}_s", seconds, meaning, tabled=True))
    return metrics


def _tables(columns: Mapping[str, Sequence[Any]], spread: Mapping[str, Any], served: Served) -> list[Table]:
    rows = [[name, *report.spread(spread[name]), text] for name, text in LATENCIES.items() if len(spread[name])]
    heads = {"instance": "server", "requests": "sent there", "tokens": "its input, or output"}
    tables = [
        Table("Latency", {"latency s": "", **report.SPREAD, "from, to": ""}, rows),
        Table("Instances", heads, report.instances(columns)),
    ]
    reported = [
        [server, name, round(one.count), one.mean, *(one.quantile(share) for share in (0.5, 0.9, 0.99))]
        for server, page in served.reported.items()
        for name, one in sorted(page.histograms.items())
        if ":" in name and one.count > 0
    ]
    if reported:
        heads = {"count": "observations", "mean": "", "p50": "as fine as the server's buckets", "p90": "", "p99": ""}
        tables.append(Table("What the servers report", {"server": "", "metric": "", **heads}, reported))
    return tables


def _notes(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    pairs = zip(columns["sent"], columns["arrival"], strict=True)
    late = sorted(sent - arrival for sent, arrival in pairs if sent is not None)
    worst = late[int(0.99 * (len(late) - 1))] if late else 0.0
    if worst < LATE:
        return []
    return [
        f"requests were sent up to {format_time(worst)} after their arrival (99th percentile): the client had no "
        "connection free (live.connections), or no time; latencies count from the arrival"
    ]
