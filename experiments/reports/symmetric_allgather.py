# SPDX-License-Identifier: Apache-2.0
"""Does symmetric memory speed up the all-gather of context-parallel KV?  SGLang PR 24040.

Before, the buffer that K and V of all context-parallel ranks are gathered into is plain memory;
after, it is allocated from a symmetric pool, registered with all ranks.  Equal pieces, and batches
of unequal sequences, which are padded to the longest rank.  ``kv.gather=both`` has the input
symmetric, too.  The pool is reserved before the run, 4 GiB, or, as the review of the change asks, grows during it.

One run of `experiments.allgather` gives all points; claims compare rows of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from experiments import allgather
from experiments.reports.claims import Claim, ReportRun, as_rows
from pdsim.config import Config, ExperimentOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt, Size
from pdsim.results.record import Result
from pdsim.transfer.group import SYMMETRIC
from pdsim.transfer.job import Target

__all__ = ["CLAIMS", "SymmetricAllgatherOptions", "run"]

EQUAL = Claim("equal", "an all-gather of equal pieces takes less time in symmetric memory", "us")
PADDED = Claim("padded", "one of unequal sequences, padded, does too", "us")
RESERVED = Claim("reserved", "the first of its size takes less if the pool was reserved than if it grows", "us")
GROWN = Claim("grown", "the first of its size takes less than in plain memory though the pool grows", "us")
CLAIMS = (EQUAL, PADDED, RESERVED, GROWN)


@dataclass(frozen=True, kw_only=True)
class SymmetricAllgatherOptions(ExperimentOptions):
    """What is gathered; the rules for its keys are those of `experiments.allgather.AllgatherOptions`."""

    name: str = "seed_symmetric_allgather"
    ranks: tuple[PositiveInt, ...] = (2, 4, 8)  # context-parallel; more than there are GPUs is left out
    size: tuple[Annotated[Size, "> 0"], ...] = (  # bytes of each rank's piece
        4 << 10,
        64 << 10,
        1 << 20,
        8 << 20,
        32 << 20,
        128 << 20,
        256 << 20,
    )
    # tokens of sequences, split over the ranks in a zigzag and padded
    batches: tuple[tuple[PositiveInt, ...], ...] = (
        (9, 9),
        (8192,),
        (4096, 77, 1000),
    )
    row: Annotated[Size, "> 0"] = 2048  # bytes of a token: K or V of eight heads of 128 bf16 numbers
    repeat: PositiveInt = 20  # measured all-gathers of each point
    warmup: NotNegativeInt = 5  # before them

    def __post_init__(self) -> None:
        self.gathering()  # whose rules these are

    def gathering(self, memory: str = SYMMETRIC) -> allgather.AllgatherOptions:
        """Return the options of `experiments.allgather`; *memory* is what plain memory is compared with."""
        return allgather.AllgatherOptions(
            pools=("default", memory),
            ranks=self.ranks,
            size=self.size,
            batches=self.batches,
            row=self.row,
            repeat=self.repeat,
            warmup=self.warmup,
        )


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Gather in plain memory, in a reserved symmetric pool and in one that grows; return what became of `CLAIMS`.

    More ranks than GPUs are left out, and a note says so.  Raise a `ConfigError` if none is left.
    """
    options = SymmetricAllgatherOptions.of(config)
    if config.collective is None:
        raise ConfigError(
            "experiment=seed_symmetric_allgather needs collectives; set collective=nccl, or gloo on hosts"
        )
    gpus = config.hw.gpus * config.hw.nodes
    ranks = tuple(count for count in options.ranks if count <= gpus or not gpus)
    if not ranks:
        raise ConfigError(
            f"experiment.ranks={list(options.ranks)}: hw={config.hw.name} has {gpus} GPUs; take fewer ranks"
        )
    trial = ReportRun(config, target, progress, 1)
    left = [str(count) for count in options.ranks if count not in ranks]
    trial.notes += [f"hw={config.hw.name} has too few GPUs for {', '.join(left)} ranks, left out"] if left else []
    memory = "both" if config.kv.gather == "both" else SYMMETRIC
    gathered = trial.run("gathered", replace(options, ranks=ranks).gathering(memory))
    times: dict[str, dict[str, dict[str, Any]]] = {}
    for row in as_rows(gathered, "All-gathers"):
        times.setdefault(_at(row), {})[row["pool"]] = row
    for at, pools in times.items():
        for claim, before, after in _values(pools, memory):
            trial.add(claim, at, before, after, f"{config.hw.name} {config.collective.name}")
    trial.notes += list(_repaid(times, memory))
    return trial.result(CLAIMS)


def _at(row: dict[str, Any]) -> str:
    return (
        f"{row['ranks']} x {row['piece']}" if row["batch"] == "-" else f"{row['ranks']} ranks, batch {row['batch']}"
    )


def _values(pools: dict[str, dict[str, Any]], memory: str) -> Iterator[tuple[Claim, float | None, float | None]]:
    plain, reserved = pools["default"]["med us"], pools[memory]["med us"]
    yield EQUAL if pools["default"]["batch"] == "-" else PADDED, plain, reserved
    grown = pools[f"{memory}, grown"]
    if grown["growths"] and grown["med us"] is not None:
        first = grown["med us"] + 1e3 * grown["growth ms"]
        yield RESERVED, first, reserved
        yield GROWN, plain, first


def _repaid(measured: dict[str, dict[str, dict[str, Any]]], memory: str) -> Iterator[str]:
    counts = []
    for pools in measured.values():
        grown = pools[f"{memory}, grown"]
        times = [pools["default"]["med us"], grown["med us"]]
        if grown["growths"] and None not in times and times[1] < times[0]:
            counts.append(1e3 * grown["growth ms"] / (times[0] - times[1]))
    if counts:
        span = f"{min(counts):.3g} to {max(counts):.3g}"
        yield f"a growth is made up for after {span} all-gathers of the size that caused it"
