"""Nothing is left behind: no process, no port, no file in shared memory, however a run ends."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from backends.emulation.link.emulated_link import missing_requirements
from backends.jobs.launcher import Processes
from tests.backends import programs
from tests.support.engines import spec

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


def files():
    return {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()


def held():
    """Return the names of those files that another process, which lives, has open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with suppress(OSError):
            found |= set(re.findall(r"/dev/shm/(\S+)", (process / "maps").read_text()))
            links = [str(link.readlink()) for link in (process / "fd").iterdir()]
            found |= {link.removeprefix("/dev/shm/") for link in links if link.startswith("/dev/shm/")}
    return found


def left(before):
    """Return files that came since *before*, stay and are nobody's; a test beside this one has some."""
    found = {name for name in files() - before if "loky" not in name}  # joblib's, of sweeps in this process
    deadline = time.monotonic() + 20
    while found and time.monotonic() < deadline:
        time.sleep(0.1)
        found = (found & files()) - held()
    return found


def children():
    return set(psutil.Process().children())


def gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def signalled(number, processes, *words):
    """Signal the supervisor of two ranks once there are so many *processes*; none may be left, and no file."""
    before = files()
    supervisor = subprocess.Popen([sys.executable, "-c", RUN, *words], stderr=subprocess.DEVNULL)
    try:
        started, deadline = [], time.monotonic() + 60
        while time.monotonic() < deadline and sum(p.num_threads() > 1 for p in started) < 2:
            started = psutil.Process(supervisor.pid).children()
            time.sleep(0.1)
        assert len(started) == processes
        supervisor.send_signal(number)
        supervisor.wait(timeout=20)
        assert gone(started)
    finally:
        supervisor.kill()
        supervisor.wait()
    assert not left(before)


SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name
)


@pytest.mark.slow
@SIGNALS
def test_when_the_supervisor_is_signalled(any_engine, number):
    signalled(number, 2, any_engine.name)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_requirements()), reason="needs network namespaces")
@SIGNALS
def test_when_the_supervisor_of_a_link_is_signalled(mooncake, number):
    """The packet forwarder goes too; a namespace lasts as long as a process is in it."""
    signalled(number, 3, mooncake.name, "link")


@pytest.mark.slow
def test_when_a_rank_fails_and_another_is_stopped(any_engine):
    before, family = files(), children()
    outcome = Processes(any_engine, deadline=1.5).run(
        [spec("a", programs.say_and_die, code=1), spec("b", programs.sleep, seconds=600)]
    )
    assert sorted(outcome.ranks) == ["a", "b"]
    assert not children() - family
    assert not left(before)


def test_when_all_goes_well(any_engine):
    before, family, descriptors = files(), children(), psutil.Process().num_fds()
    outcome = Processes(any_engine, deadline=60).run(
        [spec("a", programs.write_many, to="b", count=10), spec("b", programs.be_written, by="a")]
    )
    assert not [result.error for result in outcome.ranks.values() if result.error]
    assert not children() - family
    assert not left(before)
    assert psutil.Process().num_fds() == descriptors
