# SPDX-License-Identifier: Apache-2.0
"""Keep the writes of handoffs that validations made, which `pdsim.calibration.handoff_fit` fits.

    python -m experiments.validate.records HOST=FOLDER ...

A folder is of ``pdsim validate`` with handoffs and `serve` over one engine on the host of that name; several of a
host follow one another.  Writes `RECORDS` and `TIMES` of `pdsim.calibration.handoff_fit` anew.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments import handoff
from experiments.validate.sealed import EXPECTED, MEASURED, read
from pdsim.calibration.handoff_fit import COLUMNS, JOB, RECORDS, STAMPS, TIMES, WAYS
from pdsim.config.typed import build
from pdsim.results import schema

__all__ = ["keep"]


def keep(runs: Mapping[str, Sequence[Path]]) -> None:
    """Write `RECORDS` and `TIMES` from the folders of ``validate`` of each host.

    Both files are overwritten.  Times are microseconds with one decimal.
    """
    records: list[list[object]] = [list(COLUMNS)]
    times: list[list[object]] = [["host", "engine", "what", "us"]]
    for host, folder in ((host, folder) for host, folders in runs.items() for folder in folders):
        engine = str(read(folder / EXPECTED)["backend"])
        records += [[host, engine, *row] for row in _writes(folder)]
        measured = read(folder / MEASURED)["measured"]
        mine = [value for value in measured if value["group"].startswith(("handoff", "serve"))]
        times += [[host, engine, value["label"], round(value["value"] * 1e6, 1)] for value in mine]
    for path, rows in ((RECORDS, records), (TIMES, times)):
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def _ways(folder: Path) -> list[str]:
    """Return what the jobs of *folder* hand over, one after the other; a way that came before is ``""``."""
    found: list[str] = []
    jobs = [part["jobs"] for part in read(folder / MEASURED).get("took", ()) if part["experiment"] == "handoff"]
    parts = [part for part in read(folder / EXPECTED)["design"] if part["experiment"] == "handoff"]
    for part, count in zip(parts, jobs or [1] * len(parts), strict=True):
        ways = build(handoff.HandoffOptions, part["options"], "experiment").ways()
        named = [f"{way.prefill}to{way.decode} {way.path}" if way.metadata == "policy" else "" for way in ways]
        found += count * named
    return found


def _writes(folder: Path) -> Iterator[list[object]]:
    """Yield the columns of each write of a handoff, but the first two.

    Jobs follow one another, and number from 1.
    """
    ways, job, before, earlier = _ways(folder), -1, 0, dict.fromkeys(WAYS, -1)
    for row in schema.read_table(folder / "transfers.parquet").to_pylist():
        if row["label"].count("/") != 2:
            continue
        number, _, path = row["label"].split("/")
        new = int(number) == 1 and before != 1 and row["source"] == "prefill0.0"
        job, before = job + new, int(number)
        way = ways[job] if job < len(ways) else "serve"  # which is the last
        if way in WAYS:
            earlier[way] += new
            stamps = [round(row[stamp] * 1e6, 1) for stamp in STAMPS]
            request = earlier[way] * JOB + before
            yield [way, request, path, row["source"], row["target"], row["nbytes"], *stamps]


def main(words: Sequence[str]) -> None:
    """Keep the records of *words*, each ``HOST=FOLDER``."""
    runs: dict[str, list[Path]] = {}
    for host, _, folder in (word.partition("=") for word in words):
        runs.setdefault(host, []).append(Path(folder))
    keep(runs)


if __name__ == "__main__":
    main(sys.argv[1:])
