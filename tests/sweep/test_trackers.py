"""`pdsim sweep --track`: a tracker gets each point of a sweep once, and cannot end it."""

import warnings

import pytest

from pdsim.cli.main import main
from pdsim.cli.sweep import executor_of, space_of
from pdsim.config.compose import CommandLine
from pdsim.core.errors import RunWarning
from pdsim.core.progress import silent
from pdsim.sweep import driver, trackers

WORDS = ["hw=2xh200", "model=qwen3-8b", "parallel=tp1", "workload=smoke", "workload.rate=1,8"]


def run(folder, track):
    space = space_of(WORDS, {})
    executor = executor_of(["executor.workers=1"], CommandLine.of([], {}))
    return driver.sweep(folder, space.points(), executor, silent, track)


def test_each_point_is_told_also_of_an_earlier_call(tmp_path):
    told, again = [], []
    rows = run(tmp_path / "sweep", told.append)
    run(tmp_path / "sweep", again.append)
    assert sorted(row["point"] for row in told) == sorted(row["point"] for row in rows)
    assert again == rows
    assert {row["overrides"]["workload.rate"] for row in told} == {"1", "8"}
    assert all(row["metrics"]["ttft_p50_s"] > 0 for row in told)


def test_a_failing_tracker_warns_and_the_sweep_continues(tmp_path):
    calls = []

    def fails(row):
        calls.append(row)
        raise OSError("no route to host")

    with pytest.warns(RunWarning, match="--track: OSError: no route to host"):
        rows = run(tmp_path / "sweep", fails)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert len(calls) == 1


@pytest.mark.slow
def test_mlflow_has_a_run_a_point_with_parameters_and_metrics(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    store = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own
        for _ in range(2):  # the second call logs nothing again
            command = ["sweep", *WORDS, "executor.workers=1", "--quiet", f"output={tmp_path}", "--track", "mlflow"]
            assert main(command) == 0
        (folder,) = tmp_path.glob("sweep-*")
        client = MlflowClient(tracking_uri=store)
        runs = client.search_runs([client.get_experiment_by_name(folder.name).experiment_id])
    assert {run.info.run_name for run in runs} == {path.name for path in folder.iterdir() if path.is_dir()}
    assert {run.data.params["workload.rate"] for run in runs} == {"1", "8"}
    assert all(run.info.status == "FINISHED" and run.data.metrics["ttft_p50_s"] > 0 for run in runs)
    assert len(runs) == 2


@pytest.mark.slow
def test_wandb_has_a_run_a_point_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    told = []
    track = trackers.wandb("mine")
    rows = run(tmp_path / "sweep", lambda row: (told.append(row), track(row)))
    kept = [path.read_bytes() for path in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))]
    assert len(kept) == len(rows) == 2
    for row, log in zip(told, kept, strict=True):
        assert row["point"].encode() in log
        assert repr(row["metrics"]["ttft_p50_s"]).encode() in log  # as JSON
    again = {path.name for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
    track(told[0])
    assert {path.name for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")} == again  # the same run
