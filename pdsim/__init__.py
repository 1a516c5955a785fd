# SPDX-License-Identifier: Apache-2.0
"""Simulate, run and compare KV-cache transfer for prefill/decode disaggregated LLM serving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pdsim.version import __version__

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from pdsim.results.kept import KeptRun

__all__ = ["__version__", "load", "simulate"]


def simulate(*words: str | DictConfig, **choices: object) -> KeptRun:
    """Run one configuration, as ``pdsim run`` does, keep its results, and return them.

    *words* are overrides as on the command line, ``"workload.rate=2"``; *choices* are the same with values of
    Python: ``simulate(hw="8xh200", seed=1)`` or, for keys with dots, ``simulate(**{"workload.rate": 2, "kv.staging":
    True})``. A key set twice has its last value, *choices* after *words*.  The results are kept in the folder
    ``output``.

    Instead of *words* and *choices* it takes a configuration that Hydra composed, of ``pkg://conf`` or of an
    application with pdsim's groups in its defaults list: ``simulate(cfg)``.  Keys of the application itself go below
    ``app``.

    Raise a `ConfigError` for what cannot be run, in the words of the command line, and what the experiment
    raises. Requests that failed raise nothing: see ``failures``.
    """
    from pdsim.config import compose
    from pdsim.core.errors import ConfigError
    from pdsim.results.kept import KeptRun
    from pdsim.run import run

    asked = [word for word in words if isinstance(word, str)]
    asked += [f"{key}={_written(value)}" for key, value in choices.items()]
    composed = [word for word in words if not isinstance(word, str)]
    if composed and type(composed[0]).__name__ != "DictConfig":
        raise ConfigError(f"simulate takes words, got {composed[0]!r:.60}; write simulate(*words) or (**choices)")
    if composed and (asked or len(composed) > 1):
        raise ConfigError(f"{(*asked, 'another')[0]} beside a composed configuration; compose that with it")
    _, folder = run(compose.typed(composed[0]) if composed else compose.compose(asked), asked, quiet=True)
    return KeptRun(folder)


def load(folder: str | Path) -> KeptRun:
    """Return the complete run in *folder*.  Raise a `ConfigError` if it is none."""
    from pdsim.results.kept import KeptRun

    return KeptRun(Path(folder))


def _written(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    return str(value)
