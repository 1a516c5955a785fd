"""Fit shipped calibrations again, from the samples that they name: what a change of the fit does to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdsim.calibration import samples
from pdsim.calibration.from_samples import Fitted, fitted
from pdsim.cli.compose import compose
from pdsim.cli.overrides import conf
from pdsim.repository import data

__all__ = ["refit"]


def refit(names: Sequence[str] = ()) -> list[Fitted]:
    """Return each published calibration of `conf`, or those called *names*, fitted again from its own samples."""
    from omegaconf import OmegaConf

    found = []
    for path in sorted((conf() / "calibration").glob("*.yaml")):
        file: Any = OmegaConf.load(path)
        if file.get("kind") != "published" or (names and file.name not in names):
            continue
        at = next(iter(file.intervals)).split(".")[1]
        operation = "read" if "-read" in file.name else "write"
        words = [f"hw={file.hw[0]}", f"backend={file.backend[0]}", f"experiment.operation={operation}"]
        config = compose([*words, "experiment=transfer", "calibration=none"])
        rows = samples.read(data("calibration", f"{path.stem}.csv"))
        found.append(fitted(rows, config.hw, config.backend, operation, at, file.name, "again"))
    return found
