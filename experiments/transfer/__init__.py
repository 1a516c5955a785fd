# SPDX-License-Identifier: Apache-2.0
"""Move blocks between ranks: size x batch x concurrency x pattern, in the columns of nixlbench.

One job runs all points, one after the other, for starting ranks takes longer than most points.  A
rank that is lost takes its point with it; those after it are run in a second job.

What ranks do is `experiments.transfer.exchange`, who sends to whom
`experiments.transfer.transfer_points`, where ranks are `experiments.transfer.rank_places`, and what
rows and tables say `experiments.transfer.transfer_rows`.  `pdsim calibrate` runs this experiment
with a file of points, `pdsim validate` likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from experiments.transfer.exchange import Task, area_bytes, region_bytes
from experiments.transfer.rank_places import names, places, shortage
from experiments.transfer.transfer_points import TransferPoint, read, shuffled
from experiments.transfer.transfer_rows import TransferRow, metrics, tables
from pdsim.config import Config, ExperimentOptions
from pdsim.core.errors import BackendUnavailable, ConfigError, TransferError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import Seconds, Size
from pdsim.results.record import Result
from pdsim.transfer.job import Outcome, Place, RankResult, RankSpec, Target

__all__ = ["TransferOptions", "check", "run"]

JOBS = 2
"""How many jobs a run may start: the second for what a lost rank kept the first from."""


@dataclass(frozen=True, kw_only=True)
class TransferOptions(ExperimentOptions):
    """What to sweep over, and how each point is measured.

    The points are all combinations of patterns, sizes, blocks, concurrencies and schedules, or the
    rows of a file.  Each key's comment says what it means.

    Raise a `ValueError` that names the key for values out of range; the file of *points* is read
    when the points are listed.
    """

    name: str = "transfer"
    patterns: tuple[str, ...] = (  # also with a count: pairs:2, incast:3, fanout:3, cross:2x2, alltoall:4
        "pair",
        "bidirectional",
        "incast",
        "fanout",
        "alltoall",
    )
    blocks: tuple[int, ...] = (1, 16)  # descriptors of a transfer
    size: tuple[Size, ...] = (4096, 65536, 1048576)  # bytes of a descriptor
    concurrency: tuple[int, ...] = (1,)  # transfers that an initiator keeps in flight to each of its peers
    # how an initiator goes on: rounds, serial; -rotated: each from another peer
    schedule: tuple[str, ...] = ("free",)
    points: str = ""  # a CSV file of points instead of all combinations of the five above
    ranks: int = 4  # of a pattern that does not say how many itself
    repeat: int = 100  # measured transfers of each flow
    volume: Size = 0  # bytes of a flow after which fewer repeats do, though not less than 3; 0 is no limit
    warmup: int = 10  # transfers of each flow before that
    operation: str = "write"  # or "read": who posts, not where the bytes go
    layout: str = "contiguous"  # or "scattered": every block at a random place of an area twice as large
    placement: tuple[str, ...] = ("packed",)  # or "spread": one node after the other; or the GPU of each rank
    order: str = "listed"  # or "shuffled", by the seed
    pause: Seconds = 0.0  # of the model: what a program takes from the end of a transfer to its next one
    verify: bool = True  # compare checksums at the receiver, where memory has contents

    def __post_init__(self) -> None:
        for name in ("patterns", "blocks", "size", "concurrency", "schedule", "placement"):
            if not getattr(self, name):
                raise ValueError(f"experiment.{name} must have one value or more, got none")
        for name, least in (("ranks", 2), ("repeat", 1), ("volume", 0), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"experiment.{name} must be >= {least}, got {getattr(self, name)}")
        if self.order not in ("listed", "shuffled"):
            raise ValueError(f"experiment.order must be one of listed, shuffled, got {self.order!r}")
        if self.placement not in (("packed",), ("spread",)) and not all(word.isdecimal() for word in self.placement):
            raise ValueError(
                f"experiment.placement must be packed, spread or the number of a GPU for each rank, "
                f"got {list(self.placement)}"
            )
        if not self.points:
            for point in self._combinations():
                point.check()

    def list_points(self) -> list[TransferPoint]:
        """Return the points, each once and with its repeats.

        *volume* lowers the repeats of large points: 3 at least.  Raise a `ValueError` for a file of
        points that cannot be read, or has a point that cannot be.
        """
        points = read(Path(self.points)) if self.points else self._combinations()
        return list({point.label: self._limited(point) for point in points}.values())

    def _combinations(self) -> list[TransferPoint]:
        axes = product(self.patterns, self.size, self.blocks, self.concurrency, self.schedule)
        how = self.operation, self.layout
        return [
            TransferPoint(pattern, blocks, size, conc, *how, schedule)
            for pattern, size, blocks, conc, schedule in axes
        ]

    def _limited(self, point: TransferPoint) -> TransferPoint:
        enough = max(3, self.volume // (point.blocks * point.size)) if self.volume else point.repeat or self.repeat
        return point._replace(repeat=min(point.repeat or self.repeat, enough))


def check(config: Config) -> Iterator[str]:
    """Yield what cannot be: points, more ranks than GPUs, or more bytes than memory, for which the worst is named.

    Nothing is run: ranks are counted, placed, and the point that needs most memory at one place is
    named if it is too much.
    """
    try:
        options = TransferOptions.of(config)
        points = options.list_points()
    except ValueError as error:
        yield str(error)
        return
    hw, placement = config.hw, options.placement
    ranks = _ranks(options, points)
    gpus = hw.gpus * hw.nodes
    if placement[0].isdecimal():
        yield from _listed(placement, len(ranks), gpus, hw.name)
    elif gpus and len(ranks) > gpus:
        yield (
            f"experiment.ranks={options.ranks}: {len(ranks)} ranks take a GPU each and hw={hw.name} has {gpus}; "
            f"set experiment.ranks={gpus} or less, take a larger machine, or let ranks share GPUs: "
            f"experiment.placement=[{','.join(str(index % gpus) for index in range(len(ranks)))}]"
        )
    else:
        yield from _memory(config, options, points)


def _listed(placement: Sequence[str], ranks: int, gpus: int, hw: str) -> Iterator[str]:
    if len(placement) < ranks:
        yield f"experiment.placement lists {len(placement)} GPUs for {ranks} ranks; name one for each"
    for gpu in placement:
        if int(gpu) >= gpus:
            known = f"hw={hw} has {gpus} GPUs, numbered from 0, and no {gpu}"
            yield f"experiment.placement: {known}; set packed or spread"
            return


def _memory(config: Config, options: TransferOptions, points: Sequence[TransferPoint]) -> Iterator[str]:
    tasks = [point.task(options.ranks) for point in points]
    where = _places(config, options, points)
    needs = {name: region_bytes(name, tasks) for name in where}
    short, line = shortage(config.hw, where, needs, here=config.target == "real")
    if not short:
        return

    def need(task: Task) -> int:
        area = area_bytes(task["blocks"], task["size"], task["concurrency"], task["scattered"])
        return area * sum(rank in flow for flow in task["flows"] for rank in short)

    worst = max(range(len(points)), key=lambda index: need(tasks[index]))
    yield (
        f"{points[worst].label} needs {line}: each end of a flow holds blocks x size x concurrency bytes, twice "
        "that if scattered; lower experiment.blocks, experiment.size, experiment.concurrency or experiment.ranks"
    )


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Run every point and return its rows, as listed.

    A rank that is lost ends its job; the points after the one that it was lost in are run in a
    second job, with new ranks, and there is no third.  Such points are failures of the result; so
    are slots that hold other bytes than were sent, where memory has contents and *verify* is set.

    Raises:
        ConfigError: `check` finds something.
        BackendUnavailable: The engine does not work here at all.
    """
    if problems := list(check(config)):
        raise ConfigError("\n".join(problems))
    options = TransferOptions.of(config)
    listed = options.list_points()
    left = shuffled(listed, config.seed) if options.order == "shuffled" else listed
    rows: dict[TransferPoint, TransferRow] = {}
    outcomes: list[Outcome] = []
    while left and len(outcomes) < JOBS:
        progress(len(rows) / len(listed), f"{len(left)} points", 1.0)
        outcomes.append(_attempt(target, _specs(config, options, left), first=not outcomes))
        new = _rows(left, outcomes[-1], options)
        rows |= {row.point: row for row in new}
        left = left[len(new) :]
    progress(1.0, "")
    rows |= {point: TransferRow(point, point.flows(options.ranks), (), "not run") for point in left}
    return _result(config, options, [rows[point] for point in listed], outcomes)


def _attempt(target: Target, specs: Sequence[RankSpec], first: bool) -> Outcome:
    try:
        outcome = target.run(specs)
    except TransferError as error:
        if first and isinstance(error, BackendUnavailable):
            raise
        return Outcome({"job": RankResult("job", error=f"{type(error).__name__}: {error}")}, seconds=0.0)
    ranks = {name: replace(rank, error=rank.error or _said(rank)["error"]) for name, rank in outcome.ranks.items()}
    return replace(outcome, ranks=ranks)


def _said(rank: RankResult) -> dict[str, Any]:
    # A rank that died returned nothing, and so has ended no point.
    return rank.value or {"points": [], "error": ""}


def _rows(points: Sequence[TransferPoint], outcome: Outcome, options: TransferOptions) -> list[TransferRow]:
    done = max((_said(rank)["points"] for rank in outcome.ranks.values()), key=len)
    errors = [rank.error.partition(":")[0] for rank in outcome.ranks.values() if rank.error]
    # A rank that was killed cannot say why; what the others saw names it.
    status = "PeerLost" if "PeerLost" in errors else errors[0] if errors else "ok"
    records: dict[str, list[Any]] = {point.label: [] for point in points}
    for record in (record for rank in outcome.ranks.values() for record in rank.transfers):
        records.get(record.label, []).append(record)
    rows = []
    for point, values in zip(points, [*done, {}], strict=False):
        verified = values.get("verified") if options.verify else None
        wrong = verified is not None and verified < values["slots"]
        ended = "corrupt" if wrong else "ok" if values else status
        flows = point.flows(options.ranks)
        rows.append(TransferRow(point, flows, records[point.label], ended, values.get("slots", 0), verified))
    return rows


def _result(
    config: Config, options: TransferOptions, rows: Sequence[TransferRow], outcomes: Sequence[Outcome]
) -> Result:
    whole = _merged(outcomes)
    lost = [row.point.label for row in rows if row.status not in ("ok", "corrupt", "not run")]
    failures = [f"{name}: {rank.error}" for name, rank in whole.ranks.items() if rank.error]
    failures += [f"{label} was not completed" for label in lost]
    failures += [
        f"{row.point.label}: {row.wrong} slots hold other bytes than were sent" for row in rows if row.wrong
    ]
    if left := sum(row.status == "not run" for row in rows):
        failures.append(
            f"{left} points were not run: a rank was lost in {len(outcomes)} jobs, and no third is started"
        )
    return Result(
        summary=metrics(rows),
        tables=tables(rows),
        transfers=[record for row in rows for record in row.records],
        failures=failures,
        notes=_notes(config, options),
        outcome=whole,
    )


def _merged(outcomes: Sequence[Outcome]) -> Outcome:
    # Seconds and events add up; ranks, links and pools of the second job are named "job 2 NAME".
    def of_all(part: str) -> dict[str, Any]:
        items = [(f"job {number} " if number > 1 else "", getattr(each, part)) for number, each in numbered]
        return {f"{prefix}{name}": value for prefix, values in items for name, value in values.items()}

    numbered = list(enumerate(outcomes, 1))
    return Outcome(
        ranks=of_all("ranks"),
        seconds=sum(outcome.seconds for outcome in outcomes),
        links=of_all("links"),
        pools=of_all("pools"),
        events=sum(outcome.events for outcome in outcomes),
    )


def _ranks(options: TransferOptions, points: Sequence[TransferPoint]) -> list[str]:
    return names([flow for point in points for flow in point.flows(options.ranks)])


def _places(config: Config, options: TransferOptions, points: Sequence[TransferPoint]) -> dict[str, Place]:
    return places(config.hw, _ranks(options, points), options.placement)


def _specs(config: Config, options: TransferOptions, points: Sequence[TransferPoint]) -> list[RankSpec]:
    arguments = {
        "points": [point.task(options.ranks) for point in points],
        "warmup": options.warmup,
        "verify": options.verify,
        "pause": options.pause if config.target == "model" else 0.0,
        "seed": config.seed,
        "timeout": config.backend.timeout,
    }
    where = _places(config, options, points)
    return [
        RankSpec(name, "experiments.transfer.exchange:exchange", place, arguments) for name, place in where.items()
    ]


def _notes(config: Config, options: TransferOptions) -> Sequence[str]:
    if options.verify and config.target == "model" and config.memory == "timing":
        return ["no bytes were verified: the model keeps sizes only; set memory=tracked to check contents"]
    return []
