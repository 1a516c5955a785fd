# SPDX-License-Identifier: Apache-2.0
"""From what was typed to a typed configuration that can be run: composed once through Hydra, typed, checked.

Imports Hydra, so that the command line imports it only when something is composed.

The steps, each of which can be called by itself: `initialized` tells Hydra where files are, `raw`
composes, `plain` resolves interpolations, `load` makes the `Config` and lets all guards look at it.
A sweep composes many points within one `initialized`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from pdsim.cli import checks, overrides, plausible
from pdsim.cli.overrides import CommandLine
from pdsim.config import Config, loading
from pdsim.core.errors import ConfigError

__all__ = ["compose", "composed", "initialized", "load"]


def compose(words: Sequence[str]) -> Config:
    """Return the typed configuration that *words*, overrides only, ask for.

    It is checked, so it can be run.  Raise a `ConfigError` for an option, an unknown key or choice,
    a value of the wrong type, and whatever `pdsim.cli.checks` and `pdsim.cli.plausible` find.
    """
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"{flags[0]} is no KEY=VALUE and no option of this command; see pdsim --help")
    return composed(CommandLine(words=tuple(words)))


def composed(line: CommandLine) -> Config:
    """Return the typed configuration that *line* asks for.  Raise a `ConfigError`."""
    with initialized(line):
        return load(plain(line, line.words), line.words)


@contextmanager
def initialized(line: CommandLine) -> Iterator[None]:
    """Have Hydra know where the configuration of *line* is, for as many compositions as are made within."""
    ConfigStore.instance().store(name="_defaults", node=loading.defaults())
    if line.path:
        with hydra.initialize_config_dir(str(Path(line.path).resolve()), version_base="1.3"):
            yield
    else:
        with hydra.initialize_config_module("conf", version_base="1.3"):
            yield


def plain(line: CommandLine, words: Sequence[str]) -> dict[str, Any]:
    """Return the composition of *words*, overrides as typed, as plain data, interpolations resolved."""
    return resolved(raw(line, words))


def raw(line: CommandLine, words: Sequence[str]) -> DictConfig:
    """Return the composition of *words* as Hydra made it, within `initialized`."""
    found = overrides.ready(words, line.folders)
    places = [f"file://{folder.resolve()}" for folder in line.folders]
    places += [f"pkg://{package}" for package in overrides.folders() if package != "conf"]
    if places:
        quoted = ",".join("'{}'".format(place.replace("\\", "\\\\").replace("'", "\\'")) for place in places)
        found.insert(0, f"hydra.searchpath=[{quoted}]")
    return hydra.compose(line.name, found)


def resolved(values: DictConfig) -> dict[str, Any]:
    """Return *values* as plain data, interpolations resolved."""
    container = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    assert isinstance(container, Mapping)
    return {str(key): value for key, value in container.items()}


def load(values: dict[str, Any], words: Sequence[str]) -> Config:
    """Return *values*, which *words* were composed to, typed and checked.

    Which keys were typed matters: a calibration may not replace those, and units are asked for
    there.  Raise a `ConfigError` with a line for each mistake.
    """
    overrides.check_calibration(words, values)
    plain_words = [word.lstrip("+") for word in words]
    config = loading.load(values, overrides.set_keys(plain_words))
    plausible.check(config, values, overrides.leaves(overrides.ready(words)))
    checks.check(config)
    return config
