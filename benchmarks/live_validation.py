"""Predict what `benchmarks.live_campaign` measures, before it does, and say how far off the predictions were.

    python -m benchmarks.live_validation predict vllm FILE [--trace TRACE] [KEY=VALUE ...]   # seals FILE with its hash
    python -m benchmarks.live_validation compare FILE FOLDER      # FOLDER is what live_campaign wrote
    python -m benchmarks.live_validation floor FOLDER FOLDER ...  # how far repeats and hosts are from one another

A prediction runs the very overrides of the campaign with ``target=model``: the loads, and single requests of each
length far apart from one another.  KEY=VALUE is added to all, as in ``engine=sglang`` for the wrong engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.live_campaign import CAPACITY, GPUS, LENGTHS, LOADS, SINGLE_OUTPUT, scaled, trace_load
from experiments import serve
from pdsim.cli.run import compose
from pdsim.fabric.job import Model
from pdsim.results.environment import commit
from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from pdsim.validation.verdicts import seal, unseal

SYSTEMS = {
    "vllm": ["engine=vllm", "backend=nixl_vllm", "kv.page_size=16"],
    "sglang": ["engine=sglang", "backend=mooncake_nvlink", "kv.page_size=1", "compute.attention_share=0.29"],
}
"""What the model is told of each engine beside `GPUS`: the campaign's own words, with the engine in place of `live`.

SGLang runs Triton's attention there, half as fast as FlashAttention from 8,192 tokens on.
"""

METRICS = {
    "ttft_p50_s": 0.10,
    "ttft_p90_s": 0.15,
    "ttft_p99_s": 0.15,
    "tpot_p50_s": 0.05,
    "tpot_p99_s": 0.15,
    "e2e_p50_s": 0.05,
}
"""What is compared of each load, and the relative error that is asked for."""

SECONDS = 20.0
"""Length of a generated load, as the campaign's."""

APART = 30.0
"""Seconds between two single requests of the model: none finds another under way."""


def _run(words: Sequence[str]) -> Mapping[str, Any]:
    config = compose(["hw=2xh200", *words])
    target = Model(config.hw, config.backend, memory=config.memory, seed=config.seed, collective=config.collective)
    found = serve.run(config, target, lambda _share, _text: None)
    return {"metrics": {m.name: m.value for m in found.summary}, "rows": found.requests, "failures": found.failures}


def predict(engine: str, extra: Sequence[str], trace: Path | None) -> dict[str, Any]:
    """Return what the model says of every load and of single requests, with the words that it was asked by."""
    base = [*GPUS[1:], *SYSTEMS[engine], *extra]
    loads = dict(scaled(",".join(LOADS), SECONDS, 1.0))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        if trace is not None:
            context = compose(["hw=2xh200", *base]).model.context
            loads["trace-50"] = trace_load(trace, folder, 60, context, CAPACITY)
        for name, words in loads.items():
            done = _run([*base, *words])
            kept = {key: done["metrics"].get(key) for key in METRICS}
            found[name] = {"words": [w for w in words if "trace=" not in w], "metrics": kept}
            print(name, {key: value and round(value, 5) for key, value in kept.items()}, flush=True)
        rows: list[dict[str, Any]] = [
            {"timestamp": round(n * APART * 1e3), "input_length": n_in, "output_length": SINGLE_OUTPUT, "hash_ids": []}
            for n, n_in in enumerate(LENGTHS)
        ]
        context = compose(["hw=2xh200", *base]).model.context
        kept_rows = [row for row in rows if row["input_length"] + SINGLE_OUTPUT <= context]
        (folder / "singles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept_rows), encoding="utf-8")
        done = _run([*base, f"workload.trace={folder / 'singles.jsonl'}"])
    columns = done["rows"]
    singles = {
        str(row["input_length"]): {key: columns[key][n] for key in ("ttft", "tpot", "handoff") if key in columns}
        for n, row in enumerate(kept_rows)
    }
    return {
        "engine": engine,
        "words": base,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "loads": found,
        "singles": singles,
    }


def singles_of(folder: Path) -> dict[str, dict[str, float]]:
    """Return medians of the single requests in *folder* by length, warm-ups left out."""
    by: dict[str, list[Mapping[str, Any]]] = {}
    for one in json.loads((folder / "singles.json").read_text()):
        if not one["warmup"] and one["row"]["status"] == "ok":
            by.setdefault(str(one["length"]), []).append(one["row"])
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


def main(words: Sequence[str] | None = None) -> int:
    """Do what *words* say; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("predict", "compare", "floor"))
    parser.add_argument("first")
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args(words)
    if asked.what == "predict":
        if asked.first not in SYSTEMS or not asked.rest:
            parser.error(f"predict needs one of {', '.join(SYSTEMS)} and a file, got {asked.first} {asked.rest}")
        path = Path(asked.rest[0])
        content = predict(asked.first, asked.rest[1:], asked.trace)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(seal(content))
        print(f"sealed: {path}")
        return 0
    if asked.what == "compare":
        expected = unseal(Path(asked.first).read_bytes(), asked.first)
        tables = compare(expected, Path(asked.rest[0]))
    else:
        tables = floor([Path(asked.first), *map(Path, asked.rest)])
    for table in tables:
        show_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
