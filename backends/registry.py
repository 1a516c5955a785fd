"""Which engines there are: entry points of the group ``pdsim.backends``, each an `Endpoint` class.

Built-in engines use the same way in as those of other packages.  Names are listed without importing anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pdsim import plugins
from pdsim.errors import ConfigError

__all__ = [
    "MOONCAKE", "MOONCAKE_CUDA", "MORI", "NIXL", "Diagnosis", "Library", "devices", "diagnose",
    "diagnose_library", "engines", "gpu_count", "load", "names",
]  # fmt: skip


def names() -> tuple[str, ...]:
    """Return the names of all implementations, without importing them."""
    return plugins.names(plugins.BACKENDS)


def load(name: str) -> Any:
    """Return the endpoint class called *name*; the errors of `pdsim.plugins.resolve`."""
    return plugins.resolve(plugins.BACKENDS, name)


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
class Library:
    """What an engine's library is called and how it is installed.

    It is probed in a process of its own, for native libraries do not always fail politely.
    """

    probe: str  # a statement that works if the library does
    distributions: tuple[str, ...]
    install: str


MOONCAKE = Library(
    "import mooncake.engine",
    ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine"),
    "pip install 'pdsim[mooncake]'; apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4",
)
MOONCAKE_CUDA = Library(
    "from mooncake import engine; engine.SUPPORT_INTRA_NVLINK or exit('Mooncake was built without intra-node NVLink')",
    MOONCAKE.distributions,
    "pip install mooncake-transfer-engine-cuda13==0.3.14 in place of any other (mooncake-transfer-engine for CUDA 12); "
    "apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers libnuma1 libcurl4",
)
NIXL = Library("import nixl_cu13", ("nixl-cu13",), "pip install --no-deps nixl-cu13==1.5.1")
_CUDA = Library("from backends.cuda.runtime import cudart; cudart()", ("torch",), "pip install 'pdsim[gpu]'")
MORI = Library(
    "from backends.engines.rocm import missing; (lacking := '; '.join(missing())) and exit(lacking); import mori.io",
    ("amd-mori", "amd-mori-nightly"),
    "pip install 'pdsim[mori]' on a machine with Python 3.12, glibc >= 2.38, ROCm 7 and an RDMA device",
)


@dataclass(frozen=True)
class _Engine:
    """What an engine needs: its library, and one of these `devices`."""

    library: Library
    devices: tuple[str, ...] = ()


_ENGINES = {
    "mooncake_tcp": _Engine(MOONCAKE),
    "mooncake_nvlink": _Engine(MOONCAKE_CUDA, ("gpu",)),
    "mooncake": _Engine(MOONCAKE, ("rdma",)),
    "nixl_tcp": _Engine(NIXL),
    "nixl_shm": _Engine(NIXL),
    "nixl": _Engine(NIXL, ("gpu", "rdma")),
    "nvlink": _Engine(_CUDA, ("gpu",)),
    "mori": _Engine(MORI),
    "mori_inline": _Engine(MORI),
}
_OTHERS = "use target=model, or a backend that moves host memory: mooncake_tcp, nixl_tcp, nixl_shm"


@cache
def diagnose(name: str) -> Diagnosis:
    """Return whether the engine *name* (as in ``conf/backend``) works here; a `ConfigError` for an unknown one.

    If not, the reason names everything that is missing.
    """
    engine = _engine(name)
    found = _installed(engine.library)
    lacking = []
    if error := _error_of(engine.library.probe):
        lacking.append((error, engine.library.install))
    useful = [device for device in devices() if device.name in engine.devices]
    if useful and not any(device.works for device in useful):
        lacking.append((" and ".join(device.reason for device in useful), _OTHERS))
    if not lacking:
        return Diagnosis(name, works=True, version=found)
    reasons, remedies = zip(*lacking, strict=True)
    return Diagnosis(name, works=False, version=found, reason=", and ".join(reasons), remedy="; ".join(remedies))


def diagnose_library(name: str) -> str:
    """Return why the library of engine *name* does not work here and what would help, or nothing if it does."""
    library = _engine(name).library
    error = _error_of(library.probe)
    return f"{error}: {library.install}" if error else ""


def _engine(name: str) -> _Engine:
    if name not in _ENGINES:
        raise ConfigError(f"no engine {name!r} among {', '.join(_ENGINES)}")
    return _ENGINES[name]


def engines() -> tuple[str, ...]:
    """Return the names that `diagnose` knows."""
    return tuple(_ENGINES)


def devices() -> tuple[Diagnosis, ...]:
    """Return what memory and networks this machine has: GPUs, RDMA devices, shared memory, cross-memory attach."""
    return (_gpus(), _rdma(), _shm(), _cma())


def gpu_count() -> int:
    """Return how many NVIDIA GPUs a process of this machine sees."""
    return len(_nvidia().splitlines())


def _installed(library: Library) -> str:
    for distribution in library.distributions:
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return ""


def _python(code: str) -> tuple[int, str, str]:
    """Run *code* in a new interpreter; return its exit status and what it wrote."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = {**os.environ, "UCX_MODULES": "^ib", "PYTHONPATH": path}
    command = [sys.executable, "-c", f"{code}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return 1, "", f"{code.splitlines()[0]!r} did not end within 60 s"
    return done.returncode, done.stdout, done.stderr


@cache
def _error_of(statement: str) -> str:
    """Return the last line of what *statement* says in a new process, or nothing if it works."""
    status, _, said = _python(statement)
    if not status:
        return ""
    lines = said.strip().splitlines()
    return lines[-1] if lines else f"{statement!r} ended with exit code {status}"


_LIST_GPUS = """
from ctypes import CDLL, byref, c_int, create_string_buffer
cuda, count, name = CDLL("libcuda.so.1"), c_int(), create_string_buffer(100)
status = cuda.cuInit(0) or cuda.cuDeviceGetCount(byref(count))
if status:
    raise SystemExit(f"the NVIDIA driver does not work (CUDA error {status})")
for number in range(count.value):
    cuda.cuDeviceGetName(name, 100, number)
    print(name.value.decode())
"""


@cache
def _nvidia() -> str:
    """Return the names of the NVIDIA GPUs, a line for each.  A process of its own asks, for CUDA does not fork."""
    status, names, _ = _python(_LIST_GPUS)
    return names if not status else ""


def _gpus() -> Diagnosis:
    if names := _nvidia().splitlines():
        return Diagnosis("gpu", works=True, version=f"{len(names)} x {names[0]}")
    if Path("/dev/kfd").exists():
        return Diagnosis("gpu", works=True, version="AMD GPUs (/dev/kfd)")
    why = "no NVIDIA driver and no /dev/kfd"
    if Path("/proc/driver/nvidia/version").exists():
        why = _error_of(_LIST_GPUS) or "the NVIDIA driver finds no GPU"
    return Diagnosis("gpu", works=False, reason=why, remedy="a machine with GPUs, and CUDA_VISIBLE_DEVICES not empty")


def _rdma() -> Diagnosis:
    folder = Path("/sys/class/infiniband")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if found:
        return Diagnosis("rdma", works=True, version=", ".join(found))
    remedy = "a machine with RDMA NICs and their drivers, or an emulated one (hw=rdma_guest)"
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
