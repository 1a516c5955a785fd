# SPDX-License-Identifier: Apache-2.0
"""Samples: how long a transfer of a certain kind took, and the CSV files that keep them.

The columns that say what was transferred are those of the points of ``experiment=transfer``, so that a file of
samples can be measured again as it is: ``experiment.points=FILE``.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from pdsim.calibration import noise_floor
from pdsim.core.errors import ConfigError
from pdsim.core.units import positive
from pdsim.transfer import TransferRecord

__all__ = ["Sample", "Samples", "from_transfers", "read", "write"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One point and the median of its repeats, in seconds; the quartiles are the median where nobody told them.

    Of several jobs it is the mean of their medians that counts: `pdsim.calibration.noise_floor`.

    Raise a `ValueError` for counts or times that are not positive, or times that are not finite.
    """

    pattern: str = "pair"
    blocks: int  # descriptors of a transfer
    size: int  # bytes of a descriptor
    concurrency: int = 1  # transfers in flight on each flow
    operation: str = "write"
    layout: str = "contiguous"
    schedule: str = "free"
    flows: int = 1
    queues: int = 0  # queue pairs that the bench says it used; 0 if it does not say
    seconds: float  # of one transfer, from the call to its completion seen
    low: float  # first quartile
    high: float  # third quartile
    repeats: int = 0  # transfers; 0 if unknown
    per_flow: tuple[float, ...] = ()  # the median of each flow, where there are several
    per_job: tuple[float, ...] = ()  # the median of each job, where there were several
    held: bool = False  # left out of the fit, by design

    def __post_init__(self) -> None:
        positive("sample", blocks=self.blocks, size=self.size, concurrency=self.concurrency, flows=self.flows)
        positive("sample", seconds=self.seconds, low=self.low, high=self.high)
        if not math.isfinite(max(self.seconds, self.low, self.high, *self.per_job, *self.per_flow)):
            raise ValueError("sample: times must be finite")
        positive("sample", **{f"per_job[{index}]": seconds for index, seconds in enumerate(self.per_job)})

    @property
    def key(self) -> tuple[Any, ...]:
        """What was transferred: samples of one key are of one configuration."""
        where = self.pattern, self.operation, self.layout, self.schedule, self.flows, self.queues
        return (*where, self.blocks, self.size, self.concurrency)


@dataclass(frozen=True)
class Samples:
    """All samples of a file, and what it says *about* them: kind, source, and whatever else."""

    rows: Sequence[Sample]
    about: Mapping[str, str] = field(default_factory=dict)


_LABEL = re.compile(r"(\S+) (\d+)x(\d+) c(\d+)((?: \S+)*)")
_WORDS = {"read": "operation", "scattered": "layout"}


def from_transfers(runs: Iterable[Iterable[TransferRecord]], held: Sequence[str] = ()) -> list[Sample]:
    """Return a sample for each point of *runs* of ``experiment=transfer``, a job each, from their transfers.

    *held* are labels of points to hold out.  Transfers that failed, and those of warm-up, count for nothing; a point
    of which all failed has no sample.

    A transfer lasts from `TransferRecord.submitted` to `seen`.  Its label is as
    `pdsim.calibration.sample_grid.Cell.label` has it; records with other labels are left out.  Samples come in the
    order in which their labels first occur.
    """
    points: dict[str, dict[tuple[str, str], list[float]]] = {}
    by_job: dict[str, dict[int, list[float]]] = {}
    for job, transfers in enumerate(runs):
        for record in transfers:
            if record.status == "ok" and _LABEL.fullmatch(record.label):
                seconds = record.seen - record.submitted
                flows = points.setdefault(record.label, {})
                flows.setdefault((record.source, record.target), []).append(seconds)
                by_job.setdefault(record.label, {}).setdefault(job, []).append(seconds)
    return [
        _sample(label, list(flows.values()), list(by_job[label].values()), label in held)
        for label, flows in points.items()
    ]


def _sample(label: str, flows: Sequence[Sequence[float]], by_job: Sequence[Sequence[float]], held: bool) -> Sample:
    match = _LABEL.fullmatch(label)
    assert match is not None
    pattern, blocks, size, concurrency, words = match.groups()
    unusual: dict[str, Any] = {_WORDS.get(word, "schedule"): word for word in words.split()}
    every = [seconds for flow in flows for seconds in flow]
    low, high = (float(value) for value in np.percentile(every, (25.0, 75.0)))
    medians = tuple(float(np.median(job)) for job in by_job)
    return Sample(
        pattern=pattern,
        blocks=int(blocks),
        size=int(size),
        concurrency=int(concurrency),
        flows=len(flows),
        seconds=noise_floor.mean(medians) if len(medians) > 1 else medians[0],
        low=low,
        high=high,
        repeats=len(every),
        per_flow=tuple(float(np.median(flow)) for flow in flows) if len(flows) > 1 else (),
        per_job=medians if len(medians) > 1 else (),
        held=held,
        **unusual,
    )


def write(path: Path, samples: Samples) -> None:
    """Write *samples* to the CSV file *path*: what is about them as comments, then one row each, all digits."""
    text = io.StringIO()
    for key, value in samples.about.items():
        text.write(f"# {key}: {value}\n")
    names = [item.name for item in fields(Sample)]
    table = csv.writer(text, lineterminator="\n")
    table.writerow(names)
    for row in samples.rows:
        table.writerow([_text(getattr(row, name)) for name in names])
    temporary = path.with_name(f"{path.name}.part")
    try:
        temporary.write_text(text.getvalue(), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> Samples:
    """Return the samples of the CSV file *path*, as `write` leaves it; columns with a default may be missing.

    Raise a `ConfigError` that names the row if it holds what cannot be.

    Lines ``# key: value`` before the table are what the file says about itself.  A missing *low* or *high* is the
    median.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {why}; name a CSV file of samples") from error
    about = dict(
        line[1:].strip().split(": ", 1) for line in lines if line.startswith("#") and ": " in line[1:].strip()
    )
    if not rows:
        raise ConfigError(
            f"{path} has no samples; it needs the columns {', '.join(item.name for item in fields(Sample))}"
        )
    return Samples([_parsed(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)], about)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, bool):
        return str(int(value))
    return " ".join(_text(item) for item in value) if isinstance(value, tuple) else str(value)


def _parsed(row: Mapping[str, str], where: str) -> Sample:
    kinds = {item.name: item.type for item in fields(Sample)}
    try:
        found = {name: _value(str(kinds[name]), text) for name, text in row.items() if name in kinds and text}
        found.setdefault("low", found["seconds"])
        found.setdefault("high", found["seconds"])
        return Sample(**found)
    except KeyError as error:
        raise ConfigError(f"{where} has no {error}; give every column that has no default") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}; correct or delete the row") from error


def _value(kind: str, text: str) -> Any:
    # A tuple is written with blanks between its numbers.
    if kind == "bool":
        return text == "1"
    if kind.startswith("tuple"):
        return tuple(float(word) for word in text.split())
    return {"int": int, "float": float, "str": str}[kind](text)


def hold_out(rows: Iterable[Sample], held: Iterable[Sample]) -> list[Sample]:
    """Return *rows* with those marked that are of the configuration of one of *held*.

    A configuration is `Sample.key`.  Rows that were marked already stay so.
    """
    keys = {row.key for row in held}
    return [replace(row, held=row.held or row.key in keys) for row in rows]
