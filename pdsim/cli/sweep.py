# SPDX-License-Identifier: Apache-2.0
"""`pdsim sweep`: Hydra's override grammar to points, each composed and checked, and the points to a table.

With ``--search optuna`` Optuna chooses the points.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override

from pdsim.cli.help import parse
from pdsim.cli.process import only_json
from pdsim.config import build, compose
from pdsim.config.compose import CommandLine
from pdsim.core import plugins
from pdsim.core.errors import ConfigError, instead
from pdsim.core.progress import ShowProgress, silent
from pdsim.core.units import is_number
from pdsim.results import terminal
from pdsim.sweep import collect, driver
from pdsim.sweep.executors import Executor
from pdsim.sweep.points import Axis, Point, axes, combinations, name_of
from pdsim.sweep.trackers import Track
from pdsim.version import __version__


def sweep(words: Sequence[str]) -> int:
    """Run every point of *words*, or those that an earlier call has not, and return the exit status.

    Raise a `ConfigError`, and write nothing, if *words* are wrong or none of the points can be run. A point that
    fails, or that cannot be run, does not end the others: 1 is returned if any failed, 0 if all others could not be
    run. Ctrl-C raises a `KeyboardInterrupt` that says where the finished points are.
    """
    rest, options = parse("sweep", words)
    json, quiet = "--json" in options, "--quiet" in options
    own = [word for word in rest if word.partition("=")[0].split(".")[0] == "executor"]
    space, searched = space_of([word for word in rest if word not in own], options), _search_of(options)
    executor = executor_of(own, space.line)
    with compose.initialized(space.line):
        if searched is None:
            points = space.points()
        elif not space.keys:
            raise ConfigError("--search has nothing to choose; write KEY=A,B or KEY=interval(LOW,HIGH)")
        else:
            lowest = {key: repr(low) for key, (low, _) in space.intervals.items()}
            points = [space.point(next(combinations(space.axes)) | lowest)]
        if not points:
            raise ConfigError("a key has no value; see pdsim sweep --help")
        if searched is None and all(point.config is None for point in points):
            raise ConfigError(points[0].refusal)
        if searched is None and len(points) == 1 and not (json or quiet):
            sys.stderr.write("one point only: no key has several values; write KEY=A,B, as workload.rate=1,2\n")
        folder = _folder(points, space, searched, options)
        track = plugins.resolve(plugins.TRACKERS, options["--track"])(folder.name) if "--track" in options else None
        with only_json(json) as out:
            if (folder / collect.LEDGER).is_file() and not (json or quiet):
                out.write(f"resuming {folder}\n")
                out.flush()
            try:
                with terminal.Progress("sweep", at_once=True) as bar:
                    shown = silent if quiet or json else bar
                    if searched is None:
                        rows = driver.sweep(folder, points, executor, shown, track)
                    else:
                        rows = _search(searched, folder, space, executor, shown, track)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"finished points are in {folder}; repeat the command to resume") from None
            if json or not quiet:
                with suppress(SystemExit):
                    collect.show(folder, out, json=json, verbose="--verbose" in options)
    return 0 if all(row["status"] in ("ok", "infeasible") for row in rows) else 1


def _search_of(options: Mapping[str, Any]) -> OptunaSearch | None:
    belonging = [name for name in ("--search", "--trials", "--maximize", "--minimize") if name in options]
    if not belonging:
        return None
    if (chosen := options.get("--search")) != "optuna":
        raise ConfigError(
            f"--search {chosen} is not known; write --search optuna"
            if chosen
            else f"{belonging[0]} needs --search optuna"
        )
    if "--seeds" in options:
        raise ConfigError("--seeds with --search would search for a lucky seed; leave --seeds out")
    if "--maximize" in options and "--minimize" in options:
        raise ConfigError("--maximize and --minimize name one metric together; give one of them")
    metric = options.get("--maximize") or options.get("--minimize") or OptunaSearch.metric
    return OptunaSearch(trials=options.get("--trials", 50), metric=metric, minimized="--minimize" in options)


def _folder(points: Sequence[Point], space: Space, search: OptunaSearch | None, options: Mapping[str, Any]) -> Path:
    # Named by a hash of the command. Where it is written does not count: with another ``output=`` the name stays.
    outputs = {point.config.output for point in points if point.config is not None} or {"results"}
    if len(outputs) > 1:
        raise ConfigError(f"output={','.join(sorted(outputs))}: a sweep has one folder; give output one value")
    said = [word for word in space.line.words if not word.startswith("output=")]
    said += [*(f"--zip={keys}" for keys in options.get("--zip", ())), space.line.folder, space.line.path]
    if search is not None:
        said.append(f"{search.metric} {search.minimized}")
    return Path(outputs.pop()) / f"sweep-{hashlib.sha256(shlex.join(said).encode()).hexdigest()[:8]}"


def executor_of(words: Sequence[str], line: CommandLine) -> Executor:
    """Return the executor that *words*, ``executor=NAME`` and its settings, ask for: ``local`` unless they name one.

    Its file is ``conf/executor/NAME.yaml``, or one of the folders of *line*; its class is an entry point of
    ``pdsim.executors``. Raise a `ConfigError` if there is none, or for a setting that it has not.
    """
    names = [word.partition("=")[2] for word in words if word.startswith("executor=")]
    name = names[-1] if names else "local"
    compose.ready([f"executor={name}"], line.folders)
    settings = [word for word in words if not word.startswith("executor=")]
    with compose.initialized(line):
        composed = hydra.compose(f"executor/{name}", compose.ready(settings, line.folders))
    values = compose.resolved(composed)["executor"]
    kind = values.pop("name", name)
    built: Executor = build(plugins.resolve(plugins.EXECUTORS, kind), values, "executor")
    return built


@dataclass(frozen=True)
class Space:
    """What a sweep goes over: overrides that are *fixed*, *axes* of values, *intervals* that only a search has.

    *line* has all of them, as typed.
    """

    line: CommandLine
    fixed: list[str]
    axes: list[Axis]
    intervals: dict[str, tuple[float, float]]  # lowest and highest by key

    @property
    def keys(self) -> list[str]:
        """The keys that are swept."""
        return [*(key for axis in self.axes for key in axis.keys), *self.intervals]

    def points(self) -> list[Point]:
        """Return the points, each once, the last axis changing fastest.

        Raise a `ConfigError`, or what Hydra raises, for words that are wrong in themselves, such as an unknown
        option, and for an interval.
        """
        if self.intervals:
            raise ConfigError(
                f"{next(iter(self.intervals))}=interval(...) has no list of values; add --search optuna"
            )
        by_name: dict[str, Point] = {}
        with compose.initialized(self.line):
            for choice in combinations(self.axes):
                point = self.point(choice)
                by_name.setdefault(point.name, point)
        return list(by_name.values())

    def point(self, choice: Mapping[str, str]) -> Point:
        """Return the point at *choice*, values by key, within `compose.initialized`.

        Its name is a hash of its configuration; one that is refused has none, and is named by its words and pdsim's
        version.
        """
        words = [*self.fixed, *(f"{key}={value}" for key, value in choice.items())]
        values = compose.plain(self.line, words)
        shown = tuple(word.lstrip("+") for word in words)
        try:
            config = compose.load(values, words, self.line.folders)
        except ConfigError as error:
            name = hashlib.sha256("\0".join((__version__, *shown)).encode()).hexdigest()[:12]
            return Point(name=name, words=shown, choice=choice, refusal=str(error))
        return Point(name=name_of(config), words=shown, choice=choice, config=config)


def space_of(words: Sequence[str], options: Mapping[str, Any]) -> Space:
    """Return what *words* and the *options* ``--seeds`` and ``--zip`` go over.

    ``KEY=A,B`` and ``KEY=range(3)`` are axes, ``KEY=interval(LOW,HIGH)`` an interval; ``--zip`` joins axes of equal
    length.  Raise a `ConfigError` for options that exclude each other or are out of range.
    """
    for name in ("--seeds", "--trials"):
        if options.get(name, 1) < 1:
            raise ConfigError(f"{name} {options[name]}: must be a whole number >= 1")
    if seeds := options.get("--seeds", 0):
        if any(word.lstrip("+").startswith("seed=") for word in words):
            raise ConfigError("--seeds and seed= set the same; give one of them")
        words = [*words, f"seed=range({seeds})"]
    line = CommandLine.of(words, options)
    parsed = OverridesParser.create().parse_overrides(compose.ready(line.words, line.folders))
    swept: dict[str, list[str]] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for each in parsed:
        value = each.value()
        if isinstance(value, IntervalSweep):
            intervals[_key(each)] = (float(value.start or 0.0), float(value.end or 0.0))
        elif each.is_sweep_override():
            swept[_key(each)] = [str(value) for value in each.sweep_string_iterator()]
    fixed = [word for word, each in zip(line.words, parsed, strict=True) if not each.is_sweep_override()]
    return Space(line, fixed, axes(swept, [keys.split(",") for keys in options.get("--zip", ())]), intervals)


def _key(override: Override) -> str:
    return str(override.get_key_element()).lstrip("+")


# Points are asked for in batches.  Optuna's sampler is seeded and told the batches in order, so the same command
# asks for the same points: those whose rows are kept are told without being run, and the search goes on.

BATCH = 4
"""Points that are asked for before the first of them is told: they run side by side, on any machine the same."""

_GPU = "goodput per GPU"


@dataclass(frozen=True, kw_only=True)
class OptunaSearch:
    """A search of *trials* points for the highest or, *minimized*, the lowest *metric*."""

    trials: int = 50
    metric: str = _GPU  # of `summary.json`, or goodput divided by the number of GPUs
    minimized: bool = False

    def of(self, row: Mapping[str, Any]) -> float | None:
        """Return the metric of the *row* of a point; None if it could not be run or has none.

        Raise a `ConfigError` if no run has such a metric.
        """
        metrics = row.get("metrics") or {}
        if row["status"] not in ("ok", "partial") or not metrics:
            return None
        if self.metric == _GPU:
            goodput = metrics.get("goodput")
            return None if goodput is None or not row.get("gpus") else goodput / row["gpus"]
        if self.metric not in metrics:
            raise ConfigError(f"no metric {self.metric!r}; {instead(self.metric, sorted(metrics))}")
        value = metrics[self.metric]
        return None if value is None or not math.isfinite(value) else float(value)


def _search(
    what: OptunaSearch, folder: Path, space: Space, executor: Executor, progress: ShowProgress, track: Track | None
) -> list[dict[str, Any]]:
    plugins.require("--search optuna", "optuna", "optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=0, constant_liar=True)
    study = optuna.create_study(direction="minimize" if what.minimized else "maximize", sampler=sampler)
    points: dict[str, Point] = {}
    rows: dict[str, dict[str, Any]] = {}
    for done in range(0, what.trials, BATCH):

        def show(_share: float, text: str = "", _until: float | None = None, /, done: int = done) -> None:
            progress(done / what.trials, f"{done} of {what.trials} trials; {text.rpartition('; ')[2]}")

        trials = [study.ask() for _ in range(min(BATCH, what.trials - done))]
        batch = [space.point(_choice(trial, space)) for trial in trials]
        points |= {point.name: point for point in batch}
        if able := any(point.config is not None for point in points.values()):
            rows = {row["point"]: row for row in driver.sweep(folder, list(points.values()), executor, show, track)}
        for trial, point in zip(trials, batch, strict=True):
            value = what.of(rows[point.name]) if able else None
            study.tell(trial, value, state=optuna.trial.TrialState.FAIL if value is None else None)
    if not rows:
        raise ConfigError(f"none of {what.trials} points can be run: {next(iter(points.values())).refusal}")
    return list(rows.values())


def _choice(trial: Any, space: Space) -> dict[str, str]:
    choice: dict[str, str] = {}
    for axis in space.axes:
        name, steps = ",".join(axis.keys), range(len(axis.values))
        ordered = len(axis.keys) == 1 and all(is_number(value) for (value,) in axis.values)
        step = trial.suggest_int(name, 0, steps[-1]) if ordered else trial.suggest_categorical(name, list(steps))
        choice |= dict(zip(axis.keys, axis.values[step], strict=True))
    return choice | {key: repr(trial.suggest_float(key, low, high)) for key, (low, high) in space.intervals.items()}
