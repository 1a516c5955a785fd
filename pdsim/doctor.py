"""`pdsim doctor`: what works on this machine, and for what does not, why and what would help."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from textwrap import indent

from backends import registry
from backends.registry import Diagnosis
from pdsim import __version__
from pdsim.units import format_size

__all__ = ["report"]


def report() -> str:
    """Return the text of the report.  Probes every engine's library in a process of its own, which takes seconds."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {format_size(memory)}, Python {platform.python_version()}"
    engines = [registry.diagnose(name) for name in registry.engines()]
    usable = [engine.name for engine in engines if engine.works]
    real = (
        f"pdsim run target=real hw=loopback backend={usable[0]}" if usable else "none: install one of the engines above"
    )
    others = sorted(set(registry.names()) - {"mooncake", "nixl", "nvlink", "mori"})
    return "\n".join(
        (
            f"pdsim {__version__} on {machine}",
            "",
            "the model (target=model): works, and needs nothing more",
            "",
            "devices",
            indent(_table(registry.devices()), "  "),
            "",
            "engines (target=real, backend=NAME)",
            indent(_table(engines), "  "),
            *([f"  from other packages: {', '.join(others)}"] if others else []),
            "",
            f"to try a real engine: {real}",
        )
    )


def _table(found: Iterable[Diagnosis]) -> str:
    return "\n".join(_row(one) for one in found)


def _row(one: Diagnosis) -> str:
    if one.works:
        return f"{one.name:<16} works  {one.version}".rstrip()
    return f"{one.name:<16} no     {one.reason}; {one.remedy}"
