# SPDX-License-Identifier: Apache-2.0
"""The points of `experiments.transfer`: what is swept over, from options or from a file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.transfer.exchange import SCHEDULES, Task
from experiments.transfer.rank_places import Flow, check_pattern, flows
from pdsim.core.units import parse_size

__all__ = ["COLUMNS", "TransferPoint", "read", "shuffled", "write"]

OPERATIONS = ("write", "read")
LAYOUTS = ("contiguous", "scattered")
ROTATED = "-rotated"


class TransferPoint(NamedTuple):
    """One combination of what is swept over.

    >>> TransferPoint("pair", 64, 65536, 1, operation="read").label
    'pair 64x65536 c1 read'
    """

    pattern: str
    blocks: int
    size: int
    concurrency: int
    operation: str = "write"
    layout: str = "contiguous"
    schedule: str = "free"  # of `SCHEDULES`, perhaps with "-rotated"
    repeat: int = 0  # 0: as the experiment says

    @property
    def label(self) -> str:
        """Such as ``"pair 64x65536 c1"``, with what is not usual behind it; the label of the point's transfers."""
        usual = TransferPoint._field_defaults
        unusual = [self.operation, self.layout, self.schedule]
        words = [w for w, name in zip(unusual, ("operation", "layout", "schedule"), strict=True) if w != usual[name]]
        return " ".join([f"{self.pattern} {self.blocks}x{self.size} c{self.concurrency}", *words])

    def check(self) -> None:
        """Raise a `ValueError` that names the option and the value that cannot be."""
        check_pattern(self.pattern)
        for name, least in (("blocks", 1), ("size", 1), ("concurrency", 1), ("repeat", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"experiment.{name} must be >= {least}, got {getattr(self, name)}")
        schedules = (*SCHEDULES, *(f"{name}{ROTATED}" for name in SCHEDULES))
        for name, allowed in (("operation", OPERATIONS), ("layout", LAYOUTS), ("schedule", schedules)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"experiment.{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )

    def flows(self, ranks: int) -> list[Flow]:
        """Return the flows of the point, in the order in which a source posts them."""
        return flows(self.pattern, ranks, self.schedule.endswith(ROTATED))

    def task(self, ranks: int) -> Task:
        """Return what the ranks are told."""
        return Task(
            label=self.label,
            flows=[list(flow) for flow in self.flows(ranks)],
            blocks=self.blocks,
            size=self.size,
            concurrency=self.concurrency,
            repeat=self.repeat,
            read=self.operation == "read",
            scattered=self.layout == "scattered",
            schedule=self.schedule.removesuffix(ROTATED),
        )


COLUMNS = TransferPoint._fields
"""The columns of a file of points; those with a default may be left out, others are ignored."""


def read(path: Path) -> list[TransferPoint]:
    """Return the points of the CSV file *path*, whose first line names its columns: see `COLUMNS`.

    Raise a `ValueError` if it cannot be read, lacks a column, or holds what cannot be, with the number of the line.

    Lines that begin with ``#`` are comments.  Sizes may have units, ``64KiB``.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    except OSError as error:
        raise ValueError(f"experiment.points={path}: {error.strerror}; name a CSV file of points") from error
    points = [_point(row, f"experiment.points={path}, row {number}") for number, row in enumerate(rows, 1)]
    if not points:
        raise ValueError(f"experiment.points={path} has no points; it needs the columns {', '.join(COLUMNS)}")
    return points


def write(path: Path, points: Sequence[TransferPoint]) -> None:
    """Write *points* to the CSV file *path*, as `read` takes it."""
    lines = [",".join(COLUMNS), *(",".join(map(str, point)) for point in points)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _point(row: dict[str, str], where: str) -> TransferPoint:
    words = {name: text for name, text in row.items() if name in COLUMNS and text}
    numbers = {name: text for name, text in words.items() if name in ("blocks", "size", "concurrency", "repeat")}
    try:
        sizes = {name: parse_size(text) for name, text in numbers.items()}
        point = TransferPoint(**words | sizes)  # type: ignore[arg-type]
        point.check()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return point


def shuffled(points: Sequence[TransferPoint], seed: int) -> list[TransferPoint]:
    """Return *points* in an order drawn from *seed*, so that a drift of the machine is no trend of the points.

    A permutation, so each point is run once; equal seeds give equal orders.
    """
    order: Iterable[int] = np.random.Generator(np.random.PCG64([seed, 1])).permutation(len(points))
    return [points[index] for index in order]
