"""Which engines there are: entry points of the group ``pdsim.backends``, each an `Endpoint` class.

Built-in engines use the same way in as those of other packages.  Names are listed without importing anything.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from pdsim.errors import BackendUnavailable, ConfigError

__all__ = ["GROUP", "Diagnosis", "devices", "diagnose", "engines", "load", "names"]

GROUP = "pdsim.backends"


def names() -> tuple[str, ...]:
    """Return the names of all implementations, without importing them."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def load(name: str) -> Any:
    """Return the endpoint class called *name*.

    Raise a `ConfigError` that lists what there is if there is no such implementation, and `BackendUnavailable` if its
    module cannot be imported.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise ConfigError(
            f"no implementation {name!r} among {', '.join(sorted(found)) or 'none'}; install a package that registers "
            f"it under the entry-point group {GROUP!r}"
        )
    try:
        return found[name].load()
    except ImportError as error:
        raise BackendUnavailable(f"{name!r} ({found[name].value}) cannot be imported: {error}") from error


# --- what works here ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diagnosis:
    """Whether an engine or a device works on this machine, and if not, why and what would help."""

    name: str
    works: bool
    version: str = ""
    reason: str = ""  # why not, in one line
    remedy: str = ""  # what to install or do


@dataclass(frozen=True)
class _Library:
    """How an engine's library is probed: in a process of its own, for native libraries do not always fail politely."""

    module: str
    distributions: tuple[str, ...]
    install: str


_MOONCAKE = _Library(
    "mooncake.engine",
    ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine"),
    "pip install 'pdsim[mooncake]'; apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4",
)
_NIXL = _Library("nixl_cu13", ("nixl-cu13",), "pip install 'pdsim[nixl]'")
_MORI = _Library("mori.io", ("amd-mori",), "pip install 'pdsim[mori]' on a machine with ROCm 7 and Python 3.12")
_ENGINES: dict[str, tuple[_Library, str]] = {
    # name: the library, and what it needs beside it
    "mooncake_tcp": (_MOONCAKE, ""),
    "mooncake_nvlink": (_MOONCAKE, "gpu"),
    "mooncake": (_MOONCAKE, "rdma"),
    "nixl_tcp": (_NIXL, ""),
    "nixl_shm": (_NIXL, ""),
    "nixl": (_NIXL, "gpu"),
    "mori": (_MORI, "gpu"),
}


@cache
def diagnose(name: str) -> Diagnosis:
    """Return whether the engine *name* (as in ``conf/backend``) works here; a `ConfigError` for an unknown one."""
    if name not in _ENGINES:
        raise ConfigError(f"no engine {name!r} among {', '.join(_ENGINES)}")
    library, need = _ENGINES[name]
    found = _installed(library)
    error = _import_error(library.module)
    if error:
        return Diagnosis(name, works=False, version=found, reason=error, remedy=library.install)
    if need:
        lacking = next((device for device in devices() if device.name == need and not device.works), None)
        reason = lacking.reason if lacking else "this version of pdsim drives host memory only"
        remedy = "use target=model, or a backend that moves host memory: mooncake_tcp, nixl_tcp, nixl_shm"
        return Diagnosis(name, works=False, version=found, reason=reason, remedy=remedy)
    return Diagnosis(name, works=True, version=found)


def engines() -> tuple[str, ...]:
    """Return the names that `diagnose` knows."""
    return tuple(_ENGINES)


def devices() -> tuple[Diagnosis, ...]:
    """Return what memory and networks this machine has: GPUs, RDMA devices, shared memory, cross-memory attach."""
    return (_gpus(), _rdma(), _shm(), _cma())


def _installed(library: _Library) -> str:
    for distribution in library.distributions:
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return ""


@cache
def _import_error(module: str) -> str:
    """Return the last line of what importing *module* in a new process says, or nothing if it works."""
    environment = {**os.environ, "UCX_MODULES": "^ib"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}, os; os._exit(0)"],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing {module} did not end within 60 s"
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"importing {module} ended with exit code {done.returncode}"


def _gpus() -> Diagnosis:
    if ctypes.util.find_library("cuda") and (tool := shutil.which("nvidia-smi")):
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
        if not listing.returncode and listing.stdout:
            return Diagnosis("gpu", works=True, version=f"{len(listing.stdout.splitlines())} NVIDIA GPUs")
        return Diagnosis("gpu", works=False, reason="nvidia-smi finds no GPU", remedy="check the NVIDIA driver")
    if Path("/dev/kfd").exists():
        return Diagnosis("gpu", works=True, version="AMD GPUs (/dev/kfd)")
    return Diagnosis("gpu", works=False, reason="no NVIDIA driver and no /dev/kfd", remedy="a machine with GPUs")


def _rdma() -> Diagnosis:
    folder = Path("/sys/class/infiniband")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if found:
        return Diagnosis("rdma", works=True, version=", ".join(found))
    remedy = "a machine with RDMA NICs and their drivers"
    return Diagnosis("rdma", works=False, reason=f"no device in {folder}", remedy=remedy)


def _shm() -> Diagnosis:
    folder = Path("/dev/shm")  # noqa: S108 it is what is looked for
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Diagnosis(
            "shm", works=False, reason=f"{folder} cannot be written to", remedy=f"mount a tmpfs at {folder}"
        )
    free = shutil.disk_usage(folder).free
    return Diagnosis("shm", works=True, version=f"{free / 2**20:.0f} MiB free in {folder}")


def _cma() -> Diagnosis:
    """Look whether a process may read its sibling's memory, as UCX's cross-memory attach does."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    value = scope.read_text().strip() if scope.exists() else "0"
    if value == "0" or os.geteuid() == 0:
        return Diagnosis("cma", works=True, version=f"ptrace_scope {value}" if scope.exists() else "")
    reason = f"{scope} is {value}: UCX copies through shared memory instead, which is slower"
    return Diagnosis("cma", works=False, reason=reason, remedy="sysctl kernel.yama.ptrace_scope=0")
