"""``python -m pdsim``."""

import sys

from pdsim.cli.main import main

sys.exit(main())
