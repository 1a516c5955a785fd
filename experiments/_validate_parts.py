"""What `experiments.validate` runs: other experiments, on points that no calibration has seen; and their quantities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments._transfer_layout import flows, names
from experiments._transfer_points import COLUMNS, Point, read
from pdsim.calibration import jobs
from pdsim.calibration.validate import Value
from pdsim.config import Config
from pdsim.results.record import Result
from pdsim.transfer import TransferRecord
from pdsim.units import Size

__all__ = ["CLASSES", "Design", "Part", "mean", "parts", "values"]

CLASSES = ("pair", "read", "contention", "handoff", "allgather", "serve")


@dataclass(frozen=True, kw_only=True)
class Design:
    """Which points are run: the part of `experiments.validate.Options` that says so."""

    classes: tuple[str, ...] = CLASSES
    size: tuple[Size, ...] = (12288, 98304, 786432, 6291456, 50331648)
    blocks: tuple[int, ...] = (1, 5, 37, 290, 1700)
    limit: Size = 1 << 29  # bytes of a transfer, most
    patterns: tuple[str, ...] = ("pairs:2", "bidirectional", "incast:2", "fanout:2", "cross:2x2", "alltoall:4")
    contended: tuple[Size, ...] = (98304, 6291456)
    contended_blocks: tuple[int, ...] = (1, 37)
    tokens: tuple[int, ...] = (512, 2048, 8192)
    tp: tuple[str, ...] = ("1to2", "2to1", "2to2")
    pieces: tuple[Size, ...] = (12288, 786432, 50331648)
    points: str = ""
    repeat: int = 20
    volume: Size = 4 << 30
    placement: tuple[str, ...] = ("packed",)
    jobs: int = 9  # of transfers and of all-gathers: how often their ranks are started anew; the mean of them counts


class Part(NamedTuple):
    """One experiment of the design, with its options."""

    experiment: str
    options: Mapping[str, Any]

    def config(self, config: Config) -> Config:
        """Return *config* with this experiment."""
        return replace(config, experiment={"name": self.experiment, **self.options})

    def problems(self, config: Config) -> list[str]:
        """Return what keeps it from being run."""
        check = getattr(import_module(f"experiments.{self.experiment}"), "check", None)
        return list(check(self.config(config))) if check else []


def parts(config: Config, design: Design, folder: Path) -> Iterator[Part]:
    """Yield the parts of *design* that *config* has ranks for; their points are written to *folder*."""
    gpus = config.hw.gpus * config.hw.nodes
    if points := _points(design, gpus if design.placement[0] in ("packed", "spread") else 0):
        path = folder / "points.csv"
        lines = [",".join(COLUMNS), *(",".join(map(str, point)) for point in points)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        # as in `calibrate`: few repeats, for the median is what counts, by a rank that is warm; and no contents, which
        # take longer to fill and to compare than to transfer
        options = {"points": str(path), "repeat": design.repeat, "volume": design.volume, "warmup": 10}
        yield Part("transfer", options | {"placement": design.placement, "order": "shuffled", "verify": False})
    if "handoff" in design.classes:
        tokens = tuple(count for count in design.tokens if count < config.model.context)
        paths = ("sliced", "staged") if config.policy.staging else ("sliced",)
        ranks = max(sum(map(int, tp.split("to"))) for tp in design.tp)
        placement = "packed" if not gpus or gpus >= ranks else "sides"
        options = {"tokens": tokens, "tp": design.tp, "paths": paths, "repeat": max(4, design.repeat // 4)}
        yield Part("handoff", options | {"placement": placement, "verify": False})
    if "allgather" in design.classes and config.collective is not None and find_spec("experiments.allgather"):
        ranks_of = tuple(count for count in (2, 4, 8) if count <= (gpus or 2))
        options = {"ranks": ranks_of, "size": design.pieces, "growth": False, "repeat": design.repeat}
        yield Part("allgather", options | {"verify": False})
    if "serve" in design.classes:
        yield Part("serve", {})


def _points(design: Design, gpus: int) -> list[Point]:
    found = []
    for operation in [name for cls, name in (("pair", "write"), ("read", "read")) if cls in design.classes]:
        found += [
            Point("pair", blocks, size, 1, operation)
            for size in design.size
            for blocks in design.blocks
            if blocks * size <= design.limit
        ]
    for pattern in design.patterns if "contention" in design.classes else ():
        if gpus and len(names(flows(pattern, 4))) > gpus:
            continue
        sizes = [(blocks, size) for size in design.contended for blocks in design.contended_blocks]
        found += [Point(pattern, blocks, size, 1) for blocks, size in sizes if blocks * size <= design.limit]
    return found + (read(Path(design.points)) if design.points else [])


def mean(runs: Sequence[Sequence[Value]]) -> list[Value]:
    """Return the geometric mean over *runs*, a job each, of each quantity that all of them have."""
    found: dict[tuple[str, str, str], list[Value]] = {}
    for value in (value for run in runs for value in run):
        found.setdefault((value.group, value.label, value.quantity), []).append(value)
    every = [same for same in found.values() if len(same) == len(runs)]
    return [_mean(same) for same in every]


def _mean(same: Sequence[Value]) -> Value:
    each = tuple(value.value for value in same)
    if len(each) == 1 or min(each) <= 0:
        return same[0]
    return replace(same[0], value=jobs.mean(each), per_job=each)


# --- what is read of a result ---------------------------------------------------------------------------------------


def values(part: Part, result: Result) -> list[Value]:
    """Return the quantities of *result*, those of a point in which something failed left out."""
    if part.experiment == "transfer":
        return list(_of_transfers(result.transfers))
    if part.experiment == "handoff":
        return list(_of_handoffs(result))
    if part.experiment == "allgather":
        return list(_of_gathers(result))
    found = {metric.name: metric.value for metric in result.summary}
    wanted = [(name, found.get(f"{name}_p50_s")) for name in ("transfer", "ttft", "e2e")]
    return [Value("serve", f"median {name}", "time", 0, float(value)) for name, value in wanted if value]


def _of_transfers(records: Sequence[TransferRecord]) -> Iterator[Value]:
    """Yield the median time of every flow and, where a point has several, the rate of all together."""
    by_point: dict[str, dict[tuple[str, str], list[TransferRecord]]] = {}
    for record in records:
        by_point.setdefault(record.label, {}).setdefault((record.source, record.target), []).append(record)
    for label, by_flow in by_point.items():
        every = [record for flow in by_flow.values() for record in flow]
        if any(record.status != "ok" for record in every):
            continue
        group = label.split(":")[0].split(" ")[0] + (", read" if every[0].operation == "read" else "")
        for (source, target), mine in by_flow.items():
            name = f"{label}, {source} to {target}" if len(by_flow) > 1 else label
            time = float(np.median([record.seen - record.submitted for record in mine]))
            yield Value(group, name, "time", mine[0].nbytes, time)
        if len(by_flow) > 1:
            rate = sum(_rate(mine) for mine in by_flow.values())
            yield Value(f"{group}, total rate", label, "rate", every[0].nbytes, rate)


def _rate(flow: Sequence[TransferRecord]) -> float:
    """Return bytes/s of *flow* from its own first call to its own end: warm-ups end at times of their own."""
    seconds = max(record.seen for record in flow) - min(record.submitted for record in flow)
    return sum(record.nbytes for record in flow) / seconds


def _of_handoffs(result: Result) -> Iterator[Value]:
    for row in _rows(result, "Handoffs"):
        if row["status"] == "ok" and row["p50"]:
            group = f"handoff, {row['way'].split(' ')[1]}"
            yield Value(group, f"{row['way']} {row['tokens']} tokens", "time", int(row["bytes"]), row["p50"] * 1e-6)


def _of_gathers(result: Result) -> Iterator[Value]:
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    for row in _rows(result, "All-gathers"):
        if row["status"] == "ok" and row["med us"]:
            number, unit = str(row["piece"]).split(" ")
            label = f"{row['ranks']} ranks {row['piece']} {row['batch']} {row['pool']}"
            nbytes = int(float(number) * units[unit])
            yield Value(f"allgather, {row['pool']}", label, "time", nbytes, row["med us"] * 1e-6)


def _rows(result: Result, title: str) -> Iterator[dict[str, Any]]:
    for table in result.tables:
        if table.title == title:
            yield from (dict(zip(table.columns, row, strict=True)) for row in table.rows)
