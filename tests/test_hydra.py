"""pdsim from Python: `simulate`, `load`, and Hydra as its users know it."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import pdsim
from pdsim.cli.main import main
from pdsim.core.errors import ConfigError

QUICK = ["experiment=transfer", "+experiment.patterns=[pair]", "+experiment.size=[4KiB]", "+experiment.repeat=2"]

APPLICATION = """\
import hydra
import pdsim

@hydra.main(config_path=".", config_name="study", version_base="1.3")
def study(cfg):
    run = pdsim.simulate(cfg)
    print(cfg.app.title, run.config["hw.name"], run.metrics["requests_ok"])

study()
"""
STUDY = """\
defaults: [config, override hw: 2xh200, _self_]
hydra: {searchpath: ["pkg://conf"]}
workload: {count: 3}
app: {title: mine}
"""


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def composed(*words):
    with initialize_config_module("conf", version_base="1.3"):
        return compose("config", overrides=list(words))


def python(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_plain_hydra_composes_a_configuration_that_runs():
    run = pdsim.simulate(composed("hw=2xh200", "seed=7", *QUICK))
    assert (run.config["hw.name"], run.config["seed"], run.metrics["transfers"]) == ("2xh200", 7, 4)
    assert run.metrics == pdsim.simulate("hw=2xh200", "seed=7", *QUICK).metrics


def test_a_number_set_in_hydra_beats_a_calibration():
    cfg = composed("hw=2xh200", "backend=nixl", "backend.intra.descriptor=9us", *QUICK)
    run = pdsim.simulate(cfg)
    assert run.config["backend.intra.descriptor"] == 9e-6
    assert run.config["backend.intra.rate"] != OmegaConf.select(cfg, "backend.intra.rate")
    assert run.config["backend.sources.intra.descriptor"] == "assumed: set on the command line"


def test_a_configuration_of_hydra_is_refused_in_pdsims_words(pdsim_says):
    cfg = composed("+hw.gpuss=3", *QUICK)
    with pytest.raises(ConfigError, match=r"unknown key hw\.gpuss; did you mean hw\.gpus"):
        pdsim.simulate(cfg)
    with pytest.raises(ConfigError, match=r"simulate takes words, got \['seed=1'\]; write simulate\(\*words\)"):
        pdsim.simulate(["seed=1"])
    with pytest.raises(ConfigError, match="seed=1 beside a composed configuration"):
        pdsim.simulate(cfg, seed=1)
    assert (
        pdsim_says("run", "hydra.run.dir=there", "hww=3")[2].splitlines()[-1].startswith("pdsim: unknown key hww;")
    )


def test_an_application_of_ones_own_runs(tmp_path):
    (tmp_path / "study.py").write_text(APPLICATION)
    (tmp_path / "study.yaml").write_text(STUDY)
    assert python("study.py", "workload.count=2")[1:] == ("mine 2xh200 2\n", "")


@pytest.mark.slow
def test_jobs_go_to_a_launcher_of_hydra(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=there", "seed=1,2", "-m", *QUICK]
    status, out, _ = python("-m", "pdsim", "run", *words)
    assert (status, out.count("#0 :")) == (0, 1)
    runs = [pdsim.load(folder) for job in "01" for folder in Path("there", job).glob("transfer-*")]
    assert [run.config["seed"] for run in runs] == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"there"}


def test_the_folder_of_a_job_of_hydra_has_its_results():
    status, out, err = python("-m", "pdsim", "run", *QUICK, "hydra.run.dir=there")
    assert (status, err) == (0, "")
    assert "results: " in out
    assert {path.name.partition("-")[0] for path in Path("there").iterdir()} == {".hydra", "main.log", "transfer"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--info", "searchpath"], "| main     | pkg://conf"),
        (["--cfg", "hydra"], "dir: outputs/"),
        (["--config-dir", "own", "--config-name", "mine", "--cfg", "job"], "seed: 5"),
    ],
)
def test_options_of_hydra_say_what_they_say_elsewhere(tmp_path, words, said):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("defaults: [config, _self_]\nseed: 5\n")
    status, out, err = python("-m", "pdsim", "run", *words)
    assert (status, err) == (0, "")
    assert said in out


OPTIONS = {"experiment": "transfer", "experiment.patterns": ["pair"], "experiment.size": ("4KiB",)}
OPTIONS |= {"experiment.repeat": 2}


def test_a_run_has_its_metrics_requests_and_configuration():
    run = pdsim.simulate("workload.count=3", hw="8xh200", **{"kv.staging": True})
    assert run.requests.num_rows == run.metrics["requests_ok"] == 3
    assert {"ttft", "tpot", "e2e"} <= set(run.requests.column_names)
    assert run.transfers.num_rows > 0
    assert (run.config["hw.name"], run.config["kv.staging"], run.config["workload.count"]) == ("8xh200", True, 3)
    assert (run.evidence, run.failures) == ("assumed", [])
    assert run.definitions["requests_ok"].startswith("requests that got all their tokens")
    assert "; 3 served in " in str(run)


def test_a_run_equals_the_command_lines_and_loads_again(tmp_path):
    run = pdsim.simulate(**OPTIONS, output="a", **{"kv.checked": None, "backend.options": {"A": "b"}})
    words = ["experiment=transfer", "experiment.patterns=[pair]", "experiment.size=[4KiB]", "experiment.repeat=2"]
    assert (run.config["kv.checked"], run.config["backend.options.A"]) == (None, "b")
    assert main(["run", *words, "output=b", "--quiet"]) == 0
    (folder,) = (tmp_path / "b").iterdir()
    assert pdsim.load(folder).metrics == run.metrics == pdsim.load(str(run.folder)).metrics
    assert pdsim.load(folder).transfers.equals(run.transfers)


def test_what_cannot_be_run_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key hw\.gpuss; did you mean hw\.gpus"):
        pdsim.simulate(**{"hw.gpuss": 3})
    assert list(tmp_path.iterdir()) == []


def test_a_shape_beyond_a_table_is_a_note(recwarn):
    run = pdsim.simulate("hw=2x8xh200", "model=minimax-m2.5", "parallel=tp8", "workload.count=1")
    counts = "moe: (3072, 192, 8, 256) counts as (3072, 256, 8, 256), the nearest measured, times 0.75"
    assert f"warning: h200_sglang_table, {counts}" in run.notes
    assert not recwarn.list
