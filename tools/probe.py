# SPDX-License-Identifier: Apache-2.0
"""Bare Mooncake, NIXL and NCCL on two GPUs: samples of calibrations, and the errors of the model.

    python -m tools.probe samples TO VARIANT ... FILE ...     # such as nixl/off; a set of processes in each file
    python -m tools.probe predict TO [hw=NAME]                # what the model says of every point
    python -m tools.probe judge PREDICTED MEASURED            # errors by section and variant, beside the spread

The measured sets are `data/benchmarks/probe-*.parquet`, the predictions that were sealed before them
`data/benchmarks/probe-*-predicted.csv.gz`.  Four ranks, each a process: *a0* and *a1* on the first GPU, *b0* and
*b1* on the second.  Points are drawn by a seed.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median, quantiles

import numpy as np

from pdsim.calibration import samples as calibrated
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.results.environment import commit
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Program
from pdsim.transfer.job import Place, Rank, RankSpec
from tools import tables

SEED = 20261124
PLACES = {"a0": 0, "a1": 0, "b0": 1, "b1": 1}
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DESCRIPTORS = 8192  # most of a transfer
PAIRS = 44  # (count, size) drawn at random, besides the corners

PATTERNS: dict[str, tuple[tuple[str, str], ...]] = {
    "one": (("a0", "b0"),),
    "both": (("a0", "b0"), ("b0", "a0")),
    "four": (("a0", "b0"),) * 4,
    "beside": (("a0", "b0"), ("a1", "b1")),
    "exchange": (("a0", "b0"), ("b1", "a1")),
    "fan-out": (("a0", "b0"), ("a0", "b1")),
    "incast": (("a0", "b0"), ("a1", "b0")),
    "all-to-all": (("a0", "b0"), ("a0", "b1"), ("a1", "b0"), ("a1", "b1")),
    "ring": (("a0", "b0"), ("b0", "a1"), ("a1", "b1"), ("b1", "a0")),
}
"""Flows (initiator, target) that start together."""

GATHERS = tuple(64 * KIB << step for step in range(12))  # bytes of each rank, 64 KiB to 128 MiB


@dataclass(frozen=True)
class Scale:
    """How large a run is: a machine with GPUs, or a dry run on a host."""

    largest: int  # bytes of one descriptor
    total: int  # bytes of one transfer
    blocks: tuple[tuple[int, int], ...]  # (count, size) of a contention pattern's transfers
    pairs: int
    rounds: int  # in each of which all points are measured, in another order: a busy neighbour lasts longer than one
    repeat: int  # of each round
    warmup: int


GPU = Scale(
    256 * MIB,
    512 * MIB,
    ((512, 16 * KIB), (128, 256 * KIB), (16, 4 * MIB), (1, 256 * MIB)),
    pairs=PAIRS,
    rounds=3,
    repeat=3,
    warmup=1,
)


@dataclass(frozen=True)
class Variant:
    """One library as one kind of user runs it."""

    library: str  # "mooncake" or "nixl"
    name: str
    threads: int = 1  # that post; 0: one for each flow
    blocking: bool = False  # Mooncake: `batch_transfer_sync_*` instead of post and wait
    progress: bool = False  # NIXL: its progress thread
    workers: int = 0  # NIXL: `num_threads`
    beside: int = 0  # NIXL: its progress thread is bound so many processors after the posting thread's; 0: it roams
    busy: int = 0  # a stranger keeps the processor busy that is so many after the posting thread's; 0: there is none
    pairs: bool = True
    patterns: tuple[str, ...] = tuple(PATTERNS)


VARIANTS = (
    Variant("mooncake", "async"),
    Variant("mooncake", "sync", threads=0, blocking=True),
    Variant("nixl", "off"),
    Variant("nixl", "on4", progress=True, workers=4),
    Variant("nixl", "on0", progress=True, patterns=("one", "four")),
    Variant("nixl", "on8", progress=True, workers=8, patterns=("one", "four")),
    Variant("mooncake", "async2", threads=2, pairs=False, patterns=("four", "fan-out", "all-to-all")),
    Variant("mooncake", "async3", threads=3, pairs=False, patterns=("four", "fan-out", "all-to-all")),
)


@dataclass(frozen=True)
class Point:
    """Transfers of *count* descriptors of *size* bytes each, one for each flow of *pattern*."""

    pattern: str
    operation: str  # "write" or "read"
    count: int
    size: int


def points(variant: Variant, scale: Scale) -> Iterator[Point]:
    """Yield the points of *variant*, pairs first."""
    if variant.pairs:
        drawn = [Point("one", op, *pair) for pair in pairs(scale) for op in ("write", "read")]
        random.Random(f"{SEED} order {variant.library} {variant.name}").shuffle(drawn)
        yield from drawn
    for pattern in variant.patterns:
        for count, size in scale.blocks:
            yield Point(pattern, "write", count, size)


def pairs(scale: Scale) -> list[tuple[int, int]]:
    """Return (count, size): the corners, and others at random, uniform in their logarithms below the total."""
    draw = random.Random(f"{SEED} pairs")
    most = min(DESCRIPTORS, scale.total // (4 * KIB))
    shapes = [(1, 4 * KIB), (most, 4 * KIB), (1, scale.largest), (scale.total // scale.largest, scale.largest)]
    while len(shapes) < scale.pairs + 4:
        count = round(math.exp(draw.uniform(0.0, math.log(most))))
        size = 4 * KIB * round(math.exp(draw.uniform(0.0, math.log(scale.largest / (4 * KIB)))))
        if count * size <= scale.total:
            shapes.append((count, size))
    return list(dict.fromkeys(shapes))


def fingerprint(scale: Scale) -> str:
    """Return a hash of all points of all variants."""
    plain = [(asdict(variant), [asdict(point) for point in points(variant, scale)]) for variant in VARIANTS]
    return hashlib.sha256(json.dumps([plain, GATHERS]).encode()).hexdigest()[:16]


FIELDS = ("section", "library", "variant", "pattern", "operation", "descriptors", "size", "flow", "total", "device")
"""Columns of a prediction; *total* and *device*, of a gather, are in microseconds, as in a measurement."""

RANKS = 2
"""Ranks of an all-gather."""

GATHERED = {
    "plain": ("nccl", "plain"),
    "registered": ("nccl", "symmetric"),
    "symmetric": ("nccl_window", "symmetric"),
}
"""The collective of a mode, and the kind of memory, as the configuration has them."""

START = 1.0
"""Seconds after the start of a simulated job at which all flows start, when every rank has long been ready."""

MOST = max(len([flow for flow in flows if flow[0] == name]) for flows in PATTERNS.values() for name in PLACES)
"""Flows of one initiator, at most: so many threads has a rank that posts each from its own."""

WARM = 1e-3
"""Seconds before the start at which every initiator moves 4 KiB: copy engines are awake then, as in a turn's
turn."""

Key = tuple[str, ...]  # all columns but *flow* and the times


def words(variant: Variant) -> list[str]:
    """Return the words of a configuration that runs the bare library as *variant* does, as far as it is modelled."""
    if variant.library == "mooncake":  # a call that blocks costs what the two halves of the other way do
        return [
            *("backend=mooncake_nvlink", "calibration=mooncake_bare-2xh200"),
            f"backend.threads={variant.threads or MOST}",
        ]
    overrides = [
        "backend=nixl",
        "calibration=nixl_bare-2xh200",
        f"backend.options.progress_thread={str(variant.progress).lower()}",
    ]
    return [*overrides, f"backend.options.num_threads={variant.workers}"]


def predicted(hw: str) -> Iterator[tuple[str | int | float, ...]]:
    """Yield the rows of all variants and all-gathers on the machine that the word *hw* names."""
    for variant in VARIANTS:
        config = compose([hw, *words(variant), "experiment=transfer", "experiment.ranks=2"])
        pairs = sum(1 for _ in points(variant, GPU)) - len(variant.patterns) * len(GPU.blocks)
        for index, point in enumerate(points(variant, GPU)):
            section = "pair" if index < pairs else "contention"
            label = (section, variant.library, variant.name, point.pattern, point.operation, point.count, point.size)
            for flow, seconds in sorted(simulated(config, point).items()):
                yield (*label, flow, f"{seconds * 1e6:.3f}", "")
    for mode, (library, kind) in GATHERED.items():
        collective = compose([hw, f"collective={library}", "experiment=transfer", "experiment.ranks=2"]).collective
        assert collective is not None
        model = getattr(collective, kind)
        for size in GATHERS:
            device = model.on_device(RANKS, size)
            times = f"{(model.launch + device) * 1e6:.3f}", f"{device * 1e6:.3f}"
            for rank in range(RANKS):
                yield ("gather", "nccl", mode, "", "all-gather", 1, size, rank, *times)


def simulated(config: Config, point: Point) -> dict[int, float]:
    """Return the seconds from the common start to the end of each flow of *point*, by its number."""
    flows = PATTERNS[point.pattern]
    specs = []
    for name, gpu in PLACES.items():
        mine = [(number, target) for number, (initiator, target) in enumerate(flows) if initiator == name]
        work = {"flows": mine, "write": point.operation == "write", "count": point.count, "size": point.size}
        specs.append(RankSpec(name, f"{__name__}:_rank", Place(0, gpu), work))
    outcome = Model(config.hw, config.backend).run(specs)
    if errors := [result.error for result in outcome.ranks.values() if result.error]:
        raise SystemExit("\n".join(errors))
    records = [record for result in outcome.ranks.values() for record in result.transfers]
    return {int(record.label): record.seen - record.submitted for record in records if record.label != "warm"}


def _rank(rank: Rank, flows: Sequence[tuple[int, str]], write: bool, count: int, size: int) -> Program:
    slot = count * size
    region = rank.endpoint.register(rank.device.allocate(max(4096, 2 * slot * len(PLACES))), "kv")
    others = [name for name in PLACES if name != rank.name]
    for name in others:
        rank.channel.send(name, rank.endpoint.address())
    peers = {}
    for _ in others:
        message = yield rank.channel.receive()
        peers[message.sender] = rank.endpoint.connect(message.payload)
    yield rank.clock.timeout(START - WARM - rank.clock.now)
    for _, target in flows[:1]:
        one = np.zeros(1, np.int64)
        yield rank.endpoint.write(
            peers[target], Batch(region, peers[target].regions["kv"], one, one, one + 4096), label="warm"
        )
    yield rank.clock.timeout(START - rank.clock.now)
    order = np.arange(count, dtype=np.int64) * size
    posted = []
    for number, target in flows:
        there, post = peers[target].regions["kv"], rank.endpoint.write if write else rank.endpoint.read
        source, sink = (region, there) if write else (there, region)
        far = (len(PLACES) + number % len(PLACES)) * slot
        batch = Batch(source, sink, order + number * slot, order[::-1] + far, np.full(count, size, np.int64))
        posted.append(post(peers[target], batch, label=str(number)))
    for transfer in posted:  # noqa: UP028 SimPy sends the record back, which a list's iterator cannot take
        yield transfer
    yield rank.clock.timeout(10.0 * START)  # whoever ended earlier would be lost to the others


def write(to: Path, hw: str = "hw=2xh200") -> None:
    """Write all predictions to *to*, with what they were made with, and print the hash of the file."""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = f"python -m tools.probe predict {to} {hw}"
    with to.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# date: {made}\n# command: {command}\n# plan: {fingerprint(GPU)}\n# commit: {commit()}\n")
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        writer.writerows(predicted(hw))
    print(f"{to}: sha256 {hashlib.sha256(to.read_bytes()).hexdigest()}")


HEAD = (
    *("section", "library", "variant", "points", "mean %", "median %", "p95 %", "bias %", "spread %", "post-end %"),
)


def judge(predictions: Path, measurements: Path) -> None:
    """Print the errors of predictions by section and variant, beside the spread of repeats.

    A point's time is that from the start of its first flow to the end of its last, in the median of its repeats: it
    counts preparing, as the model's does; "post-end" leaves it out.
    """
    said, about = read(predictions)
    rows, where = read(measurements)
    if about.get("plan") != where.get("plan"):
        raise SystemExit(f"{measurements} has plan {where.get('plan')}, {predictions} has {about.get('plan')}")
    print(f"measured {where.get('date')} on {where.get('gpus')}, {where.get('host')}; {where.get('versions')}")
    model: dict[Key, float] = {}
    for row in said:
        model[_key(row)] = max(model.get(_key(row), 0.0), float(row["total"]))
        if row["device"]:
            model["device", *_key(row)[1:]] = float(row["device"])
    times, alone = measured(rows)
    print(("{:11}{:10}{:11}" + "{:>11}" * 7).format(*HEAD))
    groups: dict[Key, list[Key]] = defaultdict(list)
    for key in times:
        if key in model:
            groups[key[:3]].append(key)
    for group, keys in groups.items():
        errors = [100.0 * (model[key] / median(times[key]) - 1.0) for key in keys]
        bare = [100.0 * abs(model[key] / median(alone[key]) - 1.0) for key in keys]
        spread = [100.0 * (max(times[key]) - min(times[key])) / median(times[key]) for key in keys]
        sizes = sorted(map(abs, errors))
        p95 = quantiles(sizes, n=20)[-1] if len(sizes) > 1 else sizes[0]
        cells = (mean(sizes), median(sizes), p95, mean(errors), median(spread), median(bare))
        print("{:11}{:10}{:11}".format(*group) + f"{len(keys):11d}" + "".join(f"{cell:11.1f}" for cell in cells))


def measured(rows: Sequence[dict[str, str]]) -> tuple[dict[Key, list[float]], dict[Key, list[float]]]:
    """Return the microseconds of every repeat of a point: from its start, and from the end of preparing."""
    repeats: dict[tuple[Key, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        if row["note"]:
            print(f"note: {row['library']} {row['variant']} {row['pattern']}: {row['note']}")
        elif row["section"] != "host":
            repeats[_key(row), row["repeat"]].append(row)
    whole, alone = defaultdict(list), defaultdict(list)
    for (key, _), flows in repeats.items():
        end = max(float(row["total"]) for row in flows)
        whole[key].append(end - min(float(row["start"]) for row in flows))
        alone[key].append(end - min(float(row["prepare"]) for row in flows))
        if flows[0]["device"]:
            device = min(float(row["device"]) for row in flows)
            for times in (whole, alone):
                times["device", *key[1:]].append(device)
    return whole, alone


def _key(row: dict[str, str]) -> Key:
    return tuple(row[name] for name in FIELDS[:-3])


def read(path: Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the rows of a file, and what its comments say."""
    return tables.rows(path), dict(line.split(": ", 1) for line in tables.comments(path))


def samples(variants: Sequence[str], files: Sequence[Path], to: Path) -> None:
    """Write the pairs of *variants*, such as ``nixl/off``, in *files* to *to*: medians, and their mean over sets.

    Every second (count, size), in ascending order, is held out, writes and reads alike.
    """
    names = [tuple(each.split("/")) for each in variants]
    sets: dict[Key, list[list[float]]] = defaultdict(list)
    for file in files:
        for key, times in measured(read(file)[0])[0].items():
            if key[0] == "pair" and key[1:3] in names:
                sets[key[4:7]].append([time * 1e-6 for time in times])
    held = sorted({(int(count), int(size)) for _, count, size in sets})[1::2]
    rows = []
    for (operation, count, size), jobs in sorted(sets.items(), key=lambda item: (item[0][0] == "read", item[0])):
        medians = tuple(median(times) for times in jobs)
        low, high = np.percentile([time for times in jobs for time in times], (25.0, 75.0))
        rows.append(
            calibrated.Sample(
                blocks=int(count),
                size=int(size),
                operation=operation,
                layout="scattered",
                seconds=calibrated.mean(medians) if len(medians) > 1 else medians[0],
                low=float(low),
                high=float(high),
                repeats=sum(map(len, jobs)),
                per_job=medians if len(medians) > 1 else (),
                held=(int(count), int(size)) in held,
            )
        )
    about = read(files[0])[1]
    said = {
        "kind": "measured",
        "source": f"{', '.join(variants)} of tools.probe, the bare library",
        "command": f"python -m tools.probe samples {to} {' '.join((*variants, *map(str, files)))}",
        "host": about["host"],
        "gpus": about["gpus"],
        "versions": f"{about['versions']}, mooncake-transfer-engine-cuda13 0.3.14, nixl-cu13 1.5.1",
        "date": about["date"].split()[0],
    }
    calibrated.write(to, calibrated.Samples(rows, said))
    print(f"{to}: {len(rows)} samples, {sum(row.held for row in rows)} held out")


def main(words: Sequence[str]) -> None:
    """Run one of the three commands."""
    what, *rest = words or [""]
    if what == "samples" and len(rest) > 2:
        files = [Path(word) for word in rest[1:] if Path(word).is_file()]
        samples([word for word in rest[1:] if Path(word) not in files], files, Path(rest[0]))
    elif what == "predict" and rest:
        write(Path(rest[0]), *rest[1:])
    elif what == "judge" and len(rest) == 2:
        judge(Path(rest[0]), Path(rest[1]))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
