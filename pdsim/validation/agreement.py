# SPDX-License-Identifier: Apache-2.0
"""Figures of a validation and what its report holds, from its two sealed files alone (`EXPECTED`, `MEASURED`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pdsim.core.errors import ConfigError
from pdsim.core.units import format_rate, format_size, format_time
from pdsim.results import terminal
from pdsim.results.drawing import Figure, Marks, Panel, Scale, cumulative, thinned
from pdsim.results.report.page import Content, Tile, run_content
from pdsim.results.store import FILES
from pdsim.validation.sealed import EXPECTED, MEASURED, read, values_in
from pdsim.validation.verdicts import Compared, by_class, by_decade, compare, compare_files, grouped, points, tables

_POINTS = 1500
_CLOSE = 0.1


def compared_in(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[Compared]]:
    """Return the predictions and the measurements of the validation in *folder*, and both side by side.

    Raise a `ConfigError` if a file was changed or is missing, or if they have nothing in common.
    """
    if missing := [name for name in (EXPECTED, MEASURED) if not (folder / name).is_file()]:
        raise ConfigError(
            f"{folder} has no {missing[0]}: predictions without measurements have no figure; measure them"
        )
    first, second = folder / EXPECTED, folder / MEASURED
    measured = read(second, "expectations")
    if "runs" in measured:
        expected = read(first, "predicted")
        return expected, measured, compare_files(expected, measured)
    expected = read(first, "expected", "written", "hw", "backend")
    measured = read(second, "measured", "engines", "began")
    return expected, measured, compare(values_in(first, "expected"), values_in(second, "measured"))


def figures(compared: Sequence[Compared]) -> list[Figure]:
    """Return the figures of *compared*, without those that have nothing to show."""
    return [figure for figure in (_agreement(compared), _errors(compared)) if figure.panels]


def content(folder: Path) -> Content:
    """Return the content of the report of the validation in *folder*: a run's folder, or the two files alone."""
    expected, measured, compared = compared_in(folder)
    before = measured["expectations"] == expected["sha256"]
    errors = np.abs([each.error for each in compared])
    middle, p95 = (terminal.share(float(np.percentile(errors, share))) for share in (50.0, 95.0))
    tiles = [Tile("points", str(len(compared))), Tile("median error", middle), Tile("95th percentile", p95)]
    facts = {
        "predicted before it was measured": "yes" if before else "no",
        "measured by": ", ".join(measured.get("engines") or measured.get("servers") or ["servers"]),
        "calibration": str(expected.get("calibration") or "none"),
    }
    kept = {
        "predicted": str(expected.get("written")),
        "measured from": str(measured.get("began")),
        "commit": str(expected.get("commit")),
        "predictions, SHA-256": expected["sha256"],
        "folder": str(folder),
    }
    about = f"{expected['backend']} on {expected['hw']}" if "hw" in expected else folder.name
    title = f"{about}: predicted and measured"
    if all((folder / name).is_file() for name in FILES):
        base = run_content(folder, figures(compared))
        facts |= {"status": base.facts["status"]}
        page = replace(base, provenance={**kept, **base.provenance})
    else:
        seed = int(expected.get("seed", 0))
        shown = tables(by_class(compared, {}, seed), by_decade(compared, seed))
        lines = [] if before else ["the predictions were made after these measurements"]
        page = Content(
            over="", title=title, facts=facts, tiles=tiles, warnings=lines, figures=figures(compared), tables=shown
        )
        page = replace(page, provenance=kept)
    every = [table for table in page.tables if table.title != "Every point"]
    return replace(
        page, over="pdsim report of a validation", title=title, facts=facts, tiles=tiles, shown=1,
        tables=[*every, points(compared)],
    )  # fmt: skip


def _groups(compared: Sequence[Compared]) -> Mapping[str, list[Compared]]:
    return grouped(compared, lambda each: each.predicted.group.partition(",")[0].partition(" ")[0])


def _agreement(compared: Sequence[Compared]) -> Figure:
    panels = []
    for quantity, title, unit in (("time", "Times", "s"), ("rate", "Rates", "B/s")):
        if mine := [each for each in compared if each.predicted.quantity == quantity]:
            groups = {
                name: [(each.measured, each.predicted.value, _hover(each)) for each in own]
                for name, own in _groups(mine).items()
            }
            panels.append(agreement(groups, title, unit))
    reading = (
        "On the line, prediction and measurement are the same; points above it were predicted too slow (times) or "
        "too fast (rates), and within the band they are at most 10 % off."
    )
    return Figure("agreement", "Predicted against measured", reading, panels)


def agreement(
    groups: Mapping[str, Sequence[tuple[float, float, str]]],
    title: str,
    unit: str,
    ends: tuple[float, float] | None = None,
) -> Panel:
    """Return the panel of (measured, predicted, hover text) of each of *groups*, both axes logarithmic, in *unit*.

    *ends* are those of both axes, by default with room for all.  The grey band is 10 % to either side.
    """
    values = [value for each in groups.values() for one in each for value in one[:2]]
    low, high = ends or (min(values) / 1.5, max(values) * 1.5)
    line = [low, high]
    series = [
        Marks("band", line, [0.9 * end for end in line], "±10 %", top=[1.1 * end for end in line]),
        Marks("line", line, line, plain=True),
    ]
    for colour, (name, each) in enumerate(groups.items()):
        measured, predicted, texts = zip(*(each[i] for i in thinned(len(each), _POINTS)), strict=True)
        series.append(Marks("points", measured, predicted, name, colour, texts=texts))
    x, y = (Scale(name, unit, log=True, low=low, high=high) for name in ("measured", "predicted"))
    return Panel(x, y, series, title, 400)


def _errors(compared: Sequence[Compared]) -> Figure:
    by_size, curves = [], []
    for colour, (name, each) in enumerate(_groups(compared).items()):
        sized = [one for one in each if one.predicted.nbytes > 0]
        chosen = [sized[i] for i in thinned(len(sized), _POINTS)]
        if chosen:
            x, y = [float(one.predicted.nbytes) for one in chosen], [100 * one.error for one in chosen]
            by_size.append(Marks("points", x, y, name, colour, texts=[_hover(one) for one in chosen]))
        errors = [abs(one.error) * 100 for one in each]
        curves.append(cumulative([max(error, 1e-2) for error in errors], name, colour))
    panels = []
    if by_size:
        ends = [min(min(marks.x) for marks in by_size), max(max(marks.x) for marks in by_size)]
        band = Marks("band", ends, [-100 * _CLOSE] * 2, "±10 %", top=[100 * _CLOSE] * 2)
        series = [band, Marks("line", ends, [0.0, 0.0], plain=True), *by_size]
        axes = Scale("bytes", "B", log=True), Scale("error", "%")
        panels.append(Panel(*axes, series, "Signed error by size", 360))
    axes = Scale("absolute error", "%", log=True), Scale("points not further off", "%", low=0, high=101)
    panels.append(Panel(*axes, curves, "Share of points within an error", 360))
    reading = (
        "Above zero the prediction is too high; on the right, the further left a curve, the smaller its errors."
    )
    return Figure("errors", "Errors by size and by class", reading, panels)


def _hover(each: Compared) -> str:
    value = each.predicted
    text = format_time if value.quantity == "time" else format_rate
    size = f", {format_size(value.nbytes)}" if value.nbytes else ""
    return (
        f"{value.group}: {value.label}{size}\npredicted {text(value.value)}, measured {text(each.measured)}, "
        f"{100 * each.error:+.1f} %"
    )
