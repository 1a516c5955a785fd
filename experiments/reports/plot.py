"""Draw the points of seeds: ``python -m experiments.reports.plot FIGURE.svg CLAIM,... FOLDER...``, the folders of runs.

One panel a claim, one line a point: its values before the change and after it, simulated ones hollow, measured full.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]

BEFORE, AFTER = "#b5651d", "#1f5fa8"
HEIGHT = 0.16  # inches of a line


def draw(figure: Path, claims: Sequence[str], runs: Sequence[Path]) -> None:
    """Draw the points of *claims*, by name, in *runs*, folders of seeds, into *figure*.

    Needs matplotlib, the extra ``report`` of pdsim.  Raise a `ConfigError` if a folder is no complete run.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from pdsim.results.store import load

    mpl.rcParams |= {"svg.hashsalt": "pdsim", "svg.fonttype": "none", "font.size": 8}
    panels: dict[str, dict[tuple[Any, ...], Sequence[Any]]] = {}  # a point that several runs read from a file is one
    for run in map(load, runs):
        tables = {table["title"]: table["rows"] for table in run["tables"]}
        texts = {claim: text for claim, text, *_ in tables["Claims"]}
        for row in (row for row in tables["Points"] if row[0] in claims):
            panels.setdefault(f"{texts[row[0]]}, {row[6]}", {})[tuple(row[:4])] = row
    heights = [len(rows) for rows in panels.values()]
    whole = Figure(figsize=(9, HEIGHT * sum(heights) + 0.8 * len(panels)), layout="constrained")
    whole.suptitle("brown: before the change; blue: after it; hollow: simulated; full: measured", fontsize="medium")
    axes = whole.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        _panel(axis, title, list(rows.values()))
    whole.savefig(figure, format="svg", metadata={"Date": None})


def _panel(axis: Any, title: str, rows: Sequence[Sequence[Any]]) -> None:
    names = [f"{machine}{', measured' if target == 'real' else ''}: {at}" for _, machine, target, at, *_ in rows]
    whole = [(height, row[4], row[5]) for height, row in enumerate(rows) if None not in row[4:6]]
    axis.hlines(*(zip(*whole, strict=True) if whole else ((), (), ())), color="#bbb", linewidth=1.0, zorder=1)
    for column, colour in ((4, BEFORE), (5, AFTER)):
        here = [(row[column], height, row[2]) for height, row in enumerate(rows) if row[column] is not None]
        values, heights, targets = zip(*here, strict=True) if here else ((), (), ())
        faces = [colour if target == "real" else "white" for target in targets]
        axis.scatter(values, heights, s=22, edgecolors=colour, facecolors=faces, zorder=2)
    axis.set(xscale="log", yticks=range(len(rows)), yticklabels=names, ylim=(len(rows) - 0.4, -0.6))
    axis.tick_params(which="minor", length=0, labelbottom=False)
    axis.tick_params(axis="y", length=0)
    axis.set_title(title, loc="left", fontsize="medium")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), sys.argv[2].split(","), [Path(folder) for folder in sys.argv[3:]])
