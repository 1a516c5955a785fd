# SPDX-License-Identifier: Apache-2.0
"""From capacities to the answer, the list of deployments, the Pareto front and what was skipped.

A shape is simulated once, and the machine holds as many copies of it as fit; rates of copies are
added up.  GPUs that are left over do nothing, and count in all numbers for each GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.capacity.search import Capacity, Probe, Search, Shape
from pdsim.config import Config
from pdsim.core.units import format_time
from pdsim.results.record import Metric, Table

__all__ = ["front", "metrics", "ranked", "tables"]

Found = Mapping[Shape, Capacity]


def _rate(shape: Shape, probe: Probe, gpus: int) -> float:
    return probe.rate * (gpus // shape.gpus)


def _tokens(shape: Shape, probe: Probe, gpus: int) -> float:
    return probe.tokens * (gpus // shape.gpus) / gpus


def ranked(capacities: Found, gpus: int) -> list[tuple[Shape, Capacity, Probe]]:
    """Return the deployments that meet the SLO at some load, the one that serves most requests first.

    Requests a second are those of as many copies of the shape as the machine holds; equal ones are ordered by shape.
    """
    able = [(shape, one, one.best) for shape, one in capacities.items() if one.best is not None]
    return sorted(able, key=lambda entry: (-_rate(entry[0], entry[2], gpus), entry[0]))


def front(capacities: Found, gpus: int, attainment: float) -> list[tuple[Shape, Probe]]:
    """Return the probes that hold, of which no other is better in throughput, TTFT and TPOT at once.

    Better means more output tokens for each GPU, a shorter TTFT and a shorter TPOT, both at the 90th percentile.
    """
    points = [
        (shape, probe)
        for shape, one in capacities.items()
        for probe in one.probes
        if probe.holds(attainment) and probe.ttft is not None and probe.tpot is not None
    ]

    def values(point: tuple[Shape, Probe]) -> tuple[float, float, float]:
        shape, probe = point
        assert probe.ttft is not None
        assert probe.tpot is not None
        return -_tokens(shape, probe, gpus), probe.ttft, probe.tpot

    keyed = sorted(((values(point), point) for point in points), key=lambda entry: (entry[0], entry[1][0]))
    kept: list[tuple[tuple[float, float, float], tuple[Shape, Probe]]] = []
    for value, point in keyed:  # only one that comes before can be better: its throughput is no lower
        if not any(other[1] <= value[1] and other[2] <= value[2] for other, _ in kept):
            kept.append((value, point))
    return [point for _, point in kept]


def metrics(capacities: Found, refused: Mapping[Shape, str], gpus: int) -> list[Metric]:
    """Return the summary: how many deployments and simulations, and what the best deployment does.

    The last three are None if no deployment meets the SLO.
    """
    order = ranked(capacities, gpus)
    best = order[0] if order else None
    return [
        Metric("deployments", len(capacities), "deployments that fit the machine and were searched"),
        Metric("deployments_within_slo", len(order), "of them, those that meet the SLO at some load"),
        Metric("deployments_skipped", len(refused), "of the lists, those that do not fit"),
        Metric("probes", sum(len(one.probes) for one in capacities.values()), "simulations"),
        Metric(
            "capacity_rate",
            _rate(best[0], best[2], gpus) if best else None,
            "requests a second of the best deployment",
        ),
        Metric("capacity_load", best[2].load if best else None, "offered load of its busier side there"),
        Metric(
            "capacity_tokens_per_gpu",
            _tokens(best[0], best[2], gpus) if best else None,
            "output tokens a second there, over all GPUs of the machine",
        ),
    ]


def tables(
    capacities: Found, refused: Mapping[Shape, str], gpus: int, config: Config, search: Search
) -> list[Table]:
    """Return the answer, all deployments in order of it, the Pareto front, and what was skipped."""
    order = ranked(capacities, gpus)
    heads = {
        "deployment": "prefill and decode instances and their tensor parallelism",
        "copies": "that the machine holds",
        "rate": "requests a second of all copies",
        "tokens/s/GPU": "output tokens, over all GPUs of the machine",
        "load": "of the busier side",
        "95 % from": "of the load: the highest that holds",
        "95 % to": "the lowest that fails, or 1",
        "TTFT p90 s": "",
        "TPOT p90 s": "",
        "attainment": "share of requests that meet the SLO",
    }
    rows = [_row(shape, one, probe, gpus) for shape, one, probe in order]
    rows += [
        [str(shape), gpus // shape.gpus, 0.0, 0.0, 0.0, one.low, one.high, None, None, None]
        for shape, one in sorted(capacities.items())
        if one.best is None
    ]
    pareto = [
        [str(shape), _tokens(shape, probe, gpus), probe.ttft, probe.tpot, probe.load]
        for shape, probe in front(capacities, gpus, search.attainment)
    ]
    reasons: dict[str, int] = {}
    for text in refused.values():
        reasons[_reason(text)] = reasons.get(_reason(text), 0) + 1
    return [
        Table("Answer", {"": "", " ": ""}, _answer(order, capacities, refused, gpus, config, search)),
        Table("Deployments", heads, rows),
        Table(
            "Pareto front",
            {"deployment": "", "tokens/s/GPU": "output", "TTFT p90 s": "", "TPOT p90 s": "", "load": "of the probe"},
            pareto,
        ),
        Table("Skipped", {"deployments": "", "because": ""}, [[count, reason] for reason, count in reasons.items()]),
    ]


def _reason(text: str) -> str:
    return text.rpartition("; ")[0].split(": ", 1)[-1] if "GPUs" not in text else "more GPUs than the machine has"


def _row(shape: Shape, one: Capacity, probe: Probe, gpus: int) -> list[Any]:
    numbers = (_rate(shape, probe, gpus), _tokens(shape, probe, gpus), probe.load, one.low, one.high)
    return [str(shape), gpus // shape.gpus, *numbers, probe.ttft, probe.tpot, probe.attainment]


def _answer(
    order: list[tuple[Shape, Capacity, Probe]],
    capacities: Found,
    refused: Mapping[Shape, str],
    gpus: int,
    config: Config,
    search: Search,
) -> list[list[str]]:
    # What was searched, the best deployment, its interval, and how many come close.
    slo = f"TTFT <= {format_time(config.slo.ttft)} and TPOT <= {format_time(config.slo.tpot)}"
    searched = (
        f"{len(capacities)} deployments searched, {len(refused)} skipped; {config.model.name} on {config.hw.name}"
    )
    lines = [["searched", searched], ["SLO", f"{slo} for {search.attainment:.0%} of requests"]]
    if not order:
        return [*lines, ["best", "none: the SLO fails at any load; relax slo, or take a faster machine"]]
    shape, one, probe = order[0]
    scale = _rate(shape, probe, gpus) / probe.load
    copies = gpus // shape.gpus
    lines += [
        ["best", f"{shape}, {copies} {'copy' if copies == 1 else 'copies'} on {gpus} GPUs"],
        [
            "serves",
            f"{_rate(shape, probe, gpus):.3g} requests/s, {_tokens(shape, probe, gpus):.4g} tokens/s/GPU out",
        ],
        ["95 % interval", f"{one.low * scale:.3g} to {one.high * scale:.3g} requests/s"],
        [
            "attainment",
            f"{probe.attainment:.1%} +- {probe.half:.1%} of {probe.requests} requests at load {probe.load:.2f}",
        ],
        ["latency", f"TTFT p90 {_time(probe.ttft)}, TPOT p90 {_time(probe.tpot)}"],
    ]
    close = [other for other in order[1:] if _high(other, gpus) >= _rate(shape, probe, gpus)]
    if len(order) > 1:
        second, _, there = order[1]
        lines.append(["next", f"{second}: {_rate(second, there, gpus):.3g} requests/s"])
    lines.append(["not told apart", f"{len(close)} others, whose intervals reach the best"])
    return lines


def _high(entry: tuple[Shape, Capacity, Probe], gpus: int) -> float:
    shape, one, probe = entry
    return _rate(shape, probe, gpus) / probe.load * one.high


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_time(seconds)
