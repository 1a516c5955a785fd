"""A modelled job: how ranks start, end, fail and are killed, what is reported of it, and samples."""

import builtins

import pytest

from pdsim.core.errors import ConfigError
from pdsim.sim.endpoint import DETECTION
from pdsim.sim.hosts import JobClock
from pdsim.sim.model import STRIDE, Model
from pdsim.transfer import Batch
from pdsim.transfer.job import Place, RankSpec
from tests.support.machines import engine, machine, run


def idle(rank, seconds=1.0):
    yield rank.clock.timeout(seconds)
    return {"name": rank.name, "peers": list(rank.peers), "device": rank.device.name, "engine": rank.endpoint.engine}


def other(rank):
    yield rank.clock.timeout(6.0)
    return [rank.clock.now, rank.device.used]


def plain(rank, value):
    yield rank.clock.timeout(0)
    return [value, (1, 2)]


def bad(rank, error="ValueError"):
    yield rank.clock.timeout(0.5)
    raise getattr(builtins, error)("on purpose")


def bad_child(rank):
    rank.clock.process(bad(rank, "KeyError"))
    yield rank.clock.timeout(10.0)


def no_generator(rank):
    return 1


def waits_for_ever(rank):
    yield rank.channel.receive()


def waits_too(rank):
    yield rank.clock.event()


def source(rank, count=1, size=100):
    region = rank.endpoint.register(rank.device.allocate(1000), "kv")
    rank.gauge("pages", "spent", lambda: rank.clock.now / 100.0)
    rank.channel.send("sink", rank.endpoint.address())
    _, address = yield rank.channel.receive()
    peer = rank.endpoint.connect(address)
    for _ in range(count):
        yield rank.endpoint.write(peer, Batch(region, peer.regions["kv"], [0], [0], [size]))
    rank.channel.send("sink", b"done")
    return rank.clock.now


def sink(rank, stay=None):
    rank.endpoint.register(rank.device.allocate(500), "kv")
    sender, _ = yield rank.channel.receive()
    rank.channel.send(sender, rank.endpoint.address())
    yield rank.channel.receive() if stay is None else rank.clock.timeout(stay)
    return rank.clock.now


def heartbeat(rank):
    """Send for ever from a process of its own, while the program waits."""

    def beat():
        try:
            while True:
                rank.channel.send("listener", b"beat")
                yield rank.clock.timeout(1.0)
        finally:
            rank.channel.send("listener", b"finally")

    rank.clock.process(beat())
    yield rank.clock.timeout(4.5)


def listener(rank):
    heard = []
    rank.channel.subscribe(lambda message: heard.append((round(rank.clock.now, 9), message.payload)))
    yield rank.clock.timeout(9.0)
    return heard


def test_a_rank_knows_who_and_where_it_is():
    value = run(idle, other).ranks["idle"].value
    assert value == {"name": "idle", "peers": ["other"], "device": "node0/gpu0", "engine": "model:test"}
    assert run((plain, {"value": {"a": (1,)}})).ranks["plain"].value == [{"a": [1]}, [1, 2]]  # plain data


@pytest.mark.parametrize(
    ("specs", "kill", "message"),
    [
        ([RankSpec("a", "no.such:thing")], {}, "program 'no.such:thing' of rank 'a' is no 'package.module:func"),
        ([RankSpec("a", f"{__name__}:missing")], {}, "of rank 'a' is no 'package.module:function'"),
        ([RankSpec("a", f"{__name__}:idle")] * 2, {}, "2 ranks are named 'a'"),
        ([RankSpec("a", f"{__name__}:idle", Place(7, 0))], {}, "place.node=7"),
        ([RankSpec("a", f"{__name__}:idle")], {"b": 1.0}, "kill names 'b', which is not a rank; there are a"),
        ([RankSpec("a", f"{__name__}:idle")], {"a": -1.0}, r"kill\['a'\]=-1.0 must be >= 0"),
    ],
)
def test_a_job_that_cannot_run_is_refused(specs, kill, message):
    with pytest.raises(ConfigError, match=message):
        Model(machine(), engine()).run(specs, kill)
    with pytest.raises(ConfigError, match="memory='full' must be 'timing' or 'tracked'"):
        Model(machine(), engine(), memory="full")


WAITING = "Deadlock: waits_for_ever, waits_too wait for events that nothing will trigger any more"


@pytest.mark.parametrize(
    ("programs", "error"),
    [
        ((bad,), "ValueError: on purpose"),
        ((bad_child,), "KeyError: 'on purpose'"),
        ((no_generator,), "TypeError: 'int' object is not iterable"),
        ((waits_for_ever, waits_too), WAITING),
    ],
)
def test_a_rank_that_fails_ends_alone(programs, error):
    outcome = run(*programs, other)
    assert [rank.error for rank in outcome.ranks.values()] == [*[error] * len(programs), ""]
    assert (outcome.ranks["other"].value, outcome.seconds) == ([6.0, 0], 6.0)
    assert run(*programs, other, model=Model(machine(), engine(), samples=10)).ranks == outcome.ranks


def test_ctrl_c_ends_the_run():
    with pytest.raises(KeyboardInterrupt):
        run((bad, {"error": "KeyboardInterrupt"}), other)


def test_the_limit_ends_ranks_that_wait_forever():
    outcome = run(waits_for_ever, heartbeat, listener, model=Model(machine(), engine(), limit=5.0))
    error = "Overrun: waits_for_ever, listener still run after 5 s, the limit of the model"
    assert [rank.error for rank in outcome.ranks.values()] == [error, "", error]


@pytest.mark.parametrize(("stay", "kill"), [(4.0, {}), (None, {"sink": 5.0})])
def test_a_rank_that_has_ended_is_lost_to_the_others(stay, kill):
    outcome = run((source, {"count": 9}), (sink, {"stay": stay}), kill=kill)
    assert outcome.ranks["source"].error == "PeerLost: sink is gone"
    assert outcome.ranks["source"].transfers[-1].status == "PeerLost"
    assert outcome.seconds == (outcome.ranks["sink"].value or 5.0) + DETECTION


@pytest.mark.parametrize(
    ("kill", "beats", "error"),
    [({}, 5, ""), ({"heartbeat": 2.5}, 3, "Killed: heartbeat was killed at 2.5 s, as asked")],
)
def test_processes_of_a_rank_end_with_it(kill, beats, error):
    outcome = run(heartbeat, listener, kill=kill)
    assert outcome.ranks["listener"].value == [[0.504 + number, b"beat"] for number in range(beats)]
    assert outcome.ranks["heartbeat"].error == error


def test_a_killed_rank_reports_nothing_and_frees_memory():
    places = Place(0, 0), Place(0, 1), Place(0, 0)
    ranks = run((source, {"count": 9}), (sink, {"stay": 9.0}), other, places=places, kill={"source": 5.0}).ranks
    assert [record.status for record in ranks["source"].transfers] == ["ok"]
    assert ranks["other"].value == [6.0, 0]


def test_links_and_pools_are_used_as_shares_of_the_whole():
    outcome = run((source, {"count": 4}), sink)
    share = 400 / outcome.seconds
    rates = {"gpu0/memory": 1000, "gpu0/nvlink.out": 100, "gpu1/nvlink.in": 100, "gpu1/memory": 1000}
    assert outcome.links == {f"node0/{name}": share / rate for name, rate in rates.items()}
    assert outcome.pools == {"node0/gpu0/default": 1000 / 4096, "node0/gpu1/default": 500 / 4096}
    assert outcome == run((source, {"count": 4}), sink, model=Model(machine(), engine(), memory="tracked"))


def test_progress_is_called_now_and_then():
    calls = []
    model = Model(machine(), engine(), progress=lambda now, *_: calls.append(now))
    outcome = run((source, {"count": STRIDE // 2}), sink, model=model)
    assert len(calls) == outcome.events // STRIDE + 1
    assert calls == sorted(calls)


def sampled(samples):
    return run((source, {"count": 5, "size": 200}), sink, model=Model(machine(), engine(), samples=samples))


def rows(outcome, kind, name):
    return [(time, value) for k, n, time, value in outcome.samples if (k, n) == (kind, name)]


@pytest.mark.parametrize("samples", [1, 7, 100])
def test_a_job_takes_as_long_with_samples_as_without(samples):
    one, other = sampled(0), sampled(samples)
    assert (one.ranks, one.seconds, one.links, one.pools) == (other.ranks, other.seconds, other.links, other.pools)


def test_shares_of_a_link_add_up_to_its_bytes():
    outcome = sampled(50)
    for name, mean in outcome.links.items():
        samples = rows(outcome, "link", name)
        begins = [0.0, *(time for time, _ in samples)]
        spent = sum(value * (time - before) for (time, value), before in zip(samples, begins, strict=False))
        assert spent / outcome.seconds == pytest.approx(mean)
        assert 0.0 < max(value for _, value in samples) <= 1.0 + 1e-9


def test_memory_and_gauges_are_sampled_as_often_as_asked():
    outcome = sampled(50)
    memory = rows(outcome, "pool", "node0/gpu0")
    assert 50 <= len(memory) <= 101  # and one at the end
    assert [time for time, _ in memory] == sorted({time for time, _ in memory})
    assert {value for _, value in memory} == {0.0, 1000 / machine().gpu.memory}
    gauges = rows(outcome, "pages", "spent")
    assert gauges == [(time, pytest.approx(time / 100.0)) for time, _ in gauges]
    assert len(gauges) >= 50


def test_a_turn_processes_no_more_events_than_asked():
    clock = JobClock()
    for at in range(5):
        clock.call_at(float(at), lambda _: None, None)
    clock.turn(3, {"a rank"}, pytest.fail)
    assert (clock.events, clock.now) == (3, 2.0)
