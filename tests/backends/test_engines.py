"""What each engine is known to do on this machine, and how the wrapper makes up for it."""

from dataclasses import replace
from typing import Any

import pytest

from pdsim.core.errors import ConfigError
from tests.backends import programs
from tests.support.engines import engine, make_target, spec


def test_everything_listens_on_loopback_only_except_mooncake(any_engine):
    outcome = make_target(any_engine.name).run([spec("a", programs.list_listening)])
    # Mooncake binds its two ports to all interfaces and has no setting for it (backends/engines/mooncake.py)
    expected = ["0.0.0.0", "127.0.0.1", "::"] if any_engine.name == "mooncake_tcp" else ["127.0.0.1"]
    assert outcome.ranks["a"].value == expected


def test_an_idle_rank_leaves_the_processor_alone(any_engine):
    outcome = make_target(any_engine.name).run([spec("a", programs.burn, seconds=1.0)])
    assert outcome.ranks["a"].value < 0.25  # a progress thread of NIXL's would take 1.0


def test_the_engine_says_what_moves_the_bytes(any_engine):
    outcome = make_target(any_engine.name).run([spec("a", programs.sleep, seconds=0)])
    moves = {"mooncake_tcp": "tcp", "nixl_tcp": "ucx tcp", "nixl_shm": "ucx cma+posix"}[any_engine.name]
    assert outcome.ranks["a"].engine.endswith(moves)


def test_freed_memory_is_held_until_its_writers_have_returned_it(any_engine):
    outcome = make_target(any_engine.name).run(
        [spec("a", programs.write_lent_memory, to="b"), spec("b", programs.keep_lent_memory, by="a")]
    )
    assert outcome.ranks["b"].value == {"lent": 1 << 20, "returned": 0}


def test_an_address_older_than_a_withdrawal_does_not_reach_the_memory(any_engine):
    outcome = make_target(any_engine.name).run(
        [
            spec("a", programs.connect_with_stale_address, to="b"),
            spec("b", programs.give_stale_address, by="a"),
        ]
    )
    assert outcome.ranks["a"].value == "TransferFailed"
    assert outcome.ranks["b"].value is True


def test_an_endpoint_refuses_to_work_in_a_forked_child(any_engine):
    assert make_target(any_engine.name).run([spec("a", programs.fork)]).ranks["a"].value == 42


def settled(name: str, program: Any, **arguments: Any) -> Any:
    """Return what *program* says of a write to a rank that is killed."""
    writer = spec("a", program, to="b", **arguments)
    ranks = [writer, spec("b", programs.wait_for_death, by="a")]
    return make_target(name).run(ranks, kill={"b": 2.0}).ranks["a"].value


def test_a_write_to_a_dead_process_settles():
    assert settled("mooncake_tcp", programs.settle_after_loss) == ["PeerLost", True, 0]


def test_a_write_to_a_dead_process_settles_or_stays_in_quarantine():
    # UCX sometimes never says that a transfer to a dead peer is over: nothing is proven, and nothing is given up
    assert settled("nixl_tcp", programs.settle_after_loss) in [["PeerLost", True, 0], ["PeerLost", False, 1]]


def test_a_write_settles_when_its_target_dies_after_completion():
    """A process's connections are closed before it is dead, and then the engine comes first."""
    found = settled("mooncake_tcp", programs.settle_once_death_is_proven, late=3)
    assert found == ["PeerLost", True, 0]


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [("progress_thread", "yes", "true or false"), ("num_threads", "four", "a whole number, 0 for none")],
)
def test_a_wrong_option_of_nixl_is_refused(option: str, value: str, rule: str):
    target = make_target("nixl_tcp").using(replace(engine("nixl_tcp"), options={option: value}))
    with pytest.raises(ConfigError, match=rf"backend\.options\.{option} must be {rule}"):
        target.run([spec("a", programs.sleep, seconds=0)])
