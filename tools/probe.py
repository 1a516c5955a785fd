# SPDX-License-Identifier: Apache-2.0
"""Samples of bare Mooncake and NIXL on two GPUs, for the calibrations of libraries without pdsim around them.

    python -m tools.probe samples TO VARIANT ... FILE ...     # such as nixl/off; a set of processes in each file

The measured sets are `data/benchmarks/probe-*.parquet`, with times in microseconds; the predictions that were sealed
before them are `data/benchmarks/probe-*-predicted.csv.gz`.  The programs that measured are in the history.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from pdsim.calibration.samples import Sample, Samples, mean, write
from tools import tables

Pair = tuple[str, str, str, str, str]  # library, variant, operation, descriptors, size


def pairs(path: Path) -> dict[Pair, list[float]]:
    """Return the seconds of every repeat of each pair in *path*, from the start of preparing to the end."""
    repeats: dict[tuple[Pair, str], list[dict[str, str]]] = defaultdict(list)
    for row in tables.rows(path):
        if row["section"] == "pair" and not row["note"]:
            names = ("library", "variant", "operation", "descriptors", "size")
            library, variant, operation, count, size = (row[name] for name in names)
            repeats[(library, variant, operation, count, size), row["repeat"]].append(row)
    times: dict[Pair, list[float]] = defaultdict(list)
    for (pair, _), flows in repeats.items():
        us = max(float(row["total"]) for row in flows) - min(float(row["start"]) for row in flows)
        times[pair].append(us * 1e-6)
    return times


def samples(variants: Sequence[str], files: Sequence[Path], to: Path) -> None:
    """Write the pairs of *variants*, such as ``nixl/off``, in *files* to *to*: medians, and their mean over sets.

    Every second (count, size), in ascending order, is held out, writes and reads alike.
    """
    sets: dict[tuple[str, str, str], list[list[float]]] = defaultdict(list)
    for file in files:
        for (library, variant, *pair), times in pairs(file).items():
            if f"{library}/{variant}" in variants:
                sets[pair[0], pair[1], pair[2]].append(times)
    held = sorted({(int(count), int(size)) for _, count, size in sets})[1::2]
    rows = []
    for (operation, count, size), jobs in sorted(sets.items(), key=lambda item: (item[0][0] == "read", item[0])):
        medians = tuple(median(times) for times in jobs)
        low, high = np.percentile([time for times in jobs for time in times], (25.0, 75.0))
        rows.append(
            Sample(
                blocks=int(count),
                size=int(size),
                operation=operation,
                layout="scattered",
                seconds=mean(medians) if len(medians) > 1 else medians[0],
                low=float(low),
                high=float(high),
                repeats=sum(map(len, jobs)),
                per_job=medians if len(medians) > 1 else (),
                held=(int(count), int(size)) in held,
            )
        )
    about = dict(line.split(": ", 1) for line in tables.comments(files[0]))
    said = {
        "kind": "measured",
        "source": f"{', '.join(variants)} of tools.probe, the bare library",
        "command": f"python -m tools.probe samples {to} {' '.join((*variants, *map(str, files)))}",
        "host": about["host"],
        "gpus": about["gpus"],
        "versions": f"{about['versions']}, mooncake-transfer-engine-cuda13 0.3.14, nixl-cu13 1.5.1",
        "date": about["date"].split()[0],
    }
    write(to, Samples(rows, said))
    print(f"{to}: {len(rows)} samples, {sum(row.held for row in rows)} held out")


def main(words: Sequence[str]) -> None:
    """Write the samples that *words* ask for."""
    if len(words) < 4 or words[0] != "samples":
        raise SystemExit(__doc__)
    files = [Path(word) for word in words[2:] if Path(word).is_file()]
    samples([word for word in words[2:] if Path(word) not in files], files, Path(words[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
