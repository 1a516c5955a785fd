# SPDX-License-Identifier: Apache-2.0
"""The points of a sweep: which there are, in which order, and the name of each, a hash of what it runs.

Knows no grammar of overrides; `pdsim.cli.sweep` reads one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from pdsim.config import Config, canonical
from pdsim.core.errors import ConfigError
from pdsim.version import __version__


@dataclass(frozen=True)
class Axis:
    """Keys whose values change together: *values* has one tuple for each step, with a value for each of *keys*."""

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration of a sweep.  It is sent to other processes, so it holds plain data only."""

    name: str
    words: tuple[str, ...]  # overrides, complete, as on the command line
    choice: Mapping[str, str] = field(default_factory=dict)  # keys of the sweep's axes with this point's values
    config: Config | None = None
    refusal: str = ""  # why it cannot be run, if it has no config

    def row(self, status: str, error: str, **more: Any) -> dict[str, Any]:
        """Return the row of the sweep's table for the point, which ended with *status*."""
        config, overrides = self.config, dict(word.lstrip("+").partition("=")[::2] for word in self.words)
        about: dict[str, Any] = {"point": self.name, "overrides": overrides | dict(self.choice)}
        about |= {"status": status, "error": error, "metrics": {}, "definitions": {}} | more
        if config is not None:
            gpus = config.parallel.prefill.gpus + config.parallel.decode.gpus if config.hw.gpus else None
            about |= {"experiment": config.experiment.name, "hw": config.hw.name, "gpus": gpus}
            about |= {"backend": config.backend.name, "target": config.target, "seed": config.seed}
        return about

    def within(self, folder: str) -> Point:
        """Return the point with its results below *folder*."""
        return self if self.config is None else replace(self, config=replace(self.config, output=folder))


def axes(swept: Mapping[str, Sequence[str]], zipped: Sequence[Sequence[str]]) -> list[Axis]:
    """Return the axes of keys that are *swept*, in their order; those of each group of *zipped* are one axis.

    Raise a `ConfigError` if zipped keys are not swept, are zipped twice, or have unequal numbers of values.

    >>> [axis.keys for axis in axes({"a": ["1", "2"], "b": ["3"], "c": ["4", "5"]}, [["a", "c"]])]
    [('a', 'c'), ('b',)]
    """
    groups: dict[str, tuple[str, ...]] = {}
    for keys in zipped:
        for key in keys:
            if key not in swept:
                raise ConfigError(f"--zip {','.join(keys)}: {key} has no list of values; write {key}=A,B")
            if key in groups:
                raise ConfigError(f"--zip {','.join(keys)}: {key} is zipped twice; name it once")
            groups[key] = tuple(keys)
        lengths = [len(swept[key]) for key in keys]
        if len(set(lengths)) > 1:
            counts = ", ".join(f"{key} has {length}" for key, length in zip(keys, lengths, strict=True))
            raise ConfigError(f"--zip {','.join(keys)}: zipped keys need as many values each, but {counts}")
    zips = dict.fromkeys(groups.get(key, (key,)) for key in swept)
    return [Axis(keys, tuple(zip(*(swept[key] for key in keys), strict=True))) for keys in zips]


def combinations(of: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Yield every combination of the steps of the axes, the last axis changing fastest."""
    for steps in product(*(axis.values for axis in of)):
        yield {
            key: value
            for axis, step in zip(of, steps, strict=True)
            for key, value in zip(axis.keys, step, strict=True)
        }


def name_of(config: Config) -> str:
    """Return the name of the point that runs *config*: 12 hexadecimal digits of a hash of all its keys."""
    text = f"[{json.dumps(__version__)}, {canonical(config, 'output')}]"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
