# SPDX-License-Identifier: Apache-2.0
"""Gather over groups of ranks: plain and symmetric memory, equal and padded pieces, pools reserved or grown.

The points of one number of ranks are one job; those whose pool grows are another.  Padded pieces are what context
parallelism gathers: sequences split in a zigzag over the ranks, each rank padded to the longest.  An all-gather
begins when the last rank calls and is over when the last rank sees its end.  Bandwidths are those of nccl-tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, NamedTuple

from experiments.jobs import Columns, combined, ended_by, microseconds, refuse, tabulated, unverified
from pdsim.config import Config, ExperimentOptions
from pdsim.core import plugins
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt, Size, format_size
from pdsim.kv.allgather import MEMORIES, zigzag
from pdsim.results.record import Metric, Result, percentile
from pdsim.transfer import TransferRecord
from pdsim.transfer.group import SYMMETRIC
from pdsim.transfer.job import Outcome, Place, RankSpec, Target


@dataclass(frozen=True, kw_only=True)
class AllgatherOptions(ExperimentOptions):
    """What to sweep over, and how each point is measured."""

    name: str = "allgather"
    ranks: Annotated[tuple[PositiveInt, ...], "non-empty"] = (2, 4, 8)  # that gather, a GPU each
    # bytes of each rank's piece
    size: tuple[Annotated[Size, "> 0"], ...] = (4096, 65536, 1 << 20, 16 << 20, 256 << 20)
    # symmetric: of the output, as SGLang; both: the input's, too
    pools: tuple[Annotated[str, "one of default, symmetric, both"], ...] = ("default", SYMMETRIC)
    # tokens of sequences, split over the ranks in a zigzag and padded
    batches: tuple[Annotated[tuple[PositiveInt, ...], "non-empty"], ...] = ((9, 9), (8192,), (4096, 77, 1000))
    row: Annotated[Size, "> 0"] = 2048  # bytes of a token: K or V of eight heads of 128 bf16 numbers
    growth: bool = True  # also with a symmetric pool that grows at run time
    repeat: PositiveInt = 20  # measured all-gathers of each point
    warmup: NotNegativeInt = 5  # all-gathers of each point before that
    verify: bool = True  # compare contents, where memory has any

    def jobs(self) -> list[list[GatherPoint]]:
        """Return the points of each job in the order in which they are run."""
        jobs = []
        for ranks, reserved in product(self.ranks, (True, False) if self.growth else (True,)):
            pools = self.pools if reserved else [pool for pool in self.pools if pool != "default"]
            padded = [(zigzag(batch, ranks).longest * self.row, tuple(batch)) for batch in self.batches]
            pieces = [*((size, ()) for size in self.size), *padded]
            points = [
                GatherPoint(ranks, size, pool, batch, reserved) for (size, batch), pool in product(pieces, pools)
            ]
            jobs += [points] if points else []
        return jobs


def check(config: Config) -> Iterator[str]:
    """Yield each problem: more ranks than GPUs, no collectives or library, too small a pool or memory.

    Memory is checked for the point that needs most of it: a source, a target and the reserved pool on one rank.
    """
    options, hw = AllgatherOptions.of(config), config.hw
    gpus, most = hw.gpus * hw.nodes, max(options.ranks)
    if config.collective is None:
        yield "experiment=allgather needs collectives; set collective=nccl, or gloo on hosts"
        return
    problem = plugins.missing(plugins.COLLECTIVES, config.collective.implementation)
    if config.target == "real" and problem:
        yield f"collective={config.collective.name} {problem}"
    if gpus and most > gpus:
        yield (
            f"experiment.ranks={most}: each takes a GPU and hw={hw.name} has {gpus}; set "
            f"experiment.ranks={gpus} or less, or take a larger machine"
        )
    room = hw.gpu.memory if hw.gpu is not None else hw.host.memory // most
    points = [point for job in options.jobs() for point in job]
    if not points:
        yield "nothing is gathered: experiment.pools has no value, or neither size nor batches has; give them one"
        return
    need = max((point.ranks + 1) * point.size for point in points)
    if config.collective.pool + 2 * need > room:
        yield (
            f"collective.pool={config.collective.pool} ({format_size(config.collective.pool)}) and buffers "
            f"of {need} bytes do not fit into the {room} that a rank has; lower collective.pool or experiment.size"
        )


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Run every job and return the rows of its points.  Raise a `ConfigError` if `check` yields a problem."""
    refuse(check(config))
    assert config.collective is not None
    options = AllgatherOptions.of(config)
    jobs = options.jobs()
    rows: list[GatherRow] = []
    outcomes: dict[str, Outcome] = {}
    for number, points in enumerate(jobs):
        name = f"{points[0].ranks} ranks{'' if points[0].reserved else ', growing'}"
        progress(number / len(jobs), name, (number + 1) / len(jobs))
        outcomes[name] = target.run(_specs(config, options, points))
        device = config.collective.timing == "device"
        rows += [_row(point, at, options.row, outcomes[name], device) for at, point in enumerate(points)]
    progress(1.0, "")
    return combined(
        outcomes,
        summary=_metrics(rows),
        tables=[tabulated("All-gathers", _COLUMNS, rows)],
        failures=(f"{row.point.label}: {row.checked - row.right} pieces are wrong" for row in rows if row.wrong),
        notes=unverified(config) if options.verify else [],
    )


def _specs(config: Config, options: AllgatherOptions, points: list[GatherPoint]) -> list[RankSpec]:
    assert config.collective is not None
    names = [f"rank{index}" for index in range(points[0].ranks)]
    symmetric = any(point.pool in MEMORIES for point in points)
    arguments = {
        "names": names,
        "points": [point._asdict() | {"label": point.label, "batch": list(point.batch)} for point in points],
        "pool": config.collective.pool if symmetric and points[0].reserved else 0,
        "row": options.row,
        "repeat": options.repeat,
        "warmup": options.warmup,
        "verify": options.verify,
    }
    program, gpus = "experiments.allgather.timed_gathers:measure", config.hw.gpus
    places = [Place(index // gpus, index % gpus) if gpus else Place() for index in range(len(names))]
    return [RankSpec(name, program, where, arguments) for name, where in zip(names, places, strict=True)]


class GatherPoint(NamedTuple):
    """One combination of what is swept over; *size* is what each rank gathers, padding included."""

    ranks: int
    size: int
    pool: str
    batch: tuple[int, ...]  # tokens of each sequence; none: equal pieces
    reserved: bool  # whether the symmetric pool was reserved before, not grown

    @property
    def label(self) -> str:
        """Such as ``"2 x 65536 default"``; the label of the point's records."""
        batch = f" batch {'+'.join(map(str, self.batch))}" if self.batch else ""
        return f"{self.ranks} x {self.size} {self.pool}{batch}{'' if self.reserved else ' grown'}"


@dataclass(frozen=True)
class GatherRow:
    """The results of one point."""

    point: GatherPoint
    row: int  # bytes of a token
    seconds: Sequence[float]  # of each all-gather, from the call of the last rank to its being seen by the last
    wire: Sequence[float]  # of each, from being begun to its end, of the rank that waited least
    checked: int
    right: int
    growths: int  # of the rank with the most: growing is collective, and all wait for it
    growth_seconds: float  # of the rank that waited longest
    error: str  # class of the error that ended the job

    @property
    def wrong(self) -> bool:
        """Whether contents differ from what was sent."""
        return self.right < self.checked

    @property
    def status(self) -> str:
        """``"ok"``, ``"corrupt"``, or the class of the error that ended the job."""
        return self.error or ("corrupt" if self.wrong else "ok")

    def rate(self, nbytes: int) -> float | None:
        """Return GB/s: *nbytes* over the median time."""
        median = percentile(self.seconds, 50.0)
        return nbytes / median / 1e9 if median else None

    @property
    def algorithmic(self) -> float | None:
        """GB/s of the bytes that each rank ends with, without padding."""
        return self.rate(sum(self.point.batch) * self.row or self.point.ranks * self.point.size)

    @property
    def bus(self) -> float | None:
        """GB/s of each rank's port in each direction, as in nccl-tests, with padding."""
        return self.rate(self.point.size * (self.point.ranks - 1))


def _row(point: GatherPoint, number: int, row: int, outcome: Outcome, device: bool) -> GatherRow:
    # The records of all ranks are put side by side, gather by gather; what some rank has no record of is left out.
    ranks = outcome.ranks.values()
    records = [[r for r in rank.transfers if r.label == point.label and r.status == "ok"] for rank in ranks]
    together = list(zip(*records, strict=False))  # all ranks' records of one all-gather
    points = [rank.value["points"][number] for rank in ranks if rank.value]
    checked, right = (sum(one[key] for one in points) for key in ("checked", "right"))
    return GatherRow(
        point=point,
        row=row,
        seconds=[_seconds(each, device) for each in together],
        wire=[min(record.completed - record.posted for record in each) for each in together],
        checked=checked,
        right=right,
        growths=max((one["growths"] for one in points), default=0),
        growth_seconds=max((one["growth_seconds"] for one in points), default=0.0),
        error=ended_by(outcome),
    )


def _seconds(each: Sequence[TransferRecord], device: bool) -> float:
    if device:  # times are the device's: of the rank that did not wait for others
        return min(record.seen - record.submitted for record in each)
    return max(record.seen for record in each) - max(record.submitted for record in each)


_MED = "median time of an all-gather, from the last rank's call until the last rank sees the end"
_BATCH = "tokens of the sequences that were split in a zigzag and padded; -: equal pieces"
_POOL = "symmetric: targets are registered with all ranks (both: sources, too); default: plain memory"
_ALG = "algorithmic bandwidth: bytes that each rank has in the end (padding not counted) / median time"
_BUS = "bus bandwidth: bytes that each rank's port carries each way / median time, as in nccl-tests"
_VERIFIED = "pieces or tokens with the right contents / those checked, on all ranks"
_COLUMNS: Columns[GatherRow] = {
    "ranks": ("ranks of the group", lambda row: row.point.ranks),
    "piece": ("bytes that each rank gives, padding included", lambda row: format_size(row.point.size)),
    "batch": (_BATCH, lambda row: "+".join(map(str, row.point.batch)) or "-"),
    "pool": (_POOL, lambda row: row.point.pool + ("" if row.point.reserved else ", grown")),
    "med us": (_MED, lambda row: microseconds(row.seconds, 50.0)),
    "q1": ("first quartile of that", lambda row: microseconds(row.seconds, 25.0)),
    "q3": ("third quartile of that", lambda row: microseconds(row.seconds, 75.0)),
    "wire us": (
        "median time from begin to end on the rank that waited least, without host time",
        lambda row: microseconds(row.wire, 50.0),
    ),
    "alg GB/s": (_ALG, lambda row: row.algorithmic),
    "bus GB/s": (_BUS, lambda row: row.bus),
    "growths": ("times that the symmetric pool grew during the point", lambda row: row.growths),
    "growth ms": ("longest stall of a rank by growth", lambda row: row.growth_seconds * 1e3),
    "verified": (_VERIFIED, lambda row: f"{row.right}/{row.checked}" if row.checked else "-"),
    "status": ("ok, corrupt, or the error that ended the job", lambda row: row.status),
}


def _metrics(rows: Sequence[GatherRow]) -> list[Metric]:
    return [
        Metric("points", len(rows), "points that were run"),
        Metric("points_failed", sum(row.status != "ok" for row in rows), "points whose status is not ok"),
        Metric("gathers", sum(len(row.seconds) for row in rows), "measured all-gathers"),
        Metric("checked", sum(row.checked for row in rows), "pieces and tokens whose contents were checked"),
        Metric("right", sum(row.right for row in rows), "of them, those with the right contents"),
        Metric("growths", sum(row.growths for row in rows), "growths of symmetric pools at run time"),
        Metric("growth_s", sum(row.growth_seconds for row in rows), "for how long ranks were stalled by them"),
    ]
