# SPDX-License-Identifier: Apache-2.0
"""Compare the results of fixed runs before and after a change that is to leave every simulation as it was.

    python -m benchmarks.fixed_runs record data/benchmarks/fixed_runs.json   # at the commit to compare with
    python -m benchmarks.fixed_runs check data/benchmarks/fixed_runs.json    # now; exits with 1 if anything differs

Each run is one `python -m pdsim run` of this checkout, in a folder of its own.  What is compared: `fingerprints.py`.
`record --keep DIR` also keeps the folders, and `check --before DIR` then prints the old value beside the new one.
Runs on real engines compare what does not depend on time: rows, types, and the columns named in `REAL` or `SERVED`.
Changed words (titles, definitions, notes, evidence) are counted, and are no difference.  CPU seconds are only shown.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fingerprints import Part, fingerprint, load, row_marks

ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 300  # seconds of one run, before it counts as stuck

SERVED = {
    "transfers.parquet": ("engine", "operation", "source", "target", "label", "status", "nbytes"),
    "requests.parquet": (
        "id",
        "arrival",
        "input",
        "output",
        "patience",
        "prefill",
        "decode",
        "nbytes",
        "status",
        "path",
    ),
    "run.json": ("status", "error", "experiment", "hw", "backend", "target", "seed", "engine"),
    "summary.json": ("failures",),
    "summary.json:ranks": ("name", "value"),
    "summary.json:metrics": (
        *("points", "points_failed", "transfers", "bytes", "slots", "slots_verified", "shapes", "shapes_failed"),
        *("handoffs", "requests", "requests_ok", "requests_aborted", "requests_failed", "kv_bytes"),
        *("grouped_bytes", "metadata_bytes", "metadata_descriptors"),
    ),
}
"""What is the same in every run on a real engine.  Which request ends first decides how pages lie, thus
descriptors."""

REAL = SERVED | {"transfers.parquet": (*SERVED["transfers.parquet"], "batch_size", "block_size")}
"""The same where one request, or one point, follows another."""


@dataclass(frozen=True)
class Run:
    """One command line, and the columns that are compared: all of them, or those of a real engine.

    It names a choice of every group; those that begin with ``fixed_`` are in `SETTINGS`.  So neither a better
    default in ``conf/`` nor a new calibration changes a fixed run.
    """

    overrides: str
    only: Mapping[str, Sequence[str]] | None = None


SETTINGS = Path("benchmarks/fixed_settings")
"""A folder for ``--config-dir`` with every key of the serving engine, the KV cache, the scheduler and compute."""

GENERIC = "engine=fixed_generic compute=fixed_roofline cache=none"
SMALL = "workload=poisson workload.count=40"
H20 = f"{GENERIC} hw=8xh20 collective=nccl model=llama-3.1-70b parallel=tp4"
H20_NVLINK = f"{H20} backend=mooncake_nvlink calibration=none workload=embedded"
H20_NIXL = f"{H20} backend=nixl calibration=none"
H20_NODES = f"{GENERIC} hw=2x8xh20 collective=nccl parallel=tp8 backend=mooncake calibration=none"
H200 = "engine=fixed_generic compute=fixed_h200 cache=none collective=nccl"
H200_NVLINK = f"{H200} hw=8xh200 backend=mooncake_nvlink calibration=mooncake_nvlink-8xh200"
MI300X = f"{GENERIC} hw=2x8xmi300x collective=rccl parallel=tp8 backend=mori calibration=none"
LOOPBACK = f"{GENERIC} hw=loopback collective=gloo parallel=tp1 workload=smoke calibration=none"
RUNS = {
    # serve: TP4 -> TP4 and the shipped trace; TP4 -> TP2 in slices, staged, pulled; DP and MLA; PP; CP; state
    "serve-tp4-tp4": Run(f"experiment=serve {H20_NVLINK}"),
    "serve-tp4-tp2-sliced": Run(f"experiment=serve {H20_NIXL} parallel.decode.tp=2 {SMALL}"),
    "serve-tp4-tp2-staged": Run(f"experiment=serve {H20_NIXL} parallel.decode.tp=2 kv.staging=true {SMALL}"),
    "serve-pulled": Run(
        "experiment=serve engine=fixed_vllm compute=fixed_roofline cache=none hw=8xh20 collective=nccl "
        f"model=llama-3.1-8b parallel=tp4 backend=nixl calibration=none parallel.decode.tp=2 {SMALL}"
    ),
    "serve-dp8-mla": Run(
        f"experiment=serve {H20_NODES} model=deepseek-v3 parallel.prefill.dp=8 workload=bursty workload.count=30"
    ),
    "serve-pp2": Run(
        f"experiment=serve {H200_NVLINK} model=llama-3.1-70b parallel=tp2 parallel.prefill.pp=2 workload=gamma "
        "workload.count=40"
    ),
    "serve-cp2": Run(
        f"experiment=serve {H200_NVLINK} model=llama-3.1-8b parallel=tp4 parallel.prefill.cp=2 "
        "parallel.prefill.tp=2 kv.all_cp_ranks=true workload=poisson workload.count=10"
    ),
    "serve-state-aborts": Run(
        f"experiment=serve {MI300X} model=qwen3-next-80b-a3b workload.aborts=0.2 {SMALL}",
    ),
    "serve-tracked-state": Run(
        f"experiment=serve {LOOPBACK} backend=mooncake_tcp model=tiny-hybrid memory=tracked parallel.prefill.tp=2"
    ),
    "serve-tracked-mla": Run(
        f"experiment=serve {H200} hw=8xh200 backend=nvlink calibration=nvlink-8xh200 model=tiny-mla memory=tracked "
        "parallel=tp2 kv.pool=64MiB workload=smoke"
    ),
    "transfer-rdma": Run(
        f"experiment=transfer {H20_NODES} model=llama-3.1-70b workload=embedded experiment.repeat=5"
    ),
    "transfer-read-tracked": Run(
        f"experiment=transfer {H200} hw=8xh200 backend=nixl calibration=nixl-8xh200 model=llama-3.1-70b "
        "parallel=tp4 workload=embedded memory=tracked experiment.operation=read experiment.layout=scattered "
        "experiment.size=[4KiB,64KiB] experiment.repeat=3 experiment.warmup=1"
    ),
    "transfer-nvlink": Run(
        f"experiment=transfer {H200} hw=2xh200 backend=nvlink calibration=nvlink-2xh200 model=qwen3-32b "
        "parallel=tp1 workload=embedded experiment.patterns=[pair,bidirectional] experiment.concurrency=[1,4] "
        "experiment.repeat=5"
    ),
    "transfer-link": Run(
        f"experiment=transfer {GENERIC} hw=link collective=gloo backend=mooncake_tcp calibration=mooncake_tcp-link "
        "model=tiny parallel=tp1 workload=smoke experiment.repeat=2 experiment.warmup=1"
    ),
    "handoff-paths": Run(
        f"experiment=handoff {H20_NIXL} workload=embedded experiment.tp=[4to2,2to4] "
        "experiment.metadata=[data,control] experiment.tokens=[512,2048] experiment.repeat=2"
    ),
    "handoff-mori-tracked": Run(
        f"experiment=handoff {MI300X} model=tiny-hybrid workload=embedded memory=tracked kv.pool=64MiB "
        "experiment.tp=[2to1] experiment.tokens=[512] experiment.paths=[sliced]"
    ),
    "allgather": Run(
        f"experiment=allgather {H200_NVLINK} model=llama-3.1-70b parallel=tp4 workload=embedded experiment.repeat=5"
    ),
    "faults": Run(f"experiment=faults {H20_NVLINK} experiment.scenarios=6 experiment.workers=1"),
    "validate": Run(
        f"experiment=validate experiment.predict=only {H200} hw=2xh200 backend=mooncake_nvlink "
        "calibration=mooncake_nvlink-2xh200 model=qwen3-32b parallel=tp1 workload=smoke experiment.size=[96KiB] "
        "experiment.blocks=[1,37] experiment.patterns=[bidirectional] experiment.contended=[96KiB] "
        "experiment.tokens=[512] experiment.repeat=4"
    ),
    "seed-intranode-metadata": Run(f"experiment=seed_intranode_metadata {H20_NVLINK}"),
    "seed-mooncake-tcp": Run(
        f"experiment=seed_mooncake_tcp {H20_NODES} model=llama-3.1-8b workload=embedded experiment.tp=[1to1,2to2] "
        "experiment.tokens=[512] experiment.repeat=2 experiment.requests=4"
    ),
    "seed-mori-state": Run(
        f"experiment=seed_mori_state {MI300X} model=llama-3.1-70b workload=embedded experiment.concurrency=[1,8] "
        "experiment.tp=[8to4] experiment.repeat=2"
    ),
    "seed-nixl-staging": Run(
        f"experiment=seed_nixl_staging {H20_NIXL} workload=embedded experiment.tp=[2to4,4to2] "
        "experiment.tokens=[512] experiment.prompts=[1,8]"
    ),
    "seed-symmetric-allgather": Run(
        f"experiment=seed_symmetric_allgather {H20_NVLINK} experiment.ranks=[2,4] experiment.repeat=3"
    ),
    # on real engines, over this machine's loopback
    "real-transfer-mooncake": Run(
        f"target=real experiment=transfer {LOOPBACK} backend=mooncake_tcp model=tiny "
        "experiment.patterns=[pair,incast] experiment.ranks=3 experiment.size=[64KiB] experiment.repeat=3 "
        "experiment.warmup=1",
        REAL,
    ),
    "real-transfer-nixl": Run(
        f"target=real experiment=transfer {LOOPBACK} backend=nixl_tcp model=tiny "
        "experiment.patterns=[pair,bidirectional] experiment.size=[64KiB] experiment.repeat=3 experiment.warmup=1",
        REAL,
    ),
    "real-handoff-nixl": Run(
        f"target=real experiment=handoff {LOOPBACK} backend=nixl_tcp model=tiny experiment.tp=[2to1] "
        "experiment.tokens=[512] experiment.repeat=2",
        REAL,
    ),
    "real-serve-mooncake": Run(f"target=real experiment=serve {LOOPBACK} backend=mooncake_tcp model=tiny", SERVED),
}


@dataclass(frozen=True)
class Found:
    """What a run left behind."""

    seconds: float  # of CPU, its processes together: what a busy machine disturbs least
    parts: Mapping[str, Part]
    words: Mapping[str, str]


def execute(name: str, keep: Path | None = None) -> Found:
    """Make the run *name* in a temporary folder, and read its results.

    Raises:
        RuntimeError: it did not end well, or left no folder of results.
    """
    with tempfile.TemporaryDirectory(prefix="fixed-run-") as scratch:
        command = [
            sys.executable,
            "-m",
            "pdsim",
            "run",
            "--quiet",
            f"--config-dir={SETTINGS}",
            f"output={scratch}",
            *RUNS[name].overrides.split(),
        ]
        started = _cpu_seconds()
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)
        seconds = _cpu_seconds() - started
        folders = sorted(Path(scratch).iterdir())
        if ended.returncode or len(folders) != 1 or folders[0].suffix == ".incomplete":
            raise RuntimeError(
                f"{name} ended with {ended.returncode}: {(ended.stderr or ended.stdout).strip()[-800:]}"
            )
        if keep is not None:
            shutil.copytree(folders[0], keep / name)
        return Found(seconds, *load(folders[0]))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def record(path: Path, keep: Path | None, chosen: Sequence[str]) -> None:
    """Make all runs, or those of *chosen* if there are any, and write the fingerprints to *path*.

    Runs that are not made keep theirs, and ``commit`` names the state of the code that made the first recorded ones.
    """
    _known(chosen)
    old = json.loads(path.read_text()) if chosen else {"runs": {}}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [f' "commit": {json.dumps(old.get("commit", head.stdout.strip()))},', ' "runs": {']
    names = [name for name in RUNS if not chosen or name in chosen or name in old["runs"]]
    for name in names:
        if not chosen or name in chosen:
            fingerprints = execute(name, keep)
            print(f"{name:26} {fingerprints.seconds:6.1f} s of CPU", flush=True)
            parts = {key: reduced(name, key, part) for key, part in fingerprints.parts.items()}
            run: dict[str, Any] = {
                "seconds": round(fingerprints.seconds, 2),
                "words": fingerprints.words,
                "parts": parts,
            }
        else:
            run = old["runs"][name]
        kept = [f"    {json.dumps(key)}: {json.dumps(part)}" for key, part in run["parts"].items()]
        lines += [f"  {json.dumps(name)}: {{", f'   "seconds": {run["seconds"]:.2f},']
        lines += [f'   "words": {json.dumps(run["words"])},', '   "parts": {', ",\n".join(kept), "   }"]
        lines += ["  }" + "," * (name != names[-1])]
    path.write_text("\n".join(["{", *lines, " }", "}"]) + "\n")


def _known(chosen: Sequence[str]) -> None:
    unknown = [name for name in chosen if name not in RUNS]
    if unknown:
        raise SystemExit(f"fixed_runs: no run is called {unknown[0]}; there are {', '.join(RUNS)}")


def reduced(name: str, key: str, part: Part) -> dict[str, Any]:
    """Return the fingerprint of the part *key* of the run *name*, of the columns that every run has alike."""
    only = RUNS[name].only
    return fingerprint(part, None if only is None else only.get(key, ()))


def check(path: Path, before: Path | None, chosen: Sequence[str]) -> int:
    """Make the runs again, print what differs from *path*, and return the number of runs that do."""
    kept = json.loads(path.read_text())["runs"]
    _known(chosen)
    bad, seconds = 0, {"now": 0.0, "before": 0.0}
    for name in chosen or RUNS:
        if name not in kept:
            bad += 1
            print(f"DIFFERS {name}: not in {path}; record it at the commit to compare with", flush=True)
            continue
        try:
            fingerprints = execute(name)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            bad += 1
            print(f"DIFFERS {name}: {error}", flush=True)
            continue
        old = kept[name]
        lines = differences(name, old["parts"], fingerprints.parts, before)
        words = sum(fingerprints.words.get(key) != value for key, value in old["words"].items())
        bad += bool(lines)
        seconds["now"] += fingerprints.seconds
        seconds["before"] += old["seconds"]
        ratio = f"{fingerprints.seconds:5.1f} s of CPU, {fingerprints.seconds / old['seconds']:.2f} of before"
        print(f"{'DIFFERS' if lines else 'same   '} {name:26} {ratio}; words changed in {words} places", flush=True)
        for line in lines:
            print(f"        {line}", flush=True)
    gone = [name for name in kept if name not in RUNS]
    for name in gone:
        print(f"DIFFERS {name}: recorded, but no longer among the runs")
    if seconds["before"]:
        print(f"together {seconds['now']:.1f} s of CPU, {seconds['now'] / seconds['before']:.2f} of before")
    return bad + len(gone)


def differences(name: str, old: Mapping[str, Any], parts: Mapping[str, Part], before: Path | None) -> list[str]:
    """Return a line for each file and column of the run *name* that differs."""
    lines = [f"{key}: no longer there" for key in old if key not in parts]
    lines += [f"{key}: new" for key in parts if key not in old]
    earlier = load(before / name)[0] if before else {}
    for key in (key for key in old if key in parts):
        was, part = old[key], parts[key]
        now = reduced(name, key, part)
        if was["rows"] != now["rows"]:
            lines.append(f"{key}: {was['rows']} rows before, {now['rows']} now")
        lines += [f"{key}: column {c} no longer there" for c in was["columns"] if c not in now["columns"]]
        lines += [f"{key}: column {c} new" for c in now["columns"] if c not in was["columns"]]
        both = [c for c in was["columns"] if c in now["columns"]]
        for c in both:
            if was["columns"][c][0] != now["columns"][c][0]:
                lines.append(f"{key}: column {c}: type {was['columns'][c][0]} before, {now['columns'][c][0]} now")
        changed = [c for c in both if was["columns"][c][1] != now["columns"][c][1]]
        if changed:
            row = _first_row(name, was, part)
            lines += [f"{key}: column {c}: {_cells(c, row, part, earlier.get(key))}" for c in changed]
    return lines


def _first_row(name: str, was: Mapping[str, Any], part: Part) -> int | None:
    if part.rows == 1 and was["rows"] == 1:
        return 0
    if RUNS[name].only is not None or any(c not in part.values for c in was["columns"]):
        return None  # rows were sorted, or a column that is in the marks is missing
    marks, now = was.get("marks", ""), row_marks({c: part.values[c] for c in was["columns"]})
    pairs = range(0, max(len(marks), len(now)), 2)
    return next((i // 2 for i in pairs if marks[i : i + 2] != now[i : i + 2]), None)


def _cells(column: str, row: int | None, part: Part, earlier: Part | None) -> str:
    if row is None:
        return "values differ"
    values = part.values[column]
    now = repr(values[row]) if row < len(values) else "no such row"
    if earlier is None:
        return f"differs; the first row that differs is {row}, where it is {now} now"
    olds = earlier.values.get(column, [])
    first = next((i for i, (a, b) in enumerate(zip(olds, values, strict=False)) if repr(a) != repr(b)), None)
    if first is None:
        return f"other rows: {len(olds)} before, {len(values)} now"
    return f"row {first}: {olds[first]!r} before, {values[first]!r} now"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fixed_runs", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("record", "check"))
    parser.add_argument("file", type=Path, help="fingerprints, as JSON")
    parser.add_argument("--keep", type=Path, help="record: a new folder for the results themselves")
    parser.add_argument("--before", type=Path, help="check: the folder that record kept, to print old values")
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="NAME",
        help="this run only, the others as they are; repeatable",
    )
    options = parser.parse_args(argv)
    if options.command == "record":
        record(options.file, options.keep, options.run)
        return 0
    bad = check(options.file, options.before, options.run)
    print(f"{bad} of {len(options.run or RUNS)} runs differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
