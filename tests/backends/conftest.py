"""Real targets for the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest

from backends.jobs.launcher import Processes
from pdsim.costs import Engine
from pdsim.job import RankSpec
from tests.backends import programs
from tests.conformance.conftest import engine, make_target

ENGINES = ("mooncake_tcp", "nixl_tcp", "nixl_shm")
MARKED = [pytest.param(name, marks=getattr(pytest.mark, name.split("_")[0])) for name in ENGINES]


def spec(name: str, program: Any, **arguments: Any) -> RankSpec:
    return RankSpec(name, f"{programs.__name__}:{program.__name__}", arguments=arguments)


@pytest.fixture
def mooncake() -> Engine:
    """The engine that starts fastest, where any would do; skips if it is not installed."""
    make_target("mooncake_tcp")
    return engine("mooncake_tcp")


@pytest.fixture(params=MARKED)
def any_engine(request: pytest.FixtureRequest) -> Engine:
    """Each real engine in turn."""
    make_target(request.param)
    return engine(request.param)


@pytest.fixture
def processes(mooncake: Engine) -> Processes:
    return Processes(mooncake, deadline=60, device_capacity=1 << 24)
