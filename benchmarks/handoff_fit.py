"""What hosts do in a handoff, fitted: `copies` of an H200 and `wake` of its host, in `conf/hw/8xh200.yaml`.

    python -m benchmarks.handoff_fit             # fits, and compares with what was not fitted
    python -m benchmarks.handoff_fit FOLDER...   # first keeps the records of these runs of ``validate``

Fitted are parts of handoffs over `nvlink`, of 512, 2048 and 8192 tokens.  Left out are `mooncake_nvlink` and `nixl`,
and of all three the times of staged handoffs as a whole.

- A *gather*: from TP 1 to TP 2 a queue has two blocks to send, and gathers the second when the write of the first is
  over; so it takes from there to the second write.
- Two *scatters*: from TP 2 to TP 1 both blocks are scattered by one rank, one after the other, between the end of the
  last write and the first of the next handoff.  Messages between the ranks take the rest, the same for all sizes.
- *Waking up*: a *whole* handoff from TP 2 to TP 2 is a message to rank 1, its forward, which takes no time here, its
  write, the notification, and rank 1's message to its leader.  Beside the write these are two messages, and four times
  that a program has something to act upon.

Records hold a write a row, in microseconds after the start of its job; the first request of each size warmed up.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments._validate_files import MEASURED, read
from pdsim.fabric.machine import Copies
from pdsim.fabric.memory import LAUNCH
from pdsim.results.record import Table
from pdsim.results.report import show_table
from pdsim.run import compose

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "handoffs-2xh200.csv"
VALIDATIONS = ROOT / "conf" / "calibration" / "validation"
WAYS = ("1to2 sliced", "1to2 staged", "2to1 sliced", "2to1 staged", "2to2 whole")
"""In the order in which `validate` hands over, each way a job."""

FITTED = "nvlink"
ENGINES = ("nvlink", "mooncake_nvlink", "nixl")
PIECE = 1024  # bytes: of Llama-3.1-8B four of the eight KV heads, 128 bf16 each
TOKEN = 64 * PIECE  # bytes of a block: K and V of 32 layers
COPIES = {"gather": 1, "scatter": 2}  # that a sample contains
MESSAGES, WAKES = 2, 4  # in a whole handoff, beside the write of rank 1
STAMPS = ("submitted", "prepared", "posted", "completed", "seen")
COLUMNS = ("engine", "way", "request", "path", "source", "target", "nbytes", *STAMPS)
HEADS = ("engine", "what", "tokens", "fitted", "measured us", "modelled us", "error %")


class Sample(NamedTuple):
    """Seconds that some copies of equal size took."""

    engine: str
    kind: str
    nbytes: int  # of one of them
    seconds: float


# --- records --------------------------------------------------------------------------------------------------------


def keep(folders: Iterable[Path]) -> None:
    """Write `RECORDS` from the runs of ``validate`` in *folders*; slices are left out."""
    rows: list[list[object]] = []
    for folder in folders:
        engine = _configured(folder)
        rows += [[engine, *row] for row in _writes(folder) if not str(row[0]).endswith("sliced")]
    with RECORDS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def _configured(folder: Path) -> str:
    from omegaconf import OmegaConf

    return str(OmegaConf.load(folder / "config.yaml")["backend"]["name"])


def _writes(folder: Path) -> Iterator[list[object]]:
    """Yield the columns of each write of a handoff, but the engine; jobs follow one another, and number from 1."""
    import pyarrow.parquet as pq

    way, before = -1, 0
    for row in pq.read_table(folder / "transfers.parquet").to_pylist():
        if row["label"].count("/") != 2:
            continue
        number, _, path = row["label"].split("/")
        way += int(number) == 1 and before != 1 and row["source"] == "prefill0.0"
        before = int(number)
        if way < len(WAYS):  # `serve` is the last
            stamps = [round(row[stamp] * 1e6, 1) for stamp in STAMPS]
            yield [WAYS[way], number, path, row["source"], row["target"], row["nbytes"], *stamps]


def _records() -> list[dict[str, str]]:
    with RECORDS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def samples() -> list[Sample]:
    """Return what the records say of copies, warm-ups left out."""
    rows = _records()
    found = []
    for engine in ENGINES:
        for way, kind in (("1to2 staged", "gather"), ("2to1 staged", "scatter")):
            writes: dict[int, list[dict[str, str]]] = {}
            for row in rows:
                if (row["engine"], row["way"]) == (engine, way):
                    writes.setdefault(int(row["request"]), []).append(row)
            found += [Sample(engine, kind, *each) for each in _copies(kind, writes)]
    return found


def _copies(kind: str, writes: Mapping[int, Sequence[Mapping[str, str]]]) -> Iterator[tuple[int, float]]:
    seen: set[int] = set()
    for number in sorted(writes):
        blocks = sorted((row for row in writes[number] if row["path"] == "staged"), key=_submitted)
        nbytes, warm = int(blocks[0]["nbytes"]), int(blocks[0]["nbytes"]) not in seen
        seen.add(nbytes)
        if warm:
            continue
        if kind == "gather":
            yield nbytes, (_submitted(blocks[1]) - float(blocks[0]["seen"])) * 1e-6
        elif following := writes.get(number + 1):
            last = max(float(row["seen"]) for row in blocks)
            yield nbytes, (min(map(_submitted, following)) - last) * 1e-6


def _submitted(row: Mapping[str, str]) -> float:
    return float(row["submitted"])


# --- copies ---------------------------------------------------------------------------------------------------------


def medians(of: Iterable[Sample]) -> dict[tuple[str, str, int], float]:
    """Return the median seconds by engine, kind and bytes."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for sample in of:
        found.setdefault((sample.engine, sample.kind, sample.nbytes), []).append(sample.seconds)
    return {key: float(np.median(values)) for key, values in found.items()}


def fit_copies(of: Mapping[tuple[str, str, int], float], memory_rate: float) -> tuple[Copies, float]:
    """Return the `Copies` of least squares of relative errors, and the seconds of messages beside two scatters."""
    rows = []
    for (_, kind, nbytes), seconds in of.items():
        copies = COPIES[kind]
        known = copies * (2 * nbytes / memory_rate + LAUNCH)
        rows.append(np.array([copies, copies * nbytes / PIECE, kind == "scatter", seconds - known]) / seconds)
    table = np.array(rows)
    scale = np.abs(table[:, :3]).max(axis=0)
    call, piece, between = (float(value) for value in np.linalg.lstsq(table[:, :3] / scale, table[:, 3])[0] / scale)
    return Copies(call=call, piece=piece), between


def modelled(copies: Copies, between: float, memory_rate: float, kind: str, nbytes: int) -> float:
    """Return the seconds of a sample of *kind* with blocks of *nbytes*."""
    each = copies.busy(nbytes // PIECE) + 2 * nbytes / memory_rate + LAUNCH
    return COPIES[kind] * each + (between if kind == "scatter" else 0.0)


def bootstrap(of: Sequence[Sample], memory_rate: float, runs: int = 400) -> list[tuple[float, float]]:
    """Return the 95 % intervals of call and piece: samples of each kind and size drawn again."""
    random = np.random.default_rng(0)
    groups: dict[tuple[str, int], list[Sample]] = {}
    for sample in of:
        groups.setdefault((sample.kind, sample.nbytes), []).append(sample)
    found = []
    for _ in range(runs):
        drawn = [group[i] for group in groups.values() for i in random.integers(0, len(group), len(group))]
        copies, _ = fit_copies(medians(drawn), memory_rate)
        found.append((copies.call, copies.piece))
    return [(float(low), float(high)) for low, high in np.percentile(found, (2.5, 97.5), axis=0).T]


# --- waking up ------------------------------------------------------------------------------------------------------


def rests(engine: str) -> dict[int, float]:
    """Return by tokens what a handoff from TP 2 to TP 2 takes beside the write of rank 1: medians, in seconds."""
    writes: dict[int, list[dict[str, str]]] = {}
    for row in _records():
        if (row["engine"], row["way"]) == (engine, "2to2 whole"):
            writes.setdefault(int(row["request"]), []).append(row)
    found: dict[int, list[float]] = {}
    for number in sorted(writes):
        last = [row for row in writes[number] if row["source"] == "prefill0.1"]
        tokens = sum(int(row["nbytes"]) for row in last) // TOKEN
        seconds = (max(float(row["seen"]) for row in writes[number]) - min(map(_submitted, last))) * 1e-6
        found.setdefault(tokens, []).append(seconds)
    rows: list[dict[str, Any]] = read(VALIDATIONS / f"{engine}-2xh200" / MEASURED)["measured"]
    whole = {int(row["label"].split()[2]): row["value"] for row in rows if row["group"] == "handoff, whole"}
    return {tokens: whole[tokens] - float(np.median(seconds[1:])) for tokens, seconds in found.items()}


def fit_wake(of: Mapping[int, float], latency: float) -> float:
    """Return the seconds of a wake-up of least relative errors, with messages of *latency*."""
    times = np.array(list(of.values()))
    return float(np.sum((times - MESSAGES * latency) / times**2) / np.sum(WAKES / times**2))


# --- what is printed ------------------------------------------------------------------------------------------------


def main(folders: Sequence[str]) -> None:
    """Keep records if there are *folders*; fit, and print."""
    if folders:
        keep(map(Path, folders))
    config = compose(["hw=2xh200"])
    assert config.hw.gpu is not None
    rate, latency, every = config.hw.gpu.memory_rate, config.hw.host.tcp_latency, samples()
    mine = [sample for sample in every if sample.engine == FITTED]
    copies, between = fit_copies(medians(mine), rate)
    (low, high), (least, most) = bootstrap(mine, rate)
    wake = fit_wake(rests(FITTED), latency)
    print(f"hw.gpu.copies.call {copies.call * 1e6:.0f}us, 95 % {low * 1e6:.0f} to {high * 1e6:.0f}")
    print(f"hw.gpu.copies.piece {copies.piece * 1e9:.1f}ns, 95 % {least * 1e9:.1f} to {most * 1e9:.1f}")
    print(f"hw.host.wake {wake * 1e6:.0f}us")
    print(f"messages beside two scatters {between * 1e6:.0f}us")
    rows = []
    for (engine, kind, nbytes), seconds in medians(every).items():
        rows.append(_row(engine, kind, nbytes // TOKEN, seconds, modelled(copies, between, rate, kind, nbytes)))
    for engine in ENGINES:
        for tokens, seconds in rests(engine).items():
            rows.append(_row(engine, "whole", tokens, seconds, MESSAGES * latency + WAKES * wake))
    show_table(Table("Medians", dict.fromkeys(HEADS, ""), rows))


def _row(engine: str, what: str, tokens: int, real: float, model: float) -> list[object]:
    fitted = "yes" if engine == FITTED else "no"
    return [engine, what, tokens, fitted, real * 1e6, model * 1e6, 100 * (model / real - 1)]


if __name__ == "__main__":
    main(sys.argv[1:])
