# SPDX-License-Identifier: Apache-2.0
"""From the outcome of each job of `experiments.handoff` to its rows and metrics.

Times of a handoff come from two sources on the job's one clock: the stamps of the router's rows
(when pages were reserved, when prefill noticed, started and ended, when all had arrived), and the
records of the writes, whose labels begin with the room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdsim.results.record import Metric, Table, percentile
from pdsim.serving.deployment import ROUTER
from pdsim.serving.workload import Request
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Outcome

__all__ = ["STAGES", "HandoffRow", "HandoffShape", "metrics", "rows", "tables"]

STAGES = {
    "handoff": "from the end of the prefill forward to success at decode: KV and metadata on all ranks",
    "reserve": "before the handoff: from decode pages reserved until prefill has their numbers",
    "plan": "until the first write is posted: descriptors built or, if staged, the first chunk gathered",
    "wire": "from the first post to the last completion that a prefill rank sees",
    "finish": "from then to success: notification, scatter if staged, count of the decode scheduler",
}


class HandoffShape(NamedTuple):
    """A shape, handed over in one way."""

    way: str
    tokens: int

    @property
    def label(self) -> str:
        """Such as ``"1to2 staged 8192 tokens"``."""
        return f"{self.way} {self.tokens} tokens"


@dataclass(frozen=True)
class HandoffRow:
    """The measured handoffs of one shape: seconds of each of `STAGES`, one for each handoff.

    Attributes:
        handoff: Which shape.
        nbytes: Of all writes of one handoff, KV and metadata.
        descriptors: Of all writes of one handoff.
        times: Seconds by stage, warm-up left out.
        path: That the bytes took.
        status: "ok", or why the first of them failed.
    """

    handoff: HandoffShape
    nbytes: int
    descriptors: int
    times: dict[str, list[float]]
    path: str  # that the bytes took
    status: str  # "ok", or why the first of them failed

    @property
    def rate(self) -> float | None:
        """GB/s of the median handoff."""
        median = percentile(self.times["handoff"], 50.0)
        return self.nbytes / median / 1e9 if median else None


def rows(
    shapes: Sequence[HandoffShape], warm: int, requests: Sequence[Request], outcome: Outcome
) -> list[HandoffRow]:
    """Return the rows of *shapes*, whose job ended as *outcome*; its first *warm* requests are not measured."""
    router = outcome.ranks[ROUTER]
    value = router.value or {"rows": [["", "", 0, router.error or "lost", *[None] * 8]] * len(requests)}
    records: dict[int, list[TransferRecord]] = {}
    for rank in outcome.ranks.values():
        for record in rank.transfers:
            number = (int(record.label.partition("/")[0]) - 1) % len(requests)
            records.setdefault(number, []).append(record)
    return [_row(shape, warm, requests, value["rows"], records) for shape in shapes]


def _row(
    shape: HandoffShape,
    warm: int,
    requests: Sequence[Request],
    values: Sequence[Sequence[object]],
    records: dict[int, list[TransferRecord]],
) -> HandoffRow:
    # Bytes, descriptors and paths are those of the last of them.
    mine = [number for number, request in enumerate(requests) if request.input == shape.tokens]
    errors = [str(values[number][3]) for number in mine if values[number][3] != "ok"]
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for number in (number for number in mine if number >= warm and values[number][3] == "ok"):
        for stage, seconds in _stages(values[number][4:], records[number]):
            times[stage].append(seconds)
    last = records.get(mine[-1], [])
    paths = {record.label.rpartition("/")[2] for record in last}
    path = "+".join(sorted(paths - {"metadata"} or paths))
    nbytes, descriptors = (sum(getattr(record, part) for record in last) for part in ("nbytes", "descriptors"))
    return HandoffRow(shape, nbytes, descriptors, times, path, errors[0] if errors else "ok")


def _stages(stamps: Sequence[object], records: Sequence[TransferRecord]) -> Iterator[tuple[str, float]]:
    reserved, noticed, started, _, arrived = (float(stamp) for stamp in stamps[:5])  # type: ignore[arg-type]
    first = min(record.submitted for record in records)
    last = min(arrived, max(record.seen for record in records))  # the target may be told before the source
    yield from (("handoff", arrived - started), ("reserve", noticed - reserved), ("plan", first - started))
    yield from (("wire", last - first), ("finish", arrived - last))


def tables(handoffs: Sequence[HandoffRow]) -> tuple[Table, ...]:
    """Return the table of handoffs, and that of their stages, a row for each shape, in microseconds."""
    who = {
        "way": "ranks of prefill to ranks of decode, and the path between other heads",
        "tokens": "of the request",
    }
    whole = who | {
        "path": "path of the KV",
        "bytes": "KV and metadata",
        "descriptors": "of all writes",
        "n": "handoffs measured",
        "p25 us": f"first quartile of the time {STAGES['handoff']}",
        "p50": "median of that",
        "p75": "third quartile of that",
        "GB/s": "bytes / median, 1 GB = 1e9 bytes",
        "status": "ok, or why a handoff failed",
    }
    stages = who | {f"{stage} us": f"median of: {text}" for stage, text in STAGES.items()}
    medians = [[*row.handoff, *(_us(row, stage, 50.0) for stage in STAGES)] for row in handoffs]
    return (
        Table("Handoffs", whole, [_whole(row) for row in handoffs]),
        Table("Stages of a handoff", stages, medians),
    )


def _whole(row: HandoffRow) -> list[object]:
    times = [_us(row, "handoff", q) for q in (25.0, 50.0, 75.0)]
    measured = len(row.times["handoff"])
    return [*row.handoff, row.path, row.nbytes, row.descriptors, measured, *times, row.rate, row.status]


def _us(row: HandoffRow, stage: str, q: float) -> float | None:
    value = percentile(row.times[stage], q)
    return None if value is None else value * 1e6


def metrics(handoffs: Sequence[HandoffRow]) -> list[Metric]:
    """Return the summary."""
    rates = [row.rate for row in handoffs if row.rate is not None]
    return [
        Metric("shapes", len(handoffs), "token counts x ways of transfer"),
        Metric("shapes_failed", sum(row.status != "ok" for row in handoffs), "shapes with a failed handoff"),
        Metric("handoffs", sum(len(row.times["handoff"]) for row in handoffs), "measured handoffs that succeeded"),
        Metric("rate_max_gbs", max(rates, default=None), "highest rate of a median handoff, 1 GB = 1e9 bytes"),
    ]
