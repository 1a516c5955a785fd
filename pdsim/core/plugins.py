# SPDX-License-Identifier: Apache-2.0
"""What packages provide under a name: backends, experiments, schedulers and so on, all by entry points.

Built-in implementations are registered the same way, in pdsim's own ``pyproject.toml``.  Listing names imports
nothing.

A package registers what it has in its ``pyproject.toml``, in a group of those below::

    [project.entry-points."pdsim.schedulers"]
    shortest = "my_package.policies:Shortest"

Names are unique among all installed packages of a group; where two register one name, one of them wins.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pdsim.core.errors import BackendUnavailable, ConfigError
from pdsim.core.guards import instead

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "BACKENDS",
    "COLLECTIVES",
    "CONF",
    "EXECUTORS",
    "EXPERIMENTS",
    "HANDOFFS",
    "ROUTERS",
    "SCHEDULERS",
    "names",
    "provider",
    "resolve",
    "target",
]

BACKENDS = "pdsim.backends"
"""Endpoint classes of real engines."""
COLLECTIVES = "pdsim.collectives"
"""Classes of libraries that real ranks gather with."""
CONF = "pdsim.conf"
"""Packages that hold configuration groups, as pdsim's own ``conf`` does."""
EXECUTORS = "pdsim.executors"
"""Classes that run the points of a sweep: `pdsim.sweep.executors.Executor`."""
EXPERIMENTS = "pdsim.experiments"
"""Modules with a `pdsim.config.ExperimentOptions` of that name, ``run`` and, where needed, ``check``."""
SCHEDULERS = "pdsim.schedulers"
"""Classes that decide what runs in a step: `pdsim.serving.seams.Scheduler`."""
HANDOFFS = "pdsim.handoffs"
"""Classes that say who moves the KV: `pdsim.serving.seams.Handoff`."""
ROUTERS = "pdsim.routers"
"""Classes that choose instances: `pdsim.serving.seams.RouterPolicy`."""


@cache
def _every() -> dict[str, dict[str, EntryPoint]]:
    """Return all entry points by group and name: they are read once, from a file of every installed package."""
    from importlib.metadata import entry_points  # 20 ms, which `pdsim --help` does without

    found = entry_points()
    return {group: {entry.name: entry for entry in found.select(group=group)} for group in found.groups}


def _found(group: str) -> dict[str, EntryPoint]:
    return _every().get(group, {})


def names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages register under the entry-point *group*, sorted."""
    return tuple(sorted(_found(group)))


def target(group: str, name: str) -> str:
    """Return what *name* under *group* refers to, "module" or "module:object", without importing it."""
    return _found(group)[name].value


def provider(group: str, name: str) -> str:
    """Return the distribution that registers *name* under *group*, or nothing if none does."""
    entry = _found(group).get(name)
    return entry.dist.name if entry is not None and entry.dist is not None else ""


@cache
def resolve(group: str, name: str) -> Any:
    """Return the object that is registered as *name* under *group*.

    Raise a `ConfigError` that lists what there is if nothing is, and `BackendUnavailable` if it cannot be imported.

    The object is imported once and kept; what a module does at import happens then.
    """
    found = _found(group)
    if name not in found:
        raise ConfigError(
            f"nothing is registered as {name!r} under the entry-point group {group!r}; "
            f"{instead(name, sorted(found))}"
        )
    try:
        return found[name].load()
    except ImportError as error:
        raise BackendUnavailable(f"{name!r} ({found[name].value}) cannot be imported: {error}") from error
