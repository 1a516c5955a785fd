# SPDX-License-Identifier: Apache-2.0
"""Compile the hot modules with mypyc when a wheel is built with ``PDSIM_COMPILE=1``; others are pure Python.

    PDSIM_COMPILE=1 pip install .

in a checkout, in any environment: pip fetches mypyc for the build alone.  It takes two to six minutes, a C compiler
and Python's headers; where one of these is missing, one line says which and what to install.

The sources are the same, and so are the results, bit for bit; `docs/performance.md` says what it brings.  A compiled
wheel has the sources too, for tracebacks.  Editable installs stay pure.

Not compiled: modules with `msgspec` structs, whose fields mypyc would blur; and classes with two bases.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "PDSIM_COMPILE"
OPTIMIZE = "PDSIM_COMPILE_LEVEL"  # of the C compiler: 0 to 3
MODULES = (
    "pdsim/transfer/batch.py",
    "pdsim/core/clock.py",
    "pdsim/sim/hosts.py",
    "pdsim/sim/endpoint.py",
    "pdsim/sim/memory.py",
    "pdsim/sim/posting.py",
    "pdsim/sim/network.py",
    "pdsim/sim/crossing.py",
    "pdsim/sim/sequence.py",
    "pdsim/kv/contents.py",
    "pdsim/kv/pages.py",
    "pdsim/kv/plan.py",
    "pdsim/kv/push.py",
    "pdsim/kv/receiver.py",
    "pdsim/compute/roofline.py",
    "pdsim/serving/block_manager.py",
    "pdsim/serving/decode.py",
    "pdsim/serving/forward_runs.py",
    "pdsim/serving/steps.py",
    "pdsim/serving/handoff/pull.py",
    "pdsim/serving/handoff/push.py",
    "pdsim/serving/load.py",
    "pdsim/serving/membership.py",
    "pdsim/serving/prefill.py",
    "pdsim/serving/rank_process.py",
    "pdsim/serving/router.py",
)
"""What runs for each event, message or transfer."""


class CompileHook(BuildHookInterface[Any]):
    """Adds the compiled modules to a wheel, if that was asked for."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what a build needs beside hatchling."""
        return (
            ["mypy[mypyc]>=1.15", "setuptools>=65", "numpy>=2", "simpy>=4.1", "msgspec>=0.19"] if _wanted() else []
        )

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the results put beside their sources."""
        if not _wanted() or self.target_name != "wheel" or version == "editable":
            return
        if why := lacking():
            self.app.abort(f"{SWITCH}=1: {why}; or leave {SWITCH} out, for a pdsim in pure Python")
        scratch = Path(tempfile.mkdtemp(prefix="pdsim-compile-"))
        self._scratch = scratch
        unwanted = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(Path(self.root, "pdsim"), scratch / "pdsim", ignore=unwanted)
        subprocess.run([sys.executable, str(Path(__file__).resolve())], cwd=scratch, check=True)
        results = [*scratch.glob("*.so"), *scratch.glob("pdsim/**/*.so")]  # what they share, and a module each
        included = {str(path): str(path.relative_to(scratch)) for path in sorted(results)}
        build_data["force_include"].update(included)
        build_data["infer_tag"] = True
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove what was only needed for the build."""
        if hasattr(self, "_scratch"):
            shutil.rmtree(self._scratch, ignore_errors=True)


def _wanted() -> bool:
    return os.environ.get(SWITCH, "") not in ("", "0")


def lacking() -> str:
    """Return what this machine lacks for a build, and how to get it; "" if it has a C compiler and the headers."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler {compiler!r}: install one (apt-get install gcc libc6-dev) or name it in CC"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else f"{header} is missing: install Python's headers (apt-get install python3-dev)"


def build() -> None:
    """Compile `MODULES` of the tree in the current directory, in place."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    # not the checkout's settings, which are for all; what a newer numpy's types find in pure modules ends no build
    Path("mypy.ini").write_text("[mypy]\nignore_missing_imports = true\nfollow_imports = silent\n")
    extensions = mypycify(
        [*MODULES], opt_level=os.environ.get(OPTIMIZE, "2"), debug_level="0", group_name="pdsim", verbose=False
    )
    command: Any = Distribution({"name": "pdsim", "ext_modules": extensions}).get_command_obj("build_ext")
    command.inplace = True
    command.build_temp = "objects"
    command.ensure_finalized()
    command.run()


if __name__ == "__main__":
    build()
