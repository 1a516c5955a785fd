# SPDX-License-Identifier: Apache-2.0
"""Figures as files, drawn by matplotlib: SVG and PDF for papers, PNG for everything else; the same bytes each time.

Colours, markers and dashes tell series apart together, so that a print in black and white does,
too.  Text stays text, in the fonts of the document that the file is put into (SVG), or embedded
(PDF).
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from textwrap import fill
from typing import Any

from pdsim.core.errors import ConfigError
from pdsim.results.drawing.figure import LIGHT, Figure, Marks, Panel, Scale, prefixed, ticks

__all__ = ["FORMATS", "drawn"]

FORMATS = ("svg", "pdf", "png")
_MARKERS = ("o", "s", "^", "D", "P", "X", "v", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), ":", "-.", (0, (9, 2)), (0, (9, 2, 1, 2)), "-", (0, (5, 2)))
_GREY, _GRID, _INK = "#8a8f98", "#e3e6ea", "#24292f"
_STYLE = {
    "svg.hashsalt": "pdsim",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.size": 8.5,
    "text.color": _INK,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "figure.facecolor": "white",
}


def drawn(figure: Figure, form: str, *, width: float = 9.0, titled: bool = True) -> bytes:
    """Return *figure* as a file of *form*, *width* inches wide.

    The file has no date and no random names, so that the same figure is the same bytes.  Text stays
    text in SVG and PDF.

    Args:
        figure: What to draw.
        form: One of `FORMATS`.
        width: Inches; the height follows from the panels.
        titled: Whether it has its title, which a paper's caption replaces.

    Raises:
        ConfigError: Another form; or matplotlib is missing, with what to install.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, got {form!r}")
    if find_spec("matplotlib") is None:
        raise ConfigError("figures as files need matplotlib; pip install 'pdsim[report]'")
    import matplotlib as mpl
    from matplotlib.figure import Figure as Sheet

    with mpl.rc_context(_STYLE):
        columns = min(figure.columns, len(figure.panels)) or 1
        rows = [figure.panels[at : at + columns] for at in range(0, len(figure.panels), columns)]
        heights = [max((panel.height or 300) / 100 for panel in row) for row in rows]
        sheet = Sheet(figsize=(width, sum(heights) + 0.35), layout="constrained")
        sheet.set_facecolor("white")
        if titled:
            sheet.suptitle(figure.title, fontsize="large", x=0.01, ha="left")
        axes = sheet.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
        for line, row in zip(axes, rows, strict=True):
            for place, axis in enumerate(line):
                _panel(axis, row[place]) if place < len(row) else axis.set_axis_off()
                if 0 < place < len(row) and row[place].y.labels and row[place].y.labels == row[place - 1].y.labels:
                    axis.tick_params(labelleft=False)  # a pair: the names at the left are of both
        file = io.BytesIO()
        dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}
        sheet.savefig(file, format=form, metadata=dated[form], dpi=160)
    return file.getvalue()


def _panel(axis: Any, panel: Panel) -> None:
    # Bars that share a place are stacked, and so are areas; both keep account of where the one before
    # ended.
    axis.set_title(fill(panel.title, 54 if panel.y.labels else 70))
    lefts: dict[float, float] = {}
    below: Any = None
    for series in panel.series:
        below = _series(axis, series, lefts, below)
    _scale(axis.xaxis, axis.set_xlim, panel, "x")
    _scale(axis.yaxis, axis.set_ylim, panel, "y")
    axis.grid(visible=True, color=_GRID, linewidth=0.8, axis="x" if panel.y.labels else "both")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if panel.named:
        axis.legend(frameon=False, fontsize="small")


def _series(axis: Any, series: Marks, lefts: dict[float, float], below: Any) -> Any:
    # *lefts* has where the next bar at each height begins, and is updated; *below* is the upper edge
    # before, None at first.
    colour = _GREY if series.plain else LIGHT[series.colour % 8]
    label = series.name or None
    if series.kind == "bars":
        starts = [lefts.get(y, 0.0) for y in series.y]
        axis.barh(series.y, series.x, left=starts, color=colour, height=0.82, label=label)
        lefts |= {y: start + x for y, start, x in zip(series.y, starts, series.x, strict=True)}
    elif series.kind == "band":
        axis.fill_between(series.x, series.y, series.top, color="#dfe3e8", linewidth=0, label=label)
    elif series.kind == "stack":
        import numpy as np

        height = np.asarray(series.y, dtype=np.float64)
        upper = height if below is None else below + height
        base = np.zeros_like(height) if below is None else below
        axis.fill_between(series.x, base, upper, step="post", color=colour, alpha=0.75, linewidth=0, label=label)
        return upper
    elif series.kind == "points":
        mark = _MARKERS[(series.colour if series.marker is None else series.marker) % 8]
        face = "white" if series.hollow else colour
        axis.scatter(
            series.x, series.y, s=20, marker=mark, edgecolors=colour, facecolors=face, zorder=3, label=label
        )
    else:
        style = ":" if series.plain else "-" if series.solid else _DASHES[series.colour % 8]
        width = 0.9 if series.plain else 1.1 if series.solid else 1.6
        how = {"drawstyle": "steps-post"} if series.kind == "steps" else {}
        axis.plot(series.x, series.y, linestyle=style, color=colour, linewidth=width, label=label, **how)
    return below


def _scale(axis: Any, limit: Any, panel: Panel, letter: str) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, NullLocator

    scale: Scale = getattr(panel, letter)
    axis.set_label_text(scale.title)
    if scale.labels:
        axis.set_ticks(range(len(scale.labels)), labels=list(scale.labels))
        axis.set_tick_params(length=0)
        ends = (-0.5, len(scale.labels) - 0.5)
        limit(*(ends if letter == "x" else ends[::-1]))
        return
    if scale.log:
        getattr(axis.axes, f"set_{letter}scale")("log")
        values, told = ticks(*panel.span(letter))
        axis.set_ticks(
            values, labels=[prefixed(v, scale.unit) if label else "" for v, label in zip(values, told, strict=True)]
        )
        axis.set_minor_locator(NullLocator())
    elif scale.values:
        axis.set_ticks(list(scale.values))
    elif scale.unit == "%":
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    elif scale.unit in ("s", "B", "B/s"):
        axis.set_major_formatter(EngFormatter(scale.unit, sep=" "))
    limit(scale.low, scale.high)
