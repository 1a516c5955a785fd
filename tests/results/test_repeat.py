"""A run can be repeated from the configuration in its folder."""

import json
import subprocess
import sys


def pdsim(*words):
    done = subprocess.run([sys.executable, "-m", "pdsim", "run", *words, "--json"], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_a_run_from_a_kept_configuration_gives_the_same_result(tmp_path):
    options = ("experiment.patterns=incast", "experiment.repeat=3", "experiment.size=[4KiB,1MiB]", "hw=2x8xh100")
    first = pdsim("experiment=transfer", *options, "backend.timeout=7s", f"output={tmp_path}")
    again = pdsim("--config-path", first["folder"], "--config-name", "config")
    assert again["folder"] != first["folder"]
    assert {**again, "folder": "", "command": "", "overrides": ""} == {
        **first,
        "folder": "",
        "command": "",
        "overrides": "",
    }
