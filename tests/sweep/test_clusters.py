"""Tasks of Ray and jobs of submitit: the rows of processes on this machine, also when a worker is killed."""

import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pdsim.cli.main import main
from pdsim.sweep.clusters import Ray
from pdsim.sweep.points import Point
from tests.sweep.test_executors import POINTS, by_name, square
from tests.test_cli import QUICK


@pytest.fixture(scope="module")
def ray():
    """Ray on this machine, with two workers and a resource of one's own."""
    ray = pytest.importorskip("ray", reason="needs ray")
    ray.init(num_cpus=2, resources={"h200": 1}, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def dies_once(point: Point):
    """Kill its own process, a worker, at the first attempt at the point p3."""
    mark = Path(point.words[0].partition("=")[2])
    if point.name == "p3" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"point": point.name, "value": 1}


def dies(point: Point):
    os.kill(os.getpid(), signal.SIGKILL)


def test_ray_runs_every_point_once_in_chunks(ray):
    rows = list(Ray(chunk=2).run(square, POINTS))
    assert sorted(row["value"] for row in rows) == [0, 1, 4, 9, 16, 25]
    assert os.getpid() not in {row["pid"] for row in rows}


def test_a_worker_of_ray_that_is_killed_costs_nothing(ray, tmp_path):
    points = [Point(name=f"p{number}", words=(f"mark={tmp_path / 'mark'}",)) for number in range(6)]
    rows = by_name(Ray(chunk=2).run(dies_once, points))
    assert sorted(rows) == ["p0", "p1", "p2", "p3", "p4", "p5"]
    assert {row["value"] for row in rows.values()} == {1}
    assert (tmp_path / "mark").exists()


def test_points_whose_worker_dies_again_and_again_have_failed(ray):
    (row,) = Ray().run(dies, POINTS[:1])
    assert row["status"] == "failed"
    assert row["error"].startswith("its worker of Ray ended (")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("executor", ["ray", "slurm"])
def test_a_sweep_has_the_same_table_whatever_runs_it(executor, tmp_path, request, monkeypatch):
    if executor == "ray":
        request.getfixturevalue("ray")
    else:
        pytest.importorskip("submitit", reason="needs submitit")
    monkeypatch.chdir(tmp_path)
    own = ["executor.cluster=local", "executor.workers=2"] if executor == "slurm" else []
    for output, words in (("a", []), ("b", [f"executor={executor}", *own])):
        folder = tmp_path / output
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert main(["sweep", *QUICK, "seed=1,2,3", "hw=8xh20,8xh200", "--quiet", *words]) == 0
    first, second = (pq.read_table(next(tmp_path.glob(f"{name}/results/*/points.parquet"))) for name in "ab")
    assert first.num_rows == 6
    assert second.equals(first)
