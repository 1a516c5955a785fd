"""Folders of another kind, of another version and cut short: one line that says what is there and what to do."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from pdsim.cli.main import main
from pdsim.core.errors import ConfigError
from pdsim.core.files import whole_file
from pdsim.results import schema
from pdsim.results.store import Run
from pdsim.validation.sealed import seal
from pdsim.version import __version__
from tests.support.configs import make_config, make_result

NOW = f"pdsim {__version__}"
STORED = Path(__file__).resolve().parents[2] / "data" / "validation" / "nixl-2xh200"


@pytest.fixture
def validation(tmp_path):
    return Path(shutil.copytree(STORED, tmp_path / "validation"))


def rewritten(file, change):
    content = json.loads(file.read_bytes())
    del content["sha256"]
    change(content)
    file.write_bytes(seal(content))


def stored(folder, tmp_path):
    return (f"experiment.stored={folder}", "hw=2xh200", "backend=nixl", f"output={tmp_path / 'out'}", "--quiet")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda content: [row.update(pieces=1) for row in content["measured"]],
            f"measurements.json has rows with pieces: {NOW} wrote it, this is {NOW}; read it with the version that",
        ),
        (lambda content: content["measured"][0].update(value="fast"), "measurements.json has other rows"),
        (lambda content: content.pop("measured"), "measurements.json has no measured"),
        (lambda content: content.pop("began"), "measurements.json has no began"),
    ],
)
@pytest.mark.parametrize("command", ["report", "validate"])
def test_a_validation_of_another_version_is_named(validation, tmp_path, pdsim_refuses, command, change, said):
    rewritten(validation / "measurements.json", change)
    line = pdsim_refuses(command, *(stored(validation, tmp_path) if command == "validate" else [validation]))
    assert line.startswith(f"pdsim: {validation}/")
    assert said in line


def test_a_validation_of_servers_is_none_of_transfers(validation, tmp_path, pdsim_refuses):
    parts = {"kind": "serving", "requests": {}, "predicted": {"load-1": {"ttft_p50": 0.11}}}
    rewritten(validation / "expectations.json", lambda content: (content.clear(), content.update(parts)))
    runs = {"runs": [{"load-1": [{"status": "ok", "ttft": 0.1}]}], "servers": {"a": "vllm"}}
    rewritten(validation / "measurements.json", lambda content: (content.pop("measured"), content.update(runs)))
    line = pdsim_refuses("validate", *stored(validation, tmp_path))
    assert "has no measured, for it is of servers: use validate target=live" in line
    assert main(["report", str(validation), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "+10.0 %" in page
    assert "load-1" in page


@pytest.mark.parametrize("command", ["show", "compare", "explain", "timeline"])
def test_files_of_a_validation_alone_are_no_run(validation, pdsim_refuses, command):
    assert f"without its run; see pdsim report {validation}" in pdsim_refuses(command, validation)


def test_profile_without_pytorch_writes_nothing(monkeypatch, tmp_path, pdsim_refuses):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "profile needs torch; pip install" in pdsim_refuses("profile", "--to", tmp_path / "new", "hw=8xh100")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_says_what_to_do(monkeypatch, capsys):
    def full(words):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(importlib.import_module("pdsim.cli.main")._DO, "run", full)
    assert main(["run"]) == 1
    assert capsys.readouterr().err == "pdsim: No space left on device; make room, or name a folder elsewhere\n"


def test_a_folder_that_may_not_be_read_is_refused(monkeypatch, pdsim_refuses, tmp_path):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)  # root may read all
    for command in ("show", "explain", "compare", "timeline", "best", "report"):
        said = pdsim_refuses(command, tmp_path)
        assert re.fullmatch(rf"pdsim: {tmp_path}/[a-z.]+: Permission denied; change its permissions, or .*", said)


def test_a_table_that_may_not_be_read_is_named(monkeypatch, tmp_path):
    def denied(path):
        raise PermissionError(13, "Failed to open local file")

    monkeypatch.setattr("pyarrow.parquet.read_metadata", denied)
    with pytest.raises(ConfigError, match=r"points\.parquet: Permission denied; name a folder that can be read"):
        schema.read_points(tmp_path / "points.parquet")


def test_a_file_that_breaks_off_leaves_what_was_there(tmp_path):
    page = tmp_path / "page.html"
    page.write_bytes(b"before")
    with pytest.raises(TypeError), whole_file(page) as file:
        file.writelines([b"half", "of it"])
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("page.html", b"before")]


@pytest.mark.parametrize("command", ["report", "timeline", "explain"])
def test_a_table_under_the_name_of_another_is_pdsim_refuses(tmp_path, pdsim_refuses, command):
    run = Run(make_config(tmp_path), command=("pdsim", "run")).finish(make_result())
    shutil.copy(run / "transfers.parquet", run / "requests.parquet")
    assert pdsim_refuses(command, run) == (
        f"pdsim: {run / 'requests.parquet'} has no column id: it is the table of something else; "
        "it was changed since, so run it again"
    )
