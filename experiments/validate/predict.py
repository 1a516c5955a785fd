# SPDX-License-Identifier: Apache-2.0
"""The predictions of a validation: made and written down now, or taken from a file that was written earlier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from experiments.validate.design import DesignPart
from experiments.validate.sealed import EXPECTED, design_of, keep, read, written
from experiments.validate.values import values
from pdsim.config import Config, Launch
from pdsim.config.loading import plain
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress, silent
from pdsim.results.environment import commit
from pdsim.sim.model import Model
from pdsim.validation.intervals import predicted, variants
from pdsim.validation.verdicts import Value, seal

__all__ = ["adopt", "ahead", "check_same", "expect", "now"]

SYSTEM = ("model", "parallel", "workload", "kv", "policy", "scheduler", "compute", "seed")
"""What has to be the same when what is predicted is measured: a label says how many tokens, not of which model."""


def expect(config: Config, design: Sequence[DesignPart], folder: Path, progress: ShowProgress = silent) -> None:
    """Write what the model says of *design*, and see it safely on disk; *progress* is shown the simulations.

    Predictions come with 95 % intervals where the calibration has some (`pdsim.validation.intervals`).  The file is
    sealed and synchronised to the disk before this returns.
    """
    seconds: list[float] = []  # that a job of each part takes, on the model, and then of its variants
    count = len(design) * (1 + 2 * len(list(variants(config))))

    def simulated(one: DesignPart, of: Config) -> list[Value]:
        progress(len(seconds) / count, f"predicting {one.experiment}, simulation {len(seconds) + 1} of {count}")
        result = one.run(*_modelled(of))
        seconds.append(result.outcome.seconds if result.outcome is not None else 0.0)
        return values(one.experiment, result)

    def predict(of: Config) -> list[Value]:
        return [value for one in design for value in simulated(one, of)]

    known = [asdict(value) for value in predicted(config, predict)]
    expected = [{key: item for key, item in value.items() if item not in (None, ())} for value in known]
    content = {
        "written": now(),
        "commit": commit(),
        "hw": config.hw.name,
        "backend": config.backend.name,
        "calibration": config.calibration.name if config.calibration is not None else "none",
        "seed": config.seed,
        "system": _system(config),
        "design": [written(part) for part in design],
        "seconds": seconds[: len(design)],
        "expected": expected,
    }
    keep(folder / EXPECTED, seal(content))


def _modelled(config: Config) -> tuple[Config, Model]:
    model = Model(config.hw, config.backend, seed=config.seed, collective=config.collective)
    return replace(config, target="model", memory="timing", launch=Launch()), model


def adopt(config: Config, source: Path, folder: Path) -> list[DesignPart]:
    """Copy the expectations *source*, a file or the folder that it is in, to *folder*.

    Return the design they are of.  Raise a `ConfigError` if there are none, if they were changed
    since, or if they are of another system than *config*.
    """
    path = source / EXPECTED if source.is_dir() else source
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"experiment.expected={source}: {error.strerror}; "
            f"name the {EXPECTED} of a run with experiment.predict=only"
        ) from error
    check_same(config, read(path, "hw", "backend", "written", "design", "expected"), path)
    keep(folder / EXPECTED, content)
    return design_of(folder, folder)


def check_same(config: Config, expected: Mapping[str, Any], path: Path) -> None:
    """Raise a `ConfigError` unless *expected*, the contents of *path*, are about the system that *config* describes.

    Keys that are not in both are not compared, so that an older file can still be used.
    """
    here = {"hw": config.hw.name, "backend": config.backend.name, **_system(config)}
    there = {"hw": expected["hw"], "backend": expected["backend"], **expected.get("system", {})}
    for key, value in _differences(there, here):
        raise ConfigError(f"{path} is about {value}; this run has another {key}: set it as it was, or predict anew")


def ahead(expected: Mapping[str, Any], began: str) -> timedelta:
    """Return for how long *expected* had been written down when the measurements *began*, to the second.

    *began* is as `now` returns it.
    """
    span = datetime.fromisoformat(began) - datetime.fromisoformat(expected["written"])
    return timedelta(seconds=int(span.total_seconds()))


def now() -> str:
    """Return the time of day, as the files have it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _system(config: Config) -> dict[str, Any]:
    found = {name: plain(getattr(config, name)) for name in SYSTEM}
    found["model"].pop("sources")
    return found | {"collective": None if config.collective is None else config.collective.name}


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, str]]:
    for name in (name for name in there if name in here):
        key = f"{at}.{name}" if at else name
        if isinstance(there[name], Mapping) and isinstance(here[name], Mapping):
            yield from _differences(there[name], here[name], key)
        elif there[name] != here[name]:
            yield key, f"{key}={there[name]}"
