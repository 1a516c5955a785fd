"""What each engine needs in the guest, and the targets that tests run their jobs on."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pdsim.fabric.machine import Engine
from tests.rdma.guest import DEVICE, Guest
from tests.rdma.image import GuestUnavailable
from tests.rdma.mori import serving
from tests.rdma.target import GuestTarget, Server

__all__ = ["VERBS", "Engines", "unavailable"]

VERBS = ("mooncake_verbs", "nixl_verbs", "mori_verbs")
"""What tests call the backends ``mooncake``, ``nixl`` and ``mori`` on host memory in the guest."""

_MODULES = {"mooncake": "mooncake.engine", "nixl": "nixl_cu13._api"}
_ENVIRONMENT = {"mooncake": {}, "nixl": {"UCX_NET_DEVICES": f"{DEVICE}:1"}}
_PROGRAMS = ("tests.conformance.programs", "experiments.serve")
_SYSTEM = {"libibverbs": "1", "libmlx5": "1", "libnl-3": "200", "libnl-route-3": "200"}
"""Libraries of which NIXL brings its own, which know no soft-RoCE, and their versions on Debian."""


def unavailable(error: GuestUnavailable) -> NoReturn:
    """Skip the test that needs what this machine lacks, or fail it where engines are required."""
    if os.environ.get("PDSIM_REQUIRE_ENGINES"):
        pytest.fail(str(error))
    pytest.skip(str(error))


class Engines:
    """The servers of jobs in *guest*, one for each engine, each started when it is first needed."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self._servers: dict[str, Server] = {}

    def target(self, engine: Engine, **options: Any) -> GuestTarget:
        """Return the target for *engine*, one of those of `VERBS`; *options* are `Processes`'s."""
        name = engine.name
        if name not in self._servers:
            try:
                self._servers[name] = self._start(name)
            except GuestUnavailable as error:
                unavailable(error)
        return GuestTarget(self._servers[name], engine, **options)

    def _start(self, name: str) -> Server:
        if name == "mori":
            return serving.server(self.guest, _PROGRAMS)
        if name == "nixl":
            self._give_nixl_soft_roce()
        return Server(self.guest, name, (*_PROGRAMS, f"backends.{name}", _MODULES[name]), env=_ENVIRONMENT[name])

    def _give_nixl_soft_roce(self) -> None:
        """Replace NIXL's own RDMA libraries by the system's, in the guest only, whose files are copies."""
        package = find_spec("nixl_cu13")
        assert package is not None
        assert package.origin is not None
        bundled = Path(package.origin).parent.with_name("nixl_cu13.libs")
        links = []
        for name, version in _SYSTEM.items():
            (own,) = bundled.glob(f"{name}-????????.so*")
            (system,) = Path("/usr/lib").glob(f"*/{name}.so.{version}")
            links.append(f"ln -sf {system} {own}")
        done = self.guest.run("bash", "-ec", "; ".join(links), timeout=60)
        assert not done.status, done.output
