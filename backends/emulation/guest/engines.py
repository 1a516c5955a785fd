# SPDX-License-Identifier: Apache-2.0
"""The engines that run in the RDMA guest, from the host's side; `backends.emulation.guest.jobs` is the other."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends import registry
from backends.capabilities import Variant
from backends.emulation.guest import machine
from backends.emulation.guest.machine import DEVICE, PATIENCE, Guest, GuestFailed, boot
from backends.jobs.launcher import SILENCE
from pdsim.core.errors import BackendUnavailable
from pdsim.hardware.costs import Engine
from pdsim.transfer.job import Outcome, RankSpec

OWN = 1024  # MiB of memory beside what ranks allocate: for the kernel, its files and their libraries; assumed
START = 240.0  # seconds that a server may take to import everything, on an emulated processor; assumed


class Server:
    """A server of jobs in *guest* on the engine *name*, an implementation, that has imported *module*, its library.

    *python* is the command that runs Python there, *env* its extra variables.  `run` takes one job after the other.
    """

    def __init__(
        self, guest: Guest, name: str, module: str, python: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.guest, self.name = guest, name
        self._count = 0
        self._answer = "done"  # the latest; after another one nobody knows what the next would be about
        self._fifos = f"/run/{name}"
        self._log = guest.folder / f"{name}.log"
        interpreter = python or [sys.executable]
        command = shlex.join([*interpreter, "-m", "backends.emulation.guest.jobs", self._fifos, name, module])
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        environment = {"PYTHONPATH": path, "PDSIM_PATIENCE": f"{PATIENCE:g}", **(env or {})}
        script = (
            f"mkdir {self._fifos}; mkfifo {self._fifos}/jobs {self._fifos}/answers; "
            f"{{ setsid {command} > {self._log} 2>&1 < /dev/null; echo ended > {self._fifos}/answers; }} & "
            f'read answer < {self._fifos}/answers; [ "$answer" = ready ]'
        )
        status = guest.run("sh", "-c", script, timeout=START, env=environment).status
        if status:
            raise self._failure(f"did not start within {START:g} s" if status == 124 else "ended")

    def run(self, job: object, seconds: float) -> Any:
        """Run *job*, a tuple for `guest.jobs.serve`, and return its result or raise its exception.

        Raise `GuestFailed` if there is no answer within *seconds*, or the server has ended; then it is of no more
        use, since a late answer would be taken for the next job's.
        """
        if self._answer != "done":
            raise self._failure(f"cannot be used any more, an earlier job having been answered by {self._answer!r}")
        self._count += 1
        place = self.guest.folder / f"{self.name}{self._count}"
        place.mkdir()
        (place / "job").write_bytes(pickle.dumps(job))
        self._answer = self.guest.ask(self._fifos, f"{place}/job", seconds)
        if self._answer != "done":
            raise self._failure(f"is not done after {seconds:g} s" if self._answer == "late" else self._answer)
        result = pickle.loads((place / "result").read_bytes())  # noqa: S301 our own code wrote it, as the same user
        if isinstance(result, Exception):
            raise result
        return result

    def _failure(self, what: str) -> GuestFailed:
        text = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
        return GuestFailed(f"the server {self.name!r} in the guest {what}:\n{text}")


@dataclass(frozen=True)
class Recipe:
    """Starts servers of jobs on one implementation; `Variant.guest` names it as ``"module:object"``."""

    implementation: str
    module: str  # the library, which the server imports
    # prepares the guest; returns the command of its Python (default: this one) and variables; may raise
    # `BackendUnavailable`
    prepare: Callable[[Guest], tuple[Sequence[str], Mapping[str, str]]] = lambda _: ((), {})
    # what this machine lacks for a backend, besides what every guest needs: the guest's files are this machine's
    missing: Callable[[str], str] = registry.diagnose_library


_SYSTEM = {"libibverbs": "1", "libmlx5": "1", "libnl-3": "200", "libnl-route-3": "200"}
"""Libraries, with Debian's versions, that replace NIXL's own, which do not support soft-RoCE."""


def _with_soft_roce(guest: Guest) -> tuple[Sequence[str], Mapping[str, str]]:
    package = find_spec("nixl_cu13")
    if package is None or package.origin is None:
        raise BackendUnavailable("no package nixl-cu13: pip install 'pdsim[nixl]'")
    bundled = Path(package.origin).parent.with_name("nixl_cu13.libs")
    links = []
    for name, version in _SYSTEM.items():
        own, system = [*bundled.glob(f"{name}-????????.so*")], [*Path("/usr/lib").glob(f"*/{name}.so.{version}")]
        if len(own) != 1 or len(system) != 1:
            raise BackendUnavailable(
                f"there must be one {name} of NIXL in {bundled}, not {len(own)}, and one {name}.so.{version}, not "
                f"{len(system)}: apt-get install ibverbs-providers"
            )
        links.append(f"ln -sf {system[0]} {own[0]}")
    done = guest.run("bash", "-ec", "; ".join(links), timeout=60)
    if done.status:
        raise BackendUnavailable(f"NIXL's libraries in the guest: {done.output}")
    return (), {"UCX_NET_DEVICES": f"{DEVICE}:1"}


MOONCAKE = Recipe("mooncake", "mooncake.engine")
NIXL = Recipe("nixl", "nixl_cu13._api", _with_soft_roce)


@cache
def server(guest: Guest, name: str) -> Server:
    """Return the server of *name*, an implementation, in *guest*, started when first needed and kept until its end.

    Raise `BackendUnavailable` if a part of it is missing.
    """
    recipe = _recipe(registry.variants(name))
    if recipe is None:
        raise BackendUnavailable(f"{name} does not run in the guest; it takes backend={', '.join(backends())}")
    return Server(guest, recipe.implementation, recipe.module, *recipe.prepare(guest))


class GuestTarget:
    """A `Target` for *engine* in *guest*; *options* are those of `backends.jobs.launcher.Processes`.

    Deadlines and startup are longer than on the host: by `PATIENCE` where no other is given.
    """

    def __init__(self, guest: Guest, engine: Engine, **options: Any) -> None:
        self.guest, self.engine = guest, engine
        self.options = {"deadline": 3600.0, "startup": 60.0 * PATIENCE, **options}

    def run(
        self,
        ranks: Sequence[RankSpec],
        kill: Mapping[str, float] | None = None,
        restart: Mapping[str, float] | None = None,
    ) -> Outcome:
        job = (self.engine, list(ranks), dict(kill or {}), dict(restart or {}), self.options)
        seconds = self.options["deadline"] + self.options["startup"] + 60.0 * PATIENCE
        outcome: Outcome = server(self.guest, self.engine.implementation).run(job, seconds)
        return outcome

    def using(self, engine: Engine) -> GuestTarget:
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
        yield GuestTarget(guest, engine, silence=silence * PATIENCE, **options)


def backends() -> tuple[str, ...]:
    """Return the backends that run in the guest, as ``conf/backend`` names them."""
    return tuple(name for name in registry.backends() if any(way.guest for way in registry.variants_of(name)))


def missing_requirements(backend: str) -> str:
    """Return what keeps *backend* from running in a guest of this machine, all of it in one line, or nothing."""
    recipe = _recipe(registry.variants_of(backend)) if backend in registry.backends() else None
    if recipe is None:
        others = ", ".join(backends())
        return f"it takes engines that go over RDMA: backend={others}; for backend={backend} use hw=loopback"
    return "; ".join(filter(None, [machine.missing_requirements(), recipe.missing(backend)]))


def _recipe(ways: Sequence[Variant]) -> Recipe | None:
    reference = next((way.guest for way in ways if way.guest), "")
    if not reference:
        return None
    module, _, name = reference.partition(":")
    recipe: Recipe = getattr(import_module(module), name)
    return recipe
