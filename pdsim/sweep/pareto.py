# SPDX-License-Identifier: Apache-2.0
"""Figures of a sweep: throughput against speed with its Pareto front, and what each swept key does.

Speed is 1 / TPOT of the median request, what a user sees; throughput is output tokens a second and
GPU, what a provider pays for.  Ranking and front are those of `pdsim.sweep.best`, so a page and
``pdsim best`` agree.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from shlex import join
from typing import Any

import numpy as np

from pdsim.config import covers
from pdsim.core.errors import ConfigError
from pdsim.core.units import format_time
from pdsim.results import schema
from pdsim.results.drawing import Figure, Marks, Panel, Scale
from pdsim.results.kept import SloLimits
from pdsim.results.report.page import Content, Tile, what_was_run
from pdsim.sweep import best, collect
from pdsim.sweep.best import Ranked

_AXES = 8
"""Panels of the figure of swept keys, at most."""


def content(folder: Path, slo: SloLimits | None = None) -> Content:
    """Return the content of the report of the sweep in *folder*; one that served nothing has metrics over each key.

    *slo* is by default that of each point.  Raise a `ConfigError` if nothing can be read there.
    """
    rows = collect.points(folder)
    points = rows.to_pylist()
    states = [point["status"] for point in points]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    tables = [collect.table(folder)]
    ranked: list[Ranked] = []
    lines: list[str] = []
    tiles = [Tile("points", str(rows.num_rows))]
    try:
        ranked = best.rank(folder, slo)
    except ConfigError as error:
        lines.append(str(error))
    else:
        first = ranked[0]
        tables.insert(0, best.table(ranked, f"Best of {len(ranked)} points, {slo or 'the SLO of each'}", count=20))
        choice = ", ".join(f"{key}={value}" for key, value in first.choice.items())
        lines.append(f"best: {choice or first.point}, {first.value:.3g} good requests/s/GPU")
        tiles += [
            Tile("best goodput", f"{first.value:.3g}/s/GPU"),
            Tile("requests within the SLO there", f"{100 * first.attainment:.3g} %"),
            Tile("points on the Pareto front", str(len(best.front(ranked)))),
        ]
    drawn = [_knees(ranked), _pareto(ranked), _keys(ranked)] if ranked else [_metrics(points, rows.schema)]
    evidence = sorted({point["evidence"] for point in points if point["evidence"]})
    reasons = [(point["status"], f"{point['point']}: {point['error']}") for point in points]
    errors = [text for status, text in reasons if status in ("failed", "partial")]
    refused = [text for status, text in reasons if status == "infeasible"]
    warnings = errors[:5]
    if len(errors) > 5:
        warnings.append(f"and {len(errors) - 5} more points with failures")
    if refused:
        warnings.append(f"{len(refused)} points cannot be run, such as {refused[0]}")
    command, keys = _command(folder), collect.swept(points, rows.schema)
    return Content(
        over="pdsim report of a sweep",
        title=f"Sweep of {', '.join(keys) or 'one point'}",
        facts={
            **_first_run(folder, points, keys),
            "command": command,
            "points": ", ".join(f"{count} {state}" for state, count in counts.items()),
            "evidence": ", ".join(evidence),
            "SLO": str(slo or ""),
            "sweep": folder.name,
        },
        tiles=tiles,
        lines=lines,
        warnings=warnings,
        figures=[figure for figure in drawn if figure.panels],
        tables=tables,
        shown=1,
        provenance={**({"command": command} if command else {}), "folder": str(folder), "points": collect.POINTS},
    )


def _first_run(folder: Path, points: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> dict[str, str]:
    # machine, model and workload of the first point that was run, without what was swept, which the title names
    for point in points:
        if (path := folder / str(point["folder"]) / "config.yaml").is_file():
            config = schema.read_configuration(path)
            same = {key: value for key, value in config.items() if not covers(swept, key)}
            return what_was_run(same)
    return {}


def _command(folder: Path) -> str:
    # the command whose combinations are the points; of points that are zipped or searched for there is none such
    if not (folder / collect.LEDGER).is_file():
        return ""
    values: dict[str, dict[str, None]] = {}
    rows = collect.read_ledger(folder)[0].values()
    for row in rows:
        for key, value in row["overrides"].items():
            values.setdefault(key, {})[str(value)] = None
    words = [f"{key}={','.join(each)}" for key, each in values.items()]
    return f"pdsim sweep {join(words)}" if prod(map(len, values.values())) == len(rows) else ""


def _pareto(ranked: Sequence[Ranked]) -> Figure:
    # Points without a speed, which is 1 / TPOT, are left out: their requests had one token, or none
    # ended.  The line joins the Pareto front.
    able = [each for each in ranked if each.speed]
    front = best.front(able)
    if not able:
        return Figure("pareto", "Pareto front", "")
    key = _telling(able)
    values = list(dict.fromkeys(str(each.choice[key]) for each in able)) if key else [""]
    panels = []
    x, y = [each.speed or 0.0 for each in front], [each.throughput for each in front]
    line = [Marks("line", x, y, "Pareto front", 7)] if len(front) > 1 else []
    for title, unit, attribute, series in (
        ("Throughput against speed", "output tokens/s/GPU", "throughput", line),
        ("Goodput against speed", "good requests/s/GPU", "value", list[Marks]()),
    ):
        for colour, value in enumerate(values):
            mine = [each for each in able if not key or str(each.choice[key]) == value]
            texts = [_hover(each) for each in mine]
            name = f"{key}={value}" if key else "points"
            x, y = [each.speed or 0.0 for each in mine], [getattr(each, attribute) for each in mine]
            series.append(Marks("points", x, y, name, colour, texts=texts))
        speed = Scale("tokens/s/user (1 / median TPOT)", low=0)
        panels.append(Panel(speed, Scale(unit, low=0), series, title, 380))
    reading = (
        "Better is up and to the right; no other point beats one on the line in both, and the rest can be left out "
        "unless the SLO, in the right panel, says otherwise."
    )
    return Figure("pareto", "Pareto front", reading, panels)


def _knees(ranked: Sequence[Ranked]) -> Figure:
    # A curve for each choice of the other keys; seeds are one curve's points, in their median.
    offered = [key for key in best.RATES if key in ranked[0].choice]
    others = [key for key in ranked[0].choice if key not in (*offered[:1], "seed")]
    curves: dict[str, dict[float, list[Ranked]]] = {}
    for each in ranked if offered else ():
        if isinstance(rate := each.choice[offered[0]], int | float):
            name = ", ".join(f"{key}={each.choice[key]}" for key in others) or "all points"
            curves.setdefault(name, {}).setdefault(float(rate), []).append(each)
    panels = []
    for title, latency in (("TTFT", "ttft_p50"), ("TPOT", "tpot_p50")):
        series = []
        for colour, (name, by_rate) in enumerate([*curves.items()][:_AXES]):
            known = {
                rate: float(np.median(values))
                for rate, own in sorted(by_rate.items())
                if (values := [value for each in own if (value := each.latencies[latency]) is not None])
            }
            if len(known) < 3:
                continue
            x, y = [*known], [*known.values()]
            texts = [
                f"{name}\n{offered[0]}={rate:g}: {title} p50 {format_time(value)}\n{_whose(by_rate[rate])}"
                for rate, value in known.items()
            ]
            series += [Marks("line", x, y, name, colour), Marks("points", x, y, "", colour, texts=texts)]
            if (at := knee(x, y)) is not None:
                series.append(Marks("line", [x[at]] * 2, [min(y), max(y)], f"knee of {name}: {x[at]:g}", 7))
        if series:
            ends = [rate for marks in series for rate in marks.x]
            wide = min(ends) > 0 and max(ends) >= 20 * min(ends)
            panels.append(
                Panel(Scale(offered[0], log=wide), Scale(f"{title}, median", "s", log=True), series, title, 360)
            )
    reading = (
        "Left of its knee a deployment keeps up and latency hardly depends on the rate; right of it queues grow. A "
        "curve without a knee keeps up at every rate here, or at none."
    )
    return Figure("knee", "Latency against rate", reading, panels)


def _whose(points: Sequence[Ranked]) -> str:
    return points[0].point if len(points) == 1 else "median of the seeds"


def knee(x: Sequence[float], y: Sequence[float]) -> int | None:
    """Return the index of the last point before the latency *y* rises with the rate *x*; None if it does not rise.

    That is the point furthest below the chord of the curve, both axes scaled to 1 (Satopaa et al., Kneedle, 2011),
    if the latency at least doubles from there to the end.

    >>> knee([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.2, 9.0]), knee([1.0, 2.0, 3.0], [1.0, 1.1, 1.2])
    (2, None)
    """
    rates, times = (np.asarray(values, dtype=np.float64) for values in (x, y))
    if rates[-1] <= rates[0] or times[-1] < 2 * times[0]:
        return None
    below = (rates - rates[0]) / (rates[-1] - rates[0]) - (times - times[0]) / (times[-1] - times[0])
    at = int(np.argmax(below))
    return at if below[at] > 0 and times[-1] >= 2 * times[at] else None


def _telling(able: Sequence[Ranked]) -> str:
    # Empty if there is none: more colours than eight cannot be told apart.
    for key in able[0].choice:
        if key != "seed" and 2 <= len({str(each.choice[key]) for each in able}) <= 8:
            return key
    return ""


def _hover(each: Ranked) -> str:
    latencies = [f"{name.replace('_', ' ')} {format_time(v)}" for name, v in each.latencies.items() if v is not None]
    parts = [f"{key}={value}" for key, value in each.choice.items()]
    return "\n".join(
        [*parts, f"{each.value:.3g} good/s/GPU, {100 * each.attainment:.3g} % in SLO", *latencies, each.point]
    )


def _keys(ranked: Sequence[Ranked]) -> Figure:
    panels = [
        _key_panel(key, [(each.choice[key], each.value, _hover(each)) for each in ranked], "good requests/s/GPU")
        for key in [key for key in ranked[0].choice if key != "seed"][:_AXES]
    ]
    reading = "Points at one value differ in the other keys; the line joins the best of each value."
    return Figure("keys", "What each swept key does", reading, panels, columns=3)


def _key_panel(key: str, points: Sequence[tuple[Any, float, str]], unit: str) -> Panel:
    # Positive numbers that span a factor of twenty or more have a logarithmic axis.
    values = dict.fromkeys(value for value, _, _ in points)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    order = sorted(values) if numbers else list(values)
    wide = numbers and min(order) > 0 and max(order) >= 20 * min(order)
    place: Mapping[Any, float] = {value: value if numbers else number for number, value in enumerate(order)}
    top = {value: max(height for other, height, _ in points if other == value) for value in order}
    x, y = [place[value] for value, _, _ in points], [height for _, height, _ in points]
    series = [
        Marks("points", x, y, "", 0, texts=[text for *_, text in points]),
        Marks("line", [place[value] for value in order], [top[value] for value in order], "best", 1),
    ]
    scale = Scale(key, log=wide) if numbers else Scale(key, labels=[str(value) for value in order])
    return Panel(scale, Scale(unit, low=0), series, key)


def _metrics(points: Sequence[Mapping[str, Any]], schema: Any) -> Figure:
    done = [row for row in points if row["status"] in ("ok", "partial") and row["evidence"] not in (None, "none")]
    names = [field.name for field in schema if field.metadata[b"part"] == b"metric"]
    varied = [name for name in names if len({row[name] for row in done if row[name] is not None}) > 1][:2]
    panels = []
    keys = [key for key in collect.swept(done, schema) if key != "seed"]
    for key in keys[: _AXES // 2]:
        for name in varied:
            heights = [
                (row[key], row[name], f"{name} {row[name]:.4g}\n{row['point']}")
                for row in done
                if row[name] is not None
            ]
            panels.append(_key_panel(key, heights, name))
    reading = "Points at one value differ in the other keys; the line joins the largest of each value."
    return Figure("keys", "What each swept key does", reading, panels)
