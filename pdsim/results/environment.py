# SPDX-License-Identifier: Apache-2.0
"""Where a run, or a measurement of samples, took place: versions, source tree and host.

`environment` does not depend on the time of day; ``run.json`` keeps it, so that a result says what it takes to get
it again.  `here` is what a file of samples says of itself, so that a later fit elsewhere says it too.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from pdsim.version import __version__

__all__ = ["commit", "environment", "here"]

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

    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _git() -> dict[str, Any] | None:
    here = Path(__file__).resolve().parents[1]
    if _ask(here, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    state = (_ask(here, "status", "--porcelain=v2", "--branch", "--untracked-files=no") or "").splitlines()
    commit = next((line.split()[2] for line in state if line.startswith("# branch.oid ")), None)
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in state)}


def _ask(folder: Path, *arguments: str) -> str | None:
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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def here() -> dict[str, str]:
    """Return date, commit, host, versions and, where there are any, the GPUs and their driver, of this machine now.

    Keys are those of the comments at the top of a file of samples: "date" as YYYY-MM-DD in UTC, "measured" with the
    commit, "host", "versions", and "gpus".  Takes as long as nvidia-smi does, at most 30 s.
    """
    where = environment()
    host = where["host"]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "measured": commit(),
        "host": f"{host['cpu']}, {host['cores']} cores, {host['kernel']}",
        "versions": ", ".join(f"{name} {version}" for name, version in where["packages"].items()),
        **_gpus(),
    }


def _gpus() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=30)
    lines = [line for line in done.stdout.split("\n") if line]
    return {"gpus": f"{len(lines)} x {'; '.join(sorted(set(lines)))}"} if lines else {}
