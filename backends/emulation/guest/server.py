# SPDX-License-Identifier: Apache-2.0
"""Servers of jobs in the guest, from the host's side, and the recipes that start them; a `Variant` names one.

`backends.emulation.guest.jobs` is the other side.
"""

from __future__ import annotations

import os
import pickle
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from backends import registry
from backends.emulation.guest.machine import DEVICE, PATIENCE, Guest, GuestFailed
from pdsim.core.errors import BackendUnavailable

__all__ = ["MOONCAKE", "NIXL", "Installed", "Recipe", "Server"]

START = 240.0  # seconds that a server may take to import everything, on an emulated processor; assumed


class Server:
    """A server of jobs in *guest* on the engine *name*, an implementation, that has imported *module*, its library.

    *python* is the command that runs Python there, *env* its extra variables.  It is started when this
    is made; `run` takes one job after the other.  A job that is not answered in time makes it useless, since a late
    answer would be taken for the next job's.
    """

    def __init__(
        self,
        guest: Guest,
        name: str,
        module: str,
        python: Sequence[str] = (sys.executable,),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.guest = guest
        self.name = name
        self._count = 0
        self._answer = "done"  # the latest; after another one nobody knows what the next would be about
        self._fifos = f"/run/{name}"
        self._log = guest.folder / f"{name}.log"
        command = shlex.join([*python, "-m", "backends.emulation.guest.jobs", self._fifos, name, module])
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

        Raise `GuestFailed` if there is no answer within *seconds*, or the server has ended.
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


class Recipe(Protocol):
    """Starts servers of jobs on one implementation; `Variant.guest` names it as ``"module:object"``."""

    def server(self, guest: Guest) -> Server:
        """Return a server of jobs in *guest*; raise `BackendUnavailable` if this machine lacks a part of it."""

    def missing(self, backend: str) -> str:
        """Return what this machine lacks for *backend*, besides what every guest needs, or nothing."""


@dataclass(frozen=True)
class Installed:
    """A `Recipe` for an engine that runs in the guest as it is installed here."""

    implementation: str
    module: str  # the library, which the server imports
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the server's variables
    prepare: Callable[[Guest], None] = lambda _: None  # called before

    def server(self, guest: Guest) -> Server:
        """Return a server of jobs in *guest*."""
        self.prepare(guest)
        return Server(guest, self.implementation, self.module, env=self.environment)

    def missing(self, backend: str) -> str:
        """Return what is wrong with the library here, or nothing: the guest's files are this machine's."""
        return registry.diagnose_library(backend)


_SYSTEM = {"libibverbs": "1", "libmlx5": "1", "libnl-3": "200", "libnl-route-3": "200"}
"""Libraries, with Debian's versions, that replace NIXL's own, which do not support soft-RoCE."""


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
        raise BackendUnavailable(f"there must be one {what}, not {len(paths)}")
    return paths[0]


MOONCAKE = Installed("mooncake", "mooncake.engine")

NIXL = Installed("nixl", "nixl_cu13._api", {"UCX_NET_DEVICES": f"{DEVICE}:1"}, _give_soft_roce)
