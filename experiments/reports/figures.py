# SPDX-License-Identifier: Apache-2.0
"""What six reports of SGLang say in figures, simulated: reported, simulated, how far apart, and the verdict.

Reports leave much of their set-up out, so each figure states what was assumed, and factors are compared, before over
after, not times.  What a report leaves open is simulated at its ends, too (`ReportFigure.ends`), which gives an
interval.  A factor is *reached* within `CLOSE` of the one assumption, else *within what is open* if the interval has
it, else *not reached*.  `data/reports/figures.csv` keeps what a run found; ``python -m tools.reference`` shows
it in docs/reports.md, which has the reasons (`REASONS`), too.

Machines, models and engines of the figures are in ``conf/experiment/report_figures.yaml``: those of the reports, as
far as they say, whatever the command line chooses.  A further figure is an entry of `FIGURES` with a function that
serves before and after.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.reports.figure_setups import FIGURES, REASONS, Parts, ReportFigure, ReportFiguresOptions
from pdsim.config import Config
from pdsim.core.progress import ShowProgress
from pdsim.core.repository import data
from pdsim.results.record import Metric, Result, Table
from pdsim.transfer.job import Target

__all__ = [
    "CLOSE",
    "FIGURES",
    "REASONS",
    "TARGETS",
    "FigureRow",
    "Parts",
    "ReportFigure",
    "ReportFiguresOptions",
    "keep",
    "kept",
    "run",
    "simulated",
    "verdict",
]

TARGETS = ("model",)
"""Where the experiment can run."""

CLOSE = 1.25
"""Between a factor and the reported one, for it to count as reached: set-ups are known no better."""


HEADS = ("report", "figure", "reported", "simulated", "error", "lowest", "highest", "verdict", "assumed", "open")
"""Names of the fields of `FigureRow`."""


class FigureRow(NamedTuple):
    """A figure and what was found; the row of `data/reports/figures.csv`.

    *reported*, *simulated*, *lowest* and *highest* are factors with two digits, the last two of all set-ups that the
    report leaves *open*; *error* is simulated over reported minus one, *verdict* that of `verdict`, and the others
    are texts of `ReportFigure`.
    """

    report: str
    figure: str
    reported: float
    simulated: float
    error: float
    lowest: float
    highest: float
    verdict: str
    assumed: str
    open: str


def verdict(reported: float, simulated: float, lowest: float, highest: float) -> str:
    """Return whether the model reaches a factor: as assumed within `CLOSE`, or between *lowest* and *highest*.

    >>> verdict(2.0, 1.9, 1.9, 1.9), verdict(5.8, 2.3, 1.0, 6.0), verdict(2.25, 1.02, 1.0, 1.4)
    ('reached', 'within what is open', 'not reached')
    """
    if max(reported, simulated) <= CLOSE * min(reported, simulated):
        return "reached"
    return "within what is open" if lowest <= reported <= highest else "not reached"


def run(config: Config, _: Target, progress: ShowProgress) -> Result:
    """Simulate all figures, or those of `ReportFiguresOptions.only`, and return the table.

    Each figure is two runs of ``serve`` on the model with machines and models of its own, and two for each end of
    what is open; ``hw``, ``backend`` and ``model`` of *config* are not used. A figure that the model does not meet
    is no failure.
    """
    rows = list(simulated(config, progress))
    reached, within = (sum(row.verdict == said for row in rows) for said in ("reached", "within what is open"))
    return Result(
        summary=[
            Metric("figures", len(rows), "that reports state, as factors"),
            Metric("figures_reached", reached, f"of them, those that the model meets within a factor of {CLOSE:g}"),
            Metric("figures_within", within, "of the others, those that set-ups which the report leaves open reach"),
        ],
        tables=[Table("Reports", dict.fromkeys(HEADS, ""), [list(row) for row in rows])],
    )


def simulated(config: Config, progress: ShowProgress) -> Iterator[FigureRow]:
    """Yield what the model says of each figure, one at a time.

    Factors are rounded to two digits, as reports have them.
    """
    options = ReportFiguresOptions.of(config)
    chosen = [one for one in FIGURES if not options.only or one.report.lstrip("#") in options.only]
    parts = Parts(config, options)
    for number, figure in enumerate(chosen):
        progress(number / len(chosen), f"{figure.report}: {figure.says}")
        before, after = figure.run(parts)
        reported, factor = round(figure.reported, 2), round(before / after, 2)
        others = [figure.run(parts, **end) for end in figure.ends]
        all_of = [factor, *(round(one / other, 2) for one, other in others)]
        low, high = min(all_of), max(all_of)
        error, said = round(factor / reported - 1, 2), verdict(reported, factor, low, high)
        texts = figure.assumed, figure.open
        yield FigureRow(figure.report, figure.says, reported, factor, error, low, high, said, *texts)


def keep(rows: Iterable[FigureRow], path: Path) -> None:
    """Write *rows* to *path* as CSV, with the heads `HEADS`; `kept` reads it again."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADS)
        writer.writerows(rows)


def kept() -> Iterator[FigureRow]:
    """Yield the rows of ``data/reports/figures.csv``, what the run found that the page shows.

    Raise a `FileNotFoundError` outside a checkout: data is not in the wheel.
    """
    with data("reports", "figures.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            reported, factor, error, low, high = (float(row[name]) for name in HEADS[2:7])
            texts = (row[name] for name in HEADS[7:])
            yield FigureRow(row["report"], row["figure"], reported, factor, error, low, high, *texts)
