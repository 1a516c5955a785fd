# SPDX-License-Identifier: Apache-2.0
"""Which way the keys and values of each request went, from the labels that the KV protocol gives its transfers.

The policy says which way they should go; a full staging ring or metadata that does not fit may send
some another way.  So the summary counts what was really written, and notes say what differed and
why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pdsim.kv.paths import PATHS
from pdsim.results.record import Metric, Table
from pdsim.transfer.job import Outcome
from pdsim.transfer.record_runs import RecordRun
from pdsim.transfer.transfer_log import joined, logs

__all__ = ["Paths", "notes"]


class Paths:
    """The paths that *count* requests took in *outcome*.

    Labels are ``room/chunk/path``.  Counted are all writes, failed ones included, over all ranks.
    """

    def __init__(self, count: int, outcome: Outcome) -> None:
        self._taken: list[str] = [""] * count
        self._totals: dict[str, list[int]] = {}
        for log in logs(joined(rank.transfers for rank in outcome.ranks.values())):
            self._count(log.runs())

    def _count(self, runs: Iterable[RecordRun]) -> None:
        """Add the transfers of *runs* to the totals, and their paths to the requests."""
        requests, totals = self._taken, self._totals
        for _, label, nbytes, descriptors, count in runs:
            room, _, path = label.split("/")
            total = totals.get(path)
            if total is None:
                total = totals[path] = [0, 0, 0]
            total[0] += count
            total[1] += nbytes * count
            total[2] += descriptors * count
            number = (int(room) - 1) % len(requests)  # a request that is sent out anew has another room
            taken = requests[number]
            if path not in taken:  # most rooms take one path, so its very name is kept
                requests[number] = f"{taken}+{path}" if taken else path

    def of_requests(self) -> list[str | None]:
        """Return the paths of each request, joined by ``+`` if it took several; None if nothing was written.

        In the order of `PATHS`; metadata counts only where nothing else was written.
        """
        joined = {taken: _joined(set(taken.split("+"))) for taken in set(self._taken)}
        return [joined[taken] for taken in self._taken]

    def _in_order(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the paths that were taken with their totals, in the order of `PATHS`."""
        return ((path, self._totals[path]) for path in PATHS if path in self._totals)

    def metrics(self) -> list[Metric]:
        """Return bytes and descriptors of each path that was taken."""
        found = []
        for path, (_, nbytes, descriptors) in self._in_order():
            found += [
                Metric(f"{path}_bytes", nbytes, f"bytes of all {path} writes, failed ones included"),
                Metric(f"{path}_descriptors", descriptors, f"descriptors of all {path} writes"),
            ]
        return found

    def tables(self) -> list[Table]:
        """Return the paths that were taken."""
        headings = {"path": "KV path", "writes": "writes posted", "bytes": "bytes written", "descriptors": "posted"}
        rows: list[list[Any]] = [[path, *total] for path, total in self._in_order()]
        return [Table("Paths", headings, rows)] if rows else []


def _joined(paths: set[str]) -> str | None:
    """Return *paths* in order, without the one that only metadata took."""
    kv = paths - {"metadata"} or paths
    return "+".join(path for path in PATHS if path in kv) or None


def notes(outcome: Outcome) -> list[str]:
    """Return what did not go the way that the policy says, and why."""
    values = [rank.value for rank in outcome.ranks.values() if isinstance(rank.value, dict)]
    refused = sum(value.get("staging_refused", 0) for value in values)
    found = []
    if refused:
        found.append(
            f"{refused} chunks went in slices because the staging ring had no free slot; raise kv.staging_ring or "
            "kv.staging_wait"
        )
    return found + [
        f"metadata over the control channel, {count} times: {text}" for text, count in _fallbacks(values)
    ]


def _fallbacks(values: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return for each reason how often metadata took the control channel for it, over all ranks."""
    found: dict[str, int] = {}
    for value in values:
        for text, count in value.get("fallbacks", {}).items():
            found[text] = found.get(text, 0) + count
    return sorted(found.items())
