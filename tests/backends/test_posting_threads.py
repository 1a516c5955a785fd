"""Real ranks whose transfers several threads post, each until its end: contents and failures, not times."""

from dataclasses import replace

from backends import registry
from backends.jobs.launcher import Processes
from experiments.transfer import TransferOptions, run
from tests.backends import programs
from tests.support.composed import composed
from tests.support.engines import engine, make_target, spec


def target(threads: int) -> Processes:
    make_target("mooncake_tcp")
    return Processes(replace(engine("mooncake_tcp"), threads=threads), deadline=60)


def test_transfers_to_two_peers_arrive_whole():
    config = composed("hw=loopback", "backend=mooncake_tcp", "target=real", "experiment=transfer")
    options = TransferOptions(
        patterns=("fanout:2",),
        size=(65536,),
        blocks=(1, 16),
        concurrency=(4,),
        schedule=("free",),
        repeat=10,
        warmup=1,
    )
    result = run(replace(config, experiment=options), target(3), lambda *_: None)
    assert not result.failures
    assert {record.status for record in result.transfers} == {"ok"}
    heads = list(result.tables[0].columns)
    verified, status = heads.index("verified"), heads.index("status")
    assert [(row[verified], row[status]) for row in result.tables[0].rows] == [("8/8", "ok")] * 2


def test_a_write_to_a_dead_process_settles():
    ranks = [spec("a", programs.settle_after_loss, to="b"), spec("b", programs.wait_for_death, by="a")]
    assert target(2).run(ranks, kill={"b": 2.0}).ranks["a"].value == ["PeerLost", True, 0]


def test_engines_that_post_from_one_thread_say_so():
    for name in ("nixl_tcp", "nixl_shm"):
        (problem,) = registry.check(replace(engine(name), threads=2))
        assert problem.startswith(f"backend.threads=2: real ranks of backend={name} post from one thread (its ")
        assert problem.endswith("three threads end the process); use 1, or a backend of Mooncake")
    assert not list(registry.check(replace(engine("mooncake_tcp"), threads=2)))
