"""The built-in engines, as tests of more than one room run them."""

from typing import Any

import pytest

from pdsim.testing.cases import COLLECTIVE, engine, gathering_target, make_target
from pdsim.transfer.job import RankSpec

__all__ = ["COLLECTIVE", "MARKED", "REAL", "VERBS", "engine", "gathering_target", "make_target", "spec"]

REAL = ("mooncake_tcp", "nixl_tcp", "nixl_shm")
"""On host memory."""
MARKED = [pytest.param(name, marks=getattr(pytest.mark, name.split("_")[0])) for name in REAL]
VERBS = ("mooncake_verbs", "nixl_verbs", "mori_verbs")
"""What tests call the backends ``mooncake``, ``nixl`` and ``mori`` on host memory in the guest."""


def spec(name: str, program: Any, **arguments: Any) -> RankSpec:
    """Return rank *name* of a job, on the host, which runs *program*, a function of a module."""
    return RankSpec(name, f"{program.__module__}:{program.__name__}", arguments=arguments)
