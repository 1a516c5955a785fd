# SPDX-License-Identifier: Apache-2.0
"""From what became of each request to columns, metrics, tables and notes of the experiment `serve`.

A column has one value a request, None or NaN where a request did not live to see it.  `experiments.serve.live_run`
uses the same functions, so that simulated and real runs have the same names.  `moved` says which way the KV of each
request went, from the labels of its transfers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.core.units import format_time
from pdsim.kv.messages import ROUTER
from pdsim.kv.plan import PATHS
from pdsim.kv.tiers import TIERS
from pdsim.results.record import Metric, Table, distribution, intervals, mean, percentile, trend
from pdsim.serving.block_manager import hit_share
from pdsim.serving.deployment import Deployment
from pdsim.serving.failures import Failure, recoveries
from pdsim.serving.fleet import running_seconds
from pdsim.serving.load import OfferedLoad
from pdsim.serving.requests import HASHED, Request
from pdsim.serving.settings import Slo, Tenant, Workload
from pdsim.sim.endpoint import DETECTION
from pdsim.transfer.job import Outcome
from pdsim.transfer.log import ArrayColumn, joined, logs, rows

Columns = Mapping[str, Sequence[Any]]
Floats = npt.NDArray[np.float64]

PHASES = {
    "queueing": "waiting for decode pages, for the prefill engine, and for a place in the decode batch",
    "compute": "from the start of its first prefill forward to the end of its last, and in the decode batch",
    "handshake": "from decode pages reserved to the prefill engine having their numbers",
    "transfer": "from the end of its last prefill forward to all KV and metadata on all decode ranks",
    "polling": "from there until the decode scheduler looks, between two steps",
}

PERCENTILES = (50.0, 90.0, 99.0)

LATENCIES = {
    "ttft": "from arrival to the decode engine having the first token, which it then streams",
    "tpot": "from the first token to the last, over output tokens - 1; requests of one token have none",
    "e2e": "from arrival to the last token",
    "transfer": PHASES["transfer"],
}


def _shed(status: str) -> bool:
    # It is no failure, and it counts against the SLO: it got nothing.
    return status.startswith("Shed: ")


def _numbers(values: Sequence[Any]) -> npt.NDArray[Any]:
    return values.values if isinstance(values, ArrayColumn) else ArrayColumn.of(values).values


def values(table: Columns, name: str) -> Floats:
    """Return the column *name* of the requests that have a value in it, as floats; empty if none has."""
    column = table[name]
    return column.known() if isinstance(column, ArrayColumn) else ArrayColumn.of(column).known()


def within(table: Columns, slo: Slo) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return for each request whether its TTFT and its TPOT meet its tenant's SLO, or *slo* without tenants."""
    ttft, tpot = _numbers(table["ttft"]), _numbers(table["tpot"])
    most = [_numbers(table[f"slo_{name}"]) if "tenant" in table else getattr(slo, name) for name in ("ttft", "tpot")]
    return ttft <= most[0], (np.nan_to_num(tpot) <= most[1]) & ~np.isnan(ttft)


def _good(table: Columns, slo: Slo) -> int:
    return int(np.logical_and(*within(table, slo)).sum())


def tenants(which: npt.NDArray[np.int64], known: Sequence[Tenant]) -> dict[str, ArrayColumn]:
    """Return the columns of who sent each request, the *which*-th of the *known*, and of its SLO."""
    limits = {f"slo_{name}": np.array([getattr(each, name) for each in known])[which] for name in ("ttft", "tpot")}
    names = ArrayColumn(which.astype(np.int32), tuple(each.name for each in known))
    return {"tenant": names, **{name: ArrayColumn(values) for name, values in limits.items()}}


def of_tenants(table: Columns, workload: Workload, slo: Slo) -> tuple[list[Table], list[str]]:
    """Return a table and a line of what share of each tenant's requests meets its SLO; nothing without tenants."""
    if "tenant" not in table:
        return [], []
    steady = _steady(table, workload)
    lines = []
    for tenant in workload.tenants:
        own = rows(steady, with_status(steady, tenant.name.__eq__, "tenant"))
        share = _good(own, slo) / len(own["id"]) if len(own["id"]) else None
        spread = [percentile(values(own, name), q) for name in ("ttft", "tpot") for q in (50.0, 99.0)]
        lines.append([tenant.name, len(own["id"]), share, tenant.ttft, *spread[:2], tenant.tpot, *spread[2:]])
    heads = {
        "tenant": "who sent them",
        "requests": "without warm-up and cool-down",
        "slo_attainment": "share that meets both limits",
        "ttft": "limit, s",
        "ttft p50": "s",
        "ttft p99": "s",
        "tpot": "limit, s",
        "tpot p50": "s",
        "tpot p99": "s",
    }
    said = ", ".join(f"{name} {share:.1%}" for name, _, share, *_ in lines if share is not None)
    return [Table("Tenants", heads, lines)], [f"tenants within their SLO: {said}"]


def with_status(table: Columns, holds: Callable[[str], bool], column: str = "status") -> npt.NDArray[np.bool_]:
    """Return for each request whether *holds* is true of its status, or of another *column* of words."""
    status = table[column]
    if isinstance(status, ArrayColumn) and status.words is not None:
        true = np.array([holds(word or "") for word in status.words], dtype=np.bool_)
        return np.asarray(true[status.values], dtype=np.bool_)
    return np.array([holds(word) for word in status], dtype=np.bool_)


def _gone(table: Columns) -> npt.NDArray[np.bool_]:
    # Requests whose users left, as the workload says.
    patient: npt.NDArray[np.bool_] = np.isnan(_numbers(table["patience"]))
    return with_status(table, lambda word: word.startswith("Aborted: the user left")) & ~patient


def failed(table: Columns) -> list[str]:
    """Return a line for each request that failed: users who leave and requests that were refused have not."""
    bad = with_status(table, lambda word: word != "ok" and not _shed(word)) & ~_gone(table)
    return [f"request {number}: {table['status'][number]}" for number in np.flatnonzero(bad).tolist()]


def _steady(table: Columns, workload: Workload) -> Columns:
    # The rows of requests that arrive neither in the warm-up nor in the cool-down.
    arrivals = _numbers(table["arrival"])
    if not (workload.warmup or workload.cooldown) or not len(arrivals):
        return table
    return rows(table, (arrivals >= workload.warmup) & (arrivals <= arrivals.max() - workload.cooldown))


def load_metrics(offered: OfferedLoad | None) -> list[Metric]:
    """Return the offered load of both sides, None where all requests arrive at once and there is no rate."""
    rule = "work offered a second / what its instances can do in a second, in closed form"
    sides = (None, None) if offered is None else (offered.prefill, offered.decode)
    return [
        Metric(f"offered_load_{side}", value, f"{side}: {rule}")
        for side, value in zip(("prefill", "decode"), sides, strict=True)
    ]


def prefix_metrics(requests: Sequence[Request], job: Deployment) -> list[Metric]:
    """Return the hit rates of one prefix cache over all instances, by the hashes of the trace."""
    unlimited = hit_share(requests)
    if unlimited is None:
        return []
    blocks = max(1, job.prefill_pages * job.page_size * len(job.prefills) // HASHED)
    same = "" if job.cache.prefill else ", prefill computes them all the same"
    rule = f"share of prompt tokens that one prefix cache holds on arrival{same}: {{}}"
    return [
        Metric("prefix_hit_unlimited", unlimited, rule.format("unlimited")),
        Metric("prefix_hit_pools", hit_share(requests, blocks), rule.format(f"{blocks} blocks, all prefill pools")),
    ]


def cached(outcome: Outcome, count: int) -> dict[str, list[Any]]:
    """Return the columns of cached tokens of *count* requests, and of loads from tiers; none without a prefix cache.

    A request that was started anew has those of its last try, None if the instance is gone or never had it.
    """
    hits: dict[str, list[Any]] = {}
    for name, value in (_leaders(outcome) | {ROUTER: outcome.ranks[ROUTER].value or {}}).items():
        if "hits" in value:
            side = f"cached_{'decode' if name.startswith('decode') else 'prefill'}"
            column, rooms = hits.setdefault(side, [None] * count), value["hits"]
            for room in sorted(rooms):
                column[(room - 1) % count] = rooms[room]
            columns = {f"cached_{tier}": rooms for tier, rooms in value.get("tier_hits", {}).items()}
            for name in ("load", "prefetch"):
                columns[name] = value.get(f"{name}_seconds", {})
            for name, rooms in columns.items():
                if rooms:
                    column = hits.setdefault(name, [0] * count)
                    for room in sorted(rooms):
                        column[(room - 1) % count] = rooms[room]
    return hits


def cache_metrics(table: Columns, job: Deployment) -> list[Metric]:
    """Return the share of prompt tokens that each prefix cache had, and what came from tiers below GPU memory."""
    rules = {
        "prefill": "share of prompt tokens that prefill had cached, and did not compute",
        "decode": "share of prompt tokens that decode had cached, and was not sent",
        **{tier: f"share of prompt tokens that came from tier {tier!r}" for tier in TIERS},
    }
    token = job.shape.token_bytes(job.prefill.tp) * job.prefill.tp
    metrics = []
    for side in (side for side in rules if table.get(f"cached_{side}")):
        rows = zip(table[f"cached_{side}"], table["input"], strict=True)
        known = [(hit, tokens) for hit, tokens in rows if hit is not None]
        hits, total = sum(hit for hit, _ in known), sum(tokens for _, tokens in known)
        metrics.append(Metric(f"prefix_hit_{side}", hits / total if total else None, rules[side]))
        if side in TIERS:
            metrics.append(Metric(f"tier_bytes_{side}", hits * token, f"bytes of KV read from tier {side!r}"))
    return metrics


def metrics(table: Columns, workload: Workload, slo: Slo, outcome: Outcome) -> list[Metric]:
    """Return the summary; latencies and the share that meets the SLO without warm-up and cool-down."""
    steady = _steady(table, workload)
    summary = [
        *totals(table, slo, steady),
        Metric("kv_bytes", _total(table["nbytes"]), "bytes of KV and metadata transferred"),
    ]
    for name, definition in LATENCIES.items():
        these = values(steady, name)
        summary += distribution(name, "s", these, definition, PERCENTILES, tabled=True)
        summary += intervals(name, "s", these, PERCENTILES)
    growth = trend(values(steady, "ttft"))
    rule = "1 unless TTFT grows with the number of the request: Mann-Kendall, ten batches, 1 %; needs 100 requests"
    summary.append(Metric("stationary", None if growth is None else int(growth == 0), rule))
    for name, definition in PHASES.items():
        rule = f"share of the end-to-end time of all requests: {definition}"
        summary.append(Metric(f"share_{name}", _share(table, name), rule, tabled=True))
    if outcome.links:
        name, busiest = max(outcome.links.items(), key=lambda item: item[1])
        rule = f"bytes carried / capacity of the busiest link, {name}"
        summary.append(Metric("link_utilisation_max", busiest, rule))
    if outcome.pools:
        rule = "highest use of a memory pool / its limit"
        summary.append(Metric("pool_peak_max", max(outcome.pools.values()), rule))
    return summary


def of_failures(
    lost: Sequence[Failure],
    changes: Sequence[tuple[float, str, str]],
    table: Columns,
    sent_again: Sequence[int],
    detours: int,
) -> tuple[list[Metric], list[Table], list[str]]:
    """Return metrics, a table and a line about the failures *lost*; nothing without any.

    *changes* are those of the router's membership, from the start of the workload; *sent_again* is how often it sent
    a request again, and how often users did; *detours* is how many other cards of its node can replace one.
    """
    if not lost:
        return [], [], []
    fallen = recoveries(lost, changes, DETECTION, detours)
    noticed, back = (mean([at for at in column if at is not None]) for column in zip(*fallen, strict=True))
    by_router, by_users = sent_again
    metrics = [
        Metric("failures", len(lost), "failures of nodes, GPUs, NICs and the router (failures)"),
        Metric(
            "failure_notice_s", noticed, "mean time from a failure until the router knows, or of a NIC the engine"
        ),
        Metric("failure_recovery_s", back, "mean time until all that it ended serves again, or transfers succeed"),
        Metric("sent_again", by_router, "times that the router sent a request again (experiment.retries)"),
        Metric("asked_again", by_users, "times that a user sent a request again (experiment.client_retries)"),
    ]
    columns = {
        "failed": "what",
        "at s": "from the start of the job",
        "instances": "that it ended",
        "noticed s": "from then until the router, or of a NIC the engine, knows",
        "recovered s": "from then until all instances serve again, or transfers succeed, if they do before the end",
    }
    rows = [[one.what, one.at, ", ".join(one.instances), *two] for one, two in zip(lost, fallen, strict=True)]
    gone = int((with_status(table, lambda word: word != "ok" and not _shed(word)) & ~_gone(table)).sum())
    times = ["never" if each is None else format_time(float(f"{each:.3g}")) for each in (noticed, back)]
    note = (
        f"failures: {len(lost)} ({', '.join(one.what for one in lost[:3])}{', ...' if lost[3:] else ''}), noticed "
        f"after {times[0]} and recovered after {times[1]} on average; {gone} requests lost, {by_router} sent again "
        f"by the router, {by_users} by users"
    )
    return metrics, [Table("Failures", columns, rows)], [note]


def of_autoscale(
    job: Deployment, changes: Sequence[tuple[float, str, str]], table: Columns
) -> tuple[list[Metric], list[Table], list[str]]:
    """Return metrics, a table and a line about the instances that an autoscaler ran; nothing without one.

    *changes* are those of `pdsim.serving.fleet.Fleet`.  GPU-hours end with the last token.
    """
    if job.autoscale.policy == "none":
        return [], [], []
    ends = _numbers(table["arrival"]) + _numbers(table["e2e"])
    seconds = float(np.nanmax(ends)) if len(ends) and not np.isnan(ends).all() else 0.0
    hours = fixed = 0.0
    rows, words = [], []
    for side, names, grid in (("prefill", job.prefills, job.prefill), ("decode", job.decodes, job.decode)):
        ran, fewest, most = running_seconds(changes, names, seconds)
        mean_running = ran / seconds if seconds else 0.0
        hours += ran * grid.size / 3600
        fixed += seconds * len(names) * grid.size / 3600
        kinds = [what for _, name, what in changes if name in names]
        starts, switches = kinds.count("starting"), kinds.count("switching")
        rows.append([side, len(names), fewest, most, mean_running, starts, switches])
        more = f", {switches} switched to it" if switches else ""
        words.append(f"{fewest} to {most} {side} (mean {mean_running:.2f} of {len(names)}, {starts} starts{more})")
    if job.autoscale.gpus:
        fixed = min(fixed, seconds * job.autoscale.gpus / 3600)
    metrics = [
        Metric("gpu_hours", hours, "of instances that start, serve or drain, until the last token"),
        Metric("gpu_hours_fixed", fixed, "of all instances, or of autoscale.gpus, until the last token"),
    ]
    columns = {
        "side": "of the deployment",
        "instances": "that there are",
        "fewest": "that ran at a time",
        "most": "that ran at a time",
        "mean": "that ran, over time",
        "starts": "that the policy asked for, on free GPUs",
        "switches": "on GPUs that the other side had just left",
    }
    share = f" ({100 * (1 - hours / fixed):.0f} % saved)" if fixed else ""
    note = f"autoscale: {hours:.1f} of {fixed:.1f} GPU-hours{share}; {'; '.join(words)}"
    return metrics, [Table("Autoscaling", columns, rows)], [note]


def _share(table: Columns, phase: str) -> float | None:
    e2e = float(values(table, "e2e").sum())
    return float(values(table, phase).sum()) / e2e if e2e else None


def totals(table: Columns, slo: Slo, steady: Columns | None = None) -> list[Metric]:
    """Return counts of *table*'s requests by their end, their rate, and the share of *steady* that met *slo*.

    Rates divide by the makespan of *table*.  *steady* is the part that counts toward the SLO; by default all of it.
    """
    steady = table if steady is None else steady
    ends = _numbers(table["arrival"]) + _numbers(table["e2e"])
    seconds = float(np.nanmax(ends)) if len(ends) and not np.isnan(ends).all() else 0.0
    ok = with_status(table, lambda word: word == "ok")
    total, done, gone = len(ok), int(ok.sum()), int(_gone(table).sum())
    refused = int(with_status(table, _shed).sum())
    share = _good(steady, slo) / len(steady["id"]) if steady["id"] else None
    limits = "requests within their tenant's SLO / makespan, 1/s"
    if "tenant" not in table:
        limits = f"requests with TTFT <= {slo.ttft:g} s and TPOT <= {slo.tpot:g} s / makespan, 1/s"

    def rate(name: str, amount: float, rule: str) -> Metric:
        return Metric(name, amount / seconds if seconds else None, rule)

    summary = [
        Metric("requests", total, "requests of the workload"),
        Metric("requests_ok", done, "requests that got all their tokens"),
        Metric("requests_aborted", gone, "requests whose users left before that (workload.aborts)"),
        Metric("requests_failed", total - done - gone - refused, "requests that failed"),
    ]
    if refused:
        summary.append(Metric("requests_shed", refused, "requests that the router refused (experiment.shed)"))
    return [
        *summary,
        Metric("makespan_s", seconds, "from the start of the workload to the last token"),
        rate("request_rate", done, "requests_ok / makespan, 1/s"),
        rate("input_tokens_per_s", _total(table["input"], ok), "input tokens of requests_ok / makespan"),
        rate("output_tokens_per_s", _total(table["output"], ok), "output tokens of requests_ok / makespan"),
        rate("goodput", _good(table, slo), limits),
        Metric("slo_attainment", share, "share of all requests that meet both limits of goodput"),
    ]


SPREAD = {"mean": "arithmetic mean", "p50": "median", "p90": "needs 10 requests", "p99": "needs 100"}


def tables(table: Columns, workload: Workload, outcome: Outcome, taken: Sequence[Sequence[Any]] = ()) -> list[Table]:
    """Return latencies, phases, instances, of a model the busiest links, pages and pools, and the paths *taken*."""
    steady = _steady(table, workload)
    latencies = [[name, *spread(values(steady, name)), definition] for name, definition in LATENCIES.items()]
    phases = [
        [name, *spread(values(table, name)), _share(table, name), definition] for name, definition in PHASES.items()
    ]
    part = {"part s": "", **SPREAD, "share": "of the end-to-end time of all requests", "what": ""}
    columns = {
        "instance": "engine",
        "requests": "requests sent to it",
        "tokens": "input at prefill, output at decode",
    }
    made = [
        Table("Latency", {"latency s": "", **SPREAD, "from, to": ""}, latencies),
        Table("Where the time went", part, phases),
        Table("Instances", columns, instances(table)),
    ]
    pages = {name: value["peak_pages"] / value["pages"] for name, value in _leaders(outcome).items()}
    for title, what, utilisation in (
        ("Busiest links", "bytes carried / (capacity x time)", outcome.links),
        ("KV pages", "peak use / size", pages),
        ("Memory", "peak use / size", outcome.pools),
    ):
        if utilisation:
            most = nsmallest(8, utilisation.items(), key=lambda item: (-item[1], item[0]))
            made.append(Table(title, {"name": "where", "utilisation": what}, [list(item) for item in most]))
    if taken:
        heads = {"path": "KV path", "writes": "writes posted", "bytes": "bytes written", "descriptors": "posted"}
        made.append(Table("Paths", heads, taken))
    return made


def _leaders(outcome: Outcome) -> dict[str, dict[str, Any]]:
    leaders = {name.removesuffix(".0"): rank.value for name, rank in outcome.ranks.items() if name.endswith(".0")}
    return {name: value for name, value in leaders.items() if value}


def spread(values: Floats) -> list[float | None]:
    """Return mean, median, p90 and p99 of *values*, None where there are too few."""
    return [mean(values), *(percentile(values, q) for q in PERCENTILES)]


def instances(table: Columns) -> list[list[Any]]:
    """Return name, requests and tokens of each instance, input of prefill and output of decode, by name.

    A request that was sent nowhere counts at none.
    """
    columns: dict[str, list[Any]] = {}
    for side, tokens in (("prefill", "input"), ("decode", "output")):
        names, where = np.unique(np.array(list(table[side]), dtype=np.str_), return_inverse=True)
        amounts = np.bincount(where, np.array(list(table[tokens]), dtype=np.int64), len(names))
        counts = np.bincount(where, minlength=len(names))
        for instance, count, amount in zip(names.tolist(), counts.tolist(), amounts.tolist(), strict=True):
            if instance:
                row = columns.setdefault(instance, [instance, 0, 0])
                row[1] += count
                row[2] += int(amount)
    return [columns[name] for name in sorted(columns)]


def _total(values: Sequence[Any], which: npt.NDArray[np.bool_] | None = None) -> int:
    numbers = values.values if isinstance(values, ArrayColumn) else np.array(values, dtype=np.int64)
    return int(numbers[slice(None) if which is None else which].sum())


def first_token(table: Columns, moving: Floats) -> str:
    """Return where the time to the first token goes, as means that sum to that of the requests of *table*.

    *moving* are the seconds from the first write of a request's KV to the last completion, NaN where nothing moved.

    >>> table = dict(arrival=[1.0], started_at=[1.5], prefilled_at=[3.5], arrived_at=[3.75], ttft=[3.0])
    >>> print(first_token(table, np.array([0.5])))
    TTFT: 3 s on average = queue 500 ms + prefill 2 s + handoff 250 ms + decode 250 ms to its first token; a KV \
transfer lasts 500 ms
    """
    stamps = [_numbers(table[name]) for name in ("arrival", "started_at", "prefilled_at", "arrived_at")]
    times = [*stamps, stamps[0] + _numbers(table["ttft"])]
    known = np.all(np.isfinite(times), axis=0)
    if not known.any():
        return ""
    means = [float(np.mean(later[known] - before[known])) for before, later in pairwise(times)]
    parts = [
        f"{name} {format_time(mean)}"
        for name, mean in zip(("queue", "prefill", "handoff", "decode"), means, strict=True)
    ]
    few = "" if known.all() else f" of {known.sum()} requests"
    moved = moving[np.isfinite(moving)]
    own = f"; a KV transfer lasts {format_time(float(moved.mean()))}" if len(moved) else ""
    return f"TTFT: {format_time(sum(means))} on average{few} = {' + '.join(parts)} to its first token{own}"


def notes(table: Columns, workload: Workload, job: Deployment, outcome: Outcome, moving: Floats) -> list[str]:
    """Return the notes that belong to the numbers, a sentence each; the last is the size of KV.

    *table* has some or all of the requests of the workload, *moving* the seconds of each as `moved` has them.
    """
    steady = _steady(table, workload)
    lines = [line for line in (first_token(steady, moving[_numbers(steady["id"])]),) if line]
    if len(steady["id"]) < len(table["id"]):
        lines.append(
            f"latencies and SLO are those of {len(steady['id'])} of {len(table['id'])} requests: "
            f"workload.warmup={workload.warmup:g} s and cooldown={workload.cooldown:g} s leave the others out"
        )
    if growth := trend(values(steady, "ttft")):
        lines.append(
            f"not stationary: TTFT grows by {format_time(growth)} from the first tenth of the requests to the last, "
            "so percentiles depend on the length of the run; lower workload.load, or set workload.warmup"
        )
    if quarantined := sum(value["quarantined_pages"] for value in _leaders(outcome).values()):
        lines.append(
            f"{quarantined} pages stayed in quarantine: writes to them failed and nothing proved that they had ended"
        )
    sizes = job.shape.token_bytes(job.decode.tp)
    return [*lines, f"KV: {sizes} bytes per token and decode rank, pages of {job.page_size} tokens"]


# --- paths of the KV -----------------------------------------------------------------------------------------------


def moved(count: int, outcome: Outcome) -> tuple[ArrayColumn, list[list[Any]], Floats]:
    """Return how the KV of each of *count* requests in *outcome* moved: paths, totals of each path, and seconds.

    A request's paths are joined by ``+``, metadata only if alone; None if nothing was written.  Totals are rows of
    path, writes, bytes and descriptors, failed writes included, over all ranks.  Seconds are from the first write
    posted to the last seen complete, NaN where nothing was written; a request that was sent out anew counts from its
    first try.  Labels are ``room/chunk/path``, without ``/`` those of an all-gather of context-parallel ranks.
    """
    codes = {path: code for code, path in enumerate(PATHS)}
    taken, totals = np.zeros(count, np.uint8), np.zeros((len(PATHS), 3), np.int64)
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    for log in logs(joined(rank.transfers for rank in outcome.ranks.values())):
        for columns in log.columns():
            label = columns["label"]
            words = [word if word and "/" in word else "0//metadata" for word in label.words or ()]
            parts = "/".join(words).split("/")
            rooms = np.array(list(map(int, parts[::3])))[label.values]
            path = np.array(list(map(codes.__getitem__, parts[2::3])))[label.values]
            of = rooms > 0
            request, path = (rooms[of] - 1) % count, path[of]  # one that is sent out anew has another room
            np.bitwise_or.at(taken, request, np.left_shift(1, path).astype(np.uint8))
            np.minimum.at(first, request, columns["submitted"].values[of])
            np.maximum.at(last, request, columns["seen"].values[of])
            amounts = (np.ones_like(path), *(columns[name].values[of] for name in ("nbytes", "descriptors")))
            for code in np.unique(path).tolist():
                totals[code] += [int(amount[path == code].sum()) for amount in amounts]
    names: list[str | None] = []
    for each in range(1 << len(PATHS)):
        own = {path for path, code in codes.items() if each >> code & 1}
        names.append("+".join(path for path in PATHS if path in (own - {"metadata"} or own)) or None)
    rows = [[path, *total] for path, total in zip(PATHS, totals.tolist(), strict=True) if total[0]]
    return ArrayColumn(taken, names), rows, np.where(last >= first, last - first, np.nan)


def path_metrics(rows: Sequence[Sequence[Any]]) -> list[Metric]:
    """Return bytes and descriptors of each path in *rows*, as `moved` has them."""
    metrics = []
    for path, _, nbytes, descriptors in rows:
        metrics += [
            Metric(f"{path}_bytes", nbytes, f"bytes of all {path} writes, failed ones included"),
            Metric(f"{path}_descriptors", descriptors, f"descriptors of all {path} writes"),
        ]
    return metrics


def path_notes(outcome: Outcome) -> list[str]:
    """Return why KV or metadata went another way than the policy says."""
    values = [rank.value for rank in outcome.ranks.values() if isinstance(rank.value, dict)]
    refused = sum(value.get("staging_refused", 0) for value in values)
    lines = []
    if refused:
        lines.append(
            f"{refused} chunks went in slices because the staging ring had no free slot; raise kv.staging_ring or "
            "kv.staging_wait"
        )
    why = next((value["gather_fallback"] for value in values if "gather_fallback" in value), "")
    if why:
        lines.append(f"kv.gather: plain memory instead of symmetric: {why}")
    fallbacks: Counter[str] = Counter()
    for value in values:
        fallbacks.update(value.get("fallbacks", {}))
    return lines + [
        f"metadata over the control channel, {count} times: {text}" for text, count in sorted(fallbacks.items())
    ]
