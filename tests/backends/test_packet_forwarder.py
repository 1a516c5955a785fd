"""When a hop of the link delivers a packet, worked out by hand: 1000 bytes/s, 0.5 s of delay."""

import os
from types import SimpleNamespace

import pytest

from backends.emulation.link.packet_forwarder import HEADER, LATE, ForwarderChain, Hop

PACKET = bytes(HEADER + 100)  # 0.1 s on the wire


@pytest.mark.parametrize(
    ("change", "sent", "arrive"),
    [
        (None, [10.0, 10.0, 10.05, 20.0], [10.6, 10.7, 10.8, 20.6]),  # one after the other
        (("slow", 10.05, 11.0, 0.5), [10.0, 10.9, 12.0], [10.65, 11.55, 12.6]),  # from mid-packet on
        (("stall", 10.05, 13.0, 0.0), [10.0, 10.5, 14.0], [13.55, 13.65, 14.6]),  # goes on where it was
        (("cut", 10.0, 11.0, 0.0), [9.0, 9.5, 9.95, 10.5, 10.95, 11.2], [9.6, 11.8]),  # loses what is on the wire
    ],
)
def test_packets_arrive_in_order_after_wire_and_delay(change, sent, arrive):
    hop = Hop(1000.0, 0.5, 1e9)
    hop.plan([change] if change else [])
    for at in sent:
        hop.take(PACKET, at)
    assert [at for at, _ in hop.due(1e9)] == pytest.approx(arrive)


def test_a_hop_is_full_at_its_backlog_and_frees_up():
    hop, taken = Hop(1000.0, 0.5, 2 * len(PACKET)), 0
    while not hop.full:
        hop.take(PACKET, 10.0)
        taken += 1
    assert taken == 2 + -(-500 // len(PACKET))
    hop.due(10.65)
    assert not hop.full


def test_packets_more_than_a_millisecond_late_are_counted(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("backends.emulation.link.packet_forwarder.time", SimpleNamespace(monotonic=lambda: now[0]))
    reader, writer = os.pipe()
    packet = PACKET[: HEADER + 19] + b"\x02" + PACKET[HEADER + 20 :]  # to the second node
    up, down = (Hop(1000.0, 0.5, 1e9) for _ in range(2))
    chain = ForwarderChain([-1, writer], [up], [down])
    for lateness in (0.9 * LATE, 0.25, 1.1 * LATE):
        up.take(packet, now[0])
        assert chain.deliver() == pytest.approx(now[0] + 0.6)
        now[0] += 0.6 + lateness
        chain.deliver()
    assert (chain.packets, chain.late, chain.worst) == (3, 2, pytest.approx(0.25))
    for end in (reader, writer):
        os.close(end)
