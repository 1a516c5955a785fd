# SPDX-License-Identifier: Apache-2.0
"""The libraries that groups of real ranks gather with: entry points of the group ``pdsim.collectives``.

Each is a `Library` class.  Those of pdsim come with PyTorch, which is imported on the thread that connects a group:
a rank in no group never loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backends.base.device import HostDevice
from backends.collectives.base import Library, Settings
from pdsim.core import plugins
from pdsim.core.errors import BackendUnavailable, ConfigError, instead
from pdsim.hardware.costs import Collective

__all__ = ["check", "library"]


def library(settings: Settings, device: Any) -> Library:
    """Return what *settings* choose, for the memory of *device*.

    Raise `BackendUnavailable` if it is not installed, and a `ConfigError` if it cannot move that memory.

    *settings* come from the job's configuration, by way of `backends.jobs.supervision.Start`.
    """
    chosen: type[Library] = plugins.resolve(plugins.COLLECTIVES, settings.implementation)
    if problem := chosen.missing():
        raise BackendUnavailable(f"collective={settings.name} {problem}")
    memory = "host" if isinstance(device, HostDevice) else "gpu"
    if chosen.memory != memory:
        fit = [name for name in plugins.names(plugins.COLLECTIVES) if _memory(name) == memory]
        raise ConfigError(
            f"collective={settings.name} does not gather memory of {device.name}; "
            f"choose collective={' or '.join(fit)}"
        )
    opened = chosen(device, settings.timeout)
    opened.timing = settings.timing
    return opened


def check(collective: Collective) -> Iterator[str]:
    """Yield if no package provides the library of *collective*, or if it cannot time what it is asked to."""
    known = plugins.names(plugins.COLLECTIVES)
    if collective.implementation not in known:
        yield (
            f"collective.implementation={collective.implementation} is provided by no package; "
            f"{instead(collective.implementation, known)}"
        )
    elif collective.timing == "device":
        chosen: type[Library] = plugins.resolve(plugins.COLLECTIVES, collective.implementation)
        if not chosen.times_device:
            yield (
                f"collective.timing=device: real ranks take it between two events of a GPU's stream, and "
                f"collective={collective.name} gathers memory of the {chosen.memory}; use timing=caller"
            )


def _memory(name: str) -> str:
    return str(plugins.resolve(plugins.COLLECTIVES, name).memory)
