# SPDX-License-Identifier: Apache-2.0
"""What a figure is: panels with two axes each, series of marks, and a sentence on how to read it.

Values are in SI units; an axis says which, and whoever draws chooses prefixes (``3 ms``, ``94 GB/s``).  Colours are
numbers of `LIGHT` and `DARK`, so that one description is drawn in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = [
    "DARK",
    "DASHES",
    "LIGHT",
    "MARKERS",
    "Figure",
    "Marks",
    "Panel",
    "Scale",
    "cumulative",
    "prefixed",
    "thinned",
    "ticks",
]

LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b8518f", "#a66f00", "#3a8fc4", "#6b5b95", "#5f6368")
DARK = ("#56b4e9", "#ff9248", "#2fcf9f", "#e89ac7", "#f0c14b", "#9ad1f5", "#b9a7e8", "#b8bec5")
"""Colours of series: Okabe and Ito's, which most colour-blind people tell apart, darker or lighter for contrast."""
MARKERS = ("circle", "square", "triangle-up", "diamond", "cross", "x", "triangle-down", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
"""Marks differ in these too: a colour alone says nothing in print, or to some."""

KINDS = ("line", "steps", "points", "bars", "band", "stack")
_MOST = 400
"""Points of a curve: more cannot be seen, and make a page large."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """An axis: *title* and *unit* of its values (``""`` for counts), *log*, *low* and *high* to show.

    *labels* stand for 0, 1, 2, ... where the axis has names instead of numbers; *values* are the only ticks of one
    that has few.
    """

    title: str
    unit: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    labels: Sequence[str] = ()
    values: Sequence[float] = ()


@dataclass(frozen=True)
class Marks:
    """Marks of one meaning: values *x* and *y*, of one length, with *texts* that a pointer shows beside them.

    *kind* is one of `KINDS`: ``steps`` keep their value until the next x, ``bars`` are stacked along x at every y,
    ``stack`` is an area upon those before it, ``band`` fills between *y* and *top*.  *colour* counts from 0.  A
    series without *name* has no entry in the legend.
    """

    kind: str
    x: Sequence[float]
    y: Sequence[float]
    name: str = ""
    colour: int = 0
    hollow: bool = False  # points: outline only
    plain: bool = False  # a line of reference: thin, grey
    solid: bool = False  # a line without dashes, for curves too ragged for them
    texts: Sequence[str] = ()
    top: Sequence[float] = ()  # band
    marker: int | None = None  # of `MARKERS`, by default that of the colour

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if len(self.x) != len(self.y):
            raise ValueError(f"series {self.name!r} has {len(self.x)} x and {len(self.y)} y")


@dataclass(frozen=True)
class Panel:
    """One pair of axes, *title* above, and what is drawn in it, the last on top."""

    x: Scale
    y: Scale
    series: Sequence[Marks]
    title: str = ""
    height: int = 0  # pixels of the plot; 0: the usual

    @property
    def named(self) -> bool:
        """Whether it has a legend."""
        return any(series.name for series in self.series)

    def span(self, axis: str) -> tuple[float, float]:
        """Return the least and the highest positive value on *axis*, ``"x"`` or ``"y"``, or what its scale says.

        Without positive values it is from 1 to 10, which a logarithmic axis can show.
        """
        scale: Scale = getattr(self, axis)
        values = [v for series in self.series for v in getattr(series, axis) if v > 0 and math.isfinite(v)]
        return scale.low or min(values, default=1.0), scale.high or max(values, default=10.0)


@dataclass(frozen=True)
class Figure:
    """Panels under one *title*.

    *reading* is the sentence that says how to read them, *name* what commands call it.
    """

    name: str
    title: str
    reading: str
    panels: Sequence[Panel] = field(default_factory=tuple)
    columns: int = 2  # most panels in a row
    paired: bool = False  # panels belong together two by two, the left one beside the right one


def prefixed(value: float, unit: str) -> str:
    """Return *value* with a prefix of ten and *unit*: ``"20 ms"``, ``"5 MB/s"``; a share of 100 with ``%``.

    >>> prefixed(0.02, "s"), prefixed(2e-6, "s"), prefixed(1e9, "B"), prefixed(5.0, "%"), prefixed(2000, "")
    ('20 ms', '2 µs', '1 GB', '5 %', '2000')
    """
    if unit not in ("s", "B", "B/s") or not value:
        return f"{value:g} {unit}".rstrip() if unit == "%" or not value else f"{value:g}"
    power = min(max(3 * math.floor(math.log10(abs(value) * (1 + 1e-9)) / 3), -9), 0 if unit == "s" else 15)
    prefix = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}[power]
    return f"{value / 10.0**power:g} {prefix}{unit}"


def ticks(low: float, high: float) -> tuple[list[float], list[bool]]:
    """Return where a logarithmic axis from *low* to *high* has ticks, and which of them have a label.

    >>> ticks(0.02, 0.3)
    ([0.02, 0.05, 0.1, 0.2], [True, True, True, True])
    """
    decades = math.log10(high / low) if high > low > 0 else 1.0
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 3, 4, 5, 7) if decades < 0.7 else (1, 2, 5)
    places = [float(f"{step}e{power}") for power in range(first, last + 1) for step in steps]
    inside = [place for place in places if low * 0.98 <= place <= high * 1.02]
    every = max(1, math.ceil(decades / 6))
    far = [not round(math.log10(place) - math.floor(math.log10(place)), 6) for place in inside]
    if decades <= 2:
        return inside, [True] * len(inside)
    return inside, [whole and not round(math.log10(p)) % every for whole, p in zip(far, inside, strict=True)]


def cumulative(values: Sequence[float] | Floats, most: int = _MOST) -> tuple[list[float], list[float]]:
    """Return ascending values and the share of all *values* that is not above each, at *most* of them.

    >>> cumulative([3.0, 1.0, 2.0, 4.0])
    ([1.0, 2.0, 3.0, 4.0], [0.25, 0.5, 0.75, 1.0])
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    count = len(ordered)
    if not count:
        return [], []
    index = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
    return ordered[index].tolist(), ((index + 1) / count).tolist()


def thinned(count: int, most: int = _MOST) -> list[int]:
    """Return at most *most* places of *count*, evenly spread, first and last among them.

    >>> thinned(9, most=3), thinned(2), thinned(0)
    ([0, 4, 8], [0, 1], [])
    """
    chosen: list[int] = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)).tolist()
    return chosen if count else []
