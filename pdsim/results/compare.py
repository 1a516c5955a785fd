# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: what differs in their configurations, and each metric as a number and a multiple of the first.

Keys that matter to none of the runs are left out, and so are metrics that none of them has.  A run without
evidence shows no number.  People see units; plain data has base units.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from math import isfinite
from pathlib import Path
from shlex import join
from string import ascii_uppercase
from typing import Any

from pdsim.config import Config, hints_of
from pdsim.core import units
from pdsim.core.errors import ConfigError, dataclasses_in
from pdsim.results import schema
from pdsim.results.kept import SloLimits, met
from pdsim.results.record import Table
from pdsim.results.store import load
from pdsim.results.terminal import headline, share

_LEFT_OUT = ("output", "calibration.", "hydra.", "backend.implementation", "backend.modelled", "backend.measured_on")
"""How keys begin that say where a number comes from or where results go."""
_UNUSED: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "backend.inter.": lambda config: config.get("hw.nodes") == 1,
    "backend.options.": lambda config: config.get("target") == "model",
    "launch.": lambda config: config.get("target") != "real",
    "live.": lambda config: config.get("target") != "live",
}
"""Keys that cannot matter to a run, by their first part, and for which configurations that holds."""


def tables(folders: Sequence[Path], slo: SloLimits | None = None) -> list[Table]:
    """Return what was run, what differs, and the metrics, of the complete runs in *folders*, called A, B and so on.

    Raise a `ConfigError` if there are not two to 26, if one is not complete, or if they are of several experiments.
    """
    about = as_dict(folders, slo)
    names = ascii_uppercase[: len(folders)]
    differences = [[key, *(_text(key, value) for value in values)] for key, values in about["differences"].items()]
    metrics = [
        [name, *(_measured(name, value) for value in each["values"]), *each["multiples"], each["definition"]]
        for name, each in about["metrics"].items()
        if any(value is not None for value in each["values"])
    ]
    titles = {"key": ""} | dict(zip(names, about["folders"], strict=True))
    columns = ["metric", *names, *(f"{name}/A" for name in names[1:]), "definition"]
    runs = [
        [name, what, command] for name, what, command in zip(names, about["runs"], about["commands"], strict=True)
    ]
    return [
        Table("Runs", dict.fromkeys(("", "run", "command"), ""), runs),
        Table("What differs", titles, differences or [["nothing", *("-" for _ in names)]]),
        Table("Metrics", dict.fromkeys(columns, ""), metrics),
    ]


def as_dict(folders: Sequence[Path], slo: SloLimits | None = None) -> dict[str, Any]:
    """Return the same as plain data: ``folders``, ``runs``, ``commands``, ``differences`` by key, and ``metrics``.

    Values are lists with one for each run in the order of *folders*, None where a run has none; multiples are of the
    first, without it.  With *slo* there are goodput and attainment under it, of all requests.  Raise as `tables`.
    """
    if not 2 <= len(folders) <= len(ascii_uppercase):
        raise ConfigError(
            f"compare takes 2 to {len(ascii_uppercase)} folders of runs, got {len(folders)}; name them all"
        )
    runs = [load(folder) for folder in folders]
    if len(kinds := list(dict.fromkeys(run["experiment"] for run in runs))) > 1:
        raise ConfigError(f"{' and '.join(kinds)} are different experiments; compare runs of one of them")
    every = [run["metrics"] if run["evidence"]["sources"] else {} for run in runs]
    metrics = {}
    for name in dict.fromkeys(name for one in every for name in one):
        definition = next(one[name]["definition"] for one in every if name in one)
        values = [one.get(name, {}).get("value") for one in every]
        metrics[name] = {"values": values, "definition": definition, "multiples": _multiples(values)}
    if slo is not None:
        metrics = _under(slo, [run if own else {} for run, own in zip(runs, every, strict=True)]) | metrics
    return {
        "folders": [run["folder"] for run in runs],
        "runs": [headline(run, Path(run["folder"])) for run in runs],
        "commands": [join(run.get("command", ())) for run in runs],
        "differences": dict(_differences(runs)),
        "metrics": metrics,
    }


def _under(slo: SloLimits, runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    counts = [met(Path(run["folder"]), slo) if run else (0, 0, 0.0) for run in runs]
    values: dict[str, list[float | None]] = {
        "asked_goodput": [good / seconds if seconds else None for good, _, seconds in counts],
        "asked_slo_attainment": [good / count if count else None for good, count, _ in counts],
    }
    return {
        name: {"values": own, "definition": f"under --slo, {slo}", "multiples": _multiples(own)}
        for name, own in values.items()
    }


def _differences(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    configs = [_configuration(Path(run["folder"])) | _about(run) for run in runs]
    idle = tuple(prefix for prefix, unused in _UNUSED.items() if all(map(unused, configs)))
    for key in dict.fromkeys(key for one in configs for key in one):
        values = [one.get(key) for one in configs]
        if any(value != values[0] for value in values) and any(values) and not key.startswith(idle):
            yield key, values


def _about(run: Mapping[str, Any]) -> dict[str, Any]:
    git = run.get("git") or {}
    about = {
        "status": run["status"],
        "engine": ", ".join(run["engine"]),
        "calibration": (run["evidence"].get("calibration") or {}).get("name", "none"),
        "evidence": run["evidence"]["weakest"],
        "pdsim": run["pdsim"],
        "commit": f"{str(git.get('commit'))[:12]}{' and changes' if git.get('dirty') else ''}" if git else None,
    }
    return about | ({"host": str(run.get("host"))} if run["target"] != "model" else {})


def _configuration(folder: Path) -> dict[str, Any]:
    flat = schema.read_configuration(folder / "config.yaml")
    return {
        key: value for key, value in flat.items() if not key.startswith(_LEFT_OUT) and ".sources." not in f"{key}."
    }


def _multiples(values: Sequence[Any]) -> list[float | None]:
    first, *others = values
    ratios = [value / first if _is_number(value) and _is_number(first) and first else None for value in others]
    return [value if value is not None and isfinite(value) else None for value in ratios]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    show = _format(key)
    return show(value) if show is not None and _is_number(value) else str(value)


@cache
def _format(key: str) -> Callable[[float], str] | None:
    # The unit is the parser in the annotation of the field at the dotted key.
    hint: Any = Config
    for name in key.split("."):
        inner = dataclasses_in(hint)
        hint = hints_of(inner[0]).get(name) if inner else None
    return next((_FORMATS[each] for each in getattr(hint, "__metadata__", ()) if each in _FORMATS), None)


def _measured(name: str, value: Any) -> Any:
    show = next((show for pattern, show in _OF_METRICS if fnmatchcase(name, pattern)), None)
    return show(value) if show is not None and _is_number(value) and not name.endswith("_per_s") else value
