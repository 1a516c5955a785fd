"""Nothing is left behind, however a run ends; and where the machine has run out."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from backends.base.zmq_channel import WIDEN
from backends.emulation.link.emulated_link import missing_requirements
from backends.jobs.launcher import Processes
from backends.jobs.spawn import spawn
from tests.backends import programs
from tests.support.engines import MARKED, make_target, spec

RUN = """
import sys
from dataclasses import replace
from backends.jobs.launcher import Processes
from pdsim.hardware.machine import NetworkLink
from pdsim.transfer.job import Place
from tests.backends import programs
from tests.support.engines import engine, spec

link = NetworkLink(rate=1e8, delay=1e-3) if "link" in sys.argv else None
ranks = [replace(spec(name, programs.sleep, seconds=600), place=Place(node)) for node, name in enumerate("ab")]
Processes(engine(sys.argv[1]), link=link, nodes=2).run(ranks)
"""
SHARED = Path("/dev/shm")


def files():
    """Return the names of the files in shared memory that no other living process has open or mapped."""
    names = {path.name for path in SHARED.iterdir()} if SHARED.is_dir() else set()
    for process in Path("/proc").glob("[0-9]*"):
        if process.name != str(os.getpid()):
            with suppress(OSError):
                names -= set(re.findall(r"/dev/shm/(\S+)", (process / "maps").read_text()))
                links = [link.readlink() for link in (process / "fd").iterdir()]
                names -= {link.name for link in links if link.parent == SHARED}
    return {name for name in names if "loky" not in name}  # joblib's, of sweeps in this process


@contextmanager
def nothing_left():
    """Assert that no child and no file of this block stays; a test beside this one may have some."""
    before, family = {path.name for path in SHARED.glob("*")}, set(psutil.Process().children())
    yield
    assert not set(psutil.Process().children()) - family
    deadline = time.monotonic() + 20
    while (left := files() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


LINKED = pytest.mark.skipif(bool(missing_requirements()), reason="needs network namespaces")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
@pytest.mark.parametrize(("processes", "words"), [(2, ()), pytest.param(3, ("link",), marks=LINKED)])
def test_when_the_supervisor_is_signalled(any_engine, number, processes, words):
    """On a link the packet forwarder goes too; a namespace lasts as long as a process is in it."""
    if words and any_engine.name != "mooncake_tcp":
        pytest.skip("one engine is enough")
    with nothing_left():
        command = [sys.executable, "-c", RUN, any_engine.name, *words]
        supervisor = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            started, deadline = [], time.monotonic() + 60
            while time.monotonic() < deadline and sum(p.num_threads() > 1 for p in started) < 2:
                started = psutil.Process(supervisor.pid).children()
                time.sleep(0.1)
            assert len(started) == processes
            supervisor.send_signal(number)
            supervisor.wait(timeout=20)
            _, alive = psutil.wait_procs(started, timeout=10)
            assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        finally:
            supervisor.kill()
            supervisor.wait()


@pytest.mark.slow
def test_when_a_run_of_real_faults_is_killed(mooncake, tmp_path):
    command = [
        sys.executable,
        "-m",
        "tools.faults_real",
        "run",
        "--seeds",
        "302:303",
        "--to",
        str(tmp_path / "rows"),
    ]
    with nothing_left():
        tool = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started: list[psutil.Process] = []
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and len(started) < 4:  # a worker, and three ranks
                started = psutil.Process(tool.pid).children(recursive=True)
                time.sleep(0.1)
            assert len(started) == 4
        finally:
            tool.kill()
            tool.wait()
        assert not psutil.wait_procs(started, timeout=20)[1]


@pytest.mark.slow
def test_when_a_rank_fails_and_another_is_stopped(any_engine):
    with nothing_left():
        ranks = [spec("a", programs.say_and_die, code=1), spec("b", programs.sleep, seconds=600)]
        assert sorted(Processes(any_engine, deadline=1.5).run(ranks).ranks) == ["a", "b"]


def test_when_all_goes_well(any_engine):
    descriptors = psutil.Process().num_fds()
    with nothing_left():
        ranks = [spec("a", programs.write_many, to="b", count=10), spec("b", programs.be_written, by="a")]
        outcome = Processes(any_engine, deadline=60).run(ranks)
        assert not [result.error for result in outcome.ranks.values() if result.error]
    assert psutil.Process().num_fds() == descriptors


ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ["unshare", "--net", "--mount", "sh", "-c"]
NO_PORT = "echo 32768 32769 > /proc/sys/net/ipv4/ip_local_port_range"
FEW_PORTS = NO_PORT.replace("32769", "32772")  # for channels, but not for all of an engine
NONE_LEFT = NO_PORT.replace("32769", "32773")  # for all that three ranks on Mooncake listen on, and no more
FULL = "mount -t tmpfs -o size=16k tmpfs /dev/shm && head -c 16384 /dev/zero > /dev/shm/full"
SERVING = [sys.executable, "-m", "pdsim", "run", "target=real", "hw=loopback", "workload=smoke", "workload.count=3"]
ENGINES = MARKED[:2]


def run(engine: str, folder: Path, before: str) -> subprocess.CompletedProcess[str]:
    """Serve on *engine* in namespaces of its own, after the shell's commands *before*."""
    make_target(engine)
    if subprocess.run([*NAMESPACES, "ip link set lo up"], capture_output=True, check=False).returncode:
        pytest.skip("needs the rights to unshare namespaces")
    words = [*SERVING, f"backend={engine}"]
    shell = f'ip link set lo up && {before} && exec "$@"'
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"cwd": folder, "env": os.environ | {"PYTHONPATH": path}, "timeout": 120}
    return subprocess.run([*NAMESPACES, shell, "sh", *words], **own, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_shared_memory_changes_nothing(engine, tmp_path):
    done = run(engine, tmp_path, FULL)
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("before", "way_out"),
    [(NO_PORT, WIDEN), (FEW_PORTS, WIDEN), (NONE_LEFT, WIDEN), ("ulimit -n 24", "ulimit -n 256")],
    ids=["ports", "some ports", "ports to connect", "files"],
)
def test_what_has_run_out_ends_the_run_in_one_line(engine, before, way_out, tmp_path):
    done = run(engine, tmp_path, before)
    lines = [line for line in done.stderr.splitlines() if line.startswith("pdsim: ")]
    assert done.returncode == 1
    assert len(lines) == 1
    assert way_out in lines[0]
    assert "Traceback" not in done.stderr


STEPS = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
unsigned calls, each_call;
int clock_gettime(clockid_t clock, struct timespec *t) {  // a day ahead and back, each half second or call
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    int failed = syscall(SYS_clock_gettime, clock, t);
    int ahead = each_call ? __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED) & 1 : now.tv_nsec < 500000000;
    if (clock == CLOCK_REALTIME && ahead) t->tv_sec += 86400;
    return failed;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000, 0;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return t ? *t = now.tv_sec : now.tv_sec;
}
"""


@pytest.fixture
def steps(tmp_path):
    """The library that steps the clock, for LD_PRELOAD."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "steps.c").write_text(STEPS, "utf-8")
    command = ["cc", "-shared", "-fPIC", "-o", tmp_path / "steps.so", tmp_path / "steps.c"]
    subprocess.run(command, check=True, capture_output=True)
    return str(tmp_path / "steps.so")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_clock_that_is_set_changes_nothing(engine, steps, tmp_path):
    done = run(engine, tmp_path, f"export LD_PRELOAD={steps}")
    assert "LD_PRELOAD" not in done.stderr  # or it was not loaded
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.parametrize("engine", ENGINES)
def test_transfers_survive_a_clock_set_at_each_look(engine, steps, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", steps)
    writes = spec("a", programs.write_while_the_clock_steps, to="b", count=20)
    ranks = [writes, spec("b", programs.be_written, by="a")]
    outcome = replace(make_target(engine), spawn=spawn, deadline=60).run(ranks)
    assert (outcome.ranks["a"].error, outcome.ranks["a"].value) == ("", [0, 1])


def test_no_deadline_is_of_a_clock_that_can_be_set():
    files = [path for room in ("pdsim", "backends") for path in (ROOT / room).rglob("*.py")]
    users = [str(path.relative_to(ROOT)) for path in files if re.search(r"\btime\.time\b", path.read_text("utf-8"))]
    assert users == ["backends/emulation/guest/machine.py"]  # which asks how old a file is
