# SPDX-License-Identifier: Apache-2.0
"""How an engine is started in the RDMA guest: what a `Variant` names as its ``guest``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from backends import registry
from backends.emulation.guest.machine import Guest
from backends.emulation.guest.server import Server

__all__ = ["Installed", "Recipe"]


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
