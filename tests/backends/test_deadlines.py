"""Deadlines of many transfers: each is kept, by few wake-ups.  On virtual time, for which they are as good."""

import pytest

from backends.base.transfers import TransferDeadlines
from pdsim.core.clock import Clock


class Flight:
    def __init__(self, name, deadline):
        self.name = name
        self.deadline = deadline


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watch(clock):
    """Starts a flight, and keeps in `expired` what ran out and when."""

    def start(name, deadline):
        flight = Flight(name, deadline)
        flights[flight] = None
        deadlines.watch(flight)
        return flight

    def expire(flight):
        del flights[flight]
        start.expired.append((clock.now, flight.name))

    flights = {}
    deadlines = TransferDeadlines(clock, flights, expire)
    start.expired = []
    start.over = flights.pop
    return start


def test_what_is_over_before_does_not_expire(clock, watch):
    first, _ = watch("a", 1.0), watch("b", 2.0)
    watch.over(first)
    clock.run()
    assert watch.expired == [(2.0, "b")]


def test_one_that_begins_later_with_less_time_expires_first(clock, watch):
    watch("patient", 10.0)
    clock.run(until=5.0)
    watch("hasty", 6.0)
    clock.run()
    assert watch.expired == [(6.0, "hasty"), (10.0, "patient")]


def test_a_thousand_that_end_in_time_take_one_wake_up(clock, watch):
    for number in range(1000):
        watch.over(watch(str(number), 30.0 + number))
    clock.run()
    assert (clock.scheduled(), watch.expired) == (1, [])
