# SPDX-License-Identifier: Apache-2.0
"""From the outcomes of the jobs of `experiments.allgather` to its rows and metrics.

Times are of the group and not of a rank: an all-gather begins when the last rank calls and is over
when the last rank sees its end, so that what ranks wait for each other counts for nothing.
Bandwidths have the names and the definitions of nccl-tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.jobs import ended_by
from pdsim.core.units import format_size
from pdsim.kv.allgather import zigzag
from pdsim.results.record import Metric, Table, percentile
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Outcome

__all__ = ["GatherPoint", "GatherRow", "metrics", "padded_size", "rows", "table"]


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
    """What one point gave: times of each all-gather, contents that were checked, growth of pools.

    *seconds* and *wire* have one number for each measured all-gather.  *engine* names library and
    kind of memory.  *growths* and *growth_seconds* are those of the rank with the most: growing is
    collective, and all wait for it.  *status* is "ok", "corrupt", or the class of the error that
    ended the job.
    """

    point: GatherPoint
    row: int  # bytes of a token
    seconds: Sequence[float]  # of each all-gather, from the call of the last rank to its being seen by the last
    wire: Sequence[float]  # of each, from being begun to its end, of the rank that waited least
    engine: str
    checked: int
    right: int
    growths: int
    growth_seconds: float  # of the rank that waited longest
    status: str

    @property
    def payload(self) -> int:
        """Bytes that each rank has in the end, padding not counted."""
        return sum(self.point.batch) * self.row if self.point.batch else self.point.ranks * self.point.size

    @property
    def algorithmic(self) -> float | None:
        """GB/s: `payload` over the median time."""
        median = percentile(self.seconds, 50.0)
        return self.payload / median / 1e9 if median else None

    @property
    def bus(self) -> float | None:
        """GB/s that each rank's port carried each way: as nccl-tests, padding counted."""
        median, point = percentile(self.seconds, 50.0), self.point
        return point.size * (point.ranks - 1) / median / 1e9 if median else None


def rows(points: Sequence[GatherPoint], row: int, outcome: Outcome, *, device: bool = False) -> list[GatherRow]:
    """Return the rows of *points*, which one job with *outcome* has measured in this order."""
    return [_row(point, number, row, outcome, ended_by(outcome), device) for number, point in enumerate(points)]


def _row(point: GatherPoint, number: int, row: int, outcome: Outcome, status: str, device: bool) -> GatherRow:
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
        engine=together[0][0].engine if together else "",
        checked=checked,
        right=right,
        growths=max((one["growths"] for one in points), default=0),
        growth_seconds=max((one["growth_seconds"] for one in points), default=0.0),
        status=status or ("corrupt" if right < checked else "ok"),
    )


def _seconds(each: Sequence[TransferRecord], device: bool) -> float:
    # With *device* their times are the device's, and those of the rank that did not wait for others
    # count.
    if device:  # of the rank that did not wait for others
        return min(record.seen - record.submitted for record in each)
    return max(record.seen for record in each) - max(record.submitted for record in each)


def table(gathers: Sequence[GatherRow]) -> Table:
    """Return the table of all rows."""
    columns = {
        "ranks": "ranks of the group",
        "piece": "bytes that each rank gives, padding included",
        "batch": "tokens of the sequences that were split in a zigzag and padded; -: equal pieces",
        "pool": "symmetric: targets are registered with all ranks (both: sources, too); default: plain memory",
        "med us": "median time of an all-gather, from the last rank's call until the last rank sees the end",
        "q1": "first quartile of that",
        "q3": "third quartile of that",
        "wire us": "median time from begin to end on the rank that waited least, without host time",
        "alg GB/s": "algorithmic bandwidth: bytes that each rank has in the end (padding not counted) / median time",
        "bus GB/s": "bus bandwidth: bytes that each rank's port carries each way / median time, as in nccl-tests",
        "growths": "times that the symmetric pool grew during the point",
        "growth ms": "longest stall of a rank by growth",
        "verified": "pieces or tokens with the right contents / those checked, on all ranks",
        "status": "ok, corrupt, or the error that ended the job",
    }
    return Table("All-gathers", columns, [_cells(row) for row in gathers])


def _cells(row: GatherRow) -> list[Any]:
    times = [_us(row.seconds, q) for q in (50.0, 25.0, 75.0)]
    return [
        row.point.ranks,
        format_size(row.point.size),
        "+".join(map(str, row.point.batch)) or "-",
        row.point.pool if row.point.reserved else f"{row.point.pool}, grown",
        *times,
        _us(row.wire, 50.0),
        row.algorithmic,
        row.bus,
        row.growths,
        row.growth_seconds * 1e3,
        f"{row.right}/{row.checked}" if row.checked else "-",
        row.status,
    ]


def _us(seconds: Sequence[float], q: float) -> float | None:
    value = percentile(seconds, q)
    return None if value is None else value * 1e6


def metrics(gathers: Sequence[GatherRow]) -> list[Metric]:
    """Return the summary."""
    return [
        Metric("points", len(gathers), "points that were run"),
        Metric("points_failed", sum(row.status != "ok" for row in gathers), "points whose status is not ok"),
        Metric("gathers", sum(len(row.seconds) for row in gathers), "measured all-gathers"),
        Metric("checked", sum(row.checked for row in gathers), "pieces and tokens whose contents were checked"),
        Metric("right", sum(row.right for row in gathers), "of them, those with the right contents"),
        Metric("growths", sum(row.growths for row in gathers), "growths of symmetric pools at run time"),
        Metric("growth_s", sum(row.growth_seconds for row in gathers), "for how long ranks were stalled by them"),
    ]


def padded_size(batch: Sequence[int], ranks: int, row: int) -> int:
    """Return the bytes that each rank gathers of *batch*, tokens of *row* bytes.

    >>> padded_size((9, 9), ranks=4, row=10)  # six rows, not ceil(18 / 4)
    60
    """
    return zigzag(batch, ranks).longest * row
