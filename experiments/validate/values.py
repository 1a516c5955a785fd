# SPDX-License-Identifier: Apache-2.0
"""What a validation reads of the results of its parts: the quantities that are predicted and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pdsim.results.record import Result
from pdsim.transfer import TransferRecord
from pdsim.transfer.log import endpoints
from pdsim.validation.verdicts import Value

__all__ = ["values"]


def values(experiment: str, result: Result) -> list[Value]:
    """Return the quantities of *result*, a run of *experiment*; those of a point in which something failed left out.

    *gpus* of a value is its number of ranks, which may share GPUs; *descriptors* of a handoff are those of all its
    writes.

    Groups are ``pair``, ``pair, read``, a pattern, ``..., total rate``, ``handoff, PATH``, ``metadata, WAY``,
    ``allgather, POOL`` and ``serve``.
    """
    if experiment == "transfer":
        return list(_of_transfers(result.transfers))
    if experiment == "handoff":
        return list(_of_handoffs(result))
    if experiment == "allgather":
        return list(_of_gathers(result))
    metrics = {metric.name: metric.value for metric in result.summary}
    wanted = [(name, metrics.get(f"{name}_p50_s")) for name in ("transfer", "ttft", "e2e")]
    ranks = len(endpoints(result.transfers))
    return [Value("serve", f"median {name}", "time", 0, float(value), gpus=ranks) for name, value in wanted if value]


def _of_transfers(records: Sequence[TransferRecord]) -> Iterator[Value]:
    by_point: dict[str, dict[tuple[str, str], list[TransferRecord]]] = {}
    for record in records:
        by_point.setdefault(record.label, {}).setdefault((record.source, record.target), []).append(record)
    for label, by_flow in by_point.items():
        every = [record for flow in by_flow.values() for record in flow]
        if any(record.status != "ok" for record in every):
            continue
        group = label.split(":")[0].split(" ")[0] + (", read" if every[0].operation == "read" else "")
        ranks = len({name for flow in by_flow for name in flow})
        for (source, target), mine in by_flow.items():
            name = f"{label}, {source} to {target}" if len(by_flow) > 1 else label
            time = float(np.median([record.seen - record.submitted for record in mine]))
            yield Value(group, name, "time", mine[0].nbytes, time, descriptors=mine[0].descriptors, gpus=ranks)
        if len(by_flow) > 1:
            rate, count = sum(_rate(mine, every) for mine in by_flow.values()), every[0].descriptors
            yield Value(f"{group}, total rate", label, "rate", every[0].nbytes, rate, descriptors=count, gpus=ranks)


def _rate(flow: Sequence[TransferRecord], every: Sequence[TransferRecord]) -> float:
    # It is from the flow's own first call to its own end, for ranks begin and end at times of their own, less the
    # pauses in which its initiator has nothing under way: between two transfers a program takes 8 to 17 us until it
    # asks for the next one, which belongs to no transfer and is 0 on the model.
    begin, end = min(record.submitted for record in flow), max(record.seen for record in flow)
    mine = [record for record in every if _initiator(record) == _initiator(flow[0])]
    return sum(record.nbytes for record in flow) / (end - begin - _pauses(mine, begin, end))


def _initiator(record: TransferRecord) -> str:
    return record.target if record.operation == "read" else record.source


def _pauses(records: Sequence[TransferRecord], begin: float, end: float) -> float:
    total, until = 0.0, begin
    for record in sorted(records, key=lambda record: record.submitted):
        total += max(0.0, min(record.submitted, end) - until)
        until = max(until, min(record.seen, end))
    return total


def _of_handoffs(result: Result) -> Iterator[Value]:
    for row in _rows(result, "Handoffs"):
        if row["status"] == "ok" and row["p50"]:
            _, path, *metadata = row["way"].split(" ")
            group = f"metadata, {metadata[-1]}" if metadata else f"handoff, {path}"
            label, count = f"{row['way']} {row['tokens']} tokens", int(row["descriptors"])
            ranks = sum(map(int, str(row["way"]).partition(" ")[0].split("to")))
            yield Value(group, label, "time", int(row["bytes"]), row["p50"] * 1e-6, descriptors=count, gpus=ranks)


def _of_gathers(result: Result) -> Iterator[Value]:
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    for row in _rows(result, "All-gathers"):
        if row["status"] == "ok" and row["med us"]:
            number, unit = str(row["piece"]).split(" ")
            label = f"{row['ranks']} ranks {row['piece']} {row['batch']} {row['pool']}"
            nbytes, ranks = int(float(number) * units[unit]), int(row["ranks"])
            yield Value(f"allgather, {row['pool']}", label, "time", nbytes, row["med us"] * 1e-6, gpus=ranks)


def _rows(result: Result, title: str) -> Iterator[dict[str, Any]]:
    for table in result.tables:
        if table.title == title:
            yield from (dict(zip(table.columns, row, strict=True)) for row in table.rows)
