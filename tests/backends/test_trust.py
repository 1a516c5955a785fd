"""What no process can do to a real run of `serve`: hang it by stopping or killing a rank."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import psutil
import pytest

from backends.jobs.launcher import Processes
from backends.jobs.spawn import spawn
from experiments import serve
from pdsim.config.compose import compose
from pdsim.core.errors import PdsimError
from pdsim.core.progress import silent
from pdsim.kv.messages import ROUTER, VERSION
from pdsim.results.record import Result
from tests.support.engines import MARKED, make_target

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

    def signal(self, rank: str, number: int, connected: bool = True, after: float = 1.0) -> None:
        """Send *rank* a signal so many seconds *after* all ranks have begun or, if *connected*, heard another."""
        while len(self.pids) < len(RANKS) or (
            connected and not all(ports(pid, psutil.CONN_ESTABLISHED) for pid in self.pids)
        ):
            if self.over.wait(0.01):
                return
        if not self.over.wait(after):
            os.kill(self.pids[RANKS.index(rank)], number)

    def run(self, engine: str, *words: str, meanwhile: Callable[[], None], silence: float = 300.0) -> Result:
        """Serve on *engine* over loopback, which takes about a second, and do *meanwhile* until it is over."""
        make_target(engine)
        config = compose(["hw=loopback", f"backend={engine}", "target=real", *words])
        target = Processes(config.backend, device_capacity=1 << 28, spawn=self.spawn, silence=silence, deadline=100)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        try:
            return serve.run(config, target, silent)
        finally:
            self.over.set()
            thread.join()


def ports(pid: int, status: str = psutil.CONN_LISTEN) -> set[int]:
    every = psutil.Process(pid).net_connections()
    listening = {each.laddr.port for each in every if each.status == psutil.CONN_LISTEN}
    return listening & {each.laddr.port for each in every if each.status == status}


@pytest.mark.mooncake
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("rank", "connected", "after"),
    [("decode0.0", False, 0.0), *((rank, True, after) for rank in RANKS for after in (0.0, 1.0, 3.0))],
)
def test_a_rank_may_be_stopped_at_every_stage(rank, connected, after):
    started, begun = Started(), time.monotonic()

    def stop() -> None:
        started.signal(rank, signal.SIGSTOP, connected, after)

    result, said = None, rank
    try:
        result = started.run("mooncake_tcp", *BUSY, silence=2.0, meanwhile=stop)
    except PdsimError as error:  # before the ranks were ready
        said = str(error)
    assert rank in said
    assert "\n" not in said
    statuses = [] if result is None else result.requests["status"]
    assert {status.partition(":")[0] for status in statuses} <= {"PeerLost", "ok"}
    if result and after == 1.0:  # it serves by then
        error = result.outcome.ranks[rank].error
        assert error.startswith("PeerLost: silent for 2 s (its process is stopped or hangs), and")
        assert (len(statuses), "PeerLost" in " ".join(statuses)) == (100, True)
        assert not any("\n" in status for status in statuses)
    assert time.monotonic() - begun < 120  # was: the launcher's hour
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


OLDER = """
from backends.jobs import worker
from pdsim.kv import messages
messages.VERSION -= 1
messages._PREFIX = bytes([messages.VERSION])
worker.main()
"""


@pytest.mark.parametrize("engine", MARKED[:2])
def test_an_older_version_is_named_and_ends_no_other(engine):
    """Real processes of commits before version 17 were refused likewise, by either side, and ended the router."""
    number = itertools.count()

    def older(connection: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        if next(number) < 3:
            return spawn(connection, output)
        command = [sys.executable, "-c", OLDER, str(connection)]
        return subprocess.Popen(command, pass_fds=[connection], stdout=output, stderr=output)

    make_target(engine)
    words = "target=real", "hw=loopback", f"backend={engine}", "parallel.decode.instances=2", "workload=smoke"
    config = compose([*words, "experiment.deadline=2s"])
    result = serve.run(config, Processes(config.backend, device_capacity=1 << 28, spawn=older, deadline=60), silent)
    errors = {name: rank.error for name, rank in result.outcome.ranks.items() if rank.error}
    assert list(errors) == ["decode1.0"]
    versions = (
        f"schema version {VERSION - 1} where version {VERSION} is",
        f"{VERSION} where version {VERSION - 1} is",
    )
    assert any(words in errors["decode1.0"] for words in versions)
    assert errors["decode1.0"].endswith("run the same pdsim on every rank")
    assert set(result.requests["status"]) == {"ok"}
