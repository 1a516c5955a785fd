"""How engines are found, what each is known to do on this machine, and how the wrapper makes up for it."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from backends import registry
from backends.base.device import HostDevice
from backends.base.processes import captured_stderr, half_open, prepare
from backends.diagnosis import devices
from backends.engines import mori
from backends.jobs.launcher import Processes
from experiments.transfer import TransferOptions, run
from pdsim.core import plugins
from pdsim.core.clock import WallClock
from pdsim.core.errors import BackendUnavailable, ConfigError, OutOfMemory
from pdsim.transfer.log import KEPT
from tests.backends import programs
from tests.support.composed import composed
from tests.support.engines import engine, make_target, spec

THREADED = ("mooncake_tcp", "nixl_tcp")


def only(name: str, program: Any, **arguments: Any) -> Any:
    return make_target(name).run([spec("a", program, **arguments)]).ranks["a"]


def pair(name: str, one: Any, other: Any, posting: int | None = None, **arguments: Any) -> list[Any]:
    ranks = [spec("a", one, to="b", **arguments), spec("b", other, by="a", **arguments)]
    outcome = make_target(name).run([replace(ranks[0], posting=posting), ranks[1]])
    return [outcome.ranks[rank].value for rank in "ab"]


def test_an_idle_rank_leaves_the_processor_and_names_its_transport(any_engine):
    idle = only(any_engine.name, programs.idle, seconds=1.0)
    share, listens = idle.value
    assert share < 0.25  # a progress thread of NIXL's would take 1.0
    moves = {"mooncake_tcp": "tcp", "nixl_tcp": "ucx tcp", "nixl_shm": "ucx cma+posix"}[any_engine.name]
    assert idle.engine.endswith(moves)
    # Mooncake binds its two ports to all interfaces and has no setting for it (backends/engines/mooncake.py)
    assert listens == (["0.0.0.0", "127.0.0.1", "::"] if any_engine.name == "mooncake_tcp" else ["127.0.0.1"])


def test_lent_memory_is_held_and_withdrawn_memory_not_reached(any_engine):
    _, held = pair(any_engine.name, programs.write_lent_memory, programs.keep_lent_memory)
    assert held == {"lent": 1 << 20, "returned": 0}
    stale = programs.connect_with_stale_address, programs.give_stale_address
    assert pair(any_engine.name, *stale) == ["TransferFailed", True]


def test_transfers_that_are_over_leave_no_objects(any_engine):
    ranks = [spec("a", programs.write_and_count, to="b", every=KEPT), spec("b", programs.be_written, by="a")]
    result = make_target(any_engine.name).run(ranks).ranks["a"]
    assert sum(result.value.values()) < 20  # 2,048 records, before they were put into blocks
    assert [record.label for record in result.transfers] == [str(number) for number in range(2 * KEPT + 100)]


def test_an_endpoint_refuses_to_work_in_a_forked_child(any_engine):
    assert only(any_engine.name, programs.fork).value == 42


def with_threads(name: str, threads: int) -> Any:
    return make_target(name).using(replace(engine(name), threads=threads))


# a process's connections are closed before it is dead, and then the engine comes first: *late*
@pytest.mark.parametrize(
    ("name", "threads", "late"),
    [("mooncake_tcp", 1, 3), ("mooncake_tcp", 2, 0), ("nixl_tcp", 2, 0), ("nixl_tcp", 1, 0)],
)
def test_a_write_to_a_dead_process_settles(name, threads, late):
    ranks = [spec("a", programs.settle_after_loss, to="b", late=late), spec("b", programs.wait_for_death, by="a")]
    value = with_threads(name, threads).run(ranks, kill={"b": 1.0}).ranks["a"].value
    # UCX sometimes never says that a transfer to a dead peer is over: nothing is proven, and nothing is given up
    unproven = [["PeerLost", False, 1]] if (name, threads) == ("nixl_tcp", 1) else []
    assert value in [["PeerLost", True, 0], *unproven]


def test_lost_peers_leave_no_descriptor_or_thread(any_engine):
    others = [spec(name, programs.be_written_and_die, by="a") for name in "bcd"]
    a = make_target(any_engine.name).run([spec("a", programs.lose_in_turn, others=[*"bcd"]), *others]).ranks["a"]
    (first, *_), *_ = rows = a.value
    kept = 1 if any_engine.name == "mooncake_tcp" else 0  # Mooncake looks at an idle connection no more
    assert rows == [[first, kept * lost, rows[0][2], 0] for lost in (1, 2, 3)], a.error


TALK = "import socket, sys; own = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); own.sendall(b'late')"


def test_connections_of_a_dead_process_are_half_open_until_closed():
    """Also one that nobody has accepted yet; with *accepted*, not one that this process opened."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        subprocess.run([sys.executable, "-c", TALK, str(server.getsockname()[1])], check=True, timeout=30)
        assert half_open(accepted=True)
        server.accept()[0].close()
        assert not half_open(accepted=True)
        own, (theirs, _) = socket.create_connection(server.getsockname()), server.accept()
    theirs.close()
    assert (half_open(), half_open(accepted=True)) == (True, False)
    own.close()


@pytest.mark.parametrize("name", THREADED)
def test_peer_that_wrote_and_was_written_to_is_quiesced(name):
    """What stays open to it is a connection of ours, through which it could not write."""
    ranks = [spec("a", programs.exchange_and_outlive, by="b"), spec("b", programs.exchange_and_die, to="a")]
    assert make_target(name).run(ranks).ranks["a"].value is True


@pytest.mark.parametrize("name", THREADED)
def test_transfers_of_several_threads_arrive_whole(name):
    config = composed("hw=loopback", f"backend={name}", "target=real", "experiment=transfer")
    sizes = {"size": (65536,), "blocks": (1, 16), "concurrency": (4,), "repeat": 10, "warmup": 1}
    options = TransferOptions(patterns=("fanout:2",), schedule=("free",), **sizes)
    result = run(replace(config, experiment=options), with_threads(name, 3), lambda *_: None)
    assert not result.failures
    columns = result.tables[0].columns
    rows = [dict(zip(columns, row, strict=True)) for row in result.tables[0].rows]
    assert [(row["verified"], row["status"]) for row in rows] == [("8/8", "ok")] * 2


def test_engines_that_post_from_one_thread_say_so():
    (problem,) = registry.check(replace(engine("nvlink"), threads=2))
    assert problem.startswith("backend.threads=2: real ranks of backend=nvlink post from one thread; use 1, or a")
    assert [line for name in THREADED for line in registry.check(replace(engine(name), threads=2))] == []


@pytest.mark.parametrize(
    ("name", "option", "value", "rule"),
    [
        pytest.param("nixl_tcp", "progress_thread", "yes", "true or false", marks=pytest.mark.nixl),
        pytest.param("nixl_tcp", "num_threads", "four", "a whole number, 0 for none", marks=pytest.mark.nixl),
        ("mori", "transport", "fax", r"one of rdma, xgmi, rdma\+xgmi, got 'fax'"),
    ],
)
def test_a_wrong_option_of_an_engine_is_refused(name, option, value, rule):
    odd = replace(engine(name), options={option: value})
    with pytest.raises(ConfigError, match=rf"backend\.options\.{option} must be {rule}"):
        Processes(odd, deadline=60).run([spec("a", programs.sleep, seconds=0)])


def test_an_endpoint_of_mori_says_everything_that_is_missing():
    if not (lacks := [*mori.missing()]):
        pytest.skip("this machine has all that MORI needs")
    with pytest.raises(BackendUnavailable) as raised:
        Processes(engine("mori"), deadline=60).run([spec("a", programs.sleep, seconds=0)])
    assert [fact for fact in [*lacks, "pip install 'pdsim[mori]'"] if fact not in str(raised.value)] == []


@pytest.mark.parametrize(("version", "facts"), [("2.36", ["glibc is 2.36, not >= 2.38"]), ("2.38", [])])
def test_a_c_library_too_old_for_mori_is_named(monkeypatch, version, facts):
    monkeypatch.setattr(os, "confstr", lambda name: f"glibc {version}")
    assert [fact for fact in mori.missing() if fact.startswith("glibc")] == facts


def test_the_users_variables_win_over_defaults_and_contradict_needs(monkeypatch):
    for name in ("PDSIM_TEST_A", "PDSIM_TEST_B"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PDSIM_TEST_A", "mine")
    prepare("engine", {"PDSIM_TEST_B": "1"}, {"PDSIM_TEST_A": "default"})
    assert (os.environ["PDSIM_TEST_A"], os.environ["PDSIM_TEST_B"]) == ("mine", "1")
    with pytest.raises(ConfigError, match="'engine' needs PDSIM_TEST_A=1, but the environment has PDSIM_TEST_A=m"):
        prepare("engine", {"PDSIM_TEST_A": "1"}, {})


def test_native_output_is_copied_and_still_printed(capfd):
    with captured_stderr() as log:
        os.write(2, b"native\n")
    assert (log(), capfd.readouterr().err) == ("native\n", "native\n")


def test_host_memory_is_limited_over_all_pools_and_held_ones():
    device = HostDevice(WallClock(), capacity=1 << 16)
    first, _ = device.allocate(1 << 15, "default"), device.allocate(1 << 15, "nvlink")
    with pytest.raises(OutOfMemory, match="1 bytes asked for, 0 of 65536 left"):
        device.allocate(1)
    device.hold(first)
    device.free(first)
    assert device.used == 1 << 16
    device.release(first)
    assert device.used == 1 << 15
    device.allocate(1000)
    assert device.peak == {"default": 1 << 15, "symmetric": 0, "nvlink": 1 << 15}
    with pytest.raises(ValueError, match="pool must be one of default, symmetric, nvlink, got 'swimming'"):
        device.allocate(1, "swimming")


@pytest.mark.parametrize(("posting", "held"), [(0, True), (3, False)])
@pytest.mark.parametrize("name", ["mooncake_tcp", "nixl_tcp"])
def test_a_post_holds_its_caller_only_without_threads(name, posting, held):
    values = pair(name, programs.write_at_once, programs.take_writes, posting, writes=9)
    assert values == [[held] * 9, [True] * 9]


@pytest.mark.parametrize("posting", [None, 2, 0])
def test_a_first_write_to_a_stopped_process_delays_no_other(any_engine, posting):
    ranks = [spec("a", programs.write_beside_stopped, stopped="b", to="c")]
    ranks += [spec("b", programs.be_stopped, by="a"), spec("c", programs.be_written, by="a")]
    outcome = make_target(any_engine.name).run([replace(ranks[0], posting=posting), *ranks[1:]])
    assert outcome.ranks["a"].value == ["ok", "ok"], outcome.ranks["a"].error


def test_names_are_listed_unimported_and_unknown_ones_refused(monkeypatch):
    code = (
        "import sys; from backends.registry import names; assert {'mooncake', 'nixl'} <= set(names()); "
        "assert not {'mooncake', 'nixl_cu13', 'zmq', 'backends.engines.nixl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ConfigError, match=r"nothing is registered as 'fax' .* mooncake, .*nixl"):
        registry.load("fax")
    with pytest.raises(ConfigError, match="no installed package provides backend 'fax'; there are mooncake"):
        registry.diagnose("fax")
    broken = EntryPoint("broken", "no_such_module:Endpoint", plugins.BACKENDS)
    monkeypatch.setattr(plugins, "_entries", lambda group: {"broken": broken})
    with pytest.raises(BackendUnavailable, match=r"'broken' .* cannot be imported: No module named 'no_such_mod"):
        registry.load("broken")


@pytest.mark.parametrize("name", ["devices", *registry.backends()])
def test_all_work_or_say_why_not_and_what_to_do(name):
    every = devices() if name == "devices" else [registry.diagnose(name)]
    assert [each.name for each in every] == (["gpu", "rdma", "shm", "cma"] if name == "devices" else [name])
    assert all(each.works or (each.reason and each.remedy) for each in every)


def test_a_library_without_metadata_has_an_unknown_version(monkeypatch):
    monkeypatch.setattr(registry, "error_of", lambda probe: "")  # the library imports, from a folder of its own
    monkeypatch.setattr(registry, "installed", lambda library: "")
    diagnosis = registry.diagnose.__wrapped__("mooncake_tcp")
    assert (diagnosis.works, diagnosis.version) == (True, "version unknown")
