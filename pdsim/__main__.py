"""``python -m pdsim``."""

import sys

from pdsim.cli import main

sys.exit(main())
