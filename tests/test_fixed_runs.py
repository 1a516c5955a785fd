"""The comparison of fixed runs sees every change of a result, and none that is not one."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from benchmarks.fingerprints import load
from benchmarks.fixed_runs import ROOT, RUNS, SETTINGS, differences, reduced
from pdsim.config import defaults

MODEL, REAL = "transfer-rdma", "real-transfer-nixl"
ROWS = {"label": ["a", "b", "c"], "nbytes": [1, 2, 3], "seen": [0.1, None, 0.3]}


def kept(folder, name=MODEL, /, metric=2.5, definition="of them", **columns):
    """Write results to *folder*, and return its parts, fingerprints and words."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns or ROWS), folder / "transfers.parquet", row_group_size=2)
    summary = {
        "metrics": {"bytes": {"value": metric, "definition": definition}},
        "tables": [{"title": definition, "columns": {definition: "", "n": ""}, "rows": [["x", 1], ["y", 2]]}],
        "notes": [definition], "ranks": {}, "links": {}, "pools": {}, "failures": [], "seconds": 1.0,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    parts, words = load(folder)
    return parts, {key: reduced(name, key, part) for key, part in parts.items()}, words


def test_a_changed_value_is_found_with_its_row(tmp_path):
    _, old, _ = kept(tmp_path / "a")
    parts, _, _ = kept(tmp_path / "b", **(ROWS | {"seen": [0.1, None, 0.30000000000000004]}))
    (line,) = differences(MODEL, old, parts, None)
    assert line.startswith("transfers.parquet: column seen: differs; the first row that differs is 2")


def test_a_null_and_another_type_are_differences(tmp_path):
    _, old, _ = kept(tmp_path / "a")
    parts, _, _ = kept(tmp_path / "b", **(ROWS | {"nbytes": [1.0, 2.0, 3.0], "seen": [0.1, 0.0, 0.3]}))
    lines = differences(MODEL, old, parts, None)
    assert "transfers.parquet: column nbytes: type int64 before, double now" in lines
    assert any("column seen: differs" in line and "row that differs is 0" in line for line in lines)


def test_of_a_real_run_times_and_order_are_free(tmp_path):
    _, old, _ = kept(tmp_path / "a", REAL)
    parts, _, _ = kept(tmp_path / "b", REAL, label=["c", "a", "b"], nbytes=[3, 1, 2], seen=[1.0, 2.0, 3.0])
    assert differences(REAL, old, parts, None) == []
    parts, _, _ = kept(tmp_path / "b", REAL, label=["c", "a", "b"], nbytes=[3, 1, 1], seen=[1.0, 2.0, 3.0])
    assert differences(REAL, old, parts, None) == ["transfers.parquet: column nbytes: values differ"]


GROUPS = (
    "backend", "cache", "calibration", "collective", "compute", "engine", "experiment", "hw", "model", "parallel",
    "workload",
)  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_fixed_run_names_a_choice_of_every_group(name):
    chosen = dict(word.split("=", 1) for word in RUNS[name].overrides.split())
    assert [group for group in GROUPS if group not in chosen] == []
    assert chosen["engine"].startswith("fixed_")
    assert chosen["compute"].startswith("fixed_")


def test_fixed_settings_have_every_key_of_their_parts():
    fixed = OmegaConf.to_container(OmegaConf.load(ROOT / SETTINGS / "engine" / "fixed_generic.yaml"))
    fixed["compute"] = OmegaConf.to_container(OmegaConf.load(ROOT / SETTINGS / "compute" / "fixed_roofline.yaml"))
    known = defaults()
    assert leaves(fixed) == leaves({part: known[part] for part in fixed})


def leaves(values, prefix=""):
    """Return the dotted keys of the mapping *values*, without what says where its numbers come from."""
    if not isinstance(values, dict) or not values:
        return {prefix}
    below = (leaves(value, f"{prefix}.{key}") for key, value in values.items() if key not in ("source", "sources"))
    return set().union(*below)
