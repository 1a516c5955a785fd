"""The configuration that overrides compose, without the checks of the command line."""

from functools import cache
from typing import Any

from pdsim.config import Config, load
from pdsim.config.compose import CommandLine, initialized, plain


@cache
def composed(*words: str) -> Config:
    return load(tree(*words))


@cache
def tree(*words: str) -> dict[str, Any]:
    """Return the values of the configuration before they are typed, the same for all tests: copy to change them."""
    with initialized(line := CommandLine()):
        return plain(line, words)
