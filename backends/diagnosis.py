# SPDX-License-Identifier: Apache-2.0
"""Devices and libraries of this machine, each with a remedy where it does not work.

Native libraries are tried in a process of their own, since some abort, and CUDA does not survive a fork.  What a
process says is kept: this machine does not change while a command runs.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from backends.capabilities import EngineLibrary

_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Diagnosis:
    """The state of an engine or a device on this machine: works, or a reason and a remedy, empty if it works."""

    name: str
    works: bool
    version: str = ""  # if it is known
    reason: str = ""  # why not, in one line
    remedy: str = ""  # what to install or do


def devices() -> tuple[Diagnosis, ...]:
    """Return what memory and networks this machine has: GPUs, RDMA devices, shared memory, cross-memory attach."""
    return (_gpus(), _rdma(), _shm(), _cma())


def gpu_count() -> int:
    """Return how many NVIDIA GPUs a process of this machine sees."""
    return len(_nvidia())


def gpu_memory() -> int:
    """Return the bytes of the smallest NVIDIA GPU that a process of this machine sees; 0 without one."""
    return min((memory for memory, _ in _nvidia()), default=0)


def rdma_devices() -> list[str]:
    """Return the names of the RDMA devices that Linux has."""
    return sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []


def installed(library: EngineLibrary) -> str:
    """Return the distribution that provides *library* here, and its version, or nothing."""
    for distribution in library.distributions:
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return ""


def _python(code: str) -> tuple[int, str, str]:
    # A status of 1 and a message stand for a process that did not end within 60 s.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    # UCX is kept from loading its InfiniBand modules
    environment = {**os.environ, "UCX_MODULES": "^ib", "PYTHONPATH": path}
    command = [sys.executable, "-c", f"{code}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return 1, "", f"{code.splitlines()[0]!r} did not end within 60 s"
    return done.returncode, done.stdout, done.stderr


@cache
def error_of(statement: str) -> str:
    """Return the last line of the error of *statement* in a new process, or nothing if it works.

    Runs for up to 60 s, once for each statement in this process.
    """
    status, _, said = _python(statement)
    if not status:
        return ""
    lines = said.strip().splitlines()
    return lines[-1] if lines else f"{statement!r} ended with exit code {status}"


_LIST_GPUS = """
from ctypes import CDLL, byref, c_int, c_size_t, create_string_buffer
cuda, count, name, memory = CDLL("libcuda.so.1"), c_int(), create_string_buffer(100), c_size_t()
status = cuda.cuInit(0) or cuda.cuDeviceGetCount(byref(count))
if status:
    raise SystemExit(f"the NVIDIA driver does not work (CUDA error {status})")
for number in range(count.value):
    cuda.cuDeviceGetName(name, 100, number)
    cuda.cuDeviceTotalMem_v2(byref(memory), number)
    print(memory.value, name.value.decode())
"""


@cache
def _nvidia() -> list[tuple[int, str]]:
    # bytes and name of each GPU
    status, lines, _ = _python(_LIST_GPUS)
    gpus = [] if status else [line.split(" ", 1) for line in lines.splitlines()]
    return [(int(memory), name) for memory, name in gpus]


def _gpus() -> Diagnosis:
    if gpus := _nvidia():
        return Diagnosis("gpu", True, f"{len(gpus)} x {gpus[0][1]}")
    if Path("/dev/kfd").exists():
        return Diagnosis("gpu", True, "AMD GPUs (/dev/kfd)")
    why = "no NVIDIA driver and no /dev/kfd"
    if Path("/proc/driver/nvidia/version").exists():
        why = error_of(_LIST_GPUS) or "the NVIDIA driver finds no GPU"
    return Diagnosis("gpu", False, "", why, "a machine with GPUs, and CUDA_VISIBLE_DEVICES not empty")


def _rdma() -> Diagnosis:
    if names := rdma_devices():
        return Diagnosis("rdma", True, ", ".join(names))
    remedy = "a machine with RDMA NICs and their drivers, or an emulated one (hw=rdma_guest)"
    return Diagnosis("rdma", False, "", f"no device in {_INFINIBAND}", remedy)


def _shm() -> Diagnosis:
    folder = Path("/dev/shm")  # noqa: S108 it is what is looked for
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Diagnosis("shm", False, "", f"{folder} cannot be written to", f"mount a tmpfs at {folder}")
    return Diagnosis("shm", True, f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free in {folder}")


def _cma() -> Diagnosis:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    value = scope.read_text().strip() if scope.exists() else "0"
    if value == "0" or os.geteuid() == 0:
        return Diagnosis("cma", True, f"ptrace_scope {value}" if scope.exists() else "")
    reason = f"{scope} is {value}: UCX copies through shared memory instead, which is slower"
    return Diagnosis("cma", False, "", reason, "sysctl kernel.yama.ptrace_scope=0")
