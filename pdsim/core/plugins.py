# SPDX-License-Identifier: Apache-2.0
"""What installed packages provide: implementations under a name, by entry points, and groups of YAML files.

A package registers what it has in its ``pyproject.toml``, as pdsim itself does, in a group of those below::

    [project.entry-points."pdsim.schedulers"]
    shortest = "my_package.policies:Shortest"

A configuration group, such as ``hw``, is a folder of YAML files, its options, within pdsim's ``conf`` or within a
package that an entry point of ``pdsim.conf`` names.  Listing names imports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdsim.core.errors import BackendUnavailable, ConfigError, instead
from pdsim.core.files import text

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


AUTOSCALERS = "pdsim.autoscalers"
"""Functions that say how many instances run: `pdsim.serving.autoscale`."""
BACKENDS = "pdsim.backends"
"""Endpoint classes of real engines."""
COLLECTIVES = "pdsim.collectives"
"""Classes of libraries that real ranks gather with."""
CONF = "pdsim.conf"
"""Packages that hold configuration groups, as pdsim's own ``conf`` does."""
EXECUTORS = "pdsim.executors"
"""Classes that run the points of a sweep: `pdsim.sweep.executors.Executor`."""
EXPERIMENTS = "pdsim.experiments"
"""Modules with a `pdsim.config.ExperimentOptions` of that name, ``run`` and, where needed, ``check``.

They may declare ``TARGETS``, by default ``("model", "real")``; ``SERVES = True`` if prefill and decode instances are
placed as ``parallel`` says, so that the rules of serving apply; and ``KEEPS_FILES = True`` if ``run`` takes the
*folder* of the run for files of its own.
"""
SCHEDULERS = "pdsim.schedulers"
"""Classes that decide what runs in a step: `pdsim.serving.policies.Scheduler`."""
HANDOFFS = "pdsim.handoffs"
"""Classes that say who moves the KV: `pdsim.serving.policies.Handoff`."""
ROUTERS = "pdsim.routers"
"""Classes that choose instances: `pdsim.serving.policies.RouterPolicy`."""
TRACKERS = "pdsim.trackers"
"""Functions that are called with each point of a sweep: `pdsim.sweep.trackers`."""


@cache
def _every() -> dict[str, dict[str, EntryPoint]]:
    from importlib.metadata import entry_points  # 20 ms, which `pdsim --help` does without

    entries = entry_points()
    own = (group for group in entries.groups if group.startswith("pdsim."))  # each is looked for among all entries
    return {group: {entry.name: entry for entry in entries.select(group=group)} for group in own}


def _entries(group: str) -> dict[str, EntryPoint]:
    return _every().get(group, {})


def names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages register under the entry-point *group*, sorted."""
    return tuple(sorted(_entries(group)))


def target(group: str, name: str) -> str:
    """Return what *name* under *group* refers to, "module" or "module:object", without importing it."""
    return _entries(group)[name].value


def provider(group: str, name: str) -> str:
    """Return the distribution that registers *name* under *group*, or nothing if none does."""
    entry = _entries(group).get(name)
    return entry.dist.name if entry is not None and entry.dist is not None else ""


@cache
def resolve(group: str, name: str) -> Any:
    """Return the object that is registered as *name* under *group*.

    Raise a `ConfigError` that lists what there is if nothing is, and `BackendUnavailable` if it cannot be imported.
    """
    entries = _entries(group)
    if name not in entries:
        raise ConfigError(
            f"nothing is registered as {name!r} under the entry-point group {group!r}; "
            f"{instead(name, sorted(entries))}"
        )
    try:
        return entries[name].load()
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(f"{name!r} ({entries[name].value}) cannot be imported: {error}") from error


def require(what: str, extra: str, *packages: str) -> None:
    """Raise a `ConfigError` unless *packages*, which *what* needs and pdsim's *extra* brings, are installed."""
    if absent := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(f"{what} needs {' and '.join(absent)}; pip install 'pdsim[{extra}]'")


def missing(group: str, name: str) -> str:
    """Return what the class registered as *name* under *group* lacks on this machine; "" if nothing, or no class."""
    return str(resolve(group, name).missing()) if name in names(group) else ""


def conf() -> Path:
    """Return the folder of the configuration groups, without importing it."""
    spec = find_spec("conf")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def folders() -> dict[str, Path]:
    """Return the folders of configuration groups by package: pdsim's own, then those of other packages."""
    folders_by_name = {"conf": conf()}
    for name in names(CONF):
        package = target(CONF, name)
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            folders_by_name[package] = Path(spec.origin).parent
    return folders_by_name


@cache
def _shipped() -> dict[str, list[str]]:
    choices: dict[str, list[str]] = {}
    for folder in folders().values():
        for group, own in _choices(folder).items():
            choices[group] = sorted({*choices.get(group, ()), *own})
    return choices


def _choices(folder: Path) -> dict[str, list[str]]:
    choices = {path.name: [file.stem for file in path.glob("*.yaml")] for path in folder.iterdir() if path.is_dir()}
    return {group: files for group, files in choices.items() if files}


def groups(own: Sequence[Path] = ()) -> list[str]:
    """Return the names of the configuration groups of pdsim and of the folders *own*."""
    return sorted({*_shipped(), *(group for folder in own for group in _choices(folder))})


def options(group: str, own: Sequence[Path] = ()) -> list[str]:
    """Return what can be chosen in *group*, sorted, of installed packages and the folders *own*."""
    choices = (_choices(folder).get(group, ()) for folder in own)
    return sorted({*_shipped().get(group, ()), *(name for chosen in choices for name in chosen)})


def describe(group: str, option: str, own: Sequence[Path] = ()) -> str:
    """Return the first comment of the file of *option* that is not a directive of Hydra's; *own* folders first."""
    files = (folder / group / f"{option}.yaml" for folder in (*own, *folders().values()))
    lines = text(next(path for path in files if path.is_file())).splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
    return next((comment for comment in comments if not comment.startswith("@")), "")
