"""The RDMA guest: what it can do, and that nothing of it stays behind."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from backends.emulation.guest.engines import Server
from backends.emulation.guest.machine import ADDRESS, DEVICE, PREFIX, GuestFailed, boot

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

RUN = ("run", "target=real", "hw=rdma_guest", "backend=mooncake", "experiment=transfer")


@pytest.fixture
def guest(rdma_guest):
    return rdma_guest


def emulator(process):
    """Return the emulator that *process* has started, once it is at work."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children():
            if child.name().startswith("qemu-system"):
                return child
        time.sleep(0.1)
    raise AssertionError(f"{process} has started no emulator")


def test_it_has_an_rdma_device_on_a_network_of_its_own(guest):
    assert f"link {DEVICE}/1 state ACTIVE" in guest.run("rdma", "link", timeout=60).output
    assert f"{ADDRESS}/24" in guest.run("ip", "-brief", "address", timeout=60).output.split()
    assert not guest.run("ip", "route", "show", "default", timeout=60).output


def test_a_command_gives_back_status_output_and_files_and_may_be_late(guest):
    script = 'echo "$WORD from $PWD"; echo kept > "$FOLDER/kept"; exit 7'
    environment = {"WORD": "hello", "FOLDER": str(guest.folder)}
    done = guest.run("bash", "-c", script, timeout=60, cwd=Path("/usr"), env=environment)
    assert (done.status, done.output) == (7, "hello from /usr\n")
    assert (guest.folder / "kept").read_text() == "kept\n"
    assert [guest.run("sleep", length, timeout=1).status for length in ("600", "0")] == [124, 0]


def test_it_sees_this_machines_files_and_cannot_change_them(guest, tmp_path):
    file = tmp_path / "file"
    file.write_text("as it was")
    done = guest.run("bash", "-c", f"cat {file}; echo changed > {file}; cat {file}", timeout=60)
    assert (done.output, file.read_text()) == ("as it waschanged\n", "as it was")


def server(guest, name, script):
    """Return a server of jobs that is a shell script; ``$2`` is where its FIFOs are."""
    return Server(guest, name, "none", python=("sh", "-c", script))


def test_a_server_of_jobs_that_does_not_start_says_why(guest):
    with pytest.raises(GuestFailed, match=r"'absent' in the guest ended:\nno such library"):
        server(guest, "absent", "echo no such library")


@pytest.mark.parametrize(
    ("name", "end", "seconds", "failure"),
    [
        ("dying", "echo it was too much", 60, r"ended:\nit was too much"),
        ("slow", "sleep 5; echo done > $2/answers", 0.5, r"is not done after 0\.5 s"),
    ],
)
def test_a_server_of_jobs_that_fails_says_why_and_is_not_asked_again(guest, name, end, seconds, failure):
    failing = server(guest, name, f"echo ready > $2/answers; read job < $2/jobs; {end}")
    with pytest.raises(GuestFailed, match=rf"{name!r} in the guest {failure}"):
        failing.run("a job", seconds=seconds)
    with pytest.raises(GuestFailed, match="cannot be used any more, an earlier job having been answered by"):
        failing.run("another", seconds=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_when_a_run_is_signalled(number, tmp_path):
    temporary, results = tmp_path / "temporary", tmp_path / "results"
    temporary.mkdir()
    command = [sys.executable, "-m", "pdsim", *RUN, f"output={results}"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        machine = emulator(process)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        machine.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
    left = [path.name[:12] for path in temporary.iterdir()]
    if number == signal.SIGKILL:  # which leaves nobody to remove the folder, until there is another guest
        assert left == ["pdsim-guest-"]
        return
    assert (process.returncode, left) == (128 + number, [])
    told = [line for line in said.splitlines() if not line.startswith("transfer on rdma_guest")]  # how far it was
    assert len(told) == 1  # for who ended it
    (folder,) = results.iterdir()
    assert folder.name.endswith(".incomplete")


def test_a_guest_that_does_not_come_up_leaves_nothing_and_clears_up(tmp_path, monkeypatch):
    """A folder whose owner was killed is removed; one in use, a fresh one and another's are not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = psutil.Process().children()
    for name in ("killed", "alive", "fresh"):
        folder = tmp_path / f"{PREFIX}{name}"
        folder.mkdir()
        if name != "fresh":
            os.utime(folder, (0, 0))
    with (tmp_path / "other").open("w"), contextlib.ExitStack() as stack:
        descriptor = os.open(tmp_path / f"{PREFIX}alive", os.O_RDONLY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(GuestFailed, match=r"no answer from the guest within 0\.5 s"), boot(startup=0.5):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {f"{PREFIX}alive", f"{PREFIX}fresh", "other"}
    assert psutil.Process().children() == before
