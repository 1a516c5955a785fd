"""Groups on the model: exact times of all-gathers, shared links, pools that grow, groups that break.

Ports carry 100 bytes/s each way, memories 1000.
"""

from dataclasses import replace
from typing import Any

import pytest

from pdsim.core.errors import OutOfMemory, PeerLost, RegistrationError
from pdsim.hardware.costs import Collective, CollectiveModel, DeviceLine
from pdsim.sim.endpoint import DETECTION
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Program
from pdsim.transfer.group import SYMMETRIC
from pdsim.transfer.job import Outcome, Place, Rank, RankSpec
from tests.support.machines import cost, engine, machine

RING = CollectiveModel(path="nvlink", pattern="ring", latency=3.0, step=0.5, rate=50.0, own_rate=100.0, copies=2)
DIRECT = CollectiveModel(path="nvlink", pattern="direct", latency=1.0, step=0.25, rate=80.0)
GROWTH = {"grow_latency": 1.0, "grow_rate": 100.0}
LIBRARY = Collective(name="test", implementation="nccl", plain=RING, symmetric=DIRECT, timeout=1000.0, **GROWTH)


def run(program, ranks=4, library=LIBRARY, hw=None, losses=({}, {}), **arguments):
    names = [f"rank{index}" for index in range(ranks)]
    specs = [
        RankSpec(name, f"{program.__module__}:{program.__name__}", Place(0, index), {"names": names, **arguments})
        for index, name in enumerate(names)
    ]
    free = engine(cost(call=0.0, descriptor=0.0, latency=0.0))
    return Model(hw or machine(), free, collective=library).run(specs, *losses)


def values(outcome: Outcome) -> list[Any]:
    assert not [rank.error for rank in outcome.ranks.values() if rank.error]
    return [rank.value for rank in outcome.ranks.values()]


def gather(rank: Rank, names: list[str], size: int, late: float = 0.0) -> Program:
    group, started = rank.group(names), rank.clock.now
    source, target = rank.device.allocate(size), rank.device.allocate(size * len(names))
    if group.index == len(names) - 1:
        yield rank.clock.timeout(late)
    record = yield group.all_gather(source, target)
    return [record.seen - started, record.posted - started, record.submitted - started]


BARE = replace(RING, rate=1e9, own_rate=1e9, latency=0.0, step=0.0)


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


def gather_in_turn(rank: Rank, names: list[str], pool: str = "default", reserve: int = 0) -> Program:
    """Gather, gather again at once, and again a second later; return how long each took."""
    group, took = rank.group(names), []
    for _ in range(reserve):
        yield group.reserve(1000)
    source, target = rank.device.allocate(100, pool), rank.device.allocate(100 * len(names), pool)
    for pause in (1.0, 0.0, 1.0):
        if pause:
            yield rank.clock.timeout(pause)
        record = yield group.all_gather(source, target)
        took.append(record.seen - record.submitted)
    return took


@pytest.mark.parametrize(("reserve", "expected"), [(1, 2.5), (2, 4.0)])
def test_a_pool_that_has_grown_keeps_the_hosts_for_longer(reserve, expected):
    library = replace(LIBRARY, symmetric=replace(DIRECT, grown=4.0))
    took = values(run(gather_in_turn, 2, library, pool=SYMMETRIC, reserve=reserve))[0]
    assert took == [pytest.approx(expected, rel=1e-12)] * 3


MODELS = [RING, replace(RING, after_pause=7.0, grown=9.0), DIRECT, replace(DIRECT, after_pause=7.0)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_alone_it_takes_what_the_closed_form_says(model, ranks):
    library = replace(LIBRARY, plain=model)
    expected = [model.isolated_time(ranks, 100, 100.0, paused=paused) for paused in (True, False, True)]
    assert values(run(gather_in_turn, ranks, library))[0] == [pytest.approx(one, rel=1e-12) for one in expected]


def grow(rank: Rank, names: list[str], sizes: list[int]) -> Program:
    """Reserve *sizes* in turn; return when each was there, or why not, growths, their seconds, and bytes in use."""
    group, ends = rank.group(names), []
    for size in sizes:
        try:
            yield group.reserve(size)
            ends.append(rank.clock.now)
        except OutOfMemory as error:
            ends.append(str(error).partition(";")[0])
    return [ends, group.growths, group.growth_seconds, rank.device.used]


FIXED = "the symmetric pool has 400 B and may not grow by 100 B (collective.grow=false)"
FULL = "100 B do not fit on node0/gpu0: 3.91 KiB of 4 KiB are in use and the largest gap has 96 B"


@pytest.mark.parametrize(
    ("sizes", "may_grow", "expected"),
    [
        ([400, 100], True, [[6.0, 9.0], 1, 3.0, 500]),  # a latency a rank and the bytes
        ([400, 100], False, [[6.0, FIXED], 0, 0.0, 400]),
        ([4000, 100], True, [[42.0, FULL], 0, 0.0, 4000]),  # on no rank
    ],
)
def test_a_reservation_takes_its_time_or_says_why_not(sizes, may_grow, expected):
    assert values(run(grow, 2, replace(LIBRARY, grow=may_grow), sizes=sizes)) == [expected] * 2


def fragment(rank: Rank, names: list[str]) -> Program:
    group = rank.group(names)
    yield group.reserve(100)
    yield group.reserve(100)
    first = rank.device.allocate(60, SYMMETRIC)
    rank.device.allocate(60, SYMMETRIC)
    with pytest.raises(OutOfMemory):
        rank.device.allocate(41, SYMMETRIC)
    rank.device.allocate(40, SYMMETRIC)
    rank.device.free(first)
    return rank.device.allocate(60, SYMMETRIC).address == first.address


def test_symmetric_memory_is_of_one_group_in_segments():
    assert values(run(fragment, 2)) == [True] * 2
    assert values(run(borrow, 2)) == ["refused"] * 2


def borrow(rank: Rank, names: list[str]) -> Program:
    group, other = rank.group(names), rank.group(names[::-1])
    yield group.reserve(1000)
    source, target = rank.device.allocate(10, SYMMETRIC), rank.device.allocate(20, SYMMETRIC)
    for event in (other.all_gather(source, target), other.reserve(10)):
        with pytest.raises(RegistrationError):
            yield event
    return "refused"


def stall(rank: Rank, names: list[str]) -> Program:
    group = rank.group(names)
    yield group.reserve(100)
    group.reserve(100)
    yield rank.clock.timeout(0)
    yield rank.device.compute(1.0)
    return rank.clock.now


def test_a_growth_stalls_the_computation_of_every_rank():
    assert values(run(stall, 2)) == [3.0 + 3.0 + 1.0] * 2


def leave(rank: Rank, names: list[str], after: float) -> Program:
    """Gather; the last rank leaves *after* so many seconds instead of waiting."""
    group = rank.group(names)
    event = group.all_gather(rank.device.allocate(1000), rank.device.allocate(1000 * len(names)))
    if group.index == len(names) - 1:
        yield rank.clock.timeout(after)
        return None
    with pytest.raises(PeerLost, match=r"rank2 has left the group rank0\+rank1\+rank2"):
        yield event
    return rank.clock.now


def test_the_end_of_a_rank_stops_flows_and_is_noticed():
    outcome = run(leave, 3, after=20.0)
    assert values(outcome) == [20.0 + DETECTION, 20.0 + DETECTION, None]
    assert sum(outcome.links.values()) > 0
    statuses = [record.status for rank in outcome.ranks.values() for record in rank.transfers]
    assert statuses == ["PeerLost"] * 2


def gather_again(rank: Rank, names: list[str]) -> Program:
    group = rank.group(names)
    if rank.clock.now < 1.0:
        yield rank.clock.timeout(100.0)
    yield group.all_gather(rank.device.allocate(10), rank.device.allocate(10 * len(names)))
    return rank.clock.now


def test_a_rank_that_ends_breaks_no_group_it_never_joined():
    losses = {"rank0": 1.0, "rank1": 3.0}, {"rank0": 2.0, "rank1": 4.0}
    assert values(run(gather_again, 2, losses=losses)) == [pytest.approx(4.0 + RING.isolated_time(2, 10))] * 2


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
