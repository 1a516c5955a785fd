# SPDX-License-Identifier: Apache-2.0
"""Fit what hosts and GPUs do in a handoff: `copies`, `wake`, `idle_wake` of `conf/hw/8xh200.yaml`.

Fitted are parts of handoffs, and of requests, over `nvlink` on the hosts of `FITTED`.  Left out are the other
engines there, all of the other hosts, and the times of staged handoffs as a whole.

- *gather*: from TP 1 to TP 2, from the end of the first block's write to the second write.
- *scatter*: from TP 2 to TP 1 one rank scatters two blocks between the end of the last write and the first of the
  next handoff; messages between the ranks take the rest, the same for all sizes.
- *switch*: from TP 2 to TP 1 two ranks share the GPU that they gather on, between the write of the metadata and that
  of rank 0's block.
- *wake*: a whole handoff from TP 2 to TP 2, less the write of rank 1, is two messages and four wake-ups.
- *copy wake*: from posting to the end of a write of `serve`, less its bytes and less the same of whole handoffs.
- *idle wake*: what the median TTFT of `serve` is longer than the model with all of the above says.

Records hold a write a row, in microseconds after the start of its job; requests of further jobs count from `JOB` on.
The first request of each size warmed up, in each job.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pdsim.calibration.robust import bootstrap
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.core import plugins
from pdsim.core.files import data
from pdsim.hardware.machine import Copies
from pdsim.results.record import Table
from pdsim.sim.memory import LAUNCH
from pdsim.sim.model import Model
from tools.tables import rows as rows_of

RECORDS = data("benchmarks", "handoffs-2xh200.parquet")
TIMES = data("benchmarks", "handoff-times-2xh200.csv")
FITTED = ("nvlink", ("A", "C"))
"""Engine and hosts."""

PIECE = 1024  # bytes: of Llama-3.1-8B four of the eight KV heads, 128 bf16 each
PLANES = 64
TOKEN = PLANES * PIECE  # bytes of a block: K and V of 32 layers
JOB = 1000
CALLS = {"gather": 1, "scatter": 2, "switch": 1}  # that a sample contains
MESSAGES, WAKES = 2, 4  # in a whole handoff, beside the write of rank 1
Key = tuple[str, str, str, int]  # host, engine, kind, bytes


class CopySample(NamedTuple):
    """Seconds that some copies of equal size took."""

    host: str
    engine: str
    kind: str
    nbytes: int  # of one of them
    seconds: float


def _requests(way: str) -> dict[tuple[str, str], dict[int, list[dict[str, str]]]]:
    # Keys are host and engine, then the number of the request; both are in ascending order.
    by_host: dict[tuple[str, str], dict[int, list[dict[str, str]]]] = {}
    for row in sorted((row for row in rows_of(RECORDS) if row["way"] == way), key=_submitted):
        requests = by_host.setdefault((row["host"], row["engine"]), {})
        requests.setdefault(int(row["request"]), []).append(row)
    return {key: dict(sorted(requests.items())) for key, requests in sorted(by_host.items())}


def _warm(requests: Mapping[int, Sequence[Mapping[str, str]]]) -> list[int]:
    seen: set[tuple[int, int]] = set()
    warm = []
    for number, rows in requests.items():
        key = number // JOB, max(int(row["nbytes"]) for row in rows)
        if key in seen:
            warm.append(number)
        seen.add(key)
    return warm


def samples() -> list[CopySample]:
    """Return the samples of copies in the records, one for each warm request that has the writes of its kind."""
    rows = []
    for way, kinds in (("1to2 staged", ("gather",)), ("2to1 staged", ("scatter", "switch"))):
        for (host, engine), writes in _requests(way).items():
            rows += [CopySample(host, engine, kind, *each) for kind in kinds for each in _copies(kind, writes)]
    return rows


def _copies(kind: str, writes: Mapping[int, Sequence[Mapping[str, str]]]) -> Iterator[tuple[int, float]]:
    for number in _warm(writes):
        blocks = [row for row in writes[number] if row["path"] == "staged"]
        nbytes = int(blocks[0]["nbytes"])
        if kind == "gather":
            yield nbytes, (_submitted(blocks[1]) - float(blocks[0]["seen"])) * 1e-6
        elif kind == "switch":
            metadata = max(float(row["seen"]) for row in writes[number] if row["path"] == "metadata")
            first = min(_submitted(row) for row in blocks if row["source"] == "prefill0.0")
            if first > metadata:  # else the metadata went after the block
                yield nbytes, (first - metadata) * 1e-6
        elif following := writes.get(number + 1):
            last = max(float(row["seen"]) for row in blocks)
            yield nbytes, (min(map(_submitted, following)) - last) * 1e-6


def _submitted(row: Mapping[str, str]) -> float:
    return float(row["submitted"])


def is_fitted(host: str, engine: str) -> bool:
    """Return whether the fit uses the times of *engine* on *host*."""
    return engine == FITTED[0] and host in FITTED[1]


def medians(of: Iterable[CopySample]) -> dict[Key, float]:
    """Return the median seconds by host, engine, kind and bytes."""
    groups: dict[Key, list[float]] = {}
    for host, engine, kind, nbytes, seconds in of:
        groups.setdefault((host, engine, kind, nbytes), []).append(seconds)
    return {key: float(np.median(values)) for key, values in groups.items()}


def _pieces(kind: str, nbytes: int) -> int:
    return PLANES if kind == "switch" else CALLS[kind] * nbytes // PIECE


def fit_copies(of: Mapping[Key, float], memory_rate: float, launch: float) -> tuple[Copies, float]:
    """Return the `Copies` of least squares of relative errors, and the seconds of messages beside two scatters.

    *of* is as `medians` returns it.  Bytes, at *memory_rate* bytes/s, and kernel launches of *launch* seconds are
    subtracted first: a copy reads and writes each byte.
    """
    rows = []
    for (_, _, kind, nbytes), seconds in of.items():
        known = CALLS[kind] * (2 * nbytes / memory_rate + launch)
        each = [CALLS[kind], _pieces(kind, nbytes), kind == "switch", kind == "scatter", seconds - known]
        rows.append(np.array(each) / seconds)
    table = np.array(rows)
    scale = np.abs(table[:, :4]).max(axis=0)
    call, descriptor, switch, between = map(float, np.linalg.lstsq(table[:, :4] / scale, table[:, 4])[0] / scale)
    return Copies(call=call, descriptor=descriptor, context_switch=switch), between


def modelled(copies: Copies, between: float, memory_rate: float, launch: float, kind: str, nbytes: int) -> float:
    """Return the seconds of a sample of *kind* with blocks of *nbytes*, the inverse of `fit_copies`."""
    count = CALLS[kind]
    each = copies.busy(_pieces(kind, nbytes) // count, kind == "switch") + 2 * nbytes / memory_rate + launch
    return count * each + (between if kind == "scatter" else 0.0)


def intervals(
    of: Sequence[CopySample], memory_rate: float, launch: float, runs: int = 400
) -> list[tuple[float, ...]]:
    """Return the 95 % intervals of call, descriptor and context switch: *runs* draws of each host, kind and size."""
    groups: dict[Key, list[CopySample]] = {}
    for sample in of:
        groups.setdefault(sample[:4], []).append(sample)

    def again(random: np.random.Generator) -> list[float]:
        drawn = [group[i] for group in groups.values() for i in random.integers(0, len(group), len(group))]
        copies, _ = fit_copies(medians(drawn), memory_rate, launch)
        return [copies.call, copies.descriptor, copies.context_switch]

    return list(zip(*bootstrap(again, runs, seed=0), strict=True))


def times() -> dict[tuple[str, str, str], float]:
    """Return the seconds of each handoff, and of `serve`, by host, engine and label."""
    return {(row["host"], row["engine"], row["what"]): float(row["us"]) * 1e-6 for row in rows_of(TIMES)}


def waking() -> dict[tuple[str, str, int], float]:
    """Return by host, engine and tokens the median seconds of a 2to2 handoff beside the write of rank 1."""
    whole, woken = times(), {}
    for (host, engine), writes in _requests("2to2 whole").items():
        spans: dict[int, list[float]] = {}
        for rows in (writes[number] for number in _warm(writes)):
            last = [row for row in rows if row["source"] == "prefill0.1"]
            tokens = sum(int(row["nbytes"]) for row in last) // TOKEN
            seconds = (max(float(row["seen"]) for row in rows) - min(map(_submitted, last))) * 1e-6
            spans.setdefault(tokens, []).append(seconds)
        for tokens, seconds_of in spans.items():
            label = f"2to2 whole {tokens} tokens"
            woken[host, engine, tokens] = whole[host, engine, label] - float(np.median(seconds_of))
    return woken


def fit_wake(of: Iterable[float], latency: float) -> float:
    """Return the seconds of a wake-up of least relative errors, with messages of *latency*."""
    seconds = np.array(list(of))
    return float(np.sum((seconds - MESSAGES * latency) / seconds**2) / np.sum(WAKES / seconds**2))


def copy_wakes(rate: float) -> dict[str, list[float]]:
    """Return by host what each write of `serve` takes longer, in seconds, than blocks of handoffs do.

    That is from posting to the end, less its bytes' time at *rate*, bytes/s, and less the median of the same of
    blocks.  The first request warms up.
    """
    alone, pausing = (_beyond(way, path, rate) for way, path in (("1to2 staged", "staged"), ("serve", "grouped")))
    return {host: [each - float(np.median(alone[host])) for each in pausing[host]] for host in pausing}


def _beyond(way: str, path: str, rate: float) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for (host, engine), requests in _requests(way).items():
        if engine != FITTED[0]:  # others do part of the work of a descriptor between posting and the end
            continue
        rows = [row for number, rows in requests.items() if number % JOB > 1 for row in rows if row["path"] == path]
        times = ((float(row["completed"]) - float(row["posted"])) * 1e-6 for row in rows)
        values[host] = [time - int(row["nbytes"]) / rate for time, row in zip(times, rows, strict=True)]
    return values


def fit_idle_wake(ttft: Callable[[float], float], measured: Sequence[float]) -> float:
    """Return the `Host.idle_wake` of least relative errors of the median *ttft*, which is linear in it.

    The goal is the harmonic mean of *measured*, which has the least sum of relative errors for a line.
    """
    low, high = 200e-6, 1000e-6
    short, long = ttft(low), ttft(high)
    goal = len(measured) / sum(1 / seconds for seconds in measured)
    return low + (goal - short) * (high - low) / (long - short)


def handoff_config(backend: str) -> Config:
    """Return the configuration beside which the hosts' times were fitted, over *backend*."""
    words = ["model=llama-3.1-8b", "workload=smoke", "kv.checked=0", "kv.pool=16GiB", "experiment=serve"]
    return compose(["hw=2xh200", f"backend={backend}", "compute=roofline", "engine=generic", *words])


def served(config: Config) -> dict[str, float]:
    """Return "median transfer", "median ttft" and "median e2e" of `serve` on the model, in seconds, 0 of none."""
    run = plugins.resolve(plugins.EXPERIMENTS, "serve").run
    result = run(config, Model(config.hw, config.backend, seed=config.seed), lambda *_: None)
    summary = {metric.name: metric.value for metric in result.summary}
    return {f"median {name}": float(summary[f"{name}_p50_s"] or 0.0) for name in ("transfer", "ttft", "e2e")}


def with_idle_wake(config: Config, seconds: float) -> Config:
    """Return *config* with hosts whose programs take *seconds* more to wake after they were idle."""
    return replace(config, hw=replace(config.hw, host=replace(config.hw.host, idle_wake=seconds)))


def tables() -> list[Table]:
    """Return the keys of ``conf/hw`` that are fitted, and each phase on each host with the error of the model."""
    measured, every = times(), samples()
    configs = {name: handoff_config(name) for name in sorted({engine for _, engine, _ in measured})}
    config = configs[FITTED[0]]
    assert config.hw.gpu is not None
    rate, latency = config.hw.gpu.memory_rate, config.hw.host.tcp_latency
    mine = [sample for sample in every if is_fitted(sample.host, sample.engine)]
    copies, between = fit_copies(medians(mine), rate, LAUNCH)
    whole = waking()
    wake = fit_wake([seconds for (host, name, _), seconds in whole.items() if is_fitted(host, name)], latency)
    woken = copy_wakes(config.hw.interconnect.rate)
    copy_wake = float(np.median([each for host in FITTED[1] for each in woken[host]]))
    ttft = [measured[host, FITTED[0], "median ttft"] for host in FITTED[1]]
    idle_wake = fit_idle_wake(lambda seconds: served(with_idle_wake(config, seconds))["median ttft"], ttft)
    numbers: list[list[Any]] = [
        [f"hw.gpu.copies.{name}", *(each * 1e6 for each in (getattr(copies, name), *span))]
        for name, span in zip(("call", "descriptor", "context_switch"), intervals(mine, rate, LAUNCH), strict=True)
    ]
    others = {"messages beside two scatters": between, "hw.host.wake": wake}
    others |= {"hw.gpu.idle_wake": copy_wake, "hw.host.idle_wake": idle_wake}
    numbers += [[key, value * 1e6, None, None] for key, value in others.items()]
    rows = [
        _row(*key, seconds, modelled(copies, between, rate, LAUNCH, *key[2:]))
        for key, seconds in medians(every).items()
    ]
    woken_by = MESSAGES * latency + WAKES * wake
    rows += [_row(*key[:2], "whole", key[2] * TOKEN, seconds, woken_by) for key, seconds in whole.items()]
    for host, times_of in woken.items():
        rows.append(_row(host, FITTED[0], "copy wake", 0, float(np.median(times_of)), copy_wake))
    on_model = {name: served(each) for name, each in configs.items()}
    for (host, name, what), seconds in measured.items():
        if what.startswith("median "):
            rows.append(_row(host, name, what.removeprefix("median "), 0, seconds, on_model[name][what]))
    heads = {"key": "", "us": "", "low us": "95 % interval", "high us": ""}
    phases = ("host", "engine", "what", "tokens", "fitted", "measured us", "modelled us", "error %")
    return [Table("Fitted", heads, numbers), Table("Medians", dict.fromkeys(phases, ""), rows)]


def _row(host: str, engine: str, what: str, nbytes: int, real: float, model: float) -> list[object]:
    known = "in part" if what in ("transfer", "e2e") else "yes"
    fitted_to = known if is_fitted(host, engine) else "no"
    error = 100 * (model / real - 1)
    return [host, engine, what, nbytes // TOKEN or None, fitted_to, real * 1e6, model * 1e6, error]
