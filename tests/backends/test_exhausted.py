"""Real runs where the machine has run out: of ports, of shared memory, of open files; and clocks that are set."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines import MARKED, make_target

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ["unshare", "--net", "--mount", "sh", "-c"]
NO_PORT = "echo 32768 32769 > /proc/sys/net/ipv4/ip_local_port_range"
FULL = "mount -t tmpfs -o size=16k tmpfs /dev/shm && head -c 16384 /dev/zero > /dev/shm/full"
RUN = [sys.executable, "-m", "pdsim", "run", "target=real", "hw=loopback", "workload=smoke", "workload.count=3"]
ENGINES = MARKED[:2]


def run(engine: str, folder: Path, before: str) -> subprocess.CompletedProcess[str]:
    """Serve on *engine* in namespaces of its own, after the shell's commands *before*."""
    make_target(engine)
    if subprocess.run([*NAMESPACES, "ip link set lo up"], capture_output=True, check=False).returncode:
        pytest.skip("needs the rights to unshare namespaces")
    words = [*RUN, f"backend={engine}"]
    shell = f'ip link set lo up && {before} && exec "$@"'
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*NAMESPACES, shell, "sh", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_shared_memory_changes_nothing(engine, tmp_path):
    done = run(engine, tmp_path, FULL)
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("before", [NO_PORT, "ulimit -n 24"], ids=["ports", "files"])
def test_what_has_run_out_ends_the_run_in_one_line(engine, before, tmp_path):
    done = run(engine, tmp_path, before)
    lines = [line for line in done.stderr.splitlines() if line.startswith("pdsim: ")]
    assert done.returncode == 1
    assert len(lines) == 1
    assert "BackendUnavailable" in lines[0]
    assert "Traceback" not in done.stderr


def test_no_deadline_is_of_a_clock_that_can_be_set():
    files = [path for room in ("pdsim", "backends") for path in (ROOT / room).rglob("*.py")]
    users = [str(path.relative_to(ROOT)) for path in files if re.search(r"\btime\.time\b", path.read_text("utf-8"))]
    assert users == ["backends/emulation/guest/machine.py"]  # which asks how old a file is
