"""Whatever files hold that others write, or that were edited: what is raised is a `ConfigError` of one line.

Each file is one that is right, changed in a few places, or text of no kind; the changes of structured ones are of their
values, so that they pass the first gate and reach what is behind it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdsim.calibration import importers, samples
from pdsim.config import loading
from pdsim.errors import ConfigError
from pdsim.results import compare, terminal
from pdsim.results.store import FILES, Run
from pdsim.serving.settings import Workload
from pdsim.serving.workload import load
from pdsim.sweep import collect
from tests.support.configs import make_config, make_result
from tests.test_config import CONFIG

BOUNDED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
OUTPUTS = sorted((Path(__file__).parent / "calibration" / "outputs").iterdir())

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(10**400), st.floats(), st.text(max_size=5), st.just([]),
    st.just({}), st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
EDITS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 12), st.text("0123456789.-eE|:,{}[]\"'# \nNx\x00é", max_size=4)),
    min_size=1,
    max_size=6,
)


def edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    """Return *text* with some characters replaced, at places counted from its start, again and again."""
    for place, length, new in edits:
        at = place % (len(text) + 1)
        text = text[:at] + new + text[at + length :]
    return text


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where something is in a tree of mappings and lists."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in below for place in places(item, (*at, key)))]


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of *value* with *new* at *place*."""
    if not place:
        return new
    found = copy.deepcopy(value)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = new
    return found


def is_refused_in_one_line(act: Any, *arguments: Any) -> None:
    """Call *act*; what it may raise is a `ConfigError` of one line a mistake, none of them empty."""
    try:
        act(*arguments)
    except ConfigError as error:
        if not all(line.strip() for line in str(error).split("\n")):
            raise AssertionError(repr(error)) from error


# --- outputs of other tools, samples, traces


@BOUNDED
@given(st.sampled_from(OUTPUTS), EDITS, st.sampled_from(["", *importers.FORMATS]))
def test_outputs_of_tools(tmp_path, output, edits, tool):
    path = tmp_path / "output.txt"
    path.write_text(edited(output.read_text(encoding="utf-8"), edits), encoding="utf-8")
    is_refused_in_one_line(importers.read, path, tool)


@BOUNDED
@given(st.binary(max_size=200), st.sampled_from(["", *importers.FORMATS]))
def test_files_that_are_no_outputs(tmp_path, content, tool):
    path = tmp_path / "output.txt"
    path.write_bytes(content)
    is_refused_in_one_line(importers.read, path, tool)
    is_refused_in_one_line(samples.read, path)


@BOUNDED
@given(EDITS)
def test_samples(tmp_path, edits):
    path = tmp_path / "samples.csv"
    right = (
        "# kind: measured\npattern,blocks,size,seconds,per_job,held\npair,1,4096,1e-5,1e-5 2e-5,0\nincast:2,8,1,3,,1\n"
    )
    path.write_text(edited(right, edits), encoding="utf-8")
    is_refused_in_one_line(samples.read, path)


MOONCAKE = '{"timestamp": 0, "input_length": 90, "output_length": 2, "hash_ids": [1]}\n' * 3
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.99,396,109\n"


@BOUNDED
@given(st.sampled_from([MOONCAKE, AZURE]), EDITS)
def test_traces(tmp_path, right, edits):
    path = tmp_path / "trace"
    path.write_text(edited(right, edits), encoding="utf-8")
    is_refused_in_one_line(load, Workload(trace=str(path)), 0, 1000)


def test_a_trace_whose_values_lie_too_deep_is_refused(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"hash_ids": ' + "[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match=r"deep\.jsonl:1: "):
        load(Workload(trace=str(path)), 0, 1000)


# --- folders of results


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return the folder of a right run."""
    config = make_config(tmp_path_factory.mktemp("kept"))
    return Run(config, overrides=("seed=1",)).finish(make_result())


def reads(folder: Path, other: Path) -> None:
    """Read the run in *folder* in every way there is."""
    with (folder.parent.parent / "out.txt").open("w", encoding="utf-8") as out:
        for act in (
            lambda: terminal.show(folder, out),
            lambda: terminal.as_json(folder),
            lambda: compare.tables([other, folder]),
            lambda: compare.as_dict([folder, other]),
            lambda: [terminal.show_table(one, out) for one in compare.tables([folder, other])],
        ):
            is_refused_in_one_line(act)


def copied(kept: Path, tmp_path: Path, name: str, content: bytes) -> Path:
    folder = tmp_path / "sweep" / "run"
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        (folder / file).write_bytes(content if file == name else (kept / file).read_bytes())
    return folder


@BOUNDED
@given(st.sampled_from(["run.json", "summary.json"]), st.data())
def test_folders_of_results_with_other_values(kept, tmp_path, name, data):
    right = json.loads((kept / name).read_bytes())
    wrong = changed(right, data.draw(st.sampled_from(places(right)), "place"), data.draw(ODD, "value"))
    reads(copied(kept, tmp_path, name, json.dumps(wrong).encode()), kept)


@BOUNDED
@given(st.sampled_from([name for name in FILES if not name.endswith("parquet")]), EDITS)
def test_folders_of_results_with_other_characters(kept, tmp_path, name, edits):
    content = edited((kept / name).read_text(encoding="utf-8"), edits)
    reads(copied(kept, tmp_path, name, content.encode()), kept)


@pytest.mark.parametrize("name", ["run.json", "summary.json", "config.yaml"])
@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"[" * 100_000, b"{a: &x [*x]}", b"3", b"a: !!python/object:os.x {}"],
)
def test_files_of_results_that_are_none(kept, tmp_path, name, content):
    folder = copied(kept, tmp_path, name, content)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        compare.tables([folder, kept])


def test_the_table_of_a_sweep_that_is_none(tmp_path):
    path = tmp_path / "points.parquet"
    for content in (b"", b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"points\.parquet is not a table"):
            collect.show(tmp_path)


# --- calibrations

CALIBRATION = {
    "name": "c",
    "kind": "measured",
    "hw": ["box"],
    "backend": ["engine"],
    "form": "sum",
    "date": "2026-11-21",
    "source": "us",
    "parameters": {"backend.intra.call": "3us", "hw.interconnect.latency": 1e-6},
    "intervals": {"backend.intra.call": ["2us", "4us"]},
    "unidentified": ["backend.intra.wire_descriptor"],
    "held_out": {"points": 9, "how": "at random", "mean": 0.1, "median": 0.1, "p95": 0.2, "bias": 0.0},
    "provenance": {"commit": "abc"},
}


def test_the_calibration_that_is_changed_below_is_right():
    assert loading.load({**CONFIG, "calibration": CALIBRATION}).backend.intra.call == 3e-6


@BOUNDED
@given(st.sampled_from(places(CALIBRATION)), ODD)
def test_calibrations_with_other_values(place, new):
    is_refused_in_one_line(loading.load, {**CONFIG, "calibration": changed(CALIBRATION, place, new)})


@BOUNDED
@given(st.text(max_size=20), ODD)
def test_calibrations_of_other_parameters(key, new):
    for name in (key, f"hw.{key}", f"backend.intra.{key}"):
        calibration = {**CALIBRATION, "parameters": {name: new}}
        is_refused_in_one_line(loading.load, {**CONFIG, "calibration": calibration})


# --- configurations


@BOUNDED
@given(st.sampled_from(places(CONFIG)), ODD)
def test_configurations_with_other_values(place, new):
    if place:
        is_refused_in_one_line(loading.load, changed(CONFIG, place, new))
