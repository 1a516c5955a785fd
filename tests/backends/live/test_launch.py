"""Servers are started, awaited and ended with everything that came of them.  The servers are llama.cpp's."""

import signal
import subprocess
import sys
import time
from pathlib import Path

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


def launch(folder: Path, name: str, *before: str) -> ServerLaunch:
    port = free_port()
    command = (sys.executable, tiny_server.__file__, str(folder), str(port))
    if before:
        command = ("/bin/sh", "-c", f"{' '.join(before)} exec {' '.join(command)}")
    return ServerLaunch(name, "server", port, 0, (), command, {"TINY": "1"})


def test_a_server_is_up_within_the_block_and_gone_after(tmp_path):
    needed()
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    pid = tmp_path / "pid"
    server = launch(tmp_path, "server0", f"echo begun; {sys.executable} {script} & echo $! > {pid};")
    with started([server], tmp_path, 60.0) as processes:
        assert processes["server0"].poll() is None
        child = int(pid.read_text())
        assert _alive(child)
    assert processes["server0"].poll() is not None
    assert not _alive(child)
    assert "\nbegun\n" in (tmp_path / "server0.log").read_text()


def test_a_server_that_ends_by_itself_says_why(tmp_path):
    command = (sys.executable, "-c", "print('first'); raise RuntimeError('no such model')")
    broken = ServerLaunch("prefill0", "prefill", free_port(), 0, (), command, {})
    with (
        pytest.raises(BackendUnavailable, match="prefill0 ended with status 1: RuntimeError: no such model"),
        started([broken], tmp_path, 30.0),
    ):
        pass


def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path):
    command = (sys.executable, "-c", STUBBORN)
    silent = ServerLaunch("decode0", "decode", free_port(), 0, (), command, {})
    found = []
    with (
        pytest.raises(BackendUnavailable, match=r"decode0 did not answer within live.ready=0.5 s"),
        started([silent], tmp_path, 0.5, lambda _: found.extend(_children(silent.command[-1]))),
    ):
        pass
    assert found
    assert not _children(silent.command[-1])


def test_servers_end_with_a_parent_that_is_killed(tmp_path):
    needed()
    server = launch(tmp_path, "server0")
    code = f"""
import time
from pathlib import Path
from backends.live.commands import ServerLaunch
from backends.live.launch import started
with started([{server!r}], Path({str(tmp_path)!r}), 60.0) as processes:
    print(processes["server0"].pid, flush=True)
    time.sleep(300)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _children(argument: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if len(words) > 2 and words[-2] == argument.encode() and _alive(int(entry.parent.name)):
            found.append(int(entry.parent.name))
    return found
