# SPDX-License-Identifier: Apache-2.0
"""Which transfers to measure so that a fit can tell an engine's parameters apart.

A cross: sizes at one descriptor, counts at four sizes, a few of both with several transfers in flight, a few that
are nearly all bytes; and points drawn at random between them, which no fit sees.  With one count alone the cost of a
call and of a descriptor are one number, with one size alone the cost of a descriptor and of its bytes.  Beside
writes, a thinner cross of reads, each of which has a write of its own configuration there.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdsim.core.errors import ConfigError

__all__ = ["Cell", "grid", "reads", "repeats", "write"]

SMALLEST, LARGEST = 4 << 10, 256 << 20
COUNTS = tuple(1 << power for power in range(13))  # 1 to 4096
AT = (4 << 10, 64 << 10, 256 << 10, 1 << 20)
LONG = tuple((count, 4 << 20) for count in (2, 8, 32))  # nearly all bytes: what tells a rate from posting
READ_SIZES = tuple(SMALLEST << power for power in range(0, 17, 2))
READ_COUNTS, READ_AT = (4, 16, 64, 256, 1024, 4096), AT  # where it turns from posting to the wire, too
CROWDS = ((1, 4 << 10), (1, 1 << 20), (1, 16 << 20), (16, 64 << 10), (256, 16 << 10))

DRAWS = 1000
"""Points drawn for each to be held out: of those that fit few are small, and there may be none."""

MOST, CHEAP = 50, 20e-3
"""Repeats that are enough for any point, and seconds that those beyond the least may take."""


class Cell(NamedTuple):
    """A point of ``experiment=transfer``: the columns of its file of points.

    A transfer of *blocks* descriptors of *size* bytes, with *concurrency* of them in flight; *operation* is "write"
    or "read", *pattern* as in ``experiment=transfer``.
    """

    pattern: str
    blocks: int
    size: int
    concurrency: int
    operation: str

    @property
    def label(self) -> str:
        """The label of its transfers.

        >>> Cell("pair", 16, 65536, 1, "read").label
        'pair 16x65536 c1 read'
        """
        words = f"{self.pattern} {self.blocks}x{self.size} c{self.concurrency}"
        return words if self.operation == "write" else f"{words} {self.operation}"


def grid(operation: str, largest: int, held: int, seed: int) -> tuple[list[Cell], list[Cell]]:
    """Return the points to fit and *held* others to hold out; none moves more than *largest* bytes at a time.

    Raise a `ConfigError` if there are not so many points to hold out.

    Points to hold out are drawn log-uniformly from 1 to 4096 descriptors of 4 KiB to 256 MiB, from *seed*, without
    repeats and without points of the grid.  The order of both lists is that in which they should be measured.
    """
    sizes = [SMALLEST << power for power in range(17) if SMALLEST << power <= LARGEST]
    found = [(1, size, 1) for size in sizes]
    found += [(count, size, 1) for size in AT for count in COUNTS] + [(*few, 1) for few in LONG]
    found += [(count, size, crowd) for count, size in CROWDS for crowd in (2, 4)]
    cells = {
        Cell("pair", n, size, crowd, operation): None for n, size, crowd in found if n * size * crowd <= largest
    }
    random = np.random.Generator(np.random.PCG64([seed, 2]))
    left: dict[Cell, None] = {}
    for _ in range(DRAWS * held):
        if len(left) == held:
            break
        blocks, size = (round(2.0 ** random.uniform(0.0, top)) for top in (12.0, 18.0))
        cell = Cell("pair", blocks, SMALLEST * size // 4, 1, operation)
        if cell.size >= SMALLEST and blocks * cell.size <= largest and cell not in cells:
            left[cell] = None
    if len(left) < held:
        raise ConfigError(
            f"--held {held}: of {largest} bytes or fewer the grid leaves {len(left)} points; lower --held, or raise "
            f"--largest"
        )
    return list(cells), list(left)


def reads(largest: int, left: Iterable[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Return the reads to fit beside the writes of `grid`, and every other of those that it *left* out, as reads.

    Only reads of up to *largest* bytes, one at a time.  Every size and count of them is one of `grid`, so that each
    has a write of its own configuration.
    """
    found = [(1, size) for size in READ_SIZES] + [(count, size) for size in READ_AT for count in READ_COUNTS]
    cells = [Cell("pair", n, size, 1, "read") for n, size in found if n * size <= largest]
    return cells, [cell._replace(operation="read") for cell in list(left)[::2]]


def repeats(cell: Cell, least: int) -> int:
    """Return how often to repeat *cell*: *least* times or, where they are quick, as often as `CHEAP` allows.

    The median of a few is only good where none of them takes long enough to be disturbed.

    The estimate of one transfer's time is rough: 50 us, 3 us for a descriptor and 100 GB/s.  The most is `MOST`.
    """
    call, descriptor, rate = 50e-6, 3e-6, 100e9  # assumed: about what engines between GPUs take
    one = call + cell.blocks * descriptor + cell.blocks * cell.size / rate
    return max(least, min(MOST, int(CHEAP / one / _crowd(cell))))


def _crowd(cell: Cell) -> int:
    return 2 * cell.concurrency if cell.concurrency > 1 else 1  # at most half of them begin or end the crowd


def write(path: Path, cells: Iterable[Cell], repeat: int) -> None:
    """Write *cells* as a file of points to be repeated *repeat* times or more, crowds until they are in full swing.

    CSV, with the columns of `Cell` and ``repeat``; ``experiment=transfer experiment.points=FILE`` reads it.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow((*Cell._fields, "repeat"))
        for cell in cells:
            table.writerow((*cell, repeats(cell, repeat) * _crowd(cell)))
