# SPDX-License-Identifier: Apache-2.0
"""Options with a value, among the words of a command line that also has Hydra's overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdsim.core.errors import ConfigError, near

__all__ = ["Option", "parse"]

Option = tuple[str, Callable[[str], Any]]
"""The field that an option sets, and what makes the field's value of its text or raises a `ValueError`."""


def parse(
    command: str, words: Sequence[str], options: Mapping[str, Option]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Split *words* into overrides, in their order, and the values of *options* by the fields that they set.

    An option is written ``--name VALUE`` or ``--name=VALUE``; the last one of a name counts.  Every other word that
    does not begin with a hyphen is an override, which is not looked at here.

    Raises:
        ConfigError: an unknown option, with the nearest known one; an option without its value; a value that its
            parser refuses, with the parser's message.  *command* names the help page to read.

    >>> parse("calibrate", ["hw=loopback", "--jobs", "2"], {"--jobs": ("jobs", int)})
    (('hw=loopback',), {'jobs': 2})
    """
    found: dict[str, Any] = {}
    overrides: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name not in options:
            if word.startswith("-"):
                raise ConfigError(f"unknown option {name}; {near(name, options)}see pdsim {command} --help")
            overrides.append(word)
            continue
        if not equals and (value := next(left, "")) == "":
            raise ConfigError(f"{name} needs a value after it; see pdsim {command} --help")
        key, made = options[name]
        try:
            found[key] = made(value)
        except ValueError as error:
            raise ConfigError(f"{name} {value}: {error}") from error
    return tuple(overrides), found
