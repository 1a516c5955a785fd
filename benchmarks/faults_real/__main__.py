"""The command line: run jobs and append to a CSV file, or print the table of what such files hold."""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.faults_real.plan import KINDS, Plan, draw
from benchmarks.faults_real.trial import CHECKS, Found, attempt
from pdsim.units import format_size

__all__ = ["main", "table"]

STORED = Path(__file__).resolve().parent.parent.parent / "data" / "benchmarks" / "faults_real.csv"
NUMBERS = ("ok", "failed", "nbytes", "probes", "quarantined", "suspected", "engine")
COLUMNS = (
    "seed",
    "engine_name",
    "handoff",
    "link",
    "prefill",
    "decode",
    *KINDS,
    "requests",
    *NUMBERS,
    *CHECKS,
    "seconds",
    "details",
)


def row(plan: Plan, found: Found) -> dict[str, object]:
    """Return what *found* says of *plan* as a row of the file, with `COLUMNS`."""
    return {
        "seed": plan.seed,
        "engine_name": plan.engine,
        "handoff": plan.handoff,
        "link": int(plan.link),
        "prefill": plan.prefill,
        "decode": plan.decode,
        **{kind: plan.injected[kind] for kind in KINDS},
        "requests": len(plan.requests),
        **{name: getattr(found, name) for name in NUMBERS},
        **{check: found.counts[check] for check in CHECKS},
        "seconds": round(found.seconds, 1),
        "details": " | ".join(found.details),
    }


def run(seeds: range, to: Path) -> int:
    """Run the jobs of *seeds* that *to* does not have, append their rows, and return how many show what must not be."""
    done = {int(each["seed"]) for each in read([to])} if to.exists() else set()
    bad = 0
    for seed in seeds:
        if seed in done:
            continue
        plan = draw(seed)
        found = attempt(plan)
        new = not to.exists()
        with to.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row(plan, found))
        bad += bool(found.counts)
        said = "; ".join(found.details) or "clean"
        print(f"seed {seed}: {plan.injected.total()} faults, {found.ok} ok, {found.failed} failed: {said}", flush=True)
    return bad


def read(files: Sequence[Path]) -> list[dict[str, str]]:
    """Return the rows of *files*, each seed once, the last row of it."""
    rows: dict[str, dict[str, str]] = {}
    for path in files:
        with path.open(newline="", encoding="utf-8") as file:
            rows |= {each["seed"]: each for each in csv.DictReader(file)}
    return list(rows.values())


def table(files: Sequence[Path] = (STORED,)) -> Iterator[str]:
    """Yield the lines of the table of docs/reliability.md: a column for each engine, and what was found in it."""
    rows = read(files)
    engines = sorted({each["engine_name"] for each in rows})
    sums = {name: Counter[str]() for name in engines}
    for each in rows:
        for key in (*KINDS, "requests", *NUMBERS, *CHECKS):
            sums[each["engine_name"]][key] += int(each[key])
        sums[each["engine_name"]]["jobs"] += 1
    yield "| | " + " | ".join(f"`{name}`" for name in engines) + " | all |"
    yield "|---|" + "---|" * (len(engines) + 1)
    columns = [*sums.values(), sum(sums.values(), Counter[str]())]
    yield _line("jobs", [each["jobs"] for each in columns])
    for kind in KINDS:
        yield _line(kind, [each[kind] for each in columns])
    yield _line("**faults injected**", [sum(each[kind] for kind in KINDS) for each in columns])
    yield _line("requests", [each["requests"] for each in columns])
    yield _line("of them served", [each["ok"] for each in columns])
    yield _line("bytes of KV compared", [format_size(each["nbytes"]) for each in columns])
    yield _line("failed, by a fault that explains it", [each["failed"] - each["suspected"] for each in columns])
    yield _line("by a rank silent for want of a processor", [each["suspected"] for each in columns])
    yield _line("probes served", [each["probes"] for each in columns])
    yield _line("pages in quarantine at the end", [each["quarantined"] for each in columns])
    yield _line("ranks ended by UCX, as known", [each["engine"] for each in columns])
    for check in CHECKS:
        yield _line(f"**{check.replace('_', ' ')}**", [each[check] for each in columns])


def _line(name: str, values: Sequence[object]) -> str:
    return f"| {name} | " + " | ".join(map(str, values)) + " |"


def main(arguments: Sequence[str]) -> int:
    """Run what *arguments* ask for; return 1 if a job shows what must not be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults_real")
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
