"""Connections are made once for each pair of ranks and used for everything after.

More requests make no more of them.  (MORI's control messages once took a new TCP connection each,
until ports ran out.)
"""

from __future__ import annotations

from collections import Counter

import pytest

from pdsim.models.parallel import Side
from pdsim.serving.workload import Request
from pdsim.sim.endpoint import SimEndpoint
from tests.serving.test_faults import serve, statuses


def connections(monkeypatch: pytest.MonkeyPatch, requests: int) -> Counter[str]:
    made: Counter[str] = Counter()
    connect = SimEndpoint.connect

    def counted(self: SimEndpoint, address: bytes):
        made[self.name] += 1
        return connect(self, address)

    requested = [Request(0.01 * number, 60, 3) for number in range(requests)]
    with monkeypatch.context() as patch:
        patch.setattr(SimEndpoint, "connect", counted)
        outcome = serve(requested, prefill=Side(tp=2), decode=Side(tp=2))
    assert statuses(outcome) == ["ok"] * requests
    return made


def test_a_rank_connects_once_to_each_rank_that_it_writes_to(monkeypatch: pytest.MonkeyPatch):
    assert connections(monkeypatch, 1) == connections(monkeypatch, 20) == {"prefill0.0": 1, "prefill0.1": 1}
