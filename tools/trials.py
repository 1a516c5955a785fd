# SPDX-License-Identifier: Apache-2.0
"""Run pytest many times, each in a fork of one process that has imported all libraries, but nothing of this project.

To start pytest and to import what pdsim needs takes two CPU seconds, longer than most mutants live.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

LIBRARIES = (
    *(
        "pytest",
        "_pytest.config",
        "xdist.plugin",
        "pytest_timeout",
        "hypothesis.strategies",
        "numpy.random",
        "simpy",
    ),
    *(
        "msgspec",
        "zmq",
        "pyarrow.parquet",
        "hydra.compose",
        "hydra.utils",
        "hydra.test_utils.test_utils",
        "rich.table",
    ),
)
OPTIONS = (
    *("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "timeout=60"),
    *("--no-header", "--tb=no", "--hypothesis-profile=ci"),  # ci: always the same examples
)
HANG = 20  # CPU seconds of a process, after which it hangs
WALL = 300  # seconds of a run, whatever it does
MEMORY = 8 << 30


class Runner:
    """Runs pytest in a copy of the tree."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        environment = os.environ | {"PYTHONPATH": str(copy)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], cwd=copy, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, tests: list[str]) -> tuple[int, str]:
        """Return the exit status, negative if a signal ended it, and the output."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([f"--basetemp={self.copy}.tmp", *tests]) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return os.waitstatus_to_exitcode(status), Path(f"{self.copy}.out").read_text(errors="replace")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Run pytest in the current folder for each line of arguments, and answer with the status of its process."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in importlib.import_module("_pytest.config").default_plugins:
        importlib.import_module(f"_pytest.{name}")
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        process = os.fork()
        if not process:
            _child(json.loads(line))
        deadline = time.monotonic() + WALL
        while not (status := os.waitpid(process, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what the tests started
        sys.stdout.write(f"{status[1]}\n")
        sys.stdout.flush()


def _child(arguments: list[str]) -> None:
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (HANG, HANG + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    output = os.open(f"{Path.cwd()}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, stream)
    sys.path[0] = str(Path.cwd())
    status = 3
    try:
        status = int(pytest.main([*OPTIONS, *arguments]))
        sys.stdout.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve()
