# SPDX-License-Identifier: Apache-2.0
"""Figures of what moved: transfers, how busy ranks and links were, memory.

They are drawn from the rows of transfers, and links and memory over time from samples, which only a
modelled run with ``samples=N`` has.  Ranks and links that are alike but for their numbers are one
curve, their mean: a machine of eight GPUs would have eight curves upon each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pdsim.core.units import format_rate, format_size, format_time
from pdsim.results.drawing import Figure, Marks, Panel, Scale, cumulative, thinned
from pdsim.results.report.request_figures import columns_of, mean_level
from pdsim.results.terminal import alike

if TYPE_CHECKING:
    from pdsim.results.kept import KeptRun

__all__ = ["figures", "group"]

Floats = npt.NDArray[np.float64]

_STAGES = {"prep_us": "preparing", "post_us": "posting", "wire": "on the wire", "poll_us": "polling"}
_MOST = 1500
_CURVES = 6
"""Curves of one panel: more cannot be told apart."""
_SAMPLED = {
    "link": ("Links, share of their capacity", "of capacity"),
    "pool": ("Memory pools, share of their size", "of size"),
    "pages": ("KV pages, share in use", "of pages"),
    "ring": ("Staging rings, share in use", "of the ring"),
}


def figures(run: KeptRun) -> list[Figure]:
    """Return the figures of the transfers, links and memories of *run*.

    Those that it kept nothing for are left out.
    """
    return [figure for figure in (_transfers(run), _busy(run), _samples(run), _use(run)) if figure.panels]


def group(name: str) -> str:
    """Return *name* with ``*`` for its numbers: the name of all that are alike.

    >>> group("node0.gpu3.hbm")
    'node*.gpu*.hbm'
    """
    return re.sub(r"\d+", "*", name)


def _transfers(run: KeptRun) -> Figure:
    # Only transfers that succeeded count.  Each engine and operation has its own points, thinned to
    # 1,500; stages below a nanosecond are left out, for their scale is logarithmic.  Stages are those
    # of nixlbench's columns: preparing, posting, on the wire and polling.
    import pyarrow.compute as pc

    title = "Transfers"
    table = run.transfers
    table = table.filter(pc.equal(table["status"], "ok")) if table.num_rows else table
    if not table.num_rows:
        return Figure("transfers", title, "")
    columns = columns_of(table)
    kinds = np.array([f"{engine}, {operation}" for engine, operation in _pairs(table, "engine", "operation")])
    size, latency, rate = columns["nbytes"], columns["latency_us"] * 1e-6, columns["bw_gbs"] * 1e9
    slow, fast = [], []
    for colour, kind in enumerate(dict.fromkeys(kinds.tolist())):
        able = (kinds == kind) & (size > 0) & (latency > 0)
        mine = np.flatnonzero(able)[thinned(int(able.sum()), _MOST)]
        if not len(mine):
            continue
        texts = [
            f"{format_size(size[i])} in {int(columns['batch_size'][i])} descriptors: {format_time(latency[i])}, "
            f"{format_rate(rate[i])}"
            for i in mine
        ]
        slow.append(Marks("points", size[mine].tolist(), latency[mine].tolist(), kind, colour, texts=texts))
        fast.append(Marks("points", size[mine].tolist(), rate[mine].tolist(), kind, colour, texts=texts))
    stages = {"prep_us": columns["prep_us"], "post_us": columns["post_us"], "poll_us": columns["poll_us"]}
    stages["wire"] = columns["tx_us"] - columns["poll_us"]
    curves = []
    for colour, (key, name) in enumerate(_STAGES.items()):
        values = stages[key][stages[key] > 1e-3] * 1e-6
        if len(values):
            curves.append(cumulative(values, name, colour))
    wide = Scale("bytes of a transfer", "B", log=True)
    panels = [
        Panel(wide, Scale("latency", "s", log=True), slow, "Latency by size"),
        Panel(wide, Scale("bytes / latency", "B/s", log=True), fast, "Rate by size"),
    ]
    if curves:
        panels.append(
            Panel(
                Scale("time in the stage", "s", log=True),
                Scale("transfers not longer", "%", low=0, high=101),
                curves,
                "Stages of a transfer",
            )
        )
    reading = (
        "Left, a flat run of points is a fixed cost and a rising one a limit by bytes or descriptors; the stage "
        "whose curve lies furthest right is where a transfer spends its time."
    )
    return Figure("transfers", title, reading, panels, columns=3)


def _pairs(table: Any, *names: str) -> zip[Any]:
    return zip(*(table[name].to_pylist() for name in names), strict=True)


def _busy(run: KeptRun) -> Figure:
    # From the rows of transfers: the bytes of each are spread evenly from its submission to its end,
    # and curves are means over a two-hundredth of the run.  Three kinds of ranks each way are shown,
    # in the order in which they occur.
    title = "Ranks over time"
    table = run.transfers
    if not table.num_rows:
        return Figure("ranks", title, "")
    columns = columns_of(table)
    begins, ends, nbytes = columns["submitted"], columns["completed"], columns["nbytes"]
    start = run.start
    known = np.isfinite(begins) & np.isfinite(ends) & (ends > begins)
    until = float(np.max(ends[known])) - start if known.any() else 0.0
    if until <= 0:
        return Figure("ranks", title, "")
    moved: list[Marks] = []
    flying: list[Marks] = []
    sides = {name: np.array([group(rank) for rank in table[name].to_pylist()]) for name in ("source", "target")}
    counts = {
        name: {kind: len({r for r in table[name].to_pylist() if group(r) == kind}) for kind in set(sides[name])}
        for name in sides
    }
    for side, word in (("source", "out of"), ("target", "into")):
        for kind in list(dict.fromkeys(sides[side].tolist()))[: _CURVES // 2]:
            mine = known & (sides[side] == kind)
            if not mine.any():
                continue
            several = counts[side][kind]
            spread = nbytes[mine] / (ends[mine] - begins[mine]) / several
            x, y = mean_level(begins[mine] - start, ends[mine] - start, until, spread)
            colour = len(moved)
            name = f"{word} {kind}" + (f", mean of {several}" if several > 1 else "")
            moved.append(Marks("steps", x, y, name, colour, solid=True))
            x, y = mean_level(begins[mine] - start, ends[mine] - start, until)
            if side == "source":
                flying.append(Marks("steps", x, y, f"{word} {kind}", colour, solid=True))
    time = Scale("time since the start", "s")
    panels = [
        Panel(time, Scale("mean rate of a rank", "B/s", low=0), moved, "Bytes moved"),
        Panel(time, Scale("mean number", low=0), flying, "Transfers under way"),
    ]
    reading = (
        "Each curve is a mean over a two-hundredth of the run, so a short burst is lower than its peak rate; ranks "
        "that are alike are one curve."
    )
    return Figure("ranks", title, reading, panels)


def _samples(run: KeptRun) -> Figure:
    # One panel a kind, with the six groups that were used most.
    title = "Links and memory over time"
    table = run.samples
    if table is None or not table.num_rows:
        return Figure("utilisation", title, "")
    rows: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for kind, name, time, value in _pairs(table, "kind", "name", "time", "value"):
        rows.setdefault(kind, {}).setdefault(group(name), {}).setdefault(name, []).append((time, value))
    panels = []
    for kind, (head, of) in _SAMPLED.items():
        alike_names = rows.get(kind, {})
        most = sorted(alike_names, key=lambda g: -max(v for each in alike_names[g].values() for _, v in each))[
            :_CURVES
        ]
        series = []
        for colour, name in enumerate(most):
            each = [np.array(values) for values in alike_names[name].values()]
            shortest = min(map(len, each))
            times, mean = each[0][:shortest, 0], np.mean([values[:shortest, 1] for values in each], axis=0)
            label = f"{name}, mean of {len(each)}" if len(each) > 1 else next(iter(alike_names[name]))
            series.append(Marks("steps", times.tolist(), (100 * mean).tolist(), label, colour, solid=True))
        if series:
            panels.append(Panel(Scale("time of the run", "s"), Scale(of, "%", low=0), series, head))
    reading = "A link or a memory that stays near 100 % is what others wait for; those that are alike are one curve."
    return Figure("utilisation", title, reading, panels)


def _use(run: KeptRun) -> Figure:
    # The ten highest of each, alike ones in one bar.
    panels: list[Panel] = []
    for key, head, of in (
        ("links", "Links: bytes carried / (capacity x time)", "mean use"),
        ("pools", "Memory: highest use / size", "highest use"),
    ):
        used: Mapping[str, float] = run.about.get(key) or {}
        rows = alike(used)[:10]
        if not rows:
            continue
        names = [f"{name} ({count})" if count > 1 else name for name, count, _, _ in rows]
        bars = Marks(
            "bars",
            [100 * most for *_, most in rows],
            list(range(len(rows))),
            "",
            len(panels),
            texts=[f"{name}: {100 * most:.3g} %" for name, (*_, most) in zip(names, rows, strict=True)],
        )
        panels.append(Panel(Scale(of, "%", low=0), Scale("", labels=names), [bars], head, 90 + 28 * len(rows)))
    reading = (
        "The longest bar is the first to become a limit; in brackets, of how many alike ones it is the busiest."
    )
    return Figure("use", "Links and memory, whole run", reading, panels)
