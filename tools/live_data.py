# SPDX-License-Identifier: Apache-2.0
"""Read what real vLLM and SGLang servers took, `data/live`, and compare predictions with it.

    python -m tools.live_data compare SEALED FOLDER      # each load and metric
    python -m tools.live_data again SEALED FOLDER [HW]   # the same by the model of today
    python -m tools.live_data floor FOLDER FOLDER ...    # errors between repeats and hosts

SEALED is a prediction with its hash, FOLDER the measurement: `requests.parquet`, `singles.parquet` and
`loads.parquet`; `data/live/about.parquet` has its machine, versions and command.  *again* runs the words of SEALED
with ``target=model``: the requests of FOLDER, one part after the other on one deployment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from experiments.validate_live.parts import APART, WARMUP, Parts, predicted
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.core.repository import data
from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from pdsim.serving.workload import Request
from pdsim.validation.load_errors import BOUNDS, SINGLE, quantiles
from pdsim.validation.verdicts import unseal

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Prompt lengths of single requests."""

LOADS = (
    *("fixed-20", "fixed-40", "fixed-60", "fixed-80", "fixed-90", "mixed-30", "mixed-60", "mixed-80"),
    *("long-60", "decode"),
)
"""Loads of the first measurement on each engine; their words are in `loads.parquet`."""

FITTED = ("fixed-20", "fixed-60", "fixed-90", "mixed-60", "long-60", "trace-50")
"""Every other one of them: the parameters of the model were fitted to these and to single requests."""

THIRD = ("fixed700-35", "fixed4k-60", "answers200-35", "gamma1k-45", "long6k-50", "mixed2k-50")
"""Loads of new kinds on the third host."""

METRICS = {f"{name}_s": bound for name, bound in BOUNDS.items()}
"""Compared metrics of a load, and the relative error that is asked for."""

DATA = data("live")


def loads(folder: Path) -> dict[str, dict[str, Any]]:
    """Return words, metrics, failures, notes and the servers' own counts of each load in *folder*; none without."""
    import pyarrow.parquet as pq

    path = folder / "loads.parquet"
    rows = pq.read_table(path).to_pylist() if path.is_file() else []
    return {row.pop("load"): {key: json.loads(value) for key, value in row.items()} for row in rows}


def singles(folder: Path) -> list[dict[str, Any]]:
    """Return length, repetition, row and the servers' own counts of each single request in *folder*."""
    import pyarrow.parquet as pq

    rows = pq.read_table(folder / "singles.parquet").to_pylist()
    return [row | {"row": json.loads(row["row"]), "reported": json.loads(row["reported"])} for row in rows]


def requests(folder: Path) -> Parts:
    """Return the requests of each part in *folder*, in its order."""
    import pyarrow.parquet as pq

    by_load: dict[str, list[Request]] = {}
    for row in pq.read_table(folder / "requests.parquet").to_pylist():
        own = by_load.setdefault(row["load"], [])
        alone = row["load"].startswith((SINGLE, WARMUP))
        own.append(Request(len(own) * APART if alone else row["arrival"], row["input"], row["output"], None))
    return by_load


def again(sealed: Mapping[str, Any], folder: Path, hw: str = "2xh200") -> dict[str, Any]:
    """Return what the model of today, with the words of *sealed*, says of the requests in *folder*."""
    config = compose([f"hw={hw}", *sealed["words"]])
    rows = predicted(config, requests(folder))
    for own in rows.values():
        for row in own:
            row["handoff"] = handed(row, config)
    said = {
        name: {"metrics": {f"{metric}_s": value for metric, value in quantiles(own).items()}}
        for name, own in rows.items()
        if not name.startswith((SINGLE, WARMUP))
    }
    alone = {
        name.removeprefix(SINGLE): {
            key: median(row[key] for row in own)
            for key in ("ttft", "tpot", "handoff")
            if own[0].get(key) is not None
        }
        for name, own in rows.items()
        if name.startswith(SINGLE)
    }
    return {"words": sealed["words"], "loads": said, "singles": alone}


def handed(row: Mapping[str, Any], config: Config) -> float | None:
    """Return the seconds of a modelled request from prefill's end to the first token; None if it did not get there.

    Prefill's end is its answer where decode asks for KV then, as a proxy sees it; where prefill pushes, that of its
    forward, as the engine stamps it (`handoff_of`).
    """
    if row["status"] != "ok":
        return None
    costs, taken = config.engine.prefill, row["arrival"] + row["ttft"] - row["prefilled_at"]
    return float(taken - costs.answer if config.engine.handoff == "pull" else taken + costs.send)


def handoff_of(row: Mapping[str, Any]) -> float | None:
    """Return the same of a measured request: by SGLang's stamps, if it has them, else by the client's clock."""
    stamps = json.loads(row.get("reported") or "{}")
    if "prefill_prefill_finished_time" in stamps and "response_sent_to_client_ts" in stamps:
        return float(stamps["response_sent_to_client_ts"] - stamps["prefill_prefill_finished_time"])
    seen = row["handoff"]
    return None if seen is None else float(seen)


def singles_of(folder: Path) -> dict[str, dict[str, float]]:
    """Return medians of the single requests in *folder* by length, warm-ups left out."""
    by: dict[str, list[Mapping[str, Any]]] = {}
    for one in singles(folder):
        if not one["warmup"] and one["row"]["status"] == "ok":
            row = one["row"] | {"handoff": handoff_of(one["row"])}
            by.setdefault(str(one["length"]), []).append(row)
    return {
        length: {
            key: median(r[key] for r in rows) for key in ("ttft", "tpot", "handoff") if rows[0].get(key) is not None
        }
        for length, rows in by.items()
    }


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    return Table(title, {heading: _MEANING.get(heading, heading) for heading in headings}, rows)


_MEANING = {
    "error %": "predicted over measured, less 1",
    "asked %": "the relative error that is asked for",
    "within": "loads within that bound",
}


def compare(expected: Mapping[str, Any], folder: Path) -> Iterator[Table]:
    """Yield tables: each load's metrics predicted and measured, the errors of each metric, and single requests."""
    measured = loads(folder)
    rows: list[list[Any]] = []
    errors: dict[str, list[float]] = {name: [] for name in METRICS}
    for load, made in expected["loads"].items():
        if load not in measured:
            continue
        for name in METRICS:
            one, other = made["metrics"].get(name), measured[load]["metrics"].get(name)
            if one and other:
                errors[name].append(one / other - 1.0)
                rows.append([load, name, one * 1e3, other * 1e3, 100 * errors[name][-1]])
    yield _table("Loads", ("load", "metric", "predicted ms", "measured ms", "error %"), rows)
    yield _table(
        "Errors",
        ("metric", "loads", "mean absolute %", "median %", "worst %", "asked %", "within"),
        [
            [
                name, len(e), 100 * mean(map(abs, e)), 100 * median(map(abs, e)), 100 * max(map(abs, e)),
                100 * METRICS[name], sum(abs(x) <= METRICS[name] for x in e),
            ]
            for name, e in errors.items() if e
        ],
    )  # fmt: skip
    singles = singles_of(folder)
    lines = []
    for length, made in expected["singles"].items():
        for key in ("ttft", "handoff", "tpot"):
            one, other = made.get(key), singles.get(length, {}).get(key)
            if one and other:
                lines.append([int(length), key, one * 1e3, other * 1e3, 100 * (one / other - 1.0)])
    yield _table("Single requests, medians", ("tokens", "what", "predicted ms", "measured ms", "error %"), lines)


def floor(folders: Sequence[Path]) -> Iterator[Table]:
    """Yield how far each folder's loads are from the first's: what repeats and hosts differ by."""
    first, *others = ((folder.name, loads(folder)) for folder in folders)
    rows = []
    for name in METRICS:
        for other, value in others:
            apart = [
                abs(value[load]["metrics"][name] / first[1][load]["metrics"][name] - 1.0)
                for load in value
                if load in first[1] and first[1][load]["metrics"].get(name) and value[load]["metrics"].get(name)
            ]
            if apart:
                rows.append([name, other, len(apart), 100 * median(apart), 100 * max(apart)])
    yield _table(f"Against {first[0]}", ("metric", "run", "loads", "median %", "worst %"), rows)


def means(expected: Mapping[str, Any], folder: Path, chosen: Sequence[str] = ()) -> dict[str, float]:
    """Return the mean absolute error of each metric in per cent, over the loads *chosen* or all that both have."""
    measured = loads(folder)
    averages: dict[str, float] = {}
    for name in METRICS:
        wrong = [
            abs(made["metrics"][name] / measured[load]["metrics"][name] - 1.0)
            for load, made in expected["loads"].items()
            if load in measured and (not chosen or load in chosen)
            if made["metrics"].get(name) and measured[load]["metrics"].get(name)
        ]
        if wrong:
            averages[name] = 100 * mean(wrong)
    return averages


def main(words: Sequence[str]) -> int:
    """Print the tables that *words* ask for; return the exit status."""
    what, *names = words or [""]
    if what == "floor" and len(names) > 1:
        tables = floor([Path(name) for name in names])
    elif what in ("compare", "again") and len(names) in (2, 3):
        sealed, folder = unseal(Path(names[0]).read_bytes(), names[0]), Path(names[1])
        tables = compare(again(sealed, folder, *names[2:]) if what == "again" else sealed, folder)
    else:
        raise SystemExit(__doc__)
    for table in tables:
        show_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
