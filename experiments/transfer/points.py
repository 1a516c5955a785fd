# SPDX-License-Identifier: Apache-2.0
"""The points of `experiments.transfer`, from options or a file, and the rows that their records become.

Columns are those of nixlbench, which divides time differently: its Avg Lat is per block and over the whole loop, its
Prep, Post and Tx are what `TransferRecord` calls preparing, posting and the rest until the poller sees the end.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from experiments.jobs import Columns, tabulated
from pdsim.config import convert, hints_of
from pdsim.core import files
from pdsim.core.errors import ConfigError
from pdsim.core.units import Size, format_size
from pdsim.hardware.machine import Machine
from pdsim.results.record import Metric, Table, distribution, mean, percentile
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Place

Flow = tuple[str, str]  # the rank that the bytes come from, the rank that they go to
SCHEDULES = "one of free, rounds, serial, free-rotated, rounds-rotated, serial-rotated"
"""How an initiator with several flows goes on: each flow for itself; all together, waiting for the last of them;
or one transfer at a time, flow by flow.  Rotated: each initiator begins with another peer."""
PATTERNS = {
    "pair": "",
    **dict.fromkeys(("pairs", "bidirectional", "incast", "fanout"), r"|[1-9]\d*"),
    "cross": r"|[1-9]\d*(x[1-9]\d*)?",
    **dict.fromkeys(("ring", "alltoall"), r"|[2-9]|[1-9]\d+"),
    "tp": r"[1-9]\d*x[1-9]\d*",
}
"""Names of patterns, ``name`` or ``name:count``, with the form of their counts: disjoint pairs, in one direction or
both; sources to one sink; one source to so many sinks; ``cross:2x3``, two sources each to three sinks; ranks each to
the next one, or to every other; ``tp:2x4``, two sources each to two sinks of its own, or ``tp:4x2`` the reverse."""
NIXLBENCH = {"pairwise": "pairs", "manytoone": "incast", "onetomany": "fanout"}
"""Its schemes, beside ``tp``, and what they are called here."""


def pattern(text: object) -> str:
    """Return *text*, one of `PATTERNS`, by its name here; raise a `ValueError` for anything else."""
    name, colon, count = str(text).partition(":")
    name = NIXLBENCH.get(name, name)
    if name not in PATTERNS:
        raise ValueError(f"{text!r} is not a pattern; there are {', '.join(PATTERNS)}")
    fits = re.fullmatch(PATTERNS[name], count) and not str(text).endswith(":")
    if fits and name == "tp":
        few, many = sorted(map(int, count.split("x")))
        fits = not many % few
    if not fits:
        special = {"pair": "pair, or pairs:2", "cross": "cross:2 or cross:2x3", "tp": "tp:2x4 or tp:4x2"}
        raise ValueError(f"{text!r} has a count that it cannot have; write {special.get(name, f'{name}:2')}")
    return name + colon + count


class TransferPoint(NamedTuple):
    """One combination of what is swept over.

    >>> TransferPoint("pair", 64, 65536, 1, operation="read").label
    'pair 64x65536 c1 read'
    """

    pattern: Annotated[str, pattern]
    blocks: Annotated[Size, "> 0"]
    size: Annotated[Size, "> 0"]
    concurrency: Annotated[Size, "> 0"]
    operation: Annotated[str, "one of write, read"] = "write"
    layout: Annotated[str, "one of contiguous, scattered"] = "contiguous"
    schedule: Annotated[str, SCHEDULES] = "free"
    repeat: Size = 0  # 0: as the experiment says

    @property
    def label(self) -> str:
        """The label of the transfers: such as ``"pair 64x65536 c1"``, then what differs from the defaults."""
        usual = TransferPoint._field_defaults
        ways = ("operation", "layout", "schedule")
        words = [getattr(self, name) for name in ways if getattr(self, name) != usual[name]]
        return " ".join([f"{self.pattern} {self.blocks}x{self.size} c{self.concurrency}", *words])

    def flows(self, ranks: int) -> list[Flow]:
        """Return the flows of the point, in the order in which a source posts them."""
        return flows(self.pattern, ranks, self.schedule.endswith("-rotated"))

    @property
    def area(self) -> int:
        """Bytes that one flow takes on either side: a slot for each transfer in flight."""
        return self.concurrency * self.blocks * self.size * (2 if self.layout == "scattered" else 1)


def region_bytes(rank: str, points: Sequence[TransferPoint], ranks: int) -> int:
    """Return the bytes that *rank* of *ranks* registers: enough for whichever of *points* takes most of it."""
    return max(1, *(point.area * sum(rank in flow for flow in point.flows(ranks)) for point in points))


def read(path: Path) -> list[TransferPoint]:
    """Return the points of the CSV file *path*, with the fields of `TransferPoint` as columns, others ignored.

    Lines that begin with ``#`` are comments; sizes may have units, ``64KiB``.  Raise a `ConfigError` with the number
    of the row if it cannot be read, lacks a column, or holds what cannot be.
    """
    columns = TransferPoint._fields
    lines = files.given(path, "name a CSV file of points", "experiment.points=").splitlines(keepends=True)
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    points, hints = [], hints_of(TransferPoint)
    for number, row in enumerate(rows, 1):
        words = {name: text for name, text in row.items() if name in columns and text}
        try:
            points.append(TransferPoint(**{name: convert(hints[name], words[name], name) for name in words}))
        except (TypeError, ValueError, ConfigError) as error:
            raise ConfigError(f"experiment.points={path}, row {number}: {error}") from error
    if not points:
        raise ConfigError(f"experiment.points={path} has no points; it needs the columns {', '.join(columns)}")
    return points


def write(path: Path, points: Sequence[TransferPoint]) -> None:
    """Write *points* to the CSV file *path*, as `read` takes it."""
    files.write_table(path, TransferPoint._fields, points, option="output=")


def shuffled(points: Sequence[TransferPoint], seed: int) -> list[TransferPoint]:
    """Return *points* in an order drawn from *seed*, so that a drift of the machine is no trend of the points."""
    return [points[index] for index in np.random.Generator(np.random.PCG64([seed, 1])).permutation(len(points))]


def flows(pattern: str, ranks: int, rotate: bool = False) -> list[Flow]:
    """Return the flows of *pattern*, which takes its count from *ranks* ranks if it has none of its own.

    The flows of a source are in the order in which it posts.  In a crossing that is the order of the sinks, so that
    all sources begin with the same one; with *rotate* source *i* begins with sink *i*, so that no two do.

    >>> flows("incast:2", ranks=4)
    [('rank1', 'rank0'), ('rank2', 'rank0')]
    >>> flows("cross:2x2", ranks=4, rotate=True)
    [('rank0', 'rank2'), ('rank0', 'rank3'), ('rank1', 'rank3'), ('rank1', 'rank2')]
    """
    name, _, text = pattern.partition(":")
    usual = {
        "pair": 1,
        "bidirectional": 1,
        "pairs": ranks // 2,
        "cross": ranks // 2,
        "ring": ranks,
        "alltoall": ranks,
    }
    counts = [int(part) for part in text.split("x")] if text else [usual.get(name, ranks - 1)]
    count, other = counts[0], counts[-1]
    if name in ("pair", "pairs", "bidirectional"):
        pairs = [(f"rank{2 * index}", f"rank{2 * index + 1}") for index in range(count)]
        return [flow for one, two in pairs for flow in [(one, two), (two, one)][: 1 + (name == "bidirectional")]]
    if name == "ring":
        return [(f"rank{index}", f"rank{(index + 1) % count}") for index in range(count)]
    if name == "tp":  # shards of the many belong to those of the few, in order
        many = range(max(count, other))
        ends = [(one * count // len(many), count + one * other // len(many)) for one in many]
        return [(f"rank{source}", f"rank{sink}") for source, sink in ends]
    sources, sinks = {
        "cross": (range(count), range(count, count + other)),
        "incast": (range(1, 1 + count), range(1)),
        "fanout": (range(1), range(1, 1 + count)),
        "alltoall": (range(count), range(count)),
    }[name]
    pairs = []
    for index, source in enumerate(sources):
        first = index % len(sinks) if rotate else 0
        ordered = [*sinks[first:], *sinks[:first]]
        pairs += [(f"rank{source}", f"rank{sink}") for sink in ordered if sink != source]
    return pairs


def names(pairs: Sequence[Flow]) -> list[str]:
    """Return the ranks of *pairs* by number."""
    return sorted({name for pair in pairs for name in pair}, key=lambda name: int(name.removeprefix("rank")))


def places(hw: Machine, ranks: Sequence[str], placement: Sequence[str]) -> dict[str, Place]:
    """Return where each of *ranks* runs: on the hosts, one node after the other, if there are no GPUs.

    Otherwise on a GPU of its own, node by node or, ``spread``, in turn, or on the one that *placement* lists for it.
    """
    chosen = {}
    for index, name in enumerate(ranks):
        if placement[0] == "spread" or not hw.gpus:
            chosen[name] = Place(index % hw.nodes, index // hw.nodes if hw.gpus else None)
        else:
            gpu = index if placement[0] == "packed" else int(placement[index])
            chosen[name] = Place(gpu // hw.gpus, gpu % hw.gpus)
    return chosen


def shortage(hw: Machine, where: Mapping[str, Place], needs: Mapping[str, int], here: bool) -> tuple[list[str], str]:
    """Return the ranks at the place that needs most memory and a line, if what each *needs* does not fit there.

    With *here* the ranks are processes of this machine, and what its host has free counts too.
    """
    totals: Counter[Place] = Counter()
    for name, place in where.items():
        totals[place] += needs[name]
    ((place, need),) = totals.most_common(1)
    room, what = hw.host.memory, f"the host of node {place.node}"
    if place.gpu is not None and hw.gpu is not None:
        room, what = hw.gpu.memory, f"GPU {place.gpu} of node {place.node}"
    elif here and (free := _free_memory()) is not None and free < room:
        room, what = free, "this machine (MemAvailable)"
    if need <= room:
        return [], ""
    line = f"{need} bytes ({format_size(need)}) on {what}, which has {room} ({format_size(room)})"
    return [name for name, other in where.items() if other == place], line


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


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
    """The measured *records* of one point or one flow of it, failed ones included, and how it ended.

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
        """Checked slots that held other bytes than were sent."""
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
    """Return counts over all points and, of a single point, all of its numbers."""
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
