"""A modelled job: how ranks start, end, fail and are killed, and what is reported of it."""

import pytest

from pdsim.core.errors import ConfigError
from pdsim.sim.endpoint import DETECTION
from pdsim.sim.model import STRIDE, Model
from pdsim.transfer import Batch
from pdsim.transfer.job import Place, RankSpec
from tests.support.machines import cost, engine, machine, run

# --- programs ------------------------------------------------------------------------------------------------------


def idle(rank, seconds=1.0):
    yield rank.clock.timeout(seconds)
    return {"name": rank.name, "peers": list(rank.peers), "device": rank.device.name, "engine": rank.endpoint.engine}


def other(rank, seconds=2.0):
    yield rank.clock.timeout(seconds)
    return rank.clock.now


def plain(rank, value):
    yield rank.clock.timeout(0)
    return [value, (1, 2)]


def bad(rank):
    yield rank.clock.timeout(0.5)
    raise ValueError("on purpose")


def bad_child(rank):
    def child():
        yield rank.clock.timeout(0.5)
        raise KeyError("child")

    rank.clock.process(child())
    yield rank.clock.timeout(10.0)


def no_generator(rank):
    return 1


def waits_for_ever(rank):
    yield rank.channel.receive()


def waits_too(rank):
    yield rank.clock.event()


def ctrl_c(rank):
    yield rank.clock.timeout(0.5)
    raise KeyboardInterrupt


def source(rank, to="sink", count=1, size=100):
    region = rank.endpoint.register(rank.device.allocate(1000), "kv")
    rank.channel.send(to, rank.endpoint.address())
    _, address = yield rank.channel.receive()
    peer = rank.endpoint.connect(address)
    for _ in range(count):
        yield rank.endpoint.write(peer, Batch(region, peer.regions["kv"], [0], [0], [size]))
    rank.channel.send(to, b"done")
    return rank.clock.now


def sink(rank, stay=None):
    rank.endpoint.register(rank.device.allocate(500), "kv")
    sender, _ = yield rank.channel.receive()
    rank.channel.send(sender, rank.endpoint.address())
    yield rank.channel.receive() if stay is None else rank.clock.timeout(stay)
    return rank.clock.now


def heartbeat(rank, to):
    """Send for ever from a process of its own, while the program waits."""

    def beat():
        try:
            while True:
                rank.channel.send(to, b"beat")
                yield rank.clock.timeout(1.0)
        finally:
            rank.channel.send(to, b"finally")

    rank.clock.process(beat())
    yield rank.clock.timeout(4.5)


def listener(rank, until):
    heard, deadline = [], rank.clock.timeout(until)
    while not deadline.processed:
        message = rank.channel.receive()
        yield message | deadline
        if message.triggered:
            heard.append((round(rank.clock.now, 9), message.value.payload))
    return heard


def hog(rank):
    rank.device.allocate(3000)
    yield rank.clock.timeout(10.0)


def heir(rank):
    yield rank.clock.timeout(5.0)
    return rank.device.used


# --- what is said of them ------------------------------------------------------------------------------------------


class TestStart:
    def test_a_rank_knows_who_and_where_it_is(self):
        outcome = run(idle, other)
        assert outcome.ranks["idle"].value == {
            "name": "idle",
            "peers": ["other"],
            "device": "node0/gpu0",
            "engine": "model:test",
        }

    def test_arguments_and_values_are_plain_data(self):
        assert run((plain, {"value": {"a": (1,)}})).ranks["plain"].value == [{"a": [1]}, [1, 2]]

    def test_a_program_that_is_no_generator_is_an_error_of_the_rank(self):
        assert run(no_generator).ranks["no_generator"].error == "TypeError: 'int' object is not iterable"

    @pytest.mark.parametrize(
        ("specs", "kill", "message"),
        [
            (
                [RankSpec("a", "no.such:thing")],
                {},
                "program 'no.such:thing' of rank 'a' is no 'package.module:function'",
            ),
            ([RankSpec("a", f"{__name__}:missing")], {}, "of rank 'a' is no 'package.module:function'"),
            ([RankSpec("a", f"{__name__}:idle")] * 2, {}, "2 ranks are named 'a'"),
            ([RankSpec("a", f"{__name__}:idle", Place(7, 0))], {}, "place.node=7"),
            ([RankSpec("a", f"{__name__}:idle")], {"b": 1.0}, "kill names 'b', which is not a rank; there are a"),
            ([RankSpec("a", f"{__name__}:idle")], {"a": -1.0}, r"kill\['a'\]=-1.0 must be >= 0"),
        ],
    )
    def test_a_job_that_cannot_run_is_refused(self, specs, kill, message):
        with pytest.raises(ConfigError, match=message):
            Model(machine(), engine()).run(specs, kill)

    def test_memory_is_timing_or_tracked(self):
        with pytest.raises(ConfigError, match="memory='full' must be 'timing' or 'tracked'"):
            Model(machine(), engine(), memory="full")


class TestEnd:
    def test_a_rank_that_raises_ends_alone(self):
        outcome = run(bad, other)
        assert outcome.ranks["bad"].error == "ValueError: on purpose"
        assert (outcome.ranks["other"].value, outcome.ranks["other"].error) == (2.0, "")

    def test_an_exception_in_a_process_of_the_rank_ends_the_rank(self):
        outcome = run(bad_child, other)
        assert outcome.ranks["bad_child"].error == "KeyError: 'child'"
        assert outcome.seconds == 2.0

    def test_ranks_that_wait_for_nothing_are_named(self):
        outcome = run(waits_for_ever, other, waits_too)
        for name in ("waits_for_ever", "waits_too"):
            assert outcome.ranks[name].error == (
                "Deadlock: waits_for_ever, waits_too wait for events that nothing will trigger any more"
            )
        assert outcome.ranks["other"].error == ""

    def test_ctrl_c_ends_the_run(self):
        with pytest.raises(KeyboardInterrupt):
            run(ctrl_c, other)

    def test_a_rank_that_has_ended_is_lost_to_the_others(self):
        outcome = run((source, {"count": 9}), (sink, {"stay": 5.0}))
        assert outcome.ranks["source"].error == "PeerLost: sink is gone"
        assert outcome.ranks["source"].transfers[-1].status == "PeerLost"

    def test_processes_of_a_rank_end_with_it(self):
        outcome = run((heartbeat, {"to": "listener"}), (listener, {"until": 9.0}))
        heard = outcome.ranks["listener"].value
        assert [at for at, _ in heard] == [0.504, 1.504, 2.504, 3.504, 4.504]
        assert {payload for _, payload in heard} == {b"beat"}


class TestKill:
    def test_ends_the_rank_and_its_processes(self):
        outcome = run((heartbeat, {"to": "listener"}), (listener, {"until": 9.0}), kill={"heartbeat": 2.5})
        assert outcome.ranks["heartbeat"].error == "Killed: heartbeat was killed at 2.5 s, as asked"
        assert [payload for _, payload in outcome.ranks["listener"].value] == [b"beat"] * 3

    def test_loses_the_peer(self):
        outcome = run((source, {"count": 9}), sink, kill={"sink": 5.0})
        assert outcome.ranks["source"].error == "PeerLost: sink is gone"
        assert outcome.seconds == 5.0 + DETECTION

    def test_reports_no_transfer_that_was_under_way(self):
        outcome = run((source, {"count": 9}), sink, kill={"source": 5.0})
        assert [record.status for record in outcome.ranks["source"].transfers] == ["ok"]

    def test_gives_the_memory_back(self):
        outcome = run(hog, heir, places=(Place(0, 0), Place(0, 0)), kill={"hog": 3.0})
        assert outcome.ranks["heir"].value == 0

    def test_of_a_rank_that_has_ended_does_nothing(self):
        outcome = run(idle, other, kill={"idle": 1.5})
        assert outcome.ranks["idle"].error == ""

    def test_after_the_end_does_not_prolong_the_job(self):
        assert run(idle, kill={"idle": 50.0}).seconds == 1.0


class TestReport:
    def test_links_are_used_as_a_share_of_the_whole_run(self):
        outcome = run((source, {"count": 4}), sink)
        share = 400 / outcome.seconds
        assert outcome.links == {
            "node0/gpu0/memory": share / 1000,
            "node0/gpu0/nvlink.out": share / 100,
            "node0/gpu1/nvlink.in": share / 100,
            "node0/gpu1/memory": share / 1000,
        }

    def test_pools_report_their_peak(self):
        assert run(source, sink).pools == {"node0/gpu0/default": 1000 / 4096, "node0/gpu1/default": 500 / 4096}

    @pytest.mark.parametrize(("overlap", "latency", "events"), [(True, 0.5, 2), (False, 0.5, 3), (False, 0.0, 2)])
    def test_events_of_a_transfer_by_kind_of_engine(self, overlap, latency, events):
        model = Model(machine(), engine(cost(overlap=overlap, latency=latency)))
        few, many = (run((source, {"count": count}), sink, model=model).events for count in (10, 110))
        assert many - few == events * 100

    def test_equal_jobs_have_equal_outcomes(self):
        assert run((source, {"count": 20}), sink) == run((source, {"count": 20}), sink)

    def test_memory_changes_no_time(self):
        timing, tracked = (
            run((source, {"count": 5}), sink, model=Model(machine(), engine(), memory=memory))
            for memory in ("timing", "tracked")
        )
        assert timing == tracked

    def test_progress_is_called_now_and_then(self):
        calls = []
        model = Model(machine(), engine(), progress=lambda now, *_: calls.append(now))
        outcome = run((source, {"count": STRIDE // 2}), sink, model=model)
        assert len(calls) == outcome.events // STRIDE + 1
        assert calls == sorted(calls)
