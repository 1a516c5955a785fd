# SPDX-License-Identifier: Apache-2.0
"""Where a checkout keeps its committed measurements: ``data/``, which no wheel contains.

Fits, reports and benchmarks read it; a simulation never does.
"""

from __future__ import annotations

from pathlib import Path


def data(*parts: str) -> Path:
    """Return the path of *parts* below ``data/`` of the checkout; from a wheel it does not exist."""
    return Path(__file__).resolve().parents[2].joinpath("data", *parts)
