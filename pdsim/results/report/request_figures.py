# SPDX-License-Identifier: Apache-2.0
"""Figures of the requests of a run: latencies, phases, and how many were where over time.

Drawn from ``requests.parquet`` alone, with NumPy: a run of a million requests is thinned to what
can be told apart, always evenly, so that the shape of a curve and its ends stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdsim.core.units import format_time
from pdsim.results.drawing import Figure, Marks, Panel, Scale, cumulative, thinned
from pdsim.results.record import percentile

if TYPE_CHECKING:
    import pyarrow as pa

    from pdsim.results.kept import KeptRun

__all__ = ["Columns", "columns_of", "figures", "mean_level"]

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Floats]

_LATENCIES = {
    "ttft": ("TTFT", "from arrival to the first token"),
    "tpot": ("TPOT", "time per output token after the first"),
    "itl_p50": ("ITL, median of each request", "from one streamed chunk to the next"),
    "itl_p99": ("ITL, 99th percentile of each request", "from one streamed chunk to the next"),
    "e2e": ("End to end", "from arrival to the last token"),
}
_PHASES = ("queueing", "handshake", "prefill", "compute", "transfer", "polling", "handoff", "decode")
_BARS = 60
"""Requests of the figure of phases: as many as can be told apart."""


def columns_of(table: pa.Table) -> dict[str, Floats]:
    """Return the columns of numbers of *table* as float64 arrays of its length, NaN where there is none."""
    import pyarrow.types as kinds

    return {
        field.name: np.array([np.nan if v is None else v for v in table[field.name].to_pylist()], dtype=np.float64)
        for field in table.schema
        if kinds.is_floating(field.type) or kinds.is_integer(field.type)
    }


def figures(run: KeptRun) -> list[Figure]:
    """Return the figures of the requests of *run*, none if it served none."""
    if not run.requests.num_rows:
        return []
    columns = columns_of(run.requests)
    if not np.isfinite(columns["e2e"]).any():
        return []
    made = [_latency(run, columns), _phases(columns), _over_time(run, columns), _occupancy(columns)]
    return [figure for figure in made if figure.panels]


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _latency(run: KeptRun, columns: Columns) -> Figure:
    # A percentile that too few requests determine is left out, and so is a latency that no request has. The scale is
    # logarithmic where the slowest request or the limit is more than three times the fastest request.
    panels = []
    for name, (title, what) in _LATENCIES.items():
        values = _finite(columns.get(name, np.empty(0)))
        if not len(values):
            continue
        series = [cumulative(values, title, 0)]
        at = [(q, percentile(values, q)) for q in (50.0, 90.0, 99.0)]
        known = [(q, value) for q, value in at if value is not None]
        texts = [f"p{q:g}: {format_time(value)}" for q, value in known]
        series.append(
            Marks("points", [v for _, v in known], [q for q, _ in known], "p50, p90, p99", colour=1, texts=texts)
        )
        limit = run.config.get(f"slo.{name}")
        highest = float(values.max())
        if isinstance(limit, float | int) and limit > 0:
            highest = max(highest, limit)
            text = f"SLO: {format_time(limit)}"
            series.append(Marks("line", [limit, limit], [0.0, 100.0], text, colour=7))
        wide = bool(values.min() > 0 and highest > 3 * values.min())
        panels.append(
            Panel(Scale(what, "s", log=wide), Scale("requests not slower", "%", low=0, high=101), series, title)
        )
    reading = (
        "A curve further left is faster; where it crosses 50 % is the median, and the share above the crossing with "
        "the line of the SLO missed it."
    )
    if "itl_p50" not in columns and len(_finite(columns.get("tpot", np.empty(0)))):
        reading += (
            " Inter-token latency (ITL) is of live runs: here the first and the last token of a request are kept."
        )
    return Figure("latency", "Latency", reading, panels)


def _parts(columns: Columns) -> dict[str, Floats]:
    # Phases that no request has are left out. Those that are there add up to the end-to-end time of a request.
    parts = {name: columns[name] for name in _PHASES if name in columns and np.isfinite(columns[name]).any()}
    if "started_at" in columns and "compute" in parts:
        prefill = columns["prefilled_at"] - columns["started_at"]
        rest = parts.pop("compute") - prefill
        parts |= {"prefill": prefill, "decode": rest}
    elif "prefilled" in columns and "handoff" in parts:  # of a live run
        parts.pop("queueing", None)
        parts |= {"prefill": columns["prefilled"], "decode": columns["e2e"] - columns["ttft"]}
    return {name: parts[name] for name in _PHASES if name in parts}


def _phases(columns: Columns) -> Figure:
    parts = _parts(columns)
    if not parts:
        return Figure("phases", "Phases", "")
    first = {name: values for name, values in parts.items() if name != "decode"}
    panels = [_bars(columns, first, "ttft", "Until the first token", list(parts))] if len(first) < len(parts) else []
    panels.append(_bars(columns, parts, "e2e", "Until the last token", list(parts)))
    curves = []
    for colour, (name, values) in enumerate(parts.items()):
        positive = values[values > 1e-9]
        if len(positive):
            curves.append(cumulative(positive, name, colour))
    time, share = Scale("time in the phase", "s", log=True), Scale("requests not longer", "%", low=0, high=101)
    panels.append(Panel(time, share, curves, "Each phase", 400))
    reading = (
        "Each bar is one request, its colours the time in each phase (added up, not in order of time); on the "
        "right, a phase whose curve lies further right takes longer."
    )
    return Figure("phases", "Where the time of a request goes", reading, panels, columns=3)


def _bars(columns: Columns, parts: Columns, by: str, title: str, order: Sequence[str]) -> Panel:
    done = np.flatnonzero(np.isfinite(columns[by]))
    chosen = done[np.argsort(columns[by][done], kind="stable")][thinned(len(done), _BARS)]
    places = list(map(float, range(len(chosen))))
    bars = []
    for name, values in parts.items():
        seconds = np.nan_to_num(values[chosen]).tolist()
        numbers = columns["id"][chosen].astype(int).tolist()
        texts = [f"request {i}: {name} {format_time(s)}" for i, s in zip(numbers, seconds, strict=True)]
        bars.append(Marks("bars", seconds, places, name, order.index(name), texts=texts))
    shown = Scale(f"{len(chosen)} requests, fastest to slowest", low=-0.6, high=len(chosen) - 0.4)
    return Panel(Scale("time, added up", "s"), shown, bars, title, 400)


def _over_time(run: KeptRun, columns: Columns) -> Figure:
    # Of many requests 1,200 are shown, evenly chosen by number. Those that failed are marked at their arrival.
    arrival, ttft, e2e = (columns[name] for name in ("arrival", "ttft", "e2e"))
    done = np.flatnonzero(np.isfinite(ttft))
    if not len(done):
        return Figure("time", "Over time", "")
    chosen = done[thinned(len(done), 1200)]
    texts = [f"request {int(columns['id'][i])}: TTFT {format_time(float(ttft[i]))}" for i in chosen]
    first = [Marks("points", arrival[chosen].tolist(), ttft[chosen].tolist(), "", 0, texts=texts)]
    limit = run.config.get("slo.ttft")
    if isinstance(limit, float | int) and limit > 0:
        ends = [float(arrival.min()), float(arrival.max())]
        first.append(Marks("line", ends, [limit, limit], f"SLO: {format_time(limit)}", 7))
    failed = np.flatnonzero(~np.isfinite(e2e))
    if len(failed):
        low = float(np.nanmin(ttft[done]))
        first.append(Marks("points", arrival[failed].tolist(), [low] * len(failed), "not completed", 1))
    ends_at = np.sort(_finite(arrival + e2e))
    start = np.sort(arrival)
    counts = [
        Marks("steps", *_counted(start), name="arrived", colour=0),
        Marks("steps", *_counted(ends_at), name="completed", colour=1),
    ]
    time = Scale("time since the start of the workload", "s")
    panels = [
        Panel(time, Scale("TTFT", "s", log=True), first, "First token of each request, by its arrival"),
        Panel(time, Scale("requests"), counts, "Arrivals and completions"),
    ]
    reading = (
        "Points that climb from left to right mean a queue that grows; the distance between the two curves is the "
        "number of requests under way."
    )
    return Figure("time", "Over the time of the run", reading, panels)


def _counted(instants: Floats) -> tuple[list[float], list[float]]:
    # The first list is the steps' places, the second their heights, from 1.
    chosen = thinned(len(instants))
    return instants[chosen].tolist(), [float(index + 1) for index in chosen]


def _occupancy(columns: Columns) -> Figure:
    # States follow each other: pages at decode, prefill, KV under way, a look of the decode scheduler, its batch. A
    # request counts in a state if both ends of it are known. Live servers report none of them.
    if "reserved_at" not in columns:
        return Figure("queues", "Queues", "")
    finished = columns["arrival"] + columns["e2e"]
    pull = np.isfinite(columns["asked_at"])
    waits = np.where(pull, columns["asked_at"], columns["arrival"])
    states = {
        "waiting for decode pages": (waits, columns["reserved_at"]),
        "waiting for prefill": (columns["noticed_at"], columns["started_at"]),
        "in prefill": (columns["started_at"], columns["prefilled_at"]),
        "KV under way": (np.where(pull, columns["reserved_at"], columns["prefilled_at"]), columns["arrived_at"]),
        "waiting for the batch": (columns["arrived_at"], columns["joined_at"]),
        "in the decode batch": (columns["joined_at"], finished),
    }
    end = float(np.nanmax(finished))
    series = {}
    for colour, (name, (begins, ends)) in enumerate(states.items()):
        known = np.isfinite(begins) & np.isfinite(ends)
        edges, level = mean_level(begins[known], ends[known], end)
        series[name] = Marks("steps", edges, level, name, colour, solid=True)
    time = Scale("time since the start of the workload", "s")
    first, second = list(series.values())[:4], list(series.values())[4:]
    panels = [
        Panel(time, Scale("requests", low=0), first, "Before decode"),
        Panel(time, Scale("requests", low=0), second, "At decode"),
    ]
    reading = (
        "A curve is the mean number of requests in a state; one that keeps rising is a queue that cannot drain."
    )
    return Figure("queues", "Queues and batches over time", reading, panels)


def mean_level(
    begins: Floats, ends: Floats, until: float, weights: Sequence[float] | Floats | None = None, bins: int = 200
) -> tuple[list[float], list[float]]:
    """Return the left edges of *bins* equal spans from 0 to *until*, and the mean of what is under way in each.

    >>> mean_level(np.array([0.0]), np.array([1.5]), until=4.0, bins=4)
    ([0.0, 1.0, 2.0, 3.0], [1.0, 0.5, 0.0, 0.0])
    """
    weight = np.ones(len(begins)) if weights is None else np.asarray(weights, dtype=np.float64)
    edges = np.linspace(0.0, until, bins + 1)
    # the integral until t of what has begun and not ended by then, piecewise linear, at every edge
    total = np.zeros(bins + 1)
    for instants, sign in ((begins, 1.0), (ends, -1.0)):
        order = np.argsort(instants, kind="stable")
        times, heights = np.asarray(instants)[order], weight[order]
        count = np.searchsorted(times, edges, side="right")
        summed = np.concatenate(([0.0], np.cumsum(heights)))
        moment = np.concatenate(([0.0], np.cumsum(heights * times)))
        total += sign * (summed[count] * edges - moment[count])
    level = np.diff(total) / np.diff(edges) if until > 0 else np.zeros(bins)
    return edges[:-1].tolist(), np.maximum(level, 0.0).tolist()
