"""The site of the documentation builds without a warning, and its search finds what people type."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, Browser

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


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_search_finds_a_key_a_message_and_a_flag(site, tmp_path):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser(tmp_path)
    try:
        for typed, page in (
            ("kv.page_size", "docs/configuration.html"),
            ("max-num-seqs", "docs/deployments.html"),  # a leading dash excludes a word
            ("is not the folder of a run", "docs/messages.html"),
        ):
            browser.call("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/index.html?q={typed}")
            links = "[...document.querySelectorAll('.md-search-result__link')].map((each) => each.href)"
            browser.wait(f"{links}.some((each) => each.includes('{page}'))")
    finally:
        browser.close()
        server.shutdown()
        server.server_close()
