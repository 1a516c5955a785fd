# SPDX-License-Identifier: Apache-2.0
"""Figures of plain numbers in SI units: plotly draws them in a page, matplotlib in a file.

A page can be zoomed and says more under the pointer; a file (SVG, PDF, PNG) is for papers, needs no browser, and is
the same bytes each time.  Colours, markers and dashes tell series apart together, for a print in black and white.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.core import plugins
from pdsim.core.errors import ConfigError

LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b8518f", "#a66f00", "#3a8fc4", "#6b5b95", "#5f6368")
DARK = ("#56b4e9", "#ff9248", "#2fcf9f", "#e89ac7", "#f0c14b", "#9ad1f5", "#b9a7e8", "#b8bec5")
"""Colours of series: Okabe and Ito's, which most colour-blind people tell apart, darker or lighter for contrast."""
FORMATS = ("svg", "pdf", "png")
HEIGHT = 300  # pixels of a panel that says no height
_MOST = 400  # points of a curve: more cannot be seen, and make a page large

# of plotly and of matplotlib, by the colour of the series
_MARKERS = ("circle", "square", "triangle-up", "diamond", "cross", "x", "triangle-down", "star"), "os^DPXv*"
_DASHES: tuple[tuple[str, ...], tuple[Any, ...]] = (
    ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash"),
    ("-", (0, (5, 2)), ":", "-.", (0, (9, 2)), (0, (9, 2, 1, 2)), "-", (0, (5, 2))),
)
_GREY, _GRID, _INK = "#8a8f98", "#e3e6ea", "#24292f"
_STYLE = {
    "svg.hashsalt": "pdsim",
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
    "font.size": 8.5,
    "text.color": _INK,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": "small",
}


@dataclass(frozen=True)
class Scale:
    """An axis: *title* and *unit* of its values (``""`` for counts), *log*, *low* and *high* to show.

    *labels* stand for 0, 1, 2, ... where the axis has names instead of numbers.
    """

    title: str
    unit: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Marks:
    """One series: values *x* and *y*, of equal length, with plain *texts* that are shown under the pointer.

    *kind* is ``line``, ``steps`` (which keep their value until the next x), ``points``, ``bars`` (stacked along x at
    every y) or ``band`` (between *y* and *top*).  *colour* counts from 0.  A series without *name* has no entry in
    the legend.
    """

    kind: str
    x: Sequence[float]
    y: Sequence[float]
    name: str = ""
    colour: int = 0
    hollow: bool = False  # points: outline only
    plain: bool = False  # a line of reference: thin, grey
    solid: bool = False  # a line without dashes, for curves too ragged for them
    texts: Sequence[str] = ()
    top: Sequence[float] = ()  # band


@dataclass(frozen=True)
class Panel:
    """One pair of axes, *title* above, and what is drawn in it, the last on top."""

    x: Scale
    y: Scale
    series: Sequence[Marks]
    title: str = ""
    height: int = HEIGHT  # pixels of the plot


@dataclass(frozen=True)
class Figure:
    """Panels under one *title*; *reading* says how to read them, *name* is what commands call the figure."""

    name: str
    title: str
    reading: str
    panels: Sequence[Panel] = field(default_factory=tuple)
    columns: int = 2  # most panels in a row
    paired: bool = False  # panels belong together two by two, the left one beside the right one


def cumulative(values: Sequence[float] | npt.NDArray[np.float64], name: str, colour: int) -> Marks:
    """Return the cumulative distribution of *values* in per cent, of at most 400 points.

    >>> cumulative([3.0, 1.0, 2.0, 4.0], "TTFT", 0).y
    [25.0, 50.0, 75.0, 100.0]
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    chosen = thinned(len(ordered))
    shares = [100.0 * (place + 1) / len(ordered) for place in chosen]
    return Marks("steps", ordered[chosen].tolist(), shares, name, colour)


def thinned(count: int, most: int = _MOST) -> list[int]:
    """Return at most *most* places of *count*, evenly spread, first and last among them.

    >>> thinned(9, most=3), thinned(2), thinned(0)
    ([0, 4, 8], [0, 1], [])
    """
    chosen: list[int] = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)).tolist()
    return chosen


def plotly_panel(panel: Panel) -> dict[str, Any]:
    """Return ``{"data": ..., "layout": ...}`` of *panel* for ``Plotly.newPlot``, numbers rounded to six digits."""
    layout = {
        "height": panel.height,
        "showlegend": any(series.name for series in panel.series),
        "barmode": "stack",
        "xaxis": _plotly_axis(panel.x, 1),
        "yaxis": _plotly_axis(panel.y, -1),
    }
    return {"data": [trace for series in panel.series for trace in _traces(series, panel)], "layout": layout}


def _plotly_axis(scale: Scale, direction: int) -> dict[str, Any]:
    # Names run from left to right, and from top to bottom.
    axis: dict[str, Any] = {"title": {"text": _marked_up(scale.title)}, "type": "log" if scale.log else "linear"}
    if scale.log:
        axis["nticks"] = 3 if direction > 0 else 4  # more would overlap in a narrow panel
    if scale.unit in ("s", "B", "B/s"):
        axis |= {"tickformat": "~s", "ticksuffix": scale.unit, "hoverformat": ".4~s"}
    elif scale.unit == "%":
        axis |= {"tickformat": ",~r", "ticksuffix": " %", "hoverformat": ".3~r"}
    if scale.labels:
        labels = list(map(_marked_up, scale.labels))
        axis |= {"tickmode": "array", "tickvals": list(range(len(labels))), "ticktext": labels}
        axis |= {"range": [-0.5, len(scale.labels) - 0.5][::direction], "showgrid": False, "ticks": ""}
    elif scale.low is not None and scale.high is not None:
        axis["range"] = [math.log10(end) if end and scale.log else end for end in (scale.low, scale.high)]
    elif scale.low is not None:
        axis["autorangeoptions"] = {"minallowed": scale.low}
    return axis


def _traces(series: Marks, panel: Panel) -> list[dict[str, Any]]:
    number = series.colour % 8
    colour = "@muted" if series.plain else f"@c{number}"
    trace: dict[str, Any] = {"type": "scatter", "x": _short(series.x), "y": _short(series.y)}
    trace |= {"name": _marked_up(series.name), "showlegend": bool(series.name)}
    if series.kind == "band":
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        upper = {"y": _short(series.top), "fill": "tonexty", "fillcolor": "@band"}
        return [trace | edge | {"showlegend": False}, trace | edge | upper]
    joins = series.kind == "line" and any(other.texts for other in panel.series)
    if series.plain or joins:  # a line through points would take the pointer from them, their texts and their links
        trace["hoverinfo"] = "skip"
    else:
        axes = f"{_marked_up(panel.x.title)}: %{{x}}<br>{_marked_up(panel.y.title)}: %{{y}}"
        name = f"<b>{_marked_up(series.name)}</b><br>" if series.name else ""
        trace["hovertemplate"] = f"{name}{'%{text}' if series.texts else axes}<extra></extra>"
    if series.texts:
        trace["text"] = list(map(_marked_up, series.texts))
    if series.kind == "bars":
        return [trace | {"type": "bar", "orientation": "h", "marker": {"color": colour}, "textposition": "none"}]
    if series.kind == "points":
        symbol = f"{_MARKERS[0][number]}{'-open' if series.hollow else ''}"
        marker = {"color": colour, "size": 7, "symbol": symbol}
        return [trace | {"mode": "markers", "marker": marker, "cliponaxis": False}]  # whole at the edge of the axes
    width, dash = (1.2, "dot") if series.plain else (1.5, "solid") if series.solid else (2, _DASHES[0][number])
    shape = "hv" if series.kind == "steps" else "linear"
    return [trace | {"mode": "lines", "line": {"color": colour, "width": width, "dash": dash, "shape": shape}}]


def _marked_up(text: str) -> str:
    # plotly reads all text as markup
    return escape(text, quote=False).replace("\n", "<br>")


def _short(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def image(figure: Figure, form: str, *, width: float = 9.0, titled: bool = True) -> bytes:
    """Return *figure* as a file of *form*, one of `FORMATS`, *width* inches wide; the same bytes each time.

    Without *titled* a paper's caption replaces the title.  Raise a `ConfigError` for another form, or if matplotlib
    is missing, with what to install.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, got {form!r}")
    plugins.require("--figure", "report", "matplotlib")
    import matplotlib as mpl
    from matplotlib.figure import Figure as Sheet

    columns = min(figure.columns, len(figure.panels)) or 1
    rows = [figure.panels[at : at + columns] for at in range(0, len(figure.panels), columns)]
    heights = [max(panel.height for panel in row) / 100 for row in rows]
    with mpl.rc_context(_STYLE):
        sheet = Sheet(figsize=(width, sum(heights) + 0.35), layout="constrained", facecolor="white")
        if titled:
            sheet.suptitle(figure.title, fontsize="large", x=0.01, ha="left")
        axes = sheet.subplots(len(rows), columns, squeeze=False, height_ratios=heights).flat
        for place, (axis, panel) in enumerate(zip(axes, figure.panels, strict=False)):
            _draw_panel(axis, panel)
            if place % columns and panel.y.labels and panel.y.labels == figure.panels[place - 1].y.labels:
                axis.tick_params(labelleft=False)  # a pair: the names at the left are of both
        for axis in list(sheet.axes)[len(figure.panels) :]:
            axis.set_axis_off()
        file = io.BytesIO()
        dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}
        sheet.savefig(file, format=form, metadata=dated[form], dpi=160)
    return file.getvalue()


def _draw_panel(axis: Any, panel: Panel) -> None:
    axis.set_title(fill(panel.title, 54 if panel.y.labels else 70))
    starts: dict[float, float] = {}  # of the next bar, by its place
    for series in panel.series:
        _draw_series(axis, series, starts)
    for own, limit, scale in ((axis.xaxis, axis.set_xlim, panel.x), (axis.yaxis, axis.set_ylim, panel.y)):
        _draw_axis(own, limit, scale)
    axis.grid(visible=True, color=_GRID, linewidth=0.8, axis="x" if panel.y.labels else "both")
    if any(series.name for series in panel.series):
        axis.legend()


def _draw_series(axis: Any, series: Marks, starts: dict[float, float]) -> None:
    number = series.colour % 8
    colour = _GREY if series.plain else LIGHT[number]
    label = series.name or None
    if series.kind == "bars":
        left = [starts.get(y, 0.0) for y in series.y]
        axis.barh(series.y, series.x, left=left, color=colour, height=0.82, label=label)
        starts |= {y: start + x for y, start, x in zip(series.y, left, series.x, strict=True)}
    elif series.kind == "band":
        axis.fill_between(series.x, series.y, series.top, color="#dfe3e8", linewidth=0, label=label)
    elif series.kind == "points":
        face = "white" if series.hollow else colour
        style = {"marker": _MARKERS[1][number], "edgecolors": colour, "facecolors": face}
        axis.scatter(series.x, series.y, s=20, zorder=3, label=label, **style)
    else:
        width, dash = (0.9, ":") if series.plain else (1.1, "-") if series.solid else (1.6, _DASHES[1][number])
        shape = "steps-post" if series.kind == "steps" else "default"
        axis.plot(series.x, series.y, ls=dash, color=colour, lw=width, drawstyle=shape, label=label)


def _draw_axis(axis: Any, limit: Any, scale: Scale) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

    axis.set_label_text(scale.title)
    if scale.labels:
        axis.set_ticks(range(len(scale.labels)), labels=list(scale.labels))
        axis.set_tick_params(length=0)
        ends = (-0.5, len(scale.labels) - 0.5)
        limit(*(ends if axis.axis_name == "x" else ends[::-1]))
        return
    if scale.log:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high <= 100 * low else (1,), numticks=6))
        axis.set_minor_formatter(NullFormatter())
    if scale.unit in ("s", "B", "B/s"):
        axis.set_major_formatter(EngFormatter(scale.unit, sep=" "))
    elif scale.unit == "%" or scale.log:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} {scale.unit}".rstrip()))
    limit(scale.low, scale.high)
