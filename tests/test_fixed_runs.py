"""Fixed runs name every choice, so that neither a better default nor a new calibration changes one."""

import pytest
from omegaconf import OmegaConf

from benchmarks.fixed_runs import ROOT, RUNS, SETTINGS
from pdsim.config import defaults

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
