"""What each engine needs in the guest, and the target that runs jobs there."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends import registry
from backends.emulation.guest import machine
from backends.emulation.guest.image import GuestUnavailable
from backends.emulation.guest.machine import DEVICE, PATIENCE, Guest, boot
from backends.emulation.guest.mori import serving
from backends.emulation.guest.server import Server
from backends.jobs.launcher import SILENCE
from pdsim.costs import Engine
from pdsim.job import Outcome, RankSpec

__all__ = ["ENGINES", "Engines", "GuestTarget", "emulated", "lacking"]

ENGINES = ("mooncake", "nixl", "mori", "mori_inline")
"""Those that go over RDMA, as ``conf/backend`` names them."""

OWN = 1024
"""MiB of the guest's memory beside what ranks allocate: for its kernel, its files and their libraries; assumed."""

_MODULES = {"mooncake": "mooncake.engine", "nixl": "nixl_cu13._api"}
_ENVIRONMENT = {"mooncake": {}, "nixl": {"UCX_NET_DEVICES": f"{DEVICE}:1"}}
_SYSTEM = {"libibverbs": "1", "libmlx5": "1", "libnl-3": "200", "libnl-route-3": "200"}
"""Libraries of which NIXL brings its own, which know no soft-RoCE, and their versions on Debian."""


class Engines:
    """The servers of jobs in *guest*, one for each engine, each started when it is first needed."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self._servers: dict[str, Server] = {}

    def server(self, name: str) -> Server:
        """Return the server of jobs on *name*, an implementation.

        Raise `GuestUnavailable` if this machine lacks what it is made of.
        """
        if name not in self._servers:
            self._servers[name] = self._start(name)
        return self._servers[name]

    def _start(self, name: str) -> Server:
        if name == "mori":
            return serving.server(self.guest)
        if name == "nixl":
            self._give_nixl_soft_roce()
        return Server(self.guest, name, _MODULES[name], env=_ENVIRONMENT[name])

    def _give_nixl_soft_roce(self) -> None:
        """Replace NIXL's own RDMA libraries by the system's, in the guest only, whose files are copies."""
        package = find_spec("nixl_cu13")
        if package is None or package.origin is None:
            raise GuestUnavailable("no package nixl-cu13: pip install 'pdsim[nixl]'")
        bundled = Path(package.origin).parent.with_name("nixl_cu13.libs")
        links = []
        for name, version in _SYSTEM.items():
            own = _only(bundled.glob(f"{name}-????????.so*"), f"{name} of NIXL in {bundled}")
            system = _only(
                Path("/usr/lib").glob(f"*/{name}.so.{version}"),
                f"{name}.so.{version}: apt-get install ibverbs-providers",
            )
            links.append(f"ln -sf {system} {own}")
        done = self.guest.run("bash", "-ec", "; ".join(links), timeout=60)
        if done.status:
            raise GuestUnavailable(f"NIXL's libraries in the guest: {done.output}")


def _only(found: Iterator[Path], what: str) -> Path:
    paths = list(found)
    if len(paths) != 1:
        raise GuestUnavailable(f"there must be one {what}, found {len(paths)}")
    return paths[0]


class GuestTarget:
    """A `Target` for *engine* in the guest of *engines*; *options* are those of `backends.jobs.launcher.Processes`."""

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
        """Run *ranks* in the guest; see `pdsim.transfer.Target.run`."""
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

    *silence* is that of `backends.jobs.launcher.Processes` on a processor that is not emulated.
    """
    with boot(memory=(memory >> 20) + OWN) as guest:
        yield GuestTarget(Engines(guest), engine, silence=silence * PATIENCE, **options)


def lacking(name: str) -> str:
    """Return what keeps engine *name* from running in a guest of this machine, all of it, or nothing."""
    if name not in ENGINES:
        return f"it takes engines that go over RDMA: backend={', '.join(ENGINES)}; for backend={name} use hw=loopback"
    problems = [machine.lacking()]
    problems += [serving.lacking()] if name in ("mori", "mori_inline") else [registry.diagnose_library(name)]
    return "; ".join(filter(None, problems))
