"""A validation as one HTML page that needs nothing beside it: tables, and two pictures if matplotlib is installed."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from pdsim.results.record import Table
from pdsim.validation.verdicts import Compared

__all__ = ["page"]

_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: .5em 0 1.5em; font-variant-numeric: tabular-nums }
th, td { padding: .15em .7em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left } .beyond { color: #b00020; font-weight: 600 } svg { max-width: 100% }
"""


def page(title: str, facts: Sequence[tuple[str, str]], tables: Sequence[Table], found: Sequence[Compared]) -> str:
    """Return the page: *facts* are name and value, such as the hash of the predictions."""
    said = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in facts)
    body = [f"<h1>{html.escape(title)}</h1>", f"<table>{said}</table>"]
    body += [_table(tables[0]), _pictures(found), *(_table(table) for table in tables[1:]), _table(_points(found))]
    head = f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"{head}{''.join(body)}\n"


def _table(table: Table) -> str:
    heads = "".join(f'<th title="{html.escape(text)}">{html.escape(name)}</th>' for name, text in table.columns.items())
    rows = "".join(_row(row) for row in table.rows)
    return f"<h2>{html.escape(table.title)}</h2><table><tr>{heads}</tr>{rows}</table>"


def _row(row: Sequence[Any]) -> str:
    kind = ' class="beyond"' if "beyond" in row else ""
    return f"<tr{kind}>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))


def _points(found: Sequence[Compared]) -> Table:
    columns = {"point": "and flow", "class": "", "quantity": "time in us, rate in GB/s"}
    columns |= {"predicted": "", "low": "95 %", "high": "95 %", "measured": "", "error %": "signed"}
    rows = []
    for each in found:
        value = each.predicted
        scale = 1e6 if value.quantity == "time" else 1e-9
        numbers = (value.value, value.low, value.high, each.measured)
        scaled = [None if number is None else number * scale for number in numbers]
        rows.append([value.label, value.group, value.quantity, *scaled, each.error * 100])
    return Table("Every point", columns, rows)


def _pictures(found: Sequence[Compared]) -> str:
    if find_spec("matplotlib") is None:
        return "<p>No pictures: matplotlib is not installed (the extra <code>report</code> of pdsim).</p>"
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {"svg.hashsalt": "pdsim", "svg.fonttype": "none"}
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    times = [each for each in found if each.predicted.quantity == "time"]
    for group in dict.fromkeys(each.predicted.group for each in times):
        mine = [each for each in times if each.predicted.group == group]
        measured = [each.measured * 1e6 for each in mine]
        left.loglog(measured, [each.predicted.value * 1e6 for each in mine], ".", label=group, markersize=5)
        right.semilogx([each.predicted.nbytes or 1 for each in mine], [each.error * 100 for each in mine], ".")
    ends = [f(each.measured * 1e6 for each in times) for f in (min, max)] if times else [1.0, 10.0]
    for factor, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
        left.plot(ends, [end * factor for end in ends], style, color="#888", linewidth=0.8)
    right.axhline(0, color="#888", linewidth=0.8)
    left.set(xlabel="measured, us", ylabel="predicted, us", title="dotted: 10 % off")
    right.set(xlabel="bytes of a transfer", ylabel="error, %", title="signed error by size")
    left.legend(fontsize="small")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
