# SPDX-License-Identifier: Apache-2.0
"""The engines that run in the RDMA guest, and the target that runs jobs there."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from backends import registry
from backends.emulation.guest import machine
from backends.emulation.guest.machine import PATIENCE, Guest, boot
from backends.emulation.guest.server import Recipe, Server
from backends.jobs.launcher import SILENCE
from pdsim.core.errors import BackendUnavailable
from pdsim.hardware.costs import Engine
from pdsim.transfer.job import Outcome, RankSpec

__all__ = ["Engines", "GuestTarget", "backends", "emulated", "missing_requirements"]

OWN = 1024
"""MiB of the guest's memory beside what ranks allocate: for its kernel, its files and their libraries; assumed."""


class Engines:
    """The servers of jobs in *guest*, one for each engine, started when first needed and kept until its end."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self._servers: dict[str, Server] = {}

    def server(self, name: str) -> Server:
        """Return the server of *name*, an implementation.  Raise `BackendUnavailable` if a part of it is missing."""
        if name not in self._servers:
            recipes = [variant.guest for variant in registry.variants(name) if variant.guest]
            if not recipes:
                raise BackendUnavailable(
                    f"{name} does not run in the guest; it takes backend={', '.join(backends())}"
                )
            self._servers[name] = _recipe(recipes[0]).server(self.guest)
        return self._servers[name]


class GuestTarget:
    """A `Target` for *engine* in the guest of *engines*; *options* are those of `backends.jobs.launcher.Processes`.

    Deadlines and startup are longer than on the host: by `PATIENCE` where no other is given.
    """

    def __init__(self, engines: Engines, engine: Engine, **options: Any) -> None:
        self.engines = engines
        self.engine = engine
        self.options = {"deadline": 3600.0, "startup": 60.0 * PATIENCE, **options}

    def run(
        self,
        ranks: Sequence[RankSpec],
        kill: Mapping[str, float] | None = None,
        restart: Mapping[str, float] | None = None,
    ) -> Outcome:
        job = (self.engine, list(ranks), dict(kill or {}), dict(restart or {}), self.options)
        server = self.engines.server(self.engine.implementation)
        outcome: Outcome = server.run(job, self.options["deadline"] + self.options["startup"] + 60.0 * PATIENCE)
        return outcome

    def using(self, engine: Engine) -> GuestTarget:
        """Return the same machine with another *engine*."""
        other = copy.copy(self)
        other.engine = engine
        return other


@contextlib.contextmanager
def emulated(engine: Engine, memory: int, silence: float = SILENCE, **options: Any) -> Iterator[GuestTarget]:
    """Yield a target for *engine* in a guest of its own, which has *memory* bytes for ranks; end it on the way out.

    *silence* and other *options* are those of `backends.jobs.launcher.Processes`, on a processor that is not
    emulated.
    """
    with boot(memory=(memory >> 20) + OWN) as guest:
        yield GuestTarget(Engines(guest), engine, silence=silence * PATIENCE, **options)


def backends() -> tuple[str, ...]:
    """Return the backends that run in the guest, as ``conf/backend`` names them."""
    return tuple(name for name in registry.backends() if _recipes(name))


def missing_requirements(backend: str) -> str:
    """Return what keeps *backend* from running in a guest of this machine, all of it in one line, or nothing."""
    recipes = _recipes(backend) if backend in registry.backends() else []
    if not recipes:
        others = ", ".join(backends())
        return f"it takes engines that go over RDMA: backend={others}; for backend={backend} use hw=loopback"
    problems = [machine.missing_requirements(), _recipe(recipes[0]).missing(backend)]
    return "; ".join(filter(None, problems))


def _recipes(backend: str) -> list[str]:
    return [variant.guest for variant in registry.variants_of(backend) if variant.guest]


def _recipe(reference: str) -> Recipe:
    module, _, name = reference.partition(":")
    recipe: Recipe = getattr(import_module(module), name)
    return recipe
