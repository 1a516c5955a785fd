# SPDX-License-Identifier: Apache-2.0
"""The points of seeds: values before and after a change, as runs give them and as ``data/reports`` keeps them.

``python -m experiments.reports.report_points FOLDER...`` writes the points of complete runs, medians of several runs
of one machine, into ``data/reports/<seed>.csv``, in place of the earlier ones of the same machine and target.  Each
group of points begins with a comment that says when, at which commit and by which command it was made.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from pdsim.core.errors import ConfigError
from pdsim.core.files import data


@dataclass(frozen=True)
class ReportPoint:
    """The value of a claim before and after the change, in its unit, *at* one point; None if there is none."""

    claim: str
    machine: str  # hw and backend
    target: str  # "model" or "real"
    at: str  # such as "1to2 8192 tokens"
    before: float | None
    after: float | None
    runs: int | None = None  # of which these are medians, if they are
    low: float | None = None  # least effect of one of those runs
    high: float | None = None  # most


def committed(seed: str) -> list[ReportPoint]:
    """Return the points of ``data/reports/<seed>.csv``, none if there is no such file, as in an installed wheel."""
    return _parsed(_text(seed))


def keep(runs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the new content of ``data/reports/<seed>.csv`` by seed, with the points of *runs*, as `loaded`.

    Raise a `ConfigError` for a run with failures, one that is of no seed, and runs of one machine at other points.
    """
    groups: dict[tuple[str, str, str], list[tuple[Mapping[str, Any], list[dict[str, Any]]]]] = {}
    for run in runs:
        rows = _rows(run)
        groups.setdefault((run["experiment"], rows[0]["machine"], run["target"]), []).append((run, rows))
    files: dict[str, str] = {}
    for (seed, machine, target), same in groups.items():
        text = files.get(seed, _text(seed))
        about = f"# {machine}, {target}: "
        comments = [line for line in text.splitlines() if line.startswith("#") and not line.startswith(about)]
        others = [point for point in _parsed(text) if (point.machine, point.target) != (machine, target)]
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow([field.name for field in fields(ReportPoint)])
        for point in (*others, *_medians(same)):
            writer.writerow([_short(cell) if isinstance(cell, float) else cell for cell in astuple(point)])
        files[seed] = "\n".join([*comments, about + _origin([run for run, _ in same]), lines.getvalue()])
    return files


def _text(seed: str) -> str:
    file = data("reports", f"{seed}.csv")
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _parsed(text: str) -> list[ReportPoint]:
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    plain = [{name: cell or None for name, cell in row.items()} for row in rows]
    return msgspec.convert(plain, list[ReportPoint], strict=False)


def _short(value: float) -> str:
    # To six digits, and the same text when it is read and written again: 2753070.3 is 2753070, not 2.75307e+06.
    rounded = value if value.is_integer() else float(f"{value:.6g}")
    return f"{rounded:.0f}" if rounded.is_integer() else f"{rounded:.6g}"


def _rows(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    table = next((table for table in run["tables"] if table["title"] == "Points"), None)
    if table is None:
        raise ConfigError(f"{run['folder']} is a run of {run['experiment']}, which is not a seed: it has no points")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    machines = [f"{run['hw']} {engine}" for engine in (run["backend"], run.get("collective"))]
    own = [row for row in rows if row["machine"] in machines and row["target"] == run["target"]]
    if run["failures"] or not own:
        why = [*run["failures"], "no points"][0]
        raise ConfigError(f"{run['folder']} failed: {why}; take a run without failures")
    return own


def _medians(runs: Sequence[tuple[Mapping[str, Any], list[dict[str, Any]]]]) -> Iterator[ReportPoint]:
    first = [(row["claim"], row["at"]) for row in runs[0][1]]
    for run, rows in runs:
        if [(row["claim"], row["at"]) for row in rows] != first:
            raise ConfigError(f"{run['folder']} has other points than {runs[0][0]['folder']}; keep them one by one")
    for same in zip(*(rows for _, rows in runs), strict=True):
        before, after = (_median([row[name] for row in same]) for name in ("before", "after"))
        effects = [row["effect"] for row in same if row["effect"] is not None]
        ends = (min(effects), max(effects)) if len(runs) > 1 and effects else (None, None)
        row, count = same[0], len(runs) if len(runs) > 1 else None
        yield ReportPoint(row["claim"], row["machine"], row["target"], row["at"], before, after, count, *ends)


def _median(values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _origin(runs: Sequence[Mapping[str, Any]]) -> str:
    first = runs[0]
    words = [word for word in first["overrides"] if not word.startswith(("seed=", "output="))]
    parts = [f"commit {str((first.get('git') or {}).get('commit') or 'unknown')[:7]}"]
    if "started" in first:
        host = f"{first['host']['cpu']}, {first['host']['cores']} cores"
        parts = [str(first["started"])[:10], *parts, *first["engine"], host]
    if len(runs) > 1:
        parts.append(f"medians of {len(runs)} runs")
    return "; ".join([*parts, f"pdsim run {' '.join(words)}"])


def loaded(folder: Path) -> dict[str, Any]:
    """Return the run in *folder* as `keep` takes it.  Raise a `ConfigError` if that is no complete run."""
    from pdsim.results.schema import read_configuration
    from pdsim.results.store import load

    return load(folder) | {"collective": read_configuration(folder / "config.yaml").get("collective.name")}


if __name__ == "__main__":
    for seed, text in keep(loaded(Path(folder)) for folder in sys.argv[1:]).items():
        path = data("reports", f"{seed}.csv")
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}\n")
