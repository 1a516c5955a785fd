"""Connections are made once for each pair of ranks and used for everything after.

More requests make no more of them.  (MORI's control messages once took a new TCP connection each,
until ports ran out.)
"""

from __future__ import annotations

from collections import Counter

import psutil
import pytest

from backends.base.zmq_channel import ZmqChannel, job_keys
from pdsim.core.clock import WallClock
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


def test_control_messages_to_one_rank_share_one_tcp_connection():
    clock, keys = WallClock(), job_keys("ab")
    sender, receiver = ZmqChannel(clock, keys["a"]), ZmqChannel(clock, keys["b"])
    try:
        sender.open({"b": receiver.uri})
        port = int(receiver.uri.rpartition(":")[2])

        def program():
            for number in range(300):
                sender.send("b", b"%d" % number)
                yield receiver.receive()
            found = psutil.Process().net_connections("tcp")
            return [other for other in found if other.raddr and other.raddr.port == port]

        (connection,) = clock.run(until=clock.process(program()))
        assert connection.status == psutil.CONN_ESTABLISHED
    finally:
        sender.close()
        receiver.close()
