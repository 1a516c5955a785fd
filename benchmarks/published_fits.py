"""Every calibration from published numbers, fitted again from its samples: how far each is from what it has not seen.

    python -m benchmarks.published_fits [NAME ...]

The samples are those beside the files of `conf/calibration`.  What it prints is the table of ``docs/calibration.md``.
"""

from __future__ import annotations

import sys

from pdsim.calibration.summary import table
from pdsim.cli.refit import refit
from pdsim.results.terminal import show_table

if __name__ == "__main__":
    show_table(table(refit(sys.argv[1:])))
