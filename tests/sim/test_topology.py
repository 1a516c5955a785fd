"""Which links lie between two memories."""

import pytest

from pdsim.core.clock import Clock
from pdsim.core.errors import ConfigError
from pdsim.sim.network import Network
from pdsim.sim.topology import Site, Topology
from pdsim.transfer.job import Place
from tests.support.machines import machine


def topology(**changes):
    return Topology(machine(**changes), Network(Clock()))


def names(route):
    return [link.name for link in route.links]


def gpu(index, node=0, card=0):
    return Site(node, index, card)


HOST = Site(0, None, 0)


def test_a_switch_has_a_port_out_and_a_port_in_for_each_gpu():
    route = topology().route("nvlink", gpu(0), gpu(3))
    assert names(route) == [
        "node0/gpu0/memory",
        "node0/gpu0/nvlink.out",
        "node0/gpu3/nvlink.in",
        "node0/gpu3/memory",
    ]


def test_a_mesh_has_one_link_for_each_ordered_pair():
    mesh = topology(kind="mesh", vendor="amd")
    assert names(mesh.route("nvlink", gpu(0), gpu(3))) == [
        "node0/gpu0/memory",
        "node0/gpu0/xgmi.gpu3",
        "node0/gpu3/memory",
    ]
    assert mesh.route("nvlink", gpu(3), gpu(0)).links[1].name == "node0/gpu3/xgmi.gpu0"


@pytest.mark.parametrize("kind", ["switch", "mesh", "none"])
def test_within_a_gpu_every_byte_passes_its_memory_twice(kind):
    assert names(topology(kind=kind).route("nvlink", gpu(2), gpu(2))) == ["node0/gpu2/memory"] * 2


def test_rdma_goes_from_card_to_card_even_within_a_node():
    route = topology().route("rdma", gpu(0, card=0), gpu(3, card=1))
    assert names(route) == [
        "node0/gpu0/memory",
        "node0/gpu0/pcie.out",
        "node0/nic0/tx",
        "node0/nic1/rx",
        "node0/gpu3/pcie.in",
        "node0/gpu3/memory",
    ]


def test_rdma_of_host_memory_needs_no_gpu():
    route = topology().route("rdma", HOST, Site(1, None, 1))
    assert names(route) == ["node0/host/memory", "node0/nic0/tx", "node1/nic1/rx", "node1/host/memory"]


def test_tcp_has_a_link_in_each_direction_and_one_for_all_loopback():
    links = topology()
    assert names(links.route("tcp", HOST, Site(1, None, 0))) == [
        "node0/host/memory",
        "node0/tcp.out",
        "node1/tcp.in",
        "node1/host/memory",
    ]
    assert names(links.route("tcp", HOST, HOST)) == ["node0/host/memory", "node0/tcp.loopback", "node0/host/memory"]


def test_tcp_stages_gpu_memory_through_the_host():
    assert names(topology().route("tcp", gpu(0), HOST)) == [
        "node0/gpu0/memory",
        "node0/gpu0/pcie.out",
        "node0/host/memory",  # written by the copy
        "node0/host/memory",  # read by the socket
        "node0/tcp.loopback",
        "node0/host/memory",
    ]
    assert names(topology().route("tcp", HOST, gpu(1)))[-4:] == [
        "node0/host/memory",
        "node0/host/memory",
        "node0/gpu1/pcie.in",
        "node0/gpu1/memory",
    ]


def test_shared_memory_is_read_and_written():
    assert names(topology().route("shm", HOST, HOST)) == ["node0/host/memory"] * 2


def test_the_latency_is_that_of_the_switch_or_the_cards():
    links = topology(latency=0.125)
    assert links.route("nvlink", gpu(0), gpu(1)).latency == 0.125
    assert links.route("nvlink", gpu(0), gpu(0)).latency == 0.0
    assert links.route("rdma", gpu(0), gpu(1)).latency == 0.125
    assert links.route("shm", HOST, HOST).latency == 0.0


def test_gpus_are_spread_over_the_cards_in_order():
    links = topology(gpus=8, cards=4)
    assert [links.site(Place(0, index)).card for index in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_hosts_take_the_cards_of_their_node_in_turn():
    links = topology(cards=2)
    assert [links.site(Place(0)).card for _ in range(3)] == [0, 1, 0]
    assert links.site(Place(1)).card == 0


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
        ({}, "shm", HOST, Site(1, None, 0), "memory is shared within a node only"),
    ],
)
def test_a_way_that_is_not_there_is_refused(changes, kind, source, target, message):
    with pytest.raises(ConfigError, match=message):
        topology(**changes).route(kind, source, target)
