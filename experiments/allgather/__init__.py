# SPDX-License-Identifier: Apache-2.0
"""Gather over groups of ranks: plain and symmetric memory, equal and padded pieces, pools reserved or grown.

The points of one number of ranks are one job, so that real ranks meet once; those whose pool grows
are another.

Padded pieces are what context parallelism gathers: sequences split in a zigzag over the ranks, each
rank padded to the longest (`pdsim.kv.allgather.zigzag`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Annotated

from experiments.allgather.rows import GatherPoint, GatherRow, metrics, padded_size, rows, table
from experiments.jobs import merged, unverified
from pdsim.config import Config, ExperimentOptions
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt, Size, format_size
from pdsim.kv.allgather import MEMORIES
from pdsim.results.record import Result
from pdsim.transfer.group import SYMMETRIC
from pdsim.transfer.job import Outcome, Place, RankSpec, Target

__all__ = ["AllgatherOptions", "check", "run"]


@dataclass(frozen=True, kw_only=True)
class AllgatherOptions(ExperimentOptions):
    """What to sweep over, and how each point is measured."""

    name: str = "allgather"
    ranks: tuple[PositiveInt, ...] = (2, 4, 8)  # that gather, a GPU each
    size: tuple[Annotated[Size, "> 0"], ...] = (
        4096,
        65536,
        1 << 20,
        16 << 20,
        256 << 20,
    )  # bytes of each rank's piece
    # symmetric: of the output, as SGLang; both: the input's, too
    pools: tuple[Annotated[str, "one of default, symmetric, both"], ...] = ("default", SYMMETRIC)
    batches: tuple[
        tuple[PositiveInt, ...], ...
    ] = (  # tokens of sequences, split over the ranks in a zigzag and padded
        (9, 9),
        (8192,),
        (4096, 77, 1000),
    )
    row: Annotated[Size, "> 0"] = 2048  # bytes of a token: K or V of eight heads of 128 bf16 numbers
    growth: bool = True  # also with a symmetric pool that grows at run time
    repeat: PositiveInt = 20  # measured all-gathers of each point
    warmup: NotNegativeInt = 5  # all-gathers of each point before that
    verify: bool = True  # compare contents, where memory has any

    def __post_init__(self) -> None:
        for batch in self.batches:
            if not batch:
                raise ValueError(f"experiment.batches must have sequences of >= 1 token, got {list(batch)}")
        if not self.ranks or not self.pools or not (self.size or self.batches):
            raise ValueError("experiment.ranks must have a value, as must pools, and size or batches; got none")

    def jobs(self) -> list[list[GatherPoint]]:
        """Return the points of each job in the order in which they are run."""
        jobs = []
        for ranks, reserved in product(self.ranks, (True, False) if self.growth else (True,)):
            pools = self.pools if reserved else [pool for pool in self.pools if pool == SYMMETRIC]
            equal = [GatherPoint(ranks, size, pool, (), reserved) for size, pool in product(self.size, pools)]
            padded = [
                GatherPoint(ranks, padded_size(batch, ranks, self.row), pool, tuple(batch), reserved)
                for batch, pool in product(self.batches, pools)
            ]
            if equal or padded:
                jobs.append(equal + padded)
        return jobs


def check(config: Config) -> Iterator[str]:
    """Yield what cannot be: more ranks than GPUs, no collectives or not their library, too small a pool or memory.

    Memory is checked for the point that needs most of it: a source, a target and the reserved pool on one rank.
    """
    options, hw = AllgatherOptions.of(config), config.hw
    gpus = hw.gpus * hw.nodes
    if config.collective is None:
        yield "experiment=allgather needs collectives; set collective=nccl, or gloo on hosts"
        return
    problem = plugins.missing(plugins.COLLECTIVES, config.collective.implementation)
    if config.target == "real" and problem:
        yield f"collective={config.collective.name} {problem}"
    if gpus and max(options.ranks) > gpus:
        yield (
            f"experiment.ranks={max(options.ranks)}: each takes a GPU and hw={hw.name} has {gpus}; set "
            f"experiment.ranks={gpus} or less, or take a larger machine"
        )
    room = hw.gpu.memory if hw.gpu is not None else hw.host.memory // max(options.ranks)
    need = max((point.ranks + 1) * point.size for job in options.jobs() for point in job)
    if config.collective.pool + 2 * need > room:
        yield (
            f"collective.pool={config.collective.pool} ({format_size(config.collective.pool)}) and buffers "
            f"of {need} bytes do not fit into the {room} that a rank has; lower collective.pool or experiment.size"
        )


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Run every job and return the rows of its points.

    Raises:
        ConfigError: `check` finds something.
    """
    if problems := list(check(config)):
        raise ConfigError("\n".join(problems))
    assert config.collective is not None
    options = AllgatherOptions.of(config)
    jobs = options.jobs()
    gathers: list[GatherRow] = []
    outcomes: dict[str, Outcome] = {}
    for number, points in enumerate(jobs):
        name = f"{points[0].ranks} ranks{'' if points[0].reserved else ', growing'}"
        progress(number / len(jobs), name, (number + 1) / len(jobs))
        outcomes[name] = target.run(_specs(config, options, points))
        gathers += rows(points, options.row, outcomes[name], device=config.collective.timing == "device")
    progress(1.0, "")
    whole = merged(outcomes)
    failures = [f"{name}: {rank.error}" for name, rank in whole.ranks.items() if rank.error]
    failures += [
        f"{row.point.label}: {row.checked - row.right} pieces are wrong"
        for row in gathers
        if row.right < row.checked
    ]
    return Result(
        summary=metrics(gathers),
        tables=[table(gathers)],
        transfers=[record for rank in whole.ranks.values() for record in rank.transfers],
        failures=failures,
        notes=unverified(config) if options.verify else [],
        outcome=whole,
    )


def _specs(config: Config, options: AllgatherOptions, points: list[GatherPoint]) -> list[RankSpec]:
    assert config.collective is not None
    names = [f"rank{index}" for index in range(points[0].ranks)]
    symmetric = any(point.pool in MEMORIES for point in points)
    arguments = {
        "names": names,
        "points": [point._asdict() | {"label": point.label, "batch": list(point.batch)} for point in points],
        "pool": config.collective.pool if symmetric and points[0].reserved else 0,
        "row": options.row,
        "repeat": options.repeat,
        "warmup": options.warmup,
        "verify": options.verify,
    }
    program = "experiments.allgather.timed_gathers:measure"
    gpus = config.hw.gpus
    places = [Place(index // gpus, index % gpus) if gpus else Place() for index in range(len(names))]
    return [RankSpec(name, program, where, arguments) for name, where in zip(names, places, strict=True)]
