"""What hosts and GPUs do in a handoff, fitted: `copies`, `rouse`, `wake` and `cold` in `conf/hw/8xh200.yaml`.

    python -m benchmarks.handoff_fit                  # fits, and compares with what was not fitted
    python -m benchmarks.handoff_fit HOST=FOLDER...   # first keeps the records of these runs of ``validate``

Fitted are parts of handoffs, and of requests, over `nvlink` on the hosts of `FITTED`.  Left out are the other engines
there, all of the other hosts, and the times of staged handoffs as a whole.

- A *gather*: from TP 1 to TP 2 a queue has two blocks to send, and gathers the second when the write of the first is
  over; so it takes from there to the second write.
- Two *scatters*: from TP 2 to TP 1 both blocks are scattered by one rank, one after the other, between the end of the
  last write and the first of the next handoff.  Messages between the ranks take the rest, the same for all sizes.
- A *turn*: from TP 2 to TP 1 two ranks share the GPU that they gather on, a few large pieces each, between the write of
  the metadata and that of rank 0's block.
- *Waking up*: a *whole* handoff from TP 2 to TP 2 is a message to rank 1, its forward, which takes no time here, its
  write, the notification, and rank 1's message to its leader.  Beside the write these are two messages, and four times
  that a program has something to act upon.
- *Rousing* the copy engines: from posting to the end of a write of `serve`, less its bytes and less the same of whole
  handoffs, which follow one another.
- *Cold*: what the median time to first token of `serve` is longer than the model with all of the above says.

Records hold a write a row, in microseconds after the start of its job; requests of further jobs count from `JOB` on.
The first request of each size warmed up, in each job.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import serve
from experiments.handoff import Options
from experiments.validate.files import EXPECTED, MEASURED, read
from pdsim.cli.run import compose
from pdsim.config import Config
from pdsim.fabric.job import Model
from pdsim.fabric.memory import LAUNCH
from pdsim.hardware import Copies
from pdsim.repository import data
from pdsim.results.record import Table
from pdsim.results.terminal import show_table

ROOT = Path(__file__).resolve().parent.parent
RECORDS = data("benchmarks", "handoffs-2xh200.csv")
TIMES = data("benchmarks", "handoff-times-2xh200.csv")
WAYS = ("1to2 staged", "2to1 staged", "2to2 whole", "serve")
"""Whose writes are kept; of slices nothing is fitted here."""

FITTED = ("nvlink", ("A", "C"))
"""Engine and hosts."""

PIECE = 1024  # bytes: of Llama-3.1-8B four of the eight KV heads, 128 bf16 each
PLANES = 64
TOKEN = PLANES * PIECE  # bytes of a block: K and V of 32 layers
JOB = 1000
COPIES = {"gather": 1, "scatter": 2, "turn": 1}  # that a sample contains
MESSAGES, WAKES = 2, 4  # in a whole handoff, beside the write of rank 1
STAMPS = ("submitted", "prepared", "posted", "completed", "seen")
COLUMNS = ("host", "engine", "way", "request", "path", "source", "target", "nbytes", *STAMPS)
HEADS = ("host", "engine", "what", "tokens", "fitted", "measured us", "modelled us", "error %")
Key = tuple[str, str, str, int]  # host, engine, kind, bytes


class Sample(NamedTuple):
    """Seconds that some copies of equal size took."""

    host: str
    engine: str
    kind: str
    nbytes: int  # of one of them
    seconds: float


# --- records --------------------------------------------------------------------------------------------------------


def keep(runs: Mapping[str, Sequence[Path]]) -> None:
    """Write `RECORDS` and `TIMES` from the folders of ``validate`` of each host."""
    records: list[list[object]] = [list(COLUMNS)]
    times: list[list[object]] = [["host", "engine", "what", "us"]]
    for host, folder in ((host, folder) for host, folders in runs.items() for folder in folders):
        engine = str(read(folder / EXPECTED)["backend"])
        records += [[host, engine, *row] for row in _writes(folder)]
        measured = read(folder / MEASURED)["measured"]
        mine = [value for value in measured if value["group"].startswith(("handoff", "serve"))]
        times += [[host, engine, value["label"], round(value["value"] * 1e6, 1)] for value in mine]
    for path, rows in ((RECORDS, records), (TIMES, times)):
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def _ways(folder: Path) -> list[str]:
    """Return what the jobs of *folder* hand over, one after the other; a way that came before is ``""``."""
    found: list[str] = []
    jobs = [part["jobs"] for part in read(folder / MEASURED).get("took", ()) if part["experiment"] == "handoff"]
    parts = [part for part in read(folder / EXPECTED)["design"] if part["experiment"] == "handoff"]
    for part, count in zip(parts, jobs or [1] * len(parts), strict=True):
        options: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in part["options"].items()}
        ways = Options(**options).ways()
        named = [f"{way.prefill}to{way.decode} {way.path}" if way.metadata == "policy" else "" for way in ways]
        found += count * named
    return found


def _writes(folder: Path) -> Iterator[list[object]]:
    """Yield the columns of each write of a handoff, but the first two; jobs follow one another, and number from 1."""
    import pyarrow.parquet as pq

    ways, job, before, earlier = _ways(folder), -1, 0, dict.fromkeys(WAYS, -1)
    for row in pq.read_table(folder / "transfers.parquet").to_pylist():
        if row["label"].count("/") != 2:
            continue
        number, _, path = row["label"].split("/")
        new = int(number) == 1 and before != 1 and row["source"] == "prefill0.0"
        job, before = job + new, int(number)
        way = ways[job] if job < len(ways) else "serve"  # which is the last
        if way in WAYS:
            earlier[way] += new
            stamps = [round(row[stamp] * 1e6, 1) for stamp in STAMPS]
            request = earlier[way] * JOB + before
            yield [way, request, path, row["source"], row["target"], row["nbytes"], *stamps]


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _requests(way: str) -> dict[tuple[str, str], dict[int, list[dict[str, str]]]]:
    """Return the writes of *way* by host and engine, and by request, in the order in which they were submitted."""
    found: dict[tuple[str, str], dict[int, list[dict[str, str]]]] = {}
    for row in sorted((row for row in _read(RECORDS) if row["way"] == way), key=_submitted):
        requests = found.setdefault((row["host"], row["engine"]), {})
        requests.setdefault(int(row["request"]), []).append(row)
    return {key: dict(sorted(requests.items())) for key, requests in sorted(found.items())}


def _warm(requests: Mapping[int, Sequence[Mapping[str, str]]]) -> list[int]:
    """Return the numbers of *requests* without the first of each size in each job."""
    seen: set[tuple[int, int]] = set()
    found = []
    for number, rows in requests.items():
        key = number // JOB, max(int(row["nbytes"]) for row in rows)
        if key in seen:
            found.append(number)
        seen.add(key)
    return found


def samples() -> list[Sample]:
    """Return what the records say of copies, warm-ups left out."""
    found = []
    for way, kinds in (("1to2 staged", ("gather",)), ("2to1 staged", ("scatter", "turn"))):
        for (host, engine), writes in _requests(way).items():
            found += [Sample(host, engine, kind, *each) for kind in kinds for each in _copies(kind, writes)]
    return found


def _copies(kind: str, writes: Mapping[int, Sequence[Mapping[str, str]]]) -> Iterator[tuple[int, float]]:
    for number in _warm(writes):
        blocks = [row for row in writes[number] if row["path"] == "staged"]
        nbytes = int(blocks[0]["nbytes"])
        if kind == "gather":
            yield nbytes, (_submitted(blocks[1]) - float(blocks[0]["seen"])) * 1e-6
        elif kind == "turn":
            metadata = max(float(row["seen"]) for row in writes[number] if row["path"] == "metadata")
            first = min(_submitted(row) for row in blocks if row["source"] == "prefill0.0")
            if first > metadata:  # else the metadata went after the block
                yield nbytes, (first - metadata) * 1e-6
        elif following := writes.get(number + 1):
            last = max(float(row["seen"]) for row in blocks)
            yield nbytes, (min(map(_submitted, following)) - last) * 1e-6


def _submitted(row: Mapping[str, str]) -> float:
    return float(row["submitted"])


def _fitted(host: str, engine: str) -> bool:
    return engine == FITTED[0] and host in FITTED[1]


# --- copies ---------------------------------------------------------------------------------------------------------


def medians(of: Iterable[Sample]) -> dict[Key, float]:
    """Return the median seconds by host, engine, kind and bytes."""
    found: dict[Key, list[float]] = {}
    for host, engine, kind, nbytes, seconds in of:
        found.setdefault((host, engine, kind, nbytes), []).append(seconds)
    return {key: float(np.median(values)) for key, values in found.items()}


def _pieces(kind: str, nbytes: int) -> int:
    return PLANES if kind == "turn" else COPIES[kind] * nbytes // PIECE


def fit_copies(of: Mapping[Key, float], memory_rate: float) -> tuple[Copies, float]:
    """Return the `Copies` of least squares of relative errors, and the seconds of messages beside two scatters."""
    rows = []
    for (_, _, kind, nbytes), seconds in of.items():
        known = COPIES[kind] * (2 * nbytes / memory_rate + LAUNCH)
        each = [COPIES[kind], _pieces(kind, nbytes), kind == "turn", kind == "scatter", seconds - known]
        rows.append(np.array(each) / seconds)
    table = np.array(rows)
    scale = np.abs(table[:, :4]).max(axis=0)
    call, piece, turn, between = map(float, np.linalg.lstsq(table[:, :4] / scale, table[:, 4])[0] / scale)
    return Copies(call=call, piece=piece, turn=turn), between


def modelled(copies: Copies, between: float, memory_rate: float, kind: str, nbytes: int) -> float:
    """Return the seconds of a sample of *kind* with blocks of *nbytes*."""
    count = COPIES[kind]
    each = copies.busy(_pieces(kind, nbytes) // count, kind == "turn") + 2 * nbytes / memory_rate + LAUNCH
    return count * each + (between if kind == "scatter" else 0.0)


def bootstrap(of: Sequence[Sample], memory_rate: float, runs: int = 400) -> list[tuple[float, float]]:
    """Return the 95 % intervals of call, piece and turn: samples of each host, kind and size drawn again."""
    random = np.random.default_rng(0)
    groups: dict[Key, list[Sample]] = {}
    for sample in of:
        groups.setdefault(sample[:4], []).append(sample)
    found = []
    for _ in range(runs):
        drawn = [group[i] for group in groups.values() for i in random.integers(0, len(group), len(group))]
        copies, _ = fit_copies(medians(drawn), memory_rate)
        found.append((copies.call, copies.piece, copies.turn))
    return [(float(low), float(high)) for low, high in np.percentile(found, (2.5, 97.5), axis=0).T]


# --- waking up ------------------------------------------------------------------------------------------------------


def times() -> dict[tuple[str, str, str], float]:
    """Return the seconds of each handoff, and of `serve`, by host, engine and label."""
    return {(row["host"], row["engine"], row["what"]): float(row["us"]) * 1e-6 for row in _read(TIMES)}


def rests() -> dict[tuple[str, str, int], float]:
    """Return by host, engine and tokens what a handoff from TP 2 to TP 2 takes beside the write of rank 1: medians."""
    whole, found = times(), {}
    for (host, engine), writes in _requests("2to2 whole").items():
        spans: dict[int, list[float]] = {}
        for rows in (writes[number] for number in _warm(writes)):
            last = [row for row in rows if row["source"] == "prefill0.1"]
            tokens = sum(int(row["nbytes"]) for row in last) // TOKEN
            seconds = (max(float(row["seen"]) for row in rows) - min(map(_submitted, last))) * 1e-6
            spans.setdefault(tokens, []).append(seconds)
        for tokens, seconds_of in spans.items():
            label = f"2to2 whole {tokens} tokens"
            found[host, engine, tokens] = whole[host, engine, label] - float(np.median(seconds_of))
    return found


def fit_wake(of: Iterable[float], latency: float) -> float:
    """Return the seconds of a wake-up of least relative errors, with messages of *latency*."""
    seconds = np.array(list(of))
    return float(np.sum((seconds - MESSAGES * latency) / seconds**2) / np.sum(WAKES / seconds**2))


def rousing(rate: float) -> dict[str, list[float]]:
    """Return by host what each write of `serve` takes longer from posting to its end than blocks of handoffs do.

    That is less its bytes' time at *rate*, and less the median of the same of blocks.  The first request warms up.
    """
    alone, pausing = (_beyond(way, path, rate) for way, path in (("1to2 staged", "staged"), ("serve", "grouped")))
    return {host: [each - float(np.median(alone[host])) for each in pausing[host]] for host in pausing}


def _beyond(way: str, path: str, rate: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for (host, engine), requests in _requests(way).items():
        if engine != FITTED[0]:  # others do part of the work of a descriptor between posting and the end
            continue
        rows = [row for number, rows in requests.items() if number % JOB > 1 for row in rows if row["path"] == path]
        stamps = [(float(row["completed"]) - float(row["posted"])) * 1e-6 - int(row["nbytes"]) / rate for row in rows]
        found[host] = stamps
    return found


def served(config: Config) -> dict[str, float]:
    """Return the medians of `serve` on the model, in seconds, by label as `validate` has them."""
    result = serve.run(config, Model(config.hw, config.backend, seed=config.seed), lambda *_: None)
    found = {metric.name: metric.value for metric in result.summary}
    return {f"median {name}": float(found[f"{name}_p50_s"] or 0.0) for name in ("transfer", "ttft", "e2e")}


def fit_cold(config: Config, measured: Sequence[float]) -> float:
    """Return the seconds with which the time to first token is least far from *measured*, in relative terms."""
    low, high = 200e-6, 1000e-6
    short, long = (served(_with(config, cold=cold))["median ttft"] for cold in (low, high))
    goal = len(measured) / sum(1 / seconds for seconds in measured)
    return low + (goal - short) * (high - low) / (long - short)


def _with(config: Config, **changes: Any) -> Config:
    return replace(config, hw=replace(config.hw, host=replace(config.hw.host, **changes)))


# --- what is printed ------------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """Keep records if there are folders in *words*; fit, and print."""
    if words:
        runs: dict[str, list[Path]] = {}
        for host, _, folder in (word.partition("=") for word in words):
            runs.setdefault(host, []).append(Path(folder))
        keep(runs)
    options = ["model=llama-3.1-8b", "workload=smoke", "kv.checked=0", "kv.pool=16GiB", "experiment=serve"]
    options = ["compute=roofline", "engine=generic", *options]  # those that the hosts' pauses were fitted beside
    configs = {name: compose(["hw=2xh200", f"backend={name}", *options]) for name in _engines()}
    config = configs[FITTED[0]]
    assert config.hw.gpu is not None
    rate, latency, every = config.hw.gpu.memory_rate, config.hw.host.tcp_latency, samples()
    mine = [sample for sample in every if _fitted(sample.host, sample.engine)]
    copies, between = fit_copies(medians(mine), rate)
    for (name, value), (low, high) in zip(_shown(copies), bootstrap(mine, rate), strict=True):
        unit, scale = ("ns", 1e9) if name == "piece" else ("us", 1e6)
        print(f"hw.gpu.copies.{name} {value * scale:.3g}{unit}, 95 % {low * scale:.3g} to {high * scale:.3g}")
    print(f"messages beside two scatters {between * 1e6:.0f}us")
    wake = fit_wake([seconds for (host, name, _), seconds in rests().items() if _fitted(host, name)], latency)
    roused = rousing(config.hw.interconnect.rate)
    rouse = float(np.median([each for host, found in roused.items() if host in FITTED[1] for each in found]))
    print(f"hw.host.wake {wake * 1e6:.0f}us")
    print(f"hw.gpu.rouse {rouse * 1e6:.0f}us")
    measured = times()
    ttft = [
        seconds for (host, name, what), seconds in measured.items() if what == "median ttft" and _fitted(host, name)
    ]
    print(f"hw.host.cold {fit_cold(config, ttft) * 1e6:.0f}us, with the other numbers as configured")
    rows = [_row(*key, seconds, modelled(copies, between, rate, *key[2:])) for key, seconds in medians(every).items()]
    rows += [
        _row(host, name, "whole", tokens * TOKEN, seconds, MESSAGES * latency + WAKES * wake)
        for (host, name, tokens), seconds in rests().items()
    ]
    rows += [_row(host, FITTED[0], "rouse", 0, float(np.median(found)), rouse) for host, found in roused.items()]
    said = {name: served(each) for name, each in configs.items()}
    rows += [
        _row(host, name, what.removeprefix("median "), 0, seconds, said[name][what])
        for (host, name, what), seconds in measured.items()
        if what.startswith("median ")
    ]
    show_table(Table("Medians", dict.fromkeys(HEADS, ""), rows))


def _engines() -> list[str]:
    return sorted({engine for _, engine, _ in times()})


def _shown(copies: Copies) -> list[tuple[str, float]]:
    return [("call", copies.call), ("piece", copies.piece), ("turn", copies.turn)]


def _row(host: str, engine: str, what: str, nbytes: int, real: float, model: float) -> list[object]:
    known = "in part" if what in ("transfer", "e2e") else "yes"
    fitted = known if _fitted(host, engine) else "no"
    return [host, engine, what, nbytes // TOKEN or None, fitted, real * 1e6, model * 1e6, 100 * (model / real - 1)]


if __name__ == "__main__":
    main(sys.argv[1:])
