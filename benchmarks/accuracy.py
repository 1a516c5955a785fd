"""Draw simulated against measured times into docs/accuracy.svg: ``python -m benchmarks.accuracy``.

The points are those of the committed validations on 2 x H200 (`data/validation`): medians of single transfers, of
handoffs and of what `serve` reports, predicted before they were measured.  Needs matplotlib, the extra ``report``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.validate.sealed import EXPECTED, MEASURED, read

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "data" / "validation"
FIGURE = ROOT / "docs" / "accuracy.svg"
ENGINES = {"nvlink": "#0969da", "mooncake_nvlink": "#b5651d", "nixl": "#1a7f37"}
KINDS = {"transfers": ("pair", "bidirectional"), "handoffs": ("handoff", "metadata"), "serving": ("serve",)}
MARKS = {"transfers": "o", "handoffs": "s", "serving": "^"}


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
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {"svg.hashsalt": "pdsim", "svg.fonttype": "none", "font.size": 9}
    whole = Figure(figsize=(8.6, 3.6), layout="constrained")
    whole.patch.set_facecolor("white")
    ends = (8e-6, 2.0)
    for axis, (engine, colour) in zip(whole.subplots(1, len(ENGINES), sharey=True), ENGINES.items(), strict=True):
        _panel(axis, engine, colour, ends)
    whole.axes[0].set_ylabel("simulated, seconds")
    whole.savefig(path, format="svg", metadata={"Date": None})


def _panel(axis: Any, engine: str, colour: str, ends: tuple[float, float]) -> None:
    axis.plot(ends, ends, color="#999", linewidth=1.0, zorder=1)
    axis.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="#ddd", zorder=0, label="±10 %")
    for kind, mark in MARKS.items():
        found = points(engine, kind)
        axis.scatter(*zip(*found, strict=True), s=18, marker=mark, color=colour, alpha=0.7, zorder=2, label=kind)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, seconds", title=engine)
    axis.grid(visible=True, color="#eee", zorder=-1)
    axis.legend(loc="upper left", frameon=False, fontsize=8)


if __name__ == "__main__":
    draw(FIGURE)
