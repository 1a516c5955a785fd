# SPDX-License-Identifier: Apache-2.0
"""How far predictions of whole servers were off, and whether 95 % intervals from other hosts hold them.

    python -m tools.served        # factors of `pdsim.results.evidence.SERVERS`, and the table of docs/validation.md

Sealed predictions and measurements are in `data/live`, public rows in `data/benchmarks/scorecard_rows.csv`.  Where a
pair of engine and kind of model was measured on that GPU before, a prediction counts as "measured", the first ones
as "table".
"""

import csv
import gzip
import json
import math
import sys
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from pdsim.core.files import data
from pdsim.validation.verdicts import quantiles
from tools import live_data
from tools.live_data import DATA
from tools.tables import markdown, rows

LEVELS = ("measured", "table", "roofline")
METRICS = ("ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50")
PUBLIC = {
    "ttft": "ttft_p50",
    "ttft p90": "ttft_p90",
    "ttft p99": "ttft_p99",
    "tpot": "tpot_p50",
    "tpot p99": "tpot_p99",
}
PUBLIC["output"] = "e2e_p50"
"""Errors of public rows by metric; in a closed loop the output of a server is as far off as its end-to-end time."""
FILES, TABLES = ("seventh", "eighth", "ninth"), ("tenth", "eleventh", "twelfth", "thirteenth", "fourteenth")
ON_H100 = ("seventh", "ninth", "tenth")
ORDER = (*live_data.CAMPAIGNS, *FILES, *TABLES)
"""Hosts, in the order of their measurements."""


class Point(NamedTuple):
    """A metric of a load: predicted over measured, as a logarithm."""

    level: str  # as in `pdsim.results.evidence.SERVERS`
    kind: str  # of servers, a row of the table
    host: str
    load: str
    metric: str
    error: float


def points() -> list[Point]:
    """Return all of them."""
    seen = {("H200", "vLLM pairs"), ("H200", "SGLang pairs")}  # fitted to the first campaign
    own = []
    for host in ORDER:
        gpu = "H100" if host in ON_H100 else "H200"
        here = [*_pairs(host), *_files(host), *_tables(host)]
        for kind, load, metric, ratio in here:
            level = "measured" if (gpu, kind) in seen else "table"
            own.append(Point(level, kind, host, load, metric, math.log(ratio)))
        seen |= {(gpu, kind) for kind, *_ in here}
    return [*own, *_public()]


_Ratio = tuple[str, str, str, float]  # kind, load, metric, predicted over measured


def _pairs(host: str) -> Iterator[_Ratio]:
    for name, (path, folder) in live_data.blind().items():
        if name.partition("/")[0] == host and "-as-" not in name:
            by_metric = live_data.errors(live_data.sealed(path), live_data.loads(folder))
            kind = _kind(path.stem.removeprefix("expected-"), pair=True)
            for metric, errors in by_metric.items():
                yield from ((kind, f"{name} {load}", metric[:-2], 1 + error) for load, error in errors)


def _files(host: str) -> Iterator[_Ratio]:
    for path in sorted((DATA / host).glob("expected-*.json")) if host in FILES else ():
        runs = json.loads((DATA / host / path.name.replace("expected", "measured")).read_text())["runs"]
        predicted = json.loads(path.read_text())["predicted"]
        kind = _kind(path.stem.removeprefix("expected-"))
        for load in (load for load in predicted if load.startswith("load")):
            of_runs = [[row for row in run[load] if row["status"] == "ok"] for run in runs if load in run]
            yield from _ratios(kind, f"{path.stem} {load}", predicted[load], of_runs)


def _tables(host: str) -> Iterator[_Ratio]:
    if host not in TABLES:
        return
    predicted: dict[tuple[str, str], dict[str, float]] = {}
    with gzip.open(DATA / f"{host}-predicted.csv.gz", "rt", encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            predicted.setdefault((row["set"], row["load"]), {})[row["metric"]] = float(row["predicted"])
    measured: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = {}
    for row in rows(DATA / f"{host}.parquet"):
        if row["load"].startswith("load"):
            request = {name: float(row[name]) for name in ("ttft", "tpot", "e2e") if row[name]}
            measured.setdefault((row["set"], row["load"]), {}).setdefault(row["run"], []).append(request)
    for (name, load), runs in measured.items():
        sealed = f"{name.removesuffix('-again')}-default" if host == "tenth" else f"{name}-1xh200"
        made = predicted[sealed.replace("again-", "dense-"), load]
        yield from _ratios(_kind(name, pair="pair" in name), f"{name} {load}", made, [*runs.values()])


def _ratios(
    kind: str, load: str, predicted: dict[str, float], runs: Sequence[Sequence[dict[str, float]]]
) -> Iterator[_Ratio]:
    of_runs = [quantiles(run) for run in runs]
    for metric, value in predicted.items():
        if known := [each[metric] for each in of_runs if metric in each]:
            yield kind, load, metric, value / median(known)


def _kind(name: str, *, pair: bool = False) -> str:
    engine = "SGLang" if "sglang" in name else "vLLM"
    model = "FP8" if "fp8" in name else "experts" if "moe" in name else "dense"
    return f"{engine} pairs" if pair else f"{engine}, {model}"


def _public() -> Iterator[Point]:
    for number, row in enumerate(rows(data("benchmarks", "scorecard_rows.csv"))):
        level = "table" if row["gpu"] in ("b200", "h200") else "roofline"
        kind = f"public, {row['gpu'].upper()}{', disaggregated' * (row['servers'] == 'disaggregated')}"
        for name, metric in PUBLIC.items():
            if text := row[f"{name} %"]:
                yield Point(level, kind, kind, str(number), metric, math.log1p(float(text) / 100))


def factors(every: Sequence[Point]) -> dict[str, float]:
    """Return by metric the factor that one more value, on one more host, is within with 95 %.

    It is of the errors' 95 % quantile (of few, the largest), and wider by what the mean of so many hosts varies.
    """
    wider = math.sqrt(1 + 1 / len({point.host for point in every}))
    return {name: _factor([abs(point.error) for point in every if point.metric == name], wider) for name in METRICS}


def _factor(sizes: Sequence[float], wider: float) -> float:
    rank = min(len(sizes), math.ceil(0.95 * (len(sizes) + 1)))
    return round(math.exp(wider * sorted(sizes)[rank - 1]), 2)


def _held(own: Sequence[Point]) -> dict[Point, bool]:
    # whether each is within the factors of the other hosts
    held: dict[Point, bool] = {}
    for host in {point.host for point in own}:
        limits = factors([point for point in own if point.host != host])
        here = (point for point in own if point.host == host)
        held |= {point: abs(point.error) <= math.log(limits[point.metric]) for point in here}
    return held


def table() -> Iterator[str]:
    """Yield the table of docs/validation.md: factors, and how many values the intervals of other hosts hold."""
    every, lines = points(), []
    for level in LEVELS:
        own = [point for point in every if point.level == level]
        inside, widths = sum(_held(own).values()), factors(own)
        texts = ", ".join(f"{widths[name]:.2f}" for name in ("ttft_p50", "tpot_p50", "e2e_p50"))
        hosts, loads = len({point.host for point in own}), len({point[1:4] for point in own})
        lines.append((level, hosts, loads, texts, f"{inside}/{len(own)}", f"{100 * inside / len(own):.0f}"))
    heads = ("measured before", "hosts", "loads", "factors: TTFT, TPOT, end to end p50", "values inside", "%")
    yield from markdown(heads, lines)


def kinds() -> Iterator[str]:
    """Yield the table of data/live/README.md: of each kind of servers how many values are inside."""
    every, lines = points(), []
    for level in LEVELS:
        held = _held([point for point in every if point.level == level])
        for kind in dict.fromkeys(point.kind for point in held):
            some = [inside for point, inside in held.items() if point.kind == kind]
            lines.append((level, kind, f"{sum(some)}/{len(some)}"))
    yield from markdown(("measured before", "servers", "values inside"), sorted(lines))


def main() -> None:
    """Print the factors of each level, and the table."""
    every = points()
    for level in LEVELS:
        own = [point for point in every if point.level == level]
        sys.stdout.write(f"{level}: {len({point[1:4] for point in own})} loads, {factors(own)}\n")
    sys.stdout.write("\n".join(table()) + "\n")


if __name__ == "__main__":
    main()
