# SPDX-License-Identifier: Apache-2.0
"""A kept run in the formats of other tools, so that its numbers stand beside measured ones.

``aiperf``: the files of NVIDIA's AIPerf, a record a request and a summary.  ``nixlbench``: its printed table, of
``experiment=transfer``.  ``vllm`` and ``sglang``: what their ``/metrics`` serve, in Prometheus' text format.
`pdsim observe` and `pdsim calibrate --from` read the first two again.
"""

from __future__ import annotations

import csv
import io
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from pdsim.core.errors import ConfigError
from pdsim.results.record import percentile
from pdsim.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

    from pdsim.results.kept import KeptRun

FORMATS = ("aiperf", "nixlbench", "vllm", "sglang")

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))

NAMES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "ttft": "vllm:time_to_first_token_seconds",
        "tpot": "vllm:request_time_per_output_token_seconds",
        "e2e": "vllm:e2e_request_latency_seconds",
        "prefilling": "vllm:request_prefill_time_seconds",
        "decoding": "vllm:request_decode_time_seconds",
        "input": "vllm:request_prompt_tokens",
        "output": "vllm:request_generation_tokens",
    },
    "sglang": {
        "ttft": "sglang:time_to_first_token_seconds",
        "tpot": "sglang:inter_token_latency_seconds",  # the mean of a request stands for its tokens
        "e2e": "sglang:e2e_request_latency_seconds",
        "input": "sglang:prompt_tokens_histogram",
        "output": "sglang:generation_tokens_histogram",
    },
}
"""What an engine calls the columns of ``requests.parquet``; *prefilling* and *decoding* are made of its instants."""


def exported(run: KeptRun, tool: str) -> dict[str, str]:
    """Return the content of the files of *run* in the format of *tool*, one of `FORMATS`, by name.

    Raise a `ConfigError` for another tool, and for a run without what it shows.
    """
    if tool not in FORMATS:
        raise ConfigError(f"--format {tool} is not known; write {', '.join(FORMATS)}")
    if run.evidence == "none":
        raise ConfigError(f"{run.folder}: its numbers are without evidence and not for use; nothing was exported")
    if tool == "nixlbench":
        return _nixlbench(run)
    if not run.requests.num_rows:
        raise ConfigError(f"{run.folder} has no requests; export a run of experiment=serve, or --format nixlbench")
    return _aiperf(run) if tool == "aiperf" else {f"{tool}.prom": _prometheus(run, tool)}


def named(run: KeptRun, engine: str) -> pa.Table:
    """Return the requests of *run* that were served, a row each, with the columns that *engine* of `NAMES` exports.

    Units are the engine's: seconds and tokens. Raise a `ConfigError` for another engine.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if engine not in NAMES:
        raise ConfigError(f"{engine!r} has no names of metrics; write {' or '.join(NAMES)}")
    rows = run.requests.filter(pc.equal(run.requests["status"], "ok"))
    values = {name: rows[name] for name in ("ttft", "tpot", "e2e", "input", "output")}
    values["decoding"] = pc.subtract(rows["e2e"], rows["ttft"])
    if "prefilled_at" in rows.column_names:
        values["prefilling"] = pc.subtract(rows["prefilled_at"], rows["started_at"])
    return pa.table({name: values[key] for key, name in NAMES[engine].items() if key in values})


def _prometheus(run: KeptRun, engine: str) -> str:
    label = f'model_name="{run.config["model.name"]}"'
    lines: list[str] = []
    table = named(run, engine)
    for name in table.column_names:
        values = sorted(value for value in table[name].to_pylist() if value is not None)
        lines += [f"# HELP {name} pdsim {__version__}, target={run.about['target']}", f"# TYPE {name} histogram"]
        for bound in _SECONDS if name.endswith("_seconds") else _TOKENS:
            count = bisect_right(values, bound)
            lines.append(f'{name}_bucket{{{label},le="{bound:g}"}} {count}')
        lines.append(f'{name}_bucket{{{label},le="+Inf"}} {len(values)}')
        lines += [f"{name}_sum{{{label}}} {sum(values):.9g}", f"{name}_count{{{label}}} {len(values)}"]
    return "\n".join(lines) + "\n"


_STATS = ("avg", "min", "max", "sum", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "std")
_HEADERS = {
    "time_to_first_token": ("Time to First Token", "ms"),
    "request_latency": ("Request Latency", "ms"),
    "inter_token_latency": ("Inter Token Latency", "ms"),
    "input_sequence_length": ("Input Sequence Length", "tokens"),
    "output_sequence_length": ("Output Sequence Length", "tokens"),
    "request_throughput": ("Request Throughput", "requests/sec"),
    "output_token_throughput": ("Output Token Throughput", "tokens/sec"),
    "request_count": ("Request Count", "requests"),
    "benchmark_duration": ("Benchmark Duration", "sec"),
    "goodput": ("Goodput", "requests/sec"),
}


def _aiperf(run: KeptRun) -> dict[str, str]:
    rows = run.requests.to_pylist()
    served = [row for row in rows if row["status"] == "ok"]
    metrics: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, values in _each(served).items():
        if values:
            metrics[name] = _statistics(values) | {"unit": _HEADERS[name][1]}
    ends = [row["arrival"] + row["e2e"] for row in served]
    duration = max(ends, default=0.0) - min((row["arrival"] for row in rows), default=0.0)
    derived = {"request_count": float(len(served)), "benchmark_duration": duration}
    if duration:
        derived["request_throughput"] = len(served) / duration
        derived["output_token_throughput"] = sum(row["output"] for row in served) / duration
    if (goodput := run.metrics.get("goodput")) is not None:
        derived["goodput"] = goodput
    metrics |= {name: {"unit": _HEADERS[name][1], "avg": value} for name, value in derived.items()}
    summary = {"schema_version": "1.4", "aiperf_version": f"pdsim {__version__}", "was_cancelled": False, **metrics}
    return {
        "profile_export.jsonl": "".join(json.dumps(_record(row)) + "\n" for row in rows),
        "profile_export_aiperf.json": json.dumps(summary, indent=2) + "\n",
        "profile_export_aiperf.csv": _csv(metrics),
    }


def _each(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    # of AIPerf's record metrics, in its units for display
    columns = {
        "time_to_first_token": ("ttft", 1e3),
        "request_latency": ("e2e", 1e3),
        "inter_token_latency": ("tpot", 1e3),
        "input_sequence_length": ("input", 1.0),
        "output_sequence_length": ("output", 1.0),
    }
    return {
        name: [row[key] * factor for row in rows if row[key] is not None] for name, (key, factor) in columns.items()
    }


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    # Of a request that failed there are its start and the reason.
    ok, start = row["status"] == "ok", round(row["arrival"] * 1e9)
    about = {
        "session_num": row["id"],
        "request_start_ns": start,
        "request_end_ns": start + round((row["e2e"] or 0.0) * 1e9),
        "worker_id": str(row["decode"]),
        "record_processor_id": "pdsim",
        "benchmark_phase": "profiling",
    }
    metrics = {
        name: {"value": values[0], "unit": _HEADERS[name][1]} for name, values in _each([row]).items() if values
    }
    error = None if ok else {"type": row["status"].partition(":")[0], "message": row["status"]}
    return {"metadata": about, "metrics": metrics if ok else {}, "error": error}


def _statistics(values: Sequence[float]) -> dict[str, float]:
    statistics = {"avg": fmean(values), "min": min(values), "max": max(values), "sum": sum(values)}
    statistics |= {"std": stdev(values) if len(values) > 1 else 0.0, "count": len(values)}
    for name in _STATS:
        if name[0] == "p" and (value := percentile(values, float(name[1:]))) is not None:
            statistics[name] = value
    return statistics


def _csv(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    titles = {
        name: f"{_HEADERS[name][0]} ({one['unit']})" if one["unit"] != "requests" else _HEADERS[name][0]
        for name, one in metrics.items()
    }
    writer.writerow(["Metric", *_STATS])
    for name in sorted(name for name, one in metrics.items() if "count" in one):
        values = (metrics[name].get(stat) for stat in _STATS)
        writer.writerow([titles[name], *("" if value is None else f"{value:.2f}" for value in values)])
    writer.writerow([])
    writer.writerow(["Metric", "Value"])
    for name in sorted(name for name, one in metrics.items() if "count" not in one):
        writer.writerow([titles[name], f"{metrics[name]['avg']:.2f}"])
    return buffer.getvalue()


_COLUMNS = (
    "Block Size (B)", "Batch Size", "B/W (GB/Sec)", "Avg Lat. (us)", "Avg Prep (us)", "P99 Prep (us)",
    "Avg Post (us)", "P99 Post (us)", "Avg Tx (us)", "P99 Tx (us)",
)  # fmt: skip


def _nixlbench(run: KeptRun) -> dict[str, str]:
    # A file for each operation and number of threads, which nixlbench has one of; its latency is of a block.
    points: dict[tuple[str, int], dict[tuple[int, int], list[dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in run.transfers.to_pylist():
        of = re.fullmatch(r"pair (\d+)x(\d+) c(\d+)( read)?", row["label"])
        if of and row["status"] == "ok":
            points[row["operation"], int(of[3])][int(of[2]), int(of[1])].append(row)
    if not points:
        raise ConfigError(
            f"{run.folder} has no transfers that nixlbench makes; export a run of experiment=transfer "
            "'experiment.patterns=[pair]'"
        )
    return {
        f"nixlbench-{operation}-{threads}.txt": "\n".join(_table(operation, threads, rows)) + "\n"
        for (operation, threads), rows in points.items()
    }


def _table(
    operation: str, threads: int, points: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]
) -> Iterator[str]:
    yield f"# pdsim {__version__}"
    yield f"Op type (--op_type=[READ, WRITE])                           : {operation.upper()}"
    yield f"Num threads (--num_threads=N)                               : {threads}"
    yield ""
    yield "".join(f"{name:<16}" for name in _COLUMNS).rstrip()
    yield "-" * 160
    for (size, batch), rows in sorted(points.items()):
        latency = fmean(row["latency_us"] for row in rows)
        cells = [f"{size}", f"{batch}", f"{threads * size * batch / latency * 1e-3:.6f}", f"{latency / batch:.6g}"]
        for stage in ("prep_us", "post_us", "tx_us"):
            times = [row[stage] for row in rows]
            p99 = percentile(times, 99.0)
            cells += [f"{fmean(times):.6g}", f"{max(times) if p99 is None else p99:.6g}"]
        yield "".join(f"{cell:<16}" for cell in cells).rstrip()
