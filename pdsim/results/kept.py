# SPDX-License-Identifier: Apache-2.0
"""A run that was kept, for a program: its metrics, and its requests and transfers as Arrow tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdsim.results import schema, store, terminal

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class KeptRun:
    """The results of the complete run in *folder*; each file is read when it is asked for.

    Raise a `ConfigError` if *folder* is not a complete run, or if its files were changed.
    """

    folder: Path
    about: Mapping[str, Any] = field(init=False, repr=False)  # run.json and summary.json: docs/results.md

    def __post_init__(self) -> None:
        object.__setattr__(self, "about", store.load(self.folder))

    @property
    def metrics(self) -> dict[str, float | int | None]:
        """The summary, SI units unless the name says another; None where nothing could be measured."""
        return {name: metric["value"] for name, metric in self.about["metrics"].items()}

    @property
    def definitions(self) -> dict[str, str]:
        """What each of `metrics` is, in a sentence."""
        return {name: metric["definition"] for name, metric in self.about["metrics"].items()}

    @property
    def evidence(self) -> str:
        """The weakest kind of source that the numbers rest on; ``"none"``: do not use them."""
        return str(self.about["evidence"]["weakest"])

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        return list(self.about["notes"])

    @property
    def failures(self) -> list[str]:
        """What went wrong, a line each; a run without is empty."""
        return list(self.about["failures"])

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration by dotted key, such as ``"hw.nic.rate"``, complete."""
        return schema.read_configuration(self.folder / "config.yaml")

    @cached_property
    def requests(self) -> pa.Table:
        """One row a request, columns as in docs/results.md, in seconds; ``.to_pandas()`` with the extra pandas."""
        return schema.read_table(self.folder / "requests.parquet")

    @cached_property
    def transfers(self) -> pa.Table:
        """One row a transfer, likewise."""
        return schema.read_table(self.folder / "transfers.parquet")

    @cached_property
    def samples(self) -> pa.Table | None:
        """Use of links, memories, KV pages and staging rings over time; None unless asked for with ``samples``.

        Columns: ``time`` in seconds, ``kind`` (link, pool, pages or ring), ``name``, ``value`` from 0 to 1.
        """
        path = self.folder / "samples.parquet"
        return schema.read_table(path) if path.is_file() else None

    @property
    def start(self) -> float:
        """Seconds on the clock of `transfers` and `samples` at which the times of `requests` begin."""
        return float(self.about.get("start") or 0.0)

    def __str__(self) -> str:
        return "\n".join(terminal.brief_lines(self.about, self.folder))
