"""A link between nodes on the model: what it carries, how long its way is, who shares it.

A packet of 1000 bytes has 948 of data, so 1000 bytes/s of packets carry 948 bytes/s.  Posting takes 1.25 s,
completion 0.5 s (`machines.cost`), and the way to the other end and back 6 s.
"""

from dataclasses import replace

import pytest

from pdsim.hardware.machine import LinkChange, NetworkLink
from pdsim.sim.model import Model
from pdsim.transfer import Batch
from pdsim.transfer.job import Place, RankSpec
from tests.support.machines import cost, engine, machine

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


def test_a_message_takes_the_way_once():
    assert run({1: 9480})[1][0] == pytest.approx(0.5 + 3.0, abs=1e-6)


def test_each_direction_has_a_rate_of_its_own():
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


def test_a_change_of_another_hop_concerns_nobody_else():
    changes = (LinkChange(kind="stall", start=103.0, end=107.0, hop=1),)
    assert run({1: 9480}, nodes=3, changes=changes)[1][1] == pytest.approx(9480 / 948 + FIXED)


def test_an_engine_with_lanes_sends_blocks_in_rounds():
    took = run({1: 80}, blocks=8, inter={"lanes": 2})[1][1]
    rounds = 3 * (6.0 + 2 * 0.25 + 10 / 948) + 2 * 10 / 948
    assert took == pytest.approx(1.0 + 8 * 0.25 + rounds + 0.5 + 6.0)


def test_within_a_node_nothing_passes_the_link():
    assert run({0: 9480})[0][1] == pytest.approx(1.25 + 0.5, abs=1e-3)
