# SPDX-License-Identifier: Apache-2.0
"""The points of seeds: values before and after a change, as runs find them and as ``data/reports`` keeps them.

``python -m experiments.reports.report_points FOLDER...`` writes what complete runs of seeds found,
of several of one machine the medians, into ``data/reports/<seed>.csv``, in place of what that held
of the same machine and target.

So points that were measured on GPUs stay while a later run on the model replaces the simulated
ones, and each group of points begins with a comment that says when, at which commit and by which
command it was made.
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

from pdsim.core.errors import ConfigError
from pdsim.core.repository import data

__all__ = ["ReportPoint", "committed", "keep", "loaded"]


@dataclass(frozen=True)
class ReportPoint:
    """The value of a claim before and after the change, in its unit, *at* one point; None where none was got."""

    claim: str
    machine: str  # hw and backend
    target: str  # "model" or "real"
    at: str  # such as "1to2 8192 tokens"
    before: float | None
    after: float | None
    runs: int | None = None  # of which these are medians, if they are
    low: float | None = None  # least effect of one of those runs
    high: float | None = None  # most


_NUMBERS = {"before": float, "after": float, "runs": int, "low": float, "high": float}


def committed(seed: str) -> list[ReportPoint]:
    """Return the points of ``data/reports/<seed>.csv``, none if there is no such file, as in an installed wheel."""
    return _parsed(_text(seed))


def keep(runs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the new content of ``data/reports/<seed>.csv`` by seed, with what *runs* found in it.

    Each run is what `pdsim.results.store.load` returns, with the key ``collective``.  Of runs of one machine and
    target the medians are kept, and the least and most effect; the files begin with a line that says how they were
    made.

    Raise a `ConfigError` for a run with failures, one that is of no seed, and runs of one machine at other points.
    """
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault((str(run["experiment"]), _machine(run), str(run["target"])), []).append(run)
    files: dict[str, str] = {}
    for (seed, machine, target), same in groups.items():
        text = files.get(seed, _text(seed))
        about = f"# {machine}, {target}: "
        comments = [line for line in text.splitlines() if line.startswith("#") and not line.startswith(about)]
        others = [point for point in _parsed(text) if (point.machine, point.target) != (machine, target)]
        files[seed] = _written([*comments, about + _origin(same)], [*others, *_medians(machine, target, same)])
    return files


def _text(seed: str) -> str:
    file = data("reports", f"{seed}.csv")
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _parsed(text: str) -> list[ReportPoint]:
    rows: Iterable[dict[str, Any]] = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return [
        ReportPoint(**row | {name: _number(row.get(name), kind) for name, kind in _NUMBERS.items()}) for row in rows
    ]


def _number(text: str | None, kind: type[Any]) -> Any:
    return kind(text) if text else None


def _written(comments: Sequence[str], points: Iterable[ReportPoint]) -> str:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([field.name for field in fields(ReportPoint)])
    for point in points:
        writer.writerow([_short(value) if isinstance(value, float) else value for value in astuple(point)])
    return "\n".join([*comments, lines.getvalue()])


def _short(value: float) -> str:
    # To six digits, and the same text when it is read and written again: 2753070.3 is 2753070, not 2.75307e+06.
    rounded = value if value.is_integer() else float(f"{value:.6g}")
    return f"{rounded:.0f}" if rounded.is_integer() else f"{rounded:.6g}"


def _rows(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        (table,) = (table for table in run["tables"] if table["title"] == "Points")
    except ValueError:
        raise ConfigError(
            f"{run['folder']} is a run of {run['experiment']}, which is not a seed: it has no points"
        ) from None
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return [row for row in rows if (row["machine"], row["target"]) in _own(run)]


def _own(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(f"{run['hw']} {engine}", run["target"]) for engine in (run["backend"], run.get("collective"))]


def _machine(run: Mapping[str, Any]) -> str:
    # Raise a `ConfigError` if the run failed or has no points.
    rows = _rows(run)
    if run["failures"] or not rows:
        raise ConfigError(
            f"{run['folder']} failed: {[*run['failures'], 'no points'][0]}; take a run without failures"
        )
    return str(rows[0]["machine"])


def _medians(machine: str, target: str, runs: Sequence[Mapping[str, Any]]) -> Iterator[ReportPoint]:
    # Raise a `ConfigError` for runs with different points.
    tables = [{(row["claim"], row["at"]): row for row in _rows(run)} for run in runs]
    for run, table in zip(runs, tables, strict=True):
        if list(table) != list(tables[0]):
            raise ConfigError(f"{run['folder']} has other points than {runs[0]['folder']}; keep them one by one")
    for claim, at in tables[0]:
        same = [table[claim, at] for table in tables]
        before, after = (_median([row[name] for row in same]) for name in ("before", "after"))
        effects = [row["effect"] for row in same if row["effect"] is not None]
        several = len(runs) > 1
        ends = (min(effects), max(effects)) if several and effects else (None, None)
        yield ReportPoint(claim, machine, target, at, before, after, len(runs) if several else None, *ends)


def _median(values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _origin(runs: Sequence[Mapping[str, Any]]) -> str:
    first = runs[0]
    words = [word for word in first["overrides"] if not word.startswith(("seed=", "output="))]
    commit = str((first.get("git") or {}).get("commit") or "unknown")[:7]
    parts = (
        [*first["engine"], f"{first['host']['cpu']}, {first['host']['cores']} cores"] if "started" in first else []
    )
    when = [str(first["started"])[:10]] if "started" in first else []
    many = [f"medians of {len(runs)} runs"] if len(runs) > 1 else []
    return "; ".join([*when, f"commit {commit}", *parts, *many, f"pdsim run {' '.join(words)}"])


def loaded(folder: Path) -> dict[str, Any]:
    """Return the run in *folder* as `keep` takes it.  Raise a `ConfigError` if that is no complete run."""
    from omegaconf import OmegaConf

    from pdsim.results.store import load

    return load(folder) | {"collective": OmegaConf.select(OmegaConf.load(folder / "config.yaml"), "collective.name")}


if __name__ == "__main__":
    for seed, text in keep(loaded(Path(folder)) for folder in sys.argv[1:]).items():
        path = data("reports", f"{seed}.csv")
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}\n")
