"""From the outcome of each point of `experiments.transfer` to its rows and metrics, in the columns of nixlbench."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdsim.results.record import Metric, Table
from pdsim.results.statistics import distribution, mean, percentile
from pdsim.transfer import Outcome, TransferRecord
from pdsim.units import format_size

__all__ = ["Point", "Row", "merged", "metrics", "row", "tables"]


class Point(NamedTuple):
    """One combination of what is swept over."""

    pattern: str
    blocks: int
    size: int
    concurrency: int

    @property
    def label(self) -> str:
        """Such as ``"pair 64x65536 c1"``; the label of the point's transfers."""
        return f"{self.pattern} {self.blocks}x{self.size} c{self.concurrency}"


@dataclass(frozen=True)
class Row:
    """What one point gave: its measured *records*, failed ones included, and how it ended."""

    point: Point
    flows: int
    records: Sequence[TransferRecord]
    status: str  # "ok", "corrupt" or the class of an error
    slots: int
    verified: int | None  # None if nothing was checked

    @property
    def done(self) -> list[TransferRecord]:
        """The transfers that succeeded."""
        return [record for record in self.records if record.status == "ok"]

    @property
    def wrong(self) -> int:
        """Slots that were checked and held other bytes than were sent."""
        return 0 if self.verified is None else self.slots - self.verified

    @property
    def seconds(self) -> float | None:
        """From the first submission to the last completion seen, over all initiators."""
        if not self.done:
            return None
        return max(record.seen for record in self.done) - min(record.submitted for record in self.done)

    @property
    def bandwidth(self) -> float | None:
        """GB/s of all flows together."""
        return sum(record.nbytes for record in self.done) / self.seconds / 1e9 if self.seconds else None

    @property
    def block_latency(self) -> float | None:
        """What nixlbench calls Avg Lat, us: the time of the loop over the blocks that one flow moved."""
        blocks = self.point.blocks * len(self.done) / self.flows
        return self.seconds / blocks * 1e6 if self.seconds else None

    def times(self, stage: str) -> list[float]:
        """Return microseconds of *stage* of every transfer that succeeded; a key of `_STAGES`."""
        return [_STAGES[stage](record) * 1e6 for record in self.done]


_STAGES: dict[str, Callable[[TransferRecord], float]] = {
    "latency": lambda record: record.seen - record.submitted,
    "prep": lambda record: record.prepared - record.submitted,
    "post": lambda record: record.posted - record.prepared,
    "tx": lambda record: record.seen - record.posted,
    "poll": lambda record: record.seen - record.completed,
}

_DEFINITIONS = {
    "latency": "from the call to the completion seen, of a whole batch; prep + post + tx",
    "prep": "from the call to the descriptor lists built (nixlbench Prep)",
    "post": "until the engine has taken all descriptors (nixlbench Post)",
    "tx": "from there to the completion seen by the poller (nixlbench Tx)",
    "poll": "the part of tx between the completion and its being seen",
}


def row(point: Point, outcome: Outcome, flows: int, *, verify: bool) -> Row:
    """Return the row of *point*, whose job ended as *outcome* and had *flows* flows."""
    records = [record for rank in outcome.ranks.values() for record in rank.transfers if record.label == point.label]
    errors = [rank.error.partition(":")[0] for rank in outcome.ranks.values() if rank.error]
    # A rank that was killed cannot say why; what the others saw names it.
    status = "PeerLost" if "PeerLost" in errors else errors[0] if errors else "ok"
    values = [rank.value for rank in outcome.ranks.values() if not rank.error]
    checked = [value["verified"] for value in values if verify and value["verified"] is not None]
    slots = sum(value["slots"] for value in values)
    verified = sum(checked) if checked else None
    if status == "ok" and verified is not None and verified < slots:
        status = "corrupt"
    return Row(point, flows, records, status, slots, verified)


def merged(outcomes: Mapping[str, Outcome]) -> Outcome:
    """Return the outcomes of all points, by label, as one; each rank, link and pool is named with its point."""

    def of_all(part: str) -> dict[str, Any]:
        items = [(label, getattr(outcome, part)) for label, outcome in outcomes.items()]
        return {f"{label} {name}": value for label, values in items for name, value in values.items()}

    return Outcome(
        ranks=of_all("ranks"),
        seconds=sum(outcome.seconds for outcome in outcomes.values()),
        links=of_all("links"),
        pools=of_all("pools"),
        events=sum(outcome.events for outcome in outcomes.values()),
    )


def tables(rows: Sequence[Row]) -> tuple[Table, Table]:
    """Return the table of rates and latencies and the table of stages."""
    who = {
        "pattern": "pair and bidirectional: two ranks; incast: all to one; fanout: one to all; alltoall",
        "block": "bytes of a descriptor",
        "batch": "descriptors of a transfer",
        "conc": "transfers that an initiator keeps in flight to each peer",
    }
    rates = who | {
        "B/W GB/s": "bytes of all flows / time from the first call to the last completion, 1 GB = 1e9 bytes",
        "Avg Lat us": "as in nixlbench: that time / blocks moved by one flow, so per block and not per transfer",
        "lat avg us": _DEFINITIONS["latency"],
        "p50": "median of that",
        "p99": "99th percentile of that; needs 100 transfers",
        "p99.9": "99.9th percentile of that; needs 1000 transfers",
        "verified": "receiving slots whose checksum is that of what was sent, of those there are",
        "status": "ok, corrupt, or the error that ended the point; then its numbers cover what had succeeded",
    }
    stages = dict(who)
    for stage in ("prep", "post", "tx", "poll"):
        stages[f"{stage} avg us"] = _DEFINITIONS[stage]
        stages[f"{stage} p99"] = f"99th percentile of {stage}; needs 100 transfers"
    return (
        Table("Bandwidth and latency of each point", rates, [[*_who(row), *_rates(row)] for row in rows]),
        Table("Stages of a transfer", stages, [[*_who(row), *_stages(row)] for row in rows]),
    )


def _who(row: Row) -> list[Any]:
    return [row.point.pattern, format_size(row.point.size), row.point.blocks, row.point.concurrency]


def _rates(row: Row) -> list[Any]:
    times = row.times("latency")
    percentiles = [percentile(times, q) for q in (50.0, 99.0, 99.9)]
    verified = "-" if row.verified is None else f"{row.verified}/{row.slots}"
    return [row.bandwidth, row.block_latency, mean(times), *percentiles, verified, row.status]


def _stages(row: Row) -> list[Any]:
    stages = [row.times(stage) for stage in ("prep", "post", "tx", "poll")]
    return [number for times in stages for number in (mean(times), percentile(times, 99.0))]


def metrics(rows: Sequence[Row]) -> list[Metric]:
    """Return the summary: counts over all points and, where there is one point only, all that is known of it."""
    rates = [row.bandwidth for row in rows if row.bandwidth is not None]
    checked = [row for row in rows if row.verified is not None]
    found = [
        Metric("points", len(rows), "points that were run"),
        Metric("points_failed", sum(row.status != "ok" for row in rows), "points whose status is not ok"),
        Metric("transfers", sum(len(row.done) for row in rows), "measured transfers that succeeded"),
        Metric("bytes", sum(r.nbytes for row in rows for r in row.done), "bytes of those transfers"),
        Metric("slots", sum(row.slots for row in checked), "receiving slots that were checked"),
        Metric("slots_verified", sum(row.verified or 0 for row in checked), "of them, those with the bytes sent"),
        Metric("bw_max_gbs", max(rates, default=None), "highest bandwidth of a point, 1 GB = 1e9 bytes"),
    ]
    if len(rows) == 1:
        row = rows[0]
        found.append(Metric("bw_gbs", row.bandwidth, "bytes of all flows / first call to last completion"))
        found.append(Metric("block_latency_us", row.block_latency, "nixlbench's Avg Lat: time / blocks of one flow"))
        for stage, definition in _DEFINITIONS.items():
            found += distribution(stage, "us", row.times(stage), definition)
    return found
