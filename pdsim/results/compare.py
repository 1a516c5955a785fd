"""Runs side by side: what differs in their configurations, and each metric, as a number and as a multiple of the first.

Both come from the files of the runs.  Of a run without evidence no number is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from pdsim.errors import ConfigError
from pdsim.results import reading
from pdsim.results.record import Table
from pdsim.results.store import load

__all__ = ["as_dict", "tables"]

_NOT_ASKED_FOR = ("output", "calibration.", "hydra.")
_SOURCES = ".sources."


def tables(folders: Sequence[Path]) -> list[Table]:
    """Return what differs, and the metrics, of the complete runs in *folders*, called A, B and so on.

    Raise a `ConfigError` if there are not two to 26, if one is not complete, or if they are of several experiments.
    """
    runs = _runs(folders)
    names = ascii_uppercase[: len(runs)]
    titles = {name: run["folder"] for name, run in zip(names, runs, strict=True)}
    differences = [[key, *map(_told, values)] for key, values in _differences(runs)]
    ratios = {f"{name}/A": "" for name in names[1:]}
    metrics = [[name, *values, *_multiples(values), text] for name, text, values in _metrics(runs)]
    return [
        Table("What differs", {"key": ""} | titles, differences),
        Table("Metrics", {"metric": ""} | dict.fromkeys(names, "") | ratios | {"definition": ""}, metrics),
    ]


def as_dict(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the same as plain data, lists with a value for each run in the order of *folders*; raise as `tables`."""
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
    """Yield each key that is not the same in all *runs*, with a value for each; None where a run has none."""
    found = [_configuration(Path(run["folder"])) | _about(run) for run in runs]
    for key in dict.fromkeys(key for one in found for key in one):
        values = [one.get(key) for one in found]
        if any(value != values[0] for value in values):
            yield key, values


def _about(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run says of itself that its numbers depend on."""
    calibration = run["evidence"].get("calibration") or {}
    found = {
        "status": run["status"],
        "engine": ", ".join(run["engine"]),
        "calibration": calibration.get("name", "none"),
        "evidence": run["evidence"]["weakest"],
        "pdsim": run["pdsim"],
        "commit": _commit(run.get("git")),
    }
    return found | ({"host": str(run.get("host"))} if run["target"] != "model" else {})


def _commit(git: Mapping[str, Any] | None) -> str | None:
    return None if not git else f"{str(git.get('commit'))[:12]}{' and changes' if git.get('dirty') else ''}"


def _configuration(folder: Path) -> dict[str, Any]:
    """Return the configuration of the run in *folder* by dotted key, without where a number comes from or goes to."""
    flat = reading.configuration(folder / "config.yaml")
    return {
        key: value for key, value in flat.items() if not key.startswith(_NOT_ASKED_FOR) and _SOURCES not in f"{key}."
    }


def _metrics(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield each metric that a run has, with its definition and a value for each run."""
    every = [run["metrics"] if run["evidence"]["sources"] else {} for run in runs]
    for name in dict.fromkeys(name for one in every for name in one):
        known = [one[name] for one in every if name in one]
        yield name, known[0]["definition"], [one.get(name, {}).get("value") for one in every]


def _multiples(values: Sequence[Any]) -> list[float | None]:
    """Return each of *values* but the first as a multiple of the first, None where there is none."""
    first, *others = values
    found = [value / first if _is_number(value) and _is_number(first) and first else None for value in others]
    return [value if value is not None and isfinite(value) else None for value in found]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _told(value: Any) -> str:
    return "-" if value is None else ", ".join(map(str, value)) if _is_list(value) else str(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | Mapping)
