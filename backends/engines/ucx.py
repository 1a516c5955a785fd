# SPDX-License-Identifier: Apache-2.0
"""The transports of UCX under NIXL: how they are chosen, which it may report, and how its log names them.

Of an agent and its transfers this module knows nothing: that is `backends.engines.nixl`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.capabilities import EngineLibrary, Variant

__all__ = ["LO", "NIXL", "NO_IB", "GpuTransports", "Transports", "between_gpus", "between_hosts", "has_rdma"]

LO = {"UCX_NET_DEVICES": "lo"}  # or it also listens on the other interfaces, and advertises them
NO_IB = {"UCX_MODULES": "^ib"}  # its libnl and the system's in one process crash at exit
NIXL = EngineLibrary("import nixl_cu13", ("nixl-cu13",), "pip install --no-deps nixl-cu13==1.5.1")


@dataclass(frozen=True, kw_only=True)
class Transports(Variant):
    """Settings that choose transports of UCX, and those that it may then report.

    With transports that are not *allowed* the endpoint is refused, since results would be of those.
    """

    requires: EngineLibrary | None = NIXL
    posting_threads: bool = True
    environment: Mapping[str, str]  # variables that make the variant what it is; ``backend.options`` override them
    defaults: Mapping[str, str]  # of the environment, which may be set otherwise
    error_handling: str  # of UCX: "peer", or "none" where a transport has none
    allowed: frozenset[str]  # transports that UCX may report


class GpuTransports:
    """The log of UCX, at *path*, in which it says what it chose for GPU memory; a file without a name.

    It stays open, for UCX writes on.
    """

    def __init__(self) -> None:
        self.path = f"/proc/self/fd/{os.memfd_create('ucx')}"
        self._read = 0  # bytes

    def read(self) -> set[str]:
        """Return the transports, or none before UCX has named them or if nothing is new."""
        ctypes.CDLL(None).fflush(None)  # or the last lines would still be in UCX's buffer
        size = os.stat(self.path).st_size  # noqa: PTH116 no path of a file
        if size == self._read:
            return set()
        self._read = size
        return between_gpus(Path(self.path).read_text(errors="replace"))


def has_rdma() -> bool:
    """Return whether Linux has an RDMA device."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def between_gpus(log: str) -> set[str]:
    """Return the transports that UCX's tables name for writes and reads between GPUs.

    Such a table has the title ``remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda/dev[3]`` and rows like
    ``| 0..inf | zero-copy | cuda_ipc/cuda |``.
    """
    transports: set[str] = set()
    between_gpus = False
    for line in log.splitlines():
        if " by ucp_" in line:
            between_gpus = "remote memory" in line and line.count("cuda/") == 2
        elif between_gpus and (row := re.search(r"\| +\d+(?:\.\.\w+)? +\|[^|]+\| +(\w+)/", line)):
            transports.add(row[1])
    return transports


def between_hosts(log: str) -> set[str]:
    """Return the transports that UCX's log names for its connection to itself.

    Its lines are like ``cfg#0 rma(posix/memory) am(...)``.
    """
    return set(re.findall(r"(\w+)/", " ".join(re.findall(r"cfg#\d+ (.*)", log))))
