"""The comparison of fixed runs sees every change of a result, and none that is not one."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from benchmarks.fixed_runs import REAL, ROOT, RUNS, SETTINGS, differences, marks
from pdsim.config import defaults

ROWS = {"label": ["a", "b", "c"], "nbytes": [1, 2, 3], "seen": [0.1, None, 0.3]}


def kept(folder, only=None, definition="of them", **columns):
    """Write results to *folder*, and return their fingerprints."""
    pq.write_table(pa.table(ROWS | columns), folder / "transfers.parquet", row_group_size=2)
    summary = {
        "metrics": {"bytes": {"value": 2.5, "definition": definition}},
        "tables": [{"title": definition, "columns": {definition: "", "n": ""}, "rows": [["x", 1], ["y", 2]]}],
        "notes": [definition], "ranks": {}, "links": {}, "pools": {}, "failures": [], "seconds": 1.0,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return marks(folder, only)


def test_a_changed_value_is_a_difference_and_words_are_none(tmp_path):
    old = kept(tmp_path)
    assert differences(old, kept(tmp_path, definition="of those")) == []
    (line,) = differences(old, kept(tmp_path, seen=[0.1, None, 0.30000000000000004]))
    assert line.startswith("transfers.parquet seen: double ")


def test_a_null_and_another_type_are_differences(tmp_path):
    lines = differences(kept(tmp_path), kept(tmp_path, nbytes=[1.0, 2.0, 3.0], seen=[0.1, 0.0, 0.3]))
    assert [line.partition(":")[0] for line in lines] == ["transfers.parquet nbytes", "transfers.parquet seen"]


def test_of_a_real_run_times_and_order_are_free(tmp_path):
    old, other = kept(tmp_path, REAL), {"label": ["c", "a", "b"], "seen": [1.0, 2.0, 3.0]}
    assert differences(old, kept(tmp_path, REAL, nbytes=[3, 1, 2], **other)) == []
    (line,) = differences(old, kept(tmp_path, REAL, nbytes=[3, 1, 1], **other))
    assert line.startswith("transfers.parquet nbytes: int64 ")


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
