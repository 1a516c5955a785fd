# SPDX-License-Identifier: Apache-2.0
"""Recipes that start engines in the RDMA guest; a `Variant` names one as its ``guest``.

Mooncake runs there as it is installed here, NIXL with the system's RDMA libraries: its own know no soft-RoCE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from backends import registry
from backends.emulation.guest.machine import DEVICE, Guest
from backends.emulation.guest.server import Server
from pdsim.core.errors import BackendUnavailable

__all__ = ["MOONCAKE", "NIXL", "Installed", "Recipe"]


class Recipe(Protocol):
    """Starts servers of jobs on one implementation.

    Registered by name: `Variant.guest` is ``"module:object"``.  Only what is needed is imported.
    """

    def server(self, guest: Guest) -> Server:
        """Return a server of jobs in *guest*; raise `BackendUnavailable` if this machine lacks a part of it."""

    def missing(self, backend: str) -> str:
        """Return what this machine lacks for *backend*, besides what every guest needs, or nothing."""


@dataclass(frozen=True)
class Installed:
    """A `Recipe` for an engine that runs in the guest as it is installed here.

    The server imports *module*, the library, with *environment* added to its variables; *prepare* is called with the
    guest before.
    """

    implementation: str
    module: str
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Guest], None] | None = None

    def server(self, guest: Guest) -> Server:
        """Return a server of jobs in *guest*; see `Recipe.server`."""
        if self.prepare is not None:
            self.prepare(guest)
        return Server(guest, self.implementation, self.module, env=self.environment)

    def missing(self, backend: str) -> str:
        """Return what is wrong with the library here, or nothing: the guest's files are this machine's."""
        return registry.diagnose_library(backend)


_SYSTEM = {"libibverbs": "1", "libmlx5": "1", "libnl-3": "200", "libnl-route-3": "200"}
"""Libraries of which NIXL brings its own, and their versions on Debian."""


def _give_soft_roce(guest: Guest) -> None:
    package = find_spec("nixl_cu13")
    if package is None or package.origin is None:
        raise BackendUnavailable("no package nixl-cu13: pip install 'pdsim[nixl]'")
    bundled = Path(package.origin).parent.with_name("nixl_cu13.libs")
    links = []
    for name, version in _SYSTEM.items():
        own = _only(bundled.glob(f"{name}-????????.so*"), f"{name} of NIXL in {bundled}")
        system = _only(
            Path("/usr/lib").glob(f"*/{name}.so.{version}"),
            f"{name}.so.{version}: apt-get install ibverbs-providers",
        )
        links.append(f"ln -sf {system} {own}")
    done = guest.run("bash", "-ec", "; ".join(links), timeout=60)
    if done.status:
        raise BackendUnavailable(f"NIXL's libraries in the guest: {done.output}")


def _only(candidates: Iterator[Path], what: str) -> Path:
    paths = list(candidates)
    if len(paths) != 1:
        raise BackendUnavailable(f"there must be one {what}, found {len(paths)}")
    return paths[0]


MOONCAKE = Installed("mooncake", "mooncake.engine")

NIXL = Installed("nixl", "nixl_cu13._api", {"UCX_NET_DEVICES": f"{DEVICE}:1"}, _give_soft_roce)
