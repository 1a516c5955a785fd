"""Real ranks whose transfers several threads post, each until its end: contents and failures, not times."""

from dataclasses import replace

import pytest

from backends import registry
from experiments.transfer import TransferOptions, run
from pdsim.transfer.job import Target
from tests.backends import programs
from tests.support.composed import composed
from tests.support.engines import engine, make_target, spec

NAMES = ("mooncake_tcp", "nixl_tcp")


def target(name: str, threads: int) -> Target:
    return make_target(name).using(replace(engine(name), threads=threads))


@pytest.mark.parametrize("name", NAMES)
def test_transfers_to_two_peers_arrive_whole(name):
    config = composed("hw=loopback", f"backend={name}", "target=real", "experiment=transfer")
    options = TransferOptions(
        patterns=("fanout:2",),
        size=(65536,),
        blocks=(1, 16),
        concurrency=(4,),
        schedule=("free",),
        repeat=10,
        warmup=1,
    )
    result = run(replace(config, experiment=options), target(name, 3), lambda *_: None)
    assert not result.failures
    assert {record.status for record in result.transfers} == {"ok"}
    heads = list(result.tables[0].columns)
    verified, status = heads.index("verified"), heads.index("status")
    assert [(row[verified], row[status]) for row in result.tables[0].rows] == [("8/8", "ok")] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_write_to_a_dead_process_settles(name):
    ranks = [spec("a", programs.settle_after_loss, to="b"), spec("b", programs.wait_for_death, by="a")]
    assert target(name, 2).run(ranks, kill={"b": 2.0}).ranks["a"].value == ["PeerLost", True, 0]


def test_engines_that_post_from_one_thread_say_so():
    (problem,) = registry.check(replace(engine("nvlink"), threads=2))
    assert problem.startswith("backend.threads=2: real ranks of backend=nvlink post from one thread; use 1, or a")
    for name in NAMES:
        assert not list(registry.check(replace(engine(name), threads=2)))
