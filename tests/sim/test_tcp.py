"""What TCP adds over a way of 2 s there and back that carries 100 bytes/s, in packets of 100 bytes of data."""

import pytest

from pdsim.hardware.machine import NetworkLink
from pdsim.sim.tcp import OVERHEAD, QUEUE, HopChain, Streams, late


def streams(lanes=0, answer=0.5, rate=100.0, **wire):
    values = {"rate": 1e9, "delay": 1.0, "mtu": 652, "initial": 10, "window": 1 << 40, "timeout": 1.0} | wire
    values["window"] = values["window"] * (600 + OVERHEAD) // 600  # so that it holds so many bytes of data
    made = NetworkLink(**values)
    return Streams(made, 2.0, answer, rate, lanes)


# --- the window


def test_a_stream_whose_window_covers_the_way_waits_for_nothing():
    assert streams(initial=1).start(0.0, 1, 10_000.0)[1] == 0.0  # 600 bytes of 200 that the way holds


def test_a_small_window_is_waited_for_until_it_has_doubled():
    # 600 bytes in 0.6 s of a round trip of 2 s at 1000 bytes/s, 1200 in 1.2 s, 2400 cover the way
    assert streams(initial=1, rate=1000.0).start(0.0, 1, 1e6)[1] == pytest.approx(1.4 + 0.8)


def test_a_window_grows_no_further_than_it_is_used():
    stream = streams(initial=1, rate=1000.0)
    for at in (0.0, 1.0, 2.0):
        stream.start(at, 1, 500.0)
    assert stream.start(3.0, 1, 1e5)[1] == pytest.approx((2.0 - 1.0) + 0.0)  # it is 1000 bytes now, and 2000 then


def test_an_idle_stream_loses_half_of_its_window_every_time_out():
    stream = streams(initial=1, rate=1000.0)
    stream.start(0.0, 1, 4000.0)  # takes 6.2 s and leaves 2400 + what the last window was not filled with
    assert stream.start(6.2 + 2.9, 1, 4000.0)[1] == 0.0
    later = streams(initial=1, rate=1000.0)
    later.start(0.0, 1, 4000.0)
    assert later.start(1000.0, 1, 4000.0)[1] == pytest.approx(1.4 + 0.8)  # where it began


def test_no_more_than_the_largest_window_is_under_way():
    least, _ = streams(window=50, rate=100.0).start(0.0, 1, 1000.0)
    assert least == pytest.approx(1000.0 / 50 * 2.0)


def test_blocks_take_rounds_of_a_trip_and_an_answer():
    # 8 blocks of 10 bytes in 4 rounds: three of 2 s, 0.5 s and 0.1 s, and the last pair's bytes
    assert streams(lanes=2).start(0.0, 8, 80.0)[0] == pytest.approx(3 * 2.6 + 0.2)


# --- what is cut

QUEUED = QUEUE * 10.0  # seconds of bytes that wait after 10 s
FIRES = 28.002 + 1.024 + 15.0 + 0.128  # when a full buffer of 20 s is sent again, cut after 30 s
CUTS = {
    "an answered probe after two round trips": ({}, 0.0, 0.5, 2 * 2.0 + 0.002 + 0.128 + 2.0),
    "the timer runs from the oldest segment": ({"timeout": 9.0}, 0.0, 0.5, 9.0),
    "a timer from a lost probe": ({}, 0.0, 5.0, 4.13 + 3.0 + 0.128),
    "it comes through just in time": ({}, 0.0, 7.2, 4.13 + 3.0 + 0.128),
    "it doubles": ({}, 0.0, 7.3, 4.13 + 3 * 3.0 + 0.128),
    "and doubles": ({}, 0.0, 13.3, 4.13 + 7 * 3.0 + 0.128),
    "what waits makes both longer": ({}, 10.0, 12.5, 2 * (2.0 + QUEUED) + 0.002 + 0.128 + (3.0 + QUEUED) + 0.128),
    "a queue of 8 s that outlasts the cut": ({}, 10.0, 7.9, 7.9),
    "the rest hides growth of the new window": ({"initial": 1, "rate": 1000.0}, 10.0, 7.0, 7.0 + (1.4 + 0.8) - 1.0),
    # 5 / 6 of the bytes are under way after 30 s, and a round trip of 14 s
    "another probe": ({"window": 2000}, 30.0, 30.0, FIRES + 2 + 2 * (14.0 * 7 / 8 + (FIRES + 14.0) / 8) + 0.002),
    "once a third is free": ({"window": 500}, 30.0, 15.0, 3 * (2.0 + 500 / 120) + 0.002 + 1.0 + 2 * 0.128),
    "not so full": ({"window": 1000, "filled": 0.7}, 30.0, 24.0, 2 * 9.0 + 0.002 + 1.024 + 1.0 + 9.0 + 0.128),
}


def cut(changes, busy, seconds):
    """Return how long after it is cut for *seconds* a stream sends on that has been busy until then."""
    stream = streams(**changes)
    if busy:
        stream.start(0.0, 1, 1e6)
    return stream.repaired(busy, busy + seconds) - busy


@pytest.mark.parametrize(("changes", "busy", "seconds", "expected"), CUTS.values(), ids=CUTS)
def test_a_stream_that_is_cut_sends_on_after(changes, busy, seconds, expected):
    assert cut(changes, busy, seconds) == pytest.approx(expected)


def test_a_queue_that_does_not_outlast_the_cut_is_lost():
    assert cut({}, 10.0, 8.1) > 12.0
    assert cut({"window": 1000}, 30.0, 24.0) > 40.0


@pytest.mark.parametrize(("wait", "more"), [(0.1, 0.002), (0.25, 0.002), (0.26, 0.016), (2.0, 0.016), (2.1, 0.128)])
def test_a_timer_of_the_kernel_is_half_of_its_step_late(wait, more):
    assert late(wait) == pytest.approx(more)


def test_streams_that_are_idle_wait_for_none_while_others_are_busy():
    chain = HopChain(NetworkLink(rate=1000.0, delay=1.0, mtu=652, window=1 << 40, timeout=1.0))
    assert chain.recovery(10.0, 10.5) == 11.0  # no stream yet: what is sent then waits for a time-out
    busy, _ = (chain.streams(2.0, 0.0, 100.0, 0) for _ in range(2))
    assert chain.recovery(10.0, 10.5) == pytest.approx(16.13)
    busy.start(0.0, 1, 1e6)
    assert chain.recovery(10.0, 10.5) == pytest.approx(10.5)
