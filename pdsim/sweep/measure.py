# SPDX-License-Identifier: Apache-2.0
"""One point of a sweep, in whatever process: run it, or take what an earlier process left, and return its row."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pdsim.core.errors import ConfigError
from pdsim.results import store
from pdsim.run import execute
from pdsim.sweep.points import Point

__all__ = ["measure"]


def measure(point: Point) -> dict[str, Any]:
    """Run *point*, keep its results in a folder of its name, and return its row; what goes wrong is in the row.

    A complete folder of that name is an earlier run of the same point and is taken as it is; one whose files a loss
    of power has cut short is run again.

    The status is ok or partial as the run's own, *infeasible* for a configuration that is refused, *failed* for any
    other exception.  Runs in a process of the executor; the folder of the sweep is ``point.config.output``.
    """
    if point.config is None:
        return refused(point, point.refusal)
    folder = Path(point.config.output) / point.name
    if folder.is_dir():
        try:
            return kept(point, folder)
        except ConfigError:
            shutil.rmtree(folder)
    unfinished = folder.with_name(folder.name + store.INCOMPLETE)
    if unfinished.exists():  # of a process that was killed: the sweep's lock says that it is no more
        shutil.rmtree(unfinished)
    try:
        execute(point.config, point.words, notes=point.notes, quiet=True, name=point.name, durable=False)
    except ConfigError as error:
        return refused(point, str(error))
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return point.about() | {"status": "failed", "error": why, "metrics": {}, "definitions": {}}
    return kept(point, folder)


def refused(point: Point, why: str) -> dict[str, Any]:
    """Return the row of a *point* that cannot be run.

    The status is ``infeasible``, which is final; the lines of *why*, a reason each, are put on one.
    """
    line = "; ".join(" ".join(each.split()) for each in why.splitlines() if each.strip())
    about = {"status": "infeasible", "error": line, "metrics": {}, "definitions": {}}
    return point.about() | about


def kept(point: Point, folder: Path) -> dict[str, Any]:
    """Return the row of a *point* whose complete results are in *folder*."""
    run = store.load(folder)
    return point.about() | {
        "status": run["status"],
        "error": run["error"],
        "folder": folder.name,
        "evidence": run["evidence"]["weakest"],
        "metrics": {name: metric["value"] for name, metric in run["metrics"].items()},
        "definitions": {name: metric["definition"] for name, metric in run["metrics"].items()},
    }
