"""The modelled socket: latency and rate, order, and what becomes of messages to the dead."""

from dataclasses import replace

import pytest

from pdsim.core.clock import Clock
from pdsim.hardware.machine import Host
from pdsim.sim.hosts import HostLatency, SimChannel

HOST = Host(memory=1, memory_rate=1.0, tcp_rate=10.0, tcp_latency=0.5)


class Bench:
    def __init__(self, host=HOST):
        self.clock = Clock()
        self.ranks = {}
        self.a, self.b, self.c = (
            SimChannel(name, host, self.clock, self.clock, self.ranks, host_latency=HostLatency(host))
            for name in "abc"
        )
        self.log = []

    def listen(self, channel):
        def listen():
            while True:
                message = yield channel.receive()
                self.log.append((self.clock.now, message.sender, message.payload))

        self.clock.process(listen())

    def run(self):
        self.clock.run()
        return self.log


@pytest.fixture
def bench():
    return Bench()


def test_a_message_takes_the_latency_and_its_length(bench):
    bench.listen(bench.b)
    bench.a.send("b", b"x" * 20)
    assert bench.run() == [(2.5, "a", b"x" * 20)]


def test_the_receiver_acts_when_it_has_woken_up():
    bench = Bench(replace(HOST, wake=0.25))
    bench.listen(bench.b)
    bench.a.send("b", b"x" * 20)
    bench.a.send("b", b"y" * 10)
    assert [at for at, _, _ in bench.run()] == [2.75, 3.75]


def test_messages_to_one_receiver_leave_one_after_the_other(bench):
    bench.listen(bench.b)
    bench.a.send("b", b"x" * 20)
    bench.a.send("b", b"y" * 10)
    bench.a.send("b", b"")
    assert [(at, payload[:1]) for at, _, payload in bench.run()] == [(2.5, b"x"), (3.5, b"y"), (3.5, b"")]


def test_messages_of_different_pairs_do_not_wait_for_each_other(bench):
    bench.listen(bench.b)
    bench.listen(bench.c)
    bench.a.send("b", b"x" * 20)
    bench.a.send("c", b"y")
    bench.c.send("b", b"z")
    assert [(at, payload[:1]) for at, _, payload in bench.run()] == [(0.6, b"y"), (0.6, b"z"), (2.5, b"x")]


def test_an_unknown_rank_is_a_key_error(bench):
    with pytest.raises(KeyError, match="no rank 'd'; there are a, b, c"):
        bench.a.send("d", b"")


def test_a_message_on_its_way_to_a_channel_that_closes_is_lost(bench):
    bench.listen(bench.b)
    bench.a.send("b", b"")
    bench.b.close()
    assert bench.run() == []


def test_a_message_on_its_way_survives_its_sender(bench):
    bench.listen(bench.b)
    bench.a.send("b", b"last words")
    bench.a.close()
    bench.a.send("b", b"from beyond")
    assert bench.run() == [(1.5, "a", b"last words")]


def test_a_message_that_is_waited_for_costs_one_event(bench):
    bench.listen(bench.b)
    bench.clock.run()
    before = bench.clock.scheduled()
    for _ in range(100):
        bench.a.send("b", b"x")
    bench.run()
    assert bench.clock.scheduled() - before == 100
