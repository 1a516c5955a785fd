"""Real targets for the tests of this folder."""

from __future__ import annotations

import pytest

from backends.jobs.launcher import Processes
from pdsim.hardware.costs import Engine
from tests.support.engines import MARKED, engine, make_target


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
