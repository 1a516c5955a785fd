# SPDX-License-Identifier: Apache-2.0
"""Faults injected into real serving jobs: Mooncake and NIXL over TCP, at random moments that follow from a seed.

    python -m tools.faults_real run --seeds 0:40 [--to data/benchmarks/faults_real.csv]
    python -m tools.faults_real run --seeds 0:4000 --kind leave --loopback --workers 8 --to FILE
    python -m tools.faults_real table [FILE ...]

Each seed is one job of `experiment=serve`.  `tools.faults_trial` draws its requests and faults, runs it, and checks
how each request and each rank ended, pages, and what is left on the machine; a row of a CSV file holds the counts.
Seeds that a file has are not run again, and the rows of several files add up.  A link takes root.  A job keeps two
or three cores busy.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pdsim.core.units import format_size
from tools.faults_trial import CHECKS, KINDS, JobReport, Plan, attempt, draw
from tools.tables import markdown

STORED = Path(__file__).resolve().parent.parent / "data" / "benchmarks" / "faults_real.csv"
NUMBERS = ("ok", "failed", "nbytes", "probes", "quarantined", "suspected", "engine")
_JOB = ("seed", "engine_name", "handoff", "link", "prefill", "decode")
COLUMNS = (*_JOB, *KINDS, "requests", *NUMBERS, *CHECKS, "seconds", "details")


def row(plan: Plan, outcome: JobReport) -> dict[str, object]:
    """Return what *outcome* says of *plan* as a row of the file, with `COLUMNS`."""
    return {
        "seed": plan.seed,
        "engine_name": plan.engine,
        "handoff": plan.handoff,
        "link": int(plan.link),
        "prefill": plan.prefill,
        "decode": plan.decode,
        **{kind: outcome.injected[kind] for kind in KINDS},
        "requests": len(plan.requests),
        **{name: getattr(outcome, name) for name in NUMBERS},
        **{check: outcome.counts[check] for check in CHECKS},
        "seconds": round(outcome.seconds, 1),
        "details": " | ".join(outcome.details),
    }


def run(seeds: range, to: Path, kind: str = "", *, loopback: bool = False, workers: int = 1) -> int:
    """Run the jobs of *seeds* that *to* has not, append their rows, and return how many show what must not be.

    With *kind*, one of `KINDS`, only jobs with such a fault are run; with *loopback*, only those without a link.
    *workers* jobs run at a time.
    """
    done = {int(each["seed"]) for each in read([to])} if to.exists() else set()
    plans = [plan for plan in map(draw, seeds) if plan.seed not in done and not (loopback and plan.link)]
    plans = [plan for plan in plans if not kind or plan.injected()[kind]]
    bad = 0
    with ProcessPoolExecutor(workers) as pool:
        for plan, outcome in zip(plans, pool.map(attempt, plans), strict=True):
            new = not to.exists()
            with to.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row(plan, outcome))
            bad += bool(outcome.counts)
            said = "; ".join(outcome.details) or "clean"
            faults = f"{outcome.injected.total()} faults, {outcome.ok} ok, {outcome.failed} failed"
            print(f"seed {plan.seed}: {faults}: {said}", flush=True)
    return bad


def read(files: Sequence[Path]) -> list[dict[str, str]]:
    """Return the rows of *files*, each seed once, the last row of it."""
    rows: dict[str, dict[str, str]] = {}
    for path in files:
        with path.open(newline="", encoding="utf-8") as file:
            rows |= {each["seed"]: each for each in csv.DictReader(file)}
    return list(rows.values())


def table(files: Sequence[Path] = (STORED,)) -> Iterator[str]:
    """Yield the lines of the table of docs/reliability.md: a column for each engine."""
    rows = read(files)
    engines = sorted({each["engine_name"] for each in rows})
    sums = {name: Counter[str]() for name in engines}
    for each in rows:
        for key in (*KINDS, "requests", *NUMBERS, *CHECKS):
            sums[each["engine_name"]][key] += int(each.get(key) or 0)  # a file may be older than a kind
        sums[each["engine_name"]]["jobs"] += 1
        sums[each["engine_name"]]["seconds"] += round(float(each["seconds"]))
    columns = [*sums.values(), sum(sums.values(), Counter[str]())]
    checks = ", ".join(check.replace("_", " ") for check in CHECKS)
    lines: dict[str, Callable[[Counter[str]], object]] = {
        "jobs": lambda of: of["jobs"],
        "hours": lambda of: f"{of['seconds'] / 3600:.2f}",
        "**faults injected**": lambda of: sum(of[kind] for kind in KINDS),
        "requests": lambda of: of["requests"],
        "requests served": lambda of: of["ok"],
        "requests failed, explained by a fault": lambda of: of["failed"] - of["suspected"],
        "KV compared": lambda of: format_size(of["nbytes"]),
        "probes served": lambda of: of["probes"],
        "pages in quarantine at the end": lambda of: of["quarantined"],
        f"**{checks}**": lambda of: sum(of[check] for check in CHECKS),
    }
    body = [[name, *map(of, columns)] for name, of in lines.items()]
    yield from markdown(["", *(f"`{name}`" for name in engines), "all"], body)


def main(arguments: Sequence[str]) -> int:
    """Run what *arguments* ask for; return 1 if a job shows what must not be."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults_real")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="inject faults, and append what was found to a file")
    running.add_argument("--seeds", required=True, help="FIRST:END, without END")
    running.add_argument("--to", type=Path, default=STORED)
    running.add_argument("--kind", default="", choices=KINDS, help="only jobs with such a fault")
    running.add_argument("--loopback", action="store_true", help="only jobs without a link")
    running.add_argument("--workers", type=int, default=1, help="jobs at a time")
    printing = commands.add_parser("table", help="print the table of files that were written so")
    printing.add_argument("files", type=Path, nargs="*", default=[STORED])
    asked = parser.parse_args(arguments)
    if asked.command == "table":
        print("\n".join(table(asked.files)))
        return 0
    first, _, end = asked.seeds.partition(":")
    seeds = range(int(first), int(end))
    return int(run(seeds, asked.to, asked.kind, loopback=asked.loopback, workers=asked.workers) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
