"""`examples/tiny_transport`: an endpoint that inherits nothing passes the core of the conformance suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).parents[1] / "examples" / "tiny_transport"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_transport_of_a_hundred_lines_passes_the_core(tmp_path: Path):
    assert len((TINY / "tiny_transport.py").read_text().splitlines()) <= 100
    target = tmp_path / "packages"
    offline = ("--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check")
    pip = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(target), str(TINY)]
    subprocess.run(pip, check=True, timeout=60)
    words = "-n 0 -q -p no:cacheprovider --pyargs pdsim.testing --backend tiny -m core"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *words.split()],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=tmp_path,
    )
    assert not done.returncode, done.stdout
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
