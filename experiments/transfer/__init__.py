# SPDX-License-Identifier: Apache-2.0
"""Move blocks between ranks: size x batch x concurrency x pattern, in the columns of nixlbench.

One job runs all points, for starting ranks takes longer than most points.  A rank that is lost takes its point with
it; those after it are run in a second job.  Ranks run `exchange`, `points` says who sends to whom and where, `rows`
has the tables.  `pdsim calibrate` and `pdsim validate` run this experiment with a file of points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from experiments.jobs import attempt, combined, ended_by, refuse, unverified
from experiments.transfer.points import (
    SCHEDULES,
    TransferPoint,
    TransferRow,
    metrics,
    names,
    pattern,
    places,
    read,
    region_bytes,
    shortage,
    shuffled,
    tables,
)
from pdsim.config import Config, ExperimentOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt, Seconds, Size
from pdsim.results.record import Result
from pdsim.transfer.job import Outcome, RankResult, RankSpec, Target


@dataclass(frozen=True, kw_only=True)
class TransferOptions(ExperimentOptions):
    """The points, all combinations of five lists or the rows of a file, and how each is measured.

    A file is read when the points are listed.
    """

    name: str = "transfer"
    # also with a count: pairs:2, incast:3, fanout:3, cross:2x2, ring:4, alltoall:4, tp:2x4; and nixlbench's names
    patterns: Annotated[tuple[Annotated[str, pattern], ...], "non-empty"] = (
        *("pair", "bidirectional", "incast", "fanout", "alltoall"),
    )
    blocks: Annotated[tuple[PositiveInt, ...], "non-empty"] = (1, 16)  # descriptors of a transfer
    # bytes of a descriptor
    size: Annotated[tuple[Annotated[Size, "> 0"], ...], "non-empty"] = (4096, 65536, 1048576)
    # transfers that an initiator keeps in flight to each of its peers
    concurrency: Annotated[tuple[PositiveInt, ...], "non-empty"] = (1,)
    # how an initiator goes on: rounds, serial; -rotated: each from another peer
    schedule: Annotated[tuple[Annotated[str, SCHEDULES], ...], "non-empty"] = ("free",)
    points: str = ""  # a CSV file of points instead of all combinations of the five above
    ranks: Annotated[int, ">= 2"] = 4  # of a pattern that does not say how many itself
    repeat: PositiveInt = 100  # measured transfers of each flow
    volume: Size = 0  # bytes of a flow after which fewer repeats do, though not less than 3; 0 is no limit
    warmup: NotNegativeInt = 10  # transfers of each flow before that
    operation: Annotated[str, "one of write, read"] = "write"  # who posts, not where the bytes go
    # scattered: every block at a random place of an area twice as large
    layout: Annotated[str, "one of contiguous, scattered"] = "contiguous"
    # or "spread": one node after the other; or the GPU of each rank
    placement: Annotated[tuple[str, ...], "non-empty"] = ("packed",)
    order: Annotated[str, "one of listed, shuffled"] = "listed"  # shuffled: by the seed
    pause: Seconds = 0.0  # of the model: what a program takes from the end of a transfer to its next one
    skew: Seconds = 0.0  # of the model: by up to how much ranks begin a point apart
    verify: bool = True  # compare checksums at the receiver, where memory has contents

    def list_points(self) -> list[TransferPoint]:
        """Return the points, each once and with its repeats; raise a `ConfigError` if a file cannot be read."""
        points = read(Path(self.points)) if self.points else self._combinations()
        return list({point.label: self._limited(point) for point in points}.values())

    def _combinations(self) -> list[TransferPoint]:
        axes = product(self.patterns, self.size, self.blocks, self.concurrency, self.schedule)
        return [
            TransferPoint(pattern, blocks, size, concurrency, self.operation, self.layout, schedule)
            for pattern, size, blocks, concurrency, schedule in axes
        ]

    def _limited(self, point: TransferPoint) -> TransferPoint:
        repeat = point.repeat or self.repeat
        enough = max(3, self.volume // (point.blocks * point.size)) if self.volume else repeat
        return point._replace(repeat=min(repeat, enough))


def check(config: Config) -> Iterator[str]:
    """Yield each problem: invalid points, more ranks than GPUs, more bytes than memory, with the worst point."""
    try:
        options = TransferOptions.of(config)
        points = options.list_points()
    except ConfigError as error:
        yield str(error)
        return
    hw, placement = config.hw, options.placement
    ranks, gpus = len(_ranks(options, points)), config.hw.gpus * config.hw.nodes
    if placement not in (("packed",), ("spread",)) and not all(word.isdecimal() for word in placement):
        yield f"experiment.placement={list(placement)} must be packed, spread or the number of a GPU for each rank"
    elif placement[0].isdecimal():
        if len(placement) < ranks:
            yield f"experiment.placement lists {len(placement)} GPUs for {ranks} ranks; name one for each"
        for gpu in [gpu for gpu in placement if int(gpu) >= gpus][:1]:
            known = f"hw={hw.name} has {gpus} GPUs, numbered from 0, and no {gpu}"
            yield f"experiment.placement: {known}; set packed or spread"
    elif gpus and ranks > gpus:
        yield (
            f"experiment.ranks={options.ranks}: {ranks} ranks take a GPU each and hw={hw.name} has {gpus}; "
            f"set experiment.ranks={gpus} or less, take a larger machine, or let ranks share GPUs: "
            f"experiment.placement=[{','.join(str(index % gpus) for index in range(ranks))}]"
        )
    else:
        where = places(hw, _ranks(options, points), placement)
        needs = {name: region_bytes(name, points, options.ranks) for name in where}
        short, line = shortage(hw, where, needs, here=config.target == "real")
        if short:

            def need(point: TransferPoint) -> int:
                return point.area * sum(rank in flow for flow in point.flows(options.ranks) for rank in short)

            yield (
                f"{max(points, key=need).label} needs {line}: each end of a flow holds blocks x size x concurrency "
                "bytes, twice that if scattered; lower experiment.blocks, experiment.size, experiment.concurrency "
                "or experiment.ranks"
            )


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Run every point and return its rows, as listed.

    Points that a lost rank ended, or that its second job did not reach, are failures of the result; so are slots
    that hold other bytes than were sent, where memory has contents.

    Raises:
        ConfigError: `check` finds something.
        BackendUnavailable: The engine does not work here at all.
    """
    refuse(check(config))
    options = TransferOptions.of(config)
    listed = options.list_points()
    left = shuffled(listed, config.seed) if options.order == "shuffled" else listed
    rows: dict[TransferPoint, TransferRow] = {}
    outcomes: dict[str, Outcome] = {}
    for job in ("", "job 2"):  # the second for what a lost rank kept the first from
        if not left:
            break
        progress(len(rows) / len(listed), f"{len(left)} points", 1.0)
        outcome = attempt(target, _specs(config, options, left), "job", first=not outcomes)
        ranks = {
            name: replace(rank, error=rank.error or _value(rank)["error"]) for name, rank in outcome.ranks.items()
        }
        outcomes[job] = replace(outcome, ranks=ranks)
        new = _rows(left, outcomes[job], options)
        rows |= {row.point: row for row in new}
        left = left[len(new) :]
    progress(1.0, "")
    rows |= {point: TransferRow(point, point.flows(options.ranks), (), "not run") for point in left}
    ordered = [rows[point] for point in listed]
    lost = [row.point.label for row in ordered if row.status not in ("ok", "corrupt", "not run")]
    failures = [f"{label} was not completed" for label in lost]
    failures += [
        f"{row.point.label}: {row.wrong} slots hold other bytes than were sent" for row in ordered if row.wrong
    ]
    if left:
        failures.append(f"{len(left)} points were not run: a rank was lost in 2 jobs, and no third is started")
    return combined(
        outcomes,
        summary=metrics(ordered),
        tables=tables(ordered),
        failures=failures,
        notes=unverified(config) if options.verify else [],
        transfers=[record for row in ordered for record in row.records],
    )


def _value(rank: RankResult) -> dict[str, Any]:
    # A rank that died returned nothing, and so has ended no point.
    return rank.value or {"points": [], "error": ""}


def _rows(points: Sequence[TransferPoint], outcome: Outcome, options: TransferOptions) -> list[TransferRow]:
    # Those that were completed, and the one that an error ended.
    done = max((_value(rank)["points"] for rank in outcome.ranks.values()), key=len)
    status = ended_by(outcome) or "ok"
    records: dict[str, list[Any]] = {point.label: [] for point in points}
    for record in (record for rank in outcome.ranks.values() for record in rank.transfers):
        records.get(record.label, []).append(record)
    rows = []
    for point, values in zip(points, [*done, {}], strict=False):
        slots, verified = values.get("slots", 0), values.get("verified") if options.verify else None
        wrong = verified is not None and verified < slots
        ended = "corrupt" if wrong else "ok" if values else status
        rows.append(TransferRow(point, point.flows(options.ranks), records[point.label], ended, slots, verified))
    return rows


def _ranks(options: TransferOptions, points: Sequence[TransferPoint]) -> list[str]:
    return names([flow for point in points for flow in point.flows(options.ranks)])


def _specs(config: Config, options: TransferOptions, points: Sequence[TransferPoint]) -> list[RankSpec]:
    arguments = {
        "points": [list(point) for point in points],
        "ranks": options.ranks,
        "warmup": options.warmup,
        "verify": options.verify,
        "pause": options.pause if config.target == "model" else 0.0,
        "skew": options.skew if config.target == "model" else 0.0,
        "seed": config.seed,
        "timeout": config.backend.timeout,
    }
    where = places(config.hw, _ranks(options, points), options.placement)
    return [RankSpec(name, "experiments.transfer.exchange:exchange", at, arguments) for name, at in where.items()]
