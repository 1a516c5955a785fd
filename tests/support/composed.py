"""The configuration that overrides compose, without the checks of the command line."""

from functools import cache

from pdsim.config import Config, load
from pdsim.config.compose import CommandLine, initialized, plain


@cache
def composed(*words: str) -> Config:
    with initialized(line := CommandLine()):
        return load(plain(line, words))
