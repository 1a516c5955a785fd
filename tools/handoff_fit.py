# SPDX-License-Identifier: Apache-2.0
"""Fit what hosts and GPUs do in a handoff: `copies`, `wake`, `idle_wake` of `conf/hw/8xh200.yaml`.

Fitted are parts of handoffs, and of requests, over `nvlink` on the hosts of `FITTED`.  Left out are the other
engines there, all of the other hosts, and the times of staged handoffs as a whole.

- A *gather*: from TP 1 to TP 2 a queue has two blocks to send, and gathers the second when the write of the first is
  over; so it takes from there to the second write.
- Two *scatters*: from TP 2 to TP 1 both blocks are scattered by one rank, one after the other, between the end of
  the last write and the first of the next handoff.  Messages between the ranks take the rest, the same for all
  sizes.
- A *context switch*: from TP 2 to TP 1 two ranks share the GPU that they gather on, a few large descriptors each,
  between the write of the metadata and that of rank 0's block.
- *Waking up*: a *whole* handoff from TP 2 to TP 2 is a message to rank 1, its forward, which takes no time here, its
  write, the notification, and rank 1's message to its leader.  Beside the write these are two messages, and four
  times that a program has something to act upon.
- *Waking the copy engines*: from posting to the end of a write of `serve`, less its bytes and less the same of whole
  handoffs, which follow one another.
- *Waking an idle program*: what the median time to first token of `serve` is longer than the model with all of the
  above says.

Records hold a write a row, in microseconds after the start of its job; requests of further jobs count from `JOB` on.
The first request of each size warmed up, in each job.  ``pdsim refit handoffs`` fits, and compares with what was not
fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pdsim.core.repository import data
from pdsim.hardware.machine import Copies
from tools import tables

__all__ = [
    "COLUMNS",
    "FITTED",
    "JOB",
    "PIECE",
    "RECORDS",
    "STAMPS",
    "TIMES",
    "TOKEN",
    "WAYS",
    "CopySample",
    "bootstrap",
    "copy_wakes",
    "fit_copies",
    "fit_idle_wake",
    "fit_wake",
    "is_fitted",
    "medians",
    "modelled",
    "samples",
    "times",
    "waking",
]

RECORDS = data("benchmarks", "handoffs-2xh200.parquet")
TIMES = data("benchmarks", "handoff-times-2xh200.csv")
WAYS = ("1to2 staged", "2to1 staged", "2to2 whole", "serve")
"""Whose writes are kept; of slices nothing is fitted here."""

FITTED = ("nvlink", ("A", "C"))
"""Engine and hosts."""

PIECE = 1024  # bytes: of Llama-3.1-8B four of the eight KV heads, 128 bf16 each
PLANES = 64
TOKEN = PLANES * PIECE  # bytes of a block: K and V of 32 layers
JOB = 1000
CALLS = {"gather": 1, "scatter": 2, "switch": 1}  # that a sample contains
MESSAGES, WAKES = 2, 4  # in a whole handoff, beside the write of rank 1
STAMPS = ("submitted", "prepared", "posted", "completed", "seen")
COLUMNS = ("host", "engine", "way", "request", "path", "source", "target", "nbytes", *STAMPS)
Key = tuple[str, str, str, int]  # host, engine, kind, bytes


class CopySample(NamedTuple):
    """Seconds that some copies of equal size took."""

    host: str
    engine: str
    kind: str
    nbytes: int  # of one of them
    seconds: float


# --- samples ------------------------------------------------------------------------------------------------------


def _requests(way: str) -> dict[tuple[str, str], dict[int, list[dict[str, str]]]]:
    # Keys are host and engine, then the number of the request; both are in ascending order.
    by_host: dict[tuple[str, str], dict[int, list[dict[str, str]]]] = {}
    for row in sorted((row for row in tables.rows(RECORDS) if row["way"] == way), key=_submitted):
        requests = by_host.setdefault((row["host"], row["engine"]), {})
        requests.setdefault(int(row["request"]), []).append(row)
    return {key: dict(sorted(requests.items())) for key, requests in sorted(by_host.items())}


def _warm(requests: Mapping[int, Sequence[Mapping[str, str]]]) -> list[int]:
    seen: set[tuple[int, int]] = set()
    warm = []
    for number, rows in requests.items():
        key = number // JOB, max(int(row["nbytes"]) for row in rows)
        if key in seen:
            warm.append(number)
        seen.add(key)
    return warm


def samples() -> list[CopySample]:
    """Return what the records say of copies, warm-ups left out.

    One sample for each warm request that has what its kind needs; see the list above for where each begins and ends.
    """
    rows = []
    for way, kinds in (("1to2 staged", ("gather",)), ("2to1 staged", ("scatter", "switch"))):
        for (host, engine), writes in _requests(way).items():
            rows += [CopySample(host, engine, kind, *each) for kind in kinds for each in _copies(kind, writes)]
    return rows


def _copies(kind: str, writes: Mapping[int, Sequence[Mapping[str, str]]]) -> Iterator[tuple[int, float]]:
    # The module's docstring says where each kind begins and ends.
    for number in _warm(writes):
        blocks = [row for row in writes[number] if row["path"] == "staged"]
        nbytes = int(blocks[0]["nbytes"])
        if kind == "gather":
            yield nbytes, (_submitted(blocks[1]) - float(blocks[0]["seen"])) * 1e-6
        elif kind == "switch":
            metadata = max(float(row["seen"]) for row in writes[number] if row["path"] == "metadata")
            first = min(_submitted(row) for row in blocks if row["source"] == "prefill0.0")
            if first > metadata:  # else the metadata went after the block
                yield nbytes, (first - metadata) * 1e-6
        elif following := writes.get(number + 1):
            last = max(float(row["seen"]) for row in blocks)
            yield nbytes, (min(map(_submitted, following)) - last) * 1e-6


def _submitted(row: Mapping[str, str]) -> float:
    return float(row["submitted"])


def is_fitted(host: str, engine: str) -> bool:
    """Return whether what *engine* took on *host* is fitted to."""
    return engine == FITTED[0] and host in FITTED[1]


# --- copies --------------------------------------------------------------------------------------------------------


def medians(of: Iterable[CopySample]) -> dict[Key, float]:
    """Return the median seconds by host, engine, kind and bytes."""
    groups: dict[Key, list[float]] = {}
    for host, engine, kind, nbytes, seconds in of:
        groups.setdefault((host, engine, kind, nbytes), []).append(seconds)
    return {key: float(np.median(values)) for key, values in groups.items()}


def _pieces(kind: str, nbytes: int) -> int:
    return PLANES if kind == "switch" else CALLS[kind] * nbytes // PIECE


def fit_copies(of: Mapping[Key, float], memory_rate: float, launch: float) -> tuple[Copies, float]:
    """Return the `Copies` of least squares of relative errors, and the seconds of messages beside two scatters.

    *memory_rate* is of the GPU's memory, in bytes/s, and *launch* the seconds of a kernel launch, which are known.

    The unknowns are those of `Copies` and one more for the messages.  Bytes and kernel launches are subtracted
    first: a copy reads and writes each byte.  *of* is as `medians` returns it, seconds by host, engine, kind and
        bytes.
    """
    rows = []
    for (_, _, kind, nbytes), seconds in of.items():
        known = CALLS[kind] * (2 * nbytes / memory_rate + launch)
        each = [CALLS[kind], _pieces(kind, nbytes), kind == "switch", kind == "scatter", seconds - known]
        rows.append(np.array(each) / seconds)
    table = np.array(rows)
    scale = np.abs(table[:, :4]).max(axis=0)
    call, descriptor, switch, between = map(float, np.linalg.lstsq(table[:, :4] / scale, table[:, 4])[0] / scale)
    return Copies(call=call, descriptor=descriptor, context_switch=switch), between


def modelled(copies: Copies, between: float, memory_rate: float, launch: float, kind: str, nbytes: int) -> float:
    """Return the seconds of a sample of *kind* with blocks of *nbytes*.

    The inverse of `fit_copies`: it adds again what that subtracted.
    """
    count = CALLS[kind]
    each = copies.busy(_pieces(kind, nbytes) // count, kind == "switch") + 2 * nbytes / memory_rate + launch
    return count * each + (between if kind == "scatter" else 0.0)


def bootstrap(
    of: Sequence[CopySample], memory_rate: float, launch: float, runs: int = 400
) -> list[tuple[float, float]]:
    """Return the 95 % intervals of call, descriptor and context switch.

    Samples of each host, kind and size are drawn again, *runs* times.

    Seconds; drawn from seed 0, so the same samples give the same intervals.
    """
    random = np.random.default_rng(0)
    groups: dict[Key, list[CopySample]] = {}
    for sample in of:
        groups.setdefault(sample[:4], []).append(sample)
    fits = []
    for _ in range(runs):
        drawn = [group[i] for group in groups.values() for i in random.integers(0, len(group), len(group))]
        copies, _ = fit_copies(medians(drawn), memory_rate, launch)
        fits.append((copies.call, copies.descriptor, copies.context_switch))
    return [(float(low), float(high)) for low, high in np.percentile(fits, (2.5, 97.5), axis=0).T]


# --- waking up -----------------------------------------------------------------------------------------------------


def times() -> dict[tuple[str, str, str], float]:
    """Return the seconds of each handoff, and of `serve`, by host, engine and label."""
    return {(row["host"], row["engine"], row["what"]): float(row["us"]) * 1e-6 for row in tables.rows(TIMES)}


def waking() -> dict[tuple[str, str, int], float]:
    """Return by host, engine and tokens what a handoff from TP 2 to TP 2 takes beside the write of rank 1: medians.

    Seconds: of a handoff as a whole, less the median time from posting the write of rank 1 to the end of the last
        one.
    """
    whole, woken = times(), {}
    for (host, engine), writes in _requests("2to2 whole").items():
        spans: dict[int, list[float]] = {}
        for rows in (writes[number] for number in _warm(writes)):
            last = [row for row in rows if row["source"] == "prefill0.1"]
            tokens = sum(int(row["nbytes"]) for row in last) // TOKEN
            seconds = (max(float(row["seen"]) for row in rows) - min(map(_submitted, last))) * 1e-6
            spans.setdefault(tokens, []).append(seconds)
        for tokens, seconds_of in spans.items():
            label = f"2to2 whole {tokens} tokens"
            woken[host, engine, tokens] = whole[host, engine, label] - float(np.median(seconds_of))
    return woken


def fit_wake(of: Iterable[float], latency: float) -> float:
    """Return the seconds of a wake-up of least relative errors, with messages of *latency*.

    The closed form of least squares of relative errors in one unknown: a handoff is ``MESSAGES * latency + WAKES *
    wake``.
    """
    seconds = np.array(list(of))
    return float(np.sum((seconds - MESSAGES * latency) / seconds**2) / np.sum(WAKES / seconds**2))


def copy_wakes(rate: float) -> dict[str, list[float]]:
    """Return by host what each write of `serve` takes longer from posting to its end than blocks of handoffs do.

    That is less its bytes' time at *rate*, and less the median of the same of blocks.  The first request warms up.

    *rate* is in bytes/s; the result is in seconds, one number for each write of the group's path.
    """
    alone, pausing = (_beyond(way, path, rate) for way, path in (("1to2 staged", "staged"), ("serve", "grouped")))
    return {host: [each - float(np.median(alone[host])) for each in pausing[host]] for host in pausing}


def _beyond(way: str, path: str, rate: float) -> dict[str, list[float]]:
    # Only the fitted engine counts.
    values: dict[str, list[float]] = {}
    for (host, engine), requests in _requests(way).items():
        if engine != FITTED[0]:  # others do part of the work of a descriptor between posting and the end
            continue
        rows = [row for number, rows in requests.items() if number % JOB > 1 for row in rows if row["path"] == path]
        stamps = [
            (float(row["completed"]) - float(row["posted"])) * 1e-6 - int(row["nbytes"]) / rate for row in rows
        ]
        values[host] = stamps
    return values


def fit_idle_wake(ttft: Callable[[float], float], measured: Sequence[float]) -> float:
    """Return the seconds with which the time to first token is least far from *measured*, in relative terms.

    *ttft* is the median time to first token on the model as a function of `Host.idle_wake`; it is taken to be linear
    between 200 us and 1 ms.

    The goal is the harmonic mean of *measured*, which has the least sum of relative errors for a line.
    """
    low, high = 200e-6, 1000e-6
    short, long = ttft(low), ttft(high)
    goal = len(measured) / sum(1 / seconds for seconds in measured)
    return low + (goal - short) * (high - low) / (long - short)
