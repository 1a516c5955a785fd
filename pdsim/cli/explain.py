# SPDX-License-Identifier: Apache-2.0
"""`pdsim explain`: what bounded a run and what a relief would bring; of two runs, which cause makes the difference.

Shares of the time are from the files of the runs, reliefs and exchanges from simulating the runs again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

from pdsim.config import Config, compose
from pdsim.config.compose import CommandLine
from pdsim.core.errors import ConfigError
from pdsim.core.units import format_time
from pdsim.results import explain, store, terminal
from pdsim.results.record import Table
from pdsim.results.terminal import share
from pdsim.sweep import relief
from pdsim.sweep.relief import RELIEFS, Figures

__all__ = ["explain_one", "explain_two"]

_LEAST = 0.001
"""Share of the time from which on a cause is relieved."""
_SHOWN = {"e2e": "end to end", "ttft": "TTFT", "ttft_p99": "TTFT p99", "tpot": "TPOT", "handoff": "KV transfer"}


def explain_one(folder: Path, *, request: int | None = None, fast: bool = False, json: bool = False) -> None:
    """Print what bounded the run in *folder*, or one *request* of it; *fast* simulates nothing.

    Shares of the time are the mean over requests, or over transfers where the experiment has no requests. Causes
    with less than a thousandth of it are left out; each of the others is relieved twofold and the run simulated
    again with the same seed, which takes as long as the run for each cause. With *json* the same is one object:
    ``seconds`` by cause, and ``reliefs``.

    Raise a `ConfigError` if the run kept nothing to explain, or no such request.
    """
    times = explain.accounts(folder, request)
    total = sum(times.values())
    causes = [name for name in sorted(times, key=lambda name: -times[name]) if times[name] >= _LEAST * total]
    asked = [*causes, *(["admission"] if "queue" in causes else [])]
    tried = {} if fast else _simulated(folder, lambda bar: relief.try_reliefs(_config(folder), asked, bar, request))
    of = "transfers" if set(times) == {"posting", "link", "host"} else "requests" if request is None else "request"
    if json:
        found = {"folder": str(folder), "of": of, "seconds": times, "reliefs": _plain(tried)}
        terminal.show_lines(dumps(found))
        return
    what = f"request {request}" if request is not None else f"mean of {of}"
    terminal.show_lines(*_verdict(what, times, tried))
    terminal.show_table(_reliefs(times, asked, tried), definitions=False)
    if isinstance(base := tried.get(""), Figures) and _is_model(folder) is False:
        terminal.show_lines(f"reliefs are of the model, which says {_seconds(base)}; shares are what was measured")


def explain_two(folders: Sequence[Path], *, fast: bool = False, json: bool = False) -> None:
    """Print which cause makes the runs in two *folders* differ; raise as `explain_one`.

    Beside the causes, each group of keys in which they differ (engine, machine, layout, …) is exchanged alone: A is
    simulated with that group of B. What the groups bring by themselves need not add up.
    """
    sentences = explain.difference(folders)

    def exchanges(bar: terminal.Progress) -> dict[str, Figures | str]:
        return relief.try_exchanges([_config(folder) for folder in folders], bar)

    tried = {} if fast else _simulated(folders[0], exchanges)
    if json:
        found = {"folders": [str(folder) for folder in folders], "difference": sentences, "exchanges": _plain(tried)}
        terminal.show_lines(dumps(found))
        return
    terminal.show_lines(*sentences)
    for table in explain.tables(folders):
        terminal.show_table(table, definitions=False)
    if len(tried) > 2:
        terminal.show_table(_exchanges(tried), definitions=False)


def _config(folder: Path) -> Config:
    return compose.composed(CommandLine(path=str(folder), name="config"))


def _simulated(folder: Path, simulate: Any) -> dict[str, Figures | str]:
    experiment = store.load(folder)["experiment"]
    try:
        with terminal.Progress(f"{experiment} again") as bar:
            found: dict[str, Figures | str] = simulate(bar)
            return found
    except (ConfigError, ValueError) as error:
        return {"": f"not simulated again: {' '.join(str(error).split())}"}


def _is_model(folder: Path) -> bool:
    return bool(store.load(folder)["target"] == "model")


def _seconds(found: Figures) -> str:
    value = found.e2e if found.e2e is not None else found.transfer
    return "-" if value is None else format_time(value)


def _plain(tried: Mapping[str, Figures | str]) -> dict[str, Any]:
    return {name: found if isinstance(found, str) else asdict(found) for name, found in tried.items()}


def _value(found: Figures) -> float | None:
    # End to end of a request, or of a transfer without requests.
    return found.e2e if found.e2e is not None else found.transfer


def _verdict(what: str, times: Mapping[str, float], tried: Mapping[str, Figures | str]) -> Iterator[str]:
    total = sum(times.values())
    most = max(times, key=lambda name: times[name])
    if not total:
        yield f"{what}: no time passed"
        return
    yield f"{what}: {format_time(total)}, bound by {most} ({share(times[most] / total)} of the time)"
    base = tried.get("")
    if isinstance(base, str):
        yield base
    if not isinstance(base, Figures):
        return
    before = _value(base)
    gains = {
        name: before - after
        for name, found in tried.items()
        if name and isinstance(found, Figures) and before and (after := _value(found)) is not None
    }
    if gains and before:
        best = max(gains, key=lambda name: gains[name])
        how = next(each.how for each in RELIEFS if each.cause == best)
        left = before - gains[best]
        change = f"{format_time(before)} -> {format_time(left)}, {_change(left, before)}"
        yield f"what helps most: {how} ({best}): {change}"


def _change(after: float, before: float) -> str:
    percent = 100.0 * (after / before - 1.0)
    return f"{percent:+.1f} %" if abs(percent) >= 9.95 else "0 %" if abs(percent) < 0.005 else f"{percent:+.2g} %"


def _reliefs(times: Mapping[str, float], asked: Sequence[str], tried: Mapping[str, Figures | str]) -> Table:
    # Without figures (*tried* is empty, or its base could not be simulated) the row says what the cause is instead.
    total, base = sum(times.values()), tried.get("")
    known = {each.cause: each for each in RELIEFS}
    shown = [name for name in _SHOWN if isinstance(base, Figures) and getattr(base, name) is not None]
    if isinstance(base, Figures) and not shown:
        shown = ["transfer"]
    columns = ["cause", "time", "share", *(_SHOWN.get(name, name) for name in shown), "relieved twofold"]
    rows: list[list[Any]] = []
    for name in asked:
        seconds, found = times.get(name), tried.get(name)
        cells = [_cell(found, base, each) for each in shown]
        how = found if isinstance(found, str) else known[name].how if tried else known[name].what
        time = "-" if seconds is None else format_time(seconds)
        rows.append([name, time, "-" if seconds is None or not total else share(seconds / total), *cells, how])
    title = "Causes, and what half of each would change, simulated" if shown else "Causes"
    return Table(title, dict.fromkeys(columns, ""), rows)


def _cell(found: Figures | str | None, base: Figures | str | None, name: str) -> str:
    if not isinstance(found, Figures) or not isinstance(base, Figures):
        return "-"
    after, before = getattr(found, name), getattr(base, name)
    return "-" if after is None or not before else _change(after, before)


def _exchanges(tried: Mapping[str, Figures | str]) -> Table:
    # The last column is the share of the difference between A and B that the group makes alone.
    first, second = tried["A"], tried["B"]
    assert isinstance(first, Figures)
    assert isinstance(second, Figures)
    names = [name for name in ("e2e", "ttft", "tpot", "handoff") if getattr(first, name) is not None] or ["transfer"]
    a, b = _value(first), _value(second)
    rows: list[list[Any]] = []
    for group, found in tried.items():
        title = group if group in ("A", "B") else f"A with {group} of B"
        if isinstance(found, str):
            rows.append([title, *["-"] * len(names), found])
            continue
        cells = [getattr(found, name) for name in names]
        value = _value(found)
        part = "-" if value is None or a is None or b is None or a == b else share((value - a) / (b - a))
        rows.append([title, *("-" if cell is None else format_time(cell) for cell in cells), part])
    columns = ["simulated", *(_SHOWN.get(name, name) for name in names), "of the difference"]
    return Table("A with one group of B's configuration", dict.fromkeys(columns, ""), rows)
