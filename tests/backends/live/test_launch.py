"""Servers are started, awaited and ended with everything that came of them.  The servers are llama.cpp's."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from backends.live.commands import ServerLaunch
from backends.live.launch import started
from pdsim.core.errors import BackendUnavailable
from tests.backends.live import tiny_server
from tests.backends.live.conftest import free_port, needed

pytestmark = pytest.mark.live

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"


@pytest.fixture(autouse=True)
def _soon_by_force(monkeypatch):
    monkeypatch.setattr("backends.live.launch.GRACE", 1.0)


def launch(name, *command, port=0):
    return ServerLaunch(name, "server", port or free_port(), 0, (), command, {"TINY": "1"})


def tiny(folder, before=""):
    needed()
    port = free_port()
    script = f"{before} exec {sys.executable} {tiny_server.__file__} {folder} {port}"
    return launch("server0", "/bin/sh", "-c", script, port=port)


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_server_is_up_within_the_block_and_gone_after(tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    pid = tmp_path / "pid"
    server = tiny(tmp_path, f"echo begun; {sys.executable} {tmp_path}/stubborn.py & echo $! > {pid};")
    with started([server], tmp_path, 60.0) as processes:
        assert processes["server0"].poll() is None
        child = int(pid.read_text())
        assert alive(child)
    assert processes["server0"].poll() is not None
    assert not alive(child)
    assert "\nbegun\n" in (tmp_path / "server0.log").read_text()


BROKEN = "print('WARNING OSError: later'); raise RuntimeError('no such model')"


@pytest.mark.parametrize(
    ("code", "ready", "reason"),
    [
        (BROKEN, 30.0, "server0 ended with status 1: RuntimeError: no such model"),
        (STUBBORN, 0.5, r"server0 did not answer within live.ready=0.5 s"),
    ],
)
def test_a_server_that_fails_to_start_says_why_and_ends(tmp_path, code, ready, reason):
    server, seen, before = launch("server0", sys.executable, "-c", code), set(), set(psutil.Process().children())

    def look(_):
        seen.update(set(psutil.Process().children()) - before)

    with pytest.raises(BackendUnavailable, match=reason), started([server], tmp_path, ready, look):
        pass
    assert len(seen) == 1
    assert not any(alive(each.pid) for each in seen)


def test_servers_end_with_a_parent_that_is_killed(tmp_path):
    code = f"""
import time
from pathlib import Path
from backends.live.commands import ServerLaunch
from backends.live.launch import started
with started([{tiny(tmp_path)!r}], Path({str(tmp_path)!r}), 60.0) as processes:
    print(processes["server0"].pid, flush=True)
    time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
