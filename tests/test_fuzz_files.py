"""Whatever others write, or that was edited: what is raised is the documented error, and of one line a mistake."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from pdsim.core.errors import ConfigError
from pdsim.kv import messages
from pdsim.results import compare, terminal
from pdsim.results.store import FILES
from pdsim.serving.settings import Workload
from pdsim.serving.workload import load
from pdsim.sweep import collect
from tools import fuzz, fuzz_inputs

INPUTS = {"messages": 1000, "wire": 1000, "results": 60}
"""Of a family, here; of the others 150."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return fuzz.Bench(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
@pytest.mark.parametrize("family", fuzz.FAMILIES)
def test_what_is_changed_is_refused_as_documented(bench, family):
    found = {number: fuzz.one(bench, family, 1, number) for number in range(INPUTS.get(family, 150))}
    assert {number: what for number, what in found.items() if what} == {}


def test_every_kind_of_message_is_fuzzed():
    kinds = messages.KvMessage.__subclasses__()
    assert {type(messages.decode(payload)) for payload in fuzz_inputs.payloads()[:-1]} == set(kinds)


def test_a_trace_whose_values_lie_too_deep_is_refused(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"hash_ids": ' + "[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match=r"deep\.jsonl:1: "):
        load(Workload(trace=str(path)), 0, 1000)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return the folder of a right run."""
    return fuzz_inputs.kept_run(tmp_path_factory.mktemp("kept"))


def copied(kept: Path, tmp_path: Path, name: str, content: bytes) -> Path:
    folder = tmp_path / "sweep" / "run"
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        (folder / file).write_bytes(content if file == name else (kept / file).read_bytes())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.json", "summary.json", "config.yaml"])
@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"[" * 100_000, b"{a: &x [*x]}", b"3", b"a: !!python/object:os.x {}"],
)
def test_files_of_results_that_are_none(kept, tmp_path, name, content):
    folder = copied(kept, tmp_path, name, content)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        compare.tables([folder, kept])


@pytest.mark.parametrize("missing", ["links", "pools", "metrics"])
def test_a_summary_that_lacks_a_part_is_refused(kept, tmp_path, missing):
    content = json.loads((kept / "summary.json").read_bytes())
    del content[missing]
    folder = copied(kept, tmp_path, "summary.json", json.dumps(content).encode())
    with pytest.raises(ConfigError, match=rf"summary\.json is not what pdsim writes: .*{missing}"):
        terminal.show(folder, io.StringIO())


@pytest.mark.parametrize("content", [b"", b"PAR1"])
def test_the_table_of_a_sweep_that_is_none(tmp_path, content):
    (tmp_path / "points.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=r"points\.parquet is not a table"):
        collect.show(tmp_path)


@pytest.mark.parametrize("share", ["much", 10**400])
def test_the_use_of_a_link_that_is_no_share_is_refused(kept, tmp_path, share):
    summary = json.loads((kept / "summary.json").read_bytes())
    summary["links"]["node0/gpu0/nvlink.in"] = share
    folder = copied(kept, tmp_path, "summary.json", json.dumps(summary).encode())
    with pytest.raises(ConfigError, match=r"summary\.json"):
        terminal.show(folder, io.StringIO())
