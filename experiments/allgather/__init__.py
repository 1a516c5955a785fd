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

from experiments.allgather.gather_rows import GatherPoint, GatherRow, merged, metrics, padded_size, rows, table
from pdsim.config import Config, ExperimentOptions
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import Size, format_size
from pdsim.kv.allgather import MEMORIES
from pdsim.results.record import Result
from pdsim.transfer.group import SYMMETRIC
from pdsim.transfer.job import Outcome, Place, RankSpec, Target

__all__ = ["AllgatherOptions", "check", "run"]


@dataclass(frozen=True, kw_only=True)
class AllgatherOptions(ExperimentOptions):
    """What to sweep over, and how each point is measured.

    Every combination of *ranks*, *pools* and *size* is a point with equal pieces, every one of *ranks*, *pools* and
    *batches* a padded one.  Raise a `ValueError` that names the key for values out of range, or if nothing is left
    to run.
    """

    name: str = "allgather"
    ranks: tuple[int, ...] = (2, 4, 8)  # that gather, a GPU each
    size: tuple[Size, ...] = (4096, 65536, 1 << 20, 16 << 20, 256 << 20)  # bytes of each rank's piece
    pools: tuple[str, ...] = ("default", SYMMETRIC)  # symmetric: of the output, as SGLang; both: the input's, too
    batches: tuple[tuple[int, ...], ...] = (  # tokens of sequences, split over the ranks in a zigzag and padded
        (9, 9),
        (8192,),
        (4096, 77, 1000),
    )
    row: Size = 2048  # bytes of a token: K or V of eight heads of 128 bf16 numbers
    growth: bool = True  # also with a symmetric pool that grows at run time
    repeat: int = 20  # measured all-gathers of each point
    warmup: int = 5  # all-gathers of each point before that
    verify: bool = True  # compare contents, where memory has any

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("size", 1)):
            for value in getattr(self, name):
                if value < least:
                    raise ValueError(f"experiment.{name} must be >= {least}, got {value}")
        for name, least in (("row", 1), ("repeat", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"experiment.{name} must be >= {least}, got {getattr(self, name)}")
        for pool in self.pools:
            if pool not in ("default", *MEMORIES[1:]):
                raise ValueError(f"experiment.pools must be one of default, symmetric, both, got {pool!r}")
        for batch in self.batches:
            if min(batch, default=0) < 1:
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

    The outcome is that of all jobs, each rank, link and pool named with its job.  A job that fails
    leaves rows with its status, and the next one runs all the same.

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
        notes=_notes(config, options),
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


def _notes(config: Config, options: AllgatherOptions) -> list[str]:
    if options.verify and config.target == "model" and config.memory == "timing":
        return ["no contents were verified: the model keeps sizes only; set memory=tracked to check them"]
    return []
