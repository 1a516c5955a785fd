# SPDX-License-Identifier: Apache-2.0
"""`pdsim explain`: what bounded a run and what would help; of two runs, which cause makes the difference.

Shares of the time are from the files of the runs, everything else from simulating the runs again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

from pdsim.config import Config, compose
from pdsim.config.compose import CommandLine
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.units import format_time
from pdsim.results import explain, store, terminal
from pdsim.results.record import Table
from pdsim.results.terminal import share
from pdsim.sweep.what_if import WHAT_IFS, Figures, try_exchanges, try_what_ifs

_LEAST = 0.001
"""Share of the time from which on a cause is relieved."""
_SHOWN = {"e2e": "end to end", "ttft": "TTFT", "ttft_p99": "TTFT p99", "tpot": "TPOT", "handoff": "KV transfer"}
_Tried = Mapping[str, Figures | str]


def explain_one(folder: Path, *, request: int | None = None, fast: bool = False, json: bool = False) -> None:
    """Print what bounded the run in *folder*, or one *request* of it; *fast* simulates nothing.

    Raise a `ConfigError` if the run kept nothing to explain, or no such request.
    """
    times = explain.accounts(folder, request)
    total = sum(times.values())
    causes = [name for name in sorted(times, key=lambda name: -times[name]) if times[name] >= _LEAST * total]
    asked = [*causes, *(["admission"] if "queue" in causes else [])]
    tried = {} if fast else _simulated(folder, lambda bar: try_what_ifs(_config(folder), asked, bar, request))
    of = "transfers" if set(times) == {"posting", "link", "host"} else "requests" if request is None else "request"
    if json:
        terminal.show_lines(dumps({"folder": str(folder), "of": of, "seconds": times, "reliefs": _plain(tried)}))
        return
    terminal.show_lines(*_verdict(f"request {request}" if request is not None else f"mean of {of}", times, tried))
    terminal.show_table(_causes(times, asked, tried), definitions=False)
    base = tried.get("")
    if isinstance(base, Figures) and store.load(folder)["target"] != "model":
        said = "-" if base.time is None else format_time(base.time)
        terminal.show_lines(f"simulations are of the model, which says {said}; shares are what was measured")


def explain_two(folders: Sequence[Path], *, fast: bool = False, json: bool = False) -> None:
    """Print which cause makes the runs in two *folders* differ; raise as `explain_one`."""
    sentences, tables = explain.difference(folders)
    tried = {} if fast else _simulated(folders[0], lambda bar: try_exchanges(list(map(_config, folders)), bar))
    if json:
        about = {"folders": [str(folder) for folder in folders], "difference": sentences}
        terminal.show_lines(dumps(about | {"exchanges": _plain(tried)}))
        return
    terminal.show_lines(*sentences)
    for table in (*tables, *([_exchanges(tried)] if len(tried) > 2 else [])):
        terminal.show_table(table, definitions=False)


def _config(folder: Path) -> Config:
    # of a search the run that it ended with
    config = compose.composed(CommandLine(path=str(folder), name="config"))
    chosen = getattr(plugins.resolve(plugins.EXPERIMENTS, config.experiment.name), "chosen", None)
    if chosen is None:
        return config
    own: Config = chosen(config, {name: each["value"] for name, each in store.load(folder)["metrics"].items()})
    return own


def _simulated(folder: Path, simulate: Callable[[terminal.Progress], dict[str, Figures | str]]) -> _Tried:
    try:
        with terminal.Progress(f"{store.load(folder)['experiment']} again") as bar:
            return simulate(bar)
    except (ConfigError, ValueError) as error:
        return {"": f"not simulated again: {' '.join(str(error).split())}"}


def _plain(tried: _Tried) -> dict[str, Any]:
    return {name: each if isinstance(each, str) else asdict(each) for name, each in tried.items()}


def _verdict(what: str, times: Mapping[str, float], tried: _Tried) -> Iterator[str]:
    total = sum(times.values())
    if not total:
        yield f"{what}: no time passed"
        return
    most = max(times, key=lambda name: times[name])
    yield f"{what}: {format_time(total)}, bound by {most} ({share(times[most] / total)} of the time)"
    base = tried.get("")
    if isinstance(base, str):
        yield base
    elif base is not None and base.time:
        after = {name: each.time for name, each in tried.items() if name and isinstance(each, Figures) and each.time}
        if after:
            best = min(after, key=lambda name: after[name])
            how = next(each.how for each in WHAT_IFS if each.cause == best)
            change = f"{format_time(base.time)} -> {format_time(after[best])}, {_change(after[best], base.time)}"
            yield f"what helps most: {how} ({best}): {change}"


def _change(after: float | None, before: float | None) -> str:
    if after is None or not before:
        return "-"
    percent = 100.0 * (after / before - 1.0)
    return f"{percent:+.1f} %" if abs(percent) >= 9.95 else "0 %" if abs(percent) < 0.005 else f"{percent:+.2g} %"


def _causes(times: Mapping[str, float], asked: Sequence[str], tried: _Tried) -> Table:
    # Without figures (*tried* is empty, or its base could not be simulated) the row says what the cause is instead.
    total, base = sum(times.values()), tried.get("")
    known = {each.cause: each for each in WHAT_IFS}
    shown: list[str] = []
    if isinstance(base, Figures):
        shown = [name for name in _SHOWN if getattr(base, name) is not None] or ["transfer"]
    rows: list[list[Any]] = []
    for name in asked:
        seconds, each = times.get(name), tried.get(name)
        cells = [_change(getattr(each, value, None), getattr(base, value)) for value in shown]
        how = each if isinstance(each, str) else known[name].how if tried else known[name].what
        time = "-" if seconds is None else format_time(seconds)
        rows.append([name, time, "-" if seconds is None or not total else share(seconds / total), *cells, how])
    columns = ["cause", "time", "share", *(_SHOWN.get(name, name) for name in shown), "relieved twofold"]
    title = "Causes, and what half of each would change, simulated" if shown else "Causes"
    return Table(title, dict.fromkeys(columns, ""), rows)


def _exchanges(tried: _Tried) -> Table:
    # The last column is the share of the difference between A and B that the group makes alone.
    first, second = tried["A"], tried["B"]
    assert isinstance(first, Figures)
    assert isinstance(second, Figures)
    names = [name for name in ("e2e", "ttft", "tpot", "handoff") if getattr(first, name) is not None] or ["transfer"]
    rows: list[list[Any]] = []
    for group, each in tried.items():
        cells, part = ["-"] * len(names), each
        if isinstance(each, Figures):
            values = [getattr(each, name) for name in names]
            cells, part = ["-" if value is None else format_time(value) for value in values], "-"
            if each.time is not None and first.time is not None and second.time not in (None, first.time):
                part = share((each.time - first.time) / (second.time - first.time))
        rows.append([group if group in ("A", "B") else f"A with {group} of B", *cells, part])
    columns = ["simulated", *(_SHOWN.get(name, name) for name in names), "of the difference"]
    return Table("A with one group of B's configuration", dict.fromkeys(columns, ""), rows)
