"""Examples in docstrings show what the code gives."""

import doctest
import importlib

import pytest

MODULES = (
    *("pdsim.costs", "pdsim.guards", "pdsim.hardware", "pdsim.units"),
    *("pdsim.kv.mapping", "pdsim.kv.plan", "pdsim.kv.state", "pdsim.kv.status"),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
