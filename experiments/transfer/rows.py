# SPDX-License-Identifier: Apache-2.0
"""From the records of each point of `experiments.transfer` to its rows and metrics, in the columns of nixlbench.

nixlbench and this divide time differently: its Avg Lat is per block and over the whole loop, its Prep, Post and Tx
are what `TransferRecord` calls preparing, posting and the rest until the poller sees the end.  Both kinds are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.jobs import Columns, tabulated
from experiments.transfer.points import Flow, TransferPoint
from pdsim.core.units import format_size
from pdsim.results.record import Metric, Table, distribution, mean, percentile
from pdsim.transfer import TransferRecord

_STAGES = {
    "latency": ("submitted", "seen", "from the call until the poller sees the batch complete: prep + post + tx"),
    "prep": ("submitted", "prepared", "from the call to the descriptor lists built (nixlbench Prep)"),
    "post": ("prepared", "posted", "until the engine has taken all descriptors (nixlbench Post)"),
    "tx": ("posted", "seen", "from then until the poller sees the completion (nixlbench Tx)"),
    "poll": ("completed", "seen", "from the completion until the poller sees it; part of tx"),
}
"""Instants of a `TransferRecord` at which a stage begins and ends, and its definition."""


@dataclass(frozen=True)
class TransferRow:
    """What one point, or one flow of it, gave: its measured *records*, failed ones included, and how it ended.

    Rates count 1 GB as 1e9 bytes.  Numbers of a point that failed cover the transfers that had succeeded.
    """

    point: TransferPoint
    flows: Sequence[Flow]
    records: Sequence[TransferRecord]
    status: str  # "ok", "corrupt" (some slot holds other bytes), the class of an error, or "not run"
    slots: int = 0  # receiving slots that were checked
    verified: int | None = None  # those of them with the right contents; None if nothing was checked
    began: float = 0.0  # of a flow: the first call of the point

    @property
    def done(self) -> list[TransferRecord]:
        """The transfers that succeeded."""
        return [record for record in self.records if record.status == "ok"]

    @property
    def wrong(self) -> int:
        """Slots that were checked and held other bytes than were sent."""
        return 0 if self.verified is None else self.slots - self.verified

    @property
    def start(self) -> float | None:
        """The first call, us after the first of the point."""
        return min(((record.submitted - self.began) * 1e6 for record in self.done), default=None)

    @property
    def end(self) -> float | None:
        """The last completion seen, likewise."""
        return max(((record.seen - self.began) * 1e6 for record in self.done), default=None)

    @property
    def seconds(self) -> float | None:
        """From the first call to the last completion seen."""
        records = self.done
        return max(r.seen for r in records) - min(r.submitted for r in records) if records else None

    @property
    def bandwidth(self) -> float | None:
        """GB/s of all flows together."""
        return sum(record.nbytes for record in self.done) / self.seconds / 1e9 if self.seconds else None

    @property
    def block_latency(self) -> float | None:
        """What nixlbench calls Avg Lat, us: the time of the loop over the blocks that one flow moved."""
        blocks = self.point.blocks * len(self.done) / len(self.flows)
        return self.seconds / blocks * 1e6 if self.seconds else None

    def times(self, stage: str) -> list[float]:
        """Return microseconds of *stage*, a key of `_STAGES`, of every transfer that succeeded."""
        start, end, _ = _STAGES[stage]
        return [(getattr(record, end) - getattr(record, start)) * 1e6 for record in self.done]


def _at(q: float, stage: str = "latency") -> Callable[[TransferRow], float | None]:
    return lambda row: percentile(row.times(stage), q)


def _mean(stage: str = "latency") -> Callable[[TransferRow], float | None]:
    return lambda row: mean(row.times(stage))


_PATTERNS = (
    "pair(s), bidirectional; incast: all to one; fanout: one to all; cross: sources to sinks; ring; alltoall; tp"
)
_HOW = "write or read, blocks contiguous or scattered, and the order of an initiator's flows, if not the usual"
_VERIFIED = "receiving slots whose checksum matches / slots checked"
_STATUS = "ok, corrupt, or the error that ended the point; then its numbers cover what had succeeded"

# Names are those of nixlbench where they mean the same.
_WHO: Columns[TransferRow] = {
    "pattern": (_PATTERNS, lambda row: row.point.pattern),
    "block": ("bytes of a descriptor", lambda row: format_size(row.point.size)),
    "batch": ("descriptors of a transfer", lambda row: row.point.blocks),
    "conc": ("transfers that an initiator keeps in flight to each peer", lambda row: row.point.concurrency),
    "how": (_HOW, lambda row: " ".join(row.point.label.split(" ")[3:]) or "-"),
}
_RATES: Columns[TransferRow] = {
    "B/W GB/s": ("bytes of all flows / time from first call to last completion", lambda row: row.bandwidth),
    "Avg Lat us": ("as in nixlbench: that time / blocks of one flow, so per block", lambda row: row.block_latency),
    "lat avg us": (_STAGES["latency"][2], _mean()),
    "p25": ("first quartile of that", _at(25.0)),
    "p50": ("median of that", _at(50.0)),
    "p75": ("third quartile of that", _at(75.0)),
    "p99": ("99th percentile of that; needs 100 transfers", _at(99.0)),
    "p99.9": ("99.9th percentile of that; needs 1000 transfers", _at(99.9)),
    "verified": (_VERIFIED, lambda row: "-" if row.verified is None else f"{row.verified}/{row.slots}"),
    "status": (_STATUS, lambda row: row.status),
}
_FLOWS: Columns[TransferRow] = {
    "source": ("rank that the bytes come from", lambda row: row.flows[0][0]),
    "sink": ("rank that they go to", lambda row: row.flows[0][1]),
    "transfers": ("transfers of this flow that succeeded", lambda row: len(row.done)),
    "lat p25 us": ("first quartile of the latency of this flow's transfers", _at(25.0)),
    "p50": ("median of that", _at(50.0)),
    "p75": ("third quartile of that", _at(75.0)),
    "B/W GB/s": ("bytes of this flow / time from its first call to its last completion", lambda row: row.bandwidth),
    "start us": ("its first call, after the first of the point", lambda row: row.start),
    "end us": ("its last completion, after the first call of the point", lambda row: row.end),
}


def tables(rows: Sequence[TransferRow]) -> list[Table]:
    """Return the tables of rates and latencies, of stages, and of flows where a point has several."""
    stages: dict[str, tuple[str, Callable[[TransferRow], Any]]] = {}
    for stage, (_, _, definition) in list(_STAGES.items())[1:]:
        stages[f"{stage} avg us"] = definition, _mean(stage)
        stages[f"{stage} p50"] = f"median of {stage}", _at(50.0, stage)
        stages[f"{stage} p99"] = f"99th percentile of {stage}; needs 100 transfers", _at(99.0, stage)
    flows = [flow for row in rows if len(row.flows) > 1 for flow in _flows(row)]
    return [
        tabulated("Bandwidth and latency of each point", {**_WHO, **_RATES}, rows),
        tabulated("Stages of a transfer", {**_WHO, **stages}, rows),
        *([tabulated("Flows of each point", {**_WHO, **_FLOWS}, flows)] if flows else []),
    ]


def _flows(row: TransferRow) -> Iterator[TransferRow]:
    records: dict[Flow, list[TransferRecord]] = {(source, sink): [] for source, sink in row.flows}
    for record in row.done:
        records[record.source, record.target].append(record)
    began = min((record.submitted for record in row.done), default=0.0)
    return (replace(row, flows=[flow], records=own, began=began) for flow, own in records.items())


def metrics(rows: Sequence[TransferRow]) -> list[Metric]:
    """Return counts over all points and, where there is one point only, all that is known of it."""
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
        for stage, (_, _, definition) in _STAGES.items():
            summary += distribution(stage, "us", row.times(stage), definition)
    return summary
