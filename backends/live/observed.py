# SPDX-License-Identifier: Apache-2.0
"""Requests from the logs of a deployment, as rows like those that pdsim's own client measures.

`FORMATS` names the logs. `pdsim observe` makes two things of one: a trace with which the same requests can be
simulated, and a run that ``pdsim compare`` and ``pdsim validate`` take as measured.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.live.live_deployment import Served
from backends.live.routes import RequestRow
from pdsim.core import files
from pdsim.core.errors import ConfigError
from pdsim.serving.workload import Request

Observed = tuple[Request, RequestRow]
"""A request that somebody else measured; its arrival, too, is in seconds on the clock of its log."""


def read(path: Path, kind: str = "") -> list[Observed]:
    """Return the requests in *path*, a log of *kind*, by default the one that it shows to be, in order of arrival.

    Raise a `ConfigError` that says what is missing if it is no such log, or has no request.
    """
    text = files.given(path, "name a file that a client or a server has written")
    kind = kind or next((name for name, (sign, _) in FORMATS.items() if sign in text), "")
    if kind not in FORMATS:
        what = f"--format {kind} is not known" if kind else f"{path} is in no format that is recognised"
        raise ConfigError(f"{what}; name one with --format: {', '.join(FORMATS)}")
    try:
        observed = sorted(FORMATS[kind][1](text), key=lambda one: one[0].arrival)
    except (LookupError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: not what {kind} writes ({what}); give the whole of its output") from error
    if not observed:
        raise ConfigError(f"{path}: no request of {kind} in it; give the whole of its output")
    return observed


def trace(observed: list[Observed]) -> str:
    """Return the requests as a trace in Mooncake's format, for ``workload.trace``: arrivals count from the first.

    Prompts are unknown, so no two share a prefix; a request that failed before its first token asks for one.
    """
    requests, _ = _from_the_first(observed)
    names = "timestamp", "input_length", "output_length", "hash_ids"
    rows = [(round(one.arrival * 1e3, 3), one.input, one.output, ()) for one in requests]
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def served(observed: list[Observed], source: str) -> tuple[list[Request], Served]:
    """Return the requests and what became of them, as `backends.live.live_deployment.LiveDeployment.serve` does."""
    requests, start = _from_the_first(observed)
    rows = [replace(row, prefill=source, decode=source) for _, row in observed]
    return requests, Served(start, rows, {source: f"observed:{source}"}, {}, notes=[f"observed, not run: {source}"])


def _from_the_first(observed: list[Observed]) -> tuple[list[Request], float]:
    start = observed[0][0].arrival
    return [Request(one.arrival - start, one.input, one.output, None) for one, _ in observed], start


def _observed(start: float, given: int, came: int, first: float | None, last: float | None, **row: Any) -> Observed:
    # *given* and *came* are tokens; one that failed before its first token has asked for one
    request = Request(start, given, max(1, came), None)
    return request, RequestRow(**{"status": "ok", **row}, sent=start, first=first, last=last, tokens=came)


def _vllm_bench(text: str) -> Iterator[Observed]:
    log = json.loads(text)
    if "start_times" not in log:
        raise ValueError("no start_times, without which arrivals are unknown: save it with --save-detailed")
    errors = log.get("errors") or [""] * len(log["ttfts"])
    columns = [log[name] for name in ("start_times", "input_lens", "output_lens", "ttfts", "itls")]
    for start, given, came, ttft, gaps, error in zip(*columns, errors, strict=True):
        if error or not came:
            yield _observed(start, given, came, None, None, status=f"Error: {error or 'no tokens'}")
        else:
            first = start + ttft
            yield _observed(start, given, came, first, first + sum(gaps), gaps=gaps)


def _aiperf(text: str) -> Iterator[Observed]:
    for line in filter(None, text.splitlines()):
        record = json.loads(line)
        about, metrics = record["metadata"], record.get("metrics") or {}
        if about.get("benchmark_phase") == "warmup":
            continue
        start = about["request_start_ns"] * 1e-9
        given = int(_value(metrics, "input_sequence_length") or 0)
        if record.get("error") or about.get("was_cancelled"):
            why = (record.get("error") or {}).get("message", "cancelled")
            yield _observed(start, given, 0, None, None, status=f"Error: {why}")
            continue
        first = start + _seconds(metrics, "time_to_first_token")
        came = int(_value(metrics, "output_sequence_length") or 1)
        yield _observed(start, given, came, first, start + _seconds(metrics, "request_latency"))


def _value(metrics: Mapping[str, Any], name: str) -> float | None:
    return float(metrics[name]["value"]) if name in metrics else None


def _seconds(metrics: Mapping[str, Any], name: str) -> float:
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0}[metrics[name]["unit"]]
    return float(metrics[name]["value"]) * scale


def _sglang(text: str) -> Iterator[Observed]:
    for line in filter(None, text.splitlines()):
        record = json.loads(line)
        record = record.get("meta_info", record)
        start = min(record[key] for key in ("request_received_ts", "prefill_request_received_ts") if key in record)
        prefilled = record.get("prefill_request_finished_ts")
        yield _observed(
            start,
            int(record["prompt_tokens"]),
            int(record["completion_tokens"]),
            record["response_sent_to_client_ts"],
            record["request_finished_ts"],
            prefilled=prefilled,
            reported=record,
        )


FORMATS: Mapping[str, tuple[str, Callable[[str], Iterator[Observed]]]] = {
    "vllm-bench": ('"ttfts"', _vllm_bench),  # ``vllm bench serve --save-result --save-detailed``
    "aiperf": ('"request_start_ns"', _aiperf),  # its ``profile_export.jsonl``
    "sglang": ('"request_received_ts"', _sglang),  # a record a line, as ``meta_info`` of SGLang's answers has it
}
"""By name: what shows that a text is of this kind, and the reader of its requests."""
