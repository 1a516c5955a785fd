# SPDX-License-Identifier: Apache-2.0
"""The latencies that a served request must meet to count as good."""

from __future__ import annotations

from dataclasses import dataclass

from pdsim.core.guards import positive
from pdsim.core.units import Seconds

__all__ = ["Slo"]


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What counts as good: goodput is the rate of requests that meet both.

    A request without a second token has no TPOT and meets that limit.  Raise a `ValueError` unless both are
    positive.
    """

    ttft: Seconds = 5.0
    tpot: Seconds = 0.05

    def __post_init__(self) -> None:
        positive("slo", ttft=self.ttft, tpot=self.tpot)
