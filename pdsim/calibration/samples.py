# SPDX-License-Identifier: Apache-2.0
"""Samples: which transfers to measure, how long each took, how far jobs are apart, and the CSV files that keep them.

With one count alone the cost of a call and of a descriptor are one number, with one size alone the cost of a
descriptor and of its bytes: so the grid is a cross, with points drawn at random between, which no fit sees.  A slow
host slows all repeats of a job alike.  So several jobs are run, and the geometric mean of their medians counts: a
job that is slow by a factor changes it by a root of that factor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pdsim.core import files
from pdsim.core.errors import ConfigError
from pdsim.core.units import positive
from pdsim.transfer import TransferRecord


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One point and the median of its repeats, in seconds; the quartiles are the median where the file has none.

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
    posting: float = 0.0  # of *seconds*, until the engine had taken all descriptors; 0 if unknown
    per_flow: tuple[float, ...] = ()  # the median of each flow, where there are several
    per_job: tuple[float, ...] = ()  # the median of each job, where there were several
    held: bool = False  # left out of the fit, by design
    memory: str = ""  # where the bytes are, "gpu" or "host"; empty: not said
    counted: bool = True  # whether *blocks* is known; some logs have the bytes alone
    bare: bool = False  # of a program that measures the wire alone, as perftest does

    def __post_init__(self) -> None:
        positive("sample", blocks=self.blocks, size=self.size, concurrency=self.concurrency, flows=self.flows)
        positive("sample", seconds=self.seconds, low=self.low, high=self.high)
        if not math.isfinite(max(self.seconds, self.low, self.high, self.posting, *self.per_job, *self.per_flow)):
            raise ValueError("sample: times must be finite")
        positive("sample", **{f"per_job[{index}]": seconds for index, seconds in enumerate(self.per_job)})


_NAMES = tuple(item.name for item in fields(Sample))


@dataclass(frozen=True)
class Samples:
    """All samples of a file, and its comments *about* them: kind, source and others."""

    rows: Sequence[Sample]
    about: Mapping[str, str] = field(default_factory=dict)


_LABEL = re.compile(r"(?P<pattern>\S+) (?P<blocks>\d+)x(?P<size>\d+) c(?P<concurrency>\d+)(?P<words>(?: \S+)*)")
_WORDS = {"read": "operation", "scattered": "layout"}


def from_transfers(runs: Iterable[Iterable[TransferRecord]], held: Sequence[str] = ()) -> list[Sample]:
    """Return a sample for each point of *runs* of ``experiment=transfer``, a job each, from their transfers.

    *held* are labels of points to hold out.  A transfer lasts from `TransferRecord.submitted` to `seen`; those that
    failed, and those whose label is not a `Cell.label`, count for nothing.  Samples come in the order in which their
    labels first occur.
    """
    by_flow: dict[str, dict[tuple[str, str], list[float]]] = {}
    by_job: dict[str, dict[int, list[float]]] = {}
    for job, transfers in enumerate(runs):
        for record in transfers:
            if record.status == "ok" and _LABEL.fullmatch(record.label):
                seconds = record.seen - record.submitted
                flows = by_flow.setdefault(record.label, {})
                flows.setdefault((record.source, record.target), []).append(seconds)
                by_job.setdefault(record.label, {}).setdefault(job, []).append(seconds)
    return [_sample(label, [*flows.values()], [*by_job[label].values()], label in held)
            for label, flows in by_flow.items()]  # fmt: skip


def _sample(label: str, flows: Sequence[Sequence[float]], jobs: Sequence[Sequence[float]], held: bool) -> Sample:
    match = _LABEL.fullmatch(label)
    assert match is not None
    where: dict[str, Any] = {_WORDS.get(word, "schedule"): word for word in match["words"].split()}
    where |= {name: int(match[name]) for name in ("blocks", "size", "concurrency")}
    every = [seconds for flow in flows for seconds in flow]
    low, high = (float(value) for value in np.percentile(every, (25.0, 75.0)))
    per_flow, per_job = (tuple(float(np.median(one)) for one in of) for of in (flows, jobs))
    return Sample(
        pattern=match["pattern"],
        flows=len(flows),
        seconds=geometric_mean(per_job) if len(jobs) > 1 else per_job[0],
        low=low,
        high=high,
        repeats=len(every),
        per_flow=per_flow if len(flows) > 1 else (),
        per_job=per_job if len(jobs) > 1 else (),
        held=held,
        **where,
    )


def write(path: Path, samples: Samples) -> None:
    """Write *samples* to the CSV file *path*: what is about them as comments, then one row each, all digits."""
    rows = ([_text(getattr(row, name)) for name in _NAMES] for row in samples.rows)
    files.write_table(path, _NAMES, rows, samples.about)


def read(path: Path) -> Samples:
    """Return the samples of the CSV file *path*, as `write` leaves it; columns with a default may be missing.

    Raise a `ConfigError` that names the row if it holds what cannot be.
    """
    about, rows = files.table(path, f"name a CSV file of samples, with the columns {', '.join(_NAMES)}")
    return Samples([_parsed(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)], about)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_text, value))
    return f"{value:.9g}" if isinstance(value, float) else str(int(value) if isinstance(value, bool) else value)


def _parsed(row: Mapping[str, str], where: str) -> Sample:
    given: dict[str, Any] = {name: text for name, text in row.items() if name in _NAMES and text}
    given |= {name: given[name].split() for name in ("per_flow", "per_job") if name in given}
    median = {name: given["seconds"] for name in ("low", "high") if "seconds" in given}
    try:
        return msgspec.convert(median | given, Sample, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}; correct or delete the row") from error


@dataclass(frozen=True)
class Floor:
    """The errors of a class of points that differing jobs alone cause: relative, 0.01 is 1 %.

    With a spread s between jobs, the mean of *jobs* of them is s / sqrt(jobs) off the mean of any number: no
    deterministic model can be expected to come closer.
    """

    jobs: int  # of a point, least
    apart: float  # median distance of a job's median from the mean of the others
    median: float  # of the absolute error that is left
    p95: float  # its 95th percentile


def floor(points: Iterable[Sequence[float]]) -> Floor | None:
    """Return the floor for *points*, each with the medians of its jobs; those of one job tell nothing.

    With J jobs, m_j the logarithm of a median and m their mean, the sum of (m_j - m)^2 / J is (J - 1) / J s^2 in
    expectation, so that |m_j - m| / sqrt(J - 1) has the size s / sqrt(J) of the error of a mean of J.  None without
    several jobs.

    >>> two = floor([(1.0, 1.21)])
    >>> two.jobs, round(two.median, 4)  # log(1.21) / 2, from the mean of both
    (2, 0.0953)
    """
    several = [np.log(medians) for medians in points if len(medians) > 1]
    if not several:
        return None
    away = [np.abs(logs - logs.mean()) for logs in several]
    left = np.concatenate([by / np.sqrt(len(by) - 1) for by in away])
    apart = np.concatenate([by * len(by) / (len(by) - 1) for by in away])  # from the mean of the others
    median, p95 = np.percentile(left, (50.0, 95.0))
    return Floor(min(map(len, several)), float(np.median(apart)), float(median), float(p95))


SMALLEST = 4 << 10
SIZES = tuple(SMALLEST << power for power in range(17))  # to 256 MiB
COUNTS = tuple(1 << power for power in range(13))  # 1 to 4096
AT = (4 << 10, 64 << 10, 256 << 10, 1 << 20)
LONG = tuple((count, 4 << 20) for count in (2, 8, 32))  # nearly all bytes: what tells a rate from posting
CROWDS = ((1, 4 << 10), (1, 1 << 20), (1, 16 << 20), (16, 64 << 10), (256, 16 << 10))

DRAWS = 1000  # of points for each to be held out: of those that fit few are small, and there may be none
MOST, CHEAP = 50, 20e-3  # repeats that are enough for any point, and seconds that those beyond the least may take


class Cell(NamedTuple):
    """A point of ``experiment=transfer``: the columns of its file of points."""

    pattern: str
    blocks: int
    size: int
    concurrency: int
    operation: str

    @property
    def label(self) -> str:
        """The label of its transfers.

        >>> Cell("pair", 16, 65536, 1, "read").label
        'pair 16x65536 c1 read'
        """
        words = f"{self.pattern} {self.blocks}x{self.size} c{self.concurrency}"
        return words if self.operation == "write" else f"{words} {self.operation}"


def grid(operation: str, largest: int, held: int, seed: int) -> tuple[list[Cell], list[Cell]]:
    """Return the points to fit and *held* others to hold out; none moves more than *largest* bytes at a time.

    Those to hold out are drawn log-uniformly from *seed*, of 1 to 4096 descriptors of 4 KiB to 256 MiB, and not of
    the grid.  Raise a `ConfigError` if there are not so many.
    """
    shapes = [(1, size, 1) for size in SIZES]
    shapes += [(count, size, 1) for size in AT for count in COUNTS] + [(*few, 1) for few in LONG]
    shapes += [(count, size, crowd) for count, size in CROWDS for crowd in (2, 4)]
    cells = {
        Cell("pair", n, size, crowd, operation): None for n, size, crowd in shapes if n * size * crowd <= largest
    }
    random = np.random.Generator(np.random.PCG64([seed, 2]))
    left: dict[Cell, None] = {}
    for _ in range(DRAWS * held):
        if len(left) == held:
            break
        blocks, size = (round(2.0 ** random.uniform(0.0, top)) for top in (12.0, 18.0))
        cell = Cell("pair", blocks, SMALLEST * size // 4, 1, operation)
        if cell.size >= SMALLEST and blocks * cell.size <= largest and cell not in cells:
            left[cell] = None
    if len(left) < held:
        few = f"of {largest} bytes or fewer the grid leaves {len(left)} points"
        raise ConfigError(f"--held {held}: {few}; lower --held, or raise --largest")
    return list(cells), list(left)


def reads(largest: int, left: Iterable[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Return the reads to fit beside the writes of `grid`, and every other of those that it *left* out, as reads."""
    # counts also where it turns from posting to the wire
    shapes = [(1, size) for size in SIZES[::2]] + [(count, size) for size in AT for count in COUNTS[2::2]]
    cells = [Cell("pair", n, size, 1, "read") for n, size in shapes if n * size <= largest]
    return cells, [cell._replace(operation="read") for cell in list(left)[::2]]


def of_host(operation: str) -> list[Cell]:
    """Return 20 points that posting dominates, of half a MiB each or less but four: they tell hosts apart.

    >>> len(of_host("write"))
    20
    """
    shapes = [(1 << power, size) for size in AT[:2] for power in (0, 1, 2, 3, 4, 5, 6, 8, 10)] + [
        (1, AT[3]),
        (4, AT[3]),
    ]
    return [Cell("pair", count, size, 1, operation) for count, size in shapes]


def repeats(cell: Cell, least: int) -> int:
    """Return how often to repeat *cell*: *least* times or, where they are quick, as often as `CHEAP` allows."""
    call, descriptor, rate = 50e-6, 3e-6, 100e9  # assumed: about what engines between GPUs take
    one = call + cell.blocks * descriptor + cell.blocks * cell.size / rate
    return max(least, min(MOST, int(CHEAP / one / _crowd(cell))))


def _crowd(cell: Cell) -> int:
    return 2 * cell.concurrency if cell.concurrency > 1 else 1  # at most half of them begin or end the crowd


def write_points(path: Path, cells: Iterable[Cell], repeat: int) -> None:
    """Write *cells* as a file of points to be repeated *repeat* times or more, crowds until they are in full swing.

    CSV, with the columns of `Cell` and ``repeat``; ``experiment=transfer experiment.points=FILE`` reads it.
    """
    rows = ((*cell, repeats(cell, repeat) * _crowd(cell)) for cell in cells)
    files.write_table(path, (*Cell._fields, "repeat"), rows, option="output=")
