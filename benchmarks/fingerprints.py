# SPDX-License-Identifier: Apache-2.0
"""Fingerprint what a run left behind, to compare two versions of the code by the content of their results.

A Parquet table is hashed column by column: its type, and its values in order, so that another writer, another row
group or another order of columns changes nothing.  `summary.json` and `run.json` are taken apart into numbers, which
are compared, and words (titles, headings, definitions, notes, evidence), which are only counted.  What is different
in every run is left out: `VOLATILE`.  This module does not know which runs there are, nor how they are started.
"""

from __future__ import annotations

import csv
import hashlib
import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

__all__ = ["VOLATILE", "Part", "fingerprint", "load", "row_marks"]

VOLATILE = {
    "run.json": {
        "schema": "version of the layout: it rises when a column is renamed",
        "command": "holds the temporary folder",
        "overrides": "holds the temporary folder",
        "pdsim": "version",
        "packages": "versions",
        "git": "commit",
        "host": "of this machine",
        "started": "date, of real runs",
        "wall_seconds": "of real runs",
    },
    "summary.json": {"schema": "as in run.json", "events": "what the simulation cost"},
    "summary.json:metrics": {
        "scenarios_per_s": "wall time of experiment=faults",
        "events": "what the simulation of experiment=faults cost",
    },
    "expectations.json": {
        "written": "date",
        "commit": "commit",
        "sha256": "covers the fields above",
        "system": "configuration",
        "design": "configuration; its points are in points.csv",
    },
}
"""Fields of JSON files, and metrics, that are not compared, and why."""

UNREAD = {".yaml", ".html", ".svg", ".png"}
"""Files that are not compared: the configuration is what a run was asked for, and pages show what other files
hold."""


@dataclass(frozen=True)
class Part:
    """A table: columns of equal length, with a type each."""

    types: Mapping[str, str]
    values: Mapping[str, Sequence[Any]]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return max(map(len, self.values.values()), default=0)


def load(folder: Path) -> tuple[dict[str, Part], dict[str, str]]:
    """Read the results in *folder*."""
    parts: dict[str, Part] = {}
    words: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".parquet":
            parts[path.name] = _parquet(path)
        elif path.suffix == ".csv":
            with path.open(newline="") as file:
                heads, *rows = list(csv.reader(file))
            parts[path.name] = _table(heads, rows)
        elif path.suffix == ".json":
            data = {k: v for k, v in json.loads(path.read_text()).items() if k not in VOLATILE.get(path.name, {})}
            if path.name == "summary.json":
                _summary(data, parts, words)
            else:
                if "evidence" in data:
                    words[f"{path.name}:evidence"] = _hash(data.pop("evidence"))
                for key in [k for k, v in data.items() if isinstance(v, list) and v and isinstance(v[0], dict)]:
                    parts[f"{path.name}:{key}"] = _records(data.pop(key))
                parts[path.name] = _scalars(_leaves(data))
        elif path.suffix not in UNREAD:
            raise ValueError(f"{path.name} is a file of an unknown kind: say in fingerprints.py how it is compared")
    return parts, words


def _parquet(path: Path) -> Part:
    table = pq.read_table(path)
    types = {f.name: str(f.type) for f in table.schema}
    columns = zip(types, table.columns, strict=True)
    return Part(types, {name: column.to_pylist() for name, column in columns})


def _summary(data: dict[str, Any], parts: dict[str, Part], words: dict[str, str]) -> None:
    volatile = VOLATILE["summary.json:metrics"]
    metrics = {name: dict(metric) for name, metric in data.pop("metrics").items() if name not in volatile}
    parts["summary.json:metrics"] = _scalars({name: m.pop("value") for name, m in metrics.items()})
    words["summary.json:metrics"] = _hash(metrics)
    for i, table in enumerate(data.pop("tables")):
        part = _table(list(table["columns"]), table["rows"])
        prose = [c for c, values in part.values.items() if any(isinstance(v, str) and " " in v for v in values)]
        words[f"summary.json:table {i}"] = _hash([table["title"], table["columns"], [part.values[c] for c in prose]])
        kept = {c: v for c, v in part.values.items() if c not in prose}
        parts[f"summary.json:table {i}"] = Part({c: part.types[c] for c in kept}, kept)
    words["summary.json:notes"] = _hash(data.pop("notes"))
    for name in ("ranks", "links", "pools"):
        leaves = _leaves(data.pop(name))
        columns = {"name": sorted(leaves), "value": [leaves[key] for key in sorted(leaves)]}
        parts[f"summary.json:{name}"] = Part(dict.fromkeys(columns, "json"), columns)
    parts["summary.json"] = _scalars(_leaves(data))


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Part:
    keys = [f"{i}" for i in range(len(heads))]
    columns = {key: [row[i] for row in rows] for i, key in enumerate(keys)}
    return Part(dict.fromkeys(keys, "json"), columns)


def _records(rows: Sequence[Mapping[str, Any]]) -> Part:
    columns = {key: [row.get(key) for row in rows] for key in rows[0]}
    return Part(dict.fromkeys(columns, "json"), columns)


def _scalars(leaves: Mapping[str, Any]) -> Part:
    values = {key: [value] for key, value in leaves.items()}
    return Part(dict.fromkeys(values, "json"), values)


def _leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(data, dict):
        items = [(str(k), v) for k, v in data.items()]
    elif isinstance(data, list) and any(isinstance(v, (dict, list)) for v in data):
        items = [(str(i), v) for i, v in enumerate(data)]
    else:
        return {prefix: data}
    return {k: leaf for key, v in items for k, leaf in _leaves(v, f"{prefix}.{key}" if prefix else key).items()}


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def fingerprint(part: Part, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what is kept of a part: rows, types, a hash of each column, and two characters for each row.

    Args:
        part: the table.
        only: the columns that are the same in every run, of a run on a real engine: the others keep their types
            alone, and rows are compared in sorted order, for ranks are served in any.  None is all of them, as they
            lie.
    """
    columns = [c for c in part.values if only is None or c in only]
    values = {c: list(part.values[c]) for c in columns}
    if only is not None and columns:
        rows = sorted(zip(*values.values(), strict=True), key=repr)
        values = {c: [row[i] for row in rows] for i, c in enumerate(columns)}
    kept: dict[str, Any] = {
        "rows": part.rows,
        "columns": {c: [kind, _hash(values[c]) if c in values else ""] for c, kind in part.types.items()},
    }
    if part.rows > 1:
        kept["marks"] = row_marks(values)
    return kept


def row_marks(values: Mapping[str, Sequence[Any]]) -> str:
    """Return two characters for each row, 12 bits of its content: they say where two tables begin to differ."""
    marks = [0] * max(map(len, values.values()), default=0)
    for name, column in values.items():
        for i, value in enumerate(column):
            marks[i] ^= zlib.crc32(f"{name}={value!r}".encode()) & 0xFFF
    bits = "".join(f"{mark:012b}" for mark in marks).ljust(-(-len(marks) * 12 // 24) * 24, "0")
    return b64encode(int(bits or "0", 2).to_bytes(len(bits) // 8, "big")).decode()[: 2 * len(marks)]
