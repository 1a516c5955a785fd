"""Which links lie between two memories."""

import numpy as np
import pytest

from experiments import transfer
from pdsim.config.compose import compose
from pdsim.core.clock import Clock
from pdsim.core.errors import ConfigError
from pdsim.sim.model import Model
from pdsim.sim.network import Network
from pdsim.sim.topology import Site, Topology
from pdsim.transfer.job import Place
from tests.support.machines import machine

HOST, OTHER = Site(0, None, 0), Site(1, None, 1)


def topology(**changes):
    return Topology(machine(**changes), Network(Clock()))


def gpu(index, node=0, card=0):
    return Site(node, index, card)


GPU, OUT, IN, PEER, MEMORY = "gpu0/memory", "gpu0/pcie.out", "gpu3/pcie.in", "gpu3/memory", "host/memory"
ROUTES = {
    "switch": ({}, "nvlink", gpu(0), gpu(3), [GPU, "gpu0/nvlink.out", "gpu3/nvlink.in", PEER]),
    "mesh": ({"kind": "mesh", "vendor": "amd"}, "nvlink", gpu(0), gpu(3), [GPU, "gpu0/xgmi.gpu3", PEER]),
    "mesh back": ({"kind": "mesh", "vendor": "amd"}, "nvlink", gpu(3), gpu(0), [PEER, "gpu3/xgmi.gpu0", GPU]),
    "within a GPU twice": ({}, "nvlink", gpu(0), gpu(0), [GPU] * 2),
    "within a GPU without a switch": ({"kind": "none"}, "nvlink", gpu(0), gpu(0), [GPU] * 2),
    "cards in a node": ({}, "rdma", gpu(0, card=0), gpu(3, card=1), [GPU, OUT, "nic0/tx", "nic1/rx", IN, PEER]),
    "a card of the other socket": (
        {"devices": (1,), "far": 0.5},
        "rdma",
        gpu(0, card=1),
        gpu(3, card=1),
        [GPU, OUT, "switch0/up", "nic1/socket.out", "switch1/down", "nic1/tx", "nic1/rx", IN, PEER],
    ),
    "cards without GPUDirect": (
        {"gpudirect": False},
        "rdma",
        gpu(0, card=0),
        HOST,
        [GPU, OUT, "switch0/up", MEMORY, MEMORY, "switch0/down", "nic0/tx", "nic0/rx", MEMORY],
    ),
    "cards of hosts": ({}, "rdma", HOST, OTHER, ["host/memory", "nic0/tx", "node1/nic1/rx", "node1/host/memory"]),
    "tcp": ({}, "tcp", HOST, OTHER, ["host/memory", "tcp.out", "node1/tcp.in", "node1/host/memory"]),
    "loopback": ({}, "tcp", HOST, HOST, ["host/memory", "tcp.loopback", "host/memory"]),
    # the host's memory is written by the copy and read by the socket
    "staged": ({}, "tcp", gpu(0), HOST, [GPU, OUT, MEMORY, MEMORY, "tcp.loopback", MEMORY]),
    "staged back": ({}, "tcp", HOST, gpu(3), [MEMORY, "tcp.loopback", MEMORY, MEMORY, IN, PEER]),
    "shared memory": ({}, "shm", HOST, HOST, ["host/memory"] * 2),
}


@pytest.mark.parametrize(("changes", "kind", "source", "target", "expected"), ROUTES.values(), ids=ROUTES)
def test_a_route_passes(changes, kind, source, target, expected):
    links = topology(**changes).route(kind, source, target).links
    assert [link.name for link in links] == [name if "node1" in name else f"node0/{name}" for name in expected]


def test_routes_have_latencies_and_gpus_their_cards():
    links = topology(latency=0.125)
    ways = [("nvlink", gpu(0), gpu(1)), ("nvlink", gpu(0), gpu(0)), ("rdma", gpu(0), gpu(1)), ("shm", HOST, HOST)]
    assert [links.route(*way).latency for way in ways] == [0.125, 0.0, 0.125, 0.0]
    links = topology(gpus=8, cards=4)
    assert [links.site(Place(0, index)).card for index in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [links.site(Place(node)).card for node in (0, 0, 1, 0, 0, 0)] == [0, 1, 0, 2, 3, 0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cards": 8, "devices": (0,)}, [0] * 8),  # one card for all
        ({"cards": 8, "devices": (0, 1, 6)}, [0, 1, 0, 1, 6, 6, 6, 6]),  # its own, one of its socket
        ({"cards": 4, "devices": (2, 3)}, [2, 3, 2, 3, 2, 2, 3, 3]),  # or one of the other socket
        ({"cards": 8, "rails": 2}, [0, 0, 1, 1, 2, 2, 3, 3]),  # groups of two
        ({"cards": 8, "rails": 2, "devices": (4, 5)}, [2] * 8),
    ],
)
def test_gpus_take_the_nearest_card_that_they_may(changes, expected):
    links = topology(gpus=8, **changes)
    assert [links.site(Place(0, index)).card for index in range(8)] == expected


@pytest.mark.parametrize(
    ("changes", "source", "seconds"),
    [
        ({}, 1, 5.0),  # 100 bytes through a card of 20
        ({"devices": (1,), "far": 0.4}, 1, 12.5),  # of the other socket
        ({"devices": (1,), "far": 0.4}, 3, 5.0),
        ({"rails": 2}, 1, 2.5),
        ({"rails": 2, "gpudirect": False}, 1, 2.5),  # host memory of 400 carries it twice
    ],
)
def test_a_wrong_card_takes_as_long_as_its_slowest_link(changes, source, seconds):
    clock = Clock()
    network = Network(clock)
    links = Topology(machine(**changes), network)
    route = links.route("rdma", links.site(Place(0, source)), links.site(Place(1, 3)))
    ended = []
    network.start(network.path(route.links), 100.0, lambda _: ended.append(clock.now))
    clock.run()
    assert ended == [seconds]


def test_public_pair_on_another_sockets_card_gets_half():
    """UCX issue 11259: two cards for eight A100; GPU 0 to 7 over mlx5_0 alone had half of a card's bandwidth."""
    words = ["hw=2x8xa100", "backend=nixl", "hw.nic.count=2"]
    rates = []
    for more in ([], ["hw.nic.devices=[0]"]):
        config = compose([*words, *more])
        links = Topology(config.hw, Network(Clock()))
        route = links.route("rdma", links.site(Place(0, 0)), links.site(Place(1, 7))).links
        rates.append(min(link.capacity for link in route))
    assert rates[1] / rates[0] == pytest.approx(0.5, rel=0.1)


def test_a_queue_pair_has_one_of_two_bonded_ports():
    """Mooncake issue 1668: one queue pair reaches half of two bonded ports."""
    words = ["hw=2x8xh100", "backend=nixl", "experiment=transfer", "experiment.placement=[0,8]"]
    words += ["experiment.patterns=[pair]", "experiment.blocks=[1]", "experiment.size=[1GiB]"]
    rates = []
    for more in ([], ["hw.nic.ports=2"], ["hw.nic.ports=2", "backend.inter.queues=2"]):
        config = compose([*words, *more, "backend.inter.queue_rate=50GB/s"])
        result = transfer.run(config, Model(config.hw, config.backend), lambda *_: None)
        rates.append(result.values["bw_max_gbs"])
    assert rates[1] / rates[0] == pytest.approx(0.5, rel=0.01)
    assert rates[2] == pytest.approx(rates[0], rel=0.01)


@pytest.mark.parametrize(("thread", "factor"), [("false", 2.0), ("true", 2 * 0.6934)])
def test_processes_on_a_gpu_share_what_one_leaves(thread, factor):
    """With its thread, NIXL alone reaches 0.69 of a GPU's rate, and two processes all of it."""
    words = ["hw=2xh200", "backend=nixl", "experiment=transfer", f"backend.options.progress_thread={thread}"]
    words += ["experiment.placement=[0,1,0,1]", "experiment.blocks=[1]", "experiment.size=[256MiB]"]
    times = []
    for name in ("pair", "pairs:2"):
        config = compose([*words, f"experiment.patterns=[{name}]"])
        result = transfer.run(config, Model(config.hw, config.backend), lambda *_: None)
        times.append(np.median([one.seen - one.submitted for one in result.transfers]))
    assert times[1] / times[0] == pytest.approx(factor, rel=0.1)


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
