# SPDX-License-Identifier: Apache-2.0
"""`pdsim doctor`: what works on this machine, and for what does not, why and what would help.

Every line is a `backends.diagnosis.Diagnosis`.
"""

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from backends import registry
from backends.diagnosis import Diagnosis, devices, gpu_count
from backends.emulation.link import emulated_link
from backends.live.commands import MODULES
from backends.live.live_deployment import installed
from pdsim.calibration.definition import measure
from pdsim.core import clock
from pdsim.core.plugins import conf, describe, groups, options
from pdsim.core.units import format_rate, format_size, format_time, parse_time
from pdsim.version import __version__

_PACKAGES = {
    "scipy": ("pdsim calibrate cannot fit", "calibrate"),
    "plotly": ("pdsim report writes no page", "report"),
    "aiohttp": ("target=live cannot speak to servers", "live"),
    "ray": ("pdsim sweep cannot run on Ray (executor=ray)", "ray"),
    "submitit": ("pdsim sweep cannot run in jobs of Slurm (executor=slurm)", "slurm"),
    "torch": ("target=real has no groups of ranks (collective=)", "torch"),
}
"""What is not there without a package, and the extra that has it."""


def report(own: Sequence[Path] = ()) -> str:
    """Return the text of ``pdsim doctor``; *own* are folders of one's own configuration."""
    memory = format_size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    model = "in pure Python" if clock.__file__.endswith(".py") else "compiled"  # see hatch_build.py
    choices = options("backend", own)
    engines = [_engine(name, name in choices) for name in registry.backends()]
    usable = [engine.name for engine in engines if engine.works]
    parts = {
        "devices": _table(devices()),
        "engines (target=real, backend=NAME)": _table(engines),
        "servers that live.launch=true can start (target=live)": _table(map(_server, MODULES)),
        f"configuration of {', '.join(map(str, own))}": [
            f"{group}={name}: {describe(group, name, [folder])}"
            for folder in own
            for group in groups(own)
            for name in options(group, [folder])
            if (folder / group / f"{name}.yaml").is_file()
        ],
        "besides": _table((*map(_package, _PACKAGES), _link())),
    }
    real = f"pdsim run target=real hw=loopback backend={usable[0]}" if usable else ""
    lines = [
        f"pdsim {__version__} on {platform.machine()}, {os.cpu_count()} cores, {memory}, "
        f"Python {platform.python_version()}",
        "",
        f"the model (target=model): works, {model}, and needs nothing more",
        "",
    ]
    for title, rows in parts.items():
        if rows:
            lines += [title, *(f"  {row}" for row in rows), ""]
    return "\n".join([*lines, f"to try a real engine: {real or 'none: install one of the engines above'}"])


def _engine(name: str, chosen: bool) -> Diagnosis:
    if chosen:
        return registry.diagnose(name)
    remedy = "a run needs one: register a folder with it under pdsim.conf, or name one with --config-dir"
    return Diagnosis(name, works=False, reason=f"no file backend/{name}.yaml", remedy=remedy)


TURN = 33e-9
"""Seconds of a turn on hosts with 2 x H200 such as those of `data/live`: least of each set in benchmarks/probe-*."""

_FACTOR = "engine.host_factor"


def host(as_json: bool = False) -> str:
    """Return the text of ``doctor --host``: seconds of plain work, beside the hosts of pdsim's numbers."""
    from omegaconf import OmegaConf

    from backends.host_speed import measured

    least, middle, most = measure()
    rows = {"turn of a Python loop": {"unit": "s", "here": middle, "least": least, "most": most, "there": TURN}}
    for each in measured():
        if each.values:
            ends = {"least": min(each.values), "most": max(each.values)}
            rows[each.name] = {"unit": each.unit, "here": median(each.values), **ends, "there": None}
        else:
            rows[each.name] = {"unit": each.unit, "problem": each.problem, "there": None}
    factor, lines = min(10.0, max(0.1, least / TURN)), list[str]()
    for path in sorted((conf() / "calibration").glob("*.yaml")):
        file: Any = OmegaConf.load(path)
        turn = parse_time(str(file.get("turn", "0s")))
        if turn:
            lines.append(f"calibration={path.stem}: host_factor={least / turn:.2f}")
        elif hosts := file.get("hosts"):
            known = (
                f"its part of a transfer took {min(hosts):g} to {max(hosts):g} times as long on {len(hosts)} hosts"
            )
            lines.append(f"calibration={path.stem}: nobody timed the loop on its host; {known}")
    if as_json:
        return json.dumps({"measured": rows, "set": {_FACTOR: round(factor, 2)}, "calibrations": lines}, indent=2)
    table = [
        ["median of", "here", "least to most", "hosts with 2 x H200"],
        *(_row(name, rows[name]) for name in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    why = "least turn here by theirs: so many times as long take host costs of engines, and launches"
    return "\n".join([*text, f"{_FACTOR}={factor:.2f}  # {why}", *lines])


def _row(name: str, row: Mapping[str, Any]) -> list[str]:
    shown = format_rate if row["unit"] == "B/s" else format_time
    there = shown(row["there"]) if row["there"] else "not measured there"
    if "problem" in row:
        return [name, "no", row["problem"], there]
    return [name, shown(row["here"]), f"{shown(row['least'])} to {shown(row['most'])}", there]


def _package(name: str) -> Diagnosis:
    try:
        return Diagnosis(name, works=True, version=version(name))
    except PackageNotFoundError:
        lost, extra = _PACKAGES[name]
        return Diagnosis(name, works=False, reason=f"not installed: {lost}", remedy=f"pip install 'pdsim[{extra}]'")


def _server(engine: str) -> Diagnosis:
    version = installed(engine)
    if not version:
        remedy = f"install {engine}, or name the interpreter that has it with live.python"
        return Diagnosis(engine, works=False, reason="not installed for this Python", remedy=remedy)
    if not gpu_count() and "cpu" not in version:
        remedy = "name running servers with live.url, or live.prefill and live.decode"
        return Diagnosis(engine, works=False, reason=f"{version} is here, but no NVIDIA GPU", remedy=remedy)
    return Diagnosis(engine, works=True, version=version)


def _link() -> Diagnosis:
    problem = emulated_link.missing_requirements()
    reason, _, remedy = problem.partition("; ")
    return Diagnosis("hw=link", works=not problem, reason=reason, remedy=remedy)


def _table(diagnoses: Iterable[Diagnosis]) -> list[str]:
    every = list(diagnoses)
    width = max(16, *(len(one.name) for one in every))
    return [
        f"{one.name:<{width}} works  {one.version}".rstrip()
        if one.works
        else f"{one.name:<{width}} no     {one.reason}; {one.remedy}".rstrip("; ")
        for one in every
    ]
