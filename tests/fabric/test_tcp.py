"""What TCP adds over a way of 2 s there and back that carries 100 bytes/s, in packets of 100 bytes of data."""

import pytest

from pdsim.fabric.machine import Wire
from pdsim.fabric.tcp import QUEUE, Chain, Streams


def streams(lanes=0, answer=0.5, rate=100.0, **wire):
    values = {"rate": 1e9, "delay": 1.0, "mtu": 652, "initial": 10, "window": 1 << 40, "timeout": 1.0} | wire
    made = Wire(**values)
    return Streams(made, 2.0, answer, rate, lanes)


# --- the window


def test_a_stream_whose_window_covers_the_way_waits_for_nothing():
    assert streams(initial=1).start(0.0, 1, 10_000.0)[1] == 0.0  # 600 bytes of 200 that the way holds


def test_a_small_window_is_sent_and_waited_for_until_it_has_doubled_enough():
    # 600 bytes in 0.6 s of a round trip of 2 s at 1000 bytes/s, 1200 in 1.2 s, 2400 cover the way
    assert streams(initial=1, rate=1000.0).start(0.0, 1, 1e6)[1] == pytest.approx(1.4 + 0.8)


def test_what_fits_into_the_first_windows_waits_for_no_more_of_them():
    assert streams(initial=1, rate=1000.0).start(0.0, 1, 600.0)[1] == 0.0
    assert streams(initial=1, rate=1000.0).start(0.0, 1, 1000.0)[1] == pytest.approx(1.4)


def test_a_window_stays_what_it_has_become():
    stream = streams(initial=1, rate=1000.0)
    stream.start(0.0, 1, 1e5)
    assert stream.start(110.0, 1, 1e5)[1] == 0.0


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


def test_without_lanes_blocks_follow_each_other():
    assert streams().start(0.0, 64, 6400.0) == (pytest.approx(6400.0 * 2.0 / (1 << 40)), 0.0)


def test_blocks_take_rounds_of_a_trip_and_an_answer():
    # 8 blocks of 10 bytes in 4 rounds: three of 2 s, 0.5 s and 0.1 s, and the last pair's bytes
    assert streams(lanes=2).start(0.0, 8, 80.0)[0] == pytest.approx(3 * 2.6 + 0.2)


def test_blocks_that_have_lanes_enough_take_one_round():
    assert streams(lanes=4).start(0.0, 4, 400.0)[0] < 1e-6


# --- what is cut


@pytest.mark.parametrize(
    ("seconds", "fires"), [(0.5, 3.0), (2.9, 3.0), (3.1, 9.0), (8.9, 9.0), (9.1, 21.0)], ids=lambda value: f"{value} s"
)
def test_a_cut_stream_goes_on_when_its_timer_fires_after_the_end(seconds, fires):
    chain = Chain(Wire(rate=1000.0, delay=1.0, timeout=1.0))
    chain.streams(2.0, 0.0, 100.0, 0)
    assert chain.recovery(10.0, 10.0 + seconds) == pytest.approx(10.0 + fires)


def test_the_timer_allows_for_what_a_busy_stream_keeps_waiting():
    stream = streams()
    stream.start(10.0, 1, 1000.0)  # for 10 s
    assert stream.timeout(10.0) == pytest.approx(3.0)
    assert stream.timeout(14.0) == pytest.approx(3.0 + QUEUE * 4.0)
    stream.start(15.0, 1, 1000.0)
    assert stream.timeout(18.0) == pytest.approx(3.0 + QUEUE * 8.0)  # without a pause
    assert streams(window=100).timeout(0.0) == pytest.approx(3.0)
