"""Move blocks between ranks: size x batch x concurrency x pattern, in the columns of nixlbench.

Every point is a job of its own, so that a rank that is lost takes one row with it and not the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from experiments._exchange import area_bytes
from experiments._transfer_rows import Point, Row, metrics, row, tables
from pdsim.config import Config
from pdsim.errors import ConfigError
from pdsim.results.record import Result
from pdsim.transfer import Outcome, Place, RankResult, RankSpec, Target
from pdsim.units import Size, format_size

__all__ = ["PATTERNS", "Options", "check", "flows", "run"]

PATTERNS = ("pair", "bidirectional", "incast", "fanout", "alltoall")


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
    """Yield one line for each thing that cannot be: more ranks than GPUs, more bytes than memory."""
    options = _options(config)
    gpus, need = config.hw.gpus * config.hw.nodes, max(_ranks(pattern, options) for pattern in options.patterns)
    if gpus and need > gpus:
        yield (
            f"experiment.ranks={options.ranks}: {need} ranks take a GPU each and hw={config.hw.name} has {gpus}; "
            f"set experiment.ranks={gpus} or less, or take a larger machine"
        )
        return
    problems = [problem for point in options.points() for problem in _too_large(config, options, point)]
    yield from [line for _, line in sorted(problems, reverse=True)[:1]]  # the greediest says what there is to say


def run(config: Config, target: Target, progress: Callable[[float, str], None]) -> Result:
    """Run every point and return its rows.  Raise a `ConfigError` before the first if `check` finds anything."""
    problems = list(check(config))
    if problems:
        raise ConfigError("\n".join(problems))
    options = _options(config)
    points = options.points()
    rows: list[Row] = []
    ranks: dict[str, RankResult] = {}
    merged = Outcome(ranks={}, seconds=0.0)
    for number, point in enumerate(points):
        progress(number / len(points), point.label)
        outcome = target.run(_specs(config, options, point))
        rows.append(row(point, outcome, len(flows(point.pattern, options.ranks)), verify=options.verify))
        ranks |= {f"{point.label} {name}": rank for name, rank in outcome.ranks.items()}
        merged = _merged(merged, outcome, point.label)
    progress(1.0, "")
    failures = [f"{name}: {rank.error}" for name, rank in ranks.items() if rank.error]
    failures += [f"{row.point.label}: {row.wrong} slots hold other bytes than were sent" for row in rows if row.wrong]
    return Result(
        summary=metrics(rows),
        tables=tables(rows),
        transfers=[record for row in rows for record in row.records],
        failures=failures,
        notes=_notes(config, options),
        outcome=replace(merged, ranks=ranks),
    )


def _options(config: Config) -> Options:
    return Options(**{key: value for key, value in config.experiment.items() if key != "name"})


def _ranks(pattern: str, options: Options) -> int:
    return len({name for flow in flows(pattern, options.ranks) for name in flow})


def flows(pattern: str, ranks: int) -> list[tuple[str, str]]:
    """Return the rank that sends and the rank that receives of every flow of *pattern*."""
    names = [f"rank{index}" for index in range(ranks)]
    first, others = names[0], names[1:]
    return {
        "pair": [(first, names[1])],
        "bidirectional": [(first, names[1]), (names[1], first)],
        "incast": [(other, first) for other in others],
        "fanout": [(first, other) for other in others],
        "alltoall": [(one, other) for one in names for other in names if one != other],
    }[pattern]


def _specs(config: Config, options: Options, point: Point) -> list[RankSpec]:
    pairs = flows(point.pattern, options.ranks)
    arguments = {
        "flows": [list(pair) for pair in pairs],
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
    names = sorted({name for pair in pairs for name in pair}, key=lambda name: int(name.removeprefix("rank")))
    return [
        RankSpec(name, "experiments._exchange:exchange", _place(config, options, index), arguments)
        for index, name in enumerate(names)
    ]


def _place(config: Config, options: Options, index: int) -> Place:
    """Return where rank *index* runs: GPUs in order, packed or one node after the other; hosts if there are none."""
    hw = config.hw
    if options.placement == "spread":
        return Place(index % hw.nodes, index // hw.nodes if hw.gpus else None)
    return Place(index // hw.gpus, index % hw.gpus) if hw.gpus else Place(0)


def _too_large(config: Config, options: Options, point: Point) -> Iterator[tuple[int, str]]:
    """Yield bytes and a line if there is a place whose memory cannot hold what *point* needs there."""
    pairs = flows(point.pattern, options.ranks)
    area = area_bytes(point.blocks, point.size, point.concurrency, options.layout == "scattered")
    needs: dict[Place, int] = {}
    for spec in _specs(config, options, point):
        needs[spec.place] = needs.get(spec.place, 0) + area * sum(spec.name in pair for pair in pairs)
    place, need = max(needs.items(), key=lambda item: item[1])
    room, what = _room(config, place)
    if need > room:
        line = (
            f"{point.label} needs {need} bytes ({format_size(need)}) on {what}, which has {room} "
            f"({format_size(room)}): each end of a flow holds blocks x size x concurrency bytes, twice that if "
            "scattered; lower experiment.blocks, experiment.size, experiment.concurrency or experiment.ranks"
        )
        yield need, line


def _room(config: Config, place: Place) -> tuple[int, str]:
    if place.gpu is not None and config.hw.gpu is not None:
        return config.hw.gpu.memory, f"GPU {place.gpu} of node {place.node}"
    return config.hw.host.memory, f"the host of node {place.node}"


def _merged(total: Outcome, one: Outcome, label: str) -> Outcome:
    def named(values: Mapping[str, float]) -> dict[str, float]:
        return {f"{label} {name}": value for name, value in values.items()}

    return Outcome(
        ranks={},
        seconds=total.seconds + one.seconds,
        links=dict(total.links) | named(one.links),
        pools=dict(total.pools) | named(one.pools),
        events=total.events + one.events,
    )


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
