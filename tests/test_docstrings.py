"""Examples in docstrings show what the code gives."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT) for top in ("pdsim", "backends", "experiments") for path in (ROOT / top).rglob("*.py")
]
MODULES = [".".join(path.with_suffix("").parts) for path in FILES if ">>> " in (ROOT / path).read_text("utf-8")]


@pytest.mark.parametrize("name", sorted(name.removesuffix(".__init__") for name in MODULES))
def test_examples_give_what_they_show(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
