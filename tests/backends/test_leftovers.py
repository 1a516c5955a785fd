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

from backends.jobs.launcher import Processes
from tests.backends import programs
from tests.support.engines import spec

RUN = """
import sys
from backends.jobs.launcher import Processes
from tests.support.engines import spec
from tests.backends import programs
from tests.support.engines import engine

ranks = [spec("a", programs.sleep, seconds=600), spec("b", programs.sleep, seconds=600)]
Processes(engine(sys.argv[1])).run(ranks)
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_when_the_supervisor_is_signalled(any_engine, number):
    before = files()
    supervisor = subprocess.Popen([sys.executable, "-c", RUN, any_engine.name], stderr=subprocess.DEVNULL)
    try:
        ranks = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (len(ranks) == 2 and all(p.num_threads() > 1 for p in ranks)):
            ranks = psutil.Process(supervisor.pid).children()
            time.sleep(0.1)
        assert len(ranks) == 2
        supervisor.send_signal(number)
        supervisor.wait(timeout=20)
        assert gone(ranks)
    finally:
        supervisor.kill()
        supervisor.wait()
    assert not left(before)


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
