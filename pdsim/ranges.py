"""Guard clauses of configuration classes: each names the field, the rule and what it got.

*owner* is the group that the fields belong to, as the user writes it: ``positive("hw.nic", rate=0)`` raises
``ValueError("hw.nic.rate must be > 0, got 0")``.
"""

from __future__ import annotations

__all__ = ["not_negative", "one_of", "positive"]


def positive(owner: str, **values: float) -> None:
    """Raise a `ValueError` unless all *values* are > 0; NaN is not."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{owner}.{name} must be > 0, got {value}")


def not_negative(owner: str, **values: float) -> None:
    """Raise a `ValueError` unless all *values* are >= 0; NaN is not."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{owner}.{name} must be >= 0, got {value}")


def one_of(owner: str, allowed: tuple[str, ...], **values: str) -> None:
    """Raise a `ValueError` unless all *values* are among *allowed*."""
    for name, value in values.items():
        if value not in allowed:  # a tuple of whole names: "nvlink" is not found in "intra_node_nvlink"
            choices = ", ".join(choice or "''" for choice in allowed)
            raise ValueError(f"{owner}.{name} must be one of {choices}, got {value!r}")
