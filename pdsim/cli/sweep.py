# SPDX-License-Identifier: Apache-2.0
"""`pdsim sweep`: Hydra's override grammar to points, each composed and checked, and the points to a table.

Hydra composes once for each choice of groups; values are set in what it composed, which takes a hundredth of the
time.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import OmegaConf

from pdsim.cli.help import parse
from pdsim.cli.optuna_search import OptunaSearch, search
from pdsim.cli.process import only_json
from pdsim.config import build, compose, covers, rules
from pdsim.config.compose import CommandLine
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress, silent
from pdsim.results import terminal
from pdsim.sweep import collect, driver
from pdsim.sweep.collect import LEDGER
from pdsim.sweep.executors import Executor
from pdsim.sweep.points import Axis, Point, axes, combinations, name_of
from pdsim.version import __version__

__all__ = ["Asked", "asked_of", "executor_of", "points", "sweep"]


def sweep(words: Sequence[str]) -> int:
    """Run every point of *words*, or those that an earlier call has not, and return the exit status.

    Raise a `ConfigError`, and write nothing, if *words* are wrong or none of the points can be run. A point that
    fails, or that cannot be run, does not end the others: 1 is returned if any failed, 0 if all others could not be
    run. Ctrl-C raises a `KeyboardInterrupt` that says where the finished points are.
    """
    rest, options = parse("sweep", words)
    json, quiet = "--json" in options, "--quiet" in options
    asked = _asked(rest, options)
    executor = executor_of(asked.executor, asked.line)
    asked_points = points(asked) if asked.search is None else _first(asked)
    if not asked_points:
        raise ConfigError("a key has no value; see pdsim sweep --help")
    if all(point.config is None for point in asked_points) and asked.search is None:
        raise ConfigError(asked_points[0].refusal)
    folder = _folder(asked_points, asked)
    resumed = (folder / LEDGER).is_file()
    with only_json(json) as out:
        if resumed and not (json or quiet):
            out.write(f"resuming {folder}\n")
            out.flush()
        try:
            with terminal.Progress("sweep", at_once=True) as bar:
                shown = silent if quiet or json else bar
                if asked.search is None:
                    rows = driver.sweep(folder, asked_points, executor, shown)
                else:
                    rows = _searched(asked, folder, executor, shown)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"finished points are in {folder}; repeat the command to resume") from None
        if json or not quiet:
            with suppress(SystemExit):
                collect.show(folder, out, json=json, verbose="--verbose" in options)
    return 0 if all(row["status"] in ("ok", "infeasible") for row in rows) else 1


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the words of ``pdsim sweep`` ask for, taken apart; the overrides among them are not yet parsed.

    *zipped* are the groups of keys that change together, *seeds* how often each point is repeated with seeds 0, 1,
    …; 0 leaves the seed as it is. *executor* are the words about where points run, in the order in which they were
    typed.
    """

    line: CommandLine
    zipped: tuple[tuple[str, ...], ...] = ()  # --zip
    seeds: int = 0  # --seeds
    executor: tuple[str, ...] = ()  # executor=NAME, executor.KEY=VALUE
    search: OptunaSearch | None = None  # --search optuna and what belongs to it


def asked_of(words: Sequence[str]) -> Asked:
    """Return what *words* ask for, options taken out and ``--seeds N`` turned into an axis of the key ``seed``.

    Raise a `ConfigError` for words that exclude each other, as for what `pdsim.cli.help.parse` refuses.
    """
    return _asked(*parse("sweep", words))


def _asked(words: Sequence[str], options: Mapping[str, Any]) -> Asked:
    own = tuple(word for word in words if word.partition("=")[0].split(".")[0] == "executor")
    kept = [word for word in words if word not in own]
    for name in ("--seeds", "--trials"):
        if options.get(name, 1) < 1:
            raise ConfigError(f"{name} {options[name]}: must be a whole number >= 1")
    seeds, search = options.get("--seeds", 0), _search_of(options)
    if seeds and any(word.lstrip("+").startswith("seed=") for word in kept):
        raise ConfigError("--seeds and seed= set the same; give one of them")
    if search is not None and seeds:
        raise ConfigError("--seeds with --search would search for a lucky seed; leave --seeds out")
    line = CommandLine.of([*kept, f"seed=range({seeds})"] if seeds else kept, options)
    zipped = tuple(tuple(keys.split(",")) for keys in options.get("--zip", ()))
    return Asked(line=line, zipped=zipped, seeds=seeds, executor=own, search=search)


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
    if "--maximize" in options and "--minimize" in options:
        raise ConfigError("--maximize and --minimize name one metric together; give one of them")
    metric = options.get("--maximize") or options.get("--minimize") or OptunaSearch.metric
    return OptunaSearch(trials=options.get("--trials", 50), metric=metric, minimized="--minimize" in options)


# --- points --------------------------------------------------------------------------------------------------------


def points(asked: Asked) -> list[Point]:
    """Return the points of a sweep, each once, in the order of its axes: the last one changes fastest.

    Raise a `ConfigError`, or what Hydra raises, for words that are wrong in themselves, such as an unknown option,
    and for an interval, which only a search chooses from.
    """
    space = _space(asked)
    if space.intervals:
        raise ConfigError(f"{next(iter(space.intervals))}=interval(...) has no list of values; add --search optuna")
    by_name: dict[str, Point] = {}
    with compose.initialized(asked.line):
        composer = _Composer(asked.line, space.fixed, space.keys)
        for choice in combinations(space.axes):
            point = composer.point(choice)
            by_name.setdefault(point.name, point)
    return list(by_name.values())


@dataclass(frozen=True)
class _Space:
    """What the words of a sweep say: *fixed* ones, *axes* of values, and *intervals*, lowest and highest by key."""

    fixed: list[str]
    axes: list[Axis]
    intervals: dict[str, tuple[float, float]]

    @property
    def keys(self) -> list[str]:
        return [*(key for axis in self.axes for key in axis.keys), *self.intervals]


def _space(asked: Asked) -> _Space:
    # ``KEY=A,B`` and ``KEY=range(3)`` are axes, ``KEY=interval(LOW,HIGH)`` an interval; ``--zip`` joins axes of
    # equal length.
    words = asked.line.words
    parsed = OverridesParser.create().parse_overrides(compose.ready(words, asked.line.folders))
    swept: dict[str, list[str]] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for each in parsed:
        value = each.value()
        if isinstance(value, IntervalSweep):
            intervals[_key(each)] = (float(value.start or 0.0), float(value.end or 0.0))
        elif each.is_sweep_override():
            swept[_key(each)] = [str(value) for value in each.sweep_string_iterator()]
    fixed = [word for word, each in zip(words, parsed, strict=True) if not each.is_sweep_override()]
    return _Space(fixed, axes(swept, asked.zipped), intervals)


def _first(asked: Asked) -> list[Point]:
    space = _space(asked)
    if not space.keys:
        raise ConfigError("--search has nothing to choose; write KEY=A,B or KEY=interval(LOW,HIGH)")
    choice = next(combinations(space.axes)) | {key: repr(low) for key, (low, _) in space.intervals.items()}
    with compose.initialized(asked.line):
        return [_Composer(asked.line, space.fixed, space.keys).point(choice)]


def _searched(asked: Asked, folder: Path, executor: Executor, progress: ShowProgress) -> list[dict[str, Any]]:
    # Points are composed here, one at a time, when the search asks for them; *progress* is called as for any sweep.
    assert asked.search is not None
    space = _space(asked)
    with compose.initialized(asked.line):
        composer = _Composer(asked.line, space.fixed, space.keys)
        return search(asked.search, folder, space.axes, space.intervals, composer.point, executor, progress)


def _key(override: Override) -> str:
    return str(override.get_key_element()).lstrip("+")


class _Composer:
    """Composes points of one sweep: once for each choice of groups, and sets the values of the others in that."""

    def __init__(self, line: CommandLine, fixed: Sequence[str], swept: Sequence[str]) -> None:
        # A value can be set in what Hydra composed unless another override is of the same mapping or one above it:
        # then the order of the two matters, and every point is composed by Hydra.
        self._line, self._fixed = line, list(fixed)
        known = plugins.groups(line.folders)
        self._groups = [key for key in swept if key in known]
        self._values = [key for key in swept if key not in known]
        set_here = [*compose.set_keys(fixed), *self._values]
        # one override within another depends on the order of the two: Hydra then composes every point
        self._apart = not any(
            covers([one], other) for one in set_here for other in self._values if one is not other and one != other
        )
        self._composed: dict[tuple[str, ...], dict[str, Any] | None] = {}
        self._settings: dict[str, tuple[str, Any]] = {}
        self._parser = OverridesParser.create()

    def point(self, choice: Mapping[str, str]) -> Point:
        # Its name is a hash of its configuration; one that is refused has no configuration, and is named by its
        # words and pdsim's version.
        words = [*self._fixed, *(f"{key}={value}" for key, value in choice.items())]
        values = self._plain(choice, words)
        shown = tuple(word.lstrip("+") for word in words)
        try:
            config = compose.load(values, words, self._line.folders)
        except ConfigError as error:
            name = hashlib.sha256("\0".join((__version__, *shown)).encode()).hexdigest()[:12]
            return Point(name=name, words=shown, choice=choice, refusal=str(error))
        notes = tuple(rules.notes(config, compose.set_keys(shown)))
        return Point(name=name_of(config), words=shown, choice=choice, config=config, notes=notes)

    def _plain(self, choice: Mapping[str, str], words: Sequence[str]) -> dict[str, Any]:
        # They are those of the composition of the groups with the swept values set in it, if that is certain to be
        # the same as what Hydra would do with all the words.
        base = self._base(choice)
        settings = [self._setting(f"{key}={choice[key]}") for key in self._values]
        if base is None or not self._apart or any(_complex(value) for _, value in settings):
            return compose.plain(self._line, words)
        for key, value in settings:
            base = _set(base, key.split("."), value)
        return base

    def _setting(self, word: str) -> tuple[str, Any]:
        if word not in self._settings:
            (parsed,) = self._parser.parse_overrides(compose.ready([word]))
            self._settings[word] = _key(parsed), parsed.value()
        return self._settings[word]

    def _base(self, choice: Mapping[str, str]) -> dict[str, Any] | None:
        groups = tuple(f"{key}={choice[key]}" for key in self._groups)
        if groups not in self._composed:
            raw = compose.raw(self._line, [*self._fixed, *groups])
            refers = "${" in OmegaConf.to_yaml(raw)
            self._composed[groups] = None if refers else compose.resolved(raw)
        return self._composed[groups]


def _complex(value: object) -> bool:
    return isinstance(value, Mapping) or "${" in str(value)


def _set(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    head, *rest = path
    below = values.get(head)
    if not rest:
        return {**values, head: value}
    return {**values, head: _set(below if isinstance(below, Mapping) else {}, rest, value)}


# --- where and by what ---------------------------------------------------------------------------------------------


def _folder(every: Sequence[Point], asked: Asked) -> Path:
    # Where it is written does not count: with another ``output=`` the name stays. Raise a `ConfigError` if points
    # would lie in several folders.
    outputs = {point.config.output for point in every if point.config is not None} or {"results"}
    if len(outputs) > 1:
        raise ConfigError(f"output={','.join(sorted(outputs))}: a sweep has one folder; give output one value")
    said = [word for word in asked.line.words if not word.startswith("output=")]
    text = shlex.join(
        [*said, *(f"--zip={','.join(keys)}" for keys in asked.zipped), asked.line.folder, asked.line.path]
        + ([f"{asked.search.metric} {asked.search.minimized}"] if asked.search is not None else [])
    )
    return Path(outputs.pop()) / f"sweep-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


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
