"""`pdsim.simulate` and `pdsim.load`: the command line from Python, results as Arrow tables."""

import pytest

import pdsim
from pdsim.cli.main import main
from pdsim.core.errors import ConfigError

QUICK = {"experiment": "transfer", "experiment.patterns": ["pair"], "experiment.size": ("4KiB",)}
QUICK |= {"experiment.repeat": 2}


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_a_run_has_its_metrics_requests_and_configuration():
    run = pdsim.simulate("workload.count=3", hw="8xh200", **{"kv.staging": True})
    assert run.requests.num_rows == run.metrics["requests_ok"] == 3
    assert {"ttft", "tpot", "e2e"} <= set(run.requests.column_names)
    assert run.transfers.num_rows > 0
    assert (run.config["hw.name"], run.config["kv.staging"], run.config["workload.count"]) == ("8xh200", True, 3)
    assert (run.evidence, run.failures) == ("assumed", [])
    assert run.definitions["requests_ok"].startswith("requests that got all their tokens")
    assert "; 3 served in " in str(run)


def test_it_is_the_run_of_the_command_line_and_can_be_loaded_again(tmp_path):
    run = pdsim.simulate(**QUICK, output="a", **{"kv.checked": None, "backend.options": {"A": "b"}})
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
