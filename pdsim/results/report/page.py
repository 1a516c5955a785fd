# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page that needs nothing beside it: plotly within, no request to any network, light and dark.

Its text comes as `Content`; this module knows no run.  The templates ``page.html``, ``page.css`` and ``page.js``
are filled in by jinja2, which escapes all text; the policy in the page keeps the browser from loading anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from pdsim.core.errors import ConfigError
from pdsim.results.drawing import DARK, LIGHT, Figure, plotly_panel
from pdsim.results.record import Table
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
    up: bool = False  # it is the page of a point


def needs() -> None:
    """Raise a `ConfigError` with the command to install the libraries of `page` if one is missing."""
    if missing := [name for name in ("plotly", "jinja2") if find_spec(name) is None]:
        raise ConfigError(f"report needs {' and '.join(missing)}; pip install 'pdsim[report]'")


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
    data = json.dumps(panels, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    optional = [name for name in ("tables", "evidence") if getattr(content, name)]
    templates = Environment(loader=PackageLoader("pdsim.results", "report"), autoescape=True)
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
