"""Network cards that fail and are repaired, at exact times: a write of 100 bytes has 20 bytes/s from 1.25 s on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdsim.core.errors import PeerLost
from pdsim.sim.topology import Site, Topology
from pdsim.transfer.job import Place
from tests.sim.test_endpoint import Bench
from tests.support.machines import cost, machine

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


def test_transfers_fail_until_the_card_is_repaired():
    bench = Cards(failover=False).down(1.0, 9.0).send(4.0).send(10.0)
    bench.run()
    assert [time for time, _ in bench.log] == pytest.approx([4.1, 4.1, 16.75, 16.75])
    assert [what for _, what in bench.log] == ["settled", "TransferFailed", "settled", "ok"]


def test_failures_of_one_card_that_overlap_end_with_the_last():
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
