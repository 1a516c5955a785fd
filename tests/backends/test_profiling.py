"""`pdsim profile` on the processor: it measures, fits, and writes a file that a simulation uses, as measured."""

import json

import pytest

from pdsim.cli import profile
from pdsim.cli.main import main
from pdsim.core import files

pytestmark = pytest.mark.slow
pytest.importorskip("torch", reason="measuring a forward needs PyTorch")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder with both files of a profile of two small models."""
    folder = tmp_path_factory.mktemp("profile")
    words = ["hw=loopback", "--models", "tiny:1,tiny-mla:1", "--device", "cpu", "--name", "mine", "--limit", "100s"]
    assert profile.profile([*words, "--to", str(folder / "compute"), f"output={folder / 'results'}"]) == 0
    return folder


def test_every_operator_of_the_models_has_rows(measured):
    about, rows = files.table(measured / "compute" / "mine.csv", "")
    assert about["kind"] == "measured"
    wanted = {"gemm", "prefill", "decode", "norm", "activation", "rotary", "mla_prefill", "mla_decode", "mla_absorb"}
    assert wanted | {"launch", "step", "forward"} == {row["operator"] for row in rows}
    assert all(float(row["low"]) <= float(row["seconds"]) <= float(row["high"]) for row in rows)


def test_a_simulation_computes_with_what_was_measured(measured):
    words = ["run", "--config-dir", str(measured), "hw=loopback", "compute=mine", "workload.count=4", "-q"]
    assert main([*words, f"output={measured / 'runs'}"]) == 0
    (run,) = (folder for folder in (measured / "runs").iterdir() if (folder / "run.json").exists())
    evidence = json.loads((run / "run.json").read_text())["evidence"]["sources"]["compute"]
    assert evidence.startswith("measured: 1 x processor")
