# SPDX-License-Identifier: Apache-2.0
"""Draw simulated against measured times into docs/accuracy.svg: ``python -m tools.accuracy``.

The points are those of the committed validations on 2 x H200 (`data/validation`): medians of single transfers, of
handoffs and of what `serve` reports, predicted before they were measured.  Needs matplotlib, the extra ``report``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.validate.sealed import read
from pdsim.results import drawing
from pdsim.results.drawing import Figure
from pdsim.validation.agreement import EXPECTED, MEASURED, agreement

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "data" / "validation"
FIGURE = ROOT / "docs" / "accuracy.svg"
ENGINES = ("nvlink", "mooncake_nvlink", "nixl")
KINDS = {"transfers": ("pair", "bidirectional"), "handoffs": ("handoff", "metadata"), "serving": ("serve",)}
ENDS = (8e-6, 2.0)


def points(engine: str, kind: str) -> list[tuple[float, float]]:
    """Return the (measured, simulated) seconds of *engine* in the classes of *kind*, one of `KINDS`."""
    folder = STORED / f"{engine}-2xh200"
    expected, measured = (
        {
            (row["group"], row["label"]): row["value"]
            for row in rows
            if row["quantity"] == "time" and row["group"].startswith(KINDS[kind])
        }
        for rows in (read(folder / EXPECTED)["expected"], read(folder / MEASURED)["measured"])
    )
    return [(measured[key], expected[key]) for key in measured if key in expected]


def draw(path: Path) -> None:
    """Write the figure to *path* as SVG, the same bytes each time."""
    panels = []
    for engine in ENGINES:
        series = {
            kind: [(measured, simulated, "") for measured, simulated in points(engine, kind)] for kind in KINDS
        }
        panels.append(replace(agreement(series, engine, "s", ENDS), height=330))
    path.write_bytes(drawing.image(Figure("accuracy", "", "", panels, columns=3), "svg", titled=False))


if __name__ == "__main__":
    draw(FIGURE)
