# SPDX-License-Identifier: Apache-2.0
"""Read the tables of `data/`, CSV with comments or Parquet, whose schema keeps the comments; write Markdown."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of *path* as text by column, as `csv.DictReader` does; what is missing is empty."""
    if path.suffix == ".csv":
        return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))
    import pyarrow.parquet as pq

    table = pq.read_table(path).to_pylist()
    return [{name: "" if value is None else str(value) for name, value in row.items()} for row in table]


def comments(path: Path) -> list[str]:
    """Return the comments of the Parquet file *path*, a line each, without their marks."""
    import pyarrow.parquet as pq

    lines = (pq.read_schema(path).metadata or {}).get(b"comments", b"").decode().splitlines()
    return [line.removeprefix("#").strip() for line in lines if line.startswith("#")]


def markdown(heads: Sequence[str], body: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown; None is ``-``, and a float has one digit after the point."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in body:
        cells = ("-" if cell is None else f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row)
        yield f"| {' | '.join(cells)} |"
