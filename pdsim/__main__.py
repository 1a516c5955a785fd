# SPDX-License-Identifier: Apache-2.0
"""``python -m pdsim``, and the command ``pdsim``."""

import gc
import os
import sys

from pdsim.cli.process import beginning, ended


def main() -> int:
    """Run the command line of this process and return the exit status; Ctrl-C is one line at any time."""
    beginning()
    gc.set_threshold(200_000)  # collections took 7 % of a short run and freed next to nothing
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could be typed next
        from pdsim.cli.complete import complete

        complete()
    from pdsim.cli.main import main as command

    status = command()
    ended()
    gc.freeze()  # else Python looks through all of it several times on its way out: 0.1 s after the shortest run
    return status


if __name__ == "__main__":
    sys.exit(main())
