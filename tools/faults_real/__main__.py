# SPDX-License-Identifier: Apache-2.0
"""The command line: run jobs and append to a CSV file, or print the table of what such files hold."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.faults_real.plan import KINDS, Plan, draw
from tools.faults_real.table import COLUMNS, NUMBERS, STORED, read, table
from tools.faults_real.trial import CHECKS, JobReport, attempt

__all__ = ["main", "run"]


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


def run(seeds: range, to: Path) -> int:
    """Run the jobs of *seeds* that *to* has not, append their rows, and return how many show what must not be."""
    done = {int(each["seed"]) for each in read([to])} if to.exists() else set()
    bad = 0
    for seed in seeds:
        if seed in done:
            continue
        plan = draw(seed)
        outcome = attempt(plan)
        new = not to.exists()
        with to.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row(plan, outcome))
        bad += bool(outcome.counts)
        said = "; ".join(outcome.details) or "clean"
        print(
            f"seed {seed}: {outcome.injected.total()} faults, {outcome.ok} ok, {outcome.failed} failed: {said}",
            flush=True,
        )
    return bad


def main(arguments: Sequence[str]) -> int:
    """Run what *arguments* ask for; return 1 if a job shows what must not be."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults_real")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="inject faults, and append what was found to a file")
    running.add_argument("--seeds", required=True, help="FIRST:END, without END")
    running.add_argument("--to", type=Path, default=STORED)
    printing = commands.add_parser("table", help="print the table of files that were written so")
    printing.add_argument("files", type=Path, nargs="*", default=[STORED])
    asked = parser.parse_args(arguments)
    if asked.command == "table":
        print("\n".join(table(asked.files)))
        return 0
    first, _, end = asked.seeds.partition(":")
    return int(run(range(int(first), int(end)), asked.to) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
