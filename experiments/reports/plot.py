# SPDX-License-Identifier: Apache-2.0
"""Draw the figures of docs/reports.md from `data/reports`: ``python -m experiments.reports.plot [FOLDER]``.

FOLDER is by default docs/reports.  ``pdsim report RUN --figure claims --format svg`` draws the points of a run.
"""

import sys
from dataclasses import asdict
from pathlib import Path

from experiments.reports import intranode_metadata, mooncake_tcp, mori_state, nixl_staging, symmetric_allgather
from experiments.reports.report_points import committed
from pdsim.results import drawing
from pdsim.results.report.figures import claims as claims_figure

FIGURES = {
    "nixl_staging": (nixl_staging.HANDOFF, nixl_staging.TTFT),
    "intranode_metadata": (intranode_metadata.HANDOFF, intranode_metadata.TTFT),
    "symmetric_allgather": (symmetric_allgather.EQUAL, symmetric_allgather.PADDED),
    "mori_state": (mori_state.THROUGHPUT, mori_state.SEEN),
    "mooncake_tcp": (mooncake_tcp.HANDOFF, mooncake_tcp.TTFT),
}
"""The claims that docs/reports/NAME.svg shows, of the seed of that name."""


def figure(name: str) -> bytes:
    """Return the SVG of *name*, one of `FIGURES`.  Needs matplotlib, the extra ``report`` of pdsim."""
    claims = {claim.name: claim for claim in FIGURES[name]}
    points = [point for point in committed(f"seed_{name}") if point.claim in claims]
    rows = [asdict(point) | {"unit": claims[point.claim].unit} for point in points]
    chart = claims_figure({claim.name: claim.text for claim in FIGURES[name]}, rows, list(claims))
    return drawing.image(chart, "svg", width=11.0, titled=False)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reports")
    for each in FIGURES:
        (folder / f"{each}.svg").write_bytes(figure(each))
