"""Processes on this machine: every point once, in any order; one that dies is begun again and then given up."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from pdsim.cli.sweep import executor_of
from pdsim.config.compose import CommandLine
from pdsim.core.errors import ConfigError
from pdsim.sweep.clusters import Ray, Slurm
from pdsim.sweep.executors import Local
from pdsim.sweep.points import Point

POINTS = [Point(name=f"p{number}", words=(f"seed={number}",)) for number in range(6)]


def square(point):
    return {"point": point.name, "value": int(point.words[0].partition("=")[2]) ** 2, "pid": os.getpid()}


def dies_at_three(point):
    if point.name == "p3":
        os.kill(os.getpid(), signal.SIGKILL)
    return square(point)


def dies_once(point):
    mark = Path(os.environ["PDSIM_TEST_FOLDER"]) / point.name
    if point.name == "p3" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return square(point)


def sleeps(point):
    (Path(os.environ["PDSIM_TEST_FOLDER"]) / point.name).write_text(str(os.getpid()))
    time.sleep(60)


def by_name(rows):
    return {row["point"]: row for row in rows}


def test_every_point_is_run_once_by_processes_that_stay(tmp_path):
    rows = list(Local(workers=2).run(square, POINTS))
    assert sorted(row["value"] for row in rows) == [0, 1, 4, 9, 16, 25]
    assert len({row["pid"] for row in rows}) <= 2
    assert os.getpid() not in {row["pid"] for row in rows}


def test_a_point_whose_process_dies_twice_has_failed_and_the_others_have_not():
    rows = by_name(Local(workers=2).run(dies_at_three, POINTS))
    assert rows["p3"]["status"] == "failed"
    assert rows["p3"]["error"] == "its process was ended by SIGKILL, 2 times"
    assert [rows[f"p{number}"]["value"] for number in (0, 1, 2, 4, 5)] == [0, 1, 4, 16, 25]


def test_a_process_that_dies_once_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PDSIM_TEST_FOLDER", str(tmp_path))
    assert by_name(Local(workers=1).run(dies_once, POINTS))["p3"]["value"] == 9


def test_who_stops_asking_ends_the_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("PDSIM_TEST_FOLDER", str(tmp_path))
    rows = Local(workers=2).run(sleeps_but_the_first, POINTS)
    assert next(rows)["value"] == 0
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 or not all(path.read_text() for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    rows.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def sleeps_but_the_first(point):
    return square(point) if point.name == "p0" else sleeps(point)


@pytest.mark.parametrize(("name", "kind"), [("local", Local), ("ray", Ray), ("slurm", Slurm)])
def test_each_executor_is_chosen_by_its_file_whose_values_are_its_defaults(name, kind):
    assert executor_of([f"executor={name}"], CommandLine()) == kind()
    assert executor_of([f"executor={name}", "executor.workers=3"], CommandLine()) == kind(workers=3)


def test_fewer_workers_than_none_are_refused():
    with pytest.raises(ConfigError, match=r"executor\.workers must be >= 0, got -1"):
        executor_of(["executor.workers=-1"], CommandLine())
