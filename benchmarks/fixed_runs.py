# SPDX-License-Identifier: Apache-2.0
"""Compare the results of fixed runs before and after a change that is to leave every simulation as it was.

    python -m benchmarks.fixed_runs record data/benchmarks/fixed_runs.json   # at the commit to compare with
    python -m benchmarks.fixed_runs check data/benchmarks/fixed_runs.json    # now; exits with 1 if anything differs

Each run is one `python -m pdsim run` of this checkout, in a folder of its own.  Each column of its Parquet and CSV
tables and each number in its JSON files is hashed, with its type and its values in order.  Words (titles,
definitions, notes, evidence) and what is different in every run (`VOLATILE`) are left out.  Runs on real engines
compare what does not depend on time: types, and the columns named in `REAL` or `SERVED`, in sorted order.
"""

import argparse
import csv
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 300  # seconds of one run, before it counts as stuck

Marks = dict[str, str]  # "transfers.parquet bytes": type and hash of a column

VOLATILE = {
    "run.json": (
        *("schema", "command", "overrides", "pdsim", "packages", "git", "host", "started", "wall_seconds"),
        "evidence",
    ),
    "summary.json": ("schema", "events", "notes"),
    "summary.json:metrics": ("scenarios_per_s", "events"),
    "expectations.json": ("written", "commit", "sha256", "system", "design", "evidence"),
}
"""Fields of JSON files that are not compared: versions, dates, folders, what the simulation cost, and words."""

SERVED = {
    "transfers.parquet": ("engine", "operation", "source", "target", "label", "status", "nbytes"),
    "requests.parquet": (
        *("id", "arrival", "input", "output", "patience", "prefill", "decode", "nbytes", "status", "path"),
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
    "serve-state-aborts": Run(f"experiment=serve {MI300X} model=qwen3-next-80b-a3b workload.aborts=0.2 {SMALL}"),
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


def marks(folder: Path, only: Mapping[str, Sequence[str]] | None) -> Marks:
    """Return the fingerprint of each column of the results in *folder*; of a real run the values of *only* alone."""
    made: Marks = {}
    for path in sorted(folder.iterdir()):
        for part, columns in _parts(path):
            kept = {
                name: values for name, (_, values) in columns.items() if only is None or name in only.get(part, ())
            }
            if only is not None and kept:  # ranks are served in any order
                rows = sorted(zip(*kept.values(), strict=True), key=repr)
                kept = {name: [row[i] for row in rows] for i, name in enumerate(kept)}
            for name, (kind, _) in columns.items():
                digest = hashlib.sha256(repr(kept[name]).encode()).hexdigest()[:16] if name in kept else ""
                made[f"{part} {name}"] = f"{kind} {digest}".strip()
    return made


Columns = dict[str, tuple[str, Sequence[Any]]]  # type and values by name


def _parts(path: Path) -> Iterator[tuple[str, Columns]]:
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        named = zip(table.schema, table.columns, strict=True)
        yield path.name, {field.name: (str(field.type), column.to_pylist()) for field, column in named}
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            yield path.name, _table(list(csv.reader(file))[1:])
    elif path.suffix == ".json":
        data = json.loads(path.read_text())
        data = {key: value for key, value in data.items() if key not in VOLATILE.get(path.name, ())}
        if path.name == "summary.json":
            volatile = VOLATILE["summary.json:metrics"]
            metrics = {name: one["value"] for name, one in data.pop("metrics").items() if name not in volatile}
            yield "summary.json:metrics", _leaves(metrics)
            for number, table in enumerate(data.pop("tables")):
                columns = _table(table["rows"]).items()
                prose = [
                    at for at, (_, cells) in columns if any(isinstance(cell, str) and " " in cell for cell in cells)
                ]
                yield f"summary.json:table {number}", {at: cells for at, cells in columns if at not in prose}
            for name in ("ranks", "links", "pools"):
                leaves = sorted((key, cell) for key, (_, (cell,)) in _leaves(data.pop(name)).items())
                names, values = zip(*leaves, strict=True) if leaves else ((), ())
                yield f"summary.json:{name}", {"name": ("json", names), "value": ("json", values)}
        yield path.name, _leaves(data)
    elif path.suffix not in (".yaml", ".html", ".svg", ".png"):  # what was asked for, and pages of what others hold
        raise ValueError(f"{path.name} is a file of an unknown kind: say in fixed_runs.py how it is compared")


def _table(rows: Sequence[Sequence[Any]]) -> Columns:
    return {str(at): ("json", column) for at, column in enumerate(zip(*rows, strict=True))}


def _leaves(data: Any, at: str = "") -> Columns:
    below = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    if not below or (isinstance(data, list) and not any(isinstance(each, dict | list) for each in data)):
        return {at: ("json", [data])}
    return {key: leaf for name, each in below for key, leaf in _leaves(each, f"{at}.{name}".lstrip(".")).items()}


def execute(name: str) -> Marks:
    """Make the run *name* in a temporary folder, and return the fingerprints of its results.

    Raise a `RuntimeError` if it does not end well, or leaves no folder of results.
    """
    with tempfile.TemporaryDirectory(prefix="fixed-run-") as scratch:
        words = [f"--config-dir={SETTINGS}", f"output={scratch}", *RUNS[name].overrides.split()]
        command = [sys.executable, "-m", "pdsim", "run", "--quiet", *words]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)
        folders = sorted(Path(scratch).iterdir())
        if ended.returncode or len(folders) != 1 or folders[0].suffix == ".incomplete":
            said = (ended.stderr or ended.stdout).strip()[-800:]
            raise RuntimeError(f"{name} ended with {ended.returncode}: {said}")
        return marks(folders[0], RUNS[name].only)


def record(path: Path, chosen: Sequence[str]) -> None:
    """Make the runs *chosen*, and write their fingerprints to *path*, where the others keep theirs."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    made = {name: execute(name) if name in chosen else kept[name] for name in RUNS}
    path.write_text(json.dumps(made, indent=0) + "\n")


def check(path: Path, chosen: Sequence[str]) -> int:
    """Make the runs *chosen* again, print what differs from *path*, and return the number of runs that do."""
    kept, bad = json.loads(path.read_text()), 0
    for name in chosen:
        try:
            lines = differences(kept.get(name, {}), execute(name))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            lines = [str(error)]
        bad += bool(lines)
        print("\n        ".join([f"{'DIFFERS' if lines else 'same   '} {name}", *lines]), flush=True)
    return bad


def differences(before: Marks, now: Marks) -> list[str]:
    """Return a line for each column that differs: gone, new, or what it was and is."""
    return [
        f"{key}: {before.get(key, 'not there')} before, {now.get(key, 'not there')} now"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fixed_runs", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("record", "check"))
    parser.add_argument("file", type=Path, help="fingerprints, as JSON")
    parser.add_argument("--run", action="append", choices=RUNS, help="this run only; repeatable")
    options = parser.parse_args(argv)
    chosen = options.run or list(RUNS)
    if options.command == "record":
        record(options.file, chosen)
        return 0
    bad = check(options.file, chosen)
    print(f"{bad} of {len(chosen)} runs differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
