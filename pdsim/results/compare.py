# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: what differs in their configurations, and each metric as a number and a multiple.

Multiples are of the first run.  What cannot matter to any of the runs is left out, and so are
metrics that none of them has.  People see units; plain data has base units.

Both come from the files of the runs.  Of a run without evidence no number is given.  Multiples are
plain ratios: whether a difference means anything is for the intervals among the metrics to say.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from math import isfinite
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from pdsim.config import Config
from pdsim.core import units
from pdsim.core.errors import ConfigError
from pdsim.results import schema
from pdsim.results.record import Table
from pdsim.results.store import load
from pdsim.results.terminal import share

__all__ = ["as_dict", "tables"]

_NOT_ASKED_FOR = (
    "output",
    "calibration.",
    "hydra.",
    "backend.implementation",
    "backend.modelled",
    "backend.measured_on",
)
_UNUSED: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "backend.inter.": lambda config: config.get("hw.nodes") == 1,
    "backend.options.": lambda config: config.get("target") == "model",
    "launch.": lambda config: config.get("target") != "real",
    "live.": lambda config: config.get("target") != "live",
}
"""What cannot matter to a run: keys by how they begin, and what is so of its configuration then."""
_SOURCES = ".sources."


def tables(folders: Sequence[Path]) -> list[Table]:
    """Return what differs, and the metrics, of the complete runs in *folders*, called A, B and so on.

    Metrics have a column for each run and, from the second on, one of its value over that of A. Raise a
    `ConfigError` if there are not two to 26, if one is not complete, or if they are of several experiments.
    """
    runs = _runs(folders)
    names = ascii_uppercase[: len(runs)]
    titles = {name: run["folder"] for name, run in zip(names, runs, strict=True)}
    differences = [[key, *(_text(key, value) for value in values)] for key, values in _differences(runs)]
    ratios = {f"{name}/A": "" for name in names[1:]}
    metrics = [
        [name, *(_measured(name, value) for value in values), *_multiples(values), text]
        for name, text, values in _metrics(runs)
        if any(value is not None for value in values)
    ]
    return [
        Table("What differs", {"key": ""} | titles, differences),
        Table("Metrics", {"metric": ""} | dict.fromkeys(names, "") | ratios | {"definition": ""}, metrics),
    ]


def as_dict(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the same as plain data: ``folders``, ``differences`` by key, and ``metrics`` by name.

    Values are lists with one for each run in the order of *folders*, None where a run has none;
    multiples are of the first, without it.  Raise as `tables`.
    """
    runs = _runs(folders)
    return {
        "folders": [run["folder"] for run in runs],
        "differences": dict(_differences(runs)),
        "metrics": {
            name: {"values": values, "definition": text, "multiples": _multiples(values)}
            for name, text, values in _metrics(runs)
        },
    }


def _runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    if not 2 <= len(folders) <= len(ascii_uppercase):
        raise ConfigError(
            f"compare takes 2 to {len(ascii_uppercase)} folders of runs, got {len(folders)}; name them all"
        )
    runs = [load(folder) for folder in folders]
    if len(kinds := list(dict.fromkeys(run["experiment"] for run in runs))) > 1:
        raise ConfigError(f"{' and '.join(kinds)} are different experiments; compare runs of one of them")
    return runs


def _differences(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    configs = [_configuration(Path(run["folder"])) | _about(run) for run in runs]
    idle = tuple(prefix for prefix, unused in _UNUSED.items() if all(map(unused, configs)))
    for key in dict.fromkeys(key for one in configs for key in one):
        values = [one.get(key) for one in configs]
        if any(value != values[0] for value in values) and any(values) and not key.startswith(idle):
            yield key, values


def _about(run: Mapping[str, Any]) -> dict[str, Any]:
    calibration = run["evidence"].get("calibration") or {}
    about = {
        "status": run["status"],
        "engine": ", ".join(run["engine"]),
        "calibration": calibration.get("name", "none"),
        "evidence": run["evidence"]["weakest"],
        "pdsim": run["pdsim"],
        "commit": _commit(run.get("git")),
    }
    return about | ({"host": str(run.get("host"))} if run["target"] != "model" else {})


def _commit(git: Mapping[str, Any] | None) -> str | None:
    return None if not git else f"{str(git.get('commit'))[:12]}{' and changes' if git.get('dirty') else ''}"


def _configuration(folder: Path) -> dict[str, Any]:
    # Where a number comes from and where results go is left out.
    flat = schema.read_configuration(folder / "config.yaml")
    return {
        key: value for key, value in flat.items() if not key.startswith(_NOT_ASKED_FOR) and _SOURCES not in f"{key}."
    }


def _metrics(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, list[Any]]]:
    every = [run["metrics"] if run["evidence"]["sources"] else {} for run in runs]
    for name in dict.fromkeys(name for one in every for name in one):
        known = [one[name] for one in every if name in one]
        yield name, known[0]["definition"], [one.get(name, {}).get("value") for one in every]


def _multiples(values: Sequence[Any]) -> list[float | None]:
    first, *others = values
    ratios = [value / first if _is_number(value) and _is_number(first) and first else None for value in others]
    return [value if value is not None and isfinite(value) else None for value in ratios]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    show = _shown_as(key)
    return show(value) if show is not None and _is_number(value) else str(value)


@cache
def _shown_as(key: str) -> Callable[[float], str] | None:
    # The unit is the parser in the field's annotation (`pdsim.core.units.Seconds` and so on), found along
    # the dotted key.
    hint: Any = Config
    for name in key.split("."):
        inner = next((each for each in (hint, *typing.get_args(hint)) if is_dataclass(each)), None)
        if inner is None:
            return None
        hint = typing.get_type_hints(inner, include_extras=True).get(name)
    return next((_FORMATS[each] for each in getattr(hint, "__metadata__", ()) if each in _FORMATS), None)


_FORMATS: Mapping[Any, Callable[[float], str]] = {
    units.parse_time: units.format_time,
    units.parse_rate: units.format_rate,
    units.parse_size: units.format_size,
}
_OF_METRICS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("*_s", units.format_time),
    ("*bytes", units.format_size),
    ("share_*", share),
    ("*_attainment", share),
    ("*_max", share),
)


def _measured(name: str, value: Any) -> Any:
    show = next((show for pattern, show in _OF_METRICS if fnmatchcase(name, pattern)), None)
    return show(value) if show is not None and _is_number(value) and not name.endswith("_per_s") else value
