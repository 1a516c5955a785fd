# SPDX-License-Identifier: Apache-2.0
"""From the records of each point of `experiments.transfer` to its rows and metrics, in the columns of nixlbench.

nixlbench and this divide time differently: its Avg Lat is per block and over the whole loop, its Prep, Post and Tx
are what `TransferRecord` calls preparing, posting and the rest until the poller sees the end.  Both kinds are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.transfer.points import Flow, TransferPoint
from pdsim.core.units import format_size
from pdsim.results.record import Metric, Table, distribution, mean, percentile
from pdsim.transfer import TransferRecord

__all__ = ["TransferRow", "metrics", "tables"]

_STAGES: dict[str, tuple[Callable[[TransferRecord], float], str]] = {
    "latency": (
        lambda record: record.seen - record.submitted,
        "from the call until the poller sees the batch complete: prep + post + tx",
    ),
    "prep": (
        lambda record: record.prepared - record.submitted,
        "from the call to the descriptor lists built (nixlbench Prep)",
    ),
    "post": (
        lambda record: record.posted - record.prepared,
        "until the engine has taken all descriptors (nixlbench Post)",
    ),
    "tx": (
        lambda record: record.seen - record.posted,
        "from then until the poller sees the completion (nixlbench Tx)",
    ),
    "poll": (
        lambda record: record.seen - record.completed,
        "from the completion until the poller sees it; part of tx",
    ),
}
QUARTILES = (25.0, 50.0, 75.0)


@dataclass(frozen=True)
class TransferRow:
    """What one point gave: its measured *records*, failed ones included, and how it ended.

    Rates count 1 GB as 1e9 bytes.  Numbers of a point that failed cover the transfers that had succeeded.
    """

    point: TransferPoint
    flows: Sequence[Flow]
    records: Sequence[TransferRecord]
    status: str  # "ok", "corrupt" (some slot holds other bytes), the class of an error, or "not run"
    slots: int = 0  # receiving slots that were checked
    verified: int | None = None  # those of them with the right contents; None if nothing was checked

    @property
    def done(self) -> list[TransferRecord]:
        """The transfers that succeeded."""
        return [record for record in self.records if record.status == "ok"]

    @property
    def wrong(self) -> int:
        """Slots that were checked and held other bytes than were sent."""
        return 0 if self.verified is None else self.slots - self.verified

    @property
    def bandwidth(self) -> float | None:
        """GB/s of all flows together, from the first submission to the last completion seen."""
        return _rate(self.done)

    @property
    def block_latency(self) -> float | None:
        """What nixlbench calls Avg Lat, us: the time of the loop over the blocks that one flow moved."""
        blocks, seconds = self.point.blocks * len(self.done) / len(self.flows), _span(self.done)
        return seconds / blocks * 1e6 if seconds else None

    def times(self, stage: str) -> list[float]:
        """Return microseconds of *stage* of every transfer that succeeded; a key of `_STAGES`."""
        of, _ = _STAGES[stage]
        return [of(record) * 1e6 for record in self.done]


def _span(records: Sequence[TransferRecord]) -> float | None:
    if not records:
        return None
    return max(record.seen for record in records) - min(record.submitted for record in records)


def _rate(records: Sequence[TransferRecord]) -> float | None:
    seconds = _span(records)
    return sum(record.nbytes for record in records) / seconds / 1e9 if seconds else None


def tables(rows: Sequence[TransferRow]) -> tuple[Table, ...]:
    """Return the tables of rates and latencies, of stages, and of flows where a point has several.

    The column names are those of nixlbench where they mean the same; each column has its definition.
    """
    who = {
        "pattern": (
            "pair(s), bidirectional; incast: all to one; fanout: one to all; cross: sources to sinks; alltoall"
        ),
        "block": "bytes of a descriptor",
        "batch": "descriptors of a transfer",
        "conc": "transfers that an initiator keeps in flight to each peer",
        "how": (
            "write or read, blocks contiguous or scattered, and the order of an initiator's flows, if not the usual"
        ),
    }
    rates = who | {
        "B/W GB/s": "bytes of all flows / time from the first call to the last completion, 1 GB = 1e9 bytes",
        "Avg Lat us": "as in nixlbench: that time / blocks of one flow, so per block, not per transfer",
        "lat avg us": _STAGES["latency"][1],
        "p25": "first quartile of that",
        "p50": "median of that",
        "p75": "third quartile of that",
        "p99": "99th percentile of that; needs 100 transfers",
        "p99.9": "99.9th percentile of that; needs 1000 transfers",
        "verified": "receiving slots whose checksum matches / slots checked",
        "status": "ok, corrupt, or the error that ended the point; then its numbers cover what had succeeded",
    }
    stages = dict(who)
    for stage in list(_STAGES)[1:]:
        stages[f"{stage} avg us"] = _STAGES[stage][1]
        stages[f"{stage} p50"] = f"median of {stage}"
        stages[f"{stage} p99"] = f"99th percentile of {stage}; needs 100 transfers"
    of_flows = who | {
        "source": "rank that the bytes come from",
        "sink": "rank that they go to",
        "transfers": "transfers of this flow that succeeded",
        "lat p25 us": "first quartile of the latency of this flow's transfers",
        "p50": "median of that",
        "p75": "third quartile of that",
        "B/W GB/s": "bytes of this flow / time from its first call to its last completion",
        "start us": "its first call, after the first of the point",
        "end us": "its last completion, after the first call of the point",
    }
    made = [
        Table("Bandwidth and latency of each point", rates, [[*_who(row), *_rates(row)] for row in rows]),
        Table("Stages of a transfer", stages, [[*_who(row), *_stages(row)] for row in rows]),
    ]
    several = [[*_who(row), *flow] for row in rows if len(row.flows) > 1 for flow in _flows(row)]
    return (*made, Table("Flows of each point", of_flows, several)) if several else tuple(made)


def _who(row: TransferRow) -> list[Any]:
    point = row.point
    how = point.label.split(" ")[3:]
    return [point.pattern, format_size(point.size), point.blocks, point.concurrency, " ".join(how) or "-"]


def _rates(row: TransferRow) -> list[Any]:
    times = row.times("latency")
    percentiles = [percentile(times, q) for q in (*QUARTILES, 99.0, 99.9)]
    verified = "-" if row.verified is None else f"{row.verified}/{row.slots}"
    return [row.bandwidth, row.block_latency, mean(times), *percentiles, verified, row.status]


def _stages(row: TransferRow) -> list[Any]:
    stages = [row.times(stage) for stage in list(_STAGES)[1:]]
    return [number for times in stages for number in (mean(times), percentile(times, 50.0), percentile(times, 99.0))]


def _flows(row: TransferRow) -> Iterator[list[Any]]:
    of_flow: dict[Flow, list[TransferRecord]] = {(source, sink): [] for source, sink in row.flows}
    for record in row.done:
        of_flow[record.source, record.target].append(record)
    began = min((record.submitted for record in row.done), default=0.0)
    for (source, sink), records in of_flow.items():
        times = [(record.seen - record.submitted) * 1e6 for record in records]
        start = (min(record.submitted for record in records) - began) * 1e6 if records else None
        end = (max(record.seen for record in records) - began) * 1e6 if records else None
        yield [source, sink, len(records), *(percentile(times, q) for q in QUARTILES), _rate(records), start, end]


def metrics(rows: Sequence[TransferRow]) -> list[Metric]:
    """Return the summary: counts over all points and, where there is one point only, all that is known of it.

    With several points a mean over them would mean nothing, so only the highest bandwidth is there.
    """
    rates = [row.bandwidth for row in rows if row.bandwidth is not None]
    checked = [row for row in rows if row.verified is not None]
    right = sum(row.verified or 0 for row in checked)
    summary = [
        Metric("points", len(rows), "points that were run"),
        Metric("points_failed", sum(row.status != "ok" for row in rows), "points whose status is not ok"),
        Metric("transfers", sum(len(row.done) for row in rows), "measured transfers that succeeded"),
        Metric("bytes", sum(r.nbytes for row in rows for r in row.done), "bytes of those transfers"),
        Metric("slots", sum(row.slots for row in checked), "receiving slots that were checked"),
        Metric("slots_verified", right, "receiving slots that hold the bytes sent"),
        Metric("bw_max_gbs", max(rates, default=None), "highest bandwidth of a point, 1 GB = 1e9 bytes"),
    ]
    if len(rows) == 1:
        (row,) = rows
        summary += [
            Metric("bw_gbs", row.bandwidth, "bytes of all flows / first call to last completion"),
            Metric("block_latency_us", row.block_latency, "nixlbench's Avg Lat: time / blocks of one flow"),
        ]
        for stage, (_, definition) in _STAGES.items():
            summary += distribution(stage, "us", row.times(stage), definition)
    return summary
