"""When a hop of the link delivers a packet, worked out by hand: 1000 bytes/s, 0.5 s of delay."""

import os
from types import SimpleNamespace

import pytest

from backends.emulation.link.packet_forwarder import HEADER, LATE, ForwarderChain, Hop

PACKET = bytes(HEADER + 100)  # 0.1 s on the wire


def hop(*changes, backlog=1e9):
    made = Hop(1000.0, 0.5, backlog)
    made.plan(changes)
    return made


def arrivals(one, *times):
    for at in times:
        one.take(PACKET, at)
    return [at for at, _ in one.due(1e9)]


def test_packets_leave_one_after_the_other():
    assert arrivals(hop(), 10.0, 10.0, 10.05, 20.0) == pytest.approx([10.6, 10.7, 10.8, 20.6])


def test_a_slow_hop_carries_its_share_from_mid_packet_on():
    slow = ("slow", 10.05, 11.0, 0.5)
    assert arrivals(hop(slow), 10.0, 10.9, 12.0) == pytest.approx([10.65, 11.55, 12.6])


def test_a_stalled_hop_goes_on_where_it_was_and_loses_nothing():
    stall = ("stall", 10.05, 13.0, 0.0)
    assert arrivals(hop(stall), 10.0, 10.5, 14.0) == pytest.approx([13.55, 13.65, 14.6])


def test_a_cut_loses_bytes_on_the_wire_and_later_ones():
    cut = ("cut", 10.0, 11.0, 0.0)
    assert arrivals(hop(cut), 9.0, 9.5, 9.95, 10.5, 10.95, 11.2) == pytest.approx([9.6, 11.8])


def test_changes_follow_one_another():
    both = ("slow", 10.0, 11.0, 0.1), ("stall", 11.0, 12.0, 0.0)
    assert hop(*both).leaves(10.0, 200.0) == pytest.approx(12.1)


def test_a_hop_is_full_at_its_backlog_and_frees_up():
    one = hop(backlog=2 * len(PACKET))
    taken = 0
    while not one.full:
        one.take(PACKET, 10.0)
        taken += 1
    assert taken == 2 + -(-500 // len(PACKET))
    one.due(10.65)
    assert not one.full


def test_packets_more_than_a_millisecond_late_are_counted(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("backends.emulation.link.packet_forwarder.time", SimpleNamespace(monotonic=lambda: now[0]))
    reader, writer = os.pipe()
    packet = PACKET[: HEADER + 19] + b"\x02" + PACKET[HEADER + 20 :]  # to the second node
    up = hop()
    chain = ForwarderChain([-1, writer], [up], [hop()])
    for lateness in (0.9 * LATE, 0.25, 1.1 * LATE):
        up.take(packet, now[0])
        assert chain.deliver() == pytest.approx(now[0] + 0.6)
        now[0] += 0.6 + lateness
        chain.deliver()
    assert (chain.packets, chain.late, chain.worst) == (3, 2, pytest.approx(0.25))
    for end in (reader, writer):
        os.close(end)
