"""From what became of each request to columns, metrics, tables and notes of the experiment `serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.job import Outcome
from pdsim.results.record import Metric, Table
from pdsim.results.statistics import distribution, mean, percentile
from pdsim.serving.deployment import Deployment
from pdsim.serving.settings import Slo
from pdsim.serving.workload import Request
from pdsim.units import format_time

__all__ = [
    "PHASES",
    "columns",
    "instances",
    "left",
    "makespan",
    "metrics",
    "notes",
    "spread",
    "tables",
    "totals",
    "values",
]

Columns = Mapping[str, Sequence[Any]]
Floats = npt.NDArray[np.float64]

PHASES = {
    "queueing": "waiting for decode pages, for the prefill engine, and for a place in the decode batch",
    "compute": "from the start of its first prefill forward to the end of its last, and in the decode batch",
    "handshake": "from decode pages reserved to the prefill engine having their numbers",
    "transfer": "from the end of its last prefill forward to all KV and metadata on all decode ranks",
    "polling": "from there until the decode scheduler looks, between two steps",
}

LATENCIES = {
    "ttft": "from arrival to the decode engine having the first token, which it then streams",
    "tpot": "from the first token to the last, over output tokens - 1; requests of one token have none",
    "e2e": "from arrival to the last token",
    "transfer": PHASES["transfer"],
}


def columns(requests: Sequence[Request], value: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return one row a request, in columns, from the router's *value*; times of a failed request are None."""
    start = value["start"]
    names = ("id", "arrival", "input", "output", "patience", "prefill", "decode", "nbytes", "status")
    found: dict[str, list[Any]] = {name: [] for name in (*names, *LATENCIES_AND_PHASES)}
    for number, (request, row) in enumerate(zip(requests, value["rows"], strict=True)):
        prefill, decode, nbytes, status, *times = row
        found["id"].append(number)
        for name, item in zip(names[1:], (*request[:4], prefill, decode, nbytes, status), strict=True):
            found[name].append(item)
        durations = _durations(start + request.arrival, request.output, times) if times[0] is not None else {}
        for name in LATENCIES_AND_PHASES:
            found[name].append(durations.get(name))
    return found


def left(status: str, patience: float | None) -> bool:
    """Return whether a request of this *status* ended because its user left, as the workload says."""
    return patience is not None and status.startswith("Aborted: the user left")


LATENCIES_AND_PHASES = ("ttft", "tpot", "e2e", *PHASES)


def _durations(arrival: float, output: int, times: Sequence[float]) -> dict[str, float | None]:
    reserved, noticed, started, prefilled, arrived, polled, joined, finished = times[:8]
    first, asked = (times[8], times[9]) if len(times) > 8 else (polled, None)
    durations = {
        "ttft": first - arrival,
        "tpot": (finished - first) / (output - 1) if output > 1 else None,
        "e2e": finished - arrival,
        "compute": (prefilled - started) + (finished - joined),
        "polling": polled - arrived,
    }
    if asked is not None:  # decode heard of it after prefill had answered
        return durations | {
            "queueing": (started - arrival) + (reserved - asked) + (joined - polled),
            "handshake": asked - prefilled,
            "transfer": arrived - reserved,
        }
    return durations | {
        "queueing": (reserved - arrival) + (started - noticed) + (joined - polled),
        "handshake": noticed - reserved,
        "transfer": arrived - prefilled,
    }


def values(table: Columns, name: str) -> Floats:
    """Return the column *name* of the requests that have a value in it."""
    return np.array([value for value in table[name] if value is not None], dtype=np.float64)


def makespan(table: Columns) -> float:
    """Return the seconds from the start to the last token."""
    ends = [arrival + e2e for arrival, e2e in zip(table["arrival"], table["e2e"], strict=True) if e2e is not None]
    return max(ends, default=0.0)


def _good(table: Columns, slo: Slo) -> int:
    rows = zip(table["ttft"], table["tpot"], strict=True)
    return sum(ttft is not None and ttft <= slo.ttft and (tpot or 0.0) <= slo.tpot for ttft, tpot in rows)


def metrics(table: Columns, slo: Slo, outcome: Outcome) -> list[Metric]:
    """Return the summary."""
    found = [*totals(table, slo), Metric("kv_bytes", sum(table["nbytes"]), "bytes of KV and metadata transferred")]
    for name, definition in LATENCIES.items():
        found += distribution(name, "s", values(table, name), definition, (50.0, 90.0, 99.0), tabled=True)
    e2e = float(values(table, "e2e").sum())
    for name, definition in PHASES.items():
        share = float(values(table, name).sum()) / e2e if e2e else None
        rule = f"share of the end-to-end time of all requests: {definition}"
        found.append(Metric(f"share_{name}", share, rule, tabled=True))
    if outcome.links:
        name, busiest = max(outcome.links.items(), key=lambda item: item[1])
        found.append(Metric("link_utilisation_max", busiest, f"bytes carried / capacity of the busiest link, {name}"))
    if outcome.pools:
        found.append(Metric("pool_peak_max", max(outcome.pools.values()), "highest use of a memory pool / its limit"))
    return found


def totals(table: Columns, slo: Slo) -> list[Metric]:
    """Return how many requests of *table* ended how, at which rate, and how many of them met *slo*."""
    total, seconds = len(table["id"]), makespan(table)
    done = [index for index, status in enumerate(table["status"]) if status == "ok"]
    gone = sum(map(left, table["status"], table["patience"]))
    good = _good(table, slo)

    def rate(amount: float) -> float | None:
        return amount / seconds if seconds else None

    return [
        Metric("requests", total, "requests of the workload"),
        Metric("requests_ok", len(done), "requests that got all their tokens"),
        Metric("requests_aborted", gone, "requests whose users left before that (workload.aborts)"),
        Metric("requests_failed", total - len(done) - gone, "requests that failed"),
        Metric("makespan_s", seconds, "from the start of the workload to the last token"),
        Metric("request_rate", rate(len(done)), "requests_ok / makespan, 1/s"),
        Metric(
            "input_tokens_per_s", rate(sum(table["input"][i] for i in done)), "input tokens of requests_ok / makespan"
        ),
        Metric(
            "output_tokens_per_s",
            rate(sum(table["output"][i] for i in done)),
            "output tokens of requests_ok / makespan",
        ),
        Metric(
            "goodput", rate(good), f"requests with TTFT <= {slo.ttft:g} s and TPOT <= {slo.tpot:g} s / makespan, 1/s"
        ),
        Metric("slo_attainment", good / total, "share of all requests that meet both limits of goodput"),
    ]


def tables(table: Columns, outcome: Outcome) -> list[Table]:
    """Return latencies, phases, instances and, of a model, links and pools."""
    heads = {"mean": "arithmetic mean", "p50": "median", "p90": "needs 10 requests", "p99": "needs 100"}
    latency = {"latency s": ""} | heads | {"from, to": ""}
    latencies = [[name, *spread(values(table, name)), definition] for name, definition in LATENCIES.items()]
    part = {"part s": ""} | heads | {"share": "of the end-to-end time of all requests", "what": ""}
    e2e = float(values(table, "e2e").sum())
    phases: list[list[Any]] = []
    for name, definition in PHASES.items():
        these = values(table, name)
        phases.append([name, *spread(these), float(these.sum()) / e2e if e2e else None, definition])
    found = [
        Table("Latency", latency, latencies),
        Table("Where the time went", part, phases),
        Table(
            "Instances",
            {"instance": "engine", "requests": "requests sent to it", "tokens": "input at prefill, output at decode"},
            instances(table),
        ),
    ]
    for title, what, utilisation in (
        ("Busiest links", "bytes carried / (capacity x time)", outcome.links),
        ("KV pages", "peak use / size", _pages(outcome)),
        ("Memory", "peak use / size", outcome.pools),
    ):
        if utilisation:
            most = sorted(utilisation.items(), key=lambda item: (-item[1], item[0]))[:8]
            found.append(Table(title, {"name": "where", "utilisation": what}, [list(item) for item in most]))
    return found


def _leaders(outcome: Outcome) -> dict[str, dict[str, int]]:
    """Return what the leader of each instance reported, of those that lived to the end."""
    leaders = {name.removesuffix(".0"): rank.value for name, rank in outcome.ranks.items() if name.endswith(".0")}
    return {name: value for name, value in leaders.items() if value}


def _pages(outcome: Outcome) -> dict[str, float]:
    return {name: value["peak_pages"] / value["pages"] for name, value in _leaders(outcome).items()}


def spread(values: Floats) -> list[float | None]:
    """Return mean, median, p90 and p99 of *values*, None where there are too few."""
    return [mean(values), *(percentile(values, q) for q in (50.0, 90.0, 99.0))]


def instances(table: Columns) -> list[list[Any]]:
    """Return name, requests and tokens of each instance, input of prefill and output of decode."""
    found: dict[str, list[Any]] = {}
    for side, tokens in (("prefill", "input"), ("decode", "output")):
        for instance, amount in zip(table[side], table[tokens], strict=True):
            if instance:
                row = found.setdefault(instance, [instance, 0, 0])
                row[1] += 1
                row[2] += amount
    return [found[name] for name in sorted(found)]


def notes(table: Columns, job: Deployment, outcome: Outcome) -> list[str]:
    """Return what a reader must know: an overload, and memory that was never proven to be at rest."""
    found = []
    span, seconds = max(table["arrival"], default=0.0), makespan(table)
    waits, works = values(table, "queueing"), values(table, "compute")
    if span and seconds > 1.5 * span and waits.sum() > works.sum():
        given = float(sum(table["input"]))
        found.append(
            f"overloaded: requests arrived in {format_time(span)} ({given / span:.0f} input tokens/s) and took "
            f"{format_time(seconds)} to serve ({given / seconds:.0f} input tokens/s), so latencies measure the queue; "
            "lower workload.speed or workload.rate, or add instances"
        )
    quarantined = sum(value["quarantined_pages"] for value in _leaders(outcome).values())
    if quarantined:
        found.append(
            f"{quarantined} pages stayed in quarantine: writes to them failed and nothing proved that they had ended"
        )
    sizes = job.shape.token_bytes(job.decode.tp)
    found.append(f"KV: {sizes} bytes per token and decode rank, pages of {job.page_size} tokens")
    return found
