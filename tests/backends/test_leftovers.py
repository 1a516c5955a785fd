"""Nothing is left behind: no process, no port, no file in shared memory, however a run ends."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
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
