"""The supervisor and its ranks: how they start, where they run, on how many GPUs, and how they end."""

import ctypes
import os
import re
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

import backends.diagnosis
from backends.jobs import supervision
from backends.jobs.affinity import EVERY, QuickProcessor, shares
from backends.jobs.launcher import Processes
from backends.jobs.spawn import WarmStart, spawn
from backends.jobs.supervision import Line
from pdsim.config import Launch, rules
from pdsim.config.compose import CONTEXT, _on_shared_gpus, compose
from pdsim.core.errors import BackendUnavailable, ConfigError, MessageError, TransferError
from pdsim.results import evidence
from pdsim.transfer.job import Place, RankSpec
from tests.backends import programs
from tests.support.engines import engine, spec


def only(target, program, **arguments):
    return target.run([spec("a", program, **arguments)]).ranks["a"]


LONG = {"seconds": 60}


@pytest.mark.parametrize(
    ("program", "arguments", "options", "kill", "error"),
    [
        (programs.return_object, {}, {}, {}, "TypeError: "),
        (programs.say_and_raise, {}, {}, {}, "LookupError: on purpose\n(?s:.*)in say_and_raise"),
        (programs.say_and_die, {"code": 7}, {}, {}, "exit code 7(?s:.*)\nlast words$"),
        (programs.take_memory, {"size": 1 << 25}, {}, {}, "OutOfMemory: cpu: 33554432 bytes asked for"),
        (programs.sleep, LONG, {"deadline": 3.0}, {}, "TransferTimeout: not done after 3 s, and killed"),
        (programs.sleep, LONG, {}, {"a": 0.1}, "killed by signal 9, as was asked for$"),
        (programs.hang, {}, {"silence": 1.0}, {}, "PeerLost: silent for 1 s"),
    ],
)
def test_a_rank_that_fails_says_why_and_no_other_does(processes, program, arguments, options, kill, error):
    ranks = [spec("a", program, **arguments), spec("b", programs.sleep, seconds=0.01)]
    outcome = replace(processes, **options).run(ranks, kill)
    assert re.match(error, outcome.ranks["a"].error)
    assert outcome.ranks["a"].value is None
    assert (outcome.ranks["b"].error, outcome.ranks["b"].value) == ("", "slept")
    assert min(kill.values(), default=0.0) <= outcome.seconds < 30


def test_ranks_agree_on_the_origin_and_are_children(processes):
    ranks = processes.run([spec("a", programs.identify), spec("b", programs.identify)]).ranks
    (one, *same), (other, *too) = ranks["a"].value[:3], ranks["b"].value[:3]
    assert one != other
    assert same == too


def test_ranks_beyond_the_cores_are_noted(processes, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    only(processes, programs.sleep, seconds=0.0)
    assert processes.notes == []
    processes.run([spec(name, programs.sleep, seconds=0.0) for name in "ab"])
    assert [note[:36] for note in processes.notes] == ["warning: 2 processes share 1 cores, "]


def test_memory_that_a_rank_has_freed_stays_with_it(processes):
    assert only(processes, programs.use_memory_again, rounds=20).value < 20


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
    assert [(outcome.ranks[name].error, outcome.ranks[name].value) for name in "ab"] == [("", "b"), ("", "a")]


def test_a_rank_is_stopped_for_a_time_and_not_lost(processes):
    spans = [(0.5, 1.0), (1.2, 2.2)]
    target = replace(processes, silence=5.0)
    ranks = target.run([spec("a", programs.gaps, seconds=2.5)], pause={"a": spans}).ranks
    # a rank that waits for the processor has gaps, too: those that were asked for are there at any rate
    for start, end in spans:
        assert any(last - first > 0.9 * (end - start) and last >= end for first, last in ranks["a"].value)


@pytest.mark.slow
def test_a_rank_that_computes_long_is_not_silent(processes):
    assert only(replace(processes, silence=2.0), programs.sleep, seconds=5.0).value == "slept"


def test_what_a_rank_counts_is_said_while_it_runs(processes):
    said = []
    target = replace(processes, progress=lambda *counted: said.append(counted[1:]))
    target.run([spec("a", programs.count, seconds=1.5)])
    assert set(said) == {(3, 7)}


@pytest.mark.parametrize(
    ("change", "program", "error", "message"),
    [
        ({}, "tests.backends.programs:nothing", ConfigError, "has no 'nothing'"),
        ({"implementation": "carrier_pigeon"}, "", ConfigError, "nothing is registered as 'carrier_pigeon'"),
        ({"name": "mooncake_nvlink"}, "", BackendUnavailable, "needs Mooncake built with CUDA, and"),
    ],
)
def test_what_cannot_start_is_named(processes, change, program, error, message):
    target = processes.using(replace(processes.engine, **change))
    with pytest.raises(error, match=message):
        target.run([RankSpec("a", program or "tests.backends.programs:identify")])


def test_ranks_that_are_not_ready_in_time_are_named(mooncake):
    with pytest.raises(TransferError, match=r"not ready after 0\.001 s: a; run fewer ranks at a time"):
        only(Processes(mooncake, startup=0.001), programs.sleep, seconds=1)


@pytest.fixture
def lines():
    here, there = socket.socketpair()
    with here, there:
        yield Line(here), Line(there)


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\x03" + b"\0" * 7 + b"\x93\xa1\x93", b"\x01" + b"\0" * 7 + b"\xc1"])
def test_what_is_no_message_is_refused(lines, data):
    lines[0].connection.sendall(data)
    with pytest.raises(MessageError):
        lines[1].receive()


def test_messages_come_in_pieces_and_those_behind_are_kept(lines):
    """A rank that was told of a move with the word to go did not know where the other one was, for ever."""
    here, there = lines
    go, moved = supervision.Go(0.0, {"a": ""}, 1.0, True), supervision.Moved("a", "tcp://127.0.0.1:1")
    for message in (moved, go, moved):
        here.send(message)
    data = there.connection.recv(1 << 16)
    for index in range(20):
        here.connection.sendall(data[index : index + 1])
        assert there.receive() == []
    here.connection.sendall(data[20:])
    assert there.receive() == [moved, go, moved]
    for message in (go, moved):
        here.send(message)
    assert (there.wait_for(supervision.Go), there.receive()) == (go, [moved])


@pytest.fixture
def warm(mooncake):
    with WarmStart(["numpy"]) as start:
        yield Processes(mooncake, deadline=60, device_capacity=1 << 24, spawn=start), start


def test_a_forked_rank_has_what_a_new_python_has(warm, monkeypatch, tmp_path):
    """Though the process that forks it was started before: what this process has now."""
    target, _ = warm
    only(target, programs.surroundings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDSIM_TESTED", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    forked = only(target, programs.surroundings).value
    assert forked == only(replace(target, spawn=spawn), programs.surroundings).value
    assert (forked["folder"], forked["environ"]["PDSIM_TESTED"]) == (str(tmp_path), "1")


def test_a_dead_forker_is_reported_and_restarted_and_ends(warm):
    target, start = warm
    pid, parent, *_ = only(target, programs.identify).value
    assert (parent, Path(f"/proc/{pid}").exists()) == (os.getpid(), False)
    os.kill(start.process.pid, signal.SIGKILL)
    start.process.wait()
    with pytest.raises(TransferError, match="the process that forks ranks has ended; start the job again"):
        only(target, programs.identify)
    assert only(target, programs.identify).error == ""
    start.__exit__()
    assert start.process.returncode == 0


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((0, 1, None), {f"rank{n}": list(range(100 + 5 * n, 105 + 5 * n)) for n in range(3)}),
        ((None, None), {}),  # none drives a GPU
        ((0, 1, 2, 3, 0), {}),  # too few each
    ],
)
def test_ranks_that_drive_gpus_have_runs_of_processors(monkeypatch, gpus, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(100, 116)))
    ranks = [RankSpec(f"rank{index}", "a:b", Place(gpu=gpu)) for index, gpu in enumerate(gpus)]
    assert shares(ranks) == expected


@pytest.fixture
def roaming():
    before = os.sched_getaffinity(0)
    yield sorted(before)
    os.sched_setaffinity(0, before)


def test_an_idle_thread_moves_to_a_quick_processor(roaming):
    if len(roaming) < 2:
        pytest.skip("one processor is all there is")
    first, second, *_ = roaming
    where, waits = [], []

    def measure():
        where.append(ctypes.CDLL(None).sched_getcpu())
        return 2.0 if where[-1] == first else 1.0

    quick = QuickProcessor([first, second], measure)
    assert where == [first, second]
    os.sched_setaffinity(0, {first})
    while where[-1] == first or not waits:  # the kernel may take a thread back that may use all
        waits.append(quick.look())
    assert (where[2], where[-1], waits[0], waits[-1]) == (first, second, 0.0, EVERY)
    assert os.sched_getaffinity(0) == {first, second}


SHARED = Launch(share_gpus=True)


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(backends.diagnosis, "_nvidia", lambda: [(80 << 30, "NVIDIA H100")])


def real(*words, launch=SHARED):
    return replace(compose(["backend=nvlink", "model=qwen3-8b", *words]), target="real", launch=launch)


@pytest.mark.parametrize(
    ("words", "launch", "said"),
    [
        ("hw=2xh200", SHARED, ""),
        ("hw=2xh200", Launch(), "needs 2 nvidia GPUs, but this machine has 1; use launch.share_gpus=true"),
        ("hw=1xh200 experiment.deployment=colocated", SHARED, "hw.gpus=1 above the NVIDIA GPUs"),
        ("hw=loopback backend=nixl_tcp", SHARED, "hw=loopback has others, or none"),
        ("hw=4xh200 parallel=tp1 parallel.prefill.cp=2", SHARED, "collective=nccl takes a GPU for each rank"),
        ("hw=2xh200 experiment=allgather experiment.ranks=2", SHARED, "collective=nccl takes a GPU for each rank"),
    ],
)
def test_ranks_share_gpus_when_asked(one_gpu, words, launch, said):
    lines = list(rules._gpus(real(*words.split(), launch=launch)))
    assert [line for line in lines if said not in line] == []
    assert len(lines) == bool(said)


@pytest.mark.parametrize(("hw", "ranks"), [("2xh200", 2), ("4xh200", 4)])
def test_each_rank_has_its_share_of_the_memory(one_gpu, hw, ranks):
    shared = _on_shared_gpus(real(f"hw={hw}"))
    assert shared.hw.gpu.memory == (80 << 30) // ranks - CONTEXT
    assert _on_shared_gpus(shared) == shared  # so that a kept run is repeated as it was
    assert "between ranks that share a GPU" in evidence.gather(shared, serving=False)["transfers"]


def test_the_gpus_of_places_are_dealt_out():
    target, host = Processes(engine("nixl_tcp"), gpus=2), RankSpec("router", "a:b", Place())
    specs = [RankSpec(f"rank{gpu}", "a:b", Place(0, gpu)) for gpu in range(4)]
    gpus = [target._describe(spec, None, None, []).gpu for spec in (*specs, host)]
    assert gpus == [0, 1, 0, 1, None]
    assert any("ranks share 2 GPUs" in note for note in target.notes)
