# SPDX-License-Identifier: Apache-2.0
"""Does symmetric memory speed up the all-gather of context-parallel KV?  SGLang PR 24040.

Before, K and V of all context-parallel ranks are gathered into plain memory; after, into a symmetric pool that is
registered with all ranks (``kv.gather=both``: from it, too).  Pieces are equal, or of unequal sequences, padded to
the longest rank.  The pool is reserved before the run, 4 GiB, or, as the review of the change asks, grows during it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from experiments import allgather
from experiments.reports.claims import Claim, ReportRun
from pdsim.config import Config, ExperimentOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt, Size
from pdsim.results.record import Result
from pdsim.transfer.group import SYMMETRIC
from pdsim.transfer.job import Target

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
        *(4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20, 128 << 20, 256 << 20),
    )
    # tokens of sequences, split over the ranks in a zigzag and padded
    batches: tuple[Annotated[tuple[PositiveInt, ...], "non-empty"], ...] = ((9, 9), (8192,), (4096, 77, 1000))
    row: Annotated[Size, "> 0"] = 2048  # bytes of a token: K or V of eight heads of 128 bf16 numbers
    repeat: PositiveInt = 20  # measured all-gathers of each point
    warmup: NotNegativeInt = 5  # before them

    def gathering(self, memory: str = SYMMETRIC) -> allgather.AllgatherOptions:
        """Return the options of `experiments.allgather`; *memory* is what plain memory is compared with."""
        shared = ("ranks", "size", "batches", "row", "repeat", "warmup")
        own = {name: getattr(self, name) for name in shared}
        return allgather.AllgatherOptions(pools=("default", memory), **own)


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Gather in plain memory, in a reserved symmetric pool and in one that grows; return the verdicts of `CLAIMS`.

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
    left = ", ".join(str(count) for count in options.ranks if count not in ranks)
    trial.notes += [f"hw={config.hw.name} has too few GPUs for {left} ranks, left out"] if left else []
    memory = "both" if config.kv.gather == "both" else SYMMETRIC
    gathered = trial.run("gathered", replace(options, ranks=ranks).gathering(memory))
    points: dict[str, dict[str, dict[str, Any]]] = {}
    for row in gathered.rows("All-gathers"):
        piece = f" x {row['piece']}" if row["batch"] == "-" else f" ranks, batch {row['batch']}"
        points.setdefault(f"{row['ranks']}{piece}", {})[row["pool"]] = row
    machine = f"{config.hw.name} {config.collective.name}"
    repaid = [count for at, pools in points.items() for count in _compare(trial, at, pools, memory, machine)]
    if repaid:
        span = f"{min(repaid):.3g} to {max(repaid):.3g}"
        trial.notes.append(f"a growth is made up for after {span} all-gathers of the size that caused it")
    return trial.result(CLAIMS)


def _compare(
    trial: ReportRun, at: str, pools: Mapping[str, Mapping[str, Any]], memory: str, machine: str
) -> list[float]:
    # Return after how many all-gathers the growth of the pool is made up for, if the pool grew and they are faster.
    plain, reserved, grown = (pools[name] for name in ("default", memory, f"{memory}, grown"))
    trial.add(EQUAL if plain["batch"] == "-" else PADDED, at, plain["med us"], reserved["med us"], machine=machine)
    if not grown["growths"] or grown["med us"] is None:
        return []
    stall = 1e3 * grown["growth ms"]
    trial.add(RESERVED, at, grown["med us"] + stall, reserved["med us"], machine=machine)
    trial.add(GROWN, at, plain["med us"], grown["med us"] + stall, machine=machine)
    saved = (plain["med us"] or 0.0) - grown["med us"]
    return [stall / saved] if saved > 0 else []
