# SPDX-License-Identifier: Apache-2.0
"""A run that was kept, for a program: metrics, requests and transfers as Arrow tables, and a later SLO for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdsim.core.errors import ConfigError
from pdsim.core.units import format_time, parse_time
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
        """The definition of each of `metrics`, a sentence."""
        return {name: metric["definition"] for name, metric in self.about["metrics"].items()}

    @property
    def evidence(self) -> str:
        """The weakest kind of source that the numbers rest on; ``"none"``: do not use them."""
        return str(self.about["evidence"]["weakest"])

    @property
    def notes(self) -> list[str]:
        """Notes for readers of the numbers."""
        return list(self.about["notes"])

    @property
    def failures(self) -> list[str]:
        """A line for each thing that went wrong."""
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


LATENCIES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class SloLimits:
    """Most seconds of each latency that has a limit: of ttft, tpot and e2e; made by `parse_slo`."""

    limits: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {format_time(limit)}" for name, limit in self.limits.items())


def parse_slo(text: str) -> SloLimits:
    """Return ``ttft=2s,tpot=30ms`` as an `SloLimits`.

    Raise a `ConfigError` for an unknown latency and a wrong time.

    >>> str(parse_slo("ttft=2s,tpot=30ms"))
    'ttft <= 2 s, tpot <= 30 ms'
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in LATENCIES:
            raise ConfigError(f"--slo {text}: {name!r} has no limit; there are {', '.join(LATENCIES)}, as ttft=2s")
        if value.replace(".", "", 1).isdecimal():
            raise ConfigError(f"--slo {text}: {name}={value} has no unit; did you mean {value}s or {value}ms?")
        try:
            limits[name] = parse_time(value)
        except ValueError as error:
            raise ConfigError(f"--slo {text}: {name}: {error}") from error
        if not limits[name] > 0:
            raise ConfigError(f"--slo {text}: {name} must be > 0")
    return SloLimits(limits)


def met(folder: Path, slo: SloLimits) -> tuple[int, int, float]:
    """Return how many requests of the run in *folder* meet *slo*, how many there are, and the seconds they took.

    All count, the warm-up included, and failed ones as not served; the seconds end with the last token.
    """
    requests = schema.read_table(folder / "requests.parquet", ["arrival", *LATENCIES]).to_pylist()
    good = sum(
        request["ttft"] is not None
        and request["e2e"] is not None
        and all((request[name] or 0.0) <= limit for name, limit in slo.limits.items())
        for request in requests
    )
    return good, len(requests), max((r["arrival"] + r["e2e"] for r in requests if r["e2e"] is not None), default=0.0)
