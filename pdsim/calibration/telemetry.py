# SPDX-License-Identifier: Apache-2.0
"""Samples from what transfer engines count while a deployment runs: NIXL's telemetry and Mooncake's metrics.

Neither says how many descriptors a transfer had, so each is taken as one: what is fitted to them is the time of a
transfer by its bytes, and the cost of a descriptor stays with the model that was there before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import median, quantiles

from pdsim.calibration.samples import Sample

__all__ = ["mooncake", "nixl"]

_OPERATIONS = {"agent_tx_bytes": "write", "agent_rx_bytes": "read"}


def nixl(text: str) -> Iterator[Sample]:
    """Yield a row for each operation and number of bytes among the events that NIXL's ``telemetry_reader`` prints.

    An agent writes for each transfer that it posted its time, in microseconds, and then its bytes.  Times include
    the first contact of two agents, which can take 0.2 s.
    """
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    took = 0.0
    for name, value in re.findall(r"Event name: (\w+)\s+Value: (\d+)", text):
        if name == "agent_xfer_time":
            took = int(value) * 1e-6
        elif name in _OPERATIONS and took and int(value):
            times[_OPERATIONS[name], int(value)].append(took)
            took = 0.0
    for (operation, size), own in sorted(times.items()):
        low, _, high = quantiles(own, n=4, method="inclusive") if len(own) > 1 else own * 3
        yield Sample(
            blocks=1, size=size, operation=operation, seconds=median(own), low=low, high=high, repeats=len(own)
        )


def mooncake(text: str) -> Iterator[Sample]:
    """Yield a row for each interval that Mooncake logs with ``MC_TE_METRIC=1``: the mean of its transfers.

    The bytes of a transfer are the throughput, of 2**20 bytes a second, times the interval, over the transfers.  Its
    time is the mean over the bins of the histogram, of which the middle stands for each.  The log does not tell
    writes from reads; they are taken as writes.
    """
    rule = r"\(over last (\d+)s\): Throughput: ([\d.]+) MB/s \| Latency Distribution \(count=(\d+)\): (.*)"
    for seconds, rate, count, bins in re.findall(rule, text):
        size = round(float(rate) * 2**20 * int(seconds) / max(1, int(count)))
        shares = [
            (float(a), float(b), float(share)) for a, b, share in re.findall(r"(\d+)-(\d+)\D*:([\d.]+)%", bins)
        ]
        total = sum(share for *_, share in shares)
        if size and total:
            mean = sum((a + b) / 2 * share for a, b, share in shares) / total * 1e-6
            yield Sample(blocks=1, size=size, seconds=mean, low=mean, high=mean, repeats=int(count))
