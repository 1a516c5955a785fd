# SPDX-License-Identifier: Apache-2.0
"""The file of results, a row for each job, and the table of docs/reliability.md."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdsim.core.units import format_size
from tools.faults_real.plan import KINDS
from tools.faults_real.trial import CHECKS

__all__ = ["COLUMNS", "NUMBERS", "STORED", "read", "table"]

STORED = Path(__file__).resolve().parent.parent.parent / "data" / "benchmarks" / "faults_real.csv"
NUMBERS = ("ok", "failed", "nbytes", "probes", "quarantined", "suspected", "engine")
_JOB = ("seed", "engine_name", "handoff", "link", "prefill", "decode")
COLUMNS = (*_JOB, *KINDS, "requests", *NUMBERS, *CHECKS, "seconds", "details")


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
            sums[each["engine_name"]][key] += int(each[key])
        sums[each["engine_name"]]["jobs"] += 1
        sums[each["engine_name"]]["seconds"] += round(float(each["seconds"]))
    yield "| | " + " | ".join(f"`{name}`" for name in engines) + " | all |"
    yield "|---|" + "---|" * (len(engines) + 1)
    columns = [*sums.values(), sum(sums.values(), Counter[str]())]
    yield _line("jobs", [each["jobs"] for each in columns])
    yield _line("hours", [f"{each['seconds'] / 3600:.2f}" for each in columns])
    yield _line("**faults injected**", [sum(each[kind] for kind in KINDS) for each in columns])
    yield _line("requests", [each["requests"] for each in columns])
    yield _line("requests served", [each["ok"] for each in columns])
    yield _line("requests failed, explained by a fault", [each["failed"] - each["suspected"] for each in columns])
    yield _line("KV compared", [format_size(each["nbytes"]) for each in columns])
    yield _line("probes served", [each["probes"] for each in columns])
    yield _line("pages in quarantine at the end", [each["quarantined"] for each in columns])
    checks = ", ".join(check.replace("_", " ") for check in CHECKS)
    yield _line(f"**{checks}**", [sum(each[check] for check in CHECKS) for each in columns])


def _line(name: str, values: Sequence[object]) -> str:
    return f"| {name} | " + " | ".join(map(str, values)) + " |"
