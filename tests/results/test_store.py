"""The folder of a run: complete and named, or plainly marked incomplete."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments import transfer
from pdsim.config import as_written, load
from pdsim.core.errors import ConfigError, PeerLost
from pdsim.results import store
from pdsim.results.store import FILES, INCOMPLETE, Run
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


def test_runs_that_start_together_leave_the_same_bytes_in_own_folders(config):
    runs = [Run(config, command=("pdsim", "run")) for _ in range(3)]
    one, *others = (run.finish(make_result()) for run in runs)
    assert len({one, *others}) == 3
    assert all(content(one) == content(other) for other in others)


def test_a_real_run_records_its_date_and_duration(tmp_path):
    about = store.load(Run(make_config(tmp_path, target="real")).finish(make_result()))
    assert about["started"].startswith("20")
    assert about["wall_seconds"] >= 0


def test_a_run_that_raises_stays_marked_and_keeps_its_error(config):
    with pytest.raises(PeerLost), Run(config) as run:
        raise PeerLost("rank1 is gone\nsince a while")
    about = json.loads((run.folder / "run.json").read_text())
    assert run.folder.name.endswith(INCOMPLETE)
    assert (about["status"], about["error"]) == ("failed", "PeerLost: rank1 is gone since a while")


def test_failures_make_a_run_partial_and_nan_is_null(config):
    outcome = Outcome({"rank1": RankResult("rank1", error="PeerLost: rank0 is gone")}, seconds=1.0)
    metric = make_result().summary[0]
    lost = metric.__class__("x", float("nan"), "a number")
    result = make_result(failures=["rank1: PeerLost: rank0 is gone"], outcome=outcome, summary=[lost])
    about = store.load(Run(config).finish(result))
    assert (about["status"], about["error"]) == ("partial", "rank1: PeerLost: rank0 is gone")
    assert about["ranks"] == {"rank1": {"engine": "", "error": "PeerLost: rank0 is gone", "refused": 0}}
    assert about["metrics"]["x"]["value"] is None


def configuration(folder: Path) -> Any:
    """Return what `config.yaml` says, without what it says to Hydra."""
    values = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    return {key: value for key, value in values.items() if key not in ("defaults", "hydra")}


def test_the_configuration_gives_the_same_configuration_again(tmp_path):
    first = load(as_written(make_config(tmp_path, experiment=transfer.TransferOptions())))
    written = configuration(Run(first).finish(make_result()))
    assert load(written) == first
    assert "rate" not in written["backend"]["intra"]  # infinite, as by default


def test_a_changed_file_or_another_version_is_named(config):
    folder = Run(config).finish(make_result())
    summary = folder / "summary.json"
    text = summary.read_text()
    summary.write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError, match=r"summary\.json is not JSON: .*; it was changed since, so run it again"):
        store.load(folder)
    summary.write_text(text.replace('"schema": 1', '"schema": 99'))
    with pytest.raises(
        ConfigError, match=r"summary\.json has schema 99, and pdsim reads 1; run it again, or read it"
    ):
        store.load(folder)


def test_a_read_only_folder_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output=.*file: .*; name a folder that can be written to"):
        Run(make_config(tmp_path / "file"))
