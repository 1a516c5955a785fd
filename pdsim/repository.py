"""Where a checkout keeps its committed measurements: ``data/``, which no wheel contains."""

from __future__ import annotations

from pathlib import Path

__all__ = ["data"]


def data(*parts: str) -> Path:
    """Return the path of *parts* below ``data/`` of the checkout; from a wheel it does not exist."""
    return Path(__file__).resolve().parent.parent.joinpath("data", *parts)
