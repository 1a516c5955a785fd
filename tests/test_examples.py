"""What is in `examples/` is installed as anybody would install it, and works without a change to pdsim."""

import json
import shlex
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.documented import documented
from tests.support.packages import EXAMPLES, installed

pytestmark = pytest.mark.timeout(900)
SUITE = ("-n", "0", "-q", "-p", "no:cacheprovider", "--pyargs", "pdsim.testing", "--backend")
BOUNDED = "test_refusals or test_closing or describes_the_transfer or closed_its_endpoint"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = installed("third_party_backend", tmp_path_factory)
    works = run("pdsim", "doctor").stdout
    if "example          works" not in works:
        pytest.skip(f"cross-memory attach does not work here: {works}")
    return run


def test_its_backend_is_listed_with_the_package_it_comes_from(run):
    said = run("pdsim", "list").stdout
    assert "  example          Copies by the kernel between processes of one machine" in said
    assert "example (from pdsim-example)" in said


@pytest.mark.slow
@pytest.mark.parametrize("target", ["real", "model"])
def test_its_backend_runs_by_its_own_configuration(run, target):
    words = ("hw=loopback", "backend=example", "experiment=transfer", "experiment.size=4KiB", "experiment.repeat=1")
    done = run("pdsim", "run", f"target={target}", *words, "--json")
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], found["backend"], found["target"]) == ("ok", "example", target)


RUN_ELSEWHERE = ("pip install -e '.[dev]' examples/third_party_backend", "pdsim doctor")
"""Commands of its README that `run` runs, without a network."""


@pytest.mark.slow
def test_the_commands_of_its_readme_run(run):
    *others, command, suite = documented(EXAMPLES / "third_party_backend" / "README.md")
    assert tuple(others) == RUN_ELSEWHERE
    assert suite == "pytest -n 0 --pyargs pdsim.testing --backend example"  # below, what is quick of it
    done = run(*shlex.split(command), "workload.count=2", "--json")
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout)["metrics"]["requests_ok"]["value"] == 2


def test_an_option_that_it_does_not_declare_is_refused(run):
    done = run("pdsim", "run", "target=real", "hw=loopback", "backend=example", "backend.options.bach=2")
    assert (done.returncode, "did you mean batch" in done.stderr) == (2, True)


@pytest.mark.slow
def test_the_conformance_suite_passes_for_it(run):
    done = run("pytest", *SUITE, "example", "-k", BOUNDED)
    assert not done.returncode, done.stdout
    assert " skipped" not in done.stdout
    assert " passed" in done.stdout


@pytest.mark.slow
def test_a_missing_backend_is_named_with_those_installed(run):
    done = run("pytest", "--collect-only", "--pyargs", "pdsim.testing", "--backend", "fax")
    assert done.returncode
    assert "--backend=fax is not installed; there are model, example, mooncake_tcp" in done.stdout + done.stderr


NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "notebook" / "pdsim.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_cell_runs_shows_something_and_is_kept_without(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(list((tmp_path / "results").iterdir())) == 1 + 2 * 3  # the run and the sweep
    assert all(cell.outputs for cell in code)
    kinds = [output.data.keys() for cell in code for output in cell.outputs if "data" in output]
    assert sum("text/html" in kind for kind in kinds) == 2
    assert sum("image/png" in kind for kind in kinds) == 2


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    run = installed("policies", tmp_path_factory)

    def said(*words: str) -> dict:
        done = run("pdsim", "run", *words, "--json")
        assert not done.returncode, done.stderr
        return json.loads(done.stdout)

    return said


def value(found: dict, metric: str) -> float:
    return found["metrics"][metric]["value"]


def test_experiments_and_machines_are_a_module_and_files(said):
    words = ("experiment=one_write", "backend=nvlink", "calibration=none")
    slow, fast = (said(*words, f"hw={hw}") for hw in ("desk", "2xh200"))
    assert value(slow, "write_s") - value(fast, "write_s") == pytest.approx((1 << 20) / 394e9, rel=1e-9)


@pytest.mark.slow
def test_the_experiment_runs_on_a_real_engine_too(said):
    found = said("target=real", "hw=loopback", "backend=nixl_tcp", "experiment=one_write", "experiment.size=4KiB")
    assert (found["status"], found["target"]) == ("ok", "real")
    assert value(found, "write_s") > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("command", documented(EXAMPLES / "policies" / "README.md"))
def test_the_commands_of_the_policies_run(said, command):
    """A scheduler is one class and one file, a policy one class, an experiment a module and a machine a file."""
    first, second, *words = shlex.split(command)
    if (first, second) == ("pip", "install"):
        assert words == ["examples/policies"]  # as the fixture does, without a network
        return
    assert (first, second) == ("pdsim", "run")
    found = said(*words)
    assert found["status"] == "ok"
    assert "workload=smoke" not in words or value(found, "requests_ok") == 12


def test_a_router_policy_is_one_class(said, tmp_path):
    two = ("parallel.prefill.tp=2", "parallel.prefill.instances=2", "parallel.decode.tp=2", "workload=smoke")
    folder = said("experiment.router=pinned", *two, f"output={tmp_path}")["folder"]
    import pyarrow.parquet as parquet

    assert set(parquet.read_table(f"{folder}/requests.parquet")["prefill"].to_pylist()) == {"prefill0"}
