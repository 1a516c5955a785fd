# SPDX-License-Identifier: Apache-2.0
"""Predict what real serving engines do, then measure them, then compare: ``pdsim validate target=live``.

Single requests of several lengths, then loads: shares of the workload's rate, each run several times, so that errors
stand beside what repeats differ by.  Predictions, with the requests of every part, are sealed before the first
request is sent, and measurements name their hash.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from experiments.serve import ServeOptions, job, live_run, on_model
from pdsim.config import Config, ExperimentOptions, as_written
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import Positive, PositiveInt
from pdsim.results import schema
from pdsim.results.record import Metric, Result, Table, commit
from pdsim.serving.workload import Request, draw
from pdsim.validation.sealed import EXPECTED, MEASURED, adopt, keep, read, seal
from pdsim.validation.verdicts import (
    BOUNDS,
    LATENCIES,
    SINGLE,
    Bound,
    by_class,
    compare_files,
    failures,
    points,
    quantiles,
    tables,
    values_of,
)

if TYPE_CHECKING:
    from backends.live.live_deployment import LiveDeployment, Served

TARGETS = ("model", "live")
"""Where the experiment can run; on the model it predicts, or compares what is stored."""
KEEPS_FILES = True

Parts = Mapping[str, Sequence[Request]]
"""Requests by the name of their part, each part from time 0 on."""

REST = 20.0  # seconds between the last arrival of a part and the next part: nothing is under way in both
APART = 5.0  # seconds between two single requests: none finds another under way

WARMUP = "warmup-"
"""How the names of parts begin that are not judged, but leave their traces: pages in another order."""

REQUESTS, OBSERVED = "requests.parquet", "observed"
"""The file of a run whose requests are one load, and the name of that."""

_DEPLOYMENTS = {"pair": "disaggregated", "colocated": "colocated"}
_CONTENTS = 1_000_000  # first block number of prompts, beyond those that traces have


@dataclass(frozen=True, kw_only=True)
class ValidateLiveOptions(ExperimentOptions):
    """The points to measure, and the largest allowed errors."""

    name: str = "validate_live"
    lengths: tuple[PositiveInt, ...] = (128, 512, 2048, 8192)  # of the prompts of single requests, tokens
    single_output: PositiveInt = 16  # tokens that a single request generates
    singles: PositiveInt = 5  # requests of each length
    loads: Annotated[tuple[Positive, ...], "non-empty"] = (0.25, 0.5, 0.75, 1.0)  # shares of the workload's rate
    runs: PositiveInt = 2  # of every load: their difference is the floor
    # only: nothing is measured; now: what is stored is predicted anew
    predict: Annotated[str, "one of before, only, now"] = "before"
    expected: str = ""  # predictions that an earlier run made, instead of new ones: its expectations.json
    stored: str = ""  # a folder of an earlier run, or of target=live or observe, which is compared instead
    router: str = "least_tokens"  # among servers of one role
    # of mean errors by metric, beyond which the run fails
    bounds: Mapping[Annotated[str, f"one of {', '.join(BOUNDS)}"], float] = field(default_factory=dict)


def run(config: Config, target: Any, progress: ShowProgress, folder: Path) -> Result:
    """Predict, measure and compare; the files go to *folder*.

    Raise a `ConfigError` for nothing to measure with, a file that was changed, or predictions of other requests.
    """
    options = ValidateLiveOptions.of(config)
    if options.stored and options.expected:
        raise ConfigError("experiment.expected is of a run that measures; leave it or experiment.stored out")
    if config.target != "live" and options.predict != "only" and not options.stored:
        raise ConfigError(
            "validate measures real servers: set target=live, or experiment.stored=FOLDER with what was measured, "
            "or experiment.predict=only for predictions alone"
        )
    if options.stored:
        _take(config, options, folder, progress)
    elif options.expected:
        made = adopt(Path(options.expected), folder, "requests", "predicted")
        if made["requests"] != _listed(_parts(config, options)):
            raise ConfigError(
                f"experiment.expected={options.expected} has predictions of other requests than these; give the "
                "workload, seed, experiment.lengths, singles and loads that it was made with"
            )
    else:
        _expect(config, _parts(config, options), folder, progress)
    if options.predict == "only":
        return _predictions(folder)
    failed = [] if options.stored else _measure(config, options, target, folder, progress)
    return _compared(config, options, folder, failed)


def partial(
    config: Config,
    ended: Iterable[bytes],
    transfers: Iterable[bytes],  # noqa: ARG001  a run has both journals
    folder: Path,
) -> Result | None:
    """Return the comparison of a validation in *folder* that was killed; None before the first request had ended.

    Writes the measurements with all requests that the journal *ended* has, so that ``experiment.stored`` takes them.
    """
    options = ValidateLiveOptions.of(config)
    if not (folder / EXPECTED).is_file():
        return None
    expected, measured = read(folder / EXPECTED), folder / MEASURED
    calls = [*_calls(expected, options.runs)]
    servers = read(measured)["servers"] if measured.is_file() else {}
    runs: list[dict[str, Any]] = [{} for _ in range(options.runs)]
    failures: list[str] = []
    served = live_run.journalled([requests for *_, requests in calls], ended)
    for (number, name, requests), one in zip(calls, served, strict=False):
        rows, failed = _rows(config, requests, one)
        runs[number].setdefault(name, []).extend(rows)
        failures += failed
    if not any(rows and name in expected["predicted"] for run in runs for name, rows in run.items()):
        return None
    count = sum(len(rows) for run in runs for rows in run.values())
    keep(measured, seal({"expectations": expected["sha256"], "servers": servers, "runs": runs}))
    total = sum(len(requests) for *_, requests in calls)
    said = f"the run ended early: these are {count} of {total} requests, and their last part is not whole"
    return _compared(config, options, folder, [said, *failures])


def _parts(config: Config, options: ValidateLiveOptions) -> Parts:
    context = config.model.context
    every: dict[str, Sequence[Request]] = dict(
        single_requests(options.lengths, options.single_output, options.singles, context)
    )
    drawn = draw(config.workload, config.seed, context).requests
    for share in options.loads:
        every[f"load-{share:g}"] = [Request(one.arrival / share, *one[1:]) for one in drawn]
    return every


def _listed(parts: Parts) -> dict[str, list[list[float]]]:
    return {name: [[one.arrival, one.input, one.output] for one in own] for name, own in parts.items()}


def _expect(config: Config, parts: Parts, folder: Path, progress: ShowProgress) -> None:
    rows = predicted(replace(config, target="model"), parts, progress)
    content = {
        "kind": "serving",
        "commit": commit(),
        "config": as_written(config),
        "requests": _listed(parts),
        "predicted": {name: quantiles(own) for name, own in rows.items() if not name.startswith(WARMUP)},
    }
    keep(folder / EXPECTED, seal(content))


def _take(config: Config, options: ValidateLiveOptions, folder: Path, progress: ShowProgress) -> None:
    # A folder of ``validate_live`` has predictions and measurements; one of a live or observed run has requests
    # alone, which are predicted here.
    source = Path(options.stored)
    if not (source / MEASURED).is_file() and (source / REQUESTS).is_file():
        _take_run(config, source, folder, progress)
        return
    for name, key in ((EXPECTED, "requests"), (MEASURED, "runs")):
        if not (source / name).is_file():
            raise ConfigError(f"experiment.stored={source} has no {name}; name the folder of a run that measured")
        read(source / name, key)  # refuses what was changed, and what is of transfers
        keep(folder / name, (source / name).read_bytes())
    if options.predict == "now":
        requests = read(source / EXPECTED)["requests"].items()
        _expect(config, {name: [Request(*one) for one in own] for name, own in requests}, folder, progress)


def _take_run(config: Config, source: Path, folder: Path, progress: ShowProgress) -> None:
    rows = schema.read_table(source / REQUESTS).to_pylist()
    names = [name for name in ("status", "input", "output", *LATENCIES) if name in rows[0]]
    requests = [Request(row["arrival"], row["input"], row["output"]) for row in rows]
    _expect(config, {OBSERVED: requests}, folder, progress)
    run = {OBSERVED: [{name: row[name] for name in names} for row in rows]}
    content = {"expectations": read(folder / EXPECTED)["sha256"], "servers": {}, "runs": [run]}
    keep(folder / MEASURED, seal(content))


def _measure(
    config: Config, options: ValidateLiveOptions, target: LiveDeployment, folder: Path, progress: ShowProgress
) -> list[str]:
    expected = read(folder / EXPECTED)
    runs: list[dict[str, Any]] = [{} for _ in range(options.runs)]
    failures: list[str] = []
    servers: dict[str, str] = {}
    calls = [*_calls(expected, options.runs)]
    for done, (number, name, requests) in enumerate(calls, 1):
        progress((done - 1) / len(calls), name)
        served = target.serve(requests, lambda *_: None, policy=options.router)
        rows, failed = _rows(config, requests, served)
        runs[number].setdefault(name, []).extend(rows)
        servers.update(served.servers)
        failures += failed
        if done == len(calls) or calls[done][:2] != (number, name):  # a run that is ended early leaves what it had
            keep(folder / MEASURED, seal({"expectations": expected["sha256"], "servers": servers, "runs": runs}))
    return failures


def _calls(expected: Mapping[str, Any], runs: int) -> Iterator[tuple[int, str, list[Request]]]:
    # The requests that are sent together, with their run and part, in order.  Warm-ups and single requests are sent
    # once, one at a time; loads once in every run.  Contents of prompts differ from run to run, for a server may
    # cache prefixes.
    block = itertools.count(_CONTENTS)
    for number in range(runs):
        for name, rows in expected["requests"].items():
            alone = name.startswith((SINGLE, WARMUP))
            if alone and number:
                continue
            requests = [Request(at, given, wanted, None, (next(block),)) for at, given, wanted in rows]
            for group in [[Request(0.0, *one[1:])] for one in requests] if alone else [requests]:
                yield number, name, group


def _rows(config: Config, requests: Sequence[Request], served: Served) -> tuple[list[dict[str, Any]], Sequence[str]]:
    # the latencies of those that have ended, and what failed
    result = live_run.result(config, requests, served)
    names = [name for name in ("status", "input", "output", *LATENCIES) if name in result.requests]
    count = len(result.requests["status"])
    return [{name: result.requests[name][row] for name in names} for row in range(count)], result.failures


def _predictions(folder: Path) -> Result:
    made = read(folder / EXPECTED)["predicted"]
    columns = {"load": "or single requests of so many tokens", "metric": "of its requests", "predicted ms": ""}
    shown = Table("Predicted", columns, [[one.label, one.group, one.value * 1e3] for one in values_of(made)])
    return Result(summary=(Metric("parts", len(made), "loads, and lengths of single requests"),), tables=[shown])


def _compared(config: Config, options: ValidateLiveOptions, folder: Path, failed: Sequence[str]) -> Result:
    # Errors are stated for loads; single requests are among the points.
    expected, measured = read(folder / EXPECTED, "predicted"), read(folder / MEASURED, "runs")
    both = compare_files(expected, measured)
    bounds = {metric: Bound(mean=options.bounds.get(metric), each=each) for metric, each in BOUNDS.items()}
    loads = [one for one in both if not one.predicted.label.startswith(SINGLE)]
    classes = by_class(loads, bounds, config.seed)
    return Result(
        summary=tuple(
            Metric(f"error_{one.name}", one.mean, f"mean absolute relative error of {one.name} over the loads")
            for one in sorted(classes, key=lambda one: [*BOUNDS].index(one.name))
        ),
        tables=[*tables(classes, []), points(both)],
        failures=[*failed, *failures(classes)],
        notes=[f"predictions: SHA-256 {expected['sha256'][:16]}, commit {expected['commit']}"],
    )


def single_requests(lengths: Sequence[int], output: int, repeat: int, context: int) -> dict[str, list[Request]]:
    """Return parts of *repeat* single requests of each of *lengths* that fits, and one before each as a warm-up."""
    singles: dict[str, list[Request]] = {}
    for length in (length for length in lengths if length + output <= context):
        singles[f"{WARMUP}{length}"] = [Request(0.0, length, output, None)]
        singles[f"{SINGLE}{length}"] = [Request(APART * number, length, output, None) for number in range(repeat)]
    return singles


def in_turn(parts: Parts) -> list[Request]:
    """Return the requests of all *parts*, those of each `REST` after the last of the one before."""
    sequence: list[Request] = []
    start = 0.0
    for requests in parts.values():
        sequence += [Request(start + one.arrival, *one[1:]) for one in requests]
        start += requests[-1].arrival + REST if requests else 0.0
    return sequence


def predicted(
    config: Config, parts: Parts, progress: ShowProgress = lambda *_: None
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each of *parts* on the model of *config*, that serves one after the other."""
    requests = in_turn(parts)
    what = job(config, ServeOptions(deployment=_DEPLOYMENTS[config.live.layout]))
    progress(0.0, f"predicting {len(requests)} requests")
    columns = on_model(config, what, requests).requests
    rows = [{name: values[number] for name, values in columns.items()} for number in range(len(requests))]
    by_part: dict[str, list[dict[str, Any]]] = {}
    for name, own in parts.items():
        by_part[name], rows = rows[: len(own)], rows[len(own) :]
    return by_part
