"""`pdsim run`: compose, type, check, run, keep and print; one point, or with ``-m`` every point of a sweep.

Imports Hydra, so the command line imports it only when something is to be run.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from json import dumps
from pathlib import Path
from typing import Any, TextIO

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pdsim import checks, configure, overrides
from pdsim.config import Config
from pdsim.errors import ConfigError
from pdsim.results import report
from pdsim.results.record import Result
from pdsim.results.store import Run, refuse
from pdsim.transfer import Target

__all__ = ["Sweep", "run"]


@dataclass
class _State:
    """What Hydra, which returns nothing and calls back with a configuration only, hides from its caller."""

    quiet: bool = False
    folder: Path | None = None  # of the only point
    failed: bool = False
    error: BaseException | None = None
    sweep: Path | None = None


_state = _State()


class Sweep(Callback):
    """Learns where a sweep is kept."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Remember the folder of the sweep that begins."""
        _state.sweep = Path(config.hydra.sweep.dir)


def run(words: Sequence[str], *, json: bool = False, quiet: bool = False) -> int:
    """Run what *words*, overrides and Hydra's own options, ask for, and return the exit status.

    With *json* the only thing on standard output is one JSON object; with *quiet* nothing is.  Raise a `ConfigError`
    for what cannot be run, and whatever the experiment raises.
    """
    global _state
    _state = _State(quiet=quiet or json)
    ConfigStore.instance().store(name="_defaults", node=configure.defaults())
    with _only_json(json) as out:
        try:
            _hydra(overrides.rewrite(words))
        finally:
            _finish_sweep(out, json=json, quiet=quiet)
        if _state.error is not None:
            raise _state.error
        if _state.folder is not None:
            _print(_state.folder, out, json=json, quiet=quiet)
    return 1 if _state.failed else 0


def _hydra(words: Sequence[str]) -> None:
    """Have Hydra compose and run the points that *words* ask for; it reads them from the process's command line."""
    kept = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["pdsim run", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come here instead of being printed
    try:
        _point()
    finally:
        sys.argv = kept[0]
        if kept[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]


@contextmanager
def _only_json(json: bool) -> Iterator[TextIO]:
    """Yield standard output; with *json*, whatever else writes there, engines included, is sent to standard error."""
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


def _print(folder: Path, out: TextIO, *, json: bool, quiet: bool) -> None:
    if json:
        out.write(report.as_json(folder) + "\n")
    elif not quiet:
        report.show(folder, out)


# --- one point ------------------------------------------------------------------------------------------------------


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def _point(composed: DictConfig) -> None:
    """Run one point.  Its error is kept, not raised: Hydra would print it and, in a sweep, stop."""
    asked = OmegaConf.to_container(HydraConfig.get().overrides.task)
    assert isinstance(asked, list)
    words = [str(word).lstrip("+") for word in asked]
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        _point_of_sweep(composed, words, Path(HydraConfig.get().sweep.dir))
        return
    try:
        config = _load(composed, words)
        _state.folder, _state.failed = _execute(config, words)
    except Exception as error:
        _state.error = error


def _point_of_sweep(composed: DictConfig, words: Sequence[str], sweep: Path) -> None:
    """Run one point, perhaps in a process of its own; what goes wrong is a row of the sweep's table."""
    name = ", ".join(words)
    try:
        _, failed = _execute(replace(_load(composed, words), output=str(sweep)), words)
    except ConfigError as error:
        refuse(sweep, error, command=["pdsim", "run", *words], overrides=words)
        _say(f"{name}: refused: {error}")
    except Exception as error:
        _say(f"{name}: {type(error).__name__}: {error}")
    else:
        _say(f"{name}: {'failed in part' if failed else 'ok'}")


def _say(line: str) -> None:
    if not _state.quiet:
        sys.stderr.write(" ".join(line.split()) + "\n")


def _load(composed: DictConfig, words: Sequence[str]) -> Config:
    """Return the typed configuration of a point that can be run.  Raise a `ConfigError` otherwise."""
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(values, Mapping)
    config = configure.load({str(key): value for key, value in values.items()}, overrides.set_keys(words))
    checks.check(config)
    return config


def _execute(config: Config, words: Sequence[str]) -> tuple[Path, bool]:
    """Run the experiment, keep its result, return the folder and whether something failed."""
    experiment = import_module(f"experiments.{config.experiment['name']}")
    measure: Callable[[Config, Target, Callable[[float, str], None]], Result] = experiment.run
    target = _target(config)
    fresh = not Path(config.output).exists()
    kept = Run(config, command=["pdsim", "run", *words], overrides=words)
    try:
        with kept, report.Progress(f"{config.experiment['name']} on {config.hw.name}") as bar:
            result = measure(config, target, _silent if _state.quiet else bar)
            return kept.finish(result), bool(result.failures)
    except ConfigError:  # found by the experiment itself, before it began
        shutil.rmtree(kept.folder)
        if fresh:
            Path(config.output).rmdir()
        raise
    except Exception as error:
        error.add_note(f"what there is of the run is in {kept.folder}")
        raise


def _silent(fraction: float, text: str = "") -> None:
    """Show nothing of *fraction* and *text*."""


def _target(config: Config) -> Target:
    if config.target == "model":
        from pdsim.fabric.world import Model

        return Model(config.hw, config.backend, memory=config.memory, seed=config.seed)
    from backends.launch import Processes

    return Processes(config.backend)


# --- all points -----------------------------------------------------------------------------------------------------


def _finish_sweep(out: TextIO, *, json: bool, quiet: bool) -> None:
    """Write one file and print one table over all points, those that an interrupted sweep reached included."""
    from pdsim.results.collect import collect, table

    sweep = _state.sweep
    if sweep is None or not sweep.is_dir():
        return
    if not any(path.is_dir() for path in sweep.iterdir()):  # Hydra refused the sweep: leave nothing
        (sweep / "multirun.yaml").unlink(missing_ok=True)
        sweep.rmdir()
        return
    path = collect(sweep)
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    _state.failed = any(row["status"] != "ok" for row in rows)
    if json:
        out.write(dumps({"points": str(path), "rows": rows}) + "\n")
    elif not quiet:
        report.show_table(table(path), out)
