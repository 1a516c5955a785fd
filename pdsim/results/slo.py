# SPDX-License-Identifier: Apache-2.0
"""An objective (SLO) that is typed after the fact, and what kept requests say under it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdsim.core.errors import ConfigError
from pdsim.core.units import format_time, parse_time
from pdsim.results import schema

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
