# SPDX-License-Identifier: Apache-2.0
"""Engines in the RDMA guest as they are installed here: Mooncake unchanged, NIXL with the system's RDMA libraries.

Those that NIXL brings know no soft-RoCE.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from backends.emulation.guest.machine import DEVICE, Guest
from backends.emulation.guest.recipe import Installed
from pdsim.core.errors import BackendUnavailable

__all__ = ["MOONCAKE", "NIXL"]

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


def _only(found: Iterator[Path], what: str) -> Path:
    paths = list(found)
    if len(paths) != 1:
        raise BackendUnavailable(f"there must be one {what}, found {len(paths)}")
    return paths[0]


MOONCAKE = Installed("mooncake", "mooncake.engine")

NIXL = Installed("nixl", "nixl_cu13._api", {"UCX_NET_DEVICES": f"{DEVICE}:1"}, _give_soft_roce)
