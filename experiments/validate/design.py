# SPDX-License-Identifier: Apache-2.0
"""What `experiments.validate` runs: other experiments, on points that no calibration has seen.

A class (`CLASSES`) is what errors are stated for; a part is one experiment, which may serve several.  Prediction and
measurement run the same parts with the same options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from experiments import allgather, handoff, serve, transfer
from experiments.transfer.points import TransferPoint, names, places, read, region_bytes, shortage, write
from pdsim.config import Config, ExperimentOptions
from pdsim.core import plugins
from pdsim.core.progress import ShowProgress, silent
from pdsim.core.units import NotNegativeInt, Size
from pdsim.results.record import Result
from pdsim.transfer.job import Target

Parts: TypeAlias = Sequence[ExperimentOptions]
"""Experiments of a design, in the order in which they are run."""

CLASSES = ("pair", "read", "contention", "handoff", "metadata", "allgather", "serve")
POINTS = "points.csv"
"""The file of a validation that its transfers are read from."""

HOSTED = 4  # ranks of a point, most, where there are no GPUs to count

MANY, FEW = ("4to4", "4to2", "2to4", "4to1"), ("1to2", "2to1", "2to2")
"""Ranks of prefill and decode that hand over: with eight ranks and more, and with fewer."""


@dataclass(frozen=True, kw_only=True)
class Design(ExperimentOptions):
    """Which points are run: the part of `experiments.validate.ValidateOptions` that says so.

    Sizes are in bytes, and chosen off the grid of `pdsim.calibration.samples`, so that no fit has seen them.
    What the machine has no ranks or memory for is left out, with a note, so that one design serves all machines.
    """

    # those that cannot be run are left out, with a note
    classes: tuple[Annotated[str, "one of pair, read, contention, handoff, metadata, allgather, serve"], ...] = (
        CLASSES
    )
    # bytes of a block, none on a calibration's grid
    size: tuple[Size, ...] = (12288, 98304, 786432, 6291456, 50331648)
    blocks: tuple[int, ...] = (1, 5, 12, 37, 290, 1700)  # of a pair; fewer than 20 points have no 95th percentile
    limit: Size = 0  # bytes of a transfer, most; 0 is 512 MiB between GPUs, and 64 MiB on hosts
    # of contention; those with more ranks than there are GPUs are left out
    patterns: tuple[str, ...] = (
        "pairs:2", "pairs:4", "bidirectional", "bidirectional:4", "incast:2", "incast:3", "incast:7", "fanout:2",
        "fanout:3", "fanout:7", "cross:2x2", "cross:4x4", "alltoall:4", "alltoall:8",
    )  # fmt: skip
    contended: tuple[Size, ...] = (98304, 6291456, 50331648)  # block sizes of those
    contended_blocks: tuple[int, ...] = (1, 37)  # blocks of those
    tokens: tuple[int, ...] = ()  # of handoffs; empty is 512, 2048, 8192 between GPUs, and 128, 512 on hosts
    tp: tuple[str, ...] = ()  # ranks of prefill and of decode, as 4to2; empty: chosen by the number of ranks
    slices: int = 1 << 19  # descriptors from a rank to another of a sliced handoff, most
    short: tuple[int, ...] = (128, 1024)  # tokens of handoffs whose metadata goes either way
    pieces: tuple[Size, ...] = (12288, 786432, 50331648)  # of all-gathers of 2, 4 and 8 ranks
    # of a pattern, a handoff or an all-gather, most; 0 is one for each GPU, and 4 on hosts
    ranks: NotNegativeInt = 0
    points: str = ""  # a CSV file of more points
    repeat: int = 20  # measured transfers of each point in each job
    volume: Size = 0  # bytes of a flow after which fewer repeats do; 0 is 4 GiB between GPUs, and 256 MiB on hosts
    placement: tuple[str, ...] = ("packed",)  # as `experiment.placement` of experiment=transfer
    # at most 3 minutes on loopback: one job, few pairs and reads and one length of handoffs, of at most 4 MiB
    quick: bool = False
    jobs: int = 0  # ranks are started anew, the mean counts; a third for handoffs and serve; 0 is 9, and 3 on hosts

    def sized(self, gpus: int) -> Self:
        """Return the design with what was left out chosen for a machine of *gpus* GPUs.

        Hosts, without any, move bytes at a hundredth of their rate: what takes GPUs five minutes would take hours.
        """
        if self.quick:
            few = replace(self, quick=False, size=(12288, 786432), blocks=(1, 12, 290), tokens=(128,), limit=1 << 22)
            classes = tuple(name for name in self.classes if name in ("pair", "read", "handoff"))
            return replace(few, classes=classes, repeat=5, jobs=1).sized(gpus)
        return replace(
            self,
            limit=self.limit or (1 << 29 if gpus else 1 << 26),
            tokens=self.tokens or ((512, 2048, 8192) if gpus else (128, 512)),
            volume=self.volume or (4 << 30 if gpus else 1 << 28),
            jobs=self.jobs or (9 if gpus else 3),
        )


def jobs_of(part: ExperimentOptions, most: int) -> int:
    """Return in how many jobs *part* is run: *most*, or a third for what takes long, handoffs and `serve`."""
    return most if part.name in ("transfer", "allgather") else max(1, most // 3)


def problems(config: Config, part: ExperimentOptions) -> list[str]:
    """Return what keeps *part* from being run."""
    check = getattr(plugins.resolve(plugins.EXPERIMENTS, part.name), "check", None)
    return list(check(replace(config, experiment=part))) if check else []


def run_part(config: Config, part: ExperimentOptions, target: Target, progress: ShowProgress = silent) -> Result:
    """Run *part* on *target*, and show *progress* how far it is."""
    run = plugins.resolve(plugins.EXPERIMENTS, part.name).run
    result: Result = run(replace(config, experiment=part), target, progress)
    return result


def parts(config: Config, design: Design, folder: Path, notes: list[str]) -> Iterator[ExperimentOptions]:
    """Yield the parts of *design* that *config* has ranks for, their points written to *folder*."""
    gpus = config.hw.gpus * config.hw.nodes
    design = design.sized(gpus)
    ranks = design.ranks or gpus or HOSTED
    if points := _points(config, design, ranks, notes):
        write(folder / POINTS, points)
        # as in `calibrate`: few repeats, for the median is what counts, by a rank that is warm; and no contents,
        # which take longer to fill and to compare than to transfer
        yield transfer.TransferOptions(
            points=str(folder / POINTS), repeat=design.repeat, volume=design.volume, warmup=10,
            placement=design.placement, order="shuffled", verify=False,
        )  # fmt: skip
    yield from _handoffs(config, design, design.tp or (MANY if ranks >= 8 else FEW), notes)
    if "allgather" in design.classes and config.collective is not None:
        yield _gathers(config, design, tuple(count for count in (2, 4, 8) if count <= ranks), notes)
    if "serve" in design.classes:
        yield serve.ServeOptions()


def _handoffs(config: Config, design: Design, ways: Sequence[str], notes: list[str]) -> Iterator[ExperimentOptions]:
    # Metadata is handed over between equal ranks, by the engine and by TCP.
    gpus = config.hw.gpus * config.hw.nodes
    most = max(sum(map(int, way.split("to"))) for way in ways)
    options = handoff.HandoffOptions(placement="packed" if not gpus or gpus >= most else "sides", verify=False)
    jobs = jobs_of(options, design.jobs)  # which share the repeats

    def part(repeat: int, **more: Any) -> ExperimentOptions:
        return replace(options, repeat=-(-max(4, repeat) // jobs), **more)

    equal = tuple(way for way in ways if len(set(way.split("to"))) == 1)
    unequal = tuple(way for way in ways if way not in equal)
    if "handoff" in design.classes:
        tokens = tuple(count for count in design.tokens if count < config.model.context)
        if whole := tuple(ways) if config.policy.staging else equal:
            yield part(design.repeat // 4, tokens=tokens, tp=whole, paths=("staged",))
        sliced = _sliced(config, design, tokens, notes)
        if unequal and sliced:
            yield part(design.repeat // 4, tokens=sliced, tp=unequal, paths=("sliced",))
    if "metadata" in design.classes:
        first, both = (*equal, *ways)[:1], ("data", "control")
        yield part(design.repeat, tokens=design.short, tp=first, paths=("sliced",), metadata=both)


def _sliced(config: Config, design: Design, tokens: Sequence[int], notes: list[str]) -> tuple[int, ...]:
    planes = config.model.layers * (1 if config.model.attention == "mla" else 2)
    if left := [str(count) for count in tokens if count * planes > design.slices]:
        notes.append(f"left out, with more than {design.slices} slices: sliced handoffs of {', '.join(left)} tokens")
    return tuple(count for count in tokens if count * planes <= design.slices)


def _gathers(config: Config, design: Design, ranks: tuple[int, ...], notes: list[str]) -> ExperimentOptions:
    options = allgather.AllgatherOptions(ranks=ranks, batches=(), growth=False, repeat=design.repeat, verify=False)
    pieces = sorted(design.pieces)
    for count in range(len(pieces), 0, -1):
        part = replace(options, size=tuple(pieces[:count]))
        if not problems(config, part):
            left = ", ".join(map(str, pieces[count:]))
            notes += [f"left out, for they do not fit into memory: all-gathers of {left} bytes"] if left else []
            return part
    return replace(options, size=design.pieces)  # which says itself what it lacks


def _points(config: Config, design: Design, ranks: int, notes: list[str]) -> list[TransferPoint]:
    most = len(design.placement) if design.placement[0].isdecimal() else ranks
    contention = design.patterns if "contention" in design.classes else ()
    small = [pattern for pattern in contention if len(names(TransferPoint(pattern, 1, 1, 1).flows(HOSTED))) <= most]
    if left := [pattern for pattern in contention if pattern not in small]:
        notes.append(f"left out, with more than {most} ranks: {', '.join(left)}")
    operations = [name for cls, name in (("pair", "write"), ("read", "read")) if cls in design.classes]
    points = [
        TransferPoint("pair", blocks, size, 1, operation)
        for operation in operations
        for size in design.size
        for blocks in design.blocks
    ]
    points += [
        TransferPoint(pattern, blocks, size, 1)
        for pattern in small
        for size in design.contended
        for blocks in design.contended_blocks
    ]
    points = [point for point in points if point.blocks * point.size <= design.limit]
    return _fitting(config, design, points + (read(Path(design.points)) if design.points else []), notes)


def _fitting(
    config: Config, design: Design, points: Sequence[TransferPoint], notes: list[str]
) -> list[TransferPoint]:
    ranks = {name for point in points for name in names(point.flows(HOSTED))}
    if design.placement[0].isdecimal() and len(ranks) > len(design.placement):
        return list(points)  # which the experiment refuses: they have no place
    needs: dict[str, int] = {}
    kept = set()
    for point in sorted(points, key=lambda point: point.blocks * point.size * len(point.flows(HOSTED))):
        own = {name: region_bytes(name, [point], HOSTED) for name in names(point.flows(HOSTED))}
        wanted = needs | {name: max(need, needs.get(name, 0)) for name, need in own.items()}
        where = places(config.hw, sorted(wanted, key=lambda name: int(name.removeprefix("rank"))), design.placement)
        if not shortage(config.hw, where, wanted, here=config.target == "real")[0]:
            needs = wanted
            kept.add(point)
    if left := [point.label for point in points if point not in kept]:
        notes.append(f"left out, for they do not fit into memory: {', '.join(left)}")
    return [point for point in points if point in kept]
