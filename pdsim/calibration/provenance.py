# SPDX-License-Identifier: Apache-2.0
"""Where and when samples were measured, which they say of themselves, so that a later fit elsewhere says it too."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime

from pdsim.results.environment import commit, environment

__all__ = ["here"]


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
    """Return the GPUs of this host and their driver, as nvidia-smi says, or nothing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=30)
    lines = [line for line in done.stdout.split("\n") if line]
    return {"gpus": f"{len(lines)} x {'; '.join(sorted(set(lines)))}"} if lines else {}
