# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page that needs nothing beside it: plotly within, no request to any network, light and dark.

Its text comes as `Content`; that of a run is `run_content`, with the sentences of `pdsim.results.terminal` but for
lines that only make sense on a terminal.  The templates ``page.html``, ``page.css`` and ``page.js``
are filled in by jinja2, which escapes all text; the policy in the page keeps the browser from loading anything else.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join
from typing import Any

from pdsim.core import plugins
from pdsim.core.files import printable
from pdsim.core.units import format_time
from pdsim.results import evidence, terminal
from pdsim.results.drawing import DARK, LIGHT, Figure, plotly_panel
from pdsim.results.kept import KeptRun
from pdsim.results.record import Table
from pdsim.results.report.figures import figures
from pdsim.version import __version__


@dataclass(frozen=True)
class Tile:
    """One number at the top; *verdict* is ``"good"``, ``"bad"`` or nothing."""

    name: str
    value: str
    verdict: str = ""


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a report, from top to bottom."""

    over: str  # a few words above the title: what kind of report it is
    title: str
    facts: Mapping[str, str] = field(default_factory=dict)  # under the title, by name; empty ones are left out
    tiles: Sequence[Tile] = ()  # the few numbers that matter most
    lines: Sequence[str] = ()  # what a reader must know first, the verdict first
    warnings: Sequence[str] = ()  # lines before those, marked
    figures: Sequence[Figure] = ()  # in order, each with a link at the top
    tables: Sequence[Table] = ()  # folded, but for the first *shown*
    shown: int = 0
    evidence: Sequence[tuple[str, str, str]] = ()  # rows of kind, what, source
    provenance: Mapping[str, str] = field(default_factory=dict)  # how to get it again, by name
    configuration: Mapping[str, str] = field(default_factory=dict)  # every key, folded


@dataclass(frozen=True)
class Explore:
    """The links of a served page: the *points* of a sweep, by name, and the form of its SLO."""

    points: Mapping[str, str]
    slo: str = ""
    at: str = ""  # the name of the point whose page it is


def needs() -> None:
    """Raise a `ConfigError` with the command to install the libraries of `page` if one is missing."""
    plugins.require("report", "report", "plotly", "jinja2")


def page(content: Content, explore: Explore | None = None) -> str:
    """Return *content* as HTML with everything in it; the same content gives the same text.

    With *explore* it has links to other pages of a server (`pdsim.cli.browse`).

    Figures are data that the page draws when it is opened, so they can be zoomed and saved as SVG.  Raise a
    `ConfigError` as `needs` does.
    """
    needs()
    from jinja2 import Environment, PackageLoader
    from plotly.offline import get_plotlyjs

    panels: list[dict[str, Any]] = [plotly_panel(panel) for figure in content.figures for panel in figure.panels]
    data = printable(json.dumps(panels, separators=(",", ":"), ensure_ascii=False, allow_nan=False))
    optional = [name for name in ("tables", "evidence") if getattr(content, name)]
    loader = PackageLoader("pdsim.results", "report")
    plain = lambda value: printable(value) if type(value) is str else value  # noqa: E731  # not what is HTML already
    templates = Environment(loader=loader, autoescape=True, finalize=plain)
    return templates.get_template("page.html").render(
        it=content,
        explore=explore,
        sections=["summary", *(figure.name for figure in content.figures), *optional, "provenance"],
        panels=data.replace("<", "\\u003c"),  # nothing in it ends its element, or begins a comment or a script
        light=LIGHT,
        dark=DARK,
        library=get_plotlyjs(),
        version=__version__,
    )


_TILES = {
    "ttft_p50_s": "TTFT, median",
    "ttft_p99_s": "TTFT, p99",
    "tpot_p50_s": "TPOT, median",
    "tpot_p99_s": "TPOT, p99",
    "e2e_p50_s": "end to end, median",
    "transfer_p50_s": "exposed KV transfer, median",
}


def run_content(folder: Path, more: Sequence[Figure] = ()) -> Content:
    """Return the content of the report of the run in *folder*, with the figures *more* before its own.

    Raise a `ConfigError` if *folder* is not a complete run.
    """
    run = KeptRun(folder)
    about = run.about
    lines = [line for line in terminal.brief_lines(about, folder, page=True) if not line.startswith("... ")]
    warned = [line for line in lines if line.startswith(("warning", "failed"))]
    if (met := run.metrics.get("slo_attainment")) is not None and met < terminal.GOAL:
        warned += [line for line in lines if line.startswith("SLO: ")]
    if (left := len(about["failures"]) - 3) > 0:
        lines.append(f"and {left} more failures: pdsim show -v {folder}")
        warned.append(lines[-1])
    notes = [note for note in about["notes"] if note not in lines and not any(note in line for line in lines)]
    proven = run.evidence != "none"
    answer = next((table["rows"] for table in about["tables"] if table["title"] == "Answer"), ())
    lines = [*(f"{name}: {text}" for name, text in answer if name in ("best", "serves", "latency")), *lines]
    return Content(
        over=f"pdsim report of a run: {about['target']}",
        title=f"{about['experiment']} on {about['hw']} with {about['backend']}",
        facts={
            **what_was_run(run.config),
            "command": _provenance(about)["command"],
            "status": about["status"],
            "bytes moved by": ", ".join(about["engine"]),
            "seed": str(about["seed"]),
            "weakest evidence": run.evidence,
            "run": folder.name,
        },
        tiles=_tiles(run.metrics) if proven else (),
        lines=[line for line in lines if line not in warned] + [n for n in notes if not n.startswith("warning")],
        warnings=[*warned, *(note for note in notes if note.startswith("warning"))],
        figures=[*more, *figures(run)] if proven else (),
        tables=_tables(run) if proven else (),
        shown=0 if "ttft_p50_s" in run.metrics else 1,
        evidence=proofs(about["evidence"]["sources"]),
        provenance=_provenance(about),
        configuration={key: str(value) for key, value in run.config.items() if not key.startswith("hydra")},
    )


def what_was_run(config: Mapping[str, Any]) -> dict[str, str]:
    """Return machine, model and workload of *config*, by dotted key, in a few words each; "" for what it lacks."""
    trace, arrivals, rate = (config.get(f"workload.{name}") for name in ("trace", "arrivals", "rate"))
    generated = f"{arrivals}, {rate:g}/s" if rate and arrivals != "embedded" else str(arrivals or "")
    return {
        "hardware": str(config.get("hw.name", "")),
        "model": str(config.get("model.name", "")),
        "workload": f"trace {Path(trace).name}" if trace else generated,
    }


def proofs(sources: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return kind, parameters and text of *sources*, the weakest kinds first."""
    return [
        (kind, ", ".join(names), text)
        for kind in reversed(evidence.kinds(sources))
        for text, names in evidence.texts(sources, kind).items()
    ]


def _tiles(metrics: Mapping[str, float | int | None]) -> list[Tile]:
    tiles = []
    if (met := metrics.get("slo_attainment")) is not None:
        tiles.append(Tile("requests within the SLO", terminal.share(met), "good" if met >= terminal.GOAL else "bad"))
    if (good := metrics.get("goodput")) is not None:
        tiles.append(Tile("goodput", f"{good:.3g}/s"))
    if rate := metrics.get("capacity_rate"):
        tiles += [
            Tile("capacity", f"{rate:.3g}/s"),
            Tile("output there", f"{metrics['capacity_tokens_per_gpu']:.4g}/s/GPU"),
        ]
    times = {title: value for name, title in _TILES.items() if (value := metrics.get(name)) is not None}
    return [*tiles, *(Tile(title, format_time(value).replace("us", "µs")) for title, value in times.items())]


def _tables(run: KeptRun) -> list[Table]:
    columns = {"metric": "", "value": "SI units unless the name says another", "is": ""}
    rows = [[name, run.metrics[name], text] for name, text in run.definitions.items()]
    tables = [Table(table["title"], table["columns"], table["rows"]) for table in run.about["tables"]]
    return [*tables, Table("Every metric", columns, rows)]


def _provenance(about: Mapping[str, Any]) -> dict[str, str]:
    verb = "validate" if about["experiment"] == "validate" else "run"
    files = [word for word in about.get("command", ()) if word.startswith("--config-")]
    words = [*files, *(word for word in about["overrides"] if not word.startswith("output="))]
    git = about.get("git") or {}
    origin = {
        "command": f"pdsim {verb} {join(words)}".strip(),
        "source": f"commit {git['commit']}{', changed' if git.get('dirty') else ''}" if git.get("commit") else "",
        "pdsim": about["pdsim"],
        "host": ", ".join(f"{key} {value}" for key, value in (about.get("host") or {}).items()),
        "packages": ", ".join(f"{key} {value}" for key, value in (about.get("packages") or {}).items()),
        "started": about.get("started", ""),
    }
    return {name: text for name, text in origin.items() if text}
