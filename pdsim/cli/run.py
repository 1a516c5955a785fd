# SPDX-License-Identifier: Apache-2.0
"""`pdsim run`: compose, type, check, run, keep and print.

Imports Hydra, so the command line imports it only when something is to be run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from pdsim.cli import checks, overrides
from pdsim.cli.compose import compose, composed
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.results import config_file, terminal
from pdsim.results.record import Result
from pdsim.run import execute

__all__ = ["compose", "measure", "only_json", "run"]


def run(words: Sequence[str], *, json: bool = False, quiet: bool = False, verbose: bool = False) -> int:
    """Run what *words*, overrides and options, ask for, and return the exit status: 1 if anything failed, else 0.

    With *json* the only thing on standard output is one JSON object; with *quiet* nothing is; *verbose*, it is
    everything that the run found instead of a dozen lines. ``--cfg job`` among *words* prints the configuration,
    with calibrations applied, and runs nothing.

    Raise a `ConfigError` for what cannot be run, before anything is written, and whatever the experiment raises.
    """
    line = overrides.read(words)
    if wrong := [word for word in line.words if word.partition("=")[0].split(".")[0] == "executor"]:
        raise ConfigError(f"{wrong[0]} is about many points; use pdsim sweep, or leave it out")
    config = composed(line)
    if line.cfg:
        return _show(config)
    with only_json(json) as out:
        result, folder = measure(config, line.words, quiet=quiet or json)
        _print(folder, out, json=json, quiet=quiet, verbose=verbose)
    return 1 if result.failures else 0


def measure(
    config: Config, words: Sequence[str], *, quiet: bool = False, progress: ShowProgress | None = None
) -> tuple[Result, Path]:
    """Run *config*, which *words* were composed to, keep its result, and return it and its folder.

    *quiet* and *progress* are those of `pdsim.run.execute`.
    """
    plain = [word.lstrip("+") for word in words]
    notes = checks.notes(config, overrides.set_keys(plain))
    return execute(config, plain, notes=notes, quiet=quiet, progress=progress)


def _show(config: Config) -> int:
    """Print *config* as the run will use it: typed, calibrated, and complete."""
    from omegaconf import OmegaConf

    sys.stdout.write(OmegaConf.to_yaml(OmegaConf.create(config_file.as_written(config))))
    return 0


@contextmanager
def only_json(json: bool) -> Iterator[TextIO]:
    """Yield standard output.

    With *json*, whatever else writes there, engines included, is sent to standard error.
    """
    if not json:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _print(folder: Path, out: TextIO, *, json: bool, quiet: bool, verbose: bool) -> None:
    """Print the run in *folder* to *out* as was asked: as JSON, not at all, briefly or with everything."""
    if json:
        out.write(terminal.as_json(folder) + "\n")
    elif not quiet:
        with suppress(SystemExit):  # rich's answer to a reader, such as head, that has seen enough
            terminal.show(folder, out, verbose=verbose)
