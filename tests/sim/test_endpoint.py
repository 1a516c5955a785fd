"""The simulated endpoint at exact times, and network cards that fail; what holds of all is in `pdsim.testing`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdsim.core.errors import (
    BackendUnavailable,
    InvalidBatch,
    PeerLost,
    RegistrationError,
    SendQueueFull,
    TransferFailed,
)
from pdsim.sim.endpoint import DETECTION, SimEndpoint
from pdsim.sim.hosts import HostLatency, JobClock, RankClock
from pdsim.sim.memory import DeviceMemory, SimDevice
from pdsim.sim.network import Network
from pdsim.sim.posting import Fabric
from pdsim.sim.topology import Site, Topology
from pdsim.transfer import Batch
from pdsim.transfer.job import Place
from pdsim.transfer.log import TransferLog
from tests.support.machines import cost, engine, machine

SAME_NODE = (Place(0, 0), Place(0, 1))


class Side:
    """One rank: an endpoint with a registered buffer of 1000 bytes."""

    def __init__(self, fabric, name, place, tracked=True, host_latency=None):
        self.clock = RankClock(fabric.clock, name)
        site = fabric.topology.site(place)
        memory, link = DeviceMemory(site.name, 4096, tracked=tracked), fabric.topology.memory(site)
        self.device = SimDevice(memory, self.clock, fabric.network, link, host_latency=host_latency)
        self.records = TransferLog()
        recorder = SimpleNamespace(transfer=self.records.append, series=self.records.extend_run)
        self.endpoint = SimEndpoint(fabric, name, self.clock, self.device, site, recorder)
        self.buffer = self.device.allocate(1000)
        self.region = self.endpoint.register(self.buffer, "kv")


class Bench:
    """Ranks a and b on two GPUs of a node; ports of 100 bytes/s.

    With the cost of `machines.cost`, a write of 100 bytes in one descriptor: posting until 1.25, wire until 2.25,
    complete at 2.75.
    """

    def __init__(self, model=None, timeout=1000.0, tracked=True, places=SAME_NODE, inter=None, wake=0.0):
        self.clock = JobClock()
        network = Network(self.clock)
        topology = Topology(machine(), network)
        self.fabric = Fabric(self.clock, network, topology, engine(model or cost(), inter, timeout))
        host_latency = HostLatency(self.clock, replace(machine().host, wake=wake))
        self.a, self.b = (
            Side(self.fabric, name, place, tracked, host_latency) for name, place in zip("ab", places, strict=True)
        )
        self.log = []

        self.connect()

    def connect(self):
        self.peer = self.a.endpoint.connect(self.b.endpoint.address())
        return self.peer

    def batch(self, size=100, source=0, target=0):
        return Batch(self.a.region, self.peer.regions["kv"], [source], [target], [size])

    def write(self, size=100, notify=b"", timeout=None, source=0, target=0, label=""):
        batch = self.batch(size, source, target)
        return self.watch(self.a.endpoint.write(self.peer, batch, notify, timeout=timeout, label=label))

    def read(self, size=100, timeout=None):
        batch = Batch(self.peer.regions["kv"], self.a.region, [0], [0], [size])
        return self.watch(self.a.endpoint.read(self.peer, batch, timeout=timeout))

    def watch(self, transfer):
        transfer.settled.callbacks.append(lambda _: self.log.append((self.clock.now, "settled")))
        transfer.callbacks.append(lambda event: self.log.append((self.clock.now, verdict(event))))
        return transfer

    def at(self, when, action):
        self.clock.call_at(when, lambda _: action(), None)
        return self

    def run(self, until=None):
        self.clock.run(until)
        return self.log

    def notified(self):
        self.b.endpoint.notifications.listen(lambda note: self.log.append((self.clock.now, note.payload)))


def verdict(event):
    return "ok" if event.ok else type(event.value).__name__


@pytest.fixture
def bench():
    return Bench()


def test_calls_between_gpus_follow_one_another():
    bench = Bench(cost(in_order=True))
    bench.write()
    bench.write()
    bench.run()
    # posting 1.25, wire 1, and 0.5 in which the thread asks for the end
    assert [(record.submitted, record.completed) for record in bench.a.records] == [(0.0, 3.5), (1.75, 4.5)]


def test_copies_of_a_stream_follow_and_end_together():
    bench = Bench(cost(in_order=True, one_stream=True))
    bench.write()
    bench.write()
    bench.run()
    # the second's descriptors take their 1.25 after the first's wire, which ends at 2.25; the stream is idle at 4.5
    assert [(record.submitted, record.completed) for record in bench.a.records] == [(1.75, 5.0), (0.0, 5.0)]
    bench = Bench(cost(in_order=True, one_stream=True, latency=8.0))
    bench.write()
    bench.write()
    bench.run()
    assert [(record.submitted, record.completed) for record in bench.a.records] == [(0.0, 10.25), (9.25, 19.5)]


def test_a_transfer_succeeds_with_its_record_and_settles(bench):
    transfer = bench.write(label="chunk 0")
    assert bench.run() == [(2.75, "settled"), (2.75, "ok")]
    route, times = ("write", "a", "b", 100, 1), (0.0, 0.0, 1.25, 2.75, 2.75)
    assert transfer.value == ("model:test", *route, *times, "ok", "chunk 0")
    assert bench.a.records == [transfer.value]


def test_bytes_are_read_and_land_at_the_instant_of_completion(bench):
    bench.a.buffer.write(0, b"old")
    bench.write(size=3)
    bench.at(1.75, lambda: bench.a.buffer.write(0, b"new"))  # too early: the engine may still read
    bench.at(1.75, lambda: bench.log.append(bench.b.buffer.read(0, 3)))
    assert bench.run()[0] == b"\0\0\0"
    assert bench.b.buffer.read(0, 3) == b"new"


@pytest.mark.parametrize(("wake", "killed", "notified"), [(0.0, 9.0, [2.75]), (0.5, 3.5, [3.25]), (0.5, 3.0, [])])
def test_a_notification_arrives_with_the_bytes_and_is_acted_upon(wake, killed, notified):
    bench = Bench(wake=wake).at(killed, lambda: bench.b.endpoint.kill())
    bench.notified()
    bench.a.buffer.write(0, b"kv")
    bench.write(notify=b"x")
    assert [note for note in bench.run() if note[1] == b"x"] == [(at, b"x") for at in notified]
    assert bench.b.buffer.read(0, 2) == b"kv"


def test_a_transfer_past_its_deadline_is_quarantined_until_it_lands(bench):
    bench.a.buffer.write(0, b"late")
    bench.write(timeout=2.0)
    bench.run(until=2.5)
    assert (bench.log, bench.a.endpoint.quarantined) == ([(2.0, "TransferTimeout")], 1)
    with pytest.raises(RegistrationError, match="1 transfers over region 'kv' have not settled"):
        bench.a.endpoint.deregister(bench.a.region)
    assert bench.run() == [(2.0, "TransferTimeout"), (2.75, "settled")]
    assert bench.a.endpoint.quarantined == 0
    assert bench.b.buffer.read(0, 4) == b"late"
    bench.a.endpoint.deregister(bench.a.region)


def test_target_memory_is_kept_until_it_settles(bench):
    bench.write(timeout=2.0)

    def withdraw():
        bench.b.endpoint.deregister(bench.b.region)
        bench.b.device.free(bench.b.buffer)
        bench.log.append(bench.b.device.used)

    assert bench.at(2.25, withdraw).run() == [(2.0, "TransferTimeout"), 1000, (2.75, "settled")]
    assert bench.b.device.used == 0


@pytest.mark.parametrize(
    ("how", "timeouts", "expected"),
    [
        ({"timeout": 2.0}, (None, 10.0), [(2.0, "TransferTimeout"), (4.0, "ok")]),  # the engine's, or what is given
        ({}, (2.5, 1.5), [(1.5, "TransferTimeout"), (2.5, "TransferTimeout")]),  # the later one's first
        # what waits in the queue is withdrawn and never lands
        ({"model": cost(depth=1)}, (None, 2.0), [(2.0, "TransferTimeout"), (2.75, "ok")]),
        ({"model": cost(depth=1)}, (None, None), [(2.75, "ok"), (5.5, "ok")]),
    ],
)
def test_deadlines_end_transfers(how, timeouts, expected):
    bench = Bench(**how)
    bench.a.buffer.write(0, b"x" * 100)
    for number, timeout in enumerate(timeouts):
        bench.write(target=100 * number, timeout=timeout)
    assert [event for event in bench.run() if event[1] != "settled"] == expected
    withdrawn = "model" in how and timeouts[1] is not None
    assert bench.b.buffer.read(100, 1) == (b"\0" if withdrawn else b"x")


def test_a_deadline_begins_when_the_posting_thread_takes_the_call():
    bench = Bench(model=cost(in_order=True))
    bench.write()
    bench.write(target=100, timeout=2.0)  # the thread takes it at 1.75
    assert [event for event in bench.run() if event[1] != "settled"] == [(3.5, "ok"), (3.75, "TransferTimeout")]
    assert [(row.submitted, row.completed) for row in bench.a.records] == [(0.0, 3.5), (1.75, 3.75)]


def test_a_peer_is_lost_before_it_is_noticed(bench):
    bench.b.endpoint.kill()
    bench.at(DETECTION / 4, lambda: bench.write(timeout=DETECTION / 4))
    bench.at(DETECTION / 2, bench.write)
    ends = [(DETECTION, what) for what in ("settled", "settled", "PeerLost")]
    assert bench.run() == [(DETECTION / 2, "TransferTimeout"), *ends]


@pytest.mark.parametrize("at", [0.5, 1.75, 2.5])  # while posting, on the wire, on the way back
@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_lost_peer_is_noticed_after_the_detection_delay(bench, at, operation, end):
    getattr(bench, operation)()
    bench.at(at, getattr(bench.b.endpoint, end))
    assert bench.run() == [(at + DETECTION, "settled"), (at + DETECTION, "PeerLost")]
    assert bench.a.endpoint.quarantined == 0


def test_a_lost_peer_gets_no_bytes_nor_links(bench):
    bench.a.buffer.write(0, b"kv")
    bench.write(notify=b"x")
    bench.at(1.75, bench.b.endpoint.kill).run()
    assert bench.b.buffer.read(0, 2) == b"\0\0"
    assert len(bench.b.endpoint.notifications) == 0
    carried = {link.name: link.carried for link in bench.fabric.network.links if link.carried}
    names = ("gpu0/memory", "gpu0/nvlink.out", "gpu1/nvlink.in", "gpu1/memory")
    assert carried == {f"node0/{name}": 50.0 for name in names}


def test_closing_settles_transfers_and_ends_all_use(bench):
    transfer = bench.write()
    bench.at(1.75, bench.a.endpoint.close)
    assert sorted(bench.run()) == [(1.75, "TransferFailed"), (1.75, "settled")]
    assert str(transfer.value) == "a closed its endpoint during the transfer"
    assert [record.status for record in bench.a.records] == ["TransferFailed"]
    for call in (bench.a.endpoint.address, lambda: bench.a.endpoint.connect(b"")):
        with pytest.raises(TransferFailed, match="the endpoint of a is closed"):
            call()
    with pytest.raises(RegistrationError, match="a has closed its endpoint"):
        bench.a.endpoint.register(bench.a.buffer, "again")
    with pytest.raises(RegistrationError, match="region a/kv is not registered"):
        bench.write()


def test_a_killed_endpoint_never_reports_what_it_posted():
    bench = Bench(timeout=2.0)
    bench.write()
    bench.at(0.5, bench.a.endpoint.kill).at(1.0, bench.b.endpoint.kill)
    assert bench.run() == []
    assert (list(bench.a.records), bench.a.endpoint.quarantined) == ([], 0)


def test_a_region_withdrawn_by_the_peer_fails_the_transfer(bench):
    transfer = bench.write(notify=b"x")
    bench.at(1.75, lambda: bench.b.endpoint.deregister(bench.b.region))
    assert bench.run() == [(2.75, "settled"), (2.75, "TransferFailed")]
    assert "region b/kv is no longer registered" in str(transfer.value)
    assert len(bench.b.endpoint.notifications) == 0


def test_buffers_regions_and_peers_of_others_are_refused(bench):
    with pytest.raises(RegistrationError, match="is not allocated on node0/gpu0"):
        bench.a.endpoint.register(bench.b.buffer, "theirs")
    with pytest.raises(RegistrationError, match="is registered as 'kv'; deregister it first"):
        bench.a.device.free(bench.a.buffer)
    mine, theirs = bench.a.region, bench.peer.regions["kv"]
    connect = "region a/kv is not in the address of b, which has kv; connect again"
    for region, message in ((theirs, "must be a region of a, got one of b"), (mine, connect)):
        with pytest.raises(InvalidBatch, match=message):
            bench.a.endpoint.write(bench.peer, Batch(region, region, [0], [0], [8]))
    peer = bench.b.endpoint.connect(bench.a.endpoint.address())
    with pytest.raises(InvalidBatch, match="peer a is not connected to a"):
        bench.a.endpoint.write(peer, bench.batch())
    address = msgspec.json.encode({"rank": "z", "engine": "model:test", "regions": []})
    with pytest.raises(PeerLost, match="z is gone"):
        bench.a.endpoint.connect(address)


def test_across_nodes_another_model_counts_or_none():
    places = (Place(0, 0), Place(1, 0))
    bench = Bench(places=places, inter=cost("rdma", call=0.0, descriptor=0.0, latency=0.0))
    bench.write()
    assert bench.run()[-1] == (5.0, "ok")  # 100 bytes at the card's 20 bytes/s
    with pytest.raises(BackendUnavailable, match=r"backend 'test' does not work across nodes \(inter: null\)"):
        Bench(places=places)


def test_a_refusing_send_queue_fails_and_settles_the_transfer():
    bench = Bench(cost(depth=1, full="refuse"))
    bench.write(target=0)
    refused = bench.write(target=100)
    assert sorted(bench.run()[:2]) == [(0.0, "SendQueueFull"), (0.0, "settled")]
    assert isinstance(refused.value, SendQueueFull)
    assert [record.status for record in bench.a.records] == ["SendQueueFull", "ok"]


def test_a_refused_transfer_is_not_submitted_after_its_end():
    bench = Bench(cost(in_order=True, depth=1, full="refuse"))
    bench.write(target=0)
    bench.write(target=100)  # which the thread would take up at 1.75
    bench.run()
    refused = bench.a.records[0]
    assert (refused.status, refused.submitted, refused.completed) == ("SendQueueFull", 0.0, 0.0)


APART = (Place(0, 0), Place(1, 0))


class Cards(Bench):
    """Ranks on GPU 0 of two nodes, each with two cards."""

    def __init__(self, failover: bool, **more: Any) -> None:
        super().__init__(inter=cost("rdma"), places=APART, **more)
        self.fabric.engine = replace(self.fabric.engine, failover=failover)

    def down(self, start: float, end: float = 100.0, card: tuple[int, int] = (0, 0)) -> Cards:
        return self.at(start, lambda: self.fabric.fail(card)).at(end, lambda: self.fabric.repair(card))

    def send(self, at: float) -> Cards:
        return self.at(at, self.write)


@pytest.mark.parametrize("card", [(0, 0), (1, 0)])
def test_a_card_of_either_side_fails_what_is_under_way(card):
    bench = Cards(failover=False).send(0.0).down(3.25, card=card)
    assert bench.run() == [(3.35, "settled"), (3.35, "TransferFailed")]


def test_what_has_not_arrived_goes_on_over_another_card():
    bench = Cards(failover=True).send(0.0).down(3.25)
    bench.a.buffer.write(0, bytes(range(100)))
    bench.run()  # 60 bytes are left: posted from 3.35 to 4.6, on the wire until 7.6
    assert [time for time, _ in bench.log] == pytest.approx([8.1, 8.1])
    assert bench.log[1][1] == "ok"
    assert bytes(bench.b.buffer.read(0, 100)) == bytes(range(100))


def test_without_a_card_left_a_transfer_fails():
    bench = Cards(failover=True).send(0.0).down(2.0, card=(0, 1)).down(3.25)
    assert bench.run() == [(3.35, "settled"), (3.35, "TransferFailed")]


def test_cards_of_other_gpus_and_nodes_fail_nothing():
    bench = Cards(failover=False).send(0.0).down(3.25, card=(0, 1)).down(3.25, card=(1, 1))
    assert bench.run() == [(6.75, "settled"), (6.75, "ok")]


def test_transfers_fail_until_the_last_failure_is_repaired():
    bench = Cards(failover=False).down(1.0, 9.0).send(4.0).send(10.0)
    bench.run()
    assert [time for time, _ in bench.log] == pytest.approx([4.1, 4.1, 16.75, 16.75])
    assert [what for _, what in bench.log] == ["settled", "TransferFailed", "settled", "ok"]
    bench = Cards(failover=False).down(1.0, 5.0).down(2.0, 9.0).send(6.0).send(10.0)
    bench.run()
    assert [time for time, _ in bench.log] == pytest.approx([6.1, 6.1, 16.75, 16.75])


def test_a_detour_takes_turns_with_those_whose_card_it_is():
    bench = Cards(failover=True).down(1.0, 50.0).send(2.0).send(60.0)
    site = bench.fabric.topology.site(Place(0, 3))  # of the other card
    other = bench.fabric.send_queue("other", bench.fabric.poster(site), site, bench.b.endpoint.site)
    bench.at(2.0, lambda: other.post(1000, 1, False, lambda _: None, 0))
    bench.run()  # 100 bytes at half of 20 bytes/s from 3.25 on, and alone again over its own card
    assert [time for time, _ in bench.log] == pytest.approx([13.75, 13.75, 66.75, 66.75])


def test_a_peer_that_ends_meanwhile_is_what_is_reported():
    bench = Cards(failover=True).send(0.0).down(3.25).at(3.3, lambda: bench.b.endpoint.kill())
    bench.run()
    assert bench.log[1] == (pytest.approx(3.4), PeerLost.__name__)


def test_a_transfer_in_quarantine_settles_when_its_card_fails():
    bench = Cards(failover=False, timeout=2.0).send(0.0).down(3.25)
    assert bench.run() == [(2.0, "TransferTimeout"), (3.35, "settled")]


def test_another_card_is_of_the_same_socket_if_one_works():
    topology = Topology(machine(cards=4), Cards(failover=True).fabric.network)
    site = Site(0, 0, 0)
    assert topology.around(site, {(1, 0)}) == site
    assert topology.around(site, {(0, 0)}) == Site(0, 0, 1)
    assert topology.around(site, {(0, 0), (0, 1)}).card in (2, 3)
    assert topology.around(site, {(0, card) for card in range(4)}) == site
