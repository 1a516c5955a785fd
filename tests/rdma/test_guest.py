"""The RDMA guest: what it can do, and that nothing of it stays behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.rdma.guest import ADDRESS, DEVICE, GuestFailed, boot
from tests.rdma.image import GuestUnavailable

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

BOOT = """
from tests.rdma.guest import boot

with boot() as guest:
    guest.run("sleep", "600", timeout=600)
"""


def emulator(process):
    """Return the emulator that *process* has started, once it is at work."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [child for child in psutil.Process(process.pid).children() if child.name().startswith("qemu-system")]
        if found:
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"{process} has started no emulator")


def test_it_has_an_rdma_device_on_a_network_of_its_own(guest):
    found = guest.run("rdma", "link", timeout=60)
    assert found.status == 0
    assert f"link {DEVICE}/1 state ACTIVE" in found.output
    cards = guest.run("ip", "-brief", "address", timeout=60).output.split()
    assert f"{ADDRESS}/24" in cards
    assert not guest.run("ip", "route", "show", "default", timeout=60).output


def test_a_command_gives_back_its_status_output_and_files(guest):
    script = 'echo "$WORD from $PWD"; echo kept > "$FOLDER/kept"; exit 7'
    found = guest.run(
        "bash", "-c", script, timeout=60, cwd=Path("/usr"), env={"WORD": "hello", "FOLDER": str(guest.folder)}
    )
    assert (found.status, found.output) == (7, "hello from /usr\n")
    assert (guest.folder / "kept").read_text() == "kept\n"


def test_a_command_that_takes_too_long_is_ended(guest):
    assert guest.run("sleep", "600", timeout=1).status == 124
    assert guest.run("true", timeout=60).status == 0


def test_it_sees_this_machines_files_and_cannot_change_them(guest, tmp_path):
    file = tmp_path / "file"
    file.write_text("as it was")
    assert guest.run("bash", "-c", f"cat {file}; echo changed > {file}; cat {file}", timeout=60).output == (
        "as it waschanged\n"
    )
    assert file.read_text() == "as it was"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_when_the_tests_are_signalled(number, tmp_path):
    command = [sys.executable, "-c", BOOT]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        machine = emulator(process)
        process.send_signal(number)
        process.wait(timeout=30)
        machine.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
    if number != signal.SIGKILL:  # which leaves nobody to remove the folder
        assert not list(tmp_path.iterdir())


def test_a_guest_that_does_not_come_up_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = psutil.Process().children()
    with pytest.raises(GuestFailed, match=r"no answer from the guest within 0\.5 s"), boot(startup=0.5):
        pass
    assert psutil.Process().children() == before
    assert not list(tmp_path.iterdir())


def test_a_machine_that_lacks_the_emulator_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", os.defpath.partition(":")[0] + "/nowhere")
    with pytest.raises(GuestUnavailable, match=r"apt-get install .* qemu-system-x86"), boot():
        pass
