# SPDX-License-Identifier: Apache-2.0
"""Read the tables of `data/`: CSV with comments, plain or gzip, or Parquet, whose schema keeps the comments."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

__all__ = ["comments", "rows"]


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of *path* as text by column, as `csv.DictReader` does; what is missing is empty."""
    if path.suffix != ".parquet":
        return list(csv.DictReader(line for line in _lines(path) if not line.startswith("#")))
    import pyarrow.parquet as pq

    columns = {
        name: ["" if value is None else str(value) for value in column]
        for name, column in pq.read_table(path).to_pydict().items()
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def comments(path: Path) -> list[str]:
    """Return the comments of *path*, a line each, without their marks."""
    if path.suffix != ".parquet":
        lines = _lines(path)
    else:
        import pyarrow.parquet as pq

        lines = (pq.read_schema(path).metadata or {}).get(b"comments", b"").decode().splitlines()
    return [line.removeprefix("#").strip() for line in lines if line.startswith("#")]


def _lines(path: Path) -> list[str]:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode().splitlines()
