# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page that needs nothing beside it: plotly within, no request to any network, light and dark.

What it says comes as `Content`; this module knows no run.  Its frame is ``page.html``, its looks
``page.css``, what happens in it ``page.js``; the policy in the frame keeps the browser from loading
anything else.

Texts of users and of results are escaped wherever they stand (`_text`), and data is JSON in which
``</`` cannot end the element that holds it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import Any

from pdsim.results.drawing import interactive
from pdsim.results.drawing.figure import DARK, LIGHT, Figure
from pdsim.results.record import Table
from pdsim.version import __version__

__all__ = ["Content", "Tile", "page"]

_NIGHT = (
    "color-scheme: dark; --paper: #12161b; --panel: #191f26; --ink: #e6eaf0; --muted: #9ba7b5; --line: #333d48; "
    "--grid: #29313a; --band: #2b343e; --accent: #6cb6ff; --good: #3fce9b; --bad: #ff9a5c; "
)


@dataclass(frozen=True)
class Tile:
    """One number at the top; *verdict* is ``"good"``, ``"bad"`` or nothing."""

    name: str
    value: str
    verdict: str = ""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a report says, from top to bottom.

    Attributes:
        over: A few words above the title: what kind of report it is.
        title: The page's, and its heading.
        facts: Stand under the title, by name; empty ones are left out.
        tiles: The few numbers that matter most.
        lines: What a reader must know first, the verdict first.
        warnings: Lines before those, marked.
        figures: In order, each with a link at the top.
        tables: Folded, but for the first *shown*.
        shown: How many tables are not folded.
        evidence: Rows of kind, what, source.
        provenance: How to get it again, by name.
        configuration: Every key, folded.
    """

    over: str
    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    tiles: Sequence[Tile] = ()
    lines: Sequence[str] = ()
    warnings: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    shown: int = 0  # of *tables*, so many are not folded
    evidence: Sequence[tuple[str, str, str]] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    configuration: Mapping[str, str] = field(default_factory=dict)


def page(content: Content) -> str:
    """Return the page that says *content*, HTML with everything in it.

    The same content gives the same text. Figures are data that the page draws when it is opened, so they can be
    zoomed and saved as SVG; all text is escaped. Raise a `ConfigError` that says what to install if plotly is
    missing.
    """
    library = interactive.library()
    panels: list[dict[str, Any]] = []
    parts = [("summary", "Summary", _summary(content))]
    parts += [(figure.name, figure.title, _figure(figure, panels)) for figure in content.figures]
    if content.tables:
        parts.append(("tables", "Tables", _tables(content)))
    if content.evidence:
        parts.append(("evidence", "Evidence", _evidence(content.evidence)))
    parts.append(("provenance", "How to get it again", _provenance(content)))
    links = "".join(f'<a href="#{name}">{name.capitalize()}</a>' for name, _, _ in parts)
    body = "".join(f'<section id="{name}"><h2>{_text(title)}</h2>{inner}</section>' for name, title, inner in parts)
    data = json.dumps(panels, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("</", "<\\/")
    chips = "".join(f"<li><b>{_text(name)}</b>{_text(value)}</li>" for name, value in content.facts.items() if value)
    return Template(_file("page.html")).substitute(
        title=_text(content.title),
        over=_text(content.over),
        chips=chips,
        links=links,
        body=body,
        panels=data,
        version=__version__,
        style=_style(),
        library=library,
        script=_file("page.js"),
    )


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _style() -> str:
    def colours(values: Sequence[str]) -> str:
        return " ".join(f"--c{number}: {value};" for number, value in enumerate(values))

    return _file("page.css").replace("$light", colours(LIGHT)).replace("$night", _NIGHT + colours(DARK))


def _text(value: Any) -> str:
    return html.escape(str(value))


def _summary(content: Content) -> str:
    tiles = "".join(
        f'<div class="tile {tile.verdict}"><span>{_text(tile.name)}</span><strong>{_text(tile.value)}</strong></div>'
        for tile in content.tiles
    )
    lines = "".join(f'<li class="bad">{_text(line)}</li>' for line in content.warnings)
    lines += "".join(f"<li>{_text(line)}</li>" for line in content.lines)
    found = f'<div class="tiles">{tiles}</div>' if tiles else ""
    return found + (f'<ul class="lines">{lines}</ul>' if lines else "")


def _figure(figure: Figure, panels: list[dict[str, Any]]) -> str:
    places = []
    for panel in figure.panels:
        height = panel.height or interactive.HEIGHT
        save = (
            f'<button class="save" type="button" data-of="{len(panels)}" data-name="{figure.name}">save SVG</button>'
        )
        title = f'<div class="head"><h3>{_text(panel.title)}</h3>{save}</div>'
        label = html.escape(f"{figure.title}: {panel.title or panel.y.title}")
        plot = f'class="plot" data-panel="{len(panels)}" style="height:{height}px" role="img" aria-label="{label}"'
        places.append(f'<div class="panel">{title}<div {plot}></div></div>')
        panels.append(interactive.drawn(panel))
    kind = " paired" if figure.paired else " three" if figure.columns > 2 or len(figure.panels) == 3 else ""
    return f'<p class="reading">{_text(figure.reading)}</p><div class="panels{kind}">{"".join(places)}</div>'


def _tables(content: Content) -> str:
    found = ""
    for number, table in enumerate(content.tables):
        kind = " open" if number < content.shown else ""
        found += f"<details{kind}><summary>{_text(table.title)}</summary>{_table(table)}</details>"
    return found


def _table(table: Table) -> str:
    heads = "".join(f'<th title="{_text(what)}">{_text(name)}</th>' for name, what in table.columns.items())
    rows = "".join(_row(row) for row in table.rows)
    notes = "; ".join(f"{name}: {what}" for name, what in table.columns.items() if what)
    note = f'<p class="note">{_text(notes)}</p>' if notes else ""
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{note}'


def _row(row: Iterable[Any]) -> str:
    cells = list(row)
    kind = ' class="beyond"' if "beyond" in cells else ""
    return f"<tr{kind}>{''.join(map(_cell, cells))}</tr>"


def _cell(value: Any) -> str:
    if value is None:
        return "<td>-</td>"
    if isinstance(value, float):
        return f"<td>{value:.4g}</td>"
    kind = ' class="text"' if isinstance(value, str) and len(value) > 24 else ""
    return f"<td{kind}>{_text(value)}</td>"


def _evidence(rows: Iterable[tuple[str, str, str]]) -> str:
    body = "".join(
        f'<tr><td><span class="kind">{_text(kind)}</span></td><td class="text">{_text(what)}</td>'
        f'<td class="text">{_text(source)}</td></tr>'
        for kind, what, source in rows
    )
    reading = "A number is no better than the weakest source it rests on: the weakest kinds stand first."
    heads = "<th>kind</th><th>of what</th><th>source</th>"
    return f'<p class="reading">{reading}</p><div class="wide"><table><tr>{heads}</tr>{body}</table></div>'


def _provenance(content: Content) -> str:
    keys = content.configuration
    folded = f"<details><summary>Configuration, {len(keys)} keys</summary>{_facts(keys)}</details>" if keys else ""
    return _facts(content.provenance) + folded


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><td>{_text(name)}</td><td class="text"><code>{_text(value)}</code></td></tr>'
        for name, value in facts.items()
    )
    return f'<div class="wide"><table>{rows}</table></div>'
