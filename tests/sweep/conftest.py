"""What tests of sweeps share."""

import pytest


class InThisProcess:
    def run(self, measure, points):
        yield from map(measure, points)


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr("pdsim.cli.sweep.executor_of", lambda words, line: InThisProcess())
