"""Processes here, tasks of Ray, jobs of submitit: every point once; one whose worker dies is begun again."""

import os
import signal
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from pdsim.cli.main import main
from pdsim.cli.sweep import executor_of
from pdsim.config.compose import CommandLine
from pdsim.core.errors import ConfigError
from pdsim.sweep.clusters import Ray, Slurm
from pdsim.sweep.executors import Local
from pdsim.sweep.points import Point
from tests.test_cli import QUICK


@pytest.fixture
def points(tmp_path):
    return [Point(name=f"p{number}", words=(f"mark={tmp_path}", f"seed={number}")) for number in range(6)]


def mark(point):
    return Path(point.words[0].partition("=")[2]) / point.name


def square(point):
    return {"point": point.name, "value": int(point.words[1].partition("=")[2]) ** 2, "pid": os.getpid()}


def dies(point):
    if point.name == "p3":
        os.kill(os.getpid(), signal.SIGKILL)
    return square(point)


def dies_once(point):
    if point.name == "p3" and not mark(point).exists():
        mark(point).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return square(point)


def sleeps_but_the_first(point):
    if point.name != "p0":
        mark(point).write_text(str(os.getpid()))
        time.sleep(60)
    return square(point)


def by_name(rows):
    return {row["point"]: row for row in rows}


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="needs ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(params=["local", "ray"])
def executor(request):
    if request.param == "ray":
        request.getfixturevalue("ray")
        return Ray(chunk=2)
    return Local(workers=2)


def test_every_point_is_run_once_by_processes_that_stay(executor, points):
    rows = list(executor.run(square, points))
    assert sorted(row["value"] for row in rows) == [0, 1, 4, 9, 16, 25]
    pids = {row["pid"] for row in rows}
    assert len(pids) <= 2
    assert os.getpid() not in pids


def test_a_process_that_dies_once_costs_nothing(executor, points):
    rows = by_name(executor.run(dies_once, points))
    assert [row["value"] for _, row in sorted(rows.items())] == [0, 1, 4, 9, 16, 25]
    assert mark(points[3]).exists()


def test_a_point_whose_process_dies_again_has_failed(points):
    rows = by_name(Local(workers=2).run(dies, points))
    assert (rows["p3"]["status"], rows["p3"]["error"]) == ("failed", "its process was ended by SIGKILL, 2 times")
    assert [rows[f"p{number}"]["value"] for number in (0, 1, 2, 4, 5)] == [0, 1, 4, 16, 25]


def test_a_point_whose_worker_of_ray_dies_again_has_failed(ray, points):
    (row,) = Ray().run(dies, points[3:4])
    assert (row["status"], row["error"][:27]) == ("failed", "its worker of Ray ended (Wo")


def test_who_stops_asking_ends_the_processes(tmp_path, points):
    rows = Local(workers=2).run(sleeps_but_the_first, points)
    assert next(rows)["value"] == 0
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 or not all(path.read_text() for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    rows.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(("name", "kind"), [("local", Local), ("ray", Ray), ("slurm", Slurm)])
def test_each_executor_is_chosen_by_its_file(name, kind):
    assert executor_of([f"executor={name}"], CommandLine()) == kind()
    assert executor_of([f"executor={name}", "executor.workers=3"], CommandLine()) == kind(workers=3)
    with pytest.raises(ConfigError, match=r"executor\.workers must be >=? \d, got -1"):
        executor_of([f"executor={name}", "executor.workers=-1"], CommandLine())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("executor", ["ray", "slurm"])
def test_a_sweep_has_the_same_table_whatever_runs_it(executor, tmp_path, request, monkeypatch):
    if executor == "ray":
        request.getfixturevalue("ray")
    else:
        pytest.importorskip("submitit", reason="needs submitit")
    own = ["executor.cluster=local", "executor.workers=2"] if executor == "slurm" else []
    for output, words in (("a", []), ("b", [f"executor={executor}", *own])):
        (tmp_path / output).mkdir()
        monkeypatch.chdir(tmp_path / output)
        assert main(["sweep", *QUICK, "seed=1,2,3", "hw=8xh20,8xh200", "--quiet", *words]) == 0
    first, second = (pq.read_table(next(tmp_path.glob(f"{name}/results/*/points.parquet"))) for name in "ab")
    assert first.num_rows == 6
    assert second.equals(first)
