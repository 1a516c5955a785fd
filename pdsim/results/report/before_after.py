# SPDX-License-Identifier: Apache-2.0
"""Figures of a reproduced report: every claim in one row, simulated at the left, measured at the right.

They are drawn from the tables "Claims" and "Points", which `experiments.reports.claims` makes; a
run without them has no such figure.  `experiments.reports.plot` draws the same from the points that
the repository keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdsim.results.drawing import Figure, Marks, Panel, Scale

if TYPE_CHECKING:
    from pdsim.results.kept import KeptRun

__all__ = ["figure", "figures"]

SIDES = {"model": "simulated", "real": "measured"}
_UNITS = {"us": (1e-6, "s"), "ms": (1e-3, "s"), "s": (1.0, "s")}
_LINE = 15
"""Pixels of a point."""


def figures(run: KeptRun) -> list[Figure]:
    """Return the figure of the claims of *run*, none if it is of no report."""
    tables = {table["title"]: table for table in run.about["tables"]}
    if not {"Claims", "Points"} <= set(tables):
        return []
    texts = {row[0]: row[1] for row in tables["Claims"]["rows"]}
    heads = list(tables["Points"]["columns"])
    points = [dict(zip(heads, row, strict=True)) for row in tables["Points"]["rows"]]
    return [figure(texts, points)]


def figure(texts: Mapping[str, str], points: Iterable[Mapping[str, Any]], claims: Sequence[str] = ()) -> Figure:
    """Return the figure of *points*: mappings with claim, machine, target, at, before, after and unit."""
    rows = list(points)
    panels: list[Panel] = []
    for claim in claims or dict.fromkeys(row["claim"] for row in rows):
        mine = [row for row in rows if row["claim"] == claim]
        factor, unit = _UNITS.get(mine[0]["unit"], (1.0, "")) if mine else (1.0, "")
        values = [row[side] * factor for row in mine for side in ("before", "after") if row[side]]
        if not values:
            continue
        # a point has the same place on both sides, those that were measured first
        measured = [_name(row) for row in mine if row["target"] == "real"]
        places = list(dict.fromkeys([*measured, *map(_name, mine)]))
        title = "time" if unit else mine[0]["unit"]
        scale = Scale(title, unit, log=min(values) > 0, low=min(values) / 1.25, high=max(values) * 1.25)
        for target, word in SIDES.items():
            own = {_name(row): row for row in mine if row["target"] == target}
            panels.append(_panel(f"{texts[claim]}: {word}", places, own, scale, factor))
    reading = (
        "Each line is one point, before (hollow) and after the change (full), simulated at the left and measured on "
        "real engines at the right, on the same scale; the longer the line, the larger the effect."
    )
    return Figure("claims", "Before and after the change", reading, panels, paired=True)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['machine']}: {row['at']}"


def _panel(
    title: str, places: Sequence[str], rows: Mapping[str, Mapping[str, Any]], scale: Scale, factor: float
) -> Panel:
    # *places* are the names of all points from top to bottom, so that both panels of a claim have the
    # same.
    gap_x: list[float] = []
    gap_y: list[float] = []
    for place, name in enumerate(places):
        ends: list[Any] = [rows.get(name, {}).get(side) for side in ("before", "after")]
        if None not in ends:
            gap_x += [*(end * factor for end in ends), float("nan")]
            gap_y += [place, place, float("nan")]
    series = [Marks("line", gap_x, gap_y, plain=True)] if gap_x else []
    for colour, side in enumerate(("before", "after")):
        here = [(place, rows[name]) for place, name in enumerate(places) if rows.get(name, {}).get(side) is not None]
        texts = [f"{places[place]}: {side} {row[side]:.4g} {row['unit']}" for place, row in here]
        x, y = [row[side] * factor for _, row in here], [float(place) for place, _ in here]
        series.append(Marks("points", x, y, side, 1 - colour, hollow=not colour, texts=texts))
    return Panel(scale, Scale("", labels=places), series, title, 96 + _LINE * max(len(places), 3))
