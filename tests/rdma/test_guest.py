"""The RDMA guest: nothing of it stays behind."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from backends.emulation.guest.machine import PREFIX, GuestFailed, boot

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

RUN = ("run", "target=real", "hw=rdma_guest", "backend=mooncake", "experiment=transfer")


def emulator(process):
    """Return the emulator that *process* has started, once it is at work."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children():
            if child.name().startswith("qemu-system"):
                return child
        time.sleep(0.1)
    raise AssertionError(f"{process} has started no emulator")


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


def test_a_guest_that_does_not_start_leaves_nothing(tmp_path, monkeypatch):
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
