"""Which links lie between two memories."""

import pytest

from pdsim.core.clock import Clock
from pdsim.core.errors import ConfigError
from pdsim.sim.network import Network
from pdsim.sim.topology import Site, Topology
from pdsim.transfer.job import Place
from tests.support.machines import machine

HOST, OTHER = Site(0, None, 0), Site(1, None, 1)


def topology(**changes):
    return Topology(machine(**changes), Network(Clock()))


def gpu(index, node=0, card=0):
    return Site(node, index, card)


GPU, PEER = "gpu0/memory", "gpu3/memory"
ROUTES = {
    "switch": ({}, "nvlink", gpu(0), gpu(3), [GPU, "gpu0/nvlink.out", "gpu3/nvlink.in", PEER]),
    "mesh": ({"kind": "mesh", "vendor": "amd"}, "nvlink", gpu(0), gpu(3), [GPU, "gpu0/xgmi.gpu3", PEER]),
    "mesh back": ({"kind": "mesh", "vendor": "amd"}, "nvlink", gpu(3), gpu(0), [PEER, "gpu3/xgmi.gpu0", GPU]),
    "within a GPU twice": ({}, "nvlink", gpu(0), gpu(0), [GPU] * 2),
    "within a GPU without a switch": ({"kind": "none"}, "nvlink", gpu(0), gpu(0), [GPU] * 2),
    "cards even within a node": (
        {},
        "rdma",
        gpu(0, card=0),
        gpu(3, card=1),
        [GPU, "gpu0/pcie.out", "nic0/tx", "nic1/rx", "gpu3/pcie.in", PEER],
    ),
    "cards of hosts": ({}, "rdma", HOST, OTHER, ["host/memory", "nic0/tx", "node1/nic1/rx", "node1/host/memory"]),
    "tcp": ({}, "tcp", HOST, OTHER, ["host/memory", "tcp.out", "node1/tcp.in", "node1/host/memory"]),
    "loopback": ({}, "tcp", HOST, HOST, ["host/memory", "tcp.loopback", "host/memory"]),
    # the host's memory is written by the copy and read by the socket
    "staged": (
        {},
        "tcp",
        gpu(0),
        HOST,
        [GPU, "gpu0/pcie.out", "host/memory", "host/memory", "tcp.loopback", "host/memory"],
    ),
    "staged back": (
        {},
        "tcp",
        HOST,
        gpu(3),
        ["host/memory", "tcp.loopback", "host/memory", "host/memory", "gpu3/pcie.in", PEER],
    ),
    "shared memory": ({}, "shm", HOST, HOST, ["host/memory"] * 2),
}


@pytest.mark.parametrize(("changes", "kind", "source", "target", "expected"), ROUTES.values(), ids=ROUTES)
def test_a_route_passes(changes, kind, source, target, expected):
    links = topology(**changes).route(kind, source, target).links
    assert [link.name for link in links] == [name if "node1" in name else f"node0/{name}" for name in expected]


def test_the_latency_is_that_of_the_switch_or_the_cards():
    links = topology(latency=0.125)
    ways = [("nvlink", gpu(0), gpu(1)), ("nvlink", gpu(0), gpu(0)), ("rdma", gpu(0), gpu(1)), ("shm", HOST, HOST)]
    assert [links.route(*way).latency for way in ways] == [0.125, 0.0, 0.125, 0.0]


def test_gpus_are_spread_over_cards_that_hosts_take_in_turn():
    links = topology(gpus=8, cards=4)
    assert [links.site(Place(0, index)).card for index in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [links.site(Place(node)).card for node in (0, 0, 1, 0, 0, 0)] == [0, 1, 0, 2, 3, 0]


@pytest.mark.parametrize(
    ("changes", "place", "message"),
    [
        ({}, Place(2, 0), "place.node=2: test has nodes 0 to 1"),
        ({}, Place(-1, 0), "place.node=-1: test has nodes 0 to 1"),
        ({}, Place(0, 4), "place.gpu=4: test has GPUs 0 to 3"),
        ({"gpus": 0}, Place(0, 0), "place.gpu=0: test has no GPUs; take gpu=None"),
    ],
)
def test_a_place_that_is_not_there_is_refused(changes, place, message):
    with pytest.raises(ConfigError, match=message):
        topology(**changes).site(place)


@pytest.mark.parametrize(
    ("changes", "kind", "source", "target", "message"),
    [
        ({}, "nvlink", gpu(0), HOST, "nvlink from node0/gpu0 to node0/host: it joins GPUs only"),
        ({}, "nvlink", gpu(0), gpu(0, node=1), "it ends at the node; take a backend over rdma or tcp"),
        ({"kind": "none"}, "nvlink", gpu(0), gpu(1), "nothing joins the GPUs of test"),
        ({"cards": 0}, "rdma", gpu(0, card=None), gpu(1, card=None), "test has no cards"),
        ({}, "shm", HOST, OTHER, "memory is shared within a node only"),
    ],
)
def test_a_way_that_is_not_there_is_refused(changes, kind, source, target, message):
    with pytest.raises(ConfigError, match=message):
        topology(**changes).route(kind, source, target)
