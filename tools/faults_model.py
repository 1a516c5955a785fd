# SPDX-License-Identifier: Apache-2.0
"""The campaign of simulated faults: scenarios of `experiment=faults` on many processes, in parts that add up.

    python -m tools.faults_model run --seeds 200000..210000 --workers 32 --limit 900 --to part.json
    python -m tools.faults_model table part.json ...

A part is one small file: which seeds were run, by which code and with which options, how requests ended, the CPU
time, and each violation.  It is written now and then, at the end, and when the run is told to stop, by the time
limit, Ctrl-C or SIGTERM; the same command goes on from there.  Parts of several machines, of seeds that do not
overlap, add up in `table`, those of other code in rows of their own.  It needs Python 3.11 or later with numpy,
msgspec and simpy, no more, and runs from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from experiments.faults import tries
from experiments.faults.campaign_parts import code
from experiments.faults.scenario import Tried
from experiments.faults.shrink import FaultTrial

__all__ = ["Part", "main", "ranges", "table"]

SAVED = 20.0
"""Seconds between two writings of a part."""

STORED = Path(__file__).resolve().parent.parent / "data" / "benchmarks" / "faults_model"
"""Where the parts lie that docs/reliability.md has a table of."""


@dataclass
class Part:
    """What the scenarios of *seeds*, as pairs of the first and the one after the last, have shown.

    Violations are rows of seed, invariant, what was found first, how often, and the scenario in one line.
    """

    code: str
    requests: int
    intensity: float
    seeds: list[list[int]] = field(default_factory=list)
    events: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    violations: list[list[Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Part:
        """Return the part that *path* holds.  Raise a `ValueError` that names *path* if it holds none."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a part of a campaign: {error}; name another file") from error

    def write(self, path: Path) -> None:
        """Replace *path* as a whole, so that a kill leaves this state or the one before."""
        lines = json.dumps(asdict(self), indent=None, separators=(",", ":")).replace(',"', ',\n"')
        new = path.with_name(path.name + ".new")
        new.write_text(lines + "\n", encoding="utf-8")
        new.replace(path)

    @property
    def count(self) -> int:
        """How many scenarios it has."""
        return sum(end - first for first, end in self.seeds)

    def add(self, tried: Tried) -> None:
        """Count *tried*; its seed is new to this part."""
        self.seeds = ranges([*self.seeds, [tried.seed, tried.seed + 1]])
        self.events += tried.events
        for status, times in tried.statuses.items():
            self.statuses[status] = self.statuses.get(status, 0) + times
        kinds = Counter(each.invariant for each in tried.violations)
        for invariant, times in kinds.items():
            what = next(str(each) for each in tried.violations if each.invariant == invariant)
            self.violations.append([tried.seed, invariant, what, times, tried.text])


def ranges(spans: Iterable[list[int]]) -> list[list[int]]:
    """Return *spans*, pairs of the first and the one after the last, in order and joined where they touch.

    Raise a `ValueError` if two overlap.
    """
    joined: list[list[int]] = []
    for first, end in sorted(spans):
        if joined and first < joined[-1][1]:
            raise ValueError(f"seed {first} is there twice; give each part seeds of its own")
        if joined and first == joined[-1][1]:
            joined[-1][1] = end
        else:
            joined.append([first, end])
    return joined


def run(part: Part, seeds: Iterable[int], workers: int, limit: float, to: Path) -> bool:
    """Run the scenarios of *seeds* that *part* lacks, at most *limit* seconds; return whether none is left."""
    done = {seed for first, end in part.seeds for seed in range(first, end)}
    left = [FaultTrial(seed, part.requests, part.intensity) for seed in seeds if seed not in done]
    began = saved = time.monotonic()
    before, spent = part.cpu_seconds, _cpu()
    running, count = tries(left, workers), 0
    try:
        for tried in running:
            part.add(tried)
            count += 1
            if tried.violations:
                print(f"seed {tried.seed}: {tried.violations[0]} [{tried.text}]", flush=True)
            now = time.monotonic()
            if now - saved > SAVED:
                saved = now
                part.write(to)
                print(f"{count} of {len(left)} scenarios, {count / (now - began):.1f}/s", flush=True)
            if now - began > limit:
                break
    finally:
        running.close()  # type: ignore[attr-defined]  # a generator: it ends its processes
        for process in active_children():
            process.join(10.0)
        part.cpu_seconds = round(before + _cpu() - spent, 1)
        part.write(to)
    print(
        f"{to}: {part.count} scenarios, {len(part.violations)} violations, {part.cpu_seconds} CPU seconds",
        flush=True,
    )
    return count == len(left)


def _cpu() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def table(files: Sequence[Path] = ()) -> Iterator[str]:
    """Yield the lines of a table of *files*, by default those of `STORED`: a row for the parts of each code."""
    parts: dict[tuple[str, int, float], list[Part]] = {}
    for path in files or sorted(STORED.glob("*.json")):
        part = Part.read(path)
        parts.setdefault((part.code, part.requests, part.intensity), []).append(part)
    yield "| code | seeds | scenarios | requests | of them served | CPU hours | scenarios with violations |"
    yield "|---|---|---|---|---|---|---|"
    for (sha, _, _), group in parts.items():
        seeds = ranges(span for part in group for span in part.seeds)
        ends = sum((Counter(part.statuses) for part in group), Counter[str]())
        bad = sorted({row[0] for part in group for row in part.violations})
        spans = ", ".join(f"{first} to {end - 1}" for first, end in seeds)
        total = sum(part.count for part in group)
        hours = sum(part.cpu_seconds for part in group) / 3600
        named = f"{len(bad)}: {', '.join(map(str, bad))}" if bad else "0"
        yield f"| {sha[:8]} | {spans} | {total:,} | {ends.total():,} | {ends['ok']:,} | {hours:.2f} | {named} |"


def main(arguments: Sequence[str]) -> int:
    """Run what *arguments* ask for; return 1 if something was violated, 3 if scenarios are left."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults_model")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run scenarios, or go on with those that a file lacks")
    running.add_argument("--seeds", required=True, help="FIRST..END, without END")
    running.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; all cores by default")
    running.add_argument("--limit", type=float, default=float("inf"), help="seconds after which to stop")
    running.add_argument("--requests", type=int, default=50, help="of each scenario")
    running.add_argument("--intensity", type=float, default=0.4, help="probability of each kind of fault")
    running.add_argument("--to", type=Path, required=True, help="the file of this part")
    printing = commands.add_parser("table", help="print what parts add up to")
    printing.add_argument("files", type=Path, nargs="*")
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "table":
            print("\n".join(table(asked.files)))
            return 0
        first, _, end = asked.seeds.partition("..")
        seeds = range(int(first), int(end))
        part = Part(code(), asked.requests, asked.intensity)
        if asked.to.exists():
            old = Part.read(asked.to)
            if (old.code, old.requests, old.intensity) != (part.code, part.requests, part.intensity):
                raise ValueError(f"{asked.to} is of other code or options; name another file")
            part = old
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        complete = run(part, seeds, asked.workers, asked.limit, asked.to)
    except KeyboardInterrupt:
        complete = False
    return 1 if part.violations else 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
