"""Packages of `examples/`, installed as anybody would install them, but without a network."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def installed(name: str, factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Install the package *name*; return what runs a module of Python beside it, in an empty folder."""
    target, folder = factory.mktemp("packages"), factory.mktemp("elsewhere")
    offline = ("--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check")
    pip = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(target), str(EXAMPLES / name)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", *words]
        environment = {**os.environ, "PYTHONPATH": str(target)}
        own = {"capture_output": True, "text": True, "timeout": 500, "check": False}
        return subprocess.run(command, env=environment, cwd=folder, **own)

    return run
