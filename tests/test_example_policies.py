"""A scheduler, a router policy, an experiment and a machine of another package work without a change to pdsim."""

import json
import shlex

import pytest

from tests.support.documented import documented
from tests.support.packages import EXAMPLES, installed


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return what runs a command of pdsim where the package is installed, and returns its JSON."""
    run = installed("policies", tmp_path_factory)

    def said(*words: str) -> dict:
        done = run("pdsim", "run", *words, "--json")
        assert not done.returncode, done.stderr
        return json.loads(done.stdout)

    return said


def value(found: dict, metric: str) -> float:
    return found["metrics"][metric]["value"]


def test_an_experiment_and_a_machine_are_a_module_and_two_files(said):
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
def test_the_commands_of_its_readme_run(said, command):
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
