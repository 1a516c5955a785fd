# SPDX-License-Identifier: Apache-2.0
"""The files of a validation: written so that they are on disk, and taken from a folder of an earlier run.

Expectations hold the design itself, its points included, so that measuring needs nothing else; they
can be made on one machine and measured on another.  Both files carry the SHA-256 of their content
(`pdsim.validation.verdicts.seal`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.transfer.transfer_points import TransferPoint
from experiments.transfer.transfer_points import read as read_points
from experiments.transfer.transfer_points import write as write_points
from experiments.validate.design import POINTS, DesignPart
from experiments.validate.values import values
from pdsim.config import ExperimentOptions, build
from pdsim.config.loading import plain
from pdsim.core.errors import ConfigError
from pdsim.results import schema
from pdsim.results.record import Result
from pdsim.transfer import TransferRecord
from pdsim.validation.agreement import EXPECTED, MEASURED
from pdsim.validation.verdicts import seal, unseal, values_in

__all__ = ["EXPECTED", "MEASURED", "design_of", "keep", "read", "take", "written"]

TRANSFERS = "transfers.parquet"


def keep(path: Path, content: bytes) -> None:
    """Write *content* to *path*, and return when it and its name are on disk.

    The file and its folder are synchronised, so that a prediction is on disk before anything is measured.
    """
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path, *keys: str) -> dict[str, Any]:
    """Return what is in *path*.

    Raise a `ConfigError` if it was changed after it was written, or lacks one of *keys*: another version's does.
    """
    return unseal(path.read_bytes(), str(path), *keys)


def take(source: Path, folder: Path) -> None:
    """Copy what the validation, or the real run of `experiments.transfer`, in *source* measured to *folder*.

    Predictions that are in *source* come too.  Raise a `ConfigError` if there is nothing of either.
    """
    if (source / MEASURED).is_file():
        measured = read(source / MEASURED, "measured", "expectations", "engines", "began")
        values_in(measured, "measured", str(source / MEASURED))  # refuses what another version wrote
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
    records = _records(source / TRANSFERS)
    found = values("transfer", Result((), transfers=records))
    began = datetime.fromtimestamp((source / TRANSFERS).stat().st_mtime, UTC).isoformat()
    engines = sorted({record.engine for record in records})
    content = {
        "began": began,
        "expectations": "",
        "engines": engines,
        "measured": [asdict(value) for value in found],
    }
    keep(folder / MEASURED, seal(content))


def written(part: DesignPart) -> dict[str, Any]:
    """Return *part* as JSON holds it, with its points themselves, so that it needs no file beside it.

    The inverse of what `design_of` does with one part.
    """
    options = plain(part.options)
    del options["name"]
    if options.get("points"):
        options["points"] = [list(point) for point in read_points(Path(options["points"]))]
    return {"experiment": part.experiment, "options": options}


def design_of(source: Path, folder: Path) -> list[DesignPart]:
    """Return what was run in *source*, or is to be: what its expectations say, with a file of points in *folder*."""
    if (source / EXPECTED).is_file():
        design = read(source / EXPECTED, "design")["design"]
        return [_part({"name": part["experiment"], **part["options"]}, folder) for part in design]
    return [_part(_config(source)["experiment"], source)]


def _part(values: Mapping[str, Any], folder: Path) -> DesignPart:
    # Their points are written to a file in *folder*.
    #
    # Raise a `ConfigError` if the experiment has no such options.
    points = values.get("points", "")
    if isinstance(points, list):
        write_points(folder / POINTS, [TransferPoint(*point) for point in points])
    if isinstance(points, list) or (points and (folder / POINTS).is_file()):
        values = {**values, "points": str(folder / POINTS)}
    return DesignPart(build(ExperimentOptions.class_for(values), values, "experiment"))


def _config(source: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    path = source / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"experiment.stored={source} has neither {MEASURED} nor config.yaml; name a run's folder")
    found: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[assignment]
    return found


def _records(path: Path) -> list[TransferRecord]:
    rows = (
        schema.read_table(path)
        .rename_columns({"batch_size": "descriptors"})
        .select(TransferRecord._fields)
        .to_pylist()
    )
    return [TransferRecord(**row) for row in rows]
