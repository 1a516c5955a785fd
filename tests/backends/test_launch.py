"""The supervisor: how ranks end, and what it says of them."""

from dataclasses import replace

import pytest

from backends.jobs.launcher import Processes
from pdsim.core.errors import BackendUnavailable, ConfigError, TransferError
from pdsim.transfer.job import RankSpec
from tests.backends import programs
from tests.support.engines import spec

pytestmark = pytest.mark.mooncake


def test_a_value_that_is_not_plain_data_is_an_error(processes):
    outcome = processes.run([spec("a", programs.return_object)])
    assert outcome.ranks["a"].error.startswith("TypeError: ")
    assert outcome.ranks["a"].value is None


def test_ranks_agree_on_the_origin_of_time(processes):
    outcome = processes.run([spec("a", programs.tell_time), spec("b", programs.tell_time)])
    assert outcome.ranks["a"].value == outcome.ranks["b"].value


def test_an_exception_comes_with_its_traceback(processes):
    error = processes.run([spec("a", programs.say_and_raise)]).ranks["a"].error
    assert error.startswith("LookupError: on purpose\n")
    assert "say_and_raise" in error


def test_an_exited_rank_is_an_error_with_its_output(processes):
    error = processes.run([spec("a", programs.say_and_die, code=7)]).ranks["a"].error
    assert error.startswith("exit code 7")
    assert error.endswith("last words")


def test_memory_is_limited(processes):
    outcome = processes.run([spec("a", programs.take_memory, size=1 << 25)])
    assert outcome.ranks["a"].error.startswith("OutOfMemory: cpu: 33554432 bytes asked for")


def test_memory_that_a_rank_has_freed_stays_with_it(processes):
    outcome = processes.run([spec("a", programs.use_memory_again, rounds=20)])
    assert outcome.ranks["a"].value < 20


def test_ranks_past_the_deadline_are_killed_and_say_so(mooncake):
    target = Processes(mooncake, deadline=1.0)
    outcome = target.run([spec("a", programs.sleep, seconds=0.01), spec("b", programs.sleep, seconds=60)])
    assert outcome.ranks["a"].value == "slept"
    assert outcome.ranks["b"].error.startswith("TransferTimeout: not done after 1 s")


@pytest.mark.slow
def test_a_killed_and_restarted_rank_can_be_written_to(processes):
    ranks = [spec("a", programs.greet, other="b"), spec("b", programs.answer)]
    outcome = processes.run(ranks, kill={"b": 1.5}, restart={"b": 1.6})
    first, last = outcome.ranks["a"].value
    assert first != last == outcome.ranks["b"].value  # process ids
    assert outcome.ranks["b"].error == ""


@pytest.mark.slow
def test_ranks_restarted_at_once_can_send_to_each_other(processes):
    """One of them is there before the other: what it sends meanwhile is lost, and no error."""
    ranks = [spec("a", programs.call, other="b"), spec("b", programs.call, other="a")]
    ranks.append(spec("c", programs.sleep, seconds=1.0))  # the job goes on while both are gone
    outcome = processes.run(ranks, kill={"a": 0.05, "b": 0.05}, restart={"a": 0.1, "b": 0.1})
    assert [outcome.ranks[name].error for name in "ab"] == ["", ""]
    assert [outcome.ranks[name].value for name in "ab"] == ["b", "a"]


def test_kill_ends_a_rank_at_its_time(processes):
    outcome = processes.run([spec("a", programs.sleep, seconds=60)], kill={"a": 0.1})
    assert outcome.ranks["a"].error == "killed by signal 9, as was asked for"
    assert 0.1 <= outcome.seconds < 30


def test_ranks_that_are_not_ready_in_time_are_named(mooncake):
    target = Processes(mooncake, startup=0.001)
    with pytest.raises(TransferError, match=r"not ready after 0\.001 s: a; give Processes a longer startup"):
        target.run([spec("a", programs.sleep, seconds=1)])


def test_a_program_that_does_not_exist_is_a_configuration_error(processes):
    with pytest.raises(ConfigError, match="has no 'nothing'"):
        processes.run([RankSpec("a", "tests.backends.programs:nothing")])


def test_an_engine_that_does_not_exist_is_a_configuration_error(mooncake):
    with pytest.raises(ConfigError, match="nothing is registered as 'carrier_pigeon'"):
        Processes(replace(mooncake, implementation="carrier_pigeon")).run([spec("a", programs.sleep, seconds=1)])


def test_a_variant_that_needs_gpus_is_unavailable(mooncake):
    with pytest.raises(BackendUnavailable, match="needs Mooncake built with CUDA, and"):
        Processes(replace(mooncake, name="mooncake_nvlink")).run([spec("a", programs.sleep, seconds=1)])


def test_mooncake_over_tcp_starts_with_the_variable_that_a_user_set(processes, monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "0")
    outcome = processes.run([spec("a", programs.sleep, seconds=0.01)])
    assert outcome.ranks["a"].error == ""


def test_a_rank_is_stopped_for_a_time_and_not_lost(mooncake):
    target = Processes(mooncake, deadline=60, silence=5.0)
    outcome = target.run([spec("a", programs.gaps, seconds=2.5)], pause={"a": [(0.5, 1.0), (1.2, 2.2)]})
    # a rank that waits for the processor has gaps, too: those that were asked for are there at any rate
    assert [span for span in ((0.5, 1.0), (1.2, 2.2)) if not holds(outcome.ranks["a"].value, span)] == []


def holds(gaps: list[list[float]], span: tuple[float, float]) -> bool:
    """Return whether one of *gaps* is about as long as *span*, and ends when it does or later."""
    start, end = span
    return any(last - first > 0.9 * (end - start) and last >= end for first, last in gaps)
