"""`pdsim run`: compose, type, check, run, keep and print; one point, or with ``-m`` every point of a sweep.

Imports Hydra, so the command line imports it only when something is to be run.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pdsim import plugins
from pdsim.cli import checks, overrides, plausible, typed
from pdsim.config import Config
from pdsim.errors import ConfigError
from pdsim.results import terminal
from pdsim.results.evidence import extrapolations, host_spread
from pdsim.results.record import Result
from pdsim.results.store import Run, refuse
from pdsim.units import format_time

__all__ = ["Sweep", "compose", "execute", "run"]


_OWN_FILES = ("validate",)
"""The experiments that keep files of their own beside those of every run."""

_QUIET = "PDSIM_QUIET"
"""An environment variable, because the points of a sweep may run in processes of a launcher's making."""


@dataclass
class _State:
    """What Hydra, which returns nothing and calls back with a configuration only, hides from its caller."""

    quiet: bool = False
    folder: Path | None = None  # of the only point
    failed: bool = False
    error: BaseException | None = None
    sweep: Path | None = None
    fresh: bool = False  # whether the sweep's parent was made for it


_state = _State()


class ConfOfPackages(SearchPathPlugin):
    """Has Hydra look for configuration groups in the packages that register some."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add them after pdsim's own."""
        for package in overrides.folders():
            if package != "conf":
                search_path.append("pdsim", f"pkg://{package}")


Plugins.instance().register(ConfOfPackages)


class Sweep(Callback):
    """Learns where a sweep is kept."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Remember the folder of the sweep that begins."""
        _state.sweep = Path(config.hydra.sweep.dir)
        _state.fresh = not _state.sweep.parent.exists()


def run(words: Sequence[str], *, json: bool = False, quiet: bool = False) -> int:
    """Run what *words*, overrides and Hydra's own options, ask for, and return the exit status.

    With *json* the only thing on standard output is one JSON object; with *quiet* nothing is.  Raise a `ConfigError`
    for what cannot be run, and whatever the experiment raises.
    """
    global _state
    _state = _State(quiet=quiet or json)
    ConfigStore.instance().store(name="_defaults", node=typed.defaults())
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


def compose(words: Sequence[str]) -> Config:
    """Return the typed configuration of one point that *words*, overrides only, ask for.  Raise a `ConfigError`."""
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"{flags[0]} is no KEY=VALUE and no option of this command; see pdsim --help")
    ConfigStore.instance().store(name="_defaults", node=typed.defaults())
    with hydra.initialize_config_module("conf", version_base="1.3"):
        return _load(hydra.compose("config", overrides.rewrite(words)), words)


def _hydra(words: Sequence[str]) -> None:
    """Have Hydra compose and run the points that *words* ask for; it reads them from the process's command line."""
    argv, environment = sys.argv, dict(os.environ)
    sys.argv = ["pdsim run", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come here instead of being printed
    os.environ[_QUIET] = "1" if _state.quiet else ""
    logging.raiseExceptions = False  # Hydra logs what it prints, to a reader that may have seen enough
    try:
        _point()
    except OSError as error:
        if _state.sweep is None or _state.sweep.is_dir():
            raise
        raise ConfigError(
            f"output={_state.sweep.parent}: {error.strerror}; name a folder that can be written to"
        ) from error
    finally:
        sys.argv = argv
        for name in ("HYDRA_FULL_ERROR", _QUIET):
            os.environ.pop(name)
            os.environ |= {name: environment[name]} if name in environment else {}


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
        out.write(terminal.as_json(folder) + "\n")
    elif not quiet:
        with suppress(SystemExit):  # rich's answer to a reader, such as head, that has seen enough
            terminal.show(folder, out)


# --- one point ------------------------------------------------------------------------------------------------------


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def _point(composed: DictConfig) -> None:
    """Run one point.  Its error is kept, not raised: Hydra would print it and, in a sweep, stop."""
    asked = OmegaConf.to_container(HydraConfig.get().overrides.task)
    assert isinstance(asked, list)
    words = [str(word).lstrip("+") for word in asked]
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        _point_of_sweep(composed, words, Path(HydraConfig.get().sweep.dir) / str(HydraConfig.get().job.num))
        return
    try:
        config = _load(composed, words)
        result, _state.folder = execute(config, words)
        _state.failed = bool(result.failures)
    except Exception as error:
        _state.error = error


def _point_of_sweep(composed: DictConfig, words: Sequence[str], output: Path) -> None:
    """Run one point, perhaps in a process of its own; what goes wrong is a row of the sweep's table."""
    name = ", ".join(words) or "the configuration as it is"
    try:
        result, _ = execute(replace(_load(composed, words), output=str(output)), words)
    except ConfigError as error:
        refuse(output, error, command=["pdsim", "run", *words], overrides=words)
        _say(f"{name}: refused: {error}")
    except Exception as error:
        _say(f"{name}: {type(error).__name__}: {error}")
    else:
        _say(f"{name}: {'failed in part' if result.failures else 'ok'}")


def _say(line: str) -> None:
    if not os.environ.get(_QUIET):  # of the parent, too
        sys.stderr.write(" ".join(line.split()) + "\n")


def _load(composed: DictConfig, words: Sequence[str]) -> Config:
    """Return the typed configuration of a point that can be run.  Raise a `ConfigError` otherwise."""
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(values, Mapping)
    named = {str(key): value for key, value in values.items()}
    overrides.check_calibration(words, named)
    keys = overrides.set_keys(words)
    config = typed.load(named, keys)
    plausible.check(config, named, overrides.leaves(words))
    checks.check(config)
    return config


def execute(config: Config, words: Sequence[str]) -> tuple[Result, Path]:
    """Run the experiment of *config*, which *words* asked for, keep its result, and return it and its folder."""
    name = str(config.experiment["name"])
    measure: Callable[..., Result]
    measure = plugins.resolve(plugins.EXPERIMENTS, name).run
    fresh = not Path(config.output).exists()
    kept = Run(config, command=["pdsim", "run", *words], overrides=words)
    try:
        with kept, terminal.Progress(f"{name} on {config.hw.name}") as bar:
            meter = _Meter(None if _state.quiet else bar)
            own = {"folder": kept.folder} if name in _OWN_FILES else {}
            with _target(config, meter, kept.folder) as target:
                result = measure(config, target, meter, **own)
                own_notes = [
                    *checks.notes(config, overrides.set_keys(words)),
                    *getattr(target, "notes", ()),
                    *extrapolations(config, result.transfers),
                    *host_spread(config, result.transfers),
                ]
                result = replace(result, notes=[*result.notes, *own_notes])
            return result, kept.finish(result)
    except ConfigError:  # found by the experiment itself, before it began
        shutil.rmtree(kept.folder)
        if fresh:
            _remove_if_empty(Path(config.output))
        raise
    except Exception as error:
        error.add_note(f"what there is of the run is in {kept.folder}")
        raise


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # another run may have begun to use it
        folder.rmdir()


class _Meter:
    """Shows how far the experiment says it is, and between two such words the time on the virtual clock."""

    def __init__(self, bar: terminal.Progress | None) -> None:
        self._bar = bar
        self._share = 0.0
        self._text = ""

    def __call__(self, fraction: float, text: str = "") -> None:
        self._share, self._text = fraction, text
        self._show(text)

    def at(self, now: float) -> None:
        """Show the virtual time *now*."""
        self._show(f"{self._text} ({format_time(now)} simulated)")

    def _show(self, text: str) -> None:
        if self._bar is not None:
            self._bar(self._share, text)


@contextmanager
def _target(config: Config, meter: _Meter, folder: Path) -> Iterator[Any]:
    """Yield what the job runs on; a machine that is emulated, or servers that are launched, for it end afterwards."""
    if config.target == "model":
        from pdsim.fabric.job import Model

        yield Model(
            config.hw,
            config.backend,
            memory=config.memory,
            seed=config.seed,
            progress=meter.at,
            collective=config.collective,
            jitter=config.jitter,
        )
        return
    if config.target == "live":
        from backends.live.deployment import deployed

        with deployed(config, folder, meter) as deployment:
            yield deployment
        return
    from backends.jobs.launcher import SILENCE, Processes

    host, collective = config.hw.host.memory, config.collective
    silence = config.launch.silence or config.experiment.get("deadline", SILENCE)
    if config.hw.guest:
        from backends.emulation.guest.engines import emulated

        meter(0.0, "an emulated machine starts")
        with emulated(config.backend, host, silence, device_capacity=host, collective=collective) as target:
            yield target
        return

    gpu = config.hw.gpu.memory if config.hw.gpu and config.hw.gpus else config.hw.host.memory
    yield Processes(
        config.backend,
        bind=config.launch.bind,
        silence=silence,
        device_capacity=host,
        gpu_capacity=gpu,
        collective=collective,
        link=config.hw.link,
        nodes=config.hw.nodes,
    )


# --- all points -----------------------------------------------------------------------------------------------------


def _finish_sweep(out: TextIO, *, json: bool, quiet: bool) -> None:
    """Write one file and print one table over all points, those that an interrupted sweep reached included."""
    from pdsim.sweep.collect import collect

    sweep = _state.sweep
    if sweep is None or not sweep.is_dir():
        return
    if not any(path.is_dir() for path in sweep.iterdir()):  # Hydra refused the sweep: leave nothing
        (sweep / "multirun.yaml").unlink(missing_ok=True)
        sweep.rmdir()
        if _state.fresh:
            _remove_if_empty(sweep.parent)
        return
    path = collect(sweep)
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    _state.failed = any(row["status"] != "ok" for row in rows)
    if json or not quiet:
        with suppress(SystemExit):
            terminal.show_sweep(sweep, out, json=json)
