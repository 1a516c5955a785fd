# SPDX-License-Identifier: Apache-2.0
"""The steps of a validation: predict its parts or take predictions, and measure them, with files that are sealed.

Expectations hold the design itself, so that they can be measured on another machine.  It has points that no
calibration has seen: a class (`CLASSES`) is what errors are stated for; a part is one experiment, which may serve
several.  Prediction and measurement run the same parts with the same options.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

import numpy as np

from experiments import allgather, handoff, serve, transfer
from experiments.transfer.points import TransferPoint, names, places, region_bytes, shortage
from experiments.transfer.points import read as read_points
from experiments.transfer.points import write as write_points
from pdsim.config import Config, ExperimentOptions, Launch, build, plain
from pdsim.core import plugins
from pdsim.core.errors import ConfigError, TransferError
from pdsim.core.progress import ShowProgress, silent, within
from pdsim.core.units import NotNegativeInt, Seconds, Size
from pdsim.results import schema
from pdsim.results.record import Result, commit
from pdsim.sim.model import Model
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Target
from pdsim.transfer.log import endpoints
from pdsim.validation import sealed
from pdsim.validation.intervals import spanned
from pdsim.validation.sealed import EXPECTED, MEASURED, keep, read, seal, values_in
from pdsim.validation.verdicts import Value, mean

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
    """The points to run: a part of `experiments.validate.ValidateOptions`.

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
    # of the model, as in experiment=transfer: begun together, sources would go from sink to sink in step.  A process
    # woke over ZeroMQ in 50 to 283 us on a host with 2 x H200 (`pdsim doctor --host`)
    skew: Seconds = 230e-6
    # at most 3 minutes on loopback: one job, few pairs and reads and one length of handoffs, of at most 4 MiB
    quick: bool = False
    jobs: int = 0  # ranks are started anew, the mean counts; a third for handoffs and serve; 0 is 9, and 3 on hosts

    def sized(self, gpus: int) -> Self:
        """Return the design with unset options chosen for a machine of *gpus* GPUs.

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
    """Return why *part* cannot be run; nothing if it can."""
    check = getattr(plugins.resolve(plugins.EXPERIMENTS, part.name), "check", None)
    return list(check(replace(config, experiment=part))) if check else []


def run_part(config: Config, part: ExperimentOptions, target: Target, progress: ShowProgress = silent) -> Result:
    """Run *part* on *target*, with *progress*."""
    run = plugins.resolve(plugins.EXPERIMENTS, part.name).run
    result: Result = run(replace(config, experiment=part), target, progress)
    return result


def parts(config: Config, design: Design, folder: Path, notes: list[str]) -> Iterator[ExperimentOptions]:
    """Yield the parts of *design* that *config* has ranks for, their points written to *folder*."""
    gpus = config.hw.gpus * config.hw.nodes
    design = design.sized(gpus)
    ranks = design.ranks or gpus or HOSTED
    if points := _points(config, design, ranks, notes):
        write_points(folder / POINTS, points)
        # as in `calibrate`: few repeats, for the median is what counts, by a rank that is warm; and no contents,
        # which take longer to fill and to compare than to transfer
        yield transfer.TransferOptions(
            points=str(folder / POINTS), repeat=design.repeat, volume=design.volume, warmup=10,
            placement=design.placement, order="shuffled", verify=False, skew=design.skew,
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
    return _fitting(config, design, points + (read_points(Path(design.points)) if design.points else []), notes)


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


TRANSFERS = "transfers.parquet"
START = 2.0  # seconds that a job takes to start its processes, for the time that is left

SYSTEM = ("model", "parallel", "workload", "kv", "policy", "scheduler", "compute", "seed")
"""Groups of the configuration that a prediction and its measurement share; labels do not name the model."""


def expect(config: Config, design: Parts, folder: Path, progress: ShowProgress = silent) -> None:
    """Write the predictions for *design* safely to disk; *progress* counts simulations."""
    seconds: list[float] = []  # that a job of each part takes, on the model
    every: list[Value] = []
    for number, one in enumerate(design, 1):
        progress(len(seconds) / len(design), f"predicting {one.name}, simulation {number} of {len(design)}")
        model = Model(config.hw, config.backend, seed=config.seed, collective=config.collective)
        result = run_part(replace(config, target="model", memory="timing", launch=Launch()), one, model)
        seconds.append(result.outcome.seconds if result.outcome is not None else 0.0)
        every += values(one.name, result)
    known = [asdict(value) for value in spanned(config, every)]
    expected = [{key: item for key, item in value.items() if item not in (None, ())} for value in known]
    content = {
        "written": _now(),
        "commit": commit(),
        "hw": config.hw.name,
        "backend": config.backend.name,
        "calibration": config.calibration.name if config.calibration is not None else "none",
        "seed": config.seed,
        "system": _system(config),
        "design": [_written(part) for part in design],
        "seconds": seconds,
        "expected": expected,
    }
    keep(folder / EXPECTED, seal(content))


def adopt(config: Config, source: Path, folder: Path) -> list[ExperimentOptions]:
    """Copy the expectations *source*, a file or the folder that it is in, to *folder*, and return their design.

    Raise a `ConfigError` if there are none, if they were changed, or if they are of another system than *config*.
    """
    expected = sealed.adopt(source, folder, "hw", "backend", "written", "design", "expected")
    check_same(config, expected, source)
    return design_of(folder, folder)


def check_same(config: Config, expected: Mapping[str, Any], path: Path) -> None:
    """Raise a `ConfigError` unless *expected*, the contents of *path*, are about the system of *config*.

    Keys that are not in both are not compared, so that an older file can still be used.
    """
    here = {"hw": config.hw.name, "backend": config.backend.name, **_system(config)}
    there = {"hw": expected["hw"], "backend": expected["backend"], **expected.get("system", {})}
    for key, value in _differences(there, here):
        raise ConfigError(f"{path} is about {value}; this run has another {key}: set it as it was, or predict anew")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _system(config: Config) -> dict[str, Any]:
    system = {name: plain(getattr(config, name)) for name in SYSTEM}
    system["model"].pop("sources")
    return system | {"collective": None if config.collective is None else config.collective.name}


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, str]]:
    for name in (name for name in there if name in here):
        key = f"{at}.{name}" if at else name
        if isinstance(there[name], Mapping) and isinstance(here[name], Mapping):
            yield from _differences(there[name], here[name], key)
        elif there[name] != here[name]:
            yield key, f"{key}={there[name]}"


def measure(
    config: Config, design: Parts, jobs: int, target: Target, folder: Path, progress: ShowProgress
) -> tuple[list[TransferRecord], list[str]]:
    """Measure *design* on a real engine, write the values, and return all transfers, and failures, a line each."""
    records: list[TransferRecord] = []
    measured: list[Value] = []
    failures: list[str] = []
    took: list[dict[str, Any]] = []
    predictions = read(folder / EXPECTED)
    began, ends = _now(), _ends(design, jobs, predictions.get("seconds", ()))
    for part, start_share, end_share in zip(design, [0.0, *ends], ends, strict=False):
        start = time.monotonic()
        results = _jobs(config, part, jobs, target, failures, within(progress, start_share, end_share))
        measured += mean([values(part.name, result) for result in results])
        failures += [f"{part.name}: {failure}" for result in results for failure in result.failures]
        records += [record for result in results for record in result.transfers]
        took.append({"experiment": part.name, "jobs": len(results), "seconds": time.monotonic() - start})
        _keep(folder, {"began": began, "expectations": predictions["sha256"], "took": took}, records, measured)
    return records, failures


def _ends(design: Parts, jobs: int, seconds: Sequence[float]) -> list[float]:
    # jobs last *seconds* and `START`; predictions of an earlier version have none
    known = seconds or [0.0] * len(design)
    whole = list(accumulate(jobs_of(part, jobs) * (START + each) for part, each in zip(design, known, strict=True)))
    return [each / whole[-1] for each in whole]


def _jobs(
    config: Config, part: ExperimentOptions, jobs: int, target: Target, failures: list[str], progress: ShowProgress
) -> list[Result]:
    results: list[Result] = []
    count = jobs_of(part, jobs)
    for job in range(count):
        shown = within(progress, job / count, (job + 1) / count, f"{part.name}, job {job + 1} of {count},")
        seed = config.seed + (job if part.name != "serve" else 0)  # which has the same requests each time
        try:
            results.append(run_part(replace(config, seed=seed), part, target, shown))
        except (ConfigError, TransferError) as error:
            failures.append(f"{part.name}: {type(error).__name__}: {error}")
    return results


def take(source: Path, folder: Path) -> None:
    """Copy what the validation, or the real run of `experiments.transfer`, in *source* measured to *folder*.

    Predictions that are in *source* come too.  Raise a `ConfigError` if there is nothing of either.
    """
    if (source / MEASURED).is_file():
        read(source / MEASURED, "measured", "expectations", "engines", "began")
        values_in(source / MEASURED, "measured")  # refuses what another version wrote
        for name in (EXPECTED, MEASURED, POINTS):
            if (source / name).is_file():
                keep(folder / name, (source / name).read_bytes())
        return
    about = _config(source)
    if about.get("target") != "real" or about["experiment"].get("name") != "transfer":
        raise ConfigError(
            f"experiment.stored={source} is neither a validation nor a real run of experiment=transfer; "
            f"name a folder with {MEASURED}, or with {TRANSFERS} of such a run"
        )
    table = schema.read_table(source / TRANSFERS).rename_columns({"batch_size": "descriptors"})
    records = [TransferRecord(**row) for row in table.select(TransferRecord._fields).to_pylist()]
    began = datetime.fromtimestamp((source / TRANSFERS).stat().st_mtime, UTC).isoformat()
    measured = values("transfer", Result((), transfers=records))
    _keep(folder, {"began": began, "expectations": ""}, records, measured)


def _keep(folder: Path, about: Mapping[str, Any], records: Sequence[TransferRecord], of: Sequence[Value]) -> None:
    engines = sorted({record.engine for record in records})
    content = {**about, "engines": engines, "measured": [asdict(value) for value in of]}
    keep(folder / MEASURED, seal(content))


def _written(part: ExperimentOptions) -> dict[str, Any]:
    # the inverse of `_part`, as JSON holds it, with its points themselves, so that it needs no file beside it
    options = plain(part)
    del options["name"]
    if options.get("points"):
        options["points"] = [list(point) for point in read_points(Path(options["points"]))]
    return {"experiment": part.name, "options": options}


def design_of(source: Path, folder: Path) -> list[ExperimentOptions]:
    """Return the design of *source*, from its expectations, with a file of points in *folder*."""
    if (source / EXPECTED).is_file():
        design = read(source / EXPECTED, "design")["design"]
        return [_part({"name": part["experiment"], **part["options"]}, folder) for part in design]
    return [_part(_config(source)["experiment"], source)]


def _part(values: Mapping[str, Any], folder: Path) -> ExperimentOptions:
    points = values.get("points", "")
    if isinstance(points, list):
        write_points(folder / POINTS, [TransferPoint(*point) for point in points])
    if isinstance(points, list) or (points and (folder / POINTS).is_file()):
        values = {**values, "points": str(folder / POINTS)}
    return build(ExperimentOptions.class_for(values), values, "experiment")


def _config(source: Path) -> dict[str, Any]:
    path = source / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"experiment.stored={source} has neither {MEASURED} nor config.yaml; name a run's folder")
    return schema.read_nested(path)


def values(experiment: str, result: Result) -> list[Value]:
    """Return the quantities of *result*, a run of *experiment*; those of a point in which something failed left out.

    *gpus* of a value is its number of ranks; *descriptors* of a handoff are those of all its writes.  Groups are
    ``pair``, ``pair, read``, a pattern, ``..., total rate``, ``handoff, PATH``, ``metadata, WAY``,
    ``allgather, POOL`` and ``serve``.
    """
    own = {"transfer": _of_transfers, "handoff": _of_handoffs, "allgather": _of_gathers}
    return list(own.get(experiment, _of_serving)(result))


def _of_serving(result: Result) -> Iterator[Value]:
    ranks = len(endpoints(result.transfers))
    for name in ("transfer", "ttft", "e2e"):
        if value := result.values.get(f"{name}_p50_s"):
            yield Value("serve", f"median {name}", "time", 0, float(value), gpus=ranks)


def _of_transfers(result: Result) -> Iterator[Value]:
    by_point: dict[str, dict[tuple[str, str], list[TransferRecord]]] = {}
    for record in result.transfers:
        by_point.setdefault(record.label, {}).setdefault((record.source, record.target), []).append(record)
    for label, by_flow in by_point.items():
        every = [record for flow in by_flow.values() for record in flow]
        if any(record.status != "ok" for record in every):
            continue
        group = label.split(":")[0].split(" ")[0] + (", read" if every[0].operation == "read" else "")
        ranks = len({name for flow in by_flow for name in flow})
        for (source, target), mine in by_flow.items():
            name = f"{label}, {source} to {target}" if len(by_flow) > 1 else label
            time = float(np.median([record.seen - record.submitted for record in mine]))
            yield Value(group, name, "time", mine[0].nbytes, time, descriptors=mine[0].descriptors, gpus=ranks)
        if len(by_flow) > 1:
            rate, count = sum(_rate(mine, every) for mine in by_flow.values()), every[0].descriptors
            yield Value(f"{group}, total rate", label, "rate", every[0].nbytes, rate, descriptors=count, gpus=ranks)


def _rate(flow: Sequence[TransferRecord], every: Sequence[TransferRecord]) -> float:
    # From the flow's own first call to its own end, for ranks begin and end at times of their own, less the pauses
    # in which its initiator has nothing under way: these, 8 to 17 us of a program's, belong to no transfer.
    def initiator(record: TransferRecord) -> str:
        return record.target if record.operation == "read" else record.source

    begin, end = min(record.submitted for record in flow), max(record.seen for record in flow)
    mine = [record for record in every if initiator(record) == initiator(flow[0])]
    return sum(record.nbytes for record in flow) / (end - begin - _pauses(mine, begin, end))


def _pauses(records: Sequence[TransferRecord], begin: float, end: float) -> float:
    total, until = 0.0, begin
    for record in sorted(records, key=lambda record: record.submitted):
        total += max(0.0, min(record.submitted, end) - until)
        until = max(until, min(record.seen, end))
    return total


def _of_handoffs(result: Result) -> Iterator[Value]:
    for row in result.rows("Handoffs"):
        if row["status"] == "ok" and row["p50"]:
            _, path, *metadata = row["way"].split(" ")
            group = f"metadata, {metadata[-1]}" if metadata else f"handoff, {path}"
            label, count = f"{row['way']} {row['tokens']} tokens", int(row["descriptors"])
            ranks = sum(map(int, str(row["way"]).partition(" ")[0].split("to")))
            yield Value(group, label, "time", int(row["bytes"]), row["p50"] * 1e-6, descriptors=count, gpus=ranks)


def _of_gathers(result: Result) -> Iterator[Value]:
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    for row in result.rows("All-gathers"):
        if row["status"] == "ok" and row["med us"]:
            number, unit = str(row["piece"]).split(" ")
            label = f"{row['ranks']} ranks {row['piece']} {row['batch']} {row['pool']}"
            nbytes, ranks = int(float(number) * units[unit]), int(row["ranks"])
            yield Value(f"allgather, {row['pool']}", label, "time", nbytes, row["med us"] * 1e-6, gpus=ranks)
