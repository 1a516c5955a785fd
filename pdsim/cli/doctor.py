# SPDX-License-Identifier: Apache-2.0
"""`pdsim doctor`: what works on this machine, and for what does not, why and what would help.

Every line is a `backends.diagnosis.Diagnosis`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from backends import registry
from backends.diagnosis import Diagnosis, devices, gpu_count
from backends.emulation.link import emulated_link
from backends.live.commands import MODULES
from backends.live.live_deployment import installed
from pdsim.calibration.definition import measure
from pdsim.core import clock
from pdsim.core.plugins import conf, describe, groups, options
from pdsim.core.units import format_size, parse_time
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
    engines = [registry.diagnose(name) for name in registry.backends()]
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


def host() -> str:
    """Return the text of ``doctor --host``: a second of plain Python, beside the hosts of the calibrations."""
    from omegaconf import OmegaConf

    least, middle, most = measure()
    lines = [f"a turn of a Python loop takes {middle * 1e9:.1f} ns here ({least * 1e9:.1f} to {most * 1e9:.1f})"]
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
    return "\n".join(lines)


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
