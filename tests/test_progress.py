"""What is said while something runs: at once where it takes minutes, in pipes too, and how long it will take."""

import io
import os
import pty
import time
from types import SimpleNamespace

import pytest

from pdsim.results import terminal
from pdsim.results.terminal import Progress
from pdsim.run import Meter


def drawn(after):
    """Return what a bar writes to a terminal that is shown three steps."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file:
        with Progress("serving", file, after=after) as bar:
            for step in range(3):
                bar(step / 2, "rank0")
                time.sleep(0.11)  # a bar is drawn ten times a second at most
        file.write("end")
        file.flush()
        text = os.read(master, 65536)
    os.close(master)
    return text


def test_a_terminal_gets_a_bar_after_a_second():
    text = drawn(after=0.0)
    assert b"serving rank0" in text
    assert b"100%" in text
    assert drawn(after=60.0) == b"end"


def test_a_pipe_gets_lines_now_and_then():
    file = io.StringIO()
    with Progress("serving", file, after=0.0, every=0.1) as bar:
        bar(0.25, "too early")
        time.sleep(0.11)
        bar(0.5, "half")
        bar(0.75, "too soon after that")
    assert file.getvalue() == "serving half: 50%\n"


def test_lines_go_on_until_the_bar_ends():
    file = io.StringIO()
    deadline = time.monotonic() + 60
    with Progress("validate", file, every=0.05, at_once=True) as bar:
        bar(0.25, "transfer")
        assert file.getvalue() == ""  # what is refused has not begun
        while file.getvalue().count("\n") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    lines = file.getvalue().splitlines()
    assert {line.partition(":")[0] for line in lines} == {"validate transfer"}
    time.sleep(0.1)
    assert file.getvalue().splitlines() == lines


@pytest.fixture
def clock(monkeypatch):
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_the_time_left_follows_from_work_since_begin(clock):
    file = io.StringIO()
    with Progress("sweep", file) as bar:
        bar(0.5, "1000 of 2000 points")  # of which an earlier run has done the half
        clock.now += 60.0
        bar(0.625, "1250 of 2000 points")
        clock.now += 60.0
        bar(1.0, "2000 of 2000 points")
    half = "sweep 1250 of 2000 points: 62%, 1 min so far, about 3 min left"
    assert file.getvalue().splitlines() == [half, "sweep 2000 of 2000 points: 100%, 2 min so far"]


def test_what_ranks_count_moves_the_bar_within_its_step():
    said = []
    meter = Meter(lambda share, text: said.append((share, text)))
    meter(0.5, "job 2 of 2", 1.0)
    meter.measured(3.0, 12, 48)
    meter.simulated(0.25, 24, 48)
    meter.simulated(0.25, 0, 0)
    meter(0.9, "written")
    meter.measured(3.0, 1, 2)
    assert said == [
        (0.5, "job 2 of 2"),
        (0.625, "job 2 of 2, 12 of 48"),
        (0.75, "job 2 of 2, 24 of 48 (250 ms simulated)"),
        (0.5, "job 2 of 2 (250 ms simulated)"),
        (0.9, "written"),
        (0.9, "written, 1 of 2"),
    ]
