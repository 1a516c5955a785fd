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


# --- lanes


def test_blocks_take_rounds_of_a_trip_and_an_answer():
    # 8 blocks of 10 bytes in 4 rounds: three of 2 s, 0.5 s and 0.1 s, and the last pair's bytes
    assert streams(lanes=2).start(0.0, 8, 80.0)[0] == pytest.approx(3 * 2.6 + 0.2)


# --- what is cut


def cut(seconds, busy, streams):
    """Return how long after it is cut for *seconds* a stream sends on that has been busy until then."""
    if busy:
        streams.start(0.0, 1, 1e6)
    return streams.repaired(busy, busy + seconds) - busy


def test_an_answered_probe_after_two_round_trips_resumes_the_stream():
    assert cut(0.5, 0.0, streams()) == pytest.approx(2 * 2.0 + 0.002 + 0.128 + 2.0)


def test_the_timer_runs_from_the_oldest_segment():
    assert cut(0.5, 0.0, streams(timeout=9.0)) == pytest.approx(9.0)


@pytest.mark.parametrize(
    ("seconds", "waits"), [(5.0, 1), (7.2, 1), (7.3, 3), (13.3, 7)], ids=lambda value: f"{value}"
)
def test_a_timer_runs_from_a_lost_probe_and_doubles(seconds, waits):
    assert cut(seconds, 0.0, streams()) == pytest.approx(4.13 + waits * 3.0 + 0.128)


def test_what_a_busy_stream_keeps_waiting_makes_both_longer():
    queue = QUEUE * 10.0
    assert cut(12.5, 10.0, streams()) == pytest.approx(2 * (2.0 + queue) + 0.002 + 0.128 + (3.0 + queue) + 0.128)


def test_a_queue_that_outlasts_the_cut_reports_the_loss():
    assert cut(7.9, 10.0, streams()) == pytest.approx(7.9)  # 8 s are under way
    assert cut(8.1, 10.0, streams()) > 12.0


def test_the_remaining_queue_hides_growth_of_the_new_window():
    assert cut(7.0, 10.0, streams(initial=1, rate=1000.0)) == pytest.approx(7.0 + (1.4 + 0.8) - 1.0)


def test_a_full_buffer_is_lost_only_after_another_probe():
    full = streams(window=2000)  # 20 s of bytes, of which 5 / 6 are under way after 30 s, and a round trip of 14 s
    fires = 28.002 + 1.024 + 15.0 + 0.128
    assert cut(30.0, 30.0, full) == pytest.approx(fires + 2.0 + 2 * (14.0 * 7 / 8 + (fires + 14.0) / 8) + 0.002)


def test_a_full_buffer_sends_again_once_a_third_is_free():
    smooth = 2.0 + 500 / 100 * 5 / 6
    assert cut(15.0, 30.0, streams(window=500)) == pytest.approx(2 * smooth + 0.002 + 0.128 + 1.0 + smooth + 0.128)


def test_so_does_one_that_was_not_so_full():
    assert cut(24.0, 30.0, streams(window=1000)) > 40.0
    emptier = streams(window=1000, filled=0.7)
    assert cut(24.0, 30.0, emptier) == pytest.approx(2 * 9.0 + 0.002 + 1.024 + 1.0 + 9.0 + 0.128)


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
