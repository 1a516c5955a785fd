# SPDX-License-Identifier: Apache-2.0
"""Predict points that no calibration has seen, write the predictions down, measure the points, and compare.

`design` chooses the points, `steps` predicts and measures them, `pdsim.validation` seals and judges.  In the run's
folder are ``points.csv``, ``expectations.json`` (on disk before the first byte is moved), ``measurements.json`` and
``validation.parquet``.  Predictions may be made long before, and elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from experiments.jobs import refuse
from experiments.transfer.points import read as read_points
from experiments.validate.steps import Design, adopt, check_same, design_of, expect, measure, parts, problems, take
from pdsim.config import Config, ExperimentOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress, within
from pdsim.core.units import Positive, Seconds, Size
from pdsim.results.record import Metric, Result
from pdsim.transfer.job import Target
from pdsim.validation.sealed import EXPECTED, MEASURED, read, values_in
from pdsim.validation.verdicts import (
    Bound,
    by_class,
    by_decade,
    compare,
    metrics,
    prediction_table,
    tables,
)  # fmt: skip
from pdsim.validation.verdicts import failures as beyond

KEEPS_FILES = True

TABLE = "validation.parquet"
PREDICTING = 0.05  # share of the progress that predictions are: they take a minute, measuring many


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Largest allowed errors, relative except ``small``: a little time is much of a short transfer."""

    pair: Positive = 0.05  # median of the errors of a pair's transfers
    pair_p95: Positive = 0.15  # 95th percentile of the same
    other: Positive = 0.1  # median of every other class
    small: Annotated[Seconds, "> 0"] = 3e-4  # median of pairs of less than `large` bytes, in seconds
    large: Size = 0  # bytes of a transfer, below which `small` bounds it


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(Design):
    """The points to measure, and the largest allowed errors."""

    name: str = "validate"
    stored: str = ""  # a folder of an earlier run whose measurements are compared instead
    # only: nothing is measured; now: what is stored is predicted anew
    predict: Annotated[str, "one of before, only, now"] = "before"
    expected: str = ""  # predictions that an earlier run made, instead of new ones: its expectations.json
    bounds: Bounds = field(default_factory=Bounds)


def check(config: Config) -> Iterator[str]:
    """Yield which options cannot be together."""
    options = ValidateOptions.of(config)
    if options.expected and (options.stored or options.predict != "before"):
        yield (
            f"experiment.expected={options.expected} is of a run that measures; leave it out with "
            "experiment.stored, predict=only and predict=now"
        )
    if options.stored and options.predict == "only":
        yield f"experiment.predict=only with experiment.stored={options.stored}: set predict=now, or leave it out"
    if options.ranks == 1:
        yield "experiment.ranks=1: no bytes go from a rank to itself; set 2 or more, or 0 for a rank a GPU"
    if options.points:
        try:
            read_points(Path(options.points))
        except ConfigError as error:
            yield str(error)


def run(config: Config, target: Target, progress: ShowProgress, folder: Path) -> Result:
    """Predict, measure and compare; the files go to *folder*.

    A part that cannot be run here is left out, with a note; a class whose error exceeds its bound is a failure.
    Raise a `ConfigError` for a design that cannot be run, a file that was changed, or nothing to measure with.
    """
    refuse(check(config))
    options = ValidateOptions.of(config)
    notes: list[str] = []
    only = options.predict == "only"
    if options.stored:
        _take(config, options, folder, progress)
        return _compared(config, options, folder, notes, [])
    if config.target != "real" and not only:
        raise ConfigError(
            "validate measures on a real engine: set target=real, or experiment.stored=FOLDER with what was "
            "measured, or experiment.predict=only for predictions alone"
        )
    if options.expected:
        design = _design(config, adopt(config, Path(options.expected), folder), notes)
    else:
        design = _design(config, parts(config, options, folder, notes), notes)
        expect(config, design, folder, within(progress, 0.0, 1.0 if only else PREDICTING))
    if only:
        return _predictions(folder, notes)
    measuring = within(progress, PREDICTING, 1.0)
    jobs = options.sized(config.hw.gpus).jobs
    records, failures = measure(config, design, jobs, target, folder, measuring)
    return replace(_compared(config, options, folder, notes, failures), transfers=records)


def bounds(options: ValidateOptions) -> dict[str, Bound]:
    """Return the bound of each class, by the beginning of its name; "" is for all others."""
    most = options.bounds
    pair = Bound(most.pair, most.pair_p95)
    return {"pair": pair, "small": Bound(seconds=most.small), "": Bound(most.other)}


def _take(config: Config, options: ValidateOptions, folder: Path, progress: ShowProgress) -> None:
    source = Path(options.stored)
    take(source, folder)
    made = (source / EXPECTED).is_file()
    if made and options.predict != "now":
        values_in(source / EXPECTED, "expected")  # refuses what another version wrote
        return
    if made:
        check_same(config, read(source / EXPECTED), source / EXPECTED)
    expect(config, design_of(source, folder), folder, progress)


def _design(config: Config, asked: Iterable[ExperimentOptions], notes: list[str]) -> list[ExperimentOptions]:
    kept = []
    for part in asked:
        if lacking := problems(config, part):
            notes.append(f"{part.name} is left out: {lacking[0]}")
        else:
            kept.append(part)
    if not kept:
        raise ConfigError("nothing can be run: " + "; ".join(notes or ["experiment.classes is empty"]))
    return kept


def _compared(
    config: Config, options: ValidateOptions, folder: Path, notes: list[str], failures: list[str]
) -> Result:
    # predictions and measurements are read back from their files, so what is compared is what was kept
    import pyarrow as pa
    import pyarrow.parquet as pq

    expected, measured = read(folder / EXPECTED, "expected"), read(folder / MEASURED, "measured")
    both = compare(values_in(folder / EXPECTED, "expected"), values_in(folder / MEASURED, "measured"))
    for index, each in enumerate(both):
        if each.predicted.group.startswith("pair") and each.predicted.nbytes < options.bounds.large:
            small = replace(each.predicted, group=f"small {each.predicted.group}")
            both[index] = replace(each, predicted=small)
    classes = by_class(both, bounds(options), config.seed)
    first, *others = tables(classes, by_decade(both, config.seed))
    used = expected.get("calibration") or "none"
    first = replace(first, title=f"{first.title}, predicted with calibration={used}")
    before = measured["expectations"] == expected["sha256"]
    notes += [] if before else ["the predictions were made after these measurements"]
    notes += [_since(expected, measured)] if options.expected else []
    missing = len(expected["expected"]) - len(both)
    notes += [f"{missing} predictions have no measurement beside them"] if missing else []
    if used == "none":
        notes.append(
            f"warning: predicted without a calibration; fit one first: pdsim calibrate target=real "
            f"hw={config.hw.name} backend={config.backend.name} --quick --to own/calibration, then pdsim "
            "validate ... --config-dir own"
        )
    pq.write_table(pa.Table.from_pylist([each.row() for each in both]), folder / TABLE, compression="zstd")
    return Result(
        summary=metrics(both, classes),
        tables=[first, *others],
        failures=[*failures, *beyond(classes)],
        notes=[*notes, f"pictures and every point: pdsim report; predictions: {_named(expected)}"],
    )


def _since(expected: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    ahead = datetime.fromisoformat(measured["began"]) - datetime.fromisoformat(expected["written"])
    return (
        f"predicted at {expected['written']}, {timedelta(seconds=int(ahead.total_seconds()))} before the first "
        f"transfer, at commit {expected['commit']} with calibration {expected['calibration']}"
    )


def _named(expected: Mapping[str, Any]) -> str:
    return f"{EXPECTED}, {expected['sha256'][:16]}"


def _predictions(folder: Path, notes: Sequence[str]) -> Result:
    expected, values = read(folder / EXPECTED), values_in(folder / EXPECTED, "expected")
    return Result(
        summary=[Metric("points", len(values), "quantities that are predicted")],
        tables=[prediction_table(values)],
        notes=[*notes, f"nothing was measured; predictions: {_named(expected)}"],
    )
