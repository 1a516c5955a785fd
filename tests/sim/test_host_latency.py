"""When a rank's program acts upon what comes: later, later still after a pause, in the order of arrival."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdsim.hardware.machine import Host, Machine
from pdsim.sim.hosts import HostLatency
from pdsim.sim.model import Model
from pdsim.transfer import Program
from pdsim.transfer.job import Place, Rank, RankSpec
from tests.support.machines import engine, machine

HOST = Host(memory=1, memory_rate=1.0, tcp_rate=1e9, tcp_latency=0.5, wake=1.0, idle_wake=4.0, idle_after=10.0)


def acts(*arrivals: float, host: Host = HOST) -> list[float]:
    host_latency = HostLatency(host)
    return [host_latency.acts(at) for at in arrivals]


def test_after_a_rest_it_acts_later_still():
    assert acts(2.0, 13.0, 13.5) == [3.0, 14.0, 14.5]  # 10 s after it acted, not longer
    assert acts(2.0, 13.5) == [3.0, 18.5]


def test_what_it_acts_upon_keeps_it_warm_and_what_only_came_does_too():
    assert acts(13.5, 20.0) == [18.5, 21.0]
    assert acts(13.5, 18.5, 28.0) == [18.5, 19.5, 29.0]


def test_nothing_overtakes_what_came_before():
    first, second, third = acts(11.0, 11.0, 12.5)
    assert first == 16.0
    assert first < second < third == pytest.approx(16.0)


def test_it_is_warm_when_it_starts():
    assert HostLatency(HOST, now=100.0).acts(105.0) == 106.0


# --- of a job ------------------------------------------------------------------------------------------------------


def speaks(rank: Rank) -> Program:
    """Compute for 2 s, then for 20; send a message after either."""
    for seconds in (2.0, 20.0):
        yield rank.device.compute(seconds)
        rank.channel.send("listener", b"")
    return rank.clock.now


def listens(rank: Rank) -> Program:
    collected = []
    for _ in range(2):
        yield rank.channel.receive()
        collected.append(rank.clock.now)
    return collected


def sleepy() -> Machine:
    plain = machine()
    return replace(plain, host=replace(HOST, memory=plain.host.memory))


def test_computations_and_messages_of_a_job_meet_ranks_that_are_warm_or_cold():
    specs = [
        RankSpec("speaker", f"{__name__}:speaks", Place(0, 0)),
        RankSpec("listener", f"{__name__}:listens", Place(0, 1)),
    ]
    ranks = Model(sleepy(), engine()).run(specs).ranks
    # the speaker acts at 3, and computes till 23: idle, it acts at 28
    assert ranks["speaker"].value == 28.0
    assert ranks["listener"].value == [4.5, 33.5]
