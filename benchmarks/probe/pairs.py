# SPDX-License-Identifier: Apache-2.0
"""Pairs of a measured probe as samples of a calibration, a job for each set of processes that measured them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.probe.predictions import Key, measured, read
from pdsim.calibration.noise_floor import mean
from pdsim.calibration.samples import Sample, Samples, write


def to_samples(variants: Sequence[str], files: Sequence[Path], to: Path) -> None:
    """Write the pairs of *variants*, such as ``nixl/off``, in *files* to *to*: medians, and their mean over sets.

    Every second (count, size), in ascending order, is held out, writes and reads alike.
    """
    names = [tuple(each.split("/")) for each in variants]
    sets: dict[Key, list[list[float]]] = defaultdict(list)
    for file in files:
        for key, times in measured(read(file)[0])[0].items():
            if key[0] == "pair" and key[1:3] in names:
                sets[key[4:7]].append([time * 1e-6 for time in times])
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
    about = read(files[0])[1]
    said = {
        "kind": "measured",
        "source": f"{', '.join(variants)} of benchmarks.probe, the bare library",
        "command": f"python -m benchmarks.probe samples --to {to} {' '.join((*variants, *map(str, files)))}",
        "host": about["host"],
        "gpus": about["gpus"],
        "versions": f"{about['versions']}, mooncake-transfer-engine-cuda13 0.3.14, nixl-cu13 1.5.1",
        "date": about["date"].split()[0],
    }
    write(to, Samples(rows, said))
    print(f"{to}: {len(rows)} samples, {sum(row.held for row in rows)} held out")
