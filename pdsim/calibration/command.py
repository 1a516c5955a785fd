"""`pdsim calibrate`: measure a designed grid or read what others measured, fit, write it down, say how good it is.

Both ways end in the same two files, so that a calibration can be fitted again from its own samples.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from pdsim.calibration import files, fit, grid, points, tools
from pdsim.calibration.fit import Fit
from pdsim.calibration.forms import FORMS, points_of
from pdsim.calibration.points import Sample, Samples
from pdsim.calibration.record import Calibration, HeldOut
from pdsim.config import Config
from pdsim.errors import ConfigError
from pdsim.fabric.machine import Engine, EngineModel
from pdsim.results import report
from pdsim.results.environment import environment
from pdsim.results.record import Table
from pdsim.units import parse_size

__all__ = ["Fitted", "again", "calibrate", "fitted", "table"]

ALONE = 40
"""Up to so many samples, each is left out in turn; more are left out in ten folds."""


@dataclass(frozen=True)
class Fitted:
    """A calibration and the samples that it was fitted to."""

    calibration: Calibration
    samples: Samples
    found: Fit
    errors: Mapping[str, np.ndarray[Any, np.dtype[np.float64]]]  # at what was left out, by decade of bytes


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The command line: what is not an override of the configuration."""

    overrides: tuple[str, ...]
    source: Path | None = None  # --from
    tool: str = ""  # --format
    name: str = ""  # --name
    to: Path = Path()  # --to
    path: str = ""  # --path: intra or inter
    largest: int = 256 << 20  # --largest: bytes of a transfer of the grid
    held: int = 16  # --held: random points to hold out
    repeat: int = 7  # --repeat: the least
    jobs: int = 3  # --jobs: how often the ranks are started anew


def calibrate(words: Sequence[str]) -> int:
    """Do what *words* ask for, print what was found, and return the exit status."""
    asked = _asked(words)
    command = _said(words)
    from pdsim.run import compose

    config = compose([*asked.overrides, "experiment=transfer", "calibration=none"])
    at = asked.path or ("intra" if config.backend.intra is not None and config.hw.nodes == 1 else "inter")
    samples = tools.read(asked.source, asked.tool) if asked.source else _measured(asked, config, command)
    done = fitted(samples, config, at, asked.name or f"{config.backend.name}-{config.hw.name}", command)
    asked.to.mkdir(parents=True, exist_ok=True)
    title = f"{config.backend.name} on {config.hw.name}, {at}, {done.calibration.kind}: {done.calibration.form}"
    path = files.save(asked.to, done.calibration, done.samples, title)
    for one in (_parameters(done), table([done])):
        report.show_table(one)
    print(f"calibration: {path}\nsamples: {path.with_suffix('.csv')}")  # noqa: T201
    return 0


def _asked(words: Sequence[str]) -> _Asked:
    flags = {"--from": "source", "--format": "tool", "--name": "name", "--to": "to", "--path": "path"}
    flags |= {"--largest": "largest", "--held": "held", "--repeat": "repeat", "--jobs": "jobs"}
    kinds: dict[str, Any] = {"source": Path, "to": Path, "largest": parse_size, "held": int, "repeat": int, "jobs": int}
    found: dict[str, Any] = {}
    overrides: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name not in flags:
            overrides.append(word)
            continue
        if not equals and (value := next(left, "")) == "":
            raise ConfigError(f"{name} needs a value after it; see pdsim calibrate --help")
        key = flags[name]
        try:
            found[key] = kinds.get(key, str)(value)
        except ValueError as error:
            raise ConfigError(f"{name} {value}: {error}") from error
    return _Asked(overrides=tuple(overrides), **found)


def _said(words: Sequence[str]) -> str:
    """Return the command line without the folders of this machine."""
    kept = [word for word in words if not word.startswith("output=")]
    return shlex.join(["pdsim", "calibrate", *(Path(word).name if "=" not in word else word for word in kept)])


# --- samples --------------------------------------------------------------------------------------------------------


def _measured(asked: _Asked, config: Config, command: str) -> Samples:
    """Measure the grid with ``experiment=transfer``, keep its results as those of any run, and return the samples.

    It is measured in several jobs, for the same transfers of two pairs of processes differ by a tenth and more: a
    sample is the median over all of them.
    """
    from pdsim.run import compose, execute

    operation = str(config.experiment["operation"])
    cells, left = grid.grid(operation, asked.largest, asked.held, config.seed)
    listed = Path(config.output) / "calibrate-points.csv"
    listed.parent.mkdir(parents=True, exist_ok=True)
    grid.write(listed, [*cells, *left], asked.repeat)
    own = [f"experiment.points={listed}", "experiment.order=shuffled"]
    defaults = ["experiment.warmup=10", "experiment.verify=false"]
    chosen = [*defaults, *asked.overrides, "experiment=transfer", "calibration=none", *own]
    runs = [execute(compose([*chosen, f"seed={config.seed + job}"]), chosen) for job in range(max(1, asked.jobs))]
    transfers = [record for result, _ in runs for record in result.transfers]
    rows = points.from_transfers(transfers, [cell.label for cell in left])
    folders = ", ".join(folder.name for _, folder in runs)
    about = {"kind": "measured", "source": _where(config), "command": command, "results": folders}
    failures = "; ".join(failure for result, _ in runs for failure in result.failures)
    return Samples(rows, about | ({"failures": failures} if failures else {}))


def _where(config: Config) -> str:
    return f"{config.backend.name} on {config.hw.name}" + (" (the model)" if config.target == "model" else "")


# --- the fit --------------------------------------------------------------------------------------------------------


def fitted(samples: Samples, config: Config, at: str, name: str, command: str) -> Fitted:
    """Return the calibration of the model *at* ("intra" or "inter") of the engine of *config*, fitted to *samples*.

    Only pairs are fitted, of the configuration's operation: what flows do to each other is the machine's.  Raise a
    `ConfigError` if there is no such model, or too few samples.
    """
    base = _base(config.backend, at)
    _, link = files.link_of(config.hw, base.path)
    base = replace(base, rate=min(base.rate, link))
    operation = str(config.experiment["operation"])
    pairs = [row for row in samples.rows if (row.pattern, row.schedule, row.operation) == ("pair", "free", operation)]
    if not pairs:
        raise ConfigError(
            f"the file has no {operation} of a pair; set experiment.operation to what it has: "
            f"{', '.join(sorted({row.operation for row in samples.rows}))}"
        )
    kept, left = [row for row in pairs if not row.held], [row for row in pairs if row.held]
    seen = points_of(kept)
    chosen = fit.choose(seen, base)
    found, spans = fit.told(chosen, seen, base)
    held_out, errors = _errors(found, chosen, kept, left, base)
    chosen_parameters, told = files.parameters(found, spans, base, config.hw, f"backend.{at}")
    calibration = Calibration(
        name=name,
        kind=samples.about.get("kind", "published"),
        hw=(config.hw.name,),
        backend=(config.backend.name,),
        form=found.form.name,
        date=samples.about.get("date", datetime.now(UTC).strftime("%Y-%m-%d")),
        source=samples.about.get("source", "not said"),
        parameters=chosen_parameters,
        intervals=told,
        unidentified=tuple(f"backend.{at}.{_field(parameter)}" for parameter in found.unidentified),
        held_out=held_out,
        provenance=_provenance(samples.about, command),
    )
    return Fitted(calibration, samples, found, errors)


def _base(backend: Engine, at: str) -> EngineModel:
    found: EngineModel | None = getattr(backend, at, None)
    if found is None:
        raise ConfigError(f"backend={backend.name} has no {at}; set --path to the one that the samples are about")
    return found


def _field(parameter: str) -> str:
    return "ramp" if parameter[:-1] in ("extra", "first") else parameter


def _errors(
    found: Fit, chosen: Fit, kept: Sequence[Sample], left: Sequence[Sample], base: EngineModel
) -> tuple[HeldOut, dict[str, Any]]:
    """Return the errors at what was held out or, where nothing was, at what is left out in turn."""
    if left:
        errors, rows, how = fit.errors(found, points_of(left)), left, "drawn at random, and held out from the start"
    else:
        forms = FORMS if found.form == chosen.form else (found.form,)
        parts = 0 if len(kept) <= ALONE else 10
        errors, rows = fit.held_out(points_of(kept), base, forms, parts), kept
        how = "each left out in turn" if not parts else f"left out in {parts} folds"
        how += ", the form chosen anew" if len(forms) > 1 else ", the form given"
    return fit.summary(errors, how), _by_decade(rows, errors)


def _by_decade(rows: Sequence[Sample], errors: Any) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for row, error in sorted(zip(rows, errors, strict=True), key=lambda pair: pair[0].blocks * pair[0].size):
        decade = 10 ** (len(str(row.blocks * row.size)) - 1)
        found.setdefault(f"{decade:.0e} B", []).append(float(error))
    return {name: np.array(values) for name, values in found.items()}


def _provenance(about: Mapping[str, str], command: str) -> dict[str, str]:
    where = environment()
    git, host = where["git"] or {}, where["host"]
    found = {key: value for key, value in about.items() if key not in ("kind", "source", "date")}
    found |= {"fit": command, "commit": str(git.get("commit")) + (" and changes" if git.get("dirty") else "")}
    if about.get("kind") == "measured":
        found |= {"host": f"{host['cpu']}, {host['cores']} cores, {host['kernel']}", **_gpus()}
        found["versions"] = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    return found


def _gpus() -> dict[str, str]:
    """Return the GPUs of this host and their driver, as nvidia-smi says, or nothing."""
    import shutil
    import subprocess

    if shutil.which("nvidia-smi") is None:
        return {}
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=30)
    lines = sorted(set(done.stdout.split("\n")) - {""})
    return {"gpus": f"{len(done.stdout.split(chr(10))) - 1} x {'; '.join(lines)}"} if lines else {}


# --- what is printed ------------------------------------------------------------------------------------------------


def _parameters(done: Fitted) -> Table:
    """Return what was fitted, and what the samples do not tell."""
    calibration = done.calibration
    rows: list[list[Any]] = [
        [key, _told(value), " to ".join(calibration.intervals.get(key, (_why(key),)))]
        for key, value in calibration.parameters.items()
        if key not in calibration.unidentified
    ]
    rows += [[key, "not identified by these samples", "-"] for key in dict.fromkeys(calibration.unidentified)]
    heads = {"parameter": "", "value": "", "95 %": "interval of a bootstrap over configurations"}
    return Table(f"{calibration.name}: {calibration.form}", heads, rows)


def _why(key: str) -> str:
    return "as fast as the engine was" if key.startswith("hw.") else "follows from the form"


def _told(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(f"{step['first']} x {step['extra']}" for step in value) or "none"
    return str(value)


def again(names: Sequence[str] = ()) -> list[Fitted]:
    """Return each published calibration of `conf`, or those called *names*, fitted again from its own samples."""
    from omegaconf import OmegaConf

    from pdsim.overrides import conf
    from pdsim.run import compose

    found = []
    for path in sorted((conf() / "calibration").glob("*.yaml")):
        file: Any = OmegaConf.load(path)
        if file.get("kind") != "published" or (names and file.name not in names):
            continue
        at = next(iter(file.intervals)).split(".")[1]
        operation = "read" if "-read" in file.name else "write"
        words = [f"hw={file.hw[0]}", f"backend={file.backend[0]}", f"experiment.operation={operation}"]
        config = compose([*words, "experiment=transfer", "calibration=none"])
        found.append(fitted(points.read(path.with_suffix(".csv")), config, at, file.name, "again"))
    return found


def table(every: Sequence[Fitted]) -> Table:
    """Return how far each of *every* is from what it has not seen, in all and by the bytes of a transfer."""
    columns = {
        "calibration": "",
        "of": "transfers of so many bytes or up to ten times as many",
        "points": "left out of the fit",
        "mean %": "mean absolute error of the modelled time there",
        "median %": "median of that",
        "p95 %": "95th percentile of that",
        "bias %": "mean signed error, model minus sample",
        "how": "what was left out",
    }
    return Table("Held-out error", columns, [row for done in every for row in _rows(done)])


def _rows(done: Fitted) -> Iterator[list[Any]]:
    calibration = done.calibration
    assert calibration.held_out is not None
    parts = {"all": calibration.held_out}
    if len(done.errors) > 1:
        parts |= {name: fit.summary(errors, "") for name, errors in done.errors.items()}
    for name, one in parts.items():
        numbers = [asdict(one)[key] * 100 for key in ("mean", "median", "p95", "bias")]
        yield [calibration.name, name, one.points, *numbers, one.how]
