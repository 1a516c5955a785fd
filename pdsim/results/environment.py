# SPDX-License-Identifier: Apache-2.0
"""Where a run took place: versions, source tree and host.  Nothing here depends on the time of day.

It is asked for once in a process, and kept in ``run.json``, so that a result says what it takes to
get it again.
"""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from pdsim.version import __version__

__all__ = ["commit", "environment"]

_PACKAGES = (
    "hydra-core", "msgspec", "numpy", "pyarrow", "pyzmq", "simpy", "torch", "amd-mori",
    "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda",
    "nixl", "nixl-cu12", "nixl-cu13",
)  # fmt: skip


@cache
def environment() -> dict[str, Any]:
    """Return what a run took place in: ``pdsim``, ``packages``, ``git`` and ``host``.

    Versions of pdsim and of the packages that can change a number, as far as they are installed;
    the commit and whether the tree had changes, None outside a repository; processor, cores, kernel
    and Python.
    """
    return {"pdsim": __version__, "packages": _packages(), "git": _git(), "host": _host()}


def commit() -> str:
    """Return the commit that pdsim's files are of, such as ``"1a2b3c and changes"``, or ``"unknown"``."""
    git = environment()["git"] or {"commit": "unknown", "dirty": False}
    return str(git["commit"]) + (" and changes" if git["dirty"] else "")


def _packages() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git() -> dict[str, Any] | None:
    """Return the commit that pdsim's files belong to, or None if they are not under version control."""
    here = Path(__file__).resolve().parents[1]
    if _ask(here, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    state = (_ask(here, "status", "--porcelain=v2", "--branch", "--untracked-files=no") or "").splitlines()
    commit = next((line.split()[2] for line in state if line.startswith("# branch.oid ")), None)
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in state)}


def _ask(folder: Path, *arguments: str) -> str | None:
    """Return what git says in *folder*, None if it fails, is missing, or takes more than ten seconds."""
    try:
        done = subprocess.run(("git", "-C", str(folder), *arguments), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _host() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def _cpu() -> str:
    """Return the name of the processor, from Linux where it says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
