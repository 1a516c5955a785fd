# SPDX-License-Identifier: Apache-2.0
"""Fit `call` of conf/backend/mooncake.yaml: a blocking call of Mooncake beyond one more descriptor of a batch.

    python -m tools.mooncake_calls

The samples were timed by the real library over TCP on loopback, and in the emulated machine of
`backends.emulation.guest` over TCP and over verbs (soft-RoCE), for several counts and sizes in turns: *calls* are
`transfer_sync_write` one after the other, *batch* is one `batch_transfer_sync_write` of as many descriptors, and
*beside* are calls while another thread of the process computes in Python.

The guest's TCP says how slow its processors are: it is the same library as on the host.  Mooncake's threads poll,
and there are more of them than processors of the guest, so that a call over verbs waits for time slices there: its
seconds bound nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdsim.core.repository import data
from tools import tables

SAMPLES = data("benchmarks", "mooncake-calls.parquet")
RESAMPLES = 2000
LOWEST = 0.1
"""Of the rounds: where a moment without other programs is."""

Span = tuple[float, float, float]


class CallSample(NamedTuple):
    """Seconds of so many *descriptors* of *size* bytes in one round; the mode is calls, batch or beside."""

    way: str
    round: int
    mode: str
    descriptors: int
    size: int
    seconds: float


class CallCost(NamedTuple):
    """Seconds, each the least, the estimate and the most (95 % of resampled rounds), for descriptors of *size*."""

    way: str
    size: int
    blocking: Span  # one call of one descriptor, among such calls
    batch: Span  # what a batch takes beside its descriptors
    descriptor: Span  # one more in a batch
    beyond: Span  # what a blocking call takes beyond such a descriptor
    beside: (
        Span | None
    )  # the mean of a blocking call while another thread computes in Python, where that was measured


def _read(path: Path) -> list[CallSample]:
    return [
        CallSample(
            row["way"],
            int(row["round"]),
            row["mode"],
            int(row["descriptors"]),
            int(row["size"]),
            float(row["seconds"]),
        )
        for row in tables.rows(path)
    ]


def costs(rows: Iterable[CallSample], seed: int = 0) -> Iterator[CallCost]:
    """Yield what each way costs with descriptors of each size.

    Of the rounds the lowest tenth is taken for each count, for other programs can only add to it; costs of batches
    are least squares over counts, relative to how long they take, and intervals 95 % of `RESAMPLES` drawings of
    rounds.
    """
    table: dict[tuple[str, int], dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        times = table.setdefault((row.way, row.size), {})
        times.setdefault(row.mode, {}).setdefault(row.descriptors, []).append(row.seconds)
    rng = np.random.default_rng(seed)
    for (way, size), times in table.items():
        arrays = {
            mode: {count: np.array(intervals) for count, intervals in of.items()} for mode, of in times.items()
        }
        total = min(len(intervals) for of in arrays.values() for intervals in of.values())
        drawn = np.array([_fitted(arrays, rng.integers(0, total, total)) for _ in range(RESAMPLES)])
        spans = np.stack([np.quantile(drawn, (0.025, 0.975), axis=0)[0], _fitted(arrays, np.arange(total)),
                          np.quantile(drawn, 0.975, axis=0)])  # fmt: skip
        intervals = [(float(low), float(best), float(high)) for low, best, high in spans.T]
        yield CallCost(
            way,
            size,
            intervals[0],
            intervals[1],
            intervals[2],
            intervals[3],
            intervals[4] if "beside" in arrays else None,
        )


def _fitted(times: dict[str, dict[int, Any]], rounds: Any) -> tuple[float, ...]:
    counts = np.array(sorted(times["batch"]), dtype=float)
    calls, batch = (
        np.array([np.quantile(times[mode][int(count)][rounds], LOWEST) for count in counts])
        for mode in ("calls", "batch")
    )
    parts = np.stack([1 / batch, counts / batch], axis=1)
    fixed, each = np.linalg.lstsq(parts, np.ones(len(counts)), rcond=None)[0]
    blocking = float(np.median((calls / counts)[counts > 1]))
    of = times.get("beside", {})
    beside = float(np.mean([values[rounds].mean() / count for count, values in of.items()])) if of else 0.0
    return blocking, float(fixed), float(each), blocking - float(each), beside


def main() -> None:
    """Print what the samples say."""
    print("us: least, estimate, most; beside: the mean while another thread computes in Python")
    for cost in costs(_read(SAMPLES)):
        for name, span in zip(cost._fields[2:], cost[2:], strict=True):
            if span:
                shown = "".join(f"{1e6 * part:9.1f}" for part in span)
                print(f"{cost.way:11}{cost.size:7}  {name:11}{shown}")


if __name__ == "__main__":
    main()
