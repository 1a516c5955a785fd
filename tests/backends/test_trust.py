"""What no process can do to a real run of `serve`: end ranks by a message, or hang it by stopping one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import psutil
import pytest
import zmq

from backends.jobs import launcher as launch
from backends.jobs.launcher import Processes
from experiments import serve
from pdsim.config.compose import compose
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.serving.deployment import ROUTER
from tests.backends import programs
from tests.backends.test_authentication import FORGED, attack
from tests.support.engines import make_target, spec

ENGINES = [
    pytest.param("mooncake_tcp", marks=pytest.mark.mooncake),
    pytest.param("nixl_tcp", marks=pytest.mark.nixl),
]
RANKS = [ROUTER, "prefill0.0", "decode0.0"]


class Started:
    """Starts the processes of a run and knows which is whose."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def spawn(self, connection: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        process = launch.spawn(connection, output)
        self.pids.append(process.pid)
        return process

    def pid(self, rank: str) -> int:
        """Return the process of *rank*: they are started in this order."""
        return self.pids[RANKS.index(rank)]

    def running(self, over: threading.Event) -> bool:
        """Wait until every rank has heard from another, and one second; return False if the run is *over* before."""
        while len(self.pids) < len(RANKS) or not all(map(connected, self.pids)):
            if over.wait(0.1):
                return False
        return not over.wait(1.0)


def run(engine: str, started: Started, *words: str, silence: float = 300.0) -> Result:
    """Serve on *engine* over loopback, which takes about a second."""
    make_target(engine)
    config = compose(["hw=loopback", f"backend={engine}", "target=real", *words])
    target = Processes(config.backend, device_capacity=1 << 28, spawn=started.spawn, silence=silence, deadline=100.0)
    return serve.run(config, target, silent)


@contextmanager
def meanwhile(action: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do *action* on a thread, until it sees that the event is set."""
    over = threading.Event()
    thread = threading.Thread(target=action, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def ports(pid: int) -> set[int]:
    """Return the ports on which ZeroMQ listens in process *pid*: it greets with 0xff."""
    found = psutil.Process(pid).net_connections()
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN and greets(each.laddr)}


def connected(pid: int) -> bool:
    """Return whether somebody has connected to a port of process *pid*."""
    found = psutil.Process(pid).net_connections()
    listening = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
    return any(each.laddr.port in listening for each in found if each.status == psutil.CONN_ESTABLISHED)


def greets(address: Any) -> bool:
    try:
        with socket.create_connection(tuple(address), timeout=0.5) as raw:
            return raw.recv(1) == b"\xff"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_messages_of_another_process_fail_no_request(engine: str):
    for seconds in (4, 12, 36):  # a busy machine may not get round to all ports within the first
        started, reached = Started(), set()

        def forge(over: threading.Event, started: Started = started, reached: set[Any] = reached) -> None:
            with zmq.Context() as context:
                while not over.wait(0.1):
                    for number, pid in enumerate(tuple(started.pids)):
                        with suppress(psutil.Error):
                            for port in ports(pid):
                                reached.add((number, port))
                                for frames in FORGED:
                                    attack(context, f"tcp://127.0.0.1:{port}", frames, seconds=0.05)
                context.destroy(linger=0)

        with meanwhile(forge):
            result = run(engine, started, "workload.count=20", f"workload.rate={20 / seconds}")
        assert result.failures == []
        assert set(result.requests["status"]) == {"ok"}
        assert result.outcome is not None
        refused = [rank.refused > 0 for rank in result.outcome.ranks.values()]
        if len(reached) == 6 and all(refused):  # of each rank the channel's port and the endpoint's
            return
    pytest.fail(f"{len(reached)} of 6 ports were reached, and refused was {refused}")


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("engine", ENGINES[:1])
def test_a_stopped_rank_ends_the_run_with_results_and_the_reason(engine: str, rank: str):
    started = Started()

    def stop(over: threading.Event) -> None:
        if started.running(over):
            os.kill(started.pid(rank), signal.SIGSTOP)

    begun = time.monotonic()
    with meanwhile(stop):
        result = run(
            engine, started, "workload.count=100", "workload.rate=20", "experiment.deadline=2s", silence=2.0
        )
    assert time.monotonic() - begun < 60  # was: the launcher's hour
    assert result.outcome is not None
    assert result.outcome.ranks[rank].error.startswith(
        "PeerLost: silent for 2 s (its process is stopped or hangs), and"
    )
    statuses = result.requests["status"]
    assert len(statuses) == 100
    assert any(status != "ok" for status in statuses)
    assert all(status == "ok" or (status.partition(":")[0] == "PeerLost") for status in statuses)
    assert not any("\n" in status for status in statuses)
    assert not any(psutil.pid_exists(pid) for pid in started.pids)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_killed_router_gives_one_line_for_each_request(engine: str):
    started = Started()

    def kill(over: threading.Event) -> None:
        if started.running(over):
            os.kill(started.pid(ROUTER), signal.SIGKILL)

    with meanwhile(kill):
        result = run(engine, started, "workload.count=100", "workload.rate=20", "experiment.deadline=2s")
    assert set(result.requests["status"]) == {"PeerLost: router: killed by signal 9"}
    requests = [f"request {number}: PeerLost: router: killed by signal 9" for number in range(100)]
    assert [failure.partition(":")[0] for failure in result.failures[:3]] == RANKS
    assert result.failures[0] == "router: killed by signal 9"
    assert result.failures[3:] == requests
    assert not any("\n" in failure for failure in result.failures)


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_rank_that_computes_long_is_not_silent(mooncake: Any):
    outcome = Processes(mooncake, deadline=60, silence=2.0).run([spec("a", programs.sleep, seconds=5.0)])
    assert outcome.ranks["a"].value == "slept"


@pytest.mark.mooncake
def test_what_a_rank_counts_is_said_while_it_runs(mooncake: Any):
    said: list[tuple[float, int, int]] = []
    target = Processes(mooncake, deadline=60, progress=lambda *found: said.append(found))
    target.run([spec("a", programs.count, seconds=1.5)])
    assert said
    assert {found[1:] for found in said} == {(3, 7)}


@pytest.mark.mooncake
def test_a_rank_whose_clock_hangs_is_ended(mooncake: Any):
    outcome = Processes(mooncake, deadline=60, silence=1.0).run([spec("a", programs.hang)])
    assert outcome.ranks["a"].error.startswith("PeerLost: silent for 1 s")
    assert outcome.seconds < 30
