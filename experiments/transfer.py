"""Move blocks between ranks: size x batch x concurrency x pattern, in the columns of nixlbench.

Every point is a job of its own, so that a rank that is lost takes one row with it and not the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments._exchange import area_bytes
from experiments._transfer_layout import PATTERNS, flows, names, place, shortage
from experiments._transfer_rows import Point, Row, merged, metrics, row, tables
from pdsim.config import Config
from pdsim.errors import BackendUnavailable, ConfigError, TransferError
from pdsim.results.record import Result
from pdsim.transfer import Outcome, Place, RankResult, RankSpec, Target
from pdsim.units import Size

__all__ = ["Options", "check", "run"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to sweep over, and how each point is measured: `conf/experiment/transfer.yaml`."""

    patterns: tuple[str, ...] = PATTERNS
    blocks: tuple[int, ...] = (1, 16)  # descriptors of a transfer
    size: tuple[Size, ...] = (4096, 65536, 1048576)  # bytes of a descriptor
    concurrency: tuple[int, ...] = (1,)  # transfers that an initiator keeps in flight to each of its peers
    ranks: int = 4  # of incast, fanout and alltoall; the other patterns take two
    repeat: int = 100  # measured transfers of each flow
    warmup: int = 10  # transfers of each flow before that
    operation: str = "write"  # or "read": who posts, not where the bytes go
    layout: str = "contiguous"  # or "scattered": every block at a random place of an area twice as large
    placement: str = "packed"  # or "spread": one node after the other
    verify: bool = True  # compare checksums at the receiver, where memory has contents

    def __post_init__(self) -> None:
        for name in ("patterns", "blocks", "size", "concurrency"):
            if not getattr(self, name):
                raise ValueError(f"experiment.{name} must have one value or more, got none")
        for name, least in (("blocks", 1), ("size", 1), ("concurrency", 1)):
            for value in getattr(self, name):
                _at_least(name, value, least)
        for name, least in (("ranks", 2), ("repeat", 1), ("warmup", 0)):
            _at_least(name, getattr(self, name), least)
        for pattern in self.patterns:
            _one_of("patterns", pattern, PATTERNS)
        _one_of("operation", self.operation, ("write", "read"))
        _one_of("layout", self.layout, ("contiguous", "scattered"))
        _one_of("placement", self.placement, ("packed", "spread"))

    def points(self) -> list[Point]:
        """Return the points in the order in which they are run."""
        axes = product(self.patterns, self.size, self.blocks, self.concurrency)
        return [Point(pattern, blocks, size, concurrency) for pattern, size, blocks, concurrency in axes]


def check(config: Config) -> Iterator[str]:
    """Yield what cannot be: more ranks than GPUs, or more bytes than memory, of which the worst point is named."""
    options, hw = _options(config), config.hw
    gpus = hw.gpus * hw.nodes
    need = max(len(names(flows(pattern, options.ranks))) for pattern in options.patterns)
    if gpus and need > gpus:
        yield (
            f"experiment.ranks={options.ranks}: {need} ranks take a GPU each and hw={hw.name} has {gpus}; "
            f"set experiment.ranks={gpus} or less, or take a larger machine"
        )
        return
    (need, line), point = max((_shortage(config, options, point), point) for point in options.points())
    if need:
        yield (
            f"{point.label} needs {line}: each end of a flow holds blocks x size x concurrency bytes, twice that if "
            "scattered; lower experiment.blocks, experiment.size, experiment.concurrency or experiment.ranks"
        )


def run(config: Config, target: Target, progress: Callable[[float, str], None]) -> Result:
    """Run every point and return its rows.

    Raise a `ConfigError` if `check` finds anything, and `BackendUnavailable` if the engine does not work here at all.
    """
    if problems := list(check(config)):
        raise ConfigError("\n".join(problems))
    options = _options(config)
    points = options.points()
    rows: list[Row] = []
    outcomes: dict[str, Outcome] = {}
    for number, point in enumerate(points):
        progress(number / len(points), point.label)
        outcome = _attempt(target, _specs(config, options, point), first=not rows)
        rows.append(row(point, outcome, len(flows(point.pattern, options.ranks)), verify=options.verify))
        outcomes[point.label] = outcome
    progress(1.0, "")
    whole = merged(outcomes)
    failures = [f"{name}: {rank.error}" for name, rank in whole.ranks.items() if rank.error]
    failures += [f"{row.point.label}: {row.wrong} slots hold other bytes than were sent" for row in rows if row.wrong]
    return Result(
        summary=metrics(rows),
        tables=tables(rows),
        transfers=[record for row in rows for record in row.records],
        failures=failures,
        notes=_notes(config, options),
        outcome=whole,
    )


def _attempt(target: Target, specs: Sequence[RankSpec], first: bool) -> Outcome:
    """Run a point; a job that cannot be started is an outcome too, unless no job ever could."""
    try:
        return target.run(specs)
    except TransferError as error:
        if first and isinstance(error, BackendUnavailable):
            raise
        return Outcome({"job": RankResult("job", error=f"{type(error).__name__}: {error}")}, seconds=0.0)


def _options(config: Config) -> Options:
    return Options(**{key: value for key, value in config.experiment.items() if key != "name"})


def _places(config: Config, options: Options, pattern: str) -> dict[str, Place]:
    ranks = names(flows(pattern, options.ranks))
    return {name: place(config.hw, index, options.placement == "spread") for index, name in enumerate(ranks)}


def _shortage(config: Config, options: Options, point: Point) -> tuple[int, str]:
    area = area_bytes(point.blocks, point.size, point.concurrency, options.layout == "scattered")
    pairs = flows(point.pattern, options.ranks)
    return shortage(config.hw, _places(config, options, point.pattern), pairs, area, here=config.target == "real")


def _specs(config: Config, options: Options, point: Point) -> list[RankSpec]:
    arguments = {
        "flows": [list(flow) for flow in flows(point.pattern, options.ranks)],
        "blocks": point.blocks,
        "size": point.size,
        "concurrency": point.concurrency,
        "repeat": options.repeat,
        "warmup": options.warmup,
        "read": options.operation == "read",
        "scattered": options.layout == "scattered",
        "verify": options.verify,
        "seed": config.seed,
        "timeout": config.backend.timeout,
        "label": point.label,
    }
    places = _places(config, options, point.pattern)
    return [RankSpec(name, "experiments._exchange:exchange", where, arguments) for name, where in places.items()]


def _notes(config: Config, options: Options) -> Sequence[str]:
    if options.verify and config.target == "model" and config.memory == "timing":
        return ["no bytes were verified: the model keeps sizes only; set memory=tracked to check contents"]
    return []


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"experiment.{name} must be >= {least}, got {value}")


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"experiment.{name} must be one of {', '.join(allowed)}, got {value!r}")
