# SPDX-License-Identifier: Apache-2.0
"""Figures of a run, from the rows that it kept: of its requests, of what moved, and of a reproduced report.

Many rows are thinned to what can be told apart, evenly, so that the shape of a curve and its ends stay.  Ranks and
links that are alike but for their numbers are one curve, their mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pdsim.core.units import format_rate, format_size, format_time
from pdsim.results.drawing import Figure, Marks, Panel, Scale, cumulative, thinned
from pdsim.results.record import percentile
from pdsim.results.terminal import alike, group

if TYPE_CHECKING:
    import pyarrow as pa

    from pdsim.results.kept import KeptRun

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
_STAGES = {"prep_us": "preparing", "post_us": "posting", "wire": "on the wire", "poll_us": "polling"}
_SAMPLED = {
    "link": ("Links, share of their capacity", "of capacity"),
    "pool": ("Memory pools, share of their size", "of size"),
    "pages": ("KV pages, share in use", "of pages"),
    "ring": ("Staging rings, share in use", "of the ring"),
}
_BARS = 60  # requests of the figure of phases
_CURVES = 6  # of one panel
_WORKLOAD = Scale("time since the start of the workload", "s")


def figures(run: KeptRun) -> list[Figure]:
    """Return every figure for which *run* has data; none without evidence."""
    if run.evidence == "none":
        return []
    made = [*_of_claims(run), *_of_capacity(run), *_of_requests(run), *_of_transfers(run), _samples(run), _use(run)]
    return [figure for figure in made if figure.panels]


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


def _columns(table: pa.Table) -> dict[str, Floats]:
    # columns of numbers, NaN where there is none
    import pyarrow.types as kinds

    return {
        field.name: np.array([np.nan if v is None else v for v in table[field.name].to_pylist()], dtype=np.float64)
        for field in table.schema
        if kinds.is_floating(field.type) or kinds.is_integer(field.type)
    }


def _known(values: Floats) -> Floats:
    return values[np.isfinite(values)]


# --- requests ------------------------------------------------------------------------------------------------------


def _of_requests(run: KeptRun) -> Iterator[Figure]:
    if not run.requests.num_rows:
        return
    columns = _columns(run.requests)
    if not len(_known(columns["e2e"])):
        return
    reading = (
        "A curve further left is faster; where it crosses 50 % is the median, and the share above the crossing with "
        "the line of the SLO missed it."
    )
    if "itl_p50" not in columns and len(_known(columns["tpot"])):
        reading += (
            " Inter-token latency (ITL) is of live runs: here the first and the last token of a request are kept."
        )
    yield Figure("latency", "Latency", reading, list(_latency(run, columns)))
    reading = (
        "Each bar is one request, its colours the time in each phase (added up, not in order of time); on the "
        "right, a phase whose curve lies further right takes longer."
    )
    yield Figure("phases", "Where the time of a request goes", reading, _phases(columns), columns=3)
    reading = (
        "Points that climb from left to right mean a queue that grows; the distance between the two curves is the "
        "number of requests under way."
    )
    yield Figure("time", "Over the time of the run", reading, _over_time(run, columns))
    reading = (
        "A curve is the mean number of requests in a state; one that keeps rising is a queue that cannot drain."
    )
    yield Figure("queues", "Queues and batches over time", reading, _occupancy(columns))


def _limit(run: KeptRun, name: str) -> float:
    limit = run.config.get(f"slo.{name}")
    return limit if isinstance(limit, float | int) and limit > 0 else 0.0


def _latency(run: KeptRun, columns: Columns) -> Iterator[Panel]:
    # The scale is logarithmic where the slowest request or the limit is more than three times the fastest request.
    for name, (title, what) in _LATENCIES.items():
        values = _known(columns.get(name, np.empty(0)))
        if not len(values):
            continue
        marked = {q: value for q in (50.0, 90.0, 99.0) if (value := percentile(values, q)) is not None}
        texts = [f"p{q:g}: {format_time(value)}" for q, value in marked.items()]
        series = [
            cumulative(values, title, 0),
            Marks("points", list(marked.values()), list(marked), "p50, p90, p99", colour=1, texts=texts),
        ]
        if limit := _limit(run, name):
            series.append(Marks("line", [limit, limit], [0.0, 100.0], f"SLO: {format_time(limit)}", colour=7))
        wide = bool(values.min() > 0 and max(float(values.max()), limit) > 3 * values.min())
        yield Panel(Scale(what, "s", log=wide), Scale("requests not slower", "%", low=0, high=101), series, title)


def _phases(columns: Columns) -> list[Panel]:
    # The phases of a request add up to its end-to-end time.
    parts = {name: columns[name] for name in _PHASES if name in columns and len(_known(columns[name]))}
    if "started_at" in columns and "compute" in parts:
        prefill = columns["prefilled_at"] - columns["started_at"]
        parts |= {"prefill": prefill, "decode": parts.pop("compute") - prefill}
    elif "prefilled" in columns and "handoff" in parts:  # of a live run
        parts.pop("queueing", None)
        parts |= {"prefill": columns["prefilled"], "decode": columns["e2e"] - columns["ttft"]}
    parts = {name: parts[name] for name in _PHASES if name in parts}
    if not parts:
        return []
    first = [name for name in parts if name != "decode"]
    panels = [_bars(columns, parts, first, "ttft", "Until the first token")] if len(first) < len(parts) else []
    positive = {name: values[values > 1e-9] for name, values in parts.items()}
    curves = [cumulative(v, name, colour) for colour, (name, v) in enumerate(positive.items()) if len(v)]
    time, share = Scale("time in the phase", "s", log=True), Scale("requests not longer", "%", low=0, high=101)
    return [
        *panels,
        _bars(columns, parts, list(parts), "e2e", "Until the last token"),
        Panel(time, share, curves, "Each phase", 400),
    ]


def _bars(columns: Columns, parts: Columns, names: Sequence[str], by: str, title: str) -> Panel:
    done = np.flatnonzero(np.isfinite(columns[by]))
    chosen = done[np.argsort(columns[by][done], kind="stable")][thinned(len(done), _BARS)]
    numbers = columns["id"][chosen].astype(int).tolist()
    places = list(map(float, range(len(chosen))))
    bars = []
    for colour, name in enumerate(parts):
        if name in names:
            seconds = np.nan_to_num(parts[name][chosen]).tolist()
            texts = [f"request {i}: {name} {format_time(s)}" for i, s in zip(numbers, seconds, strict=True)]
            bars.append(Marks("bars", seconds, places, name, colour, texts=texts))
    shown = Scale(f"{len(chosen)} requests, fastest to slowest", low=-0.6, high=len(chosen) - 0.4)
    return Panel(Scale("time, added up", "s"), shown, bars, title, 400)


def _over_time(run: KeptRun, columns: Columns) -> list[Panel]:
    # Those that failed are marked at their arrival.
    arrival, ttft, e2e = (columns[name] for name in ("arrival", "ttft", "e2e"))
    done = np.flatnonzero(np.isfinite(ttft))
    if not len(done):
        return []
    chosen = done[thinned(len(done), 1200)]
    texts = [f"request {int(columns['id'][i])}: TTFT {format_time(float(ttft[i]))}" for i in chosen]
    first = [Marks("points", arrival[chosen].tolist(), ttft[chosen].tolist(), "", 0, texts=texts)]
    if limit := _limit(run, "ttft"):
        ends = [float(arrival.min()), float(arrival.max())]
        first.append(Marks("line", ends, [limit, limit], f"SLO: {format_time(limit)}", 7))
    failed = arrival[~np.isfinite(e2e)]
    if len(failed):
        low = float(np.nanmin(ttft[done]))
        first.append(Marks("points", failed.tolist(), [low] * len(failed), "not completed", 1))
    counts = []
    for colour, (name, instants) in enumerate((("arrived", arrival), ("completed", _known(arrival + e2e)))):
        steps = thinned(len(instants))
        heights = [float(step + 1) for step in steps]
        counts.append(Marks("steps", np.sort(instants)[steps].tolist(), heights, name, colour))
    return [
        Panel(_WORKLOAD, Scale("TTFT", "s", log=True), first, "First token of each request, by its arrival"),
        Panel(_WORKLOAD, Scale("requests"), counts, "Arrivals and completions"),
    ]


def _occupancy(columns: Columns) -> list[Panel]:
    # A request counts in a state if both ends of it are known. Live servers report none of them.
    if "reserved_at" not in columns:
        return []
    finished = columns["arrival"] + columns["e2e"]
    pull = np.isfinite(columns["asked_at"])
    states = {
        "waiting for decode pages": (
            np.where(pull, columns["asked_at"], columns["arrival"]),
            columns["reserved_at"],
        ),
        "waiting for prefill": (columns["noticed_at"], columns["started_at"]),
        "in prefill": (columns["started_at"], columns["prefilled_at"]),
        "KV under way": (np.where(pull, columns["reserved_at"], columns["prefilled_at"]), columns["arrived_at"]),
        "waiting for the batch": (columns["arrived_at"], columns["joined_at"]),
        "in the decode batch": (columns["joined_at"], finished),
    }
    series = []
    for colour, (name, (begins, ends)) in enumerate(states.items()):
        known = np.isfinite(begins) & np.isfinite(ends)
        x, y = mean_level(begins[known], ends[known], float(np.nanmax(finished)))
        series.append(Marks("steps", x, y, name, colour, solid=True))
    count = Scale("requests", low=0)
    return [Panel(_WORKLOAD, count, series[:4], "Before decode"), Panel(_WORKLOAD, count, series[4:], "At decode")]


# --- what moved ----------------------------------------------------------------------------------------------------


def _of_transfers(run: KeptRun) -> Iterator[Figure]:
    table = run.transfers
    if not table.num_rows:
        return
    columns = _columns(table)
    texts = {name: table[name].to_pylist() for name in ("engine", "operation", "status", "source", "target")}
    reading = (
        "Left, a flat run of points is a fixed cost and a rising one a limit by bytes or descriptors; the stage "
        "whose curve lies furthest right is where a transfer spends its time."
    )
    yield Figure("transfers", "Transfers", reading, _transfers(columns, texts), columns=3)
    reading = (
        "Each curve is a mean over a two-hundredth of the run, so a short burst is lower than its peak rate; ranks "
        "that are alike are one curve."
    )
    yield Figure("ranks", "Ranks over time", reading, _busy(columns, texts, run.start))


def _transfers(columns: Columns, texts: Mapping[str, Sequence[str]]) -> list[Panel]:
    # Of those that succeeded. Stages below a nanosecond are left out, for their scale is logarithmic.
    ok = np.array([status == "ok" for status in texts["status"]])
    if not ok.any():
        return []
    kinds = np.array([f"{engine}, {what}" for engine, what in zip(texts["engine"], texts["operation"], strict=True)])
    size, latency, rate = columns["nbytes"], columns["latency_us"] * 1e-6, columns["bw_gbs"] * 1e9
    slow: list[Marks] = []
    fast: list[Marks] = []
    for colour, kind in enumerate(dict.fromkeys(kinds[ok].tolist())):
        able = np.flatnonzero(ok & (kinds == kind) & (size > 0) & (latency > 0))
        mine = able[thinned(len(able), 1500)]
        if not len(mine):
            continue
        said = [
            f"{format_size(size[i])} in {int(columns['batch_size'][i])} descriptors: {format_time(latency[i])}, "
            f"{format_rate(rate[i])}"
            for i in mine
        ]
        for series, values in ((slow, latency), (fast, rate)):
            series.append(Marks("points", size[mine].tolist(), values[mine].tolist(), kind, colour, texts=said))
    stages = dict(columns) | {"wire": columns["tx_us"] - columns["poll_us"]}
    curves = []
    for colour, (key, name) in enumerate(_STAGES.items()):
        values = stages[key][ok & (stages[key] > 1e-3)] * 1e-6
        if len(values):
            curves.append(cumulative(values, name, colour))
    wide, time = Scale("bytes of a transfer", "B", log=True), Scale("time in the stage", "s", log=True)
    panels = [
        Panel(wide, Scale("latency", "s", log=True), slow, "Latency by size"),
        Panel(wide, Scale("bytes / latency", "B/s", log=True), fast, "Rate by size"),
        Panel(time, Scale("transfers not longer", "%", low=0, high=101), curves, "Stages of a transfer"),
    ]
    return panels if curves else panels[:2]


def _busy(columns: Columns, texts: Mapping[str, Sequence[str]], start: float) -> list[Panel]:
    # The bytes of each transfer are spread evenly from its submission to its end.
    begins, ends, nbytes = columns["submitted"], columns["completed"], columns["nbytes"]
    known = np.isfinite(begins) & np.isfinite(ends) & (ends > begins)
    until = float(np.max(ends[known])) - start if known.any() else 0.0
    if until <= 0:
        return []
    moved: list[Marks] = []
    flying: list[Marks] = []
    for side, word in (("source", "out of"), ("target", "into")):
        kinds = np.array([group(rank) for rank in texts[side]])
        for kind in list(dict.fromkeys(kinds.tolist()))[: _CURVES // 2]:
            mine = known & (kinds == kind)
            if not mine.any():
                continue
            several = len({rank for rank in texts[side] if group(rank) == kind})
            spread = nbytes[mine] / (ends[mine] - begins[mine]) / several
            colour, name = len(moved), f"{word} {kind}"
            spans = begins[mine] - start, ends[mine] - start
            label = name + (f", mean of {several}" if several > 1 else "")
            moved.append(Marks("steps", *mean_level(*spans, until, spread), label, colour, solid=True))
            if side == "source":
                flying.append(Marks("steps", *mean_level(*spans, until), name, colour, solid=True))
    time = Scale("time since the start", "s")
    return [
        Panel(time, Scale("mean rate of a rank", "B/s", low=0), moved, "Bytes moved"),
        Panel(time, Scale("mean number", low=0), flying, "Transfers under way"),
    ]


def _samples(run: KeptRun) -> Figure:
    # One panel a kind, with the groups that were used most.
    rows: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for row in () if run.samples is None else run.samples.to_pylist():
        names = rows.setdefault(row["kind"], {}).setdefault(group(row["name"]), {})
        names.setdefault(row["name"], []).append((row["time"], row["value"]))
    panels = []
    for kind, (head, of) in _SAMPLED.items():
        groups = rows.get(kind, {})
        most = sorted(groups, key=lambda name: -max(v for each in groups[name].values() for _, v in each))
        series = []
        for colour, name in enumerate(most[:_CURVES]):
            members = groups[name]
            shortest = min(map(len, members.values()))
            each = np.array([values[:shortest] for values in members.values()])  # [member, sample, time and value]
            label = f"{name}, mean of {len(members)}" if len(members) > 1 else next(iter(members))
            x, y = each[0, :, 0].tolist(), (100 * each[:, :, 1].mean(axis=0)).tolist()
            series.append(Marks("steps", x, y, label, colour, solid=True))
        if series:
            panels.append(Panel(Scale("time of the run", "s"), Scale(of, "%", low=0), series, head))
    reading = "A link or a memory that stays near 100 % is what others wait for; those that are alike are one curve."
    return Figure("utilisation", "Links and memory over time", reading, panels)


def _use(run: KeptRun) -> Figure:
    # The ten highest of each, alike ones in one bar.
    panels: list[Panel] = []
    for key, head, of in (
        ("links", "Links: bytes carried / (capacity x time)", "mean use"),
        ("pools", "Memory: highest use / size", "highest use"),
    ):
        rows = alike(run.about[key])[:10]
        if not rows:
            continue
        names = [f"{name} ({count})" if count > 1 else name for name, count, _, _ in rows]
        shares = [100 * most for *_, most in rows]
        texts = [f"{name}: {share:.3g} %" for name, share in zip(names, shares, strict=True)]
        bars = Marks("bars", shares, list(range(len(rows))), "", len(panels), texts=texts)
        panels.append(Panel(Scale(of, "%", low=0), Scale("", labels=names), [bars], head, 90 + 28 * len(rows)))
    reading = (
        "The longest bar is the first to become a limit; in brackets, of how many alike ones it is the busiest."
    )
    return Figure("use", "Links and memory, whole run", reading, panels)


# --- a capacity search ---------------------------------------------------------------------------------------------


def _of_capacity(run: KeptRun) -> Iterator[Figure]:
    # from the tables of `experiments.capacity`
    tables = {table["title"]: table for table in run.about["tables"]}
    if run.about["experiment"] != "capacity" or not tables["Pareto front"]["rows"]:
        return
    points = [
        dict(zip(tables["Pareto front"]["columns"], row, strict=True)) for row in tables["Pareto front"]["rows"]
    ]
    names = list(dict.fromkeys(point["deployment"] for point in points))
    panels = []
    for name, column in (("ttft", "TTFT p90 s"), ("tpot", "TPOT p90 s")):
        series = []
        for colour, deployment in enumerate(names):
            mine = [point for point in points if point["deployment"] == deployment]
            texts = [
                f"{deployment} at load {point['load']:.2f}: {point['tokens/s/GPU']:.4g} tokens/s/GPU, "
                f"{column[:8]} {format_time(point[column])}"
                for point in mine
            ]
            x, y = ([float(point[key]) for point in mine] for key in (column, "tokens/s/GPU"))
            label = deployment if colour < _CURVES else ""
            series.append(Marks("points", x, y, label, colour, texts=texts))
        tokens = [point["tokens/s/GPU"] for point in points]
        if limit := _limit(run, name):
            series.append(Marks("line", [limit, limit], [0.0, max(tokens)], f"SLO: {format_time(limit)}", 7))
        panels.append(
            Panel(Scale(column[:8], "s", log=True), Scale("output tokens/s/GPU", low=0), series, column[:4], 380)
        )
    reading = (
        "Better is up and to the left. Each point is a load at which a deployment meets the SLO, and no other has "
        "more tokens, a shorter TTFT and a shorter TPOT at once."
    )
    yield Figure("pareto", "Pareto front", reading, panels)


# --- reproduced reports --------------------------------------------------------------------------------------------

_SIDES = {"model": "simulated", "real": "measured"}
_UNITS = {"us": (1e-6, "s"), "ms": (1e-3, "s"), "s": (1.0, "s")}


def _of_claims(run: KeptRun) -> list[Figure]:
    # from the tables that `experiments.reports.claims` makes
    tables = {table["title"]: table for table in run.about["tables"]}
    if not {"Claims", "Points"} <= set(tables):
        return []
    texts = {row[0]: row[1] for row in tables["Claims"]["rows"]}
    points = [dict(zip(tables["Points"]["columns"], row, strict=True)) for row in tables["Points"]["rows"]]
    return [claims(texts, points)]


def claims(texts: Mapping[str, str], points: Iterable[Mapping[str, Any]], chosen: Sequence[str] = ()) -> Figure:
    """Return the figure of a reproduced report: every claim in a row, simulated at the left, measured at the right.

    *points* are mappings with claim, machine, target, at, before, after and unit; *texts* say each claim.
    """
    rows = list(points)
    panels: list[Panel] = []
    for claim in chosen or dict.fromkeys(row["claim"] for row in rows):
        mine = [row for row in rows if row["claim"] == claim]
        factor, unit = _UNITS.get(mine[0]["unit"], (1.0, "")) if mine else (1.0, "")
        values = [row[side] * factor for row in mine for side in ("before", "after") if row[side]]
        if not values:
            continue
        # a point has the same place on both sides, those that were measured first
        mine.sort(key=lambda row: row["target"] != "real")
        places = list(dict.fromkeys(f"{row['machine']}: {row['at']}" for row in mine))
        log = min(values) > 0
        scale = Scale("time" if unit else mine[0]["unit"], unit, log, min(values) / 1.25, max(values) * 1.25)
        for target, word in _SIDES.items():
            own = {f"{row['machine']}: {row['at']}": row for row in mine if row["target"] == target}
            series = list(_before_and_after(places, own, factor))
            height = 96 + 15 * max(len(places), 3)
            panels.append(Panel(scale, Scale("", labels=places), series, f"{texts[claim]}: {word}", height))
    reading = (
        "Each line is one point, before (hollow) and after the change (full), simulated at the left and measured on "
        "real engines at the right, on the same scale; the longer the line, the larger the effect."
    )
    return Figure("claims", "Before and after the change", reading, panels, paired=True)


def _before_and_after(
    places: Sequence[str], rows: Mapping[str, Mapping[str, Any]], factor: float
) -> Iterator[Marks]:
    gap_x: list[float] = []
    gap_y: list[float] = []
    for place, name in enumerate(places):
        ends: list[Any] = [rows.get(name, {}).get(side) for side in ("before", "after")]
        if None not in ends:
            gap_x += [*(end * factor for end in ends), float("nan")]
            gap_y += [place, place, float("nan")]
    if gap_x:
        yield Marks("line", gap_x, gap_y, plain=True)
    for colour, side in enumerate(("before", "after")):
        here = [(place, rows[name]) for place, name in enumerate(places) if rows.get(name, {}).get(side) is not None]
        texts = [f"{places[place]}: {side} {row[side]:.4g} {row['unit']}" for place, row in here]
        x, y = [row[side] * factor for _, row in here], [float(place) for place, _ in here]
        yield Marks("points", x, y, side, 1 - colour, hollow=not colour, texts=texts)
