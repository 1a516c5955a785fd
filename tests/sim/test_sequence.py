"""Writes that are foreseen: one event for many, and the same records, loads and times as one by one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.core.errors import TransferError
from pdsim.hardware.costs import InlineSaving
from pdsim.sim.endpoint import SimEndpoint
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Writes, WriteSequence
from pdsim.transfer.job import Place, RankSpec
from tests.support.machines import cost, engine, machine

HERE = "tests.sim.test_sequence"
STAY = 1000.0  # seconds, longer than any of this takes


def writer(rank, sinks, work):
    region = rank.endpoint.register(rank.device.allocate(1000), "kv")
    for name in sinks:
        rank.channel.send(name, b"where")
    addresses = {}
    for _ in sinks:
        name, address = yield rank.channel.receive()
        addresses[name] = rank.endpoint.connect(address)

    def alone(at, peer, batch):
        yield rank.clock.at(at)
        rank.endpoint.write(peer, batch, b"note")

    def made(peer, descriptors, size):
        offsets = [size * i for i in range(descriptors)]
        return Batch(region, peer.regions["kv"], offsets, offsets, [size] * descriptors)

    def several(at, peer, batch, count, turns):
        yield rank.clock.at(at)
        pause, beside = turns or (None, ())
        times = () if pause is None else [at + pause * i for i in range(count)]
        parts = [Writes([batch] * count, b"note", "series")]
        parts += [Writes([made(peer, 1, other)] * count, b"other", f"beside {other}") for other in beside]
        try:
            sequence = rank.endpoint.write_sequence(peer, parts, times)
            if beside:
                yield rank.clock.timeout(3.0)
                sequence.stop(1)
            yield sequence
        except TransferError:
            return

    ahead = []
    for at, sink, descriptors, size, count, *turns in work:
        peer = addresses[sink]
        batch = made(peer, descriptors, size)
        one = alone(at, peer, batch) if count == 1 else several(at, peer, batch, count, turns)
        ahead.append(rank.clock.process(one))
    yield rank.clock.all_of(ahead)
    return rank.clock.now


def sink(rank):
    rank.endpoint.register(rank.device.allocate(1000), "kv")

    def answer():
        while True:
            sender, _ = yield rank.channel.receive()
            rank.channel.send(sender, rank.endpoint.address())

    rank.clock.process(answer())
    yield rank.clock.timeout(STAY)
    return sum(note.times for note in rank.endpoint.notifications.drain())


def play(model, works, kill=None):
    sinks = ["sink0", "sink1"]
    specs = [RankSpec(name, f"{HERE}:sink", Place(0, i), {}) for i, name in enumerate(sinks)]
    for i, work in enumerate(works):
        arguments = {"sinks": sinks, "work": [(at, sinks[to], *rest) for at, to, *rest in work]}
        specs.append(RankSpec(f"writer{i}", f"{HERE}:writer", Place(0, 2 + i), arguments))
    return model.run(specs, kill)


def one_by_one(model, works, kill=None):
    def loop(self, peer, parts, times=()):
        return WriteSequence(self._clock, self, peer, parts, times).start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimEndpoint, "write_sequence", loop)
        return play(model, works, kill)


def slower(host, gpu):
    made = machine()
    return replace(made, host=replace(made.host, **host), gpu=replace(made.gpu, **gpu))


WAKING, SLEEPING = {"wake": 0.02, "idle_wake": 0.11, "idle_after": 0.3}, {"idle_after": 5.0, "idle_wake": 0.05}
RDMA = engine(cost("rdma"))
SMALL = InlineSaving(bytes=100, descriptors=4)  # without a saving they take as long as others
AT_ONCE = engine(cost(call=0.01, descriptor=0.0, overlap=True, latency=0.0))
ONE, LATER, OTHER = (10.0, 0, 2, 10, 20), (100.0, 0, 2, 10, 20), (10.1, 1, 2, 10, 20)
# hardware, engine, work, deaths, and how many times fewer events there are at least
CASES = {
    "alone": (machine(), engine(), [[ONE]], {}, 1.5),
    "each begins as the one before ends": (machine(), AT_ONCE, [[ONE]], {}, 1.5),
    "the same, meeting another": (machine(), AT_ONCE, [[ONE], [(12.1, 0, 1, 10, 1)]], {}, 1),
    "in lockstep": (machine(), engine(), [[ONE], [ONE]], {}, 4),
    "the peer ends": (machine(), engine(), [[ONE]], {"sink0": 20.2}, 1),
    "it would time out": (machine(), engine(timeout=1.5), [[(10.0, 0, 2, 10, 3)]], {}, 0.8),
    "receivers wake up": (slower(WAKING, {}), engine(), [[ONE], [OTHER]], {}, 2.5),
    "by layers": (slower({}, SLEEPING), engine(cost(in_order=True)), [[(10.0, 0, 2, 10, 20, 6.0, ())]], {}, 2.5),
    "small": (machine(), engine(cost(in_order=True, small=SMALL)), [[ONE]], {}, 1.5),
    "in turns": (machine(), engine(), [[(10.0, 0, 2, 10, 20, 3.0, (5,))]], {}, 1),
    "on one thread": (machine(), RDMA, [[ONE, (10.0, 1, 1, 30, 9), (14.2, 0, 1, 5, 1)]], {}, 3),
    "on one card": (machine(), RDMA, [[ONE], [OTHER, (25.0, 0, 3, 20, 5)]], {}, 2.5),
    "two end together": (machine(), RDMA, [[ONE], [(10.0, 0, 2, 10, 20, 0.0107, ())]], {}, 5),
    "copy engines wake up": (slower({}, SLEEPING), engine(cost(in_order=True)), [[ONE, LATER]], {}, 2),
}


def in_order(records):
    # a series keeps its records part by part
    return sorted(records, key=lambda record: (round(record[6], 9), record[4], record[3], round(record[10], 9)))


def agree(foreseen, written):
    assert foreseen.links == pytest.approx(written.links, rel=1e-9)
    assert foreseen.seconds == pytest.approx(written.seconds, rel=1e-9)
    for name, rank in written.ranks.items():
        assert foreseen.ranks[name].error.partition(":")[0] == rank.error.partition(":")[0]
        assert (foreseen.ranks[name].value or 0.0) == pytest.approx(rank.value or 0.0, rel=1e-9)
        records, expected = (in_order(ranks[name].transfers) for ranks in (foreseen.ranks, written.ranks))
        assert [record[:6] for record in records] == [record[:6] for record in expected]
        assert [record[6:11] for record in records] == [pytest.approx(r[6:11], rel=1e-9) for r in expected]


@pytest.mark.parametrize(("hardware", "made", "works", "kill", "fewer"), CASES.values(), ids=CASES)
def test_a_series_has_the_records_of_writes_in_fewer_events(hardware, made, works, kill, fewer):
    series, written = (way(Model(hardware, made), works, kill) for way in (play, one_by_one))
    agree(series, written)
    assert series.events * fewer <= written.events


# odd numbers: of what happens at one instant, within a rounding, either may be first
moments = st.one_of(st.sampled_from([5.0, 6.0, 7.5]), st.integers(500, 1500).map(lambda n: n / 99.7))
to, sizes, counts = st.integers(0, 1), st.sampled_from([3, 11, 97]), st.sampled_from([1, 2, 5, 9])
jobs = st.tuples(moments, to, st.integers(1, 3), sizes, counts)
engines = st.builds(
    lambda **changes: engine(cost(**changes)),
    path=st.sampled_from(["nvlink", "rdma"]),
    call=st.sampled_from([0.0, 0.1037]),
    descriptor=st.sampled_from([0.0, 0.0713]),
    overlap=st.booleans(),
    latency=st.sampled_from([0.0, 0.01301]),
    in_order=st.booleans(),
    small=st.sampled_from([None, SMALL]),
    wire_descriptor=st.sampled_from([0.0, 0.001]),
    queue_rate=st.sampled_from([31.7, 1e9]),
)


hosts = st.sampled_from([{}, {"wake": 0.02}, WAKING])
sleeps = st.sampled_from([{}, {"idle_after": 20.0, "idle_wake": 0.05}, {"idle_after": 0.3, "idle_wake": 0.05}])


turns = st.tuples(
    *(moments, st.integers(0, 1), st.integers(1, 2), st.sampled_from([13, 89]), st.sampled_from([2, 5, 9])),
    *(st.sampled_from([None, 0.0107, 0.41, 1.503]), st.lists(st.sampled_from([5, 37, 83]), max_size=2)),
)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.builds(slower, hosts, sleeps),
    engines,
    st.lists(st.lists(st.one_of(jobs, turns), min_size=1, max_size=4), min_size=1, max_size=2),
    st.booleans(),
    st.one_of(st.none(), st.tuples(st.sampled_from(["sink0", "writer0"]), moments)),
)
def test_series_have_the_results_of_writes_one_by_one(hardware, made, works, twice, killed):
    works = works * 2 if twice and len(works) == 1 else works  # in lockstep
    kill = {killed[0]: killed[1]} if killed else None
    agree(*(way(Model(hardware, made), works, kill) for way in (play, one_by_one)))
