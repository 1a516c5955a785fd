# SPDX-License-Identifier: Apache-2.0
"""Draw the points of seeds: ``python -m experiments.reports.plot FIGURE.svg CLAIM,... FOLDER...``, folders of runs.

Every claim is a row: simulated at the left, measured at the right (`pdsim.results.report.before_after`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdsim.results import drawing
from pdsim.results.report import before_after
from pdsim.results.store import load

__all__ = ["draw"]


def draw(figure: Path, claims: Sequence[str], runs: Sequence[Path]) -> None:
    """Draw the points of *claims* in *runs* into *figure*.

    Claims are names, runs folders of seeds; the figure's ending says whether it is SVG, PDF or PNG.

    Needs matplotlib, the extra ``report`` of pdsim.  Raise a `ConfigError` if a folder is no complete run.
    """
    texts: dict[str, str] = {}
    points: dict[tuple[Any, ...], dict[str, Any]] = {}  # a point that several runs read from a file is one
    for run in map(load, runs):
        tables = {table["title"]: table for table in run["tables"]}
        texts |= {row[0]: row[1] for row in tables["Claims"]["rows"]}
        for row in tables["Points"]["rows"]:
            points.setdefault(tuple(row[:4]), dict(zip(tables["Points"]["columns"], row, strict=True)))
    chart = before_after.figure(texts, points.values(), claims)
    figure.write_bytes(drawing.image(chart, figure.suffix.lstrip("."), width=11.0, titled=False))


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit("usage: python -m experiments.reports.plot FIGURE.svg CLAIM,... FOLDER...")
    draw(Path(sys.argv[1]), sys.argv[2].split(","), [Path(folder) for folder in sys.argv[3:]])
