# SPDX-License-Identifier: Apache-2.0
"""The measurements of a validation: every part in its jobs, on a real engine, written down as they come.

Jobs of a part differ more than transfers within one, since ranks are new processes with other
memory and other processors; so each value is the geometric mean over the jobs (`values.mean`),
and what the jobs differ by is its floor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from experiments.validate.design import DesignPart
from experiments.validate.predict import now
from experiments.validate.sealed import EXPECTED, MEASURED, keep, read
from experiments.validate.values import mean, values
from pdsim.config import Config
from pdsim.core.errors import ConfigError, TransferError
from pdsim.core.progress import ShowProgress, within
from pdsim.results.record import Result
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Target
from pdsim.validation.verdicts import Value, seal

__all__ = ["measure"]

START = 2.0
"""Seconds that a job takes to start its processes, for the time that is left."""


def measure(
    config: Config,
    design: Sequence[DesignPart],
    jobs: int,
    target: Target,
    folder: Path,
    progress: ShowProgress,
    records: list[TransferRecord],
) -> list[str]:
    """Run *design* for real, write what was measured, and return what failed, a line each.

    The file is written anew after each part, so that a run that is ended early leaves what it had.

    Args:
        config: With the real target's engine.
        design: Parts, of `experiments.validate.design.parts` or of sealed expectations.
        jobs: How many for a part that does not take long.
        target: Of the real engine.
        folder: Has the expectations, whose hash goes into the measurements.
        progress: Told the share of all measuring that is done.
        records: Gets the records of all transfers.
    """
    found: list[Value] = []
    failures: list[str] = []
    took: list[dict[str, Any]] = []
    predictions = read(folder / EXPECTED)
    began, expectations = now(), predictions["sha256"]
    ends = _ends(design, jobs, predictions.get("seconds", ()))
    for part, start_share, end_share in zip(design, [0.0, *ends], ends, strict=False):
        start = time.monotonic()
        results = _jobs(config, part, jobs, target, failures, within(progress, start_share, end_share))
        found += mean([values(part.experiment, result) for result in results])
        failures += [f"{part.experiment}: {failure}" for result in results for failure in result.failures]
        records += [record for result in results for record in result.transfers]
        took.append({"experiment": part.experiment, "jobs": len(results), "seconds": time.monotonic() - start})
        content = {
            "began": began,
            "expectations": expectations,
            "engines": sorted({record.engine for record in records}),
            "took": list(took),
            "measured": [asdict(value) for value in found],
        }
        keep(folder / MEASURED, seal(content))
    return failures


def _ends(design: Sequence[DesignPart], jobs: int, seconds: Sequence[float]) -> list[float]:
    # Jobs are taken to last *seconds* and `START`.
    #
    # Without *seconds*, as in predictions of an earlier version, all jobs count the same.
    of_job = [START + each for each in seconds] or [START] * len(design)
    whole = list(accumulate(part.jobs(jobs) * each for part, each in zip(design, of_job, strict=True)))
    return [each / whole[-1] for each in whole]


def _jobs(
    config: Config, part: DesignPart, jobs: int, target: Target, failures: list[str], progress: ShowProgress
) -> list[Result]:
    results: list[Result] = []
    count = part.jobs(jobs)
    for job in range(count):
        shown = within(progress, job / count, (job + 1) / count, f"{part.experiment}, job {job + 1} of {count},")
        seed = config.seed + (job if part.experiment != "serve" else 0)  # which has the same requests each time
        try:
            results.append(part.run(replace(config, seed=seed), target, shown))
        except (ConfigError, TransferError) as error:
            failures.append(f"{part.experiment}: {type(error).__name__}: {error}")
    return results
