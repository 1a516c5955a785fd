"""What no process can do to a real run of `serve`: end ranks by a message, or hang it by stopping one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import psutil
import pytest
import zmq

from backends.jobs.launcher import Processes
from backends.jobs.spawn import spawn
from experiments import serve
from pdsim.config.compose import compose
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.serving.deployment import ROUTER
from tests.backends.test_authentication import FORGED, attack
from tests.support.engines import make_target

RANKS = [ROUTER, "prefill0.0", "decode0.0"]
BUSY = "workload.count=100", "workload.rate=20", "experiment.deadline=2s"

pytestmark = pytest.mark.slow


class Started:
    """Starts the processes of a run, in the order of `RANKS`, and does something to them on a thread."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.over = threading.Event()

    def spawn(self, connection: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        process = spawn(connection, output)
        self.pids.append(process.pid)
        return process

    def signal(self, rank: str, number: int) -> None:
        """Send *rank* a signal a second after every rank has heard from another."""
        while len(self.pids) < len(RANKS) or not all(ports(pid, psutil.CONN_ESTABLISHED) for pid in self.pids):
            if self.over.wait(0.1):
                return
        if not self.over.wait(1.0):
            os.kill(self.pids[RANKS.index(rank)], number)

    def run(self, engine: str, *words: str, meanwhile: Callable[[], None], silence: float = 300.0) -> Result:
        """Serve on *engine* over loopback, which takes about a second, and do *meanwhile* until it is over."""
        make_target(engine)
        config = compose(["hw=loopback", f"backend={engine}", "target=real", *words])
        target = Processes(
            config.backend, device_capacity=1 << 28, spawn=self.spawn, silence=silence, deadline=100.0
        )
        thread = threading.Thread(target=meanwhile)
        thread.start()
        try:
            return serve.run(config, target, silent)
        finally:
            self.over.set()
            thread.join()


def ports(pid: int, status: str = psutil.CONN_LISTEN) -> set[int]:
    """Return the ports of process *pid* at which it listens, or at which somebody has connected."""
    every = psutil.Process(pid).net_connections()
    listening = {each.laddr.port for each in every if each.status == psutil.CONN_LISTEN}
    return listening & {each.laddr.port for each in every if each.status == status}


def greets(port: int) -> bool:
    """Return whether ZeroMQ listens at *port*: it greets with 0xff."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as raw:
            return raw.recv(1) == b"\xff"
    except OSError:
        return False


@pytest.mark.parametrize(
    "engine", [pytest.param(f"{name}_tcp", marks=getattr(pytest.mark, name)) for name in ("mooncake", "nixl")]
)
def test_messages_of_another_process_fail_no_request(engine: str):
    for seconds in (4, 12, 36):  # a busy machine may not get round to all ports within the first
        started, reached = Started(), set()

        def forge(started: Started = started, reached: set[Any] = reached) -> None:
            with zmq.Context() as context:
                while not started.over.wait(0.1):
                    for pid in tuple(started.pids):
                        with suppress(psutil.Error):
                            for port in filter(greets, ports(pid)):
                                reached.add((pid, port))
                                for frames in FORGED:
                                    attack(context, f"tcp://127.0.0.1:{port}", frames, seconds=0.05)
                context.destroy(linger=0)

        result = started.run(engine, "workload.count=20", f"workload.rate={20 / seconds}", meanwhile=forge)
        assert (result.failures, set(result.requests["status"])) == ([], {"ok"})
        assert result.outcome is not None
        refused = [rank.refused > 0 for rank in result.outcome.ranks.values()]
        if len(reached) == 6 and all(refused):  # of each rank the channel's port and the endpoint's
            return
    pytest.fail(f"{len(reached)} of 6 ports were reached, and refused was {refused}")


@pytest.mark.mooncake
@pytest.mark.parametrize("rank", RANKS)
def test_a_stopped_rank_ends_the_run_with_results_and_the_reason(rank: str):
    started, begun = Started(), time.monotonic()
    result = started.run("mooncake_tcp", *BUSY, silence=2.0, meanwhile=lambda: started.signal(rank, signal.SIGSTOP))
    assert time.monotonic() - begun < 60  # was: the launcher's hour
    assert result.outcome is not None
    error = result.outcome.ranks[rank].error
    assert error.startswith("PeerLost: silent for 2 s (its process is stopped or hangs), and")
    statuses = result.requests["status"]
    assert len(statuses) == 100
    assert {status.partition(":")[0] for status in statuses} in ({"PeerLost"}, {"ok", "PeerLost"})
    assert not any("\n" in status for status in statuses)
    assert not any(psutil.pid_exists(pid) for pid in started.pids)


@pytest.mark.nixl
def test_a_killed_router_gives_one_line_for_each_request():
    started = Started()
    result = started.run("nixl_tcp", *BUSY, meanwhile=lambda: started.signal(ROUTER, signal.SIGKILL))
    assert set(result.requests["status"]) == {"PeerLost: router: killed by signal 9"}
    requests = [f"request {number}: PeerLost: router: killed by signal 9" for number in range(100)]
    assert [failure.partition(":")[0] for failure in result.failures[:3]] == RANKS
    assert result.failures[0] == "router: killed by signal 9"
    assert result.failures[3:] == requests
    assert not any("\n" in failure for failure in result.failures)
