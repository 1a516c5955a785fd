"""A link between nodes on the model, and what TCP adds."""

from dataclasses import replace

import pytest

from pdsim.hardware.machine import LinkChange, NetworkLink
from pdsim.sim.model import Model
from pdsim.sim.tcp import OVERHEAD, QUEUE, HopChain, Streams, late
from pdsim.transfer import Batch
from pdsim.transfer.job import Place, RankSpec
from tests.support.machines import cost, engine, machine


def streams(lanes=0, answer=0.5, rate=100.0, **wire):
    values = {"rate": 1e9, "delay": 1.0, "mtu": 652, "initial": 10, "window": 1 << 40, "timeout": 1.0} | wire
    values["window"] = values["window"] * (600 + OVERHEAD) // 600  # so that it holds so many bytes of data
    made = NetworkLink(**values)
    return Streams(made, 2.0, answer, rate, lanes)


# --- the window


def test_a_window_that_is_used_doubles_until_it_suffices():
    assert streams(initial=1).start(0.0, 1, 10_000.0)[1] == 0.0  # 600 bytes of 200 that the way holds
    # 600 bytes in 0.6 s of a round trip of 2 s at 1000 bytes/s, 1200 in 1.2 s, 2400 cover the way
    assert streams(initial=1, rate=1000.0).start(0.0, 1, 1e6)[1] == pytest.approx(1.4 + 0.8)
    stream = streams(initial=1, rate=1000.0)
    for at in (0.0, 1.0, 2.0):
        stream.start(at, 1, 500.0)
    assert stream.start(3.0, 1, 1e5)[1] == pytest.approx((2.0 - 1.0) + 0.0)  # it is 1000 bytes now, and 2000 then


def test_idle_streams_halve_their_window_every_timeout():
    stream = streams(initial=1, rate=1000.0)
    stream.start(0.0, 1, 4000.0)  # takes 6.2 s and leaves 2400 + what the last window was not filled with
    assert stream.start(6.2 + 2.9, 1, 4000.0)[1] == 0.0
    later = streams(initial=1, rate=1000.0)
    later.start(0.0, 1, 4000.0)
    assert later.start(1000.0, 1, 4000.0)[1] == pytest.approx(1.4 + 0.8)  # where it began


def test_windows_and_lanes_bound_what_is_under_way():
    least, _ = streams(window=50, rate=100.0).start(0.0, 1, 1000.0)
    assert least == pytest.approx(1000.0 / 50 * 2.0)
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
def test_kernel_timers_are_half_a_step_late(wait, more):
    assert late(wait) == pytest.approx(more)


def test_idle_streams_wait_only_if_none_is_busy():
    chain = HopChain(NetworkLink(rate=1000.0, delay=1.0, mtu=652, window=1 << 40, timeout=1.0))
    assert chain.recovery(10.0, 10.5) == 11.0  # no stream yet: what is sent then waits for a time-out
    busy, _ = (chain.streams(2.0, 0.0, 100.0, 0) for _ in range(2))
    assert chain.recovery(10.0, 10.5) == pytest.approx(16.13)
    busy.start(0.0, 1, 1e6)
    assert chain.recovery(10.0, 10.5) == pytest.approx(10.5)


FIXED = 1.25 + 0.5 + 2 * 3.0


def sink(rank, clients):
    """Let each of *clients* write to a region of its own, and wait until all have."""
    for name in clients:
        rank.endpoint.register(rank.device.allocate(1 << 16), name)
    for name in clients:
        rank.channel.send(name, rank.endpoint.address())
    for _ in clients:
        yield rank.channel.receive()


def source(rank, size, start, blocks):
    """Write *size* bytes at *start*; return when the address came, and how long it took."""
    region = rank.endpoint.register(rank.device.allocate(1 << 16), "own")
    sender, address = yield rank.channel.receive()
    came = rank.clock.now
    peer = rank.endpoint.connect(address)
    yield rank.clock.timeout(start - came)
    offset = [index * (size // blocks) for index in range(blocks)]
    batch = Batch(region, peer.regions[rank.name], offset, offset, [size // blocks] * blocks)
    yield rank.endpoint.write(peer, batch)
    took = rank.clock.now - start
    rank.channel.send(sender, b"done")
    return [came, took]


def run(flows, nodes=2, at=0, start=100.0, blocks=1, inter=(), **link):
    """Write as each of *flows*, node to bytes, says, all to node *at* and all at once; return what they return."""
    hosts = machine(nodes=nodes, gpus=0, vendor="cpu")
    host = replace(hosts.host, tcp_rate=1e9, memory_rate=1e9, tcp_latency=0.5)
    hosts = replace(hosts, host=host, link=NetworkLink(**({"rate": 1000.0, "delay": 3.0, "mtu": 1000} | link)))
    names = {f"from{node}": (node, size) for node, size in flows.items()}
    specs = [RankSpec("sink", f"{__name__}:sink", Place(at), {"clients": list(names)})]
    specs += [
        RankSpec(name, f"{__name__}:source", Place(node), {"size": size, "start": start, "blocks": blocks})
        for name, (node, size) in names.items()
    ]
    cpu = replace(engine(inter=cost("tcp", **dict(inter)), intra=cost("tcp")), vendors=("cpu",))
    ranks = Model(hosts, cpu).run(specs).ranks
    assert not [rank.error for rank in ranks.values() if rank.error]
    return {node: ranks[f"from{node}"].value for node in flows}


def test_each_direction_has_its_way_and_its_rate():
    assert run({1: 9480})[1][0] == pytest.approx(0.5 + 3.0, abs=1e-6)
    assert run({1: 9480}, back=500.0)[1][1] == pytest.approx(9480 / 474 + FIXED)
    assert run({0: 9480}, at=1, back=500.0)[0][1] == pytest.approx(9480 / 948 + FIXED)


def test_two_flows_share_the_hop_that_both_pass():
    took = run({1: 9480, 2: 9480}, nodes=3)
    assert took[1][1] == pytest.approx(2 * 9480 / 948 + FIXED)
    assert took[2][1] == pytest.approx(2 * 9480 / 948 + FIXED + 6.0)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"kind": "stall"}, 4.0),
        ({"kind": "slow", "share": 0.25}, 3.0),
        # a probe after two round trips and their queues of 0.7 s is answered; then 1, 2 and 4 segments wait
        ({"kind": "cut"}, 2 * (6.0 + 0.4 * 1.75) + 0.002 + 0.128 + 6.0 + 5.0 + 4.0 + 2.0),
    ],
    ids=["stall", "slow", "cut"],
)
def test_a_transfer_waits_while_the_link_does_not_carry_it(change, more):
    changes = (LinkChange(start=103.0, end=107.0, **change),)
    took = run({1: 9480}, changes=changes, timeout=1.0)
    assert took[1][1] == pytest.approx(9480 / 948 + FIXED + more)


def test_other_hops_and_nodes_are_no_concern():
    changes = (LinkChange(kind="stall", start=103.0, end=107.0, hop=1),)
    assert run({1: 9480}, nodes=3, changes=changes)[1][1] == pytest.approx(9480 / 948 + FIXED)
    assert run({0: 9480})[0][1] == pytest.approx(1.25 + 0.5, abs=1e-3)


def test_an_engine_with_lanes_sends_blocks_in_rounds():
    took = run({1: 80}, blocks=8, inter={"lanes": 2})[1][1]
    rounds = 3 * (6.0 + 2 * 0.25 + 10 / 948) + 2 * 10 / 948
    assert took == pytest.approx(1.0 + 8 * 0.25 + rounds + 0.5 + 6.0)
