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

from collections.abc import Iterator
from typing import Any

import numpy as np

from pdsim.calibration.robust import bootstrap
from pdsim.core.files import data
from tools import tables

SAMPLES = data("benchmarks", "mooncake-calls.parquet")
RESAMPLES = 2000
LOWEST = 0.1
"""Of the rounds: where a moment without other programs is."""

COSTS = ("blocking", "batch", "descriptor", "beyond", "beside")
"""One call of one descriptor; a batch beside its descriptors; one more of these; a blocking call beyond one of them;
the mean of a blocking call while another thread computes in Python, where that was measured."""

Times = dict[str, dict[int, Any]]  # seconds of each round, by mode and number of descriptors


def costs() -> Iterator[tuple[str, int, dict[str, tuple[float, float, float]]]]:
    """Yield way, bytes of a descriptor, and of each of `COSTS` the least, the estimate and the most, in seconds.

    Of the rounds the lowest tenth is taken for each count, for other programs can only add to it; costs of batches
    are least squares over counts, relative to how long they take, and intervals 95 % of `RESAMPLES` drawings of
    rounds.
    """
    table: dict[tuple[str, int], dict[str, dict[int, list[float]]]] = {}
    for row in tables.rows(SAMPLES):
        times = table.setdefault((row["way"], int(row["size"])), {})
        times.setdefault(row["mode"], {}).setdefault(int(row["descriptors"]), []).append(float(row["seconds"]))
    for (way, size), times in table.items():
        arrays: Times = {mode: {count: np.array(each) for count, each in of.items()} for mode, of in times.items()}
        total = min(len(each) for of in arrays.values() for each in of.values())

        def again(random: np.random.Generator, arrays: Times = arrays, total: int = total) -> tuple[float, ...]:
            return _fitted(arrays, random.integers(0, total, total))

        low, high = bootstrap(again, RESAMPLES, seed=0)
        best = _fitted(arrays, np.arange(total))
        ends = zip(map(float, low), best, map(float, high), strict=True)
        spans = dict(zip(COSTS, ends, strict=True))
        yield way, size, {name: span for name, span in spans.items() if name != "beside" or "beside" in arrays}


def _fitted(times: Times, rounds: Any) -> tuple[float, ...]:
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
    for way, size, spans in costs():
        for name, span in spans.items():
            print(f"{way:11}{size:7}  {name:11}" + "".join(f"{1e6 * part:9.1f}" for part in span))


if __name__ == "__main__":
    main()
