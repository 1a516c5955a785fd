"""What is in `examples/` is installed as anybody would install it, and works without a change to pdsim."""

import json
import shlex

import pytest

from tests.support.documented import documented
from tests.support.packages import EXAMPLES, installed

pytestmark = pytest.mark.timeout(900)
SUITE = ("-n", "0", "-q", "-p", "no:cacheprovider", "--pyargs", "pdsim.testing", "--backend")
BOUNDED = "test_refusals or test_closing or describes_the_transfer or closed_its_endpoint"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return what runs a module of Python where the backend's package is installed, in an empty folder."""
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
def test_a_backend_that_is_not_installed_is_named_with_those_that_are(run):
    done = run("pytest", "--collect-only", "--pyargs", "pdsim.testing", "--backend", "fax")
    assert done.returncode
    assert "--backend=fax is not installed; there are model, example, mooncake_tcp" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_transport_of_a_hundred_lines_passes_the_core(tmp_path_factory):
    """`examples/tiny_transport`: an endpoint that inherits nothing."""
    assert len((EXAMPLES / "tiny_transport" / "tiny_transport.py").read_text().splitlines()) <= 100
    run = installed("tiny_transport", tmp_path_factory)
    done = run("pytest", *SUITE, "tiny", "-m", "core")
    assert not done.returncode, done.stdout
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
