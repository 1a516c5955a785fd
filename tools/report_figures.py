# SPDX-License-Identifier: Apache-2.0
"""Simulate what reports say in figures and keep it: ``python -m tools.report_figures``, two minutes of CPU."""

from experiments.reports.figures import keep, simulated
from pdsim.config.compose import compose
from pdsim.core.files import data


def main() -> None:
    """Write ``data/reports/figures.csv``, which docs/validation.md shows."""
    keep(simulated(compose(["experiment=report_figures"]), lambda *_: None), data("reports", "figures.csv"))


if __name__ == "__main__":
    main()
