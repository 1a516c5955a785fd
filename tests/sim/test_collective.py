"""Groups on the model: exact times of all-gathers, shared links, pools that grow, groups that break.

Ports carry 100 bytes/s each way, memories 1000.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdsim.core.errors import OutOfMemory, TransferError
from pdsim.hardware.costs import Collective, CollectiveModel, DeviceLine
from pdsim.hardware.machine import Machine
from pdsim.sim.endpoint import DETECTION
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Program
from pdsim.transfer.group import SYMMETRIC
from pdsim.transfer.job import Outcome, Place, Rank, RankSpec
from tests.support.machines import cost, engine, machine

RING = CollectiveModel(path="nvlink", pattern="ring", latency=3.0, step=0.5, rate=50.0, own_rate=100.0, copies=2)
DIRECT = CollectiveModel(path="nvlink", pattern="direct", latency=1.0, step=0.25, rate=80.0)
LIBRARY = Collective(
    name="test",
    implementation="nccl",
    plain=RING,
    symmetric=DIRECT,
    grow_latency=1.0,
    grow_rate=100.0,
    timeout=1000.0,
)


def run(
    program: Any, ranks: int = 4, library: Collective | None = LIBRARY, hw: Machine | None = None, **arguments: Any
) -> Outcome:
    names = [f"rank{index}" for index in range(ranks)]
    specs = [
        RankSpec(name, f"{program.__module__}:{program.__name__}", Place(0, index), {"names": names, **arguments})
        for index, name in enumerate(names)
    ]
    free = engine(cost(call=0.0, descriptor=0.0, latency=0.0))
    return Model(hw or machine(), free, collective=library).run(specs)


def values(outcome: Outcome) -> list[Any]:
    assert not [rank.error for rank in outcome.ranks.values() if rank.error]
    return [rank.value for rank in outcome.ranks.values()]


def gather(rank: Rank, names: list[str], size: int, pool: str = "default", late: float = 0.0) -> Program:
    """Gather once; the last rank *late*."""
    group = rank.group(names)
    if pool == SYMMETRIC:
        yield group.reserve(1000)
    source, target = rank.device.allocate(size, pool), rank.device.allocate(size * len(names), pool)
    started = rank.clock.now
    if group.index == len(names) - 1:
        yield rank.clock.timeout(late)
    record = yield group.all_gather(source, target)
    return [record.seen - started, record.posted - started, record.submitted - started]


BARE = replace(RING, rate=1e9, own_rate=1e9, latency=0.0, step=0.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_ring_takes_its_latency_for_each_other_rank(ranks):
    expected = 3 + 0.5 * (ranks - 1) + 100 / 100 + 100 * (ranks - 1) / 50
    assert [value[0] for value in values(run(gather, ranks, size=100))] == [
        pytest.approx(expected, rel=1e-12)
    ] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_direct_moves_as_many_bytes_through_every_port(ranks):
    expected = 1 + 0.25 * (ranks - 1) + 100 * (ranks - 1) / 80
    took = [value[0] for value in values(run(gather, ranks, size=100, pool=SYMMETRIC))]
    assert took == [pytest.approx(expected, rel=1e-12)] * ranks


def test_it_begins_with_the_last_call_and_ends_at_once():
    assert values(run(gather, 2, size=100, late=7.0)) == [[13.5, 7.0, 0.0], [13.5, 7.0, 7.0]]


def test_it_is_no_faster_than_ports_and_memory():
    fast = replace(LIBRARY, plain=BARE)
    assert values(run(gather, 4, fast, size=100))[0][0] == pytest.approx(3.0, rel=1e-6)
    # every memory is read once and written three times: 1000 bytes/s are 250 of arriving ones, were the port faster
    wide = replace(machine(), interconnect=replace(machine().interconnect, rate=1e6))
    assert values(run(gather, 2, fast, wide, size=1000))[0][0] == pytest.approx(4.0, rel=1e-5)


def gather_beside_a_write(rank: Rank, names: list[str], size: int) -> Program:
    """Gather while the first rank writes as many bytes to the second."""
    group, started = rank.group(names), rank.clock.now
    region = rank.endpoint.register(rank.device.allocate(size), "kv")
    source, target = rank.device.allocate(size), rank.device.allocate(size * len(names))
    if group.index == 1:
        rank.channel.send(names[0], rank.endpoint.address())
    if group.index == 0:
        _, address = yield rank.channel.receive()
        peer = rank.endpoint.connect(address)
        started = rank.clock.now
        rank.endpoint.write(peer, Batch(region, peer.regions["kv"], [0], [0], [size]))
    yield group.all_gather(source, target)
    return rank.clock.now - started


def test_it_shares_a_port_fairly_with_a_transfer():
    bare = replace(LIBRARY, plain=replace(BARE, copies=0))
    # 100 bytes each way from rank0 and one write from rank0 to rank1: half a port each, so two seconds, not one
    assert values(run(gather_beside_a_write, 2, bare, size=100))[0] == pytest.approx(2.0, rel=1e-6)


def gather_in_turn(rank: Rank, names: list[str], pool: str = "default", grow: bool = False) -> Program:
    """Gather, gather again at once, and again a second later; return how long each took."""
    group, found = rank.group(names), []
    for _ in range(2 if grow else 1):
        yield group.reserve(1000)
    source, target = rank.device.allocate(100, pool), rank.device.allocate(100 * len(names), pool)
    for pause in (1.0, 0.0, 1.0):
        if pause:
            yield rank.clock.timeout(pause)
        record = yield group.all_gather(source, target)
        found.append(record.seen - record.submitted)
    return found


@pytest.mark.parametrize(("grow", "expected"), [(False, 2.5), (True, 4.0)])
def test_a_pool_that_has_grown_keeps_the_hosts_for_longer(grow, expected):
    library = replace(LIBRARY, symmetric=replace(DIRECT, grown=4.0))
    found = values(run(gather_in_turn, 2, library, pool=SYMMETRIC, grow=grow))[0]
    assert found == [pytest.approx(expected, rel=1e-12)] * 3


@pytest.mark.parametrize(
    "model", [RING, replace(RING, after_pause=7.0, grown=9.0), replace(DIRECT, after_pause=7.0)]
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_alone_it_takes_what_the_closed_form_says(model, ranks):
    library = replace(LIBRARY, plain=model)
    expected = [model.isolated_time(ranks, 100, 100.0, paused=paused) for paused in (True, False, True)]
    assert values(run(gather_in_turn, ranks, library))[0] == [pytest.approx(one, rel=1e-12) for one in expected]


# --- pools ---------------------------------------------------------------------------------------------------------


def grow(rank: Rank, names: list[str], sizes: list[int]) -> Program:
    """Reserve *sizes* in turn while the device computes; return when each was there and what was counted."""
    group, found = rank.group(names), []
    for size in sizes:
        try:
            yield group.reserve(size)
            found.append(rank.clock.now)
        except OutOfMemory as error:
            found.append(str(error))
    yield rank.device.compute(1.0)
    return {
        "at": found,
        "computed": rank.clock.now,
        "growths": group.growths,
        "seconds": group.growth_seconds,
        "used": rank.device.used,
    }


def test_a_reservation_takes_a_latency_a_rank_and_its_bytes():
    for found in values(run(grow, 2, sizes=[400, 100])):
        assert found == {"at": [6.0, 9.0], "computed": 10.0, "growths": 1, "seconds": 3.0, "used": 500}


def stall(rank: Rank, names: list[str]) -> Program:
    group = rank.group(names)
    yield group.reserve(100)
    group.reserve(100)
    yield rank.clock.timeout(0)
    yield rank.device.compute(1.0)
    return rank.clock.now


def test_a_growth_stalls_the_computation_of_every_rank():
    assert values(run(stall, 2)) == [3.0 + 3.0 + 1.0] * 2


def test_a_pool_that_may_not_grow_says_so_and_stays():
    for found in values(run(grow, 2, replace(LIBRARY, grow=False), sizes=[400, 100])):
        assert found["at"][0] == 6.0
        assert "may not grow by 100 B (collective.grow=false)" in found["at"][1]
        assert (found["growths"], found["used"]) == (0, 400)


def test_a_pool_that_does_not_fit_is_reserved_nowhere():
    for found in values(run(grow, 2, sizes=[4000, 100])):
        assert found["at"][0] == 42.0
        assert "100 B do not fit on node0/gpu" in found["at"][1]
        assert found["used"] == 4000


def fragment(rank: Rank, names: list[str]) -> Program:
    """Fill a pool of two segments; what lies between them is no room."""
    group = rank.group(names)
    yield group.reserve(100)
    yield group.reserve(100)
    first = rank.device.allocate(60, SYMMETRIC)
    rank.device.allocate(60, SYMMETRIC)
    refused = []
    for size in (41, 40):
        try:
            rank.device.allocate(size, SYMMETRIC)
        except OutOfMemory:
            refused.append(size)
    rank.device.free(first)
    return [refused, rank.device.allocate(60, SYMMETRIC).address == first.address]


def test_a_symmetric_buffer_lies_in_one_segment_and_is_reused():
    assert values(run(fragment, 2)) == [[[41], True]] * 2


def borrow(rank: Rank, names: list[str]) -> Program:
    """Use the symmetric memory of one group in another."""
    group, other = rank.group(names), rank.group(names[::-1])
    yield group.reserve(1000)
    source, target = rank.device.allocate(10, SYMMETRIC), rank.device.allocate(20, SYMMETRIC)
    errors = []
    for event in (other.all_gather(source, target), other.reserve(10)):
        try:
            yield event
        except TransferError as error:
            errors.append(type(error).__name__)
    return errors


def test_symmetric_memory_belongs_to_the_group_that_reserved_it():
    assert values(run(borrow, 2)) == [["RegistrationError"] * 2] * 2


# --- ends ----------------------------------------------------------------------------------------------------------


def leave(rank: Rank, names: list[str], after: float) -> Program:
    """Gather; the last rank leaves *after* so many seconds instead of waiting."""
    group = rank.group(names)
    source, target = rank.device.allocate(1000), rank.device.allocate(1000 * len(names))
    event = group.all_gather(source, target)
    if group.index == len(names) - 1:
        yield rank.clock.timeout(after)
        return "left"
    try:
        yield event
    except TransferError as error:
        return [type(error).__name__, str(error), rank.clock.now]
    return "gathered"


def test_the_end_of_a_rank_stops_flows_and_is_noticed():
    outcome = run(leave, 3, after=20.0)
    for value in values(outcome)[:2]:
        assert value == ["PeerLost", "rank2 has left the group rank0+rank1+rank2", 20.0 + DETECTION]
    assert sum(outcome.links.values()) > 0
    found = [record.status for rank in outcome.ranks.values() for record in rank.transfers]
    assert found == ["PeerLost"] * 2


def test_a_group_that_cannot_be_says_why():
    outcome = run(gather, 2, replace(LIBRARY, plain=replace(RING, path="rdma")), machine(cards=0), size=1)
    assert all(rank.error.startswith("ConfigError: rdma from") for rank in outcome.ranks.values())
    error = "BackendUnavailable: this target has no collectives; choose some, such as collective=nccl"
    assert run(gather, 1, None, size=1).ranks["rank0"].error == error


LINES = DeviceLine(latency=0.5, rate=10.0), DeviceLine(latency=2.0, rate=40.0)


@pytest.mark.parametrize(("size", "expected"), [(10, 0.5 + 10 / 10), (200, 2.0 + 200 / 40)])
def test_queued_gathers_take_the_time_of_the_device(size, expected):
    library = replace(LIBRARY, plain=replace(RING, device=LINES), symmetric=replace(DIRECT, device=LINES))
    for timing, total in (("device", expected), ("caller", RING.isolated_time(2, size))):
        for whole, *_ in values(run(gather, 2, replace(library, timing=timing), size=size)):
            assert whole == pytest.approx(total, rel=1e-12)


def test_a_device_that_nobody_has_measured_says_so():
    with pytest.raises(ValueError, match=r"collective\.device has no lines"):
        RING.on_device(2, 10)
