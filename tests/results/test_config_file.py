"""A configuration is written as if it were the first one, whatever was written before it."""

from dataclasses import replace

import pytest

from pdsim.config import as_written, canonical, config_yaml, load
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.sweep.points import name_of

SMOKE = ["workload=smoke"]
WORDS = (SMOKE, ["hw=2xh200", "backend=nixl"], [*SMOKE, "kv.staging=true"], SMOKE)


def test_what_was_written_before_leaves_no_trace(monkeypatch):
    configs = [compose(words) for words in WORDS]
    together = [(config_yaml(config), canonical(config), name_of(config)) for config in configs]
    assert together[0] == together[3] != together[2]
    equal = replace(configs[0], cache=replace(configs[0].cache, host=0), seed=0)
    assert config_yaml(equal) != together[0][0]  # 0 and 0.0 are equal, and written as they are
    for config, texts in zip(configs, together, strict=True):
        monkeypatch.setattr("pdsim.config._written", {})
        assert (config_yaml(config), canonical(config), name_of(config)) == texts


def test_a_value_of_another_type_is_typed_anew():
    values = as_written(compose(WORDS[0]))
    load(values)  # has kv.staging=False, which equals 0
    with pytest.raises(ConfigError, match=r"kv\.staging must be true or false, got 0"):
        load({**values, "kv": {**values["kv"], "staging": 0}})
