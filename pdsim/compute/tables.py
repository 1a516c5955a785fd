# SPDX-License-Identifier: Apache-2.0
"""Times of operators, looked up in a compact table: one file for a GPU and an engine.

A table holds a `Grid` for each kind of operator: times over sizes (tokens, batch, context, widths), for each
combination of what cannot be interpolated (types of elements, width of a head, an expert's shape).  Between the
sizes of a grid times are interpolated in the logarithms of both, and never fall where tokens or context grow.
Where nothing was measured a lookup warns, once for each reason, with a `RangeWarning`.

`pdsim.calibration.compaction` makes such files.
"""

from __future__ import annotations

import io
import json
import lzma
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.core.errors import ConfigError, RunWarning

SUFFIX = ".tables.xz"
FOLDER = Path(__file__).resolve().parents[2] / "conf" / "compute"
"""Where the tables are that come with pdsim, beside the files that name them."""
STEP = 0.015
"""Logarithm between two times that a file can tell apart: each is within 0.75 %."""

Floats = npt.NDArray[np.float64]
Key = tuple[str | int, ...]


class RangeWarning(RunWarning):
    """A time was asked for outside of what a table has measured."""


class Curve:
    """Seconds of an operator by one size; call it with a size.

    Below the smallest size the time is the smallest one's.  Beyond *limit* it is that of as many calls of equal size
    as it takes if the operator *splits*, and else the time of *limit* grown with the *growth*-th power of the size,
    with a `RangeWarning` about *what*.

    >>> curve = Curve([1.0, 4.0], [2.0, 4.0], 4.0, "a product", splits=True)
    >>> curve(1), curve(2), round(curve(8), 3)
    (2.0, 2.8284271247461903, 8.0)
    """

    __slots__ = ("_factors", "_growth", "_last", "_least", "_part", "_points", "_powers", "_sizes", "_splits",
                 "_warned", "_what", "limit")  # fmt: skip

    def __init__(
        self,
        sizes: Sequence[float],
        seconds: Sequence[float],
        limit: float,
        what: str,
        splits: bool = False,
        growth: float = 1.0,
        part: Curve | None = None,
    ) -> None:
        logs, times = np.log(np.asarray(sizes, float)), np.log(np.asarray(seconds, float))
        powers = np.diff(times) / np.diff(logs) if len(logs) > 1 else np.zeros(1)
        self._points = sizes, seconds
        self._sizes = [float(size) for size in sizes[1:-1]]  # between two segments
        self._powers = [float(power) for power in powers]
        self._factors = [float(value) for value in np.exp(times[: len(powers)] - powers * logs[: len(powers)])]
        self._least, self.limit = float(sizes[0]), float(limit)
        self._splits, self._growth, self._what, self._part = splits, growth, what, part
        self._last = self(limit)
        self._warned: object = None

    def __call__(self, size: float) -> float:
        """Return the seconds at *size*."""
        if size < self._least:
            size = self._least
        elif size > self.limit:
            return self._beyond(size)
        at = bisect_right(self._sizes, size)
        return float(self._factors[at] * size ** self._powers[at])

    def times(self, factor: float, part: Curve | None = None) -> Curve:
        """Return a curve of *factor* times the seconds, which beyond its limit is *part*, if that was measured."""
        if factor == 1 and part is None:
            return self
        sizes, seconds = self._points
        if part is not None and part.limit <= self.limit:
            part = None
        return Curve(sizes, [factor * each for each in seconds], self.limit, self._what, self._splits, self._growth,
                     part)  # fmt: skip

    def _beyond(self, size: float) -> float:
        if self._part is not None:
            return self._part(size)
        if self._splits:
            parts = -(-size // self.limit)
            return float(parts * self(size / parts))
        if warnings.filters is not self._warned:  # each `catch_warnings` has its own; a warning costs ten look-ups
            self._warned = warnings.filters
            warnings.warn(
                f"{self._what}: measured up to {self.limit:g}; larger sizes are extrapolated in proportion",
                RangeWarning,
                stacklevel=3,
            )
        return float(self._last * (size / self.limit) ** self._growth)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Times of one kind of operator: for each of *keys*, a value at each point of the *axes*.

    *values* are logarithms of seconds, of shape ``(keys, *axes)``; *measured* says which of them are measured,
    others are extended from those that are.
    """

    kind: str
    columns: tuple[str, ...]  # of a key
    keys: Mapping[Key, int]
    axes: Mapping[str, Floats]  # ascending sizes
    values: npt.NDArray[np.float32]
    measured: npt.NDArray[np.bool_]

    def slice(self, key: Key, by: str, **fixed: float) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """Return sizes of the axis *by*, the logarithms of seconds there, and whether they are measured.

        *fixed* has a size of each other axis.  Raise a `KeyError` if there is no such *key*.
        """
        values, measured = self.values[self.keys[key]].astype(float), self.measured[self.keys[key]]
        names = list(self.axes)
        for name in reversed(names):
            if name == by:
                continue
            place = names.index(name)
            low, high, share = _between(self.axes[name], fixed[name])
            values = (1.0 - share) * values.take(low, place) + share * values.take(high, place)
            measured = measured.take(high if share >= 0.5 else low, place)
        return self.axes[by], values, measured

    def outside(self, name: str, size: float) -> bool:
        """Return whether *size* of the axis *name* is beyond all that was measured."""
        sizes = self.axes[name]
        return bool(size > sizes[-1] or size < sizes[0])


def _between(sizes: Floats, size: float) -> tuple[int, int, float]:
    if len(sizes) == 1 or size <= sizes[0]:
        return 0, 0, 0.0
    if size >= sizes[-1]:
        return len(sizes) - 1, len(sizes) - 1, 0.0
    high = int(np.searchsorted(sizes, size, side="right"))
    share = np.log(size / sizes[high - 1]) / np.log(sizes[high] / sizes[high - 1])
    return high - 1, high, float(share)


@dataclass(frozen=True)
class Table:
    """The grids of a GPU and an engine, and *about*: source, versions, licence, rows and errors."""

    name: str
    about: Mapping[str, Any]
    grids: Mapping[str, Grid]
    _curves: dict[tuple[Any, ...], Curve] = field(default_factory=dict, repr=False)

    def __contains__(self, kind: str) -> bool:
        return kind in self.grids

    def grid(self, kind: str) -> Grid:
        """Return the grid of *kind*.  Raise a `ConfigError` if the table has none."""
        if kind not in self.grids:
            raise ConfigError(
                f"compute.kernels.table={self.name} has no {kind}, but {', '.join(self.grids)}; choose another"
            )
        return self.grids[kind]

    def curve(
        self, kind: str, key: Key, by: str, splits: bool = False, growth: float = 1.0, **fixed: float
    ) -> Curve:
        """Return the seconds of *kind* by the size *by*, others being *fixed*; the same curve for the same words.

        A fixed size that was not measured counts as the nearest, with a `RangeWarning`.  Raise a `ConfigError` for a
        *kind* or a *key* that the table does not have.
        """
        name = (kind, key, by, *sorted(fixed.items()))
        curve = self._curves.get(name)
        if curve is None:
            curve = self._curves[name] = self._curve(kind, key, by, splits, growth, fixed)
        return curve

    def _curve(self, kind: str, key: Key, by: str, splits: bool, growth: float, fixed: Mapping[str, float]) -> Curve:
        grid = self.grid(kind)
        if key not in grid.keys:
            said = ", ".join(f"{column}={value}" for column, value in zip(grid.columns, key, strict=True))
            raise ConfigError(f"compute.kernels.table={self.name} has no {kind} with {said}; choose another table")
        for each, size in fixed.items():
            if grid.outside(each, size):
                sizes = grid.axes[each]
                warnings.warn(
                    f"{self.name}, {kind}: {each}={size:g} counts as the nearest measured, of {sizes[0]:g} to "
                    f"{sizes[-1]:g}",
                    RangeWarning,
                    stacklevel=3,
                )
        sizes, logs, measured = grid.slice(key, by, **fixed)
        known = np.flatnonzero(measured)
        limit = sizes[known[-1]] if len(known) else sizes[0]
        said = " ".join(map(str, (*key, *(f"{each}={size:g}" for each, size in fixed.items()))))
        return Curve(sizes.tolist(), np.exp(logs).tolist(), float(limit), f"{self.name}, {kind} {said} by {by}",
                     splits, growth)  # fmt: skip


def path_of(name: str) -> Path:
    """Return the file of the table *name*: one that comes with pdsim, or a path."""
    return FOLDER / f"{name}{SUFFIX}" if "/" not in name and not name.endswith(SUFFIX) else Path(name)


@lru_cache(maxsize=8)
def read(name: str) -> Table:
    """Return the table *name*, of `FOLDER`, or at the path *name*.  Raise a `ConfigError` if it cannot be read."""
    path = path_of(name)
    try:
        with lzma.open(path) as file, np.load(io.BytesIO(file.read())) as arrays:
            about = json.loads(bytes(arrays["about"]).decode())
            grids = {kind: _grid(kind, head, arrays) for kind, head in about.pop("grids").items()}
    except (OSError, lzma.LZMAError, ValueError, KeyError) as error:
        known = ", ".join(sorted(each.name.removesuffix(SUFFIX) for each in FOLDER.glob(f"*{SUFFIX}")))
        raise ConfigError(
            f"compute.kernels.table={name}: {path} cannot be read ({error}); choose one of {known}, or a path"
        ) from error
    return Table(name, about, grids)


def write(path: Path, about: Mapping[str, Any], grids: Mapping[str, Grid]) -> None:
    """Write a table to *path*, the same bytes for the same contents."""
    heads = {}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for kind, grid in grids.items():
        base = float(grid.values.min())
        # neighbours along the last axis differ little
        steps = np.diff(np.rint((grid.values - base) / STEP).astype(np.int32), axis=-1, prepend=0).astype(np.int16)
        arrays[f"{kind}.low"], arrays[f"{kind}.high"] = (steps & 0xFF).astype(np.uint8), (steps >> 8).astype(np.int8)
        arrays[f"{kind}.measured"] = np.packbits(grid.measured)
        columns = list(zip(*grid.keys, strict=True))
        words = [sorted(set(map(str, column))) if isinstance(column[0], str) else [] for column in columns]
        arrays[f"{kind}.keys"] = np.array(
            [
                [known.index(str(value)) if known else int(value) for value in column]
                for known, column in zip(words, columns, strict=True)
            ],
            np.int32,
        )
        axes = {name: sizes.astype(int).tolist() for name, sizes in grid.axes.items()}
        heads[kind] = {"columns": grid.columns, "words": words, "axes": axes, "base": base}
    text = json.dumps({**about, "grids": heads}, separators=(",", ":"))
    arrays["about"] = np.frombuffer(text.encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]  # of bytes
    path.write_bytes(lzma.compress(buffer.getvalue(), filters=filters))


def _grid(kind: str, head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Grid:
    axes = {name: np.array(sizes, float) for name, sizes in head["axes"].items()}
    words = head["words"]
    columns = arrays[f"{kind}.keys"].tolist()
    named = [[words[place][value] for value in column] if words[place] else column
             for place, column in enumerate(columns)]  # fmt: skip
    keys = {key: place for place, key in enumerate(zip(*named, strict=True))}
    shape = (len(keys), *map(len, axes.values()))
    low, high = arrays[f"{kind}.low"], arrays[f"{kind}.high"]
    steps = (high.astype(np.int32) << 8) + low
    values = head["base"] + STEP * np.cumsum(steps.reshape(shape), axis=-1)
    measured = np.unpackbits(arrays[f"{kind}.measured"], count=int(np.prod(shape))).astype(bool)
    return Grid(
        kind=kind,
        columns=tuple(head["columns"]),
        keys=keys,
        axes=axes,
        values=values.astype(np.float32),
        measured=measured.reshape(shape),
    )
