"""Real targets for the tests of this folder."""

from dataclasses import replace

import pytest

from backends.jobs.launcher import Processes
from tests.support.engines import MARKED, engine, make_target


@pytest.fixture
def mooncake():
    """The engine that starts fastest, where any would do; skips if it is not installed."""
    make_target("mooncake_tcp")
    return engine("mooncake_tcp")


@pytest.fixture(params=MARKED)
def any_engine(request):
    make_target(request.param)
    return engine(request.param)


@pytest.fixture
def processes():
    """Ranks of that engine, as forks of a process that has imported what they need."""
    target = make_target("mooncake_tcp")
    assert isinstance(target, Processes)
    return replace(target, deadline=60, device_capacity=1 << 24)
