# SPDX-License-Identifier: Apache-2.0
"""Whole servers that others measured, by pdsim and AISimulate: the table of docs/validation.md.

    pdsim validate --against inferencex FILE...
    python -m tools.scorecard FOLDER      # keeps the errors of that run in data/benchmarks, scorecard.csv and _rows
    python -m tools.scorecard             # prints the table

Rows of AISimulate stay; ``python -m benchmarks.peers.aisimulate COMMAND rows FILE...`` prints their figures, which
are written by hand, in whole per cent.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdsim.core.errors import ConfigError
from pdsim.core.files import data
from tools.tables import markdown, rows

NAMES = ("output", "tpot", "tpot p90", "tpot p99", "ttft", "ttft p90", "ttft p99")
CHOICE = ("SLO %", "strict SLO %", "regret %")
HEADS = ("simulator", "servers", "gpu", "rows are", "count", *(f"{name} %" for name in NAMES), *CHOICE, "source")
WHICH = ("gpu", "precision", "servers", "layout", "isl", "osl", "users")
PEER = "AISimulate 0.13"


def keep(folder: Path, path: Path) -> None:
    """Write the errors of *folder*, a run of ``validate --against inferencex``, to *path*; other simulators' stay.

    Those of each server are in a file beside it, whose name ends in ``_rows``.

    Raise a `ConfigError` if the run has no errors.
    """
    run, summary = (json.loads((folder / f"{name}.json").read_text()) for name in ("run", "summary"))
    table = next((table for table in summary["tables"] if table["title"] == "Errors"), None)
    if table is None:
        raise ConfigError(f"{folder} has no table of errors; name a run of pdsim validate --against inferencex")
    commit = f"{run['git']['commit'][:8]}{', changed' * run['git']['dirty']}"
    own = [dict(zip(table["columns"], each, strict=True)) for each in table["rows"] if "steady" not in each[0]]
    own.sort(key=lambda row: (row["servers"].partition(",")[0], row["gpu"] != "h200", row["servers"]))
    made = [{**row, "simulator": "pdsim", "source": f"pdsim {run['pdsim']}, {commit}"} for row in own]
    stay = [row for row in rows(path) if row["simulator"] != "pdsim"]
    _write(path, HEADS, [*made, *stay])
    each = next(table for table in summary["tables"] if table["title"] == "Servers")
    every = [dict(zip(each["columns"], row, strict=True)) for row in each["rows"]]
    heads = [name for name in each["columns"] if name.endswith("%") or name in WHICH]
    _write(path.with_stem(f"{path.stem}_rows"), heads, every)


def _write(path: Path, heads: Sequence[str], every: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, heads, extrasaction="ignore", lineterminator="\n")
        out.writeheader()
        out.writerows({name: f"{v:.6g}" if isinstance(v, float) else v for name, v in row.items()} for row in every)


def table(path: Path | None = None) -> Iterator[str]:
    """Yield the table of docs/validation.md, mean errors in per cent, of *path* or `data/benchmarks`."""
    of: dict[tuple[str, str, str], dict[str, str]] = {
        (row["simulator"], row["servers"], row["gpu"]): row
        for row in rows(path or data("benchmarks", "scorecard.csv"))
    }
    lines = []
    for row in (row for (simulator, *_), row in of.items() if simulator == "pdsim"):
        peer = of.get((PEER, row["servers"], row["gpu"]))
        name = f"{row['count']} {row['gpu'].upper()}"
        name += ", disaggregated" if row["servers"] == "disaggregated" else ""
        name += f" (AISimulate {peer['count']})" if peer and peer["count"] != row["count"] else ""
        choice = ("-" if not (text := row[head]) else f"{float(text):.0f}" for head in CHOICE)
        lines.append((name, row["rows are"], _cell(row), *choice, _cell(peer) if peer else None))
    yield from markdown(("servers", "rows", "pdsim", "SLO", "strict SLO", "regret", PEER), lines)


def _cell(row: dict[str, str]) -> str:
    output, *tails = [f"{float(text):.0f}" if (text := row[f"{name} %"]) else "-" for name in NAMES]
    return f"{output}; {','.join(tails[:3])}; {','.join(tails[3:])}"


def main() -> None:
    """Keep the errors of the folder that is named, if one is; print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.scorecard", description="Print the table of errors.")
    parser.add_argument("folder", nargs="?", type=Path, help="results whose errors are kept first")
    if folder := parser.parse_args().folder:
        keep(folder, data("benchmarks", "scorecard.csv"))
    sys.stdout.write("\n".join(table()) + "\n")


if __name__ == "__main__":
    main()
