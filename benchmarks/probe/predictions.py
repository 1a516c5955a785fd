# SPDX-License-Identifier: Apache-2.0
"""What the model says for every point of the probe, and how far measurements are from it."""

from __future__ import annotations

import csv
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median, quantiles

import numpy as np

from benchmarks.probe.gathers import RANKS
from benchmarks.probe.measuring import provenance
from benchmarks.probe.plan import GATHERS, GPU, PATTERNS, PLACES, VARIANTS, Point, Variant, points
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Program
from pdsim.transfer.job import Place, Rank, RankSpec

FIELDS = ("section", "library", "variant", "pattern", "operation", "descriptors", "size", "flow", "total", "device")
"""Columns of a prediction; *total* and *device*, of a gather, are in microseconds, as in a measurement."""

GATHERED = {
    "plain": ("nccl", "plain"),
    "registered": ("nccl", "symmetric"),
    "symmetric": ("nccl_window", "symmetric"),
}
"""Each of `gathers.MODES` as the configuration has it: the collective, and the kind of memory."""

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
    found = [
        "backend=nixl",
        "calibration=nixl_bare-2xh200",
        f"backend.options.progress_thread={str(variant.progress).lower()}",
    ]
    return [*found, f"backend.options.num_threads={variant.workers}"]


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
    """Exchange addresses with everybody, then post all *flows* at the instant of the start."""
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


def write(to: Path, hw: str) -> None:
    """Write all predictions to *to*, with what they were made with, and print the hash of the file."""
    with to.open("w", newline="", encoding="utf-8") as file:
        about = provenance(GPU, "these")
        for key in ("date", "command", "plan", "commit"):
            file.write(f"# {key}: {about[key]}\n")
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
    found, where = read(measurements)
    if about.get("plan") != where.get("plan"):
        raise SystemExit(f"{measurements} has plan {where.get('plan')}, {predictions} has {about.get('plan')}")
    print(f"measured {where.get('date')} on {where.get('gpus')}, {where.get('host')}; {where.get('versions')}")
    model: dict[Key, float] = {}
    for row in said:
        model[_key(row)] = max(model.get(_key(row), 0.0), float(row["total"]))
        if row["device"]:
            model["device", *_key(row)[1:]] = float(row["device"])
    times, alone = measured(found)
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


def measured(found: Sequence[dict[str, str]]) -> tuple[dict[Key, list[float]], dict[Key, list[float]]]:
    """Return the microseconds of every repeat of a point: from its start, and from the end of preparing."""
    repeats: dict[tuple[Key, str], list[dict[str, str]]] = defaultdict(list)
    for row in found:
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
    lines = path.read_text(encoding="utf-8").splitlines()
    about = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    return list(csv.DictReader(line for line in lines if not line.startswith("# "))), about
