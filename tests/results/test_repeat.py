"""A run can be repeated from the configuration in its folder."""

import json
import subprocess
import sys


def pdsim(folder, *words):
    command = [sys.executable, "-P", "-m", "pdsim", "run", *words, "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=folder)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_a_run_from_a_kept_configuration_gives_the_same_result(tmp_path):
    options = ("experiment.patterns=incast", "experiment.repeat=3", "experiment.size=[4KiB,1MiB]", "hw=2x8xh100")
    first = pdsim(tmp_path, "experiment=transfer", *options, "backend.timeout=7s", "output=kept")
    again = pdsim(tmp_path, "--config-path", str(tmp_path / first["folder"]), "--config-name", "config")
    assert again["folder"] != first["folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]  # Hydra leaves nothing of its own
    for key in ("folder", "command", "overrides"):
        first[key] = again[key] = None
    assert again == first
