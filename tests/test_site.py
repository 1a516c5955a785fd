"""The site of the documentation builds without a warning, and has what people look for."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra docs is not installed"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_pages_have_api_keys_and_messages(site):
    for page, words in (
        ("index.html", "pdsim simulates how KV cache moves"),
        ("docs/configuration.html", "kv.page_size"),
        ("docs/deployments.html", "--max-num-seqs"),
        ("docs/api.html", "Requests that failed raise nothing"),
        ("docs/messages.html", "must be &lt; engine.lease="),
    ):
        assert words in (site / page).read_text(encoding="utf-8"), page
