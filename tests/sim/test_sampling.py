"""Samples of links, memories and what programs register: right, bounded, and without influence."""

import pytest

from pdsim.sim.model import Model
from pdsim.transfer import Batch
from pdsim.transfer.job import Place, RankSpec
from tests.support.machines import engine, machine

HERE = "tests.sim.test_sampling"


def source(rank, to, count, size):
    region = rank.endpoint.register(rank.device.allocate(500), "kv")
    rank.gauge("pages", "spent", lambda: rank.clock.now / 100.0)
    rank.channel.send(to, b"hello")
    _, address = yield rank.channel.receive()
    peer = rank.endpoint.connect(address)
    for _ in range(count):
        yield rank.endpoint.write(peer, Batch(region, peer.regions["kv"], [0], [0], [size]))
    rank.channel.send(to, b"done")
    return rank.clock.now


def sink(rank):
    rank.endpoint.register(rank.device.allocate(500), "kv")
    sender, _ = yield rank.channel.receive()
    rank.channel.send(sender, rank.endpoint.address())
    yield rank.channel.receive()
    return rank.clock.now


def deaf(rank):
    yield rank.channel.receive()


def job(samples, count=5, size=200):
    arguments = {"to": "sink", "count": count, "size": size}
    specs = [
        RankSpec("source", f"{HERE}:source", Place(0, 0), arguments),
        RankSpec("sink", f"{HERE}:sink", Place(0, 1)),
    ]
    return Model(machine(), engine(), samples=samples).run(specs)


def rows(outcome, kind, name):
    return [(time, value) for k, n, time, value in outcome.samples if (k, n) == (kind, name)]


@pytest.mark.parametrize("samples", [1, 7, 100])
def test_a_job_takes_as_long_with_samples_as_without(samples):
    one, other = job(0), job(samples)
    assert {name: (rank.value, rank.transfers) for name, rank in one.ranks.items()} == {
        name: (rank.value, rank.transfers) for name, rank in other.ranks.items()
    }
    assert (one.seconds, one.links, one.pools) == (other.seconds, other.links, other.pools)


def test_the_shares_of_a_link_add_up_to_what_it_carried():
    outcome = job(50)
    for name, mean in outcome.links.items():
        samples = rows(outcome, "link", name)
        begins = [0.0, *(time for time, _ in samples)]
        spent = sum(value * (time - before) for (time, value), before in zip(samples, begins, strict=False))
        assert spent / outcome.seconds == pytest.approx(mean)
        assert 0.0 < max(value for _, value in samples) <= 1.0 + 1e-9


def test_there_are_as_many_as_asked_for_and_at_most_twice():
    times = [time for time, _ in rows(job(50), "pool", "node0/gpu0")]
    assert 50 <= len(times) <= 101  # and one at the end
    assert times == sorted(set(times))


def test_what_a_program_registers_is_sampled():
    samples = rows(job(50), "pages", "spent")
    assert samples
    assert all(value == pytest.approx(time / 100.0) for time, value in samples)


def test_memory_is_the_share_in_use():
    assert {value for _, value in rows(job(50), "pool", "node0/gpu0")} == {0.0, 500 / machine().gpu.memory}


def test_a_job_in_which_nothing_happens_any_more_still_ends():
    outcome = Model(machine(), engine(), samples=10).run([RankSpec("deaf", f"{HERE}:deaf", Place(0, 0))])
    assert outcome.ranks["deaf"].error.startswith("Deadlock: deaf wait")
