"""A run can be repeated from the configuration in its folder."""

import json


def test_a_run_from_a_kept_configuration_gives_the_same_result(tmp_path, pdsim_says, monkeypatch):
    def run(*words):
        status, out, err = pdsim_says("run", *words, "--json")
        assert status == 0, err
        return json.loads(out)

    monkeypatch.chdir(tmp_path)
    options = ("experiment.patterns=incast", "experiment.repeat=3", "experiment.size=[4KiB,1MiB]", "hw=2x8xh100")
    first = run("experiment=transfer", *options, "backend.timeout=7s", "output=kept")
    again = run("--config-path", str(tmp_path / first["folder"]), "--config-name", "config")
    assert again["folder"] != first["folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]  # Hydra leaves nothing of its own
    for key in ("folder", "command", "overrides"):
        first[key] = again[key] = None
    assert again == first
