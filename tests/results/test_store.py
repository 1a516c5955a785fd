"""The folder of a run: complete and named, or plainly marked incomplete, whatever ended the process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pdsim.calibration.definition import Calibration
from pdsim.cli.main import main
from pdsim.core.errors import ConfigError, PeerLost
from pdsim.results import store
from pdsim.results.record import Metric
from pdsim.results.store import FILES, INCOMPLETE, Run
from pdsim.serving import requests
from pdsim.serving.router import Router
from pdsim.transfer.job import Outcome, RankResult
from tests.support.configs import make_config, make_result


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_run_is_marked_until_all_its_files_are_there(config):
    with Run(config) as run:
        assert run.folder.name.endswith(INCOMPLETE)
        assert json.loads((run.folder / "run.json").read_text())["status"] == "running"
        with pytest.raises(ConfigError, match=r"has no requests\.parquet, summary\.json, transfers\.parquet"):
            store.load(run.folder)
        folder = run.finish(make_result())
    assert tuple(content(folder)) == FILES
    assert folder.name.startswith("transfer-toy-fast-model-2")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_runs_that_start_together_leave_the_same_bytes(config):
    runs = [Run(config, command=("pdsim", "run")) for _ in range(3)]
    one, *others = (run.finish(make_result()) for run in runs)
    assert len({one, *others}) == 3
    assert all(content(one) == content(other) for other in others)


def test_real_runs_record_dates_and_modelled_ones_calibrations(tmp_path):
    real = make_config(tmp_path, target="real", calibration=Calibration(name="mine"))
    about, modelled = (store.load(Run(c).finish(make_result())) for c in (real, replace(real, target="model")))
    assert ("calibration" in about["evidence"], modelled["evidence"]["calibration"]["name"]) == (False, "mine")
    assert about["started"].startswith("20")
    assert about["wall_seconds"] >= 0


def test_runs_that_raise_or_fail_say_so(config):
    with pytest.raises(PeerLost), Run(config) as run:
        raise PeerLost("rank1 is gone\nsince a while")
    about = json.loads((run.folder / "run.json").read_text())
    assert run.folder.name.endswith(INCOMPLETE)
    assert (about["status"], about["error"]) == ("failed", "PeerLost: rank1 is gone since a while")
    outcome = Outcome({"rank1": RankResult("rank1", error="PeerLost: rank0 is gone")}, seconds=1.0)
    summary = [Metric("x", float("nan"), "a number")]
    result = make_result(failures=["rank1: PeerLost: rank0 is gone"], outcome=outcome, summary=summary)
    about = store.load(Run(config).finish(result))
    assert (about["status"], about["error"]) == ("partial", "rank1: PeerLost: rank0 is gone")
    assert about["ranks"] == {"rank1": {"engine": "", "error": "PeerLost: rank0 is gone", "refused": 0}}
    assert about["metrics"]["x"]["value"] is None


def test_a_changed_file_or_another_version_is_named(config):
    folder = Run(config).finish(make_result())
    summary = folder / "summary.json"
    text = summary.read_text()
    for changed, why in (
        (text[: len(text) // 2], r"summary\.json is not JSON: .*; it was changed since, so run it again"),
        (text.replace('"schema": 1', '"schema": 99'), r"summary\.json has schema 99, and pdsim reads 1; run it"),
    ):
        summary.write_text(changed)
        with pytest.raises(ConfigError, match=why):
            store.load(folder)


def test_a_run_from_a_kept_configuration_gives_the_same_result(tmp_path, pdsim_says, monkeypatch):
    def run(*words):
        status, out, err = pdsim_says("run", *words, "--json")
        assert status == 0, err
        return {**json.loads(out), "command": None, "overrides": None}

    monkeypatch.chdir(tmp_path)
    options = ("experiment.patterns=incast", "experiment.repeat=3", "experiment.size=[4KiB,1MiB]", "hw=2x8xh100")
    first = run("experiment=transfer", *options, "backend.timeout=7s", "output=kept")
    again = run("--config-path", str(tmp_path / first["folder"]), "--config-name", "config")
    assert again["folder"] != first["folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]  # Hydra leaves nothing of its own
    assert again | {"folder": first["folder"]} == first


SERVED = ["hw=8xh200", "workload=poisson", "workload.count=60", "workload.rate=20", "workload.input_mean=9000"]


class Killed(BaseException):
    """Ends a run in the middle, as nothing that it could handle."""


def test_a_killed_run_shows_what_it_had_written(tmp_path, monkeypatch, pdsim_prints):
    monkeypatch.setattr(requests, "JOURNAL_BLOCK", 8)
    assert main(["run", "--quiet", f"output={tmp_path / 'whole'}", *SERVED]) == 0
    (whole,) = (tmp_path / "whole").iterdir()
    assert not list(whole.glob("*.journal"))
    ended = Router._close

    def close(self, *arguments):
        ended(self, *arguments)
        if self.generated[0] == 30:
            raise Killed

    with monkeypatch.context() as context:
        context.setattr(Router, "_close", close)
        with pytest.raises(Killed):
            main(["run", "--quiet", f"output={tmp_path / 'killed'}", *SERVED])
    (folder,) = (tmp_path / "killed").iterdir()
    assert folder.name.endswith(INCOMPLETE)
    shown = json.loads(pdsim_prints("show", "--json", str(folder)))
    assert shown["failures"] == ["the run ended early: these are 24 of 60 requests, which had ended by then"]
    assert shown["metrics"]["requests"]["value"] == 24
    assert [note for note in shown["notes"] if "larger sizes are extrapolated" in note]
    kept, every = (pq.read_table(place / "requests.parquet").to_pylist() for place in (folder, whole))
    assert [row | {"path": None} for row in kept] == [every[row["id"]] | {"path": None} for row in kept]
    assert main(["compare", str(folder), str(whole)]) == 0


MOMENTS, SAVES, ROWS = 80, 4, 2000

# One process imports everything, then starts the victims: each saves runs without end, until it is killed.
PROGRAM = f"""
import os, signal, sys, time
from pathlib import Path
from pdsim.results.store import Run
from tests.support.configs import make_config, make_result, record

config, result = make_config(Path(sys.argv[1]) / "first"), make_result(transfers=[record()] * {ROWS})
Run(config).finish(result)  # imports what it needs
begin = time.monotonic()
Run(config).finish(result)
step = {SAVES} * (time.monotonic() - begin) / {MOMENTS}  # the kills are spread over so many saves, however slow
for moment in range({MOMENTS}):
    output = Path(sys.argv[1]) / str(moment)
    started, start = os.pipe()
    victim = os.fork()
    if not victim:
        config = make_config(output)
        os.write(start, b"!")
        while True:
            Run(config).finish(result)
    os.read(started, 1)
    time.sleep(moment * step)
    os.kill(victim, signal.SIGKILL)
    assert os.waitpid(victim, 0)[1] == signal.SIGKILL
"""


@pytest.mark.slow
def test_sigkill_leaves_complete_folders_or_marked_ones(tmp_path):
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=100)
    folders = sorted(tmp_path.glob("*/*"))
    marked = [folder for folder in folders if folder.name.endswith(INCOMPLETE)]
    whole = [folder for folder in folders if folder not in marked]
    # without both kinds the kills came too early or too late to show anything
    assert min(len(marked), len(whole)) >= MOMENTS / 10
    for folder in whole:
        assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
        assert store.load(folder)["status"] == "ok"
        assert pq.read_metadata(folder / "transfers.parquet").num_rows == ROWS
    states = {tuple(sorted(path.name for path in folder.iterdir())) for folder in marked}
    assert len(states) >= 3, "the kills all came at one stage of a save"
