"""Predict points that no calibration has seen, write the predictions down, measure the points, and compare.

The files of a validation, in its run's folder: ``points.csv``, the transfers of its design; ``expectations.json``, the
predictions, on disk before the first byte is moved and with a hash of their own; ``measurements.json``;
``validation.parquet``, both side by side; ``validation.html``, for people.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments._validate_files import EXPECTED, MEASURED, design_of, keep, read, take
from experiments._validate_parts import CLASSES, Design, Part, mean, parts, values
from pdsim.calibration.page import page
from pdsim.calibration.spread import predicted
from pdsim.calibration.validate import (
    Bound,
    Class,
    Compared,
    Value,
    by_class,
    by_decade,
    compare,
    metrics,
    seal,
    tables,
)
from pdsim.config import Config
from pdsim.errors import ConfigError, TransferError
from pdsim.fabric.world import Model
from pdsim.results.record import Result
from pdsim.results.store import plain
from pdsim.transfer import Target, TransferRecord

__all__ = ["Options", "bounds", "run"]

TABLE, PAGE = "validation.parquet", "validation.html"
Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class Options(Design):
    """What is run, and how far off it may be: `conf/experiment/validate.yaml`."""

    stored: str = ""  # a folder of an earlier run whose measurements are compared instead
    predict: str = "before"  # or "now": what is stored is predicted anew
    bounds: Mapping[str, float] = field(default_factory=lambda: {"pair": 0.05, "pair_p95": 0.15, "other": 0.1})

    def __post_init__(self) -> None:
        for name in self.classes:
            if name not in CLASSES:
                raise ValueError(f"experiment.classes must be of {', '.join(CLASSES)}, got {name!r}")
        if self.predict not in ("before", "now"):
            raise ValueError(f"experiment.predict must be one of before, now, got {self.predict!r}")
        if set(self.bounds) != {"pair", "pair_p95", "other"} or min(self.bounds.values()) <= 0:
            raise ValueError(f"experiment.bounds must have pair, pair_p95 and other, all > 0, got {dict(self.bounds)}")


def run(config: Config, target: Target, progress: Progress, folder: Path) -> Result:
    """Predict, measure and compare; the files go to *folder*.

    Raise a `ConfigError` for a design that cannot be run, for files that were changed, and where there is nothing to
    measure with.
    """
    options = Options(**{key: value for key, value in config.experiment.items() if key != "name"})
    notes: list[str] = []
    failures: list[str] = []
    records: list[TransferRecord] = []
    if options.stored:
        source = Path(options.stored)
        take(source, folder)
        if options.predict == "now" or not (source / EXPECTED).is_file():
            progress(0.0, "predicting")
            _expect(config, design_of(source, folder), folder)
    else:
        _check_real(config)
        design = _design(config, options, folder, notes)
        progress(0.0, "predicting")
        _expect(config, design, folder)
        failures += _measure(config, design, options.jobs, target, folder, progress, records)
    return replace(_compared(config, options, folder, notes, failures), transfers=records)


def bounds(options: Options) -> dict[str, Bound]:
    """Return what the errors of each class may be."""
    pair = Bound(options.bounds["pair"], options.bounds["pair_p95"])
    return {"pair": pair, "": Bound(options.bounds["other"])}


def _check_real(config: Config) -> None:
    if config.target != "real":
        raise ConfigError(
            "validate measures on a real engine: set target=real, or experiment.stored=FOLDER with what was measured"
        )


def _design(config: Config, options: Options, folder: Path, notes: list[str]) -> list[Part]:
    """Return the parts that can be run; a note says what cannot."""
    found = []
    for part in parts(config, options, folder):
        problems = part.problems(config)
        if problems:
            notes.append(f"{part.experiment} is left out: {problems[0]}")
        else:
            found.append(part)
    if not found:
        raise ConfigError("nothing can be run: " + "; ".join(notes or ["experiment.classes is empty"]))
    return found


# --- predictions and measurements -----------------------------------------------------------------------------------


def _expect(config: Config, design: Sequence[Part], folder: Path) -> None:
    """Write what the model says of *design*, and see it safely on disk."""

    def predict(of: Config) -> list[Value]:
        return [value for part in design for value in values(part, _run(part, *_modelled(of, part), _silent))]

    calibration = config.calibration.name if config.calibration is not None else "none"
    content = {
        "written": _now(),
        "hw": config.hw.name,
        "backend": config.backend.name,
        "calibration": calibration,
        "seed": config.seed,
        "design": [{"experiment": part.experiment, "options": plain(part.options)} for part in design],
        "expected": [asdict(value) for value in predicted(config, predict)],
    }
    keep(folder / EXPECTED, seal(content))


def _modelled(config: Config, part: Part) -> tuple[Config, Model]:
    """Return what predicts *part*.  Copies of staged blocks name every piece only where memory has contents."""
    memory = "tracked" if part.experiment == "handoff" else "timing"
    model = Model(config.hw, config.backend, memory, config.seed, collective=config.collective)
    return replace(config, target="model", memory=memory), model


def _measure(
    config: Config,
    design: Sequence[Part],
    jobs: int,
    target: Target,
    folder: Path,
    progress: Progress,
    records: list[TransferRecord],
) -> list[str]:
    """Run *design* for real, write what was measured, add to *records*, and return what failed."""
    found: list[Value] = []
    failures: list[str] = []
    began = _now()
    for number, part in enumerate(design):
        progress((number + 1) / (len(design) + 1), part.experiment)
        results: list[Result] = []
        for job in range(jobs if part.experiment in ("transfer", "allgather") else 1):
            try:
                results.append(_run(part, replace(config, seed=config.seed + job), target, _silent))
            except TransferError as error:
                failures.append(f"{part.experiment}: {type(error).__name__}: {error}")
        found += mean([values(part, result) for result in results])
        failures += [f"{part.experiment}: {failure}" for result in results for failure in result.failures]
        records += [record for result in results for record in result.transfers]
    content = {
        "began": began,
        "expectations": read(folder / EXPECTED)["sha256"],
        "engines": sorted({record.engine for record in records}),
        "measured": [asdict(value) for value in found],
    }
    keep(folder / MEASURED, seal(content))
    return failures


def _run(part: Part, config: Config, target: Target, progress: Progress) -> Result:
    result: Result = import_module(f"experiments.{part.experiment}").run(part.config(config), target, progress)
    return result


def _silent(fraction: float, text: str) -> None:
    """Show nothing: the bar is about all parts."""


# --- the comparison -------------------------------------------------------------------------------------------------


def _compared(config: Config, options: Options, folder: Path, notes: list[str], failures: list[str]) -> Result:
    """Return what the files in *folder* say, read back from there."""
    expected, measured = (read(folder / name) for name in (EXPECTED, MEASURED))
    found = compare(_values(expected["expected"]), _values(measured["measured"]))
    classes = by_class(found, bounds(options), config.seed)
    shown = tables(classes, by_decade(found, config.seed))
    before = measured["expectations"] == expected["sha256"]
    notes += [] if before else ["the predictions were made after these measurements"]
    missing = len(expected["expected"]) - len(found)
    notes += [f"{missing} predictions have no measurement beside them"] if missing else []
    _write_parquet(folder / TABLE, found)
    facts = [(key, str(expected[key])) for key in ("hw", "backend", "calibration", "seed", "written", "sha256")]
    facts += [("measured from", measured["began"]), ("by", ", ".join(measured["engines"]))]
    facts += [("predicted before the first transfer", "yes" if before else "no")]
    title = f"{expected['backend']} on {expected['hw']}: predicted and measured"
    keep(folder / PAGE, page(title, facts, shown, found).encode())
    beyond = [each for each in classes if each.beyond]
    failures += [f"{each.name}: error beyond its bound, median {each.median:.1%}{_left(each)}" for each in beyond]
    return Result(
        summary=metrics(found, classes),
        tables=shown,
        failures=failures,
        notes=[*notes, f"pictures and every point: {PAGE}; predictions: {EXPECTED}, {expected['sha256'][:16]}"],
    )


def _left(each: Class) -> str:
    return f", of which jobs that differ make {each.floor.median:.1%}" if each.floor else ""


def _values(rows: Sequence[Mapping[str, Any]]) -> list[Value]:
    return [Value(**row) for row in rows]


def _write_parquet(path: Path, found: Sequence[Compared]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([each.row() for each in found]), path, compression="zstd")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
