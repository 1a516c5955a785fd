# SPDX-License-Identifier: Apache-2.0
"""Time one write between two ranks: the smallest experiment there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdsim.config import Config, ExperimentOptions
from pdsim.core.units import Size
from pdsim.results.record import Metric, Result
from pdsim.transfer import Batch, Program
from pdsim.transfer.job import Place, Rank, RankSpec, Target


@dataclass(frozen=True, kw_only=True)
class OneWriteOptions(ExperimentOptions):
    """What is written."""

    name: str = "one_write"
    size: Size = 1 << 20  # bytes


def check(config: Config) -> Iterator[str]:
    """Yield what cannot be run."""
    if config.hw.gpus == 1:
        yield f"experiment=one_write needs two GPUs, or none, and hw={config.hw.name} has one a node"


def program(rank: Rank, size: int) -> Program:
    """Write *size* bytes from rank a to rank b; return the seconds that it took."""
    region = rank.endpoint.register(rank.device.allocate(size), "block")
    if rank.name == "b":
        rank.channel.send("a", rank.endpoint.address())
        yield rank.channel.receive()
        return None
    there = yield rank.channel.receive()
    peer = rank.endpoint.connect(there.payload)
    record = yield rank.endpoint.write(peer, Batch(region, peer.regions["block"], [0], [0], [size]))
    rank.channel.send("b", b"done")
    return record.completed - record.submitted


def run(config: Config, target: Target, progress: Callable[[float, str], None]) -> Result:
    """Run the two ranks, on the GPUs of the first node or on its host."""
    options = OneWriteOptions.of(config)
    where = (Place(gpu=0), Place(gpu=1)) if config.hw.gpus else (Place(), Place())
    ranks = [
        RankSpec(name, "pdsim_policies.one_write:program", place, {"size": options.size})
        for name, place in zip("ab", where, strict=True)
    ]
    progress(0.0, "one write")
    outcome = target.run(ranks)
    failures = [f"{name}: {rank.error}" for name, rank in outcome.ranks.items() if rank.error]
    seconds = Metric("write_s", outcome.ranks["a"].value, "from the call of write to its completion")
    return Result([seconds], transfers=outcome.ranks["a"].transfers, failures=failures, outcome=outcome)
