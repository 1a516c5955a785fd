"""What is in `examples/` is installed as anybody would install it, and works without a change to pdsim."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documented import documented

EXAMPLES = Path(__file__).parents[1] / "examples"
BACKEND = EXAMPLES / "third_party_backend"
pytestmark = pytest.mark.timeout(900)
BOUNDED = "test_refusals or test_closing or describes_the_transfer or closed_its_endpoint"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory):
    """Return what runs a module of Python where the backend's package is installed, in an empty folder."""
    target, folder = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("elsewhere")
    offline = ("--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check")
    pip = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(target), str(BACKEND)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(target)}
        command = [sys.executable, "-P", "-m", *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=folder
        )

    works = run("pdsim", "doctor").stdout
    if "example          works" not in works:
        pytest.skip(f"cross-memory attach does not work here: {works}")
    return run


def test_its_backend_is_listed_with_the_package_it_comes_from(installed):
    said = installed("pdsim", "list").stdout
    assert "  example          Copies by the kernel between processes of one machine" in said
    assert "example (from pdsim-example)" in said


@pytest.mark.parametrize("target", ["real", "model"])
def test_its_backend_runs_by_its_own_configuration(installed, target):
    words = ("hw=loopback", "backend=example", "experiment=transfer", "experiment.size=4KiB", "experiment.repeat=1")
    done = installed("pdsim", "run", f"target={target}", *words, "--json")
    assert not done.returncode, done.stderr
    run = json.loads(done.stdout)
    assert (run["status"], run["backend"], run["target"]) == ("ok", "example", target)


RUN_ELSEWHERE = ("pip install -e '.[dev]' examples/third_party_backend", "pdsim doctor")
"""Commands of its README that `installed` runs, without a network."""


@pytest.mark.slow
def test_the_commands_of_its_readme_run(installed):
    *others, run, suite = documented(BACKEND / "README.md")
    assert tuple(others) == RUN_ELSEWHERE
    assert suite == "pytest -n 0 --pyargs pdsim.testing --backend example"  # below, what is quick of it
    done = installed(*shlex.split(run), "workload.count=2", "--json")
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout)["metrics"]["requests_ok"]["value"] == 2


def test_an_option_that_it_does_not_declare_is_refused(installed):
    done = installed("pdsim", "run", "target=real", "hw=loopback", "backend=example", "backend.options.bach=2")
    assert (done.returncode, "did you mean batch" in done.stderr) == (2, True)


@pytest.mark.slow
def test_the_conformance_suite_passes_for_it(installed):
    words = ("-n", "0", "-q", "-p", "no:cacheprovider", "--pyargs", "pdsim.testing", "--backend", "example")
    done = installed("pytest", *words, "-k", BOUNDED)
    assert not done.returncode, done.stdout
    assert " skipped" not in done.stdout
    assert " passed" in done.stdout


@pytest.mark.slow
def test_a_backend_that_is_not_installed_is_named_with_those_that_are(installed):
    done = installed("pytest", "--collect-only", "--pyargs", "pdsim.testing", "--backend", "fax")
    assert done.returncode
    assert "--backend=fax is not installed; there are model, example, mooncake_tcp" in done.stdout + done.stderr
