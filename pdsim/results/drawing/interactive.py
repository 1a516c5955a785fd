# SPDX-License-Identifier: Apache-2.0
"""Panels as plotly draws them in a page: plain data, with ``@name`` for colours that depend on the page's theme.

plotly's Python library is needed for its JavaScript only, which goes into the page; traces and
layouts are plain dictionaries here, because making its objects takes longer than everything else.
`pdsim.results.drawing.static` draws the same panels as files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pdsim.core.errors import ConfigError
from pdsim.results.drawing.figure import DASHES, MARKERS, Marks, Panel, Scale, prefixed, ticks

__all__ = ["HEIGHT", "drawn", "library"]

HEIGHT = 300
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif'
_PREFIXED = ("s", "B", "B/s", "tokens/s", "1/s")


def library() -> str:
    """Return plotly's JavaScript.  Raise a `ConfigError` that says what to install if there is none."""
    if find_spec("plotly") is None:
        raise ConfigError("report needs plotly; pip install 'pdsim[report]'")
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text


def drawn(panel: Panel) -> dict[str, Any]:
    """Return ``{"data": ..., "layout": ...}`` of *panel* for ``Plotly.newPlot``.

    Numbers are rounded to six digits. Colours are names such as ``@ink`` and ``@c0``, which the page replaces by
    those of its theme, so that it can change from light to dark without drawing anew.
    """
    stacked = any(series.kind == "bars" for series in panel.series)
    layout: dict[str, Any] = {
        "height": panel.height or HEIGHT,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "font": {"family": _FONT, "size": 12, "color": "@ink"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "@panel", "bordercolor": "@line", "font": {"color": "@ink", "size": 12}},
        "showlegend": panel.named,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"size": 12},
            "traceorder": "normal",
        },
        "xaxis": _axis(panel, "x"),
        "yaxis": _axis(panel, "y"),
    }
    layout |= {"barmode": "stack", "bargap": 0.18} if stacked else {}
    return {"data": [trace for series in panel.series for trace in _traces(series, panel)], "layout": layout}


def _axis(panel: Panel, letter: str) -> dict[str, Any]:
    # A logarithmic axis has ticks of its own, with prefixes; one of names has a tick for each.
    scale: Scale = getattr(panel, letter)
    axis: dict[str, Any] = {
        "title": {"text": scale.title, "font": {"size": 12, "color": "@muted"}, "standoff": 8},
        "type": "log" if scale.log else "linear",
        "gridcolor": "@grid",
        "linecolor": "@line",
        "tickcolor": "@line",
        "tickfont": {"color": "@muted", "size": 11},
        "zeroline": False,
        "showline": True,
        "automargin": True,
        "ticks": "outside",
        "ticklen": 4,
    }
    if scale.unit in _PREFIXED:
        axis |= {"tickformat": "~s", "ticksuffix": f" {scale.unit}", "hoverformat": ".4~s"}
        axis |= {"ticksuffix": scale.unit} if scale.unit in ("s", "B", "B/s") else {"ticksuffix": ""}
    elif scale.unit == "%":
        axis |= {"tickformat": ",~r", "ticksuffix": " %", "hoverformat": ".3~r"}
    if scale.log:
        values, told = ticks(*panel.span(letter))
        texts = [prefixed(value, scale.unit) if label else "" for value, label in zip(values, told, strict=True)]
        axis |= {"tickmode": "array", "tickvals": values, "ticktext": texts}
    if scale.values:
        axis |= {"tickmode": "array", "tickvals": list(scale.values), "ticktext": [f"{v:g}" for v in scale.values]}
    if scale.labels:
        axis |= {"tickmode": "array", "tickvals": list(range(len(scale.labels))), "ticktext": list(scale.labels)}
        ends = [-0.5, len(scale.labels) - 0.5]
        axis |= {"range": ends if letter == "x" else ends[::-1], "showgrid": False, "ticks": ""}
    elif scale.low is not None or scale.high is not None:
        axis["range"] = [_end(scale, scale.low), _end(scale, scale.high)]
    return axis


def _end(scale: Scale, value: float | None) -> float | None:
    # Of a logarithmic axis that is the logarithm; None where it is left open.
    from math import log10

    return log10(value) if value is not None and scale.log else value


def _traces(series: Marks, panel: Panel) -> list[dict[str, Any]]:
    colour = "@muted" if series.plain else f"@c{series.colour % 8}"
    trace: dict[str, Any] = {"x": _short(series.x), "y": _short(series.y), "name": series.name}
    trace |= {"showlegend": bool(series.name), "hoverinfo": "skip"} if series.plain else {}
    trace |= {"hovertemplate": _hover(series, panel)} if not series.plain else {}
    trace |= {"showlegend": bool(series.name)}
    if series.texts:
        trace["text"] = list(series.texts)
    if series.kind == "bars":
        trace |= {"textposition": "none"}
        return [trace | {"type": "bar", "orientation": "h", "marker": {"color": colour, "line": {"width": 0}}}]
    if series.kind == "band":
        edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        low = edge | {"x": trace["x"], "y": trace["y"], "showlegend": False}
        high = edge | {"x": trace["x"], "y": _short(series.top), "name": series.name, "fill": "tonexty"}
        return [low, high | {"fillcolor": "@band", "showlegend": bool(series.name)}]
    if series.kind == "points":
        symbol = MARKERS[(series.colour if series.marker is None else series.marker) % 8]
        marker: Mapping[str, Any] = {"color": colour, "size": 7, "symbol": symbol, "line": {"width": 0}}
        if series.hollow:
            marker = {
                "color": colour,
                "size": 8,
                "symbol": f"{symbol}-open",
                "line": {"width": 1.6, "color": colour},
            }
        return [trace | {"type": "scatter", "mode": "markers", "marker": marker, "opacity": 0.85}]
    line: dict[str, Any] = {"color": colour, "width": 1.2 if series.plain else 1.5 if series.solid else 2}
    line["dash"] = "dot" if series.plain else "solid" if series.solid else DASHES[series.colour % 8]
    trace |= {"type": "scatter", "mode": "lines", "line": line}
    if series.kind == "steps":
        line["shape"] = "hv"
    if series.kind == "stack":
        trace |= {"stackgroup": "one", "fillcolor": f"@f{series.colour % 8}"}
        trace["line"] = {"color": colour, "width": 1, "shape": "hv"}
    return [trace]


def _hover(series: Marks, panel: Panel) -> str:
    name = f"<b>{series.name}</b><br>" if series.name else ""
    if series.texts:
        return f"{name}%{{text}}<extra></extra>"
    return f"{name}{panel.x.title}: %{{x}}<br>{panel.y.title}: %{{y}}<extra></extra>"


def _short(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if value == value and abs(value) != float("inf") else None for value in values]
