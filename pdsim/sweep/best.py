# SPDX-License-Identifier: Apache-2.0
"""The points of a sweep, ranked: by goodput for each GPU under an objective (SLO), from the requests that each kept.

All requests count, the warm-up included, and failed ones as not served; so a ranking can differ a little from the
metrics of the runs, which leave a warm-up out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdsim.core.errors import ConfigError
from pdsim.core.units import format_time
from pdsim.results import schema
from pdsim.results.kept import LATENCIES, SloLimits, met
from pdsim.results.record import Table, pareto, percentile
from pdsim.results.terminal import GOAL, share
from pdsim.sweep import collect

RATES = ("workload.rate", "workload.speed", "workload.load")
"""Keys that say how much is offered."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A point and what its requests say under the objective, from the first arrival to the last completion."""

    point: str
    choice: Mapping[str, Any]  # keys that vary over the sweep, with this point's values
    gpus: int
    goodput: float  # requests a second that met the objective, of all GPUs together
    attainment: float  # share of all requests that met it
    latencies: Mapping[str, float | None]  # ttft_p99, ttft_p50 and so on, in seconds; None with too few requests
    speed: float | None  # tokens a second that the median user sees: 1 / TPOT
    throughput: float  # output tokens a second and GPU
    evidence: str

    @property
    def value(self) -> float:
        """Goodput of one GPU, 1/s."""
        return self.goodput / self.gpus


def rank(folder: Path, slo: SloLimits | None = None) -> list[Ranked]:
    """Return the points of the sweep in *folder* that served requests, the best first.

    *slo* is by default that of each point's own configuration.  Raise a `ConfigError` if no point served requests.
    """
    points = collect.points(folder)
    served = [
        row
        for row in points.to_pylist()
        if row["gpus"] and row["status"] in ("ok", "partial") and row.get("goodput") is not None
    ]
    swept = collect.swept(served, points.schema)
    served = [row for row in served if row["evidence"] not in (None, "none")]
    ranked = [each for row in served if (each := _ranked(folder, row, swept, slo)) is not None]
    if not ranked:
        raise ConfigError(
            f"{folder}: no point served requests on GPUs, so none can be ranked; see pdsim show {folder}"
        )
    return sorted(ranked, key=lambda each: (-each.value, -each.attainment, each.point))


def _ranked(folder: Path, row: Mapping[str, Any], swept: Sequence[str], slo: SloLimits | None) -> Ranked | None:
    own = folder / row["folder"]
    table = schema.read_table(own / "requests.parquet", ["status", "output", *LATENCIES])
    requests = table.to_pylist()
    if not requests:
        return None
    config = {} if slo else schema.read_configuration(own / "config.yaml")
    limits = slo or SloLimits({name: float(config[f"slo.{name}"]) for name in ("ttft", "tpot")})
    good, _, seconds = met(own, limits)
    values = {name: [r[name] for r in requests if r[name] is not None] for name in LATENCIES}
    median = percentile(values["tpot"], 50.0)
    tokens = sum(request["output"] for request in requests if request["status"] == "ok")
    return Ranked(
        point=row["point"],
        choice={key: row[key] for key in swept},
        gpus=row["gpus"],
        goodput=good / seconds if seconds else 0.0,
        attainment=good / len(requests),
        latencies={f"{name}_p{q}": percentile(values[name], float(q)) for q in (99, 50) for name in LATENCIES},
        speed=1.0 / median if median else None,
        throughput=tokens / seconds / row["gpus"] if seconds else 0.0,
        evidence=row["evidence"],
    )


def front(points: Iterable[Ranked]) -> list[Ranked]:
    """Return those of *points* that no other beats in both speed and throughput: the Pareto front, fastest first."""
    able = [each for each in points if each.speed is not None]
    return pareto(able, lambda each: (-(each.speed or 0.0), -each.throughput))


def within_rates(ranked: Sequence[Ranked]) -> list[str]:
    """Return the place of each of *ranked* among those that are offered the same; nothing if all or none are."""
    offered = [tuple(str(each.choice.get(key)) for key in RATES) for each in ranked]
    if not 1 < len(set(offered)) < len(ranked):
        return []
    return [f"{offered[:at].count(own) + 1} of {offered.count(own)}" for at, own in enumerate(offered)]


def table(ranked: Sequence[Ranked], title: str, count: int = 10) -> Table:
    """Return the first *count* of *ranked* for people: p99s, or medians if no point has requests enough for those.

    *ranked* must not be empty.  Columns of what was swept come from the first point.
    """
    q = "p99" if any(each.latencies["ttft_p99"] is not None for each in ranked) else "p50"
    places = within_rates(ranked)
    columns = {
        "rank": "",
        **({"rank at its rate": "among the points that are offered the same"} if places else {}),
        "good/s/GPU": "requests that met the objective, a second and GPU",
        "SLO": "share of requests that met it",
        **dict(zip(collect.short(ranked[0].choice), ranked[0].choice, strict=True)),
        "GPUs": "of prefill and decode",
        "point": "its folder",
        f"TTFT {q}": "p99 needs 100 requests, or medians are shown",
        f"TPOT {q}": "",
        f"e2e {q}": "",
        "evidence": "weakest kind of source",
    }
    rows = [
        [
            number,
            *places[number - 1 : number],
            f"{each.value:.3g}",
            share(each.attainment),
            *("-" if value is None else str(value) for value in each.choice.values()),
            each.gpus,
            each.point,
            *("-" if (v := each.latencies[f"{name}_{q}"]) is None else format_time(v) for name in LATENCIES),
            each.evidence,
        ]
        for number, each in enumerate(ranked[:count], 1)
    ]
    return Table(title, columns, rows)


def verdict(ranked: Sequence[Ranked]) -> list[str]:
    """Return a line if none or all of *ranked* keep up; the order of all is that of the offered rates."""
    goal = f"{100 * GOAL:.0f} % of requests"
    met = sum(each.attainment >= GOAL for each in ranked)
    if not met:
        return [f"no point meets its SLO for {goal}: sweep lower rates or more GPUs, or loosen --slo"]
    if met < len(ranked):
        return []
    return [
        f"every point meets its SLO for {goal}, so the order is mostly that of the offered "
        "rates: compare points at one rate, sweep higher ones, or find the limit of each with pdsim run "
        "experiment=capacity"
    ]


def chart(ranked: Sequence[Ranked], width: int = 60, height: int = 12) -> list[str]:
    """Return the points as characters, speed to the right, throughput upwards; those of the `front` are ``#``.

    One string for a line, at most *width* + 11 characters; nothing for fewer than two points that have a speed.
    """
    able = [each for each in ranked if each.speed is not None]
    if len(able) < 2:
        return []
    fastest, most = max(each.speed or 0.0 for each in able), max(each.throughput for each in able) or 1.0
    best = {each.point for each in front(able)}
    grid = [[" "] * width for _ in range(height)]
    for each in sorted(able, key=lambda each: each.point in best):  # the front is drawn over the others
        column = round((width - 1) * (each.speed or 0.0) / fastest)
        line = round((height - 1) * (1 - each.throughput / most))
        grid[line][column] = "#" if each.point in best else "."
    left = [f"{most:.3g}", *[""] * (height - 2), "0"]
    lines = [f"{label:>8} |{''.join(row).rstrip()}" for label, row in zip(left, grid, strict=True)]
    axis = f"{'':>8} +{'-' * width}"
    foot = f"{'':>10}0{f'{fastest:.3g}':>{width - 1}}"
    title = "output tokens/s/GPU over tokens/s of a user (1 / median TPOT); # is the Pareto front"
    return [title, *lines, axis, foot]
