# SPDX-License-Identifier: Apache-2.0
"""Predict what `benchmarks.live_campaign` measures, and say how far off the predictions are.

    python -m benchmarks.live_validation predict vllm FILE [--like FOLDER] [--fitted LOADS] [KEY=VALUE ...]
    python -m benchmarks.live_validation compare FILE FOLDER      # FOLDER is what live_campaign wrote
    python -m benchmarks.live_validation floor FOLDER FOLDER ...  # how far repeats and hosts are from one another

A prediction runs the overrides of the campaign with ``target=model``: single requests of each length and the loads,
one after the other on one deployment, as the campaign does; those of FOLDER, a campaign, if one is named.  FILE gets
what the model says, with its hash.  LOADS are those that parameters were fitted to, so that errors of the others are
held out.  KEY=VALUE is added to all, as in ``engine=sglang`` for the wrong engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.live_campaign import GPUS, LENGTHS, LOADS, SINGLE_OUTPUT, scaled
from experiments.validate_live.parts import APART, WARMUP, Parts, predicted, single_requests
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.results.environment import commit
from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from pdsim.serving.workload import Request
from pdsim.serving.workload import load as drawn
from pdsim.validation.load_errors import BOUNDS, SINGLE, quantiles
from pdsim.validation.verdicts import seal, unseal

MEMORY = "scheduler.memory_fraction=0.6"
"""Of the 141 GB of the model's H200, what 0.55 is of the 150 that the servers count."""

SYSTEMS = {
    "vllm": [
        *("engine=vllm", "backend=nixl_vllm", "compute=h200_fa3", "kv.page_size=16"),
        *("kv.pool=65017479168B", MEMORY),
    ],
    "sglang": [
        "engine=sglang", "backend=mooncake_nvlink", "compute=h200_triton", "kv.page_size=1", "kv.pool=65722466304B",
        MEMORY,
    ],
}  # fmt: skip
"""What the model is told of each engine beside `GPUS`: the campaign's own words, with the engine in place of `live`.

The pools are those of the servers' logs: 440,928 and 445,709 tokens.
"""

FITTED = ("fixed-20", "fixed-60", "fixed-90", "mixed-60", "long-60", "trace-50")
"""Every other load of the campaign, beside single requests: what parameters of today were fitted to."""

METRICS = {f"{name}_s": bound for name, bound in BOUNDS.items()}
"""What is compared of each load, and the relative error that is asked for."""

SECONDS = 20.0
"""Length of a generated load, as the campaign's."""

REPEAT = 7
"""Single requests of each length, as the campaign's."""

DATA = Path(__file__).resolve().parent.parent / "data" / "live"


def parts_of(base: Sequence[str], like: Path | None) -> Parts:
    """Return the campaign's parts for the configuration *base*, or those of the campaign in *like*, in its order."""
    found: dict[str, list[Request]] = {}
    if like is not None:
        for row in requests_of(like):
            own = found.setdefault(row["load"], [])
            alone = row["load"].startswith((SINGLE, WARMUP))
            own.append(Request(len(own) * APART if alone else row["arrival"], row["input"], row["output"], None))
        return found
    context = compose(["hw=2xh200", *base]).model.context
    found |= single_requests(LENGTHS, SINGLE_OUTPUT, REPEAT, context)
    for name, words in scaled(",".join(LOADS), SECONDS, 1.0):
        config = compose(["hw=2xh200", *base, *words])
        found[name] = list(drawn(config.workload, config.seed, config.model.context))
    return found


def requests_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all requests of the campaign in *folder*."""
    import pyarrow.parquet as pq

    return list(pq.read_table(folder / "requests.parquet").to_pylist())


def predict(engine: str, extra: Sequence[str], like: Path | None, fitted: Sequence[str]) -> dict[str, Any]:
    """Return what the model says of every load and of single requests, with the words that it was asked by."""
    base = [*GPUS[1:], *SYSTEMS[engine], *extra]
    return told(engine, base, parts_of(base, like), fitted)


def told(
    engine: str, base: Sequence[str], parts: Parts, fitted: Sequence[str], hw: str = "2xh200"
) -> dict[str, Any]:
    """Return what the model of *engine*, told *base*, says of *parts* on *hw*, as `predict` does."""
    config = compose([f"hw={hw}", *base])
    rows = predicted(config, parts)
    for own in rows.values():
        for row in own:
            row["handoff"] = handed(row, config)
    loads = {
        name: {"metrics": {f"{metric}_s": value for metric, value in quantiles(own).items()}}
        for name, own in rows.items()
        if not name.startswith((SINGLE, WARMUP))
    }
    singles = {
        name.removeprefix(SINGLE): {
            key: median(row[key] for row in own)
            for key in ("ttft", "tpot", "handoff")
            if own[0].get(key) is not None
        }
        for name, own in rows.items()
        if name.startswith(SINGLE)
    }
    return {
        "engine": engine,
        "words": base,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "fitted": ["single requests", *fitted] if fitted else [],
        "loads": loads,
        "singles": singles,
    }


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
    for one in json.loads((folder / "singles.json").read_text()):
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
    measured = json.loads((folder / "summary.json").read_text())
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
    found = singles_of(folder)
    lines = []
    for length, made in expected["singles"].items():
        for key in ("ttft", "handoff", "tpot"):
            one, other = made.get(key), found.get(length, {}).get(key)
            if one and other:
                lines.append([int(length), key, one * 1e3, other * 1e3, 100 * (one / other - 1.0)])
    yield _table("Single requests, medians", ("tokens", "what", "predicted ms", "measured ms", "error %"), lines)


def floor(folders: Sequence[Path]) -> Iterator[Table]:
    """Yield how far each folder's loads are from the first's: what repeats and hosts differ by."""
    first, *others = ((f.name, json.loads((f / "summary.json").read_text())) for f in folders)
    rows = []
    for name in METRICS:
        for other, loads in others:
            apart = [
                abs(loads[load]["metrics"][name] / first[1][load]["metrics"][name] - 1.0)
                for load in loads
                if load in first[1] and first[1][load]["metrics"].get(name) and loads[load]["metrics"].get(name)
            ]
            if apart:
                rows.append([name, other, len(apart), 100 * median(apart), 100 * max(apart)])
    yield _table(f"Against {first[0]}", ("metric", "run", "loads", "median %", "worst %"), rows)


def means(expected: Mapping[str, Any], folder: Path, loads: Sequence[str] = ()) -> dict[str, float]:
    """Return the mean absolute error of each metric in per cent, over *loads* or over all that both have."""
    measured = json.loads((folder / "summary.json").read_text())
    found: dict[str, float] = {}
    for name in METRICS:
        wrong = [
            abs(made["metrics"][name] / measured[load]["metrics"][name] - 1.0)
            for load, made in expected["loads"].items()
            if load in measured and (not loads or load in loads)
            if made["metrics"].get(name) and measured[load]["metrics"].get(name)
        ]
        if wrong:
            found[name] = 100 * mean(wrong)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Do what *words* say; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("predict", "compare", "floor"))
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--like", type=Path, help="a campaign, whose requests are predicted")
    parser.add_argument(
        "--fitted", default="none", help="names of loads that parameters were fitted to, with commas"
    )
    asked = parser.parse_intermixed_args(words)
    if len(asked.rest) < (2 if asked.what != "floor" else 1):
        parser.error(f"{asked.what} needs more than {asked.rest}; see the top of this file")
    first, *rest = asked.rest
    if asked.what == "predict":
        if first not in SYSTEMS:
            parser.error(f"predict needs one of {', '.join(SYSTEMS)}, got {first}")
        fitted = [name for name in asked.fitted.split(",") if name != "none"]
        path = Path(rest[0])
        content = predict(first, rest[1:], asked.like, fitted)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(seal(content))
        print(f"sealed: {path}")
        return 0
    if asked.what == "compare":
        tables = compare(unseal(Path(first).read_bytes(), first), Path(rest[0]))
    else:
        tables = floor([Path(first), *map(Path, rest)])
    for table in tables:
        show_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
