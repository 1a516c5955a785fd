# SPDX-License-Identifier: Apache-2.0
"""What an experiment returns, whatever ran it: numbers with their definitions, rows, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Outcome

__all__ = ["Metric", "Result", "Table"]


@dataclass(frozen=True)
class Metric:
    """One number of the summary.  *name* ends in its unit where it has one, as in ``ttft_p50_s``."""

    name: str
    value: float | int | None  # None where nothing could be measured
    definition: str  # one sentence, printed beside the number
    tabled: bool = False  # one of the tables has it too, so that people need not read it twice


@dataclass(frozen=True)
class Table:
    """A table for people: *columns* maps a heading to its definition, *rows* hold what is printed."""

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Result:
    """Everything that a run found out."""

    summary: Sequence[Metric]
    tables: Sequence[Table] = ()
    requests: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # columns of equal length, one row a request
    transfers: Sequence[TransferRecord] = ()
    failures: Sequence[str] = ()  # one line each: a rank that ended with an error, a request that failed
    notes: Sequence[str] = ()  # what a reader must know, such as an offered load above capacity
    outcome: Outcome | None = None
    offered_load: Mapping[str, Any] | None = None  # of a serving run: prefill, decode, rate, at_most
    start: float = 0.0  # seconds on the clock of *transfers* at which the times of *requests* begin
