"""Hosts on the model: when messages arrive, and when a rank acts upon what comes."""

from dataclasses import replace
from random import Random

import pytest

from pdsim.core.clock import Clock
from pdsim.hardware.machine import Host
from pdsim.sim.hosts import HostLatency, ScheduledComputations, SimChannel
from pdsim.sim.model import Model
from tests.support.machines import engine, machine, run

HOST = Host(memory=1, memory_rate=1.0, tcp_rate=10.0, tcp_latency=0.5)
LONG = b"x" * 20
SLEEPY = replace(HOST, tcp_rate=1e9, wake=1.0, idle_wake=4.0, idle_after=10.0)


def heard(*sends, host=HOST, closes=""):
    """Return when, from whom and what each rank hears of *sends*: (sender, receiver, payload)."""
    clock, ranks, log = Clock(), {}, []
    for name in "abc":
        channel = SimChannel(name, host, clock, clock, ranks, host_latency=HostLatency(clock, host))
        channel.subscribe(lambda message: log.append((clock.now, *message)))
    for sender, receiver, payload in sends:
        ranks[sender].send(receiver, payload)
    for name in closes:
        ranks[name].close()
        ranks[name].send("b", b"from beyond")
    clock.run()
    return log


@pytest.mark.parametrize(
    ("sends", "how", "expected"),
    [
        # two seconds of its length, and the latency
        ([("a", "b", LONG)], {}, [(2.5, "a", LONG)]),
        # those to one receiver leave one after the other
        ([("a", "b", LONG), ("a", "b", b"y")], {}, [(2.5, "a", LONG), (2.6, "a", b"y")]),
        # those of other pairs do not wait
        ([("a", "b", LONG), ("a", "c", b"y")], {}, [(0.6, "a", b"y"), (2.5, "a", LONG)]),
        ([("a", "b", LONG), ("c", "b", b"z")], {}, [(0.6, "c", b"z"), (2.5, "a", LONG)]),
        # the receiver acts when it has woken up
        ([("a", "b", b"x" * 10)], {"host": replace(HOST, wake=0.25)}, [(1.75, "a", b"x" * 10)]),
        # what is on its way survives its sender, and nothing follows
        ([("a", "b", b"last words")], {"closes": "a"}, [(1.5, "a", b"last words")]),
        ([("a", "b", b"")], {"closes": "b"}, []),
    ],
)  # fmt: skip
def test_messages_arrive_at(sends, how, expected):
    assert heard(*sends, **how) == expected


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ((2.0, 13.0, 13.5), [3.0, 14.0, 14.5]),  # 10 s after it acted, not longer
        ((2.0, 13.5), [3.0, 18.5]),  # after a rest later still
        ((13.5, 20.0), [18.5, 21.0]),  # what it acts upon keeps it warm
        ((13.5, 18.5, 28.0), [18.5, 19.5, 29.0]),  # and so does what only came
    ],
)
def test_a_rank_that_was_idle_acts_later(arrivals, expected):
    assert acted(arrivals) == expected
    assert acted(arrivals[::-1]) == expected[::-1]  # in any order of arrival


def acted(arrivals, start=0.0):
    clock, times = Clock(), {}
    clock.timeout(start)
    clock.run()
    latency = HostLatency(clock, SLEEPY)
    for number, at in enumerate(arrivals):
        latency.arrive(at, lambda number: times.setdefault(number, clock.now), number)
    clock.run()
    return [times[number] for number in range(len(arrivals))]


def test_ranks_start_warm_and_nothing_overtakes():
    assert acted((105.0,), start=100.0) == [106.0]
    first, second, third = acted((11.0, 12.0, 12.5))
    assert first == 16.0
    assert first < second < third == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("arrivals", "events"),
    [((11.0, 11.0, 11.0, 12.5), 2), ((12.5, 11.0, 11.0, 11.0), 3)],  # one that is moved has two
)
def test_what_comes_at_one_instant_is_one_event(arrivals, events):
    clock, order = Clock(), []
    latency = HostLatency(clock, SLEEPY)
    for number, at in enumerate(arrivals):
        latency.arrive(at, lambda number: order.append((clock.now, number)), number)
    assert len(clock.queue.ahead) == events
    clock.run()
    early = [number for number, at in enumerate(arrivals) if at == 11.0]
    assert order[:3] == [(16.0, number) for number in early]
    assert order[3][0] == pytest.approx(16.0)


def forwards(durations, arrivals, scheduled):
    """Return when a leader and its follower act upon ends, while something *arrives* at each at some times."""
    clock, latency = Clock(), 0.75
    hosts, ends = [HostLatency(clock, SLEEPY) for _ in range(2)], ([], [])

    def ended(index, number):
        ends[index].append(clock.now)
        if index == 0 and number + 1 < len(durations):
            begin(0, number + 1)
            hosts[1].arrive(clock.now + latency, lambda number: begin(1, number), number + 1)

    def begin(index, number):
        free[index] = max(clock.now, free[index]) + durations[number]
        hosts[index].arrive(free[index], lambda number: ended(index, number), number)

    free = [0.0, 0.0]
    if scheduled:
        chains = [ScheduledComputations(hosts[0], clock, durations, 0.0, lambda: None)]
        hosts[1].arrive(latency, lambda _: chains.append(follow()), None)
    else:
        begin(0, 0)
        hosts[1].arrive(latency, lambda number: begin(1, number), 0)

    def follow():
        return ScheduledComputations(hosts[1], clock, durations, clock.now, lambda: None, None, chains[0], latency)

    for index, times in enumerate(arrivals):
        for at in times:
            clock.call_at(at, lambda place: hosts[place].arrive(clock.now, lambda _: None, None), index)
    clock.run()
    return [chain.ends for chain in chains] if scheduled else list(ends)


def test_computations_known_ahead_end_as_single_ones_do():
    random = Random(1)
    for _ in range(200):
        durations = [random.expovariate(0.1) + 0.1 for _ in range(8)]
        arrivals = [[random.uniform(1.0, 150.0) for _ in range(random.choice((0, 4, 12)))] for _ in range(2)]
        known, single = (forwards(durations, arrivals, each) for each in (True, False))
        assert known == [pytest.approx(times, abs=1e-9) for times in single]


def speaker(rank):
    for seconds in (2.0, 20.0):
        yield rank.device.compute(seconds)
        rank.channel.send("listener", b"")
    return rank.clock.now


def listener(rank):
    collected = []
    for _ in range(2):
        yield rank.channel.receive()
        collected.append(rank.clock.now)
    return collected


def test_computations_and_messages_wake_ranks_that_were_idle():
    plain = machine()
    model = Model(replace(plain, host=replace(SLEEPY, memory=plain.host.memory)), engine())
    ranks = run(speaker, listener, model=model).ranks
    # the speaker acts at 3, and computes till 23: idle, it acts at 28
    assert (ranks["speaker"].value, ranks["listener"].value) == (28.0, [4.5, 33.5])
