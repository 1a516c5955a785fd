"""NIXL's own settings are options of the backend: what they may be, and what a wrong one says."""

import pytest

from backends.engines import nixl
from pdsim.core.errors import ConfigError


@pytest.mark.parametrize(("value", "on"), [("true", True), ("false", False)])
def test_the_progress_thread_is_on_or_off(value, on):
    assert nixl._on_off(value, "progress_thread") is on


def test_anything_else_is_refused():
    with pytest.raises(ConfigError, match=r"backend\.options.progress_thread must be true or false, got 'yes'"):
        nixl._on_off("yes", "progress_thread")


@pytest.mark.parametrize("value", ["-1", "four", "1.5"])
def test_threads_are_counted(value):
    with pytest.raises(ConfigError, match=r"backend\.options.num_threads must be a whole number, 0 for none"):
        nixl._count(value, "num_threads")
