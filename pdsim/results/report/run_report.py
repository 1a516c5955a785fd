# SPDX-License-Identifier: Apache-2.0
"""What the report of one run says: verdict, figures, tables, evidence, and how to get it again.

It says what `pdsim.results.terminal` prints, in the same words, without lines that only make sense on
a terminal; figures come from the rows of the run, and nothing from running anything again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import join
from typing import Any

from pdsim.core.units import format_time
from pdsim.hardware.machine import EVIDENCE
from pdsim.results import terminal
from pdsim.results.drawing import Figure
from pdsim.results.evidence import Evidence
from pdsim.results.kept import KeptRun
from pdsim.results.record import Table
from pdsim.results.report import before_after, movement, request_figures
from pdsim.results.report.page import Content, Tile

__all__ = ["content", "figures", "proofs"]

_TILES = {
    "ttft_p50_s": "TTFT, median",
    "ttft_p99_s": "TTFT, p99",
    "tpot_p50_s": "TPOT, median",
    "tpot_p99_s": "TPOT, p99",
    "e2e_p50_s": "end to end, median",
    "transfer_p50_s": "KV transfer, median",
}


def figures(run: KeptRun) -> list[Figure]:
    """Return every figure that *run* has something for; none without evidence.

    Before-and-after of a seed first, then those of requests, then those of transfers and memory.
    """
    if run.evidence == "none":
        return []
    return [*before_after.figures(run), *request_figures.figures(run), *movement.figures(run)]


def content(folder: Path, more: Sequence[Figure] = ()) -> Content:
    """Return what the report of the run in *folder* says, with the figures *more* before its own.

    Raise a `ConfigError` if *folder* is not a complete run.
    """
    run = KeptRun(folder)
    about = run.about
    served = "ttft_p50_s" in run.metrics
    lines = [line for line in terminal.brief_lines(about, folder, page=True) if not line.startswith("... ")]
    warned = [line for line in lines if line.startswith(("warning", "failed"))]
    if (met := run.metrics.get("slo_attainment")) is not None and met < terminal.GOAL:
        warned += [line for line in lines if line.startswith("SLO: ")]
    if (left := len(about["failures"]) - 3) > 0:
        lines.append(f"and {left} more failures: pdsim show -v {folder}")
        warned.append(lines[-1])
    notes = [note for note in about["notes"] if note not in lines and not any(note in line for line in lines)]
    proven = run.evidence != "none"
    return Content(
        over=f"pdsim report of a run: {about['target']}",
        title=f"{about['experiment']} on {about['hw']} with {about['backend']}",
        facts={
            "status": about["status"],
            "bytes moved by": ", ".join(about["engine"]),
            "seed": str(about["seed"]),
            "weakest evidence": run.evidence,
            "run": folder.name,
        },
        tiles=_tiles(run) if proven else (),
        lines=[line for line in lines if line not in warned] + [n for n in notes if not n.startswith("warning")],
        warnings=[*warned, *(note for note in notes if note.startswith("warning"))],
        figures=[*more, *figures(run)] if proven else (),
        tables=_tables(run) if proven else (),
        shown=0 if served else 1,
        evidence=proofs(about["evidence"]["sources"]),
        provenance=dict(_origin(about)),
        configuration={key: str(value) for key, value in run.config.items() if not key.startswith("hydra")},
    )


def proofs(sources: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return kind, parameters and text of *sources*, the weakest kinds first."""
    proof = Evidence(sources)
    return [
        (kind, ", ".join(names), text)
        for kind in reversed(EVIDENCE)
        for text, names in (proof.texts(kind).items() if kind in proof.kinds else ())
    ]


def _tiles(run: KeptRun) -> list[Tile]:
    metrics = run.metrics
    tiles = []
    if (met := metrics.get("slo_attainment")) is not None:
        tiles.append(Tile("requests within the SLO", terminal.share(met), "good" if met >= terminal.GOAL else "bad"))
    if (good := metrics.get("goodput")) is not None:
        tiles.append(Tile("goodput", f"{good:.3g}/s"))
    for name, title in _TILES.items():
        if (value := metrics.get(name)) is not None:
            tiles.append(Tile(title, format_time(value).replace("us", "µs")))
    return tiles


def _tables(run: KeptRun) -> list[Table]:
    tables = [Table(table["title"], table["columns"], table["rows"]) for table in run.about["tables"]]
    rows = [[name, run.metrics[name], text] for name, text in run.definitions.items()]
    return [
        *tables,
        Table("Every metric", {"metric": "", "value": "SI units unless the name says another", "is": ""}, rows),
    ]


def _origin(about: Any) -> Iterator[tuple[str, str]]:
    verb = "validate" if about["experiment"] == "validate" else "run"
    words = [word for word in about["overrides"] if not word.startswith("output=")]
    yield "command", f"pdsim {verb} {join(words)}".strip()
    git = about.get("git") or {}
    if git.get("commit"):
        yield "source", f"commit {git['commit']}{', changed' if git.get('dirty') else ''}"
    yield "pdsim", about["pdsim"]
    host = about.get("host") or {}
    yield "host", ", ".join(f"{key} {value}" for key, value in host.items())
    packages = about.get("packages") or {}
    yield "packages", ", ".join(f"{key} {value}" for key, value in packages.items())
    if about.get("started"):
        yield "started", about["started"]
