# SPDX-License-Identifier: Apache-2.0
"""The test oracle of the protocol: invariants, ownership of memory, leaks.  Imported by tests and trials only.

It watches by putting functions of its own in the place of methods, which classes compiled by mypyc do not let:
`refuse_compiled` says so before a run, of which nothing would be right.
"""

from pdsim.core import clock
from pdsim.core.errors import ConfigError


def refuse_compiled(what: str) -> None:
    """Raise a `ConfigError` that *what* needs pure Python, if this pdsim was compiled (`hatch_build.py`)."""
    if not clock.__file__.endswith(".py"):
        raise ConfigError(
            f"{what} watches methods, which a compiled pdsim does not let; install pdsim without PDSIM_COMPILE"
        )
