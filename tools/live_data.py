# SPDX-License-Identifier: Apache-2.0
"""What real vLLM and SGLang servers took, `data/live`, beside what was predicted.

    python -m tools.live_data compare SEALED FOLDER      # each load and metric
    python -m tools.live_data again SEALED FOLDER [HW]   # the same by the model of today

SEALED is a prediction with its hash, FOLDER the measurement: `requests.parquet`, `singles.parquet` and
`loads.parquet`; `data/live/about.parquet` has its machine, versions and command.  *again* runs the words of SEALED
with ``target=model``: the requests of FOLDER, one part after the other on one deployment.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from experiments.validate_live import APART, WARMUP, Parts, predicted
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.core.files import data
from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from pdsim.serving.workload import Request
from pdsim.validation.sealed import unseal
from pdsim.validation.verdicts import BOUNDS, SINGLE, quantiles

METRICS = {f"{name}_s": bound for name, bound in BOUNDS.items()}
"""Compared metrics of a load, and the relative error that is asked for."""

DATA = data("live")
CAMPAIGNS = {name: name for name in ("blind", "third", "fourth")} | {"fifth": "fourth", "sixth": "fourth"}
"""Folders of blind campaigns, and of their sealed predictions."""

REPEATS = {
    "vllm": (
        ("third/vllm", "fixed700-35", "third/vllm", "fixed700-35@2"),
        ("fourth/vllm", "fixed500-40", "fourth/vllm", "fixed500-40@2"),
        ("third/vllm", "mixed3k-70", "fourth/vllm", "mixed3k-70"),
        *(
            ("vllm-2xh200", load, "vllm-2xh200-again", load)
            for load in ("fixed-40", "fixed-80", "mixed-60", "decode")
        ),
    ),
    "sglang": (
        ("third/sglang", "fixed700-35", "third/sglang", "fixed700-35@2"),
        *(("blind/sglang", load, "third/sglang", load) for load in ("answers-45", "fixed3k-75", "fixed1k-30")),
    ),
}
"""Loads that were measured twice: minutes apart on the same servers, or on two hosts."""


def sealed(path: Path) -> dict[str, Any]:
    """Return the prediction in *path*, whose hash is that of its content."""
    return unseal(path.read_bytes(), str(path))


def loads(folder: Path) -> dict[str, dict[str, Any]]:
    """Return words, metrics, failures, notes and the servers' own counts of each load in *folder*; none without."""
    import pyarrow.parquet as pq

    path = folder / "loads.parquet"
    rows = pq.read_table(path).to_pylist() if path.is_file() else []
    return {row.pop("load"): {key: json.loads(value) for key, value in row.items()} for row in rows}


def requests(folder: Path) -> Parts:
    """Return the requests of each part in *folder*, in its order."""
    import pyarrow.parquet as pq

    by_load: dict[str, list[Request]] = {}
    for row in pq.read_table(folder / "requests.parquet").to_pylist():
        own = by_load.setdefault(row["load"], [])
        alone = row["load"].startswith((SINGLE, WARMUP))
        arrival = len(own) * APART if alone else row["arrival_us"] * 1e-6
        own.append(Request(arrival, row["input"], row["output"], None))
    return by_load


def singles(folder: Path) -> dict[str, dict[str, float]]:
    """Return medians of the single requests in *folder* by length, warm-ups left out.

    The handoff, from prefill's end to the first token, is by SGLang's stamps, if it has them, else by the client's
    clock.
    """
    import pyarrow.parquet as pq

    by_length: dict[str, list[dict[str, Any]]] = {}
    for one in pq.read_table(folder / "singles.parquet").to_pylist():
        row = json.loads(one["row"])
        if not one["warmup"] and row["status"] == "ok":
            stamps = json.loads(row.get("reported") or "{}")
            if "prefill_prefill_finished_time" in stamps and "response_sent_to_client_ts" in stamps:
                row["handoff"] = stamps["response_sent_to_client_ts"] - stamps["prefill_prefill_finished_time"]
            by_length.setdefault(str(one["length"]), []).append(row)
    return {length: _medians(rows) for length, rows in by_length.items()}


def _medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = [name for name in ("ttft", "tpot", "handoff") if rows[0].get(name) is not None]
    return {name: float(median(row[name] for row in rows)) for name in names}


def blind() -> dict[str, tuple[Path, Path]]:
    """Return each blind prediction that was measured, such as "third/vllm-page64": its file, and its folder."""
    pairs = {}
    for campaign, where in CAMPAIGNS.items():
        for path in sorted((DATA / where).glob("expected-*.json")):
            name = path.stem.removeprefix("expected-")
            folder = DATA / campaign / name.partition("-as-")[0]
            if loads(folder):
                pairs[f"{campaign}/{name}"] = path, folder
    return pairs


def errors(
    expected: Mapping[str, Any], measured: Mapping[str, Any], chosen: Sequence[str] = ()
) -> dict[str, list[tuple[str, float]]]:
    """Return by metric the loads that both have, or those *chosen*, each with its error: predicted over measured."""
    by_metric: dict[str, list[tuple[str, float]]] = {}
    for load, made in expected["loads"].items():
        if load in measured and (not chosen or load in chosen):
            for name in METRICS:
                one, other = made["metrics"].get(name), measured[load]["metrics"].get(name)
                if one and other:
                    by_metric.setdefault(name, []).append((load, one / other - 1.0))
    return by_metric


def means(every: Iterable[Mapping[str, Sequence[tuple[str, float]]]]) -> dict[str, float]:
    """Return the mean absolute error of each metric in *every* result of `errors`, in per cent."""
    pooled: dict[str, list[float]] = {}
    for by_metric in every:
        for name, rows in by_metric.items():
            pooled.setdefault(name, []).extend(abs(error) for _, error in rows)
    return {name: 100 * mean(pooled[name]) for name in METRICS if name in pooled}


def floors(engine: str) -> dict[str, float]:
    """Return by metric how far the same loads of *engine* were apart when measured twice: relative, means."""
    apart: dict[str, list[float]] = {}
    for one, load, other, again in REPEATS[engine]:
        first, second = loads(DATA / one)[load]["metrics"], loads(DATA / other)[again]["metrics"]
        for name in METRICS:
            if first.get(name) and second.get(name):
                apart.setdefault(name, []).append(abs(second[name] / first[name] - 1.0))
    return {name: mean(values) for name, values in apart.items()}


def counts(by_metric: Mapping[str, Sequence[tuple[str, float]]], floor: Mapping[str, float]) -> tuple[int, int, int]:
    """Return how many points are within their bound, else within twice the *floor* of their metric, or missed."""
    all_of = [(abs(error), METRICS[name], 2 * floor[name]) for name, rows in by_metric.items() for _, error in rows]
    near = sum(error <= bound for error, bound, _ in all_of)
    within = sum(bound < error <= most for error, bound, most in all_of)
    return near, within, len(all_of) - near - within


def again(expected: Mapping[str, Any], folder: Path, hw: str = "2xh200") -> dict[str, Any]:
    """Return what the model of today, with the words of *expected*, says of the requests in *folder*."""
    config = compose([f"hw={hw}", *expected["words"]])
    rows = predicted(config, requests(folder))
    said = {
        name: {"metrics": {f"{metric}_s": value for metric, value in quantiles(own).items()}}
        for name, own in rows.items()
        if not name.startswith((SINGLE, WARMUP))
    }
    alone = {
        name.removeprefix(SINGLE): _medians([row | {"handoff": handed(row, config)} for row in own])
        for name, own in rows.items()
        if name.startswith(SINGLE)
    }
    return {"words": expected["words"], "loads": said, "singles": alone}


def handed(row: Mapping[str, Any], config: Config) -> float | None:
    """Return the seconds of a modelled request from prefill's end to the first token; None if it did not get there.

    Prefill's end is its answer where decode asks for KV then, as a proxy sees it; where prefill pushes, that of its
    forward, as the engine stamps it.
    """
    if row["status"] != "ok":
        return None
    costs, taken = config.engine.prefill, row["arrival"] + row["ttft"] - row["prefilled_at"]
    return float(taken - costs.answer if config.engine.handoff == "pull" else taken + costs.send)


def compare(expected: Mapping[str, Any], folder: Path) -> Iterator[Table]:
    """Yield tables: each load's metrics predicted and measured, the errors of each metric, and single requests."""
    measured = loads(folder)
    by_metric = errors(expected, measured)
    rows: list[list[Any]] = []
    for name, each in by_metric.items():
        for load, error in each:
            values = (expected["loads"][load]["metrics"][name], measured[load]["metrics"][name])
            rows.append([load, name, *(value * 1e3 for value in values), 100 * error])
    heads = {"load": "", "metric": "", "predicted ms": "", "measured ms": ""}
    heads |= {"error %": "predicted over measured, less 1"}
    yield Table("Loads", heads, sorted(rows))
    summary = [
        [
            name, len(sizes), 100 * mean(sizes), 100 * median(sizes), 100 * max(sizes), 100 * METRICS[name],
            sum(size <= METRICS[name] for size in sizes),
        ]
        for name, sizes in ((name, [abs(error) for _, error in each]) for name, each in by_metric.items())
    ]  # fmt: skip
    columns = {"metric": "", "loads": "", "mean absolute %": "", "median %": "", "worst %": ""}
    columns |= {"asked %": "the relative error that is asked for", "within": "loads within that bound"}
    yield Table("Errors", columns, summary)
    alone = singles(folder)
    lines = [
        [int(length), key, made[key] * 1e3, alone[length][key] * 1e3, 100 * (made[key] / alone[length][key] - 1.0)]
        for length, made in expected["singles"].items()
        for key in ("ttft", "handoff", "tpot")
        if made.get(key) and alone.get(length, {}).get(key)
    ]
    heads = {"tokens": "", "what": "", **dict(list(heads.items())[2:])}
    yield Table("Single requests, medians", heads, lines)


def main(words: Sequence[str]) -> int:
    """Print the tables that *words* ask for; return the exit status."""
    what, *names = words or [""]
    if what in ("compare", "again") and len(names) in (2, 3):
        expected, folder = sealed(Path(names[0])), Path(names[1])
        tables = compare(again(expected, folder, *names[2:]) if what == "again" else expected, folder)
    else:
        raise SystemExit(__doc__)
    for table in tables:
        show_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
