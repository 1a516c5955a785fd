"""Writes that are foreseen: one event for many, and the same records, loads and times as one by one, bit for bit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.core.errors import TransferError
from pdsim.sim.endpoint import SimEndpoint
from pdsim.sim.model import Model
from pdsim.sim.sequence import Foreseen
from pdsim.transfer import Batch, WriteSequence
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

    for at, sink, descriptors, size, count in work:
        peer, offsets = addresses[sink], [size * i for i in range(descriptors)]
        batch = Batch(region, peer.regions["kv"], offsets, offsets, [size] * descriptors)
        if count == 1:
            rank.clock.process(alone(at, peer, batch))
            continue
        yield rank.clock.at(max(at, rank.clock.now))
        try:
            yield rank.endpoint.write_sequence(peer, [batch] * count, b"note", label="series")
        except TransferError:
            continue
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
    def loop(self, peer, batches, notify=b"", *, label="", progress=None):
        return WriteSequence(self._clock, self, peer, batches, notify, label, progress).start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimEndpoint, "write_sequence", loop)
        return play(model, works, kill)


def test_a_series_alone_costs_no_more_events_than_one_write():
    model = Model(machine(), engine())
    few, many = (play(model, [[(10.0, 0, 2, 10, count)]]).events for count in (2, 20))
    assert few == many


def test_writers_in_lockstep_are_foreseen_together(monkeypatch):
    cuts = []
    monkeypatch.setattr(Foreseen, "cut", lambda self, plans=None: cuts.extend(plans or self._all))
    model = Model(machine(), engine())
    works = [[(10.0, 0, 2, 10, 20)], [(10.0, 0, 2, 10, 20)]]
    outcome = play(model, works)
    assert cuts == []
    assert outcome.ranks == one_by_one(model, works).ranks


def test_the_end_of_the_peer_is_told_of_as_without_a_series():
    model, works = Model(machine(), engine()), [[(10.0, 0, 2, 10, 20)]]
    with_series = play(model, works, {"sink0": 20.2})
    assert with_series.ranks == one_by_one(model, works, {"sink0": 20.2}).ranks
    assert {record.status for record in with_series.ranks["writer0"].transfers} == {"ok", "PeerLost"}


def test_a_write_that_would_time_out_is_not_foreseen():
    model, works = Model(machine(), engine(timeout=1.5)), [[(10.0, 0, 2, 10, 3)]]
    outcome = play(model, works)
    assert outcome.ranks == one_by_one(model, works).ranks
    assert [record.status for record in outcome.ranks["writer0"].transfers] == ["TransferTimeout"]


def test_a_receiver_that_wakes_up_for_each_is_foreseen_too():
    slow = replace(machine(), host=replace(machine().host, wake=0.02, idle_wake=0.11, idle_after=0.3))
    works = [[(10.0, 0, 2, 10, 20)], [(10.1, 1, 2, 10, 20)]]
    outcome, written = (play_as(Model(slow, engine()), works) for play_as in (play, one_by_one))
    assert outcome.ranks == written.ranks
    assert outcome.events < written.events / 3
    assert outcome.ranks["sink0"].value == 20


def test_copy_engines_that_sleep_are_roused_by_single_writes():
    sleepy = replace(machine(), gpu=replace(machine().gpu, idle_after=5.0, idle_wake=0.05))
    works = [[(10.0, 0, 2, 10, 20), (100.0, 0, 2, 10, 20)]]
    outcome, written = (play_as(Model(sleepy, engine(cost(in_order=True))), works) for play_as in (play, one_by_one))
    assert outcome.ranks == written.ranks
    assert outcome.events < written.events / 2


def slower(host, gpu):
    made = machine()
    return replace(made, host=replace(made.host, **host), gpu=replace(made.gpu, **gpu))


moments = st.one_of(st.sampled_from([5.0, 6.0, 7.5]), st.floats(5.0, 15.0))
jobs = st.tuples(
    moments, st.integers(0, 1), st.integers(1, 3), st.sampled_from([1, 10, 100]), st.sampled_from([1, 2, 5, 9])
)
engines = st.builds(
    lambda **changes: engine(cost(**changes)),
    call=st.sampled_from([0.0, 0.1]),
    descriptor=st.sampled_from([0.0, 0.07]),
    overlap=st.booleans(),
    latency=st.sampled_from([0.0, 0.013]),
    in_order=st.booleans(),
    wire_descriptor=st.sampled_from([0.0, 0.001]),
    queue_rate=st.sampled_from([30.0, 1e9]),
)


hosts = st.sampled_from([{}, {"wake": 0.02}, {"wake": 0.02, "idle_wake": 0.11, "idle_after": 0.3}])
sleeps = st.sampled_from([{}, {"idle_after": 20.0, "idle_wake": 0.05}, {"idle_after": 0.3, "idle_wake": 0.05}])


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    engines,
    st.lists(st.lists(jobs, min_size=1, max_size=3), min_size=1, max_size=2),
    st.booleans(),
    st.one_of(st.none(), st.tuples(st.sampled_from(["sink0", "writer0"]), moments)),
)
def test_series_have_the_results_of_writes_one_by_one(made, works, twice, killed):
    model = Model(machine(), made)
    works = works * 2 if twice and len(works) == 1 else works  # in lockstep
    kill = {killed[0]: killed[1]} if killed else None
    foreseen, written = play(model, works, kill), one_by_one(model, works, kill)
    assert foreseen.ranks == written.ranks
    assert foreseen.links == written.links
    assert foreseen.seconds == written.seconds


# exact but for a rounding: flows on links of their own that end within one of each other end together
@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.builds(slower, hosts, sleeps),
    engines,
    st.lists(st.lists(jobs, min_size=1, max_size=3), min_size=1, max_size=2),
)
def test_hosts_that_wake_up_and_engines_that_sleep_are_foreseen(hardware, made, works):
    foreseen, written = (play_as(Model(hardware, made), works) for play_as in (play, one_by_one))
    for name, rank in written.ranks.items():
        assert foreseen.ranks[name].error.partition(":")[0] == rank.error.partition(":")[0]
        assert (foreseen.ranks[name].value or 0.0) == pytest.approx(rank.value or 0.0, rel=1e-12)
        records = foreseen.ranks[name].transfers
        assert [record[:6] for record in records] == [record[:6] for record in rank.transfers]
        assert [record[6:11] for record in records] == [pytest.approx(r[6:11], rel=1e-12) for r in rank.transfers]
