# SPDX-License-Identifier: Apache-2.0
"""When completion is seen, queued and inline, by length of forwards: ``python -m tools.inline_order [FOLDER...]``.

Writes `data/reports/inline_order.csv`: the model's seconds, and those of the FOLDERs, runs of `COMMAND` on real
engines (``target=real``), as medians with the least and the most factor of one run.  Without folders the measured
columns stay as they are.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from experiments.reports import mori_state
from experiments.reports.report_points import loaded
from pdsim.config.compose import compose
from pdsim.core.progress import silent
from pdsim.core.repository import data
from pdsim.sim.model import Model
from tools.tables import rows

COMMAND = (
    "experiment=seed_mori_state hw=loopback backend={backend} experiment.handover=0.35ms "
    "experiment.concurrency=[8,32] experiment.lengths=[64] experiment.repeat=1 compute.scale={scale}"
)
CASES = tuple(product(("mooncake_tcp", "nixl_tcp"), ("0.01", "0.04")))
PATH = data("reports", "inline_order.csv")
PREDICTED = ("queued_predicted", "inline_predicted")
MEASURED = ("queued_measured", "inline_measured", "least", "most")
HEADS = ("backend", "scale", "requests", *PREDICTED, *MEASURED)


def predicted(backend: str, scale: str) -> Iterator[tuple[str, float, float]]:
    """Yield requests, seconds queued and seconds inline, as the model has them."""
    config = compose(COMMAND.format(backend=backend, scale=scale).split())
    table = mori_state.run(config, Model(config.hw, config.backend, seed=config.seed), silent).tables[1]
    yield from _seen(table.rows, f"loopback {backend}", "model")


def _seen(rows: Sequence[Sequence[Any]], machine: str, target: str) -> Iterator[tuple[str, float, float]]:
    for claim, *where, at, before, after in (row[:6] for row in rows):
        if claim == mori_state.SEEN.name and where == [machine, target]:
            yield at.partition(" ")[0], before, after


def measured(folders: Sequence[Path]) -> dict[tuple[str, str, str], list[float]]:
    """Return the cells of `MEASURED` of the runs in *folders*, by backend, scale and requests."""
    pairs: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for run in map(loaded, folders):
        words = dict(word.split("=", 1) for word in run["overrides"])
        (table,) = (table for table in run["tables"] if table["title"] == "Points")
        for requests, *pair in _seen(table["rows"], f"loopback {run['backend']}", "real"):
            pairs.setdefault((run["backend"], words["compute.scale"], requests), []).append((pair[0], pair[1]))
    medians = {key: [median(times) for times in zip(*own, strict=True)] for key, own in pairs.items()}
    factors = {key: [inline / queued for queued, inline in own] for key, own in pairs.items()}
    return {key: [*medians[key], min(factors[key]), max(factors[key])] for key in pairs}


def main(folders: Sequence[str]) -> None:
    """Write the file."""
    lines = PATH.read_text(encoding="utf-8").splitlines()
    cells: dict[tuple[str, str, str], list[Any]] = {
        (row["backend"], row["scale"], row["requests"]): [row[name] for name in MEASURED] for row in rows(PATH)
    }
    for key, values in measured([Path(folder) for folder in folders]).items():
        cells[key] = [f"{value:.4g}" for value in values]
    with PATH.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"{line}\n" for line in lines if line.startswith("#"))
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADS)
        for backend, scale in CASES:
            for requests, *times in predicted(backend, scale):
                key = backend, scale, requests
                writer.writerow([*key, *(f"{time:.4g}" for time in times), *cells.get(key, [""] * len(MEASURED))])


if __name__ == "__main__":
    main(sys.argv[1:])
